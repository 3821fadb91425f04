"""What the controller knows from its looks: rates, losses, and what batches take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenuto.deployments.control.attainment import Attainment
from tenuto.deployments.control.interface import Observation
from tenuto.deployments.control.rates import Rates
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.placement import Plan, Workload
from tenuto.placement.expectation.outlook import Outlook, Outlooks, Traffic

FOLLOW = 0.3  # derived from the dispatcher's own corrections (`LatencyRatios`): weight of the newest in its average


@dataclass(frozen=True)
class News:
    """What a look brought: models that lose more than they may, programs that are slower than planned and more so than
    was known, and whether a rate has jumped."""

    losing: Sequence[str]
    slower: Sequence[str]
    jumped: bool


class Learned:
    """Estimates that every look improves."""

    def __init__(self, settings: ControlSettings, memory: Memory) -> None:
        """Begin, or begin again, from what is remembered."""
        self._settings = settings
        declared = _declared(memory.workload, memory.plan)
        self.rates = Rates(
            declared,
            average_s=settings.rates.average_s,
            settle_s=settings.rates.settle_s,
            target=settings.attainment,
            floor_rps=settings.rates.floor_rps,
            memory=memory.rates,
        )
        named = _counting(memory.workload)
        self.attainment = Attainment(named, target=settings.attainment, window_s=settings.change.horizon_s)
        self.slowdowns, self.surplus = dict(memory.slowdowns), dict(memory.surplus)
        self._asked_slowdowns = dict(memory.slowdowns)  # what was planned with last
        self._unsettled_s = 0.0  # when something last happened that explains lost requests
        self._last_s: float | None = None

    def observe(self, now_s: float, seen: Observation) -> News:
        """Take one look."""
        seconds = self._settings.look_s if self._last_s is None else now_s - self._last_s
        seconds, self._last_s = max(1e-3, seconds if seen.seconds is None else seen.seconds), now_s
        jumped = False
        if seen.models:
            jumped = bool(self.rates.observe(now_s, seconds, {name: m.arrived for name, m in seen.models.items()}))
        losing = self.attainment.observe(
            now_s, {n: m.good for n, m in seen.models.items()}, {n: m.bad for n, m in seen.models.items()}
        )
        slower = self._learn_slowdowns(seen)
        if jumped or self.slow_news() is not None:
            self.unsettle(now_s)
        return News(losing, slower, jumped)

    def _learn_slowdowns(self, seen: Observation) -> list[str]:
        """Follow what batches take over their profile, by program: the slowest of its gpu-lets counts."""
        ratios: dict[str, float] = {}
        for gpulet in seen.gpulets.values():
            for program, ratio in gpulet.ratio.items():
                ratios[program] = max(ratios.get(program, 0.0), ratio)
        threshold, slower = self._settings.when.slow or 0.1, []
        for program, ratio in ratios.items():
            known = self.slowdowns.get(program, 1.0)
            follow = ratio if abs(ratio - known) > threshold * known else known + FOLLOW * (ratio - known)
            if follow > max(known, 1.0 + threshold):
                slower.append(program)
            self.slowdowns[program] = follow
        return slower

    def slow_news(self) -> str | None:
        """Return which program's batches take other than was planned with; None where none do, or nobody asks."""
        threshold = self._settings.when.slow
        if threshold is None:
            return None
        for program, now in self.slowdowns.items():
            asked = self._asked_slowdowns.get(program, 1.0)
            # What the first slow batches say is not all: a factor that was planned with and still moves is news sooner.
            enough = threshold if abs(asked - 1.0) <= threshold else threshold / 2.0
            if abs(now / asked - 1.0) > enough:
                return f"batches of '{program}' take {now:.2f} of their profile, not {asked:.2f}"
        return None

    def planned_with(self) -> dict[str, float]:
        """Return what batches take over their profile, from now on what was planned with."""
        self._asked_slowdowns = dict(self.slowdowns)
        return dict(self.slowdowns)

    def set_workload(self, workload: Workload, running: Plan) -> None:
        """Follow these models; the declared rate of a new one is its first estimate."""
        self.rates.set_models(_declared(workload, running))
        self.attainment.set_models(_counting(workload))

    def unsettle(self, now_s: float) -> None:
        """Something happens that explains requests that are lost soon after."""
        self._unsettled_s = now_s

    def is_unsettled(self, now_s: float) -> bool:
        """Whether something happened lately that explains lost requests."""
        return now_s - self._unsettled_s < self._settings.interval_s

    def losing_too_much(self) -> tuple[str, ...]:
        """Return the models that have lost more lately than they may, chance or not."""
        lost = self.attainment.lost_part(self.rates.mean_rps)
        return tuple(name for name, part in lost.items() if part > 1.0 - self._settings.attainment)

    def raise_surplus(self, losing: Sequence[str]) -> None:
        """Plan for more than is offered where everything else is as planned and requests are lost all the same: with a
        part r lost, N/(1-r) of what was planned for would carry all (Symphony, section 3.5)."""
        for name, part in self.attainment.lost_part(losing).items():
            self.surplus[name] = self.surplus.get(name, 1.0) / max(0.25, 1.0 - part)
        self.attainment.forget()

    def traffic(self, ahead_s: float) -> Traffic:
        """Return what has to be carried by a plan that is ready in `ahead_s`: what is expected, times what unexplained
        losses have taught."""
        traffic = self.rates.traffic(ahead_s)
        return Traffic(
            {name: rate * self.surplus.get(name, 1.0) for name, rate in traffic.mean_rps.items()},
            {name: value * self.surplus.get(name, 1.0) for name, value in traffic.dispersion.items()},
            traffic.sigmas,
        )

    def outlook(self, plan: Plan, traffic: Traffic) -> tuple[Outlook, Mapping[str, float]]:
        """Return what a plan would serve with what batches take now, and the models of which too few requests would be
        in time, with how many."""
        outlook = Outlooks(self.slowdowns).of(plan, traffic)
        parts = {name: outlook.parts.get(name, 0.0) for name in traffic.mean_rps}
        return outlook, {name: part for name, part in parts.items() if part < self._settings.attainment}


def _declared(workload: Workload, running: Plan) -> dict[str, float]:
    """Return the declared rates of the models to follow: those of versions that leave too, whose requests are the other
    versions' soon."""
    found = {spec.name: spec.rate_rps for spec in workload.models}
    stay = {spec.model for spec in workload.models}
    return found | {s.name: s.rate_rps for s in running.models if s.model in stay and s.name not in found}


def _counting(workload: Workload) -> tuple[str, ...]:
    """Return the models whose lost requests are a reason for something: nobody asked for copies, and `canaries` judges
    versions that are tried."""
    return tuple(spec.name for spec in workload.models if not spec.is_tried)
