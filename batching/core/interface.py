"""What every scheduler is: events go in with an explicit time, decisions come out; no I/O, no clock, no randomness.

The virtual-time driver (`tenuto.batching.virtual.simulator`) and the asyncio driver of the dispatcher run the same
object, so what is simulated is what is served. All times are float milliseconds on one axis whose origin the driver
chooses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tenuto.errors import InvalidInputError, Problem
from tenuto.options import options_of_dataclass, read_options

__all__ = [
    "TIME_TOLERANCE_MS",
    "Decision",
    "Dispatch",
    "Drop",
    "GpuletSpec",
    "Host",
    "NetworkDelay",
    "Preempt",
    "Scheduler",
    "SchedulerModel",
    "SchedulerOptions",
    "Setup",
]

INF = math.inf

# A nanosecond: sums of times in different order may differ by rounding, and a deadline met exactly is met.
TIME_TOLERANCE_MS = 1e-6


@dataclass(frozen=True, slots=True)
class SchedulerModel:
    """A model as the scheduler sees it. `rate_rps` is a first guess of the offered rate (None: unknown)."""

    name: str
    slo_ms: float
    rate_rps: float | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Host:
    """What one model costs on one gpu-let.

    `latency_ms[b]` is l(b) alone on the GPU; index 0 is 0.0 and the last index is the largest batch that may run there.
    `slowdown` (>= 1) is what the neighbours on the same GPU cost on top while they run.
    """

    latency_ms: tuple[float, ...]
    slowdown: float = 1.0

    @property
    def max_batch(self) -> int:
        """The largest batch that may be dispatched here."""
        return len(self.latency_ms) - 1

    def planned_ms(self) -> list[float]:
        """Return l(b) with the neighbours' slowdown, by batch size: what a scheduler should plan with."""
        return [latency * self.slowdown for latency in self.latency_ms]


@dataclass(frozen=True, slots=True)
class GpuletSpec:
    """A gpu-let: its id, the GPU it is on, and the models it holds by model index.

    Identical gpu-lets should share one `hosts` object; schedulers group gpu-lets by it.
    """

    id: str
    gpu: str
    hosts: Mapping[int, Host]


