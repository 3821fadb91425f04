"""What a plan serves and what that is worth, and the judge that needs no trial: the model of queueing and batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.placement import ModelSpec, Plan
from tenuto.placement.expectation.goodput import outlook_of
from tenuto.placement.workload import Objective

TOTAL = 0.02  # weight of all requests in time under the objective `each`


@dataclass(frozen=True)
class Judged:
    """What a plan serves, found in a trial or forecast. Arrays are by model, in the order of the workload.

    `value` is what a search compares: requests per second in time as the workload's objective counts them. `ok_rps` and
    `offered_rps` are requests per second; `busy` the busy fraction of every gpu-let; `carried_rps` what each gpu-let
    (rows) answers of each model (columns), and `largest` the largest batch it runs. `window_s` is how long a trial
    was; a forecast has no length: it is infinite.
    """

    plan: Plan
    window_s: float
    offered_rps: NDArray[np.float64]
    ok_rps: NDArray[np.float64]
    busy: NDArray[np.float64]
    carried_rps: NDArray[np.float64]
    largest: NDArray[np.int64]
    value: float

    @cached_property
    def attainment(self) -> NDArray[np.float64]:
        """The fraction in time of every model; 1 for one without requests."""
        offered = np.maximum(self.offered_rps, 1e-12)
        return np.where(self.offered_rps > 0, self.ok_rps / offered, 1.0)

    @property
    def lost_rps(self) -> NDArray[np.float64]:
        """Requests per second of every model that are not in time."""
        return self.offered_rps - self.ok_rps

    @property
    def beside_others(self) -> float:
        """The part of what is answered in time that comes from gpu-lets with neighbours on their GPU."""
        by_gpu = self.plan.by_gpu()
        shared = np.array([len(by_gpu[gpulet.gpu]) > 1 for gpulet in self.plan.gpulets])
        return float(self.carried_rps[shared].sum() / max(1e-9, self.carried_rps.sum()))

    def keeps(self, attainment: float) -> bool:
        """Say whether every model has at least this fraction of its requests in time, or misses a single one."""
        one = 1.0 / self.window_s
        return bool((self.lost_rps <= np.maximum(one, (1.0 - attainment) * self.offered_rps) + 1e-9).all())


class Worth:
    """How requests in time add up to a value: all alike, by weight, or (`each`) the part of the model served worst."""

    def __init__(self, models: tuple[ModelSpec, ...], objective: Objective, enough: float = 1.0) -> None:
        """Args:
        models: of the workload.
        objective: of the workload.
        enough: the fraction of a model's requests beyond which more in time do not count.
        """
        self._enough, self._is_fair = enough, objective == "each"
        self._weights = np.array([spec.weight if objective == "weighted" else 1.0 for spec in models])

    def of(self, ok: NDArray[Any], offered: NDArray[Any]) -> float:
        """Return what requests in time are worth, as counts or per second: under `each` the part of the model that is
        served worst, of all requests, and a little of the total so that more for others still counts."""
        counted = np.minimum(ok, self._enough * offered)
        if not self._is_fair:
            return float(self._weights @ counted)
        asked = offered > 0
        least = float((counted[asked] / offered[asked]).min(initial=1.0))
        return (1.0 - TOTAL) * least * float(offered.sum()) + TOTAL * float(counted.sum())


class Forecast:
    """Judges plans by the model from which every plan's expectation is made: some ms instead of seconds for a trial."""

    def __init__(self, models: tuple[ModelSpec, ...], worth: Worth, *, is_cautious: bool = False) -> None:
        """Args:
        models: of the workload.
        worth: of what is served.
        is_cautious: judge by more load than planned, see `outlook_of`.
        """
        self._models, self._worth, self._is_cautious = models, worth, is_cautious
        self._place = {spec.name: index for index, spec in enumerate(models)}
        self._offered = np.array([spec.rate_rps for spec in models])
        self.offered_value = worth.of(self._offered, self._offered)

    def of(self, plan: Plan) -> Judged:
        """Return what a plan of lone models is expected to serve."""
        outlook = outlook_of(plan, is_cautious=self._is_cautious)
        ok = np.array([outlook.parts.get(spec.name, 0.0) for spec in self._models]) * self._offered
        shape = len(plan.gpulets), len(self._models)
        carried, largest = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        for index, (takes, sizes) in enumerate(zip(outlook.carried, outlook.batches, strict=True)):
            for name, rate in takes.items():
                carried[index, self._place[name]] = rate
            for name, size in sizes.items():
                largest[index, self._place[name]] = size
        taken = carried.sum(axis=0)
        carried *= np.divide(ok, taken, out=np.zeros_like(ok), where=taken > 0)
        return Judged(
            plan=plan, window_s=np.inf, offered_rps=self._offered, ok_rps=ok, busy=np.array(outlook.busy),
            carried_rps=carried, largest=largest, value=self._worth.of(ok, self._offered),
        )  # fmt: skip
