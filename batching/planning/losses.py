"""What is left of a plan after a loss, found by running it in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.choosing import CONFIRMING, LARGE, ChoosingOptions
from tenuto.batching.planning.trial import Trials
from tenuto.placement import ModelSpec, Plan
from tenuto.placement.expectation.outlook import told


class LossTrials:
    """Says which part of each model's requests a plan serves (`tenuto.placement.surviving.Trial`), by the runs and the
    rule with which the policy `tenuto` finds a cluster to be enough: a model is served that misses at most half of what
    it may miss, or, where it misses up to half as much again, no more than it may of longer, other arrivals."""

    def __init__(self) -> None:
        self._models: tuple[ModelSpec, ...] = ()
        self._known: dict[object, Mapping[str, float]] = {}

    def __call__(self, plan: Plan) -> Mapping[str, float] | None:
        """Return the parts, 1 of models that are served; None for plans of more than `LARGE` models or GPUs."""
        gpulets = [on_gpu for on_gpu in plan.by_gpu().values() if on_gpu]
        if max(len(plan.models), len(gpulets)) > LARGE:
            return None
        if plan.models != self._models:
            self._begin(plan.models)
        # What was run is known from then on, whichever GPUs it is on.
        key = tuple(sorted(repr([told(gpulet) for gpulet in on_gpu]) for on_gpu in gpulets))
        if key not in self._known:
            self._known[key] = self._parts(plan)
        return self._known[key]

    def _begin(self, models: tuple[ModelSpec, ...]) -> None:
        options = ChoosingOptions()
        made = partial(Trials, models, scheduler=options.scheduler, network=NetworkDelay(*options.network_ms))
        self._models, self._known, self._least = models, {}, options.attainment
        self._trials = made(requests=options.requests, seed=options.seed)
        self._longer = made(requests=CONFIRMING * options.requests, seed=options.seed + 1)

    def _parts(self, plan: Plan) -> Mapping[str, float]:
        judged, spared = self._trials.run(plan), (1.0 - self._least) / 2.0
        is_served = judged.kept(self._least + spared)
        if (judged.kept(self._least - spared) & ~is_served).any():
            judged = self._longer.run(plan)
            is_served = judged.kept(self._least)
        parts = np.where(is_served, 1.0, judged.attainment)
        return {spec.name: float(part) for spec, part in zip(self._models, parts, strict=True)}
