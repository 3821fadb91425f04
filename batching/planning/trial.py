"""Trials of a plan: runs in virtual time under the scheduler that will serve it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.system import NetworkDelay, System
from tenuto.batching.planning.judging import Judged, Worth
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.outcome import WARM_UP, Outcome
from tenuto.placement import ModelSpec, Plan
from tenuto.placement.workload import Objective, draw_sizes

RARE = 400  # derived: to see 1 % of them late; requests a rare model should have
SLOWEST_SLOS = 10.0  # derived: a trial lasts so many times the longest SLO, so that no SLO fills over a tenth of it
MOST = 200_000  # limit: arrivals to which a long SLO may lengthen a trial: some seconds
SPANS = 20  # fitted: of a trial, which tell how clumped its misses are: each far longer than a burst
_STEADY = 1_000.0  # derived: shape of gaps that are all but equal: they spread by 3 %


class Trials:
    """Runs plans on the same arrivals: gamma gaps of each model's own variation, its mean rate, Poisson by default.

    Traces, bursts and daily curves are tried as Poisson arrivals of their mean rate. Models that generate must have
    their lengths.
    """

    def __init__(
        self,
        models: tuple[ModelSpec, ...],
        *,
        requests: int,
        seed: int,
        scheduler: str,
        network: NetworkDelay,
        objective: Objective = "weighted",
    ) -> None:
        """Choose the length of a run: about `requests` arrivals; longer so that no SLO fills over a tenth of it, up to
        `MOST` arrivals, and up to twice as long until a rare model has some hundreds.

        Args:
            objective: how requests in time add up to a value.
        """
        self._models, self._seed, self._scheduler, self._network = models, seed, scheduler, network
        total = sum(spec.rate_rps for spec in models)
        slowest = max(spec.slo_ms for spec in models) / 1000.0
        usual = requests / total
        rare = RARE / min(spec.rate_rps for spec in models)
        self._duration_s = max(usual, min(SLOWEST_SLOS * slowest, MOST / total), min(rare, 2.0 * usual))
        self._value = Worth(models, objective).of
        self.times_ms, self.index = self._schedule()
        self._tokens = self._lengths() if any(spec.generates is not None for spec in models) else None
        self._sizes: NDArray[np.int64] | None = None
        if any(spec.sizes for spec in models):
            draws = [np.random.default_rng([seed, place, 2]) for place in range(len(models))]
            self._sizes = draw_sizes(models, self.index, lambda place, _: draws[place])
        self._slos = {place: spec.slo for place, spec in enumerate(models) if spec.slo is not None}
        begin_ms = 1000.0 * WARM_UP * self._duration_s
        self._offered = np.bincount(self.index[self.times_ms >= begin_ms], minlength=len(models))

    def run(self, plan: Plan, *, floor: float = 0.0, attainment: float = 0.0) -> Judged:
        """Run a plan; one that cannot reach the value `floor` any more, or `attainment` of every model, is ended early,
        with the value -1."""
        system = from_plan(plan, self._network, check_slos=False)
        scheduler = make_scheduler(self._scheduler, system, {})
        names = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
        is_hosted = np.array([spec.name in names for spec in self._models])
        least = floor * (1.0 - WARM_UP) * self._duration_s
        may_lose = np.maximum(1.0, (1.0 - attainment) * self._offered) + 1e-9
        stopped = False

        def is_hopeless(dropped: list[int]) -> bool:
            nonlocal stopped
            lost = np.where(is_hosted, dropped, self._offered)
            stopped = self._value(self._offered - lost, self._offered) < least or bool((lost > may_lose).any())
            return stopped

        result = simulate(
            scheduler,
            self.times_ms,
            self.index,
            duration_s=self._duration_s,
            stop=is_hopeless,
            tokens=self._tokens,
            slos=self._slos,
            sizes=None if self._sizes is None else self._covered(self._sizes, system),
        )
        counts = result.counts()
        offered, ok = counts.sum(axis=1) / result.window_s, counts[:, Outcome.OK] / result.window_s
        missed = result.measured & (result.outcome != Outcome.OK)
        edges = np.linspace(1000.0 * WARM_UP * self._duration_s, 1000.0 * self._duration_s, SPANS + 1)
        span = np.digitize(result.arrival_ms[missed], edges[1:-1])
        by_span = np.bincount(result.model[missed] * SPANS + span, minlength=SPANS * len(counts)).reshape(-1, SPANS)
        return Judged(
            window_s=result.window_s,
            offered_rps=offered,
            ok_rps=ok,
            busy=result.busy_ms() / (1000.0 * result.window_s),
            value=-1.0 if stopped else self._value(ok, offered),
            deviation_rps=SPANS**0.5 * by_span.std(axis=1, ddof=1) / result.window_s,
        )

    def _lengths(self) -> RequestTokens:
        """Return the tokens of each request; none of models that do not generate."""
        prompts, outputs = (np.zeros(len(self.index), dtype=np.int64) for _ in range(2))
        for position, spec in enumerate(self._models):
            generates, mine = spec.generates, self.index == position
            if generates is not None and generates.prompt_tokens is not None and generates.output_tokens is not None:
                draws = np.random.default_rng([self._seed, position, 1])
                prompts[mine] = generates.prompt_tokens.draw(int(mine.sum()), draws)
                outputs[mine] = generates.output_tokens.draw(int(mine.sum()), draws)
        return RequestTokens(prompts, outputs)

    def _covered(self, sizes: NDArray[np.int64], system: System) -> NDArray[np.int64]:
        """Return sizes of requests, those that are larger than every size class as large as the largest: no plan can
        serve more of them, and each plan says so."""
        covered = sizes.copy()
        for place, classes in enumerate(system.classes_of):
            known = [system.models[model].sizes for model in classes]
            if known[-1]:
                mine = self.index == place
                covered[mine, : len(known[-1])] = np.minimum(covered[mine, : len(known[-1])], np.max(known, axis=0))
        return covered

    def _schedule(self) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        times, owners = [], []
        for position, spec in enumerate(self._models):
            generator = np.random.default_rng([self._seed, position])
            shape, mean = _shape(spec), spec.rate_rps * self._duration_s
            # Derived: six standard deviations more than the mean, so that the gaps fill the trial.
            gaps = generator.gamma(
                shape, 1.0 / (shape * spec.rate_rps), int(1.2 * mean + 6 * (mean / shape) ** 0.5) + 20
            )
            gaps[0] *= generator.random()
            arrivals = np.cumsum(gaps)
            arrivals = arrivals[arrivals < self._duration_s]
            times.append(arrivals)
            owners.append(np.full(len(arrivals), position, dtype=np.int32))
        together, owner = np.concatenate(times) * 1000.0, np.concatenate(owners)
        order = np.argsort(together, kind="stable")
        return together[order], owner[order]


def _shape(spec: ModelSpec) -> float:
    """Return the shape of a model's gamma gaps: 1 for Poisson."""
    arrival = spec.arrival
    if arrival.process == "uniform":
        return _STEADY
    if arrival.process == "gamma":
        return arrival.shape if arrival.shape is not None else (arrival.cv or 1.0) ** -2
    return 1.0
