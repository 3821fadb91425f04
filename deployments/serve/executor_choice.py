"""Which executors a deployment may ask for: `auto` takes torch where the GPU is, and emulates it elsewhere."""

from typing import Literal

ExecutorChoice = Literal["auto", "torch", "emulated"]
