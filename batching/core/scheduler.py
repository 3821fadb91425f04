"""What every scheduler is: events go in with an explicit time, decisions come out; no I/O, no clock, no randomness.

The virtual-time driver (`tenuto.batching.virtual.simulator`) and the asyncio driver of the dispatcher run the same
object, so what is simulated is what is served. All times are float milliseconds on one axis whose origin the driver
chooses. The contract with a driver:

* Every call carries `now_ms`, which never decreases. After any call the driver takes `drain()` and carries the
  decisions out, then sleeps until the next event or `next_wake_ms`, whichever is first, and calls `wake`.
* Events of one instant come in the order completions, arrivals, wake. A scheduler may decide in any call; if it wants
  all events of the instant first it sets `next_wake_ms = now_ms`.
* A request names its model. Its id is chosen by the driver and unique among requests in the scheduler. Each id comes
  out exactly once, in a `Dispatch`, a `Drop` or a `Reject` (again in a later `Dispatch` only after `Preempt`), unless
  it was cancelled.
* What is dispatched is a batch of a program, to a gpu-let that hosts it. The gpu-let is busy from its `Dispatch` to its
  `batch_done`; one `batch_done` per `Dispatch`, oldest first (none for a preempted batch or one lost with its gpu-let).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from mypy_extensions import mypyc_attr

from tenuto.batching.core.system import INF, ByFields, NetworkDelay, System
from tenuto.batching.core.told import SchedulerStatus
from tenuto.errors import InvalidInputError
from tenuto.options import options_of_dataclass, read_options


class Dispatch(NamedTuple):
    """Run these requests as one batch of that program on that gpu-let.

    `start_ms` and `finish_ms` are the scheduler's estimates (neighbours included). Dispatches to one gpu-let run in the
    order given; with a network delay one may be given while the gpu-let still runs the batch before.
    """

    gpulet: int
    program: int
    request_ids: Sequence[int]
    start_ms: float
    finish_ms: float


class Drop(NamedTuple):
    """These requests will never be executed: their deadline cannot be met, or they were given up. Outcome `expired`."""

    program: int
    request_ids: Sequence[int]


class Reject(NamedTuple):
    """These requests are turned away on arrival, as their model exceeds its rate. Outcome `rejected`."""

    program: int
    request_ids: Sequence[int]
    retry_after_ms: float


class Preempt(NamedTuple):
    """Abort the batch running on that gpu-let; its work is lost. The scheduler has its requests back in its queue."""

    gpulet: int


Refusal = Drop | Reject
Decision = Dispatch | Drop | Reject | Preempt


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SchedulerOptions(ByFields):
    """Base of a scheduler's options; the fields of a subclass are what `--option k=v` accepts, with their defaults."""

    @classmethod
    def parse(cls, scheduler: str, raw: Mapping[str, Any]) -> SchedulerOptions:
        """Build from option names and values, where strings are converted to the type of the default.

        A field with `metadata={"choices": (...)}` takes one of these words only; `{"minimum": x}` bounds numbers.

        Raises:
            InvalidInputError: unknown option (lists the known ones) or unusable value; all at once.
        """
        return cls(**read_options(f"scheduler '{scheduler}'", options_of_dataclass(cls), raw))


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler(ABC):
    """The core every scheduler implements; the contract is this module's."""

    name: ClassVar[str]
    summary: ClassVar[str]
    options_type: ClassVar[type[SchedulerOptions]] = SchedulerOptions
    preempts: ClassVar[bool] = False  # needs a driver that can abort a running batch

    system: System
    next_wake_ms: float  # inf: only an event can change anything
    decisions: list[Decision]

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:  # noqa: ARG002
        """Build for a fixed set of models, programs and gpu-lets.

        Raises:
            InvalidInputError: numbers that are not finite and positive.
        """
        problems = system.problems()
        if problems:
            raise InvalidInputError(problems)
        self.system = system
        self.next_wake_ms = INF
        self.decisions = []

    def drain(self) -> list[Decision]:
        """Return the decisions since the last call, oldest first."""
        decisions = self.decisions
        self.decisions = []
        return decisions

    def drain_refusals(self) -> list[Refusal]:
        """Return what was given up or turned away since the last call; what else was decided is left for `drain`."""
        refusals = [decision for decision in self.decisions if isinstance(decision, Drop | Reject)]
        if refusals:
            self.decisions = [decision for decision in self.decisions if not isinstance(decision, Drop | Reject)]
        return refusals

    @abstractmethod
    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        """Take one request; its answer must be with the client at `deadline_ms`. One in the past is dropped at once."""

    @abstractmethod
    def cancel(self, now_ms: float, model: int, request_id: int) -> bool:
        """Forget a queued request; False if it is not queued (already dispatched, dropped or unknown)."""

    @abstractmethod
    def batch_done(self, now_ms: float, gpulet: int) -> None:
        """The oldest batch dispatched to the gpu-let has ended."""

    @abstractmethod
    def wake(self, now_ms: float) -> None:
        """Do what is due; called at `next_wake_ms` or later (timers are never early, and may be late)."""

    @abstractmethod
    def gpulet_lost(self, now_ms: float, gpulet: int) -> None:
        """Stop using a gpu-let; what ran there is lost and the driver's to answer or to add again."""

    @abstractmethod
    def gpulet_back(self, now_ms: float, gpulet: int) -> None:
        """Use a gpu-let again; it is idle."""

    @abstractmethod
    def queued(self, program: int) -> int:
        """Return how many requests of a program wait for a batch."""

    # A scheduler that plans with nothing may leave the rest as it is.

    def update_latency(self, program: int, gpulet: int, factor: float) -> None:  # noqa: B027
        """Plan with `factor` times the system's latency for this program on this gpu-let, as was measured online."""

    def update_network(self, network: NetworkDelay) -> None:  # noqa: B027
        """Budget these delays from now on."""

    def status(self) -> SchedulerStatus | None:
        """Return, for operators, what it chose lately and what it expects of that; None where it chooses nothing."""
        return None
