"""What every scheduler is: events go in with an explicit time, decisions come out; no I/O, no clock, no randomness.

The virtual-time driver (`tenuto.batching.virtual.simulator`) and the asyncio driver of the dispatcher run the same
object, so what is simulated is what is served. All times are float milliseconds on one axis whose origin the driver
chooses. The contract with a driver:

* Every call carries `now_ms`, which never decreases. After any call the driver takes `drain()` and carries the
  decisions out, then sleeps until the next event or `next_wake_ms`, whichever is first, and calls `wake`.
* Events of one instant come in the order completions, arrivals, wake. A scheduler may decide in any call. When it wants
  all events of the instant first, it sets `next_wake_ms = now_ms`.
* A request names its model. The driver chooses its id, which is unique among the requests in the scheduler. Each id
  comes out exactly once, in a `Dispatch`, a `Drop` or a `Reject`, unless it was cancelled. After `Preempt` it comes out
  again in a later `Dispatch`.
* A `Dispatch` sends a batch of one program to a gpu-let that hosts it. The gpu-let is busy from its `Dispatch` to its
  `batch_done`. There is one `batch_done` per `Dispatch`, oldest first, but none for a batch that was preempted or lost
  with its gpu-let.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from mypy_extensions import mypyc_attr

from tenuto.batching.core.scheduler_status import SchedulerStatus
from tenuto.batching.core.step_scheduler import StepOrder
from tenuto.batching.core.system import INF, ByFields, GeneratingGpulet, NetworkDelay, System
from tenuto.options import options_of_dataclass, read_options


class Dispatch(NamedTuple):
    """Run these requests as one batch of this program on this gpu-let.

    `start_ms` and `finish_ms` are the scheduler's estimates, with the slowdown by neighbours. Dispatches to one gpu-let
    run in the order given. With a network delay, a batch may be dispatched while its gpu-let still runs another.
    """

    gpulet: int
    program: int
    request_ids: Sequence[int]
    start_ms: float
    finish_ms: float


class Drop(NamedTuple):
    """Never execute these requests: their deadline cannot be met, or they were given up. Outcome `expired`."""

    program: int
    request_ids: Sequence[int]


class Reject(NamedTuple):
    """Turn these requests away on arrival, as their model exceeds its planned rate. Outcome `rejected`."""

    program: int
    request_ids: Sequence[int]
    retry_after_ms: float


class Preempt(NamedTuple):
    """Abort the batch that runs on this gpu-let; its work is lost. The scheduler has put its requests back in a
    queue."""

    gpulet: int


Refusal = Drop | Reject
Decision = Dispatch | Drop | Reject | Preempt


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SchedulerOptions(ByFields):
    """Base of a scheduler's options; the fields of a subclass are what `--option k=v` accepts, with their defaults."""

    @classmethod
    def parse(cls, scheduler: str, raw: Mapping[str, Any]) -> SchedulerOptions:
        """Build from option names and values. Strings are converted to the type of the default.

        A field with `metadata={"choices": (...)}` takes one of these words only; `{"minimum": x}` bounds numbers.

        Raises:
            InvalidInputError: unknown options (it lists the known ones) and unusable values, all at once.
        """
        return cls(**read_options(f"scheduler '{scheduler}'", options_of_dataclass(cls), raw))


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler(ABC):
    """The core every scheduler implements; the contract is this module's."""

    name: ClassVar[str]
    summary: ClassVar[str]
    options_type: ClassVar[type[SchedulerOptions]] = SchedulerOptions
    preempts: ClassVar[bool] = False  # True: needs a driver that can abort a running batch
    takes_offline: ClassVar[bool] = False  # True: it has `add_offline`

    system: System
    next_wake_ms: float  # inf: only an event can change anything
    decisions: list[Decision]

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:  # noqa: ARG002
        """Build for a fixed set of models, programs and gpu-lets."""
        self.system = system
        self.next_wake_ms = INF
        self.decisions = []

    def drain(self) -> list[Decision]:
        """Return the decisions since the last call, oldest first."""
        decisions = self.decisions
        self.decisions = []
        return decisions

    def drain_refusals(self) -> list[Refusal]:
        """Return the requests given up or turned away since the last call; `drain` returns the other decisions."""
        refusals = [decision for decision in self.decisions if isinstance(decision, Drop | Reject)]
        if refusals:
            self.decisions = [decision for decision in self.decisions if not isinstance(decision, Drop | Reject)]
        return refusals

    @abstractmethod
    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        """Take one request, whose answer must reach the client by `deadline_ms`. When that is past, it is dropped."""

    @abstractmethod
    def cancel(self, now_ms: float, model: int, request_id: int) -> bool:
        """Forget a queued request; False if it is not queued (already dispatched, dropped or unknown)."""

    @abstractmethod
    def batch_done(self, now_ms: float, gpulet: int) -> None:
        """Take note that the oldest batch dispatched to the gpu-let has ended."""

    @abstractmethod
    def wake(self, now_ms: float) -> None:
        """Do what is due; called at `next_wake_ms` or later (timers are never early, and may be late)."""

    @abstractmethod
    def gpulet_lost(self, now_ms: float, gpulet: int) -> None:
        """Stop using a gpu-let. Its batches are lost: the driver answers their requests or adds them again."""

    @abstractmethod
    def gpulet_back(self, now_ms: float, gpulet: int) -> None:
        """Use a gpu-let again; it is idle."""

    @abstractmethod
    def queued(self, program: int) -> int:
        """Return how many requests of a program wait for a batch."""

    # A scheduler that plans with no measured numbers, and runs no offline work, need not override the rest.

    def add_offline(self, now_ms: float, model: int, request_id: int, deadline_ms: float, client: str = "") -> None:
        """Take a request that runs only in time that no other one loses, or is dropped at its deadline (inf: never).
        Clients take turns."""
        raise NotImplementedError(f"the scheduler '{self.name}' runs no offline work")

    def queued_offline(self, program: int) -> int:  # noqa: ARG002
        """Return how many offline requests of a program wait for a batch."""
        return 0

    def step_order(self, gpulet: GeneratingGpulet) -> StepOrder | None:  # noqa: ARG002
        """Return the order of steps of a gpu-let that generates; None: vLLM's."""
        return None

    def update_latency(self, program: int, gpulet: int, factor: float) -> None:  # noqa: B027
        """Plan with `factor` times the system's latency for this program on this gpu-let, as measured while serving."""

    def update_network(self, network: NetworkDelay) -> None:  # noqa: B027
        """Budget these delays from now on."""

    def status(self) -> SchedulerStatus | None:
        """Return, for operators, which settings the scheduler chose and what they should gain; None: it chooses
        none."""
        return None
