"""The controller's log: lines of one shape, with figures and words.

What people read of a decision is worded here alone. No rule reads the words: `reached` says how a change ended,
`version` that another plan runs since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from tenuto.deployments.control.canaries import WorseCanary
from tenuto.deployments.wire.status import LogLine
from tenuto.placement import Plan
from tenuto.placement.planner import Proposal


class Reason(StrEnum):
    """A reason to plan again."""

    LOST = "lost"
    LEAVING = "leaving"
    CAME = "came"
    SLOW = "slow"
    SLO = "slo"
    OVERLOAD = "overload"
    UNDERUSED = "underused"
    RATE = "rate"
    STANDBY = "standby"
    WORKLOAD = "workload"
    ASKED = "asked"
    IDLE = "idle"
    STUCK = "stuck"


class Kind(StrEnum):
    """The kind of a line, as logs and metrics name it."""

    NO_PLAN = "no plan"  # the planner found none
    KEPT = "kept"  # no change pays, or one that would pay may not be made now
    ADVICE = "advice"  # a change that the controller would make in mode act
    CHANGE = "change"  # a change begins
    RATES = "rates"  # the same gpu-lets with other planned rates: no change
    MISSING = "missing"  # GPUs are missing
    ASKED = "asked"  # for GPUs, of Ray's autoscaler
    LATE = "late"  # GPUs that were asked for and have not come
    UNUSED = "unused"  # a node that joined is not used
    STANDBY = "standby"  # idle processes wait
    ABANDONED = "abandoned"  # a change stops where it is
    CHANGED = "changed"
    ROLL_BACK = "roll back"  # a change is taken back
    ROLLED_BACK = "rolled back"  # the previous plan runs again
    STUCK = "stuck"  # going back failed too
    CANARY = "canary"  # a canary is worse than the version beside it
    PAUSED = "paused"  # by an operator
    RESUMED = "resumed"


def no_plan(at_s: float, reasons: Mapping[Reason, str], fault: str) -> LogLine:
    """Say that the planner found no plan, and why it was asked."""
    text = f"{'; '.join(reasons.values())}. Running plan kept: {fault}"
    return LogLine(at_s, Kind.NO_PLAN, text, {"reasons": _plain(reasons)})


def weighed(
    kind: Kind,
    at_s: float,
    reasons: Mapping[Reason, str],
    proposal: Proposal,
    planning_s: float,
    obstacle: str | None = None,
) -> LogLine:
    """Say what becomes of a proposal: the reasons to ask for it, its worth, the planning time."""
    worth, why, how = proposal.worth, "; ".join(reasons.values()), proposal.how
    gpus = "" if proposal.plan is None else f"; {sized(proposal.plan)}"
    text = {
        Kind.KEPT: f"{why}. Running plan kept: {worth.why}"
        if obstacle is None
        else f"{why}. {how.capitalize()} would pay: {worth.why}{gpus}. Not now: {obstacle}",
        Kind.RATES: f"{why}. {worth.why}",
    }.get(kind, f"{why}. {how.capitalize()}: {worth.why}{gpus}")
    figures = {
        "how": how,
        "reasons": _plain(reasons),
        "gained_requests": round(worth.gained_requests),
        "lost_requests": round(worth.lost_requests),
        "saved_gpu_s": round(worth.saved_rent),
        "spent_gpu_s": round(worth.spent_rent),
        "seconds": worth.seconds,
        "stages": worth.stages,
        "planning_s": round(planning_s, 3),
    }
    return LogLine(at_s, kind, text, figures)


def gpus_missing(at_s: float, short: Mapping[str, int]) -> LogLine:
    """Say how many more GPUs of each type would carry all rates."""
    text = f"the rates need more GPUs than there are: {listed(short)}"
    return LogLine(at_s, Kind.MISSING, text, {"gpus": dict(short)})


def gpus_requested(at_s: float, missing: Mapping[str, int]) -> LogLine:
    """Say how many more GPUs of each type Ray's autoscaler is asked for."""
    return LogLine(
        at_s, Kind.ASKED, f"asked Ray's autoscaler for more GPUs: {listed(missing)}", {"gpus": dict(missing)}
    )