@dataclass(frozen=True, slots=True)
class NetworkDelay:
    """Delays to budget, in ms (Symphony, appendix D).

    A batch of b that is dispatched now can start after `ctrl_ms + data_ms_per_request * b`; its answer reaches the
    client `response_ms` after its end.
    """

    ctrl_ms: float = 0.0
    data_ms_per_request: float = 0.0
    response_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a scheduler is built from. The order of `gpulets` is their rank: the smallest index is preferred.

    A scheduler has one queue per entry of `models`. Models that run as one merged program share the queue of their
    group: the last entries of `models` are those queues, `groups` holds their members, and the members themselves have
    no host. A driver gives a request to `queue_of` its model; for the scheduler a group is a model like any other.
    """

    models: tuple[SchedulerModel, ...]
    gpulets: tuple[GpuletSpec, ...]
    network: NetworkDelay = NetworkDelay()
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def requested(self) -> tuple[SchedulerModel, ...]:
        """The models that clients ask for: all but the queues of groups."""
        return self.models[: len(self.models) - len(self.groups)]

    @property
    def queue_of(self) -> tuple[int, ...]:
        """The queue of every requested model, by index: its own, or its group's."""
        queues = list(range(len(self.requested)))
        for position, members in enumerate(self.groups, len(queues)):
            for member in members:
                queues[member] = position
        return tuple(queues)

    @property
    def hosted(self) -> frozenset[int]:
        """The requested models that some gpu-let can run, by index."""
        held = {index for hosts in {id(g.hosts): g.hosts for g in self.gpulets}.values() for index in hosts}
        return frozenset(model for model, queue in enumerate(self.queue_of) if queue in held)

    def problems(self) -> list[Problem]:
        """Return what is wrong with the numbers: SLOs, rates and latencies that are not finite and positive."""
        found = []
        for index, model in enumerate(self.models):
            if not (math.isfinite(model.slo_ms) and model.slo_ms > 0):
                found.append(
                    Problem(
                        f"models.{index}.slo_ms", model.slo_ms, "must be a positive number of ms", "Give a larger SLO."
                    )
                )
            if model.rate_rps is not None and not (math.isfinite(model.rate_rps) and model.rate_rps > 0):
                found.append(
                    Problem(
                        f"models.{index}.rate_rps", model.rate_rps, "must be a positive rate", "Give a larger rate."
                    )
                )
        seen: set[int] = set()
        for gpulet in self.gpulets:
            if id(gpulet.hosts) in seen:
                continue
            seen.add(id(gpulet.hosts))
            for index, host in gpulet.hosts.items():
                where = f"gpulets.{gpulet.id}.{self.models[index].name}"
                if host.max_batch < 1 or not all(math.isfinite(x) and x > 0 for x in host.latency_ms[1:]):
                    found.append(
                        Problem(
                            where,
                            host.latency_ms[:4],
                            "latencies must be positive numbers for batch 1 and up",
                            "Correct the profile.",
                        )
                    )
                if not host.slowdown >= 1.0 or not math.isfinite(host.slowdown):
                    found.append(
                        Problem(where, host.slowdown, "slowdown must be a number of at least 1", "Use 1.0 for none.")
                    )
        for key in ("ctrl_ms", "data_ms_per_request", "response_ms"):
            value = getattr(self.network, key)
            if not (math.isfinite(value) and value >= 0):
                found.append(Problem(f"network.{key}", value, "must be a delay of at least 0 ms", "Give 0 for none."))
        return found

    def unserveable(self) -> list[Problem]:
        """Return one problem per hosted model whose SLO not even a batch of one meets on any of its gpu-lets."""
        network = self.network
        fixed_ms = network.ctrl_ms + network.data_ms_per_request + network.response_ms
        fastest: dict[int, float] = {}
        for hosts in {id(gpulet.hosts): gpulet.hosts for gpulet in self.gpulets}.values():
            for index, host in hosts.items():
                fastest[index] = min(fastest.get(index, INF), host.latency_ms[1] * host.slowdown)
        return [
            Problem(
                f"models.{self.models[index].name}.slo_ms",
                self.models[index].slo_ms,
                f"unserveable: a batch of one takes {latency + fixed_ms:g} ms at best",
                "Raise the SLO, use a faster GPU or a larger share, or remove the model.",
            )
            for index, latency in sorted(fastest.items())
            if latency + fixed_ms > self.models[index].slo_ms
        ]


class Dispatch(NamedTuple):
    """Run these requests as one batch on that gpu-let.

    `start_ms` and `finish_ms` are the scheduler's estimates (neighbours included). Dispatches to one gpu-let run in the
    order given; with a network delay one may be given while the gpu-let still runs the batch before.
    """

    gpulet: int
    model: int
    request_ids: Sequence[int]
    start_ms: float
    finish_ms: float


class Drop(NamedTuple):
    """These requests will never be executed: their deadline cannot be met, or they were given up. Outcome `expired`."""

    model: int
    request_ids: Sequence[int]


class Preempt(NamedTuple):
    """Abort the batch running on that gpu-let; its work is lost. The scheduler has its requests back in its queue."""

    gpulet: int


Decision = Dispatch | Drop | Preempt


@dataclass(frozen=True)
class SchedulerOptions:
    """Base of a scheduler's options; the fields of a subclass are what `--option k=v` accepts, with their defaults."""

    @classmethod
    def parse(cls, scheduler: str, raw: Mapping[str, Any]) -> SchedulerOptions:
        """Build from option names and values, where strings are converted to the type of the default.

        A field with `metadata={"choices": (...)}` takes one of these words only; `{"minimum": x}` bounds numbers.

        Raises:
            InvalidInputError: unknown option (lists the known ones) or unusable value; all at once.
        """
        return cls(**read_options(f"scheduler '{scheduler}'", options_of_dataclass(cls), raw))


