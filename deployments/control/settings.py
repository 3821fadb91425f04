"""`control.yaml`: what the controller may do, when it looks, and what a change must gain. Defaults are what a careful
operator would pick; docs/reference/control.md explains every key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tenuto.documents import Fault, StrictModel
from tenuto.errors import InvalidInputError, refused
from tenuto.outcome import ATTAINED
from tenuto.placement.cluster import START_S, MigUse, Price, SpotTerms, check_spot_price
from tenuto.placement.plan import Plan, PolicyUsed
from tenuto.placement.policy import load_policy
from tenuto.profiles.mig_instances import instance_profiles, mig_types

Mode = Literal["off", "advise", "act"]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0)]


class RateSettings(StrictModel):
    """How rates are followed. `average_s` is the time constant of the moving average: gpulet's period between two
    checks. `settle_s` is how long a need counts after it has fallen: as long as Kubernetes' autoscaler waits by default
    before it scales down."""

    average_s: Seconds = 20.0
    settle_s: Annotated[float, Field(ge=0)] = 300.0
    floor_rps: Annotated[float, Field(gt=0)] = 0.1  # lowest planned rate, so that the first request finds its model


class Moved(StrictModel):
    """A rate has moved when the present need differs from the plan's by this factor, or by so many requests per second
    (500 in USHER, section 3). None: that rule is off."""

    ratio: Annotated[float, Field(gt=1)] | None = 1.5
    rps: Annotated[float, Field(gt=0)] | None = 500.0


class When(StrictModel):
    """Reasons to plan again. False or null turns one off."""

    overload: bool = True  # the plan carries too little
    slo: bool = True  # a model loses more requests than allowed, and chance does not explain it
    underused: Annotated[float, Field(gt=0, lt=1)] | None = 0.8  # the busiest gpu-let would be less busy than this
    rate: Moved | None = Moved()
    slow: Annotated[float, Field(gt=0)] | None = 0.1  # batches take this part more or less than planned
    lost: bool = True  # a GPU or node is gone
    came: bool = True  # a GPU or node is new


class Change(StrictModel):
    """What a change has to gain, and how often one may begin."""

    horizon_s: Seconds = 300.0  # an epoch of Symphony: how long a plan is expected to hold
    hysteresis: Fraction = 0.2
    per_hour: Annotated[int, Field(ge=1)] = 60
    cool_down_s: Annotated[float, Field(ge=0)] = 60.0  # after a change, before one that only saves GPUs
    prove_s: Seconds = 20.0  # after a change: when attainment falls within it, the change is rolled back
    ready_timeout_s: Seconds = 120.0
    come_s: Seconds = 300.0  # asked GPUs that have not come by then: plans do with other types
    plan_timeout_s: Seconds = 60.0  # limit: policies that try their plans take up to half a minute on a busy machine
    start_s: Seconds = START_S  # until measured
    load_s: Seconds = 5.0  # until measured


class CanarySettings(StrictModel):
    """When a canary is taken back. `confidence` is the probability that a canary as good as the version that takes the
    rest never is, however long both are compared. None: none is taken back."""

    confidence: Annotated[float, Field(gt=0.5, lt=1)] | None = 0.999


class GpuBounds(StrictModel):
    """Least and most GPUs of one type, and how they are asked for.

    `per_node`: GPUs on each node that Ray's autoscaler brings. `labels`: what such nodes are labelled with; default:
    Ray's own label of the accelerator type. `price_per_hour` of a GPU, and `spot`, take the place of whatever a cluster
    file says of the type. `mig: managed`: plans may cut GPUs that join.
    """

    min: Annotated[int, Field(ge=0)] = 0
    max: Annotated[int, Field(ge=0)]
    per_node: Annotated[int, Field(ge=1)] = 1
    labels: dict[str, str] = Field(default_factory=dict)
    price_per_hour: Price | None = None
    spot: SpotTerms | None = None
    mig: MigUse = "fixed"

    @model_validator(mode="after")
    def _ordered(self) -> GpuBounds:
        if self.min > self.max:
            raise Fault(f"min {self.min} is above max {self.max}", "Lower min or raise max.")
        check_spot_price(self.spot, self.price_per_hour)
        return self


class ControlSettings(StrictModel):
    """The whole file.

    mode: `off` only watches, `advise` says what it would do, `act` does it.
    interval_s: how often the plan is checked without another reason; 20 s in gpulet, section 4.4.
    look_s: how often measurements are looked at; a look takes some 12 ms of a core over all processes. iGniter looks at
        latencies every second.
    attainment: share of every model's requests that has to be in time.
    policy: makes plans; default: the deployed plan's.
    canary: when a worse version is taken back.
    standby_pct: beside every gpu-let waits an idle process with its models loaded and so much more share, as far as its
        GPU has it free; 10 in iGniter, section 5.3. It takes over at once when a model loses requests. None: none.
    standby_gpus: on so many empty GPUs waits an idle copy of every gpu-let, as far as memory goes. Copies join at once
        when a GPU is lost or rates outgrow the plan.
    gpus: bounds by GPU type. A cluster grows through Ray's autoscaler up to `max`, and only by types named here.
    """

    mode: Mode = "advise"
    interval_s: Seconds = 20.0
    look_s: Seconds = 0.5
    attainment: Annotated[float, Field(gt=0, lt=1)] = ATTAINED
    policy: PolicyUsed | None = None
    rates: RateSettings = RateSettings()
    when: When = When()
    change: Change = Change()
    canary: CanarySettings = CanarySettings()
    standby_pct: Annotated[float, Field(gt=0, le=100)] | None = None
    standby_gpus: Annotated[int, Field(ge=0)] = 0
    gpus: dict[str, GpuBounds] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _mode_without_quotes(cls, data: Any) -> Any:
        """YAML 1.1 reads a bare off as false."""
        return {**data, "mode": "off"} if isinstance(data, dict) and data.get("mode") is False else data

    @model_validator(mode="after")
    def _can_be_cut(self) -> ControlSettings:
        for kind, bounds in self.gpus.items():
            if bounds.mig == "managed" and not instance_profiles(kind):
                known = f"Types with MIG: {', '.join(mig_types())}."
                raise Fault(f"GPU type '{kind}' has no MIG", f"Leave `mig` of gpus.{kind} away. {known}")
        return self


def check_policy(control: dict[str, Any] | None, plan: Plan) -> None:
    """Raise `InvalidInputError` when the controller could not load the policy of these settings or this plan."""
    policy = None if control is None else ControlSettings.model_validate(control).policy or plan.policy
    try:
        if policy is not None and ":" in policy.name:
            raise refused("policy", policy.name, "is a file, which the controller's node does not have", "Package it.")
        if policy is not None:
            load_policy(policy.name, policy.options)
    except InvalidInputError as error:
        cure = "Install its package on every node (entry point `tenuto.policies`), or name another in --control."
        raise InvalidInputError(f"the controller could not plan: {error} {cure}") from error
