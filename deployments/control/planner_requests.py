"""Keeps the question to the planner, one at a time, and decides when to ask the same one again, when a question that
would only save has to wait, and when it is given up for another."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tenuto.deployments.control.journal import Reason
from tenuto.deployments.control.settings import ControlSettings, Moved
from tenuto.placement.cluster import Gpu
from tenuto.placement.planner.task import CHANCE

# Reasons that can wait: no request is lost meanwhile. When slow batches would lose some, `Reason.OVERLOAD` says so.
SAVING = frozenset({Reason.UNDERUSED, Reason.RATE, Reason.IDLE, Reason.SLOW})
_SAVING_PART = 0.1  # pace: questions that only save take at most this part of a processor


@dataclass(frozen=True)
class PlannerRequest:
    """A question: its number, its time, the GPUs present then, the needs and the reasons."""

    number: int
    since_s: float
    gpus: tuple[Gpu, ...]
    needs: Mapping[str, float]
    reasons: Collection[Reason]


class PlannerRequests:
    """Invariant: at most one question is out."""

    def __init__(self, planned_rps: Mapping[str, float], settings: ControlSettings) -> None:
        """Begin with the rates of the plan. Chance moves measured rates less when their time constant is long; an
        answer holds for the horizon."""
        self._average_s, self._horizon_s = settings.rates.average_s, settings.change.horizon_s
        self._planned_rps = planned_rps
        self._number = 0
        self._last: PlannerRequest | None = None
        self.out: PlannerRequest | None = None  # without an answer yet
        self.is_repeated = False  # asked again because its first answer was outgrown
        self.may_save_s = -math.inf  # from then on a question may be asked that only saves

    def ask(self, now_s: float, needs: Mapping[str, float], reasons: Collection[Reason], gpus: tuple[Gpu, ...]) -> int:
        """Begin a question; return its number."""
        self._number += 1
        self._planned_rps = needs
        self._last = self.out = PlannerRequest(self._number, now_s, gpus, needs, reasons)
        return self._number

    def count_time(self, now_s: float) -> None:
        """Let the next question that only saves wait in proportion to the time of the one that is out."""
        if self.out is not None and SAVING.issuperset(self.out.reasons):
            self.may_save_s = now_s + (1.0 / _SAVING_PART - 1.0) * (now_s - self.out.since_s)

    def gives_way(self, reasons: Collection[Reason], gpus: tuple[Gpu, ...]) -> bool:
        """Whether the question that is out is better given up: it is about other GPUs, or only saves while one of these
        reasons cannot wait."""
        out = self.out
        return out is not None and (
            out.gpus != gpus or (SAVING.issuperset(out.reasons) and not SAVING.issuperset(reasons))
        )

    def forget_answer(self) -> None:
        """Ask again as soon as there is a reason."""
        self._last = None

    def has_answered(self, now_s: float, needs: Mapping[str, float], reasons: Collection[Reason]) -> bool:
        """Whether the same question was answered lately."""
        last = self._last
        is_fresh = last is not None and now_s - last.since_s < self._horizon_s and set(reasons) <= set(last.reasons)
        return is_fresh and not self.is_outgrown(needs)

    def is_outgrown(self, needs: Mapping[str, float]) -> bool:
        """Whether needs have moved since the last question by more than chance: of one model or of all together. Of
        many models with few requests each, some model always seems to have moved."""
        if self._last is None:
            return False

        def has_moved(then: float, now: float) -> bool:
            return abs(now - then) > CHANCE * math.sqrt(2.0 * then / self._average_s)  # of two averages

        before = self._last.needs
        return (
            before.keys() != needs.keys()
            or has_moved(sum(before.values()), sum(needs.values()))
            or any(has_moved(before[name], needs[name]) for name in needs)
        )

    def moved(self, needs: Mapping[str, float], rule: Moved) -> dict[str, float]:
        """Return the needs that have moved by the rule since the last question."""

        def has_moved(before: float, now: float) -> bool:
            by_ratio = rule.ratio is not None and max(now, before) > rule.ratio * min(now, before)
            return by_ratio or (rule.rps is not None and abs(now - before) >= rule.rps)

        return {name: now for name, now in needs.items() if has_moved(self._planned_rps.get(name, now), now)}
