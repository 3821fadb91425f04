"""What the controller learns from its looks: rates, losses, and how long batches take."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tenuto.deployments.control.attainment import Attainment
from tenuto.deployments.control.change_rate_limit import HOUR_S
from tenuto.deployments.control.interface import Observation
from tenuto.deployments.control.lengths import MeasuredLengths
from tenuto.deployments.control.rates import Rates
from tenuto.deployments.control.remembered import Memory, Surplus
from tenuto.deployments.control.settings import ControlSettings
from tenuto.placement import Plan, Workload
from tenuto.placement.expectation.component import NOTHING
from tenuto.placement.expectation.outlook import Outlook, Outlooks, Traffic

FOLLOW = 0.3  # derived from the dispatcher's own corrections (`LatencyRatios`): weight of the newest in its average


@dataclass(frozen=True)
class EstimateUpdate:
    """What a look brought: models that lose more than they may, programs slower than planned whose slowness has grown,
    and whether a rate has jumped."""

    losing: Sequence[str]
    slower: Sequence[str]
    jumped: bool


class Estimates:
    """Estimates that every look improves."""

    def __init__(self, settings: ControlSettings, memory: Memory) -> None:
        """Begin, or go on from memory."""
        self._settings = settings
        declared = _declared(memory.workload, memory.plan)
        ttft_s = _ttft_s(memory.workload, memory.plan)
        self.rates = Rates(declared, settings.rates, settings.attainment, memory.rates, ttft_s=ttft_s)
        named = _counting(memory.workload)
        self.attainment = Attainment(named, target=settings.attainment, window_s=settings.change.horizon_s)
        self.lengths = MeasuredLengths(settings.rates.average_s)
        self.slowdowns, self.surpluses = dict(memory.slowdowns), dict(memory.surpluses)
        self._asked_slowdowns = dict(memory.slowdowns)  # what the last planning assumed
        self._unsettled_s = 0.0  # time of the last event that explains lost requests
        self._last_s: float | None = None

    def observe(self, now_s: float, seen: Observation) -> EstimateUpdate:
        """Take one look."""
        seconds = self._settings.look_s if self._last_s is None else now_s - self._last_s
        seconds, self._last_s = max(1e-3, seconds if seen.seconds is None else seen.seconds), now_s
        jumped = False
        if seen.models:
            jumped = bool(self.rates.observe(now_s, seconds, {name: m.arrived for name, m in seen.models.items()}))
        self.lengths.observe(seconds, seen.models)
        faded = {n: replace(s, factor=s.factor ** math.exp(-seconds / s.fades_s)) for n, s in self.surpluses.items()}
        self.surpluses = {name: surplus for name, surplus in faded.items() if surplus.factor > 1.0 + NOTHING}
        losing = self.attainment.observe(now_s, seen.models, self.rates.dispersion)
        slower = self._learn_slowdowns(seen)
        if jumped or self.slow_news() is not None:
            self.unsettle(now_s)
        return EstimateUpdate(losing, slower, jumped)

    def _learn_slowdowns(self, seen: Observation) -> list[str]:
        """Follow how long batches take over their profile, by program; its slowest gpu-let counts."""
        ratios: dict[str, float] = {}
        for gpulet in seen.slowdowns.values():
            for program, ratio in gpulet.items():
                ratios[program] = max(ratios.get(program, 0.0), ratio)
        threshold, slower = self._settings.when.slow or 0.1, []  # derived: the default of `when.slow`
        for program, ratio in ratios.items():
            known = self.slowdowns.get(program, 1.0)
            follow = ratio if abs(ratio - known) > threshold * known else known + FOLLOW * (ratio - known)
            if follow > max(known, 1.0 + threshold):
                slower.append(program)
            self.slowdowns[program] = follow
        return slower

    def slow_news(self) -> str | None:
        """Return which program's batches take other than last planned with; None when none do, or the rule is off."""
        threshold = self._settings.when.slow
        if threshold is None:
            return None
        for program, now in self.slowdowns.items():
            planned = self._asked_slowdowns.get(program, 1.0)
            # The first slow batches understate it: a planned factor that still moves is news at half the threshold.
            enough = threshold if abs(planned - 1.0) <= threshold else threshold / 2.0
            if abs(now / planned - 1.0) > enough:
                return f"batches of '{program}' take {now:.2f} times their profiled time, planned with {planned:.2f}"
        return None

    def planned_with(self) -> dict[str, float]:
        """Return the slowdowns by program, and note them as planned with."""
        self._asked_slowdowns = dict(self.slowdowns)
        return dict(self.slowdowns)

    def set_workload(self, workload: Workload, running: Plan) -> None:
        """Follow these models; a new model starts from its declared rate."""
        self.rates.set_models(_declared(workload, running), ttft_s=_ttft_s(workload, running))
        self.attainment.set_models(_counting(workload))

    def expect_declared(self, names: Collection[str], workload: Workload, running: Plan) -> None:
        """Expect the declared rates of models that were idle and are asked again; what was lost of them is no news."""
        known = self.rates.memory()
        mean_rps = {name: rate for name, rate in known.mean_rps.items() if name not in names}
        ttft_s = _ttft_s(workload, running)
        self.rates.set_models(_declared(workload, running), replace(known, mean_rps=mean_rps), ttft_s=ttft_s)
        self.unsettle(self._last_s or 0.0)

    def unsettle(self, now_s: float) -> None:
        """Note an event that explains requests lost soon after."""
        self._unsettled_s = now_s

    def is_unsettled(self, now_s: float) -> bool:
        """Whether an event lately explains lost requests."""
        return now_s - self._unsettled_s < self._settings.interval_s

    def losing_too_much(self) -> tuple[str, ...]:
        """Return the models that lately lost more than they may, by chance or not."""
        lost = self.attainment.lost_part(self.rates.mean_rps)
        return tuple(name for name, part in lost.items() if part > 1.0 - self._settings.attainment)

    def raise_surplus(self, losing: Sequence[str]) -> None:
        """Plan for more than is offered when requests are lost although all else is as planned. When a part r is lost,
        N/(1-r) of what was planned for would carry all (Symphony, section 3.5).

        That fades with the length of the window in which losses are judged as time constant. When it has to be learnt
        again before it is forgotten, the constant doubles, as the wait after changes that fail in a row does.
        """
        for name, part in self.attainment.lost_part(losing).items():
            old = self.surpluses.get(name, Surplus(1.0, self._settings.change.horizon_s / 2.0))
            factor = old.factor / max(0.25, 1.0 - part)  # limit: four times the rate
            self.surpluses[name] = Surplus(factor, min(HOUR_S, 2.0 * old.fades_s))
        self.attainment.forget()

    def traffic(self, ahead_s: float) -> Traffic:
        """Return what a plan that is ready in `ahead_s` has to carry: the expected traffic, times what unexplained
        losses have taught."""
        traffic = self.rates.traffic(ahead_s)
        mean_rps, dispersion = dict(traffic.mean_rps), dict(traffic.dispersion)
        for name in self.surpluses.keys() & mean_rps.keys():
            mean_rps[name] *= self.surpluses[name].factor
            dispersion[name] *= self.surpluses[name].factor
        return Traffic(mean_rps, dispersion, traffic.sigmas)

    def outlook(self, plan: Plan, traffic: Traffic) -> tuple[Outlook, Mapping[str, float]]:
        """Return what a plan would serve with present slowdowns, and the models with too few requests in time, with
        that part."""
        plan = plan.model_copy(update={"models": self.lengths.measured(plan.models)})
        outlook = Outlooks(self.slowdowns).of(plan, traffic)
        parts = {name: outlook.parts.get(name, 0.0) for name in traffic.mean_rps}
        return outlook, {name: part for name, part in parts.items() if part < self._settings.attainment}


def _declared(workload: Workload, running: Plan) -> dict[str, float]:
    """Return the declared rates of the models to follow, those of leaving versions included: the other versions soon
    get their requests."""
    rates = {spec.name: spec.rate_rps for spec in workload.models}
    stay = {spec.model for spec in workload.models}
    return rates | {s.name: s.rate_rps for s in running.models if s.model in stay and s.name not in rates}


def _ttft_s(workload: Workload, running: Plan) -> dict[str, float]:
    """Return how long requests wait for their first token, of the models that generate."""
    return {
        spec.name: spec.slo.ttft_ms / 1000.0 for spec in (*running.models, *workload.models) if spec.slo is not None
    }


def _counting(workload: Workload) -> tuple[str, ...]:
    """Return the models whose lost requests count as a reason. Copies are sent to shadows unasked, and `canaries`
    judges versions on trial."""
    return tuple(spec.name for spec in workload.models if not spec.is_tried)
