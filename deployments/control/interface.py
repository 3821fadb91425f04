"""What goes into the controller and what comes out. Times are seconds on the driver's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tenuto.deployments.wire.status import LogLine
from tenuto.placement import Gpulet, Plan
from tenuto.placement.cluster import Gpu
from tenuto.placement.planner import PlanRequest


@dataclass(frozen=True)
class ModelSeen:
    """Requests of one model since the last look: how many samples they asked for, and how many ended, in time or not.
    Of a model that generates, how many were answered, and the tokens of their prompts and answers. `offline` counts
    requests without an SLO: those that came since, and those that wait; they are in no other count."""

    arrived: int = 0
    good: int = 0
    bad: int = 0
    generated: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    offline: int = 0


@dataclass(frozen=True)
class Observation:
    """One look: what happened since the last look, and what stands now.

    `models` is empty when what happened is unknown, as in the first look of a new process. `seconds` is how long it
    took to happen, when that is not the time between the looks: a look may come late. `ready` are gpu-lets that can
    serve, standby processes included. `broken` are gpu-lets that will not, with the reason. Every other gpu-let of the
    plan is starting, loading or coming back. `gpus` are the GPUs present. `slowdowns` say, by gpu-let and program, what
    batches since the last look took divided by what the plan says. `leaving` are present GPUs whose nodes have notice
    of their end, with the time, 0 when it is not known.
    """

    models: Mapping[str, ModelSeen]
    ready: frozenset[str]
    gpus: tuple[Gpu, ...]
    broken: Mapping[str, str] = field(default_factory=dict)
    slowdowns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seconds: float | None = None
    leaving: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MakePlan:
    """Ask the planner this, aside, and bring its result to `planned` with the number."""

    number: int
    request: PlanRequest


@dataclass(frozen=True)
class Apply:
    """Serve this plan from now on; `why` is for the history. `standby` are gpu-lets whose processes wait beside the
    plan, loaded and idle."""

    plan: Plan
    why: str
    standby: tuple[Gpulet, ...] = ()


@dataclass(frozen=True)
class AdvisedPlan:
    """A plan that pays and was not begun, because the controller only advises or may not change now; `text` is the
    log's."""

    plan: Plan
    text: str


@dataclass(frozen=True)
class WantGpus:
    """Have so many GPUs of each type: ask for missing ones, release idle ones above that. `more` is how many more that
    is than there are, negative where it is fewer."""

    by_type: Mapping[str, int]
    more: Mapping[str, int]


Decision = MakePlan | Apply | WantGpus | LogLine
