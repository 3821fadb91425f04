"""Trials of a plan after the loss of a GPU, node or rack, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.plan_search import CONFIRMING, LARGE, SearchOptions
from tenuto.batching.planning.trial import Trials
from tenuto.placement import ModelSpec, Plan
from tenuto.placement.application import Application
from tenuto.placement.expectation.outlook import alike_key
from tenuto.placement.generation_capacity import with_lengths

_OF_STEPS = 3000  # derived: requests of one run of a model that generates: its 97 % in time are known within 1 %


class LossTrials:
    """Says which part of each model's requests a plan serves (`planner.fault_tolerance.Trial`), by the runs and the
    rule with which the policy `tenuto` finds a cluster to be enough: a model is served that misses at most half of what
    it may miss, or, where it misses up to half as much again, no more than it may of longer, other arrivals.

    A model that generates has gpu-lets of its own, and so runs of its own.
    """

    def __init__(self) -> None:
        self._asked: tuple[tuple[ModelSpec, ...], tuple[Application, ...]] = ((), ())
        self._groups: list[_Group] = []

    def __call__(self, plan: Plan) -> Mapping[str, float] | None:
        """Return the parts, 1 of models that are served; None for plans of more than `LARGE` models or GPUs."""
        if max(len(plan.models), len(plan.used_gpus)) > LARGE:
            return None
        if (plan.models, plan.applications) != self._asked:
            self._asked = plan.models, plan.applications
            others = tuple(spec for spec in plan.models if spec.generates is None)
            options = SearchOptions()
            of_others = (options, options.requests, CONFIRMING, plan.applications)
            self._groups = [_Group(others, *of_others)] if others else []
            own = (with_lengths(spec) for spec in plan.models if spec.generates is not None)
            self._groups += [_Group((spec,), options, _OF_STEPS, 1) for spec in own]
        return {name: part for group in self._groups for name, part in group.parts(plan).items()}


class _Group:
    """Models that are tried together. What was run is known from then on, whichever GPUs it is on."""

    def __init__(
        self,
        models: tuple[ModelSpec, ...],
        options: SearchOptions,
        requests: int,
        confirming: int,
        applications: Sequence[Application] = (),
    ) -> None:
        network = NetworkDelay(*options.network_ms)
        made = partial(Trials, models, scheduler=options.scheduler, network=network, applications=applications)
        self._models, self._least = models, options.attainment
        self._names = {spec.name for spec in models}
        self._known: dict[object, Mapping[str, float]] = {}
        self._trials = made(requests=requests, seed=options.seed)
        self._longer = made(requests=confirming * requests, seed=options.seed + 1)

    def parts(self, plan: Plan) -> Mapping[str, float]:
        """Return which part of each model's requests is served."""
        mine = tuple(g for g in plan.gpulets if any(replica.name in self._names for replica in g.models))
        own = plan.model_copy(update={"gpulets": mine, "models": self._models})
        key = tuple(
            sorted(repr([alike_key(gpulet) for gpulet in gpulets]) for gpulets in own.by_gpu().values() if gpulets)
        )
        if key not in self._known:
            self._known[key] = self._run(own)
        return self._known[key]

    def _run(self, plan: Plan) -> Mapping[str, float]:
        judged, spared = self._trials.run(plan), (1.0 - self._least) / 2.0
        is_served = judged.kept(self._least + spared)
        if (judged.kept(self._least - spared) & ~is_served).any():
            judged = self._longer.run(plan)
            is_served = judged.kept(self._least)
        return self._trials.worth.parts_of_models(np.where(is_served, 1.0, judged.attainment).tolist())