class Scheduler(ABC):
    """The core every scheduler implements.

    Contract with the driver:

    * Every call carries `now_ms`, which never decreases. After any call the driver takes `drain()` and carries the
      decisions out, then sleeps until the next event or `next_wake_ms`, whichever is first, and calls `wake`.
    * Events of one instant come in the order completions, arrivals, wake. A scheduler may decide in any call; if it
      wants all events of the instant first it sets `next_wake_ms = now_ms`.
    * Request ids are chosen by the driver and unique among requests in the scheduler. Each id comes out exactly once,
      in a `Dispatch` or a `Drop` (again in a later `Dispatch` only after `Preempt`), unless it was cancelled.
    * A gpu-let is busy from its `Dispatch` to its `batch_done`; one `batch_done` per `Dispatch`, oldest first (none for
      a preempted batch or one lost with its gpu-let).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options_type: ClassVar[type[SchedulerOptions]] = SchedulerOptions
    preempts: ClassVar[bool] = False  # needs a driver that can abort a running batch

    setup: Setup
    next_wake_ms: float  # inf: only an event can change anything
    decisions: list[Decision]

    def __init__(self, setup: Setup, options: SchedulerOptions | None = None) -> None:  # noqa: ARG002
        """Build for a fixed set of models and gpu-lets.

        Raises:
            InvalidInputError: numbers that are not finite and positive.
        """
        problems = setup.problems()
        if problems:
            raise InvalidInputError(problems)
        self.setup = setup
        self.next_wake_ms = INF
        self.decisions = []

    @property
    def sends_ahead(self) -> bool:
        """Whether it sends a busy gpu-let the next batch by itself, a network delay before it becomes free."""
        return False

    def drain(self) -> list[Decision]:
        """Return the decisions since the last call, oldest first."""
        decisions = self.decisions
        self.decisions = []
        return decisions

    @abstractmethod
    def add_request(self, now_ms: float, model_index: int, request_id: int, deadline_ms: float) -> None:
        """Take one request; its answer must be with the client at `deadline_ms`. One in the past is dropped at once."""

    def add_requests(
        self, now_ms: float, model_index: int, request_ids: Sequence[int], deadlines_ms: Iterable[float]
    ) -> None:
        """Take several requests of one model that arrived together."""
        for request_id, deadline_ms in zip(request_ids, deadlines_ms, strict=True):
            self.add_request(now_ms, model_index, request_id, deadline_ms)

    @abstractmethod
    def cancel(self, now_ms: float, model_index: int, request_id: int) -> bool:
        """Forget a queued request; False if it is not queued (already dispatched, dropped or unknown)."""

    @abstractmethod
    def batch_done(self, now_ms: float, gpulet_index: int) -> None:
        """The oldest batch dispatched to the gpu-let has ended."""

    @abstractmethod
    def wake(self, now_ms: float) -> None:
        """Do what is due; called at `next_wake_ms` or later (timers are never early, and may be late)."""

    @abstractmethod
    def gpulet_lost(self, now_ms: float, gpulet_index: int) -> None:
        """Stop using a gpu-let; what ran there is lost and the driver's to answer or to add again."""

    @abstractmethod
    def gpulet_back(self, now_ms: float, gpulet_index: int) -> None:
        """Use a gpu-let again; it is idle."""

    @abstractmethod
    def queued(self, model_index: int) -> int:
        """Return how many requests of a model wait for a batch."""

    # A scheduler that plans with nothing may ignore the two corrections below.

    def update_latency(self, model_index: int, gpulet_index: int, factor: float) -> None:  # noqa: B027
        """Plan with `factor` times the set-up's latency for this model on this gpu-let (online correction)."""

    def update_network(self, network: NetworkDelay) -> None:  # noqa: B027
        """Budget these delays from now on."""
