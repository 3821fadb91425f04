"""What a submitted request comes back as: an ordinary value with one outcome, never an exception."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from tenuto.outcome import Outcome

__all__ = ["Answer", "OutputTensor"]


class OutputTensor(NamedTuple):
    """One output of one request: name, numpy dtype name, shape without the batch dimension, raw little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(slots=True)
class Answer:
    """The end of one request, with its times in ms.

    `batching_ms` is the wait for a batch (received to dispatched), `gpulet_queue_ms` the wait at the gpu-let,
    `execution_ms` the batch's run, `start_ms` its start, counted from the request's receipt (NaN: not executed, or on
    a node with another clock). `reason` says why it is not ok and what to do.
    """

    outcome: Outcome
    outputs: list[OutputTensor] = field(default_factory=list)
    batch_size: int = 0
    gpulet: str = ""
    batching_ms: float = 0.0
    gpulet_queue_ms: float = 0.0
    execution_ms: float = 0.0
    emulated: bool = False
    retry_after_s: float | None = None
    reason: str = ""
    start_ms: float = math.nan

    @property
    def queue_ms(self) -> float:
        """All waiting between arrival and execution."""
        return self.batching_ms + self.gpulet_queue_ms
