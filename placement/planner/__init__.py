"""Everything that makes plans: from nothing, near a plan that runs, or in its place when that is worth the change."""

from tenuto.placement.planner.proposal import Proposal, propose
from tenuto.placement.planner.solve import (
    enough_for_all,
    in_turns,
    make_plan,
    plan_on_fewest,
    plan_without_places,
    solve,
)
from tenuto.placement.planner.task import ChangeTerms, Durations, PlanRequest, PlanTask, RunningPlan

__all__ = [
    "ChangeTerms",
    "Durations",
    "PlanRequest",
    "PlanTask",
    "Proposal",
    "RunningPlan",
    "enough_for_all",
    "in_turns",
    "make_plan",
    "plan_on_fewest",
    "plan_without_places",
    "propose",
    "solve",
]
