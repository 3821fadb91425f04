"""The requests that a plan serves in time, and their value: in a trial, or by the model of every plan's expectation.

Judged is what clients ask: models, and applications as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.placement import ModelSpec, Plan
from tenuto.placement.application import Application, online
from tenuto.placement.expectation.outlook import Outlooks
from tenuto.placement.workload import Objective, client_targets

TOTAL = 0.02  # derived: weight of all requests in time under the objective `each`: it decides between equals


@dataclass(frozen=True)
class Judged:
    """The verdict on a plan. Arrays are by target of the clients, as `Worth` has them; `busy` is by gpu-let.

    `value` is what plans are compared by: requests per second in time as the workload's objective counts them.
    `ok_rps` and `offered_rps` are requests per second, `deviation_rps` the standard deviation of what misses, as parts
    of the run differ. `window_s` is how long a trial was; what is expected has no length: it is infinite.
    """

    window_s: float
    offered_rps: NDArray[np.float64]
    ok_rps: NDArray[np.float64]
    busy: NDArray[np.float64]
    value: float
    deviation_rps: NDArray[np.float64] | float = 0.0

    @cached_property
    def attainment(self) -> NDArray[np.float64]:
        """The fraction in time of every target; 1 for one without requests."""
        offered = np.maximum(self.offered_rps, 1e-12)
        return np.where(self.offered_rps > 0, self.ok_rps / offered, 1.0)

    def keeps(self, attainment: float) -> bool:
        """Say whether every target has at least this fraction of its requests in time, or misses a single one."""
        return bool(self.kept(attainment).all())

    def surely_keeps(self, attainment: float) -> bool:
        """Say the same with a standard deviation of the misses to spare, so that other arrivals say it too. What was
        ended early keeps nothing."""
        return self.value >= 0.0 and bool(self.kept(attainment, deviations=1.0).all())

    def surely_misses(self, attainment: float) -> bool:
        """Say whether some target misses a standard deviation more than it may, so that other arrivals say it too."""
        return self.value < 0.0 or not self.kept(attainment, deviations=-1.0).all()

    def kept(self, attainment: float, *, deviations: float = 0.0) -> NDArray[np.bool_]:
        """Return of each target whether it has, with so many standard deviations to spare: those of the run, as misses
        come in clumps, or of as many single misses as there may be."""
        may_lose_rps, one = (1.0 - attainment) * self.offered_rps, 1.0 / self.window_s
        deviation_rps = np.maximum(self.deviation_rps, np.sqrt(may_lose_rps * one))  # of n a second in w: sqrt(n w) / w
        most_rps = may_lose_rps - deviations * deviation_rps
        return self.offered_rps - self.ok_rps <= np.maximum(one, most_rps) + 1e-9

    def and_then(self, other: Judged) -> Judged:
        """Return both trials of one plan as one."""
        window_s = self.window_s + other.window_s
        mine, its = self.window_s / window_s, other.window_s / window_s
        return Judged(
            window_s=window_s,
            offered_rps=mine * self.offered_rps + its * other.offered_rps,
            ok_rps=mine * self.ok_rps + its * other.ok_rps,
            busy=mine * self.busy + its * other.busy,
            value=-1.0 if min(self.value, other.value) < 0.0 else mine * self.value + its * other.value,
            deviation_rps=np.hypot(mine * self.deviation_rps, its * other.deviation_rps),
        )


class Worth:
    """How requests in time add up to a value: all alike, by weight, or (`each`) the part of the target served worst.

    `targets` are what clients ask: models by themselves, and `applications`, whose answers count and not those of their
    stages. When stages are not among the models, there are no applications, and all models are targets. `most` is the
    value of everything in time, per second.
    """

    def __init__(
        self, models: tuple[ModelSpec, ...], objective: Objective, applications: Sequence[Application] = ()
    ) -> None:
        names, applications = {spec.name for spec in models}, online(applications)
        is_complete = all(app.model_name(stage) in names for app in applications for stage in app.stages)
        self.models, self.applications = models, applications if is_complete else ()
        self.targets = tuple(client_targets(models, self.applications)) if self.applications else models
        self._is_fair = objective == "each"
        self._weights = np.array([spec.weight if objective == "weighted" else 1.0 for spec in self.targets])
        rates = np.array([spec.rate_rps for spec in self.targets])
        self.most = self.of(rates, rates)

    def of(self, ok: NDArray[Any], offered: NDArray[Any]) -> float:
        """Return the value of requests in time, as counts or per second: under `each` the part of the target that is
        served worst, of all requests, and a little of the total so that more for others still counts."""
        if not self._is_fair:
            return float(self._weights @ ok)
        has_requests = offered > 0
        least = float((ok[has_requests] / offered[has_requests]).min(initial=1.0))
        return (1.0 - TOTAL) * least * float(offered.sum()) + TOTAL * float(ok.sum())

    def parts_of_targets(self, parts: Mapping[str, float]) -> list[float]:
        """Return which part of each target is in time when these parts are of each model's requests: of an application
        that of its worst stage that may not be missing."""
        graphs = {app.name: app for app in self.applications}
        needed = {
            name: [app.model_name(stage) for stage in app.stages if not stage.allow_missing]
            for name, app in graphs.items()
        }
        return [
            min((parts.get(model, 0.0) for model in needed.get(spec.name, [spec.name])), default=1.0)
            for spec in self.targets
        ]

    def parts_of_models(self, parts: Sequence[float]) -> dict[str, float]:
        """Return which part of each model's requests belongs to answers in time when these parts are of each target."""
        if not self.applications:
            return dict(zip((spec.name for spec in self.models), parts, strict=True))
        demands: dict[str, list[tuple[float, float]]] = {}  # by model: rates, and their parts
        for spec, part in zip(self.targets, parts, strict=True):
            app = next((app for app in self.applications if app.name == spec.name), None)
            for name, rate_rps in (
                [(spec.name, spec.rate_rps)]
                if app is None
                else [(app.model_name(stage), app.rate_rps * stage.count) for stage in app.stages]
            ):
                demands.setdefault(name, []).append((rate_rps, part))
        return {
            name: sum(rate * part for rate, part in of) / sum(rate for rate, _ in of) for name, of in demands.items()
        }


def foreseen(plan: Plan, worth: Worth) -> Judged:
    """Return the verdict on a plan by its expectation: some ms instead of seconds for a trial."""
    outlook = Outlooks().of(plan)
    offered = np.array([spec.rate_rps for spec in worth.targets])
    ok = np.array(worth.parts_of_targets(outlook.parts)) * offered
    return Judged(np.inf, offered, ok, np.array(outlook.busy), worth.of(ok, offered))
