"""`control.yaml`: what the controller may do, when it looks again, and what a change must gain. Every key has a default
that a careful operator would pick; docs/reference/control.md says what each means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tenuto.documents import Fault, StrictModel
from tenuto.errors import InvalidInputError, refused
from tenuto.placement.plan import Plan, PolicyUsed
from tenuto.placement.policy import load_policy

Mode = Literal["off", "advise", "act"]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0)]


class RateSettings(StrictModel):
    """How rates are followed. `average_s` is gpulet's period between two checks; `settle_s` is how long Kubernetes'
    autoscaler waits before it scales down, its own default."""

    average_s: Seconds = 20.0
    settle_s: Annotated[float, Field(ge=0)] = 300.0
    floor_rps: Annotated[float, Field(gt=0)] = 0.1  # planned for at least, so that the first request finds its model


class Moved(StrictModel):
    """A rate has moved when what is needed left what was needed when the plan was made by this factor, or by so many
    requests per second (500 in USHER, section 3). None: not looked at."""

    ratio: Annotated[float, Field(gt=1)] | None = 1.5
    rps: Annotated[float, Field(gt=0)] | None = 500.0


class When(StrictModel):
    """What makes the controller plan again. Each can be turned off by false (or null)."""

    overload: bool = True  # the plan does not carry what is needed
    slo: bool = True  # a model loses more requests than allowed, and chance does not explain it
    underused: Annotated[float, Field(gt=0, lt=1)] | None = 0.8  # its busiest gpu-let would be less busy than this
    rate: Moved | None = Moved()
    slow: Annotated[float, Field(gt=0)] | None = 0.1  # batches take this part more or less than planned with
    lost: bool = True  # a GPU or node is gone
    came: bool = True  # a GPU or node is new


class Change(StrictModel):
    """What a change has to be worth, and how often there may be one."""

    horizon_s: Seconds = 300.0  # an epoch of Symphony: how long a plan is expected to hold
    hysteresis: Fraction = 0.2
    per_hour: Annotated[int, Field(ge=1)] = 60
    cool_down_s: Annotated[float, Field(ge=0)] = 60.0  # after a change, before one that only saves GPUs
    prove_s: Seconds = 20.0  # after a change: falls attainment within it, the change is rolled back
    ready_timeout_s: Seconds = 120.0
    plan_timeout_s: Seconds = 10.0  # the time limit of Symphony's appendix A
    start_s: Seconds = 12.5  # until measured: the middle of gpulet's 10 to 15 s
    load_s: Seconds = 5.0  # until measured


class Epoch(StrictModel):
    """When models change their sub-cluster though the plan stays: every `every_s` (Symphony: a few minutes), with at
    most this part of the weights (its C_max)."""

    every_s: Seconds = 300.0
    moved: Annotated[float, Field(gt=0, le=1)] = 0.25


class CanarySettings(StrictModel):
    """When a version with a share of the requests is taken back: `confidence` that one which is as good as the version
    that takes the rest never is, however long it is looked at. None: no version is."""

    confidence: Annotated[float, Field(gt=0.5, lt=1)] | None = 0.999


class GpuBounds(StrictModel):
    """Floor and ceiling of the GPUs of one type."""

    min: Annotated[int, Field(ge=0)] = 0
    max: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _ordered(self) -> GpuBounds:
        if self.min > self.max:
            raise Fault(f"min {self.min} is above max {self.max}", "Lower min or raise max.")
        return self


class ControlSettings(StrictModel):
    """The whole file.

    mode: `off` only watches, `advise` says what it would do, `act` does it.
    interval_s: how often the plan is checked without any other reason; 20 s in gpulet, section 4.4.
    look_s: how often measurements are looked at. iGniter looks at latencies every second; what is noticed half a
        second sooner is cured so much sooner, and a look takes some 12 ms of a core over all processes.
    attainment: share of the requests of every model that has to be in time.
    policy: what plans; default: the policy of the plan that is deployed.
    canary: when a version that is worse is taken back.
    epoch: how sub-clusters are evened out, where there are any; None: not.
    standby_pct: beside every gpu-let waits an idle process with its models loaded and so much more share, as far as its
        GPU has it free; 10 in iGniter, section 5.3. It takes over at once where a model loses requests. None: none.
    standby_gpus: on so many of the GPUs that hold nothing waits an idle process like every gpu-let, as far as memory
        goes. They join at once where a GPU is lost or models outgrow what runs.
    gpus: bounds by GPU type. A cluster grows through Ray's autoscaler up to `max`, and only by types named here.
    """

    mode: Mode = "advise"
    interval_s: Seconds = 20.0
    look_s: Seconds = 0.5
    attainment: Annotated[float, Field(gt=0, lt=1)] = 0.99
    policy: PolicyUsed | None = None
    rates: RateSettings = RateSettings()
    when: When = When()
    change: Change = Change()
    canary: CanarySettings = CanarySettings()
    epoch: Epoch | None = Epoch()
    standby_pct: Annotated[float, Field(gt=0, le=100)] | None = None
    standby_gpus: Annotated[int, Field(ge=0)] = 0
    gpus: dict[str, GpuBounds] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _mode_without_quotes(cls, data: Any) -> Any:
        """YAML 1.1 reads a bare off as false."""
        return {**data, "mode": "off"} if isinstance(data, dict) and data.get("mode") is False else data


def check_policy(control: dict[str, Any] | None, plan: Plan) -> None:
    """Raise `InvalidInputError` where the controller of these settings, beside this plan, could not load what plans."""
    policy = None if control is None else ControlSettings.model_validate(control).policy or plan.policy
    try:
        if policy is not None and ":" in policy.name:
            raise refused("policy", policy.name, "is a file, which is not where the controller runs", "Package it.")
        if policy is not None:
            load_policy(policy.name, policy.options)
    except InvalidInputError as error:
        cure = "Install its package on every node (entry point `tenuto.policies`), or name another in --control."
        raise InvalidInputError(f"the controller could not plan: {error} {cure}") from error
