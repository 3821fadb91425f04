"""The end of a request: it was executed as a row of a batch, or refused. Both are ordinary values, never exceptions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from tenuto.deployments.wire.tensors import OutputTensor, RowOutput, bytes_row
from tenuto.outcome import Outcome, Rule
from tenuto.profiles.networks.catalogue import BYTES


class Loop(StrEnum):
    """The loop that could have saved a request which was refused or late; see docs/reference/scheduling.md."""

    MARGIN = "margin"
    MEASURED_TIMES = "measured times"
    LOSSES = "recent losses"
    NONE = ""


@dataclass(slots=True, eq=False)
class Executed:
    """The rows of one model in a batch that ran. Times are ms on the clock of the process that sent the batch.

    `started_ms` is NaN when the gpu-let runs on another machine, which has another clock. `outputs` describes the
    model's outputs; `data` holds, for each output, the bytes of all rows.
    """

    batch_size: int
    gpulet: str
    emulated: bool
    sent_ms: float
    started_ms: float
    gpulet_queue_ms: float
    execution_ms: float
    rows: int
    outputs: Sequence[RowOutput]
    data: Sequence[memoryview]
    planned_ms: float = math.nan  # what the scheduler expected of the execution
    shown: Any = None  # the part of the answers that all its rows have in common, once it was made

    def tensors(self, row: int) -> list[OutputTensor]:
        """Return the outputs of one request as views; nothing is copied."""
        return [
            OutputTensor(
                name,
                dtype,
                shape,
                data[row * size : (row + 1) * size] if dtype != BYTES else bytes_row(data, row * size),
                axis,
            )
            for (name, dtype, shape, size, axis), data in zip(self.outputs, self.data, strict=True)
        ]


def late_loop(execution_ms: float, planned_ms: float, late_ms: float) -> Loop:
    """Return which loop could have saved an answer that was `late_ms` late. When the batch ran longer than expected by
    that much, it is the loop that learns execution times; otherwise the one that keeps a margin for everything else."""
    return Loop.MEASURED_TIMES if execution_ms - planned_ms >= late_ms else Loop.MARGIN


def _http_status(outcome: Outcome, rule: Rule) -> int:
    """Return the status of the HTTP answer. A model's error gets 500, which no proxy sends again."""
    return 500 if rule is Rule.RAISED else 400 if rule is Rule.INPUT else outcome.http_status


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """A request that was not executed, or whose execution failed; `reason` says why and what to do."""

    outcome: Outcome
    reason: str
    retry_after_s: float | None = None
    gpulet: str = ""
    rule: Rule = Rule.NONE
    loop: Loop = Loop.NONE

    @property
    def http_status(self) -> int:
        """The status of the HTTP answer."""
        return _http_status(self.outcome, self.rule)


@dataclass(slots=True)
class Answer:
    """The end of one request by itself, with its times in ms.

    `batching_ms` is the wait for a batch (arrival to dispatch), `gpulet_queue_ms` the wait at the gpu-let, and
    `execution_ms` the batch's run. `start_ms` is the start of the batch, counted from the request's arrival (NaN: it
    was not executed, or on a machine with another clock). `stage_ms`: of an application, how long each stage took from
    when it was due, of those that are complete.
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
    rule: Rule = Rule.NONE
    stage_ms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_row(cls, arrived_ms: float, executed: Executed, row: int) -> Answer:
        """Return the answer of one row of a batch."""
        return cls(
            Outcome.OK,
            executed.tensors(row),
            executed.batch_size,
            executed.gpulet,
            executed.sent_ms - arrived_ms,
            executed.gpulet_queue_ms,
            executed.execution_ms,
            executed.emulated,
            start_ms=executed.started_ms - arrived_ms,
        )

    @classmethod
    def of_refusal(cls, waited_ms: float, refused: Refused) -> Answer:
        """Return the answer of a request that was not executed."""
        return cls(
            refused.outcome,
            gpulet=refused.gpulet,
            batching_ms=waited_ms,
            retry_after_s=refused.retry_after_s,
            reason=refused.reason,
            rule=refused.rule,
        )

    @property
    def http_status(self) -> int:
        """The status of the HTTP answer."""
        return _http_status(self.outcome, self.rule)

    @property
    def queue_ms(self) -> float:
        """All waiting between arrival and execution."""
        return self.batching_ms + self.gpulet_queue_ms
