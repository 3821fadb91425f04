"""What runs a batch: one protocol for PyTorch on CPU, PyTorch on CUDA, and the emulated GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["Arrays", "Executor"]

Arrays = dict[str, "np.ndarray[Any, Any]"]


class Executor(Protocol):
    """Owns the device of one gpu-let. Every method is called on one worker thread, never on an event loop.

    `device` is what the batches really run on: `cpu`, `cuda:0 NVIDIA …`, or `emulated v100`.
    """

    device: str

    def load(
        self,
        replica_name: str,
        source: str | None,
        *,
        weights_path: str | None,
        options: Mapping[str, Any],
        batch_sizes: Sequence[int],
    ) -> None:
        """Build a model and warm up every batch size, so that the first request is not the slowest."""

    def unload(self, replica_name: str) -> None:
        """Release a model; one that is not loaded is ignored."""

    def signature(self, replica_name: str) -> dict[str, Any]:
        """Return a loaded model's signature as plain data: `inputs` and `outputs` with `name`, `dtype` (numpy) and
        `shape` (without the batch dimension), and whatever preprocessing needs."""

    def run(self, replica_name: str, inputs: Arrays, batch_size: int) -> tuple[Arrays, float]:
        """Run one batch and return its outputs and the execution time in ms. Inputs have a leading batch dimension
        and may be backed by read-only buffers."""

    def load_merged(self, name: str, members: Sequence[Mapping[str, Any]], batch_sizes: Sequence[int]) -> None:
        """Build several models as one program and warm up joint batches of these sizes.

        `members` are their entries: `name`, `source`, `weights_path`, `options`; and `latency` and `slowdown`, those of
        the group, for an emulated GPU. `unload` releases the group by its name, `signature` knows the members.
        """

    def run_merged(
        self, name: str, inputs: Mapping[str, Arrays], sizes: Mapping[str, int]
    ) -> tuple[dict[str, Arrays], float]:
        """Run one joint batch, `sizes` rows of each member that has any; return their outputs and the time in ms."""

    def merged(self) -> dict[str, Any]:
        """Return facts about each group for the status."""

    def sm_count(self) -> int | None:
        """Return the multiprocessors this process may use, or None where there are none to count."""

    def memory_mib(self) -> float | None:
        """Return the device memory in use, or None where the device has no ledger."""

    def close(self) -> None:
        """Release the device."""
