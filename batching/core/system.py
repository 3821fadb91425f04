"""The system of a scheduler: the models that clients ask for, the programs that serve them, and the gpu-lets that host
the programs. Times are ms; latencies l(b) are indexed by batch size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from mypy_extensions import mypyc_attr

from tenuto.batching.core.step_scheduler import StepLimits
from tenuto.errors import Problem
from tenuto.placement import Objective
from tenuto.profiles import StepCost
from tenuto.profiles.size_classes import class_of

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

    Models of one name that follow each other are the size classes of one model, smallest first. Each has the requests
    of at most its `sizes` that no smaller class covers. `joins`: requests may be padded into batches of larger ones.
    """

    name: str
    slo_ms: float
    rate_rps: float | None = None
    weight: float = 1.0
    priority: int = 0
    longest_hold_ms: float | None = None
    provided_rps: float | None = None
    sizes: tuple[int, ...] = ()
    joins: bool = True


@dataclass(frozen=True, slots=True)
class ScheduledProgram(ByFields):
    """A program as a scheduler sees it: the models that run as one, by index. A lone model is a program of one. So is
    each size class of a model; they have one name."""

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

    @property
    def alone_ms(self) -> float:
        """What a batch of one takes beside its execution."""
        return self.ctrl_ms + self.data_ms_per_request + self.response_ms

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
    every model is a program of its own, with its own index. A size class is never merged with other models.
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
    def classes_of(self) -> tuple[tuple[int, ...], ...]:
        """The size classes of each model that clients know, by index; a model of fixed shape is its only one."""
        groups: list[list[int]] = []
        for index, model in enumerate(self.models):
            if model.sizes and groups and model.name == self.models[index - 1].name:
                groups[-1].append(index)
            else:
                groups.append([index])
        return tuple(map(tuple, groups))

    @cached_property
    def reported(self) -> tuple[Model, ...]:
        """The models as clients and reports know them; of size classes the largest one."""
        return tuple(self.models[classes[-1]] for classes in self.classes_of)

    @cached_property
    def reported_of(self) -> tuple[int, ...]:
        """The place among `reported` of every model, by index."""
        return tuple(place for place, classes in enumerate(self.classes_of) for _ in classes)

    @cached_property
    def joint_classes(self) -> Mapping[int, Mapping[int, int]]:
        """The programs of size classes whose requests may join each other: by program and other program, the smallest
        program that covers both. Empty for models of fixed shape."""
        joint: dict[int, dict[int, int]] = {}
        for classes in self.classes_of:
            sizes = [self.models[model].sizes for model in classes]
            if len(sizes) > 1 and all(self.models[model].joins for model in classes):
                for one, own in zip(classes, sizes, strict=True):
                    both = [class_of(sizes, tuple(map(max, own, other))) for other in sizes]
                    joint[self.program_of[one]] = {
                        self.program_of[other]: self.program_of[classes[place]]
                        for other, place in zip(classes, both, strict=True)
                        if place is not None and other != one
                    }
        return joint

    def place_of(self, place: int, sizes: tuple[int, ...]) -> int:
        """Return the index of the model or size class that a request of one of `reported` belongs to; -1: it is larger
        than every class."""
        classes = self.classes_of[place]
        if len(classes) == 1:
            return classes[0]
        within = class_of([self.models[model].sizes for model in classes], sizes)
        return -1 if within is None else classes[within]

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

    @cached_property
    def reported_served(self) -> frozenset[int]:
        """The places among `reported` of the models that some gpu-let serves or generates with."""
        served = self.served | {gpulet.model for gpulet in self.generating}
        return frozenset(self.reported_of[model] for model in served)

    def distinct_hosts(self) -> list[Mapping[int, Host]]:
        """Return the distinct `hosts` objects of all gpu-lets."""
        return list({id(gpulet.hosts): gpulet.hosts for gpulet in self.gpulets}.values())

    def unserveable(self) -> list[Problem]:
        """Return one problem per hosted program whose SLO not even a batch of one meets on any of its gpu-lets."""
        fixed_ms = self.network.alone_ms
        fastest: dict[int, float] = {}
        # Of a model with size classes, the smallest requests count.
        smallest = {p: self.program_of[self.classes_of[self.reported_of[m]][0]] for m, p in enumerate(self.program_of)}
        for hosts in self.distinct_hosts():
            for program, host in hosts.items():
                index = smallest[program]
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

    def without_gap(self, names: Collection[str]) -> list[str]:
        """Return a line for each of these models whose offline requests find no gap on any gpu-let: one of them takes
        longer than another program there can wait."""
        network, tightest = self.network, dict[int, tuple[float, float, int]]()
        fixed_ms = network.alone_ms
        for hosts in self.distinct_hosts():
            for program, host in hosts.items():
                if self.offered[program].name in names:
                    takes_ms = fixed_ms - network.response_ms + host.planned_batch_ms(1)
                    gaps = [
                        (self.offered[each].slo_ms - fixed_ms - other.planned_batch_ms(1) - takes_ms, takes_ms, each)
                        for each, other in hosts.items()
                        if each != program
                    ]
                    gap = min(gaps, default=(INF, takes_ms, program))
                    tightest[program] = max(gap, tightest.get(program, gap))
        return [
            f"an offline request of {self.offered[program].name} takes {takes_ms:.4g} ms, and {name} can wait "
            f"{max(0.0, takes_ms + gap_ms):.4g} ms on the same gpu-let: it runs only once nobody has asked {name} "
            "for a minute. Another GPU, a larger share or a smaller network helps."
            for program, (gap_ms, takes_ms, other) in sorted(tightest.items())
            for name in [self.offered[other].name]
            if gap_ms < 0.0
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
