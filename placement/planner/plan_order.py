"""The order of plans that may take the place of a running one."""

from __future__ import annotations

from typing import NamedTuple


class PlanRank(NamedTuple):
    """The place of a plan in the order: the smallest is the best plan. Fields count from the first to the last, and
    requests come first. What a judge does not measure is 0 for all plans."""

    does_not_pay: bool = False
    """The change costs more than it gains."""
    lacking_rps: float = 0.0
    """What the plan lacks of the requests per second that it has to serve."""
    unmet_wishes: int = 0
    """Models that do not lie as they ask, or would not survive a loss."""
    lost_requests: float = 0.0
    """What the change loses, less what the plan gains within the horizon."""
    uncarried_rps: float = 0.0
    """What the plan lacks of the requests per second that may come at once."""
    changes: int = 0
    """Gpu-lets that start, load a model, or end though they should stay."""
    price: float = 0.0
    """What the GPUs cost; where no price is known, how many they are."""
    gpus: int = 0
    stages: int = 0
    """Plans on the way."""
