"""What goes into the controller and what comes out. Times are seconds on the driver's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tenuto.deployments.wire.status import LogLine
from tenuto.placement import Gpulet, Plan, Workload
from tenuto.placement.cluster import Gpu
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.plan import PolicyUsed


@dataclass(frozen=True)
class ModelSeen:
    """Requests of one model since the last look: how many samples they asked for, and how many ended, in time or not.
    Of a model that generates, how many were answered, and the tokens of their prompts and answers."""

    arrived: int = 0
    good: int = 0
    bad: int = 0
    generated: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Observation:
    """One look: what happened since the last look, and what stands now.

    `models` is empty when what happened is unknown, as in the first look of a new process. `seconds` is how long it
    took to happen, when that is not the time between the looks: a look may come late. `ready` are gpu-lets that can
    serve, standby processes included. `broken` are gpu-lets that will not, with the reason. Every other gpu-let of the
    plan is starting, loading or coming back. `gpus` are the GPUs present. `slowdowns` say, by gpu-let and program, what
    batches since the last look took divided by what the plan says.
    """

    models: Mapping[str, ModelSeen]
    ready: frozenset[str]
    gpus: tuple[Gpu, ...]
    broken: Mapping[str, str] = field(default_factory=dict)
    slowdowns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True)
class Durations:
    """What the phases of a change take on this cluster, in seconds: starting a process, and loading a model into a
    running one."""

    start_s: float
    load_s: float


@dataclass(frozen=True)
class PlanRequest:
    """A question to the planner.

    `workload` names the models, `traffic` is what has to be carried and `expected_rps` the expected average. `running`
    is the plan that serves now, on `gpus`, those present. `types` are the GPU types that the cluster can grow by, with
    the most of each; empty: it cannot grow. `slowdowns` is what batches of a program take over their profile.
    `attainment` is the share of every model's requests that has to be in time. `standby_pct` asks for standby processes
    with so much more of a GPU, `standby_gpus` for twins on so many GPUs; `standby_ids` already wait beside the running
    plan. `only_standby`: no other plan is wanted.
    """

    workload: Workload
    traffic: Traffic
    expected_rps: Mapping[str, float]
    running: Plan
    gpus: tuple[Gpu, ...]
    policy: PolicyUsed
    durations: Durations
    horizon_s: float
    hysteresis: float
    types: Mapping[str, int] = field(default_factory=dict)
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    attainment: float = 0.99
    standby_pct: float | None = None
    standby_gpus: int = 0
    standby_ids: frozenset[str] = frozenset()
    only_standby: bool = False


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
    """Have so many GPUs of each type: ask for missing ones, release idle ones above that."""

    by_type: Mapping[str, int]


Decision = MakePlan | Apply | WantGpus | LogLine
