"""The system of a scheduler: the models that clients ask for, the programs that serve them, and the gpu-lets that host
the programs. Times are ms; latencies l(b) are indexed by batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from mypy_extensions import mypyc_attr

from tenuto.batching.core.step_scheduler import StepLimits
from tenuto.errors import Problem
from tenuto.placement import Objective
from tenuto.profiles import StepCost

INF = math.inf

# Unit: a nanosecond. Sums of times may differ by rounding, and a deadline that is met exactly must count as met.
TIME_TOLERANCE_MS = 1e-6

# Derived: a microsecond, above the tolerance. So long after its last possible start a queued request is given up.
EXPIRY_MARGIN_MS = 1e-3


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, slots=True)
class ByFields:
    """Base of classes that are pickled as a call with all fields, since unpickling cannot set fields of a frozen class
    that is compiled."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the class and its values."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Model(ByFields):
    """A model that clients ask for.

    `rate_rps` is the planned rate, and the first guess of the offered rate (None: unknown). Under overload, models of
    lower `priority` lose requests first. `weight` is the worth of one request when the objective is `weighted`.
    `longest_hold_ms` bounds how long a request may be held while a gpu-let is idle (None: the scheduler's own bound).
    `provided_rps` is what the plan has room for where that is less than the planned rate (None: all of it).
    """

    name: str
    slo_ms: float
    rate_rps: float | None = None
    weight: float = 1.0
    priority: int = 0
    longest_hold_ms: float | None = None
    provided_rps: float | None = None


@dataclass(frozen=True, slots=True)
class ScheduledProgram(ByFields):
    """A program as a scheduler sees it: the models that run as one, by index. A lone model is a program of one."""

    name: str
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Host(ByFields):
    """What one program costs on one gpu-let.

    `latency_ms[b]` is l(b) without neighbours on the GPU; b counts the requests of all member models. Index 0 is 0.0,
    and the last index is the largest batch that may run there. `slowdown` (>= 1) is the factor on l(b) while all
    neighbours on the same GPU run.
    """

    latency_ms: tuple[float, ...]
    slowdown: float = 1.0

    def planned_ms(self) -> list[float]:
        """Return l(b) with the neighbours' slowdown, by batch size: what a scheduler should plan with."""
        return [latency * self.slowdown for latency in self.latency_ms]

    def planned_batch_ms(self, size: int) -> float:
        """Return l(size) with the neighbours' slowdown."""
        return self.latency_ms[size] * self.slowdown


@dataclass(frozen=True, slots=True)
class ScheduledGpulet(ByFields):
    """A gpu-let as a scheduler sees it: its id, the GPU it is on, and the programs it hosts by program index.

    Identical gpu-lets should share one `hosts` object; schedulers group gpu-lets by it. `also_on` names the GPUs beside
    the first one of a gpu-let that lies on several.
    """

    id: str
    gpu: str
    hosts: Mapping[int, Host]
    also_on: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[str, ...]:
        """All GPUs that it lies on."""
        return (self.gpu, *self.also_on)


@dataclass(frozen=True, slots=True)
class GeneratingGpulet(ByFields):
    """A gpu-let, by index, that generates: its model, by index, its limits, and the cost of its steps.

    `decided_ahead`: its engine decides on a step while the one before it runs. `ttft_ms` and `tpot_ms` are what the
    engine knows of the SLO. `rate_rps` is planned for it.
    """

    gpulet: int
    model: int
    limits: StepLimits
    cost: StepCost
    decided_ahead: bool = False
    ttft_ms: float = INF
    tpot_ms: float = INF
    rate_rps: float = 1.0


@dataclass(frozen=True, slots=True)
class NetworkDelay(ByFields):
    """Delays to budget, in ms (Symphony, appendix D).

    A batch of b that is dispatched now can start after `ctrl_ms + data_ms_per_request * b`; its answer reaches the
    client `response_ms` after its end.
    """

    ctrl_ms: float = 0.0
    data_ms_per_request: float = 0.0
    response_ms: float = 0.0

    def problems(self) -> list[Problem]:
        """Return what is wrong with the numbers."""
        delays = ((key, getattr(self, key)) for key in ("ctrl_ms", "data_ms_per_request", "response_ms"))
        return [
            Problem(f"network.{key}", ms, "must be a delay of at least 0 ms", "Give 0 for none.")
            for key, ms in delays
            if not (math.isfinite(ms) and ms >= 0)
        ]


