"""What goes into the controller and what comes out of it. Times are seconds on the driver's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tenuto.deployments.control.planning import PlanRequest
from tenuto.deployments.wire.status import LogLine
from tenuto.placement import Gpulet, Plan
from tenuto.placement.cluster import Gpu


@dataclass(frozen=True)
class ModelSeen:
    """Requests of one model since the last look: those that arrived, and those that ended, in time or not."""

    arrived: int = 0
    good: int = 0
    bad: int = 0


@dataclass(frozen=True)
class GpuletSeen:
    """One gpu-let since the last look: what batches took over what the plan says, by program with any."""

    ratio: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """One look: what happened since the last, and what stands now.

    `models` is empty where what happened is not known, as in the first look of a new life; `seconds` is the time in
    which it happened, where that is not the time between the looks: a look may come late. `ready` are gpu-lets that
    can serve, those on standby among them; `broken` those that will not, with the reason; every other gpu-let of the
    plan is starting, loading or coming back. `gpus` are the GPUs that are there.
    """

    models: Mapping[str, ModelSeen]
    ready: frozenset[str]
    gpus: tuple[Gpu, ...]
    broken: Mapping[str, str] = field(default_factory=dict)
    gpulets: Mapping[str, GpuletSeen] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True)
class MakePlan:
    """Run the planner on this, aside, and bring its result to `planned` with the number."""

    number: int
    request: PlanRequest


@dataclass(frozen=True)
class Apply:
    """Make this plan the one that is served, from now on; `why` is for the history.

    `standby` are gpu-lets that are to have a process beside those of the plan, loaded and idle.
    """

    plan: Plan
    why: str
    standby: tuple[Gpulet, ...] = ()


@dataclass(frozen=True)
class AdvisedPlan:
    """A plan that pays and was not begun, as the controller only advises or may not now; `text` is of the log."""

    plan: Plan
    text: str


@dataclass(frozen=True)
class WantGpus:
    """Have so many GPUs of each type in the cluster: ask for what is missing, release what is idle above it."""

    by_type: Mapping[str, int]


Decision = MakePlan | Apply | WantGpus | LogLine
