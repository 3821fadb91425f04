"""Trials of a plan: runs in virtual time under the scheduler that will serve it. Applications run as they are served,
and their answers are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.system import NetworkDelay, System
from tenuto.batching.planning.judging import Judged, Worth
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.application_load import Joins, make_application_load
from tenuto.batching.virtual.result import SimulationResult
from tenuto.batching.virtual.simulator import simulate
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.outcome import WARM_UP, Outcome
from tenuto.placement import ModelSpec, Plan
from tenuto.placement.application import Application, online
from tenuto.placement.workload import Objective, draw_sizes

RARE = 400  # derived: to see 1 % of them late; requests a rare model should have
SLOWEST_SLOS = 10.0  # derived: a trial lasts so many times the longest SLO, so that no SLO fills over a tenth of it
MOST = 200_000  # limit: arrivals to which a long SLO may lengthen a trial: some seconds
SPANS = 20  # derived: of a trial, to see how clumped its misses are; batch means take 10 to 30 (Schmeiser 1982)
_STEADY = 1_000.0  # derived: shape of gaps that are all but equal: they spread by 3 %


class _TargetRequests(NamedTuple):
    """What clients asked, which target and when, and whether they had their answers in time."""

    target: NDArray[np.integer[Any]]
    at_ms: NDArray[np.float64]
    is_ok: NDArray[np.bool_]


class Trials:
    """Runs plans on the same arrivals: gamma gaps of each target's own variation, its mean rate, Poisson by default.

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
        applications: Sequence[Application] = (),
    ) -> None:
        """Choose the length of a run: about `requests` to models; longer so that no SLO fills over a tenth of it, up to
        `MOST` requests, and up to twice as long until a rare target has some hundreds.

        Args:
            objective: how requests in time add up to a value.
            applications: are judged as a whole. How many requests their stages make is drawn once for all runs.
        """
        self._models, self._seed, self._scheduler, self._network = models, seed, scheduler, network
        self.worth = Worth(models, objective, applications)
        targets = self.worth.targets
        total = sum(spec.rate_rps for spec in models)
        judged = [spec for spec in targets if not spec.offline] or targets
        slowest = max(spec.slo_ms for spec in judged) / 1000.0
        usual = requests / total
        rare = RARE / min(spec.rate_rps for spec in judged)
        self._duration_s = max(usual, min(SLOWEST_SLOS * slowest, MOST / total), min(rare, 2.0 * usual))
        self.times_ms, self.index = self._schedule()
        tokens = self._lengths() if any(spec.generates is not None for spec in targets) else None
        sizes: NDArray[np.int64] | None = None
        if any(spec.sizes for spec in targets):
            draws = [np.random.default_rng([seed, place, 2]) for place in range(len(targets))]
            sizes = draw_sizes(targets, self.index, lambda place, _: draws[place])
        self._load = make_application_load(
            models,
            self.worth.applications,
            targets,
            self.times_ms,
            self.index,
            lambda *purpose: np.random.default_rng([seed, *"/".join(purpose).encode()]),
            sizes=sizes,
            tokens=tokens,
        )
        self._slos = {place: spec.slo for place, spec in enumerate(models) if spec.slo is not None}
        begin_ms = 1000.0 * WARM_UP * self._duration_s
        self._offered = np.bincount(self.index[self.times_ms >= begin_ms], minlength=len(targets))

    def run(self, plan: Plan, *, floor: float = 0.0, attainment: float = 0.0) -> Judged:
        """Run a plan; one that cannot reach the value `floor` any more, or `attainment` of every model, is ended early,
        with the value -1."""
        system, load, worth = from_plan(plan, self._network, check_slos=False), self._load, self.worth
        scheduler = make_scheduler(self._scheduler, system, {})
        least = floor * (1.0 - WARM_UP) * self._duration_s
        may_lose = np.maximum(1.0, (1.0 - attainment) * self._offered) + 1e-9
        begin_ms, joins, stopped = 1000.0 * WARM_UP * self._duration_s, None, False
        if worth.applications:
            load = replace(load, applications=online(plan.applications))  # as the plan splits their deadlines
            joins = Joins(load, counted_from_ms=begin_ms)
        hosted = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
        place = {spec.name: place for place, spec in enumerate(self._models)}

        def is_hopeless(dropped: list[int]) -> bool:
            nonlocal stopped
            calls, lost = {} if joins is None else joins.lost(), self._offered.copy()
            alone = dropped if joins is None else joins.lost_alone
            for at, spec in enumerate(worth.targets):
                if spec.name in calls:
                    lost[at] = calls[spec.name]
                elif spec.name in hosted:
                    lost[at] = alone[place[spec.name]]
            stopped = worth.of(self._offered - lost, self._offered) < least or bool((lost > may_lose).any())
            return stopped

        result = simulate(
            scheduler,
            load.times_ms,
            load.model_index,
            duration_s=self._duration_s,
            stop=is_hopeless,
            deadlines_ms=load.deadlines_ms,
            follows=joins,
            tokens=load.tokens,
            slos=self._slos,
            sizes=None if load.sizes is None else self._covered(load.sizes, system),
        )
        ended = self._target_requests(result, joins)
        targets = len(worth.targets)
        offered = np.bincount(ended.target, minlength=targets) / result.window_s
        ok = np.bincount(ended.target[ended.is_ok], minlength=targets) / result.window_s
        edges = np.linspace(begin_ms, 1000.0 * self._duration_s, SPANS + 1)
        span = np.digitize(ended.at_ms[~ended.is_ok], edges[1:-1])
        by_span = np.bincount(ended.target[~ended.is_ok] * SPANS + span, minlength=SPANS * targets).reshape(-1, SPANS)
        return Judged(
            window_s=result.window_s,
            offered_rps=offered,
            ok_rps=ok,
            busy=result.busy_ms() / (1000.0 * result.window_s),
            value=-1.0 if stopped else worth.of(ok, offered),
            deviation_rps=SPANS**0.5 * by_span.std(axis=1, ddof=1) / result.window_s,
        )

    def _target_requests(self, result: SimulationResult, joins: Joins | None) -> _TargetRequests:
        """Return what clients asked behind the warm-up, as far as the run came."""
        is_reached, is_ok = result.measured, result.outcome == Outcome.OK
        if joins is None:
            return _TargetRequests(result.model[is_reached], result.arrival_ms[is_reached], is_ok[is_reached])
        alone = is_reached & (self._load.owner < 0)
        place = {spec.name: at for at, spec in enumerate(self.worth.targets)}
        of_model = np.array([place.get(spec.name, -1) for spec in self._models])
        calls = np.array(list(self._load.calls.values()), dtype=np.float64).reshape(-1, 2)  # a rare one has none
        is_counted = (calls[:, 1] >= 1000.0 * result.warmup_s) & (calls[:, 1] <= 1000.0 * result.duration_s)
        first = len(self.worth.targets) - len(self.worth.applications)
        return _TargetRequests(
            np.concatenate([of_model[result.model[alone]], first + calls[is_counted, 0].astype(np.int64)]),
            np.concatenate([result.arrival_ms[alone], calls[is_counted, 1]]),
            np.concatenate([is_ok[alone], joins.outcome[is_counted] == Outcome.OK]),
        )

    def _lengths(self) -> RequestTokens:
        """Return the tokens of each request; none of models that do not generate."""
        prompts, outputs = (np.zeros(len(self.index), dtype=np.int64) for _ in range(2))
        for position, spec in enumerate(self.worth.targets):
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
                mine = self._load.model_index == place
                covered[mine, : len(known[-1])] = np.minimum(covered[mine, : len(known[-1])], np.max(known, axis=0))
        return covered

    def _schedule(self) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        times, owners = [], []
        for position, spec in enumerate(self.worth.targets):
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