@dataclass(frozen=True)
class System(ByFields):
    """Everything a scheduler is built from. The order of `gpulets` is their rank: the smallest index is preferred.

    Every model is a member of exactly one program; a program that no gpu-let hosts is unserved. Without `programs`
    every model is a program of its own, with its own index.
    """

    models: tuple[Model, ...]
    gpulets: tuple[ScheduledGpulet, ...]
    network: NetworkDelay = NetworkDelay()
    programs: tuple[ScheduledProgram, ...] = ()
    objective: Objective = "weighted"
    generating: tuple[GeneratingGpulet, ...] = ()  # no hosts of `gpulets`: the scheduler of batches does not know them

    def __post_init__(self) -> None:
        """Make every model a program of its own where none are given."""
        if not self.programs:
            alone = tuple(ScheduledProgram(model.name, (index,)) for index, model in enumerate(self.models))
            object.__setattr__(self, "programs", alone)

    @cached_property
    def program_of(self) -> tuple[int, ...]:
        """The program of every model, by index."""
        program_of = {member: index for index, program in enumerate(self.programs) for member in program.members}
        return tuple(program_of[index] for index in range(len(self.models)))

    @cached_property
    def offered(self) -> tuple[Model, ...]:
        """Each program as if it were one model: the sum of its members' rates, the shortest of their SLOs and holds,
        the largest weight and priority."""
        return tuple(_as_one(program.name, [self.models[m] for m in program.members]) for program in self.programs)

    @cached_property
    def hosted(self) -> frozenset[int]:
        """The programs that some gpu-let hosts, by index."""
        return frozenset(index for hosts in self.distinct_hosts() for index in hosts)

    @cached_property
    def served(self) -> frozenset[int]:
        """The models whose program some gpu-let hosts, by index."""
        return frozenset(model for model, program in enumerate(self.program_of) if program in self.hosted)

    def distinct_hosts(self) -> list[Mapping[int, Host]]:
        """Return the distinct `hosts` objects of all gpu-lets."""
        return list({id(gpulet.hosts): gpulet.hosts for gpulet in self.gpulets}.values())

    def unserveable(self) -> list[Problem]:
        """Return one problem per hosted program whose SLO not even a batch of one meets on any of its gpu-lets."""
        network = self.network
        fixed_ms = network.ctrl_ms + network.data_ms_per_request + network.response_ms
        fastest: dict[int, float] = {}
        for hosts in self.distinct_hosts():
            for index, host in hosts.items():
                fastest[index] = min(fastest.get(index, INF), host.latency_ms[1] * host.slowdown)
        return [
            Problem(
                f"models.{self.offered[index].name}.slo_ms",
                self.offered[index].slo_ms,
                f"unserveable: a batch of one takes {latency + fixed_ms:g} ms at best",
                "Raise the SLO, use a faster GPU or a larger share, or remove the model.",
            )
            for index, latency in sorted(fastest.items())
            if latency + fixed_ms > self.offered[index].slo_ms
        ]


def _as_one(name: str, members: list[Model]) -> Model:
    if len(members) == 1:
        return members[0]
    rates = [model.rate_rps for model in members if model.rate_rps is not None]
    provided = [model.rate_rps if model.provided_rps is None else model.provided_rps for model in members]
    room = [rps for rps in provided if rps is not None]
    holds = [model.longest_hold_ms for model in members if model.longest_hold_ms is not None]
    return Model(
        name,
        min(model.slo_ms for model in members),
        sum(rates, 0.0) if len(rates) == len(members) else None,
        max(model.weight for model in members),
        max(model.priority for model in members),
        min(holds) if holds else None,
        sum(room, 0.0) if len(room) == len(members) and sum(room, 0.0) < sum(rates, 0.0) else None,
    )
