"""The one order of plans: of those that may replace a running one, and of the candidates of policy `tenuto`."""

from __future__ import annotations

from typing import NamedTuple


class PlanRank(NamedTuple):
    """The place of a plan in the order: the smallest is the best plan. Fields count from the first to the last, and
    requests come first. What a judge does not measure is 0 for all plans.

    `does_not_pay`: the change costs more than it gains. `misses_attainment`: some model has too few of its requests
    in time. `lacking_rps` is what the plan lacks of the requests per second that it has to serve, or less the value
    that it serves. `unmet_wishes` counts models that do not lie as they ask, or would not survive a loss, each by the
    part that it lacks where that is known. `lost_requests` is what the change loses, less what the plan gains within
    the horizon. `uncarried_rps` is what the plan lacks of the requests per second that may come at once. `changes`
    counts gpu-lets that start, load a model, or end though they should stay. `price` is what the GPUs cost, or how
    many they are when no price is known. `stages` are the plans on the way. `load_tenths` is how busy the busiest
    gpu-let is, to a tenth of its time and at least as busy as leaves headroom enough; each of the `gpulets` is a
    process; `load` is exact.
    """

    does_not_pay: bool = False
    misses_attainment: bool = False
    lacking_rps: float = 0.0
    unmet_wishes: float = 0
    lost_requests: float = 0.0
    uncarried_rps: float = 0.0
    changes: int = 0
    price: float = 0.0
    gpus: int = 0
    stages: int = 0
    load_tenths: float = 0.0
    gpulets: int = 0
    load: float = 0.0