def gpus_late(at_s: float, late: Mapping[str, int], after_s: float) -> LogLine:
    """Say which GPUs have not come, and that plans do with other types for a while."""
    text = f"{listed(late)} did not come within {after_s:g} s: plans do with other types. See `ray status`"
    return LogLine(at_s, Kind.LATE, text, {"gpus": dict(late)})


def unused_node(at_s: float, node: str, why: str) -> LogLine:
    """Say why the GPUs of a node that joined are not used."""
    return LogLine(at_s, Kind.UNUSED, f"{node} is not used: {why}")


def on_standby(at_s: float, why: str, shares: Mapping[str, str]) -> LogLine:
    """Say which processes wait on standby, with their shares of a GPU."""
    text = f"{why}. On standby now: {listed(shares) or 'nothing'}"
    return LogLine(at_s, Kind.STANDBY, text, {"shares": dict(shares)})


def abandoned(at_s: float, gpus: Sequence[str]) -> LogLine:
    """Say that the change under way stops because these GPUs are lost."""
    return LogLine(at_s, Kind.ABANDONED, f"the change under way stops, as GPU {', '.join(gpus)} is gone", reached=False)


def changed(at_s: float, why: str, seconds: float) -> LogLine:
    """Say that a change is done."""
    figures = {"seconds": seconds, "why": why}
    return LogLine(at_s, Kind.CHANGED, f"{why}: done in {seconds:.0f} s", figures, reached=True, version=why)


def taken_back(at_s: float, why: str, wait_s: float) -> LogLine:
    """Say that a change is taken back, and how long no other begins."""
    return LogLine(at_s, Kind.ROLL_BACK, f"{why}; no other change for {wait_s:.0f} s", {"why": why})


def rolled_back(at_s: float, seconds: float) -> LogLine:
    """Say that the previous plan runs again."""
    text = f"back to the previous plan in {seconds:.0f} s"
    return LogLine(at_s, Kind.ROLLED_BACK, text, reached=False, version=text)


def stuck(at_s: float, why: str, *, is_first: bool = False) -> LogLine:
    """Say that going back failed too; `is_first`: that nothing could be brought up, and there is nothing to go back
    to."""
    text = f"{'it does not start' if is_first else 'going back failed too'}: {why}"
    return LogLine(at_s, Kind.STUCK, text, reached=False)


def worse(at_s: float, canary: WorseCanary, confidence: float, obstacle: str | None) -> LogLine:
    """Say that a canary is worse than the version beside it, and what happens to the canary."""
    lost, rest_lost = canary.lost / canary.ended, canary.rest_lost / canary.rest_ended
    text = (
        f"{canary.name} lost {lost:.1%} of {canary.ended} requests, {canary.rest} meanwhile {rest_lost:.1%} of "
        f"{canary.rest_ended}. {canary.name} is worse with a confidence of {confidence:g} and "
        f"{'is taken back' if obstacle is None else f'should be taken back. Not now: {obstacle}'}"
    )
    return LogLine(at_s, Kind.CANARY, text, {**asdict(canary), "confidence": confidence})


def sized(plan: Plan) -> str:
    """Return how many GPUs a plan uses, and their price when known."""
    cost, used = plan.expected.cost_per_hour, len(plan.devices(plan.used_gpus))
    return f"{used} GPU{'s' * (used != 1)}{'' if cost is None else f', {cost:,.2f} $/h'}"


def listed(values: Mapping[str, Any], form: str = "{}") -> str:
    """Return names with their values, each value in `form`."""
    return ", ".join(f"{name} {form.format(value)}" for name, value in sorted(values.items()))


def _plain(reasons: Mapping[Reason, str]) -> dict[str, str]:
    return {kind.value: why for kind, why in reasons.items()}
