"""The search for a plan: other policies' layouts as starts, trials in virtual time, small changes that serve more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.fairness import BALANCED, balanced, is_shared_out
from tenuto.batching.planning.layout import Builder, Layout, layout_of
from tenuto.batching.planning.moves import common_layouts, moves
from tenuto.batching.planning.trial import Trial, Trials
from tenuto.errors import TenutoError
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.cluster import Gpu
from tenuto.placement.interference.named import interference_models
from tenuto.placement.watch import Watch
from tenuto.profiles import Profiles

__all__ = ["Found", "Search", "SearchOptions"]

HEADROOM = 1.5  # of the largest batch that ran in a trial, for rates above those planned
CONFIRMING = 3  # times as many requests where a layout is neither clearly enough nor clearly not
GAIN = 1e-3  # a change must serve this much more, relatively, to be kept


@dataclass(frozen=True)
class SearchOptions:
    """See `TenutoPolicy`."""

    scheduler: str
    interference: str
    starts: tuple[str, ...]
    tries: int
    requests: int
    attainment: float
    max_batch: int
    seed: int
    network: NetworkDelay


@dataclass(frozen=True)
class Found:
    """A layout of some GPUs with what it served, and what it began as."""

    gpus: tuple[Gpu, ...]
    layout: Layout
    trial: Trial
    start: str


class Search:
    """The search for one workload. `trials` counts what was run, `refused` names policies that could not plan.

    On a fixed cluster the value of a layout is all it serves in time; where GPUs are bought, a model counts up to
    `aim`, since what is wanted is that none stays below its attainment.
    """

    def __init__(
        self, options: SearchOptions, workload: Workload, cluster: Cluster, profiles: Profiles,
        watch: Watch | None = None,
    ) -> None:  # fmt: skip
        """Prepare; raises `InvalidInputError` when the interference model lacks its hardware coefficients."""
        self._options, self._workload, self._cluster, self._profiles = options, workload, cluster, profiles
        self.watch = watch or Watch()
        models = interference_models(options.interference, cluster.gpu_types, profiles)
        self.builder = Builder(workload, profiles, models, max_batch=options.max_batch)
        self.aim = (1.0 + options.attainment) / 2.0
        run = partial(
            Trials, workload.models, scheduler=options.scheduler, network=options.network, objective=workload.objective
        )
        self.trials = run(requests=options.requests, seed=options.seed, enough=self.aim if cluster.elastic else 1.0)
        self._confirming = partial(run, requests=CONFIRMING * options.requests, seed=options.seed + 1)
        self.refused: dict[str, str] = {}

    def best(self, gpus: tuple[Gpu, ...], *, search_from: float = 0.0) -> Found | None:
        """Return the layout found that serves most on exactly these GPUs; None where no model can be served.

        Args:
            gpus: to lay out.
            search_from: the part of the offered rates the best start must serve for a search to begin there.
        """
        names = [spec.name for spec in self._workload.models]
        layouts: list[tuple[str, Layout, Mapping[tuple[str, str], int] | None]] = []
        for name, plan in self.starts(_as_cluster(gpus)):
            layout, caps = layout_of(plan, gpus, self.builder)
            layouts += [(f"the plan of {name}", layout, caps), (f"the plan of {name}", layout, None)]
        if is_shared_out(self._workload, self._cluster):
            plan = balanced(self._workload, _as_cluster(gpus), self._profiles)
            layout, caps = layout_of(plan, gpus, self.builder)
            layouts += [(BALANCED, layout, caps), (BALANCED, layout, None)]
        for layout in common_layouts(gpus, names, self.builder):
            layouts.append(("every model on every GPU", layout, None))
        seen: set[Layout] = set()
        found: list[Found] = []
        for start, layout, caps_or_none in layouts:
            if found and self.watch.is_stopped():
                break
            trial = self._tried(layout, gpus, seen, caps=caps_or_none)
            if trial is not None:
                found.append(Found(gpus, layout, trial, start))
        found.sort(key=lambda each: -each.trial.value)
        if not found:
            return None
        if self.watch.is_stopped():
            return found[0]
        least = (1.0 - GAIN) * found[0].trial.value
        enough = [each for each in found if self._is_enough(each) and each.trial.value >= least]
        if enough:  # the one with most headroom: its busiest gpu-let is the least busy
            return self._refined(min(enough, key=lambda each: float(each.trial.busy.max())))
        if found[0].trial.value < search_from * self.trials.offered_value:
            return self._refined(found[0])
        ends = [self._refined(self._climbed(start, seen)) for start in found[:2]]
        return self._confirmed(self._refined(found[0]), max(ends, key=lambda end: end.trial.value))

    def _confirmed(self, start: Found, end: Found) -> Found:
        """Return the end of a search if it serves more than its start on longer, other arrivals too: of many changes
        that were tried some only suit the arrivals they were tried on."""
        if end.trial.value <= start.trial.value * (1.0 + GAIN):
            return start
        run = self._confirming().run
        return end if run(end.trial.plan).value > run(start.trial.plan).value else start

    def _is_enough(self, found: Found) -> bool:
        """Say whether every model was in time, with half of the allowed misses to spare: other arrivals are less
        kind."""
        return found.trial.keeps(self.aim)

    def is_safe(self, found: Found) -> bool:
        """Say whether a layout may be bought: enough, or every model's attainment is kept on longer, other arrivals."""
        if self._is_enough(found):
            return True
        if not found.trial.keeps(self._options.attainment):
            return False
        return self._confirming().run(found.trial.plan).keeps(self._options.attainment)

    def starts(self, cluster: Cluster) -> list[tuple[str, Plan]]:
        """Return the plans of the other policies that can plan here."""
        plans: list[tuple[str, Plan]] = []
        for name in self._options.starts:
            if plans and self.watch.is_stopped():
                break
            self.watch.say(f"planning with {name} as a start")
            policy = load_policy(name)
            try:
                plans.append((name, solve(policy, self._workload, cluster, self._profiles)))
            except TenutoError as error:
                self.refused[name] = str(error).splitlines()[0]
        return plans

    def _climbed(self, start: Found, seen: set[Layout]) -> Found:
        """Follow the first change that serves more, until none does or half of the tries are spent."""
        here, left, is_better = start, max(1, self._options.tries // 2), True
        while is_better and left > 0 and not self._is_enough(here) and not self.watch.is_stopped():
            is_better = False
            for layout in moves(here.layout, here.trial, here.gpus, self.builder):
                if self.watch.is_stopped():
                    break
                trial = self._tried(layout, here.gpus, seen, floor=here.trial.value)
                if trial is None:
                    continue
                left -= 1
                if trial.value > here.trial.value * (1.0 + GAIN):
                    here, is_better = Found(here.gpus, layout, trial, start.start), True
                    break
                if left <= 0:
                    break
        return here

    def _refined(self, found: Found) -> Found:
        """Return the layout with batches no larger than it needs, which disturb neighbours less, if that serves it.

        A trial allows every batch that can be in time, and expects neighbours to cost what such batches would.
        """
        trial = found.trial
        by_gpu = trial.plan.by_gpu()
        caps = {}
        for index, gpulet in enumerate(trial.plan.gpulets):
            is_shared = len(by_gpu[gpulet.gpu]) > 1
            for place, spec in enumerate(self._workload.models):
                # Alone on its GPU a gpu-let disturbs nobody, and as long as such are alike they are one pool.
                ran = int(trial.largest[index, place]) if is_shared else 0
                caps[gpulet.id, spec.name] = max(1, math.ceil(HEADROOM * (ran or int(trial.largest[:, place].max()))))
        plan = self.builder.plan(found.layout, found.gpus, self._cluster, caps)
        if plan is None:
            return found
        again = self.trials.run(plan)
        is_as_good = again.value >= trial.value * (1.0 - GAIN) and (again.keeps(self.aim) or not trial.keeps(self.aim))
        return replace(found, trial=again) if is_as_good else found

    def _tried(
        self, layout: Layout, gpus: Sequence[Gpu], seen: set[Layout], *, floor: float = 0.0,
        caps: Mapping[tuple[str, str], int] | None = None,
    ) -> Trial | None:  # fmt: skip
        """Run a layout that is feasible and was not run before, or one with largest batches of its own."""
        if not any(layout) or (caps is None and layout in seen):
            return None
        if caps is None:
            seen.add(layout)
        plan = self.builder.plan(layout, gpus, self._cluster, caps)
        if plan is None:
            return None
        self.watch.say(f"trial {self.trials.count + 1} in virtual time, of {len(gpus)} GPUs")
        return self.trials.run(plan, floor=floor)


def _as_cluster(gpus: Sequence[Gpu]) -> Cluster:
    """Return a fixed cluster of these GPUs, grouped by type in order."""
    groups: dict[tuple[str, float, float | None], int] = {}
    for gpu in gpus:
        key = (gpu.type, gpu.memory_mib, gpu.price_per_hour)
        groups[key] = groups.get(key, 0) + 1
    listed = [
        {"type": kind, "count": count, "memory_mib": memory, "price_per_hour": price}
        for (kind, memory, price), count in groups.items()
    ]
    return Cluster.model_validate({"nodes": [{"name": "n0", "gpus": listed}]})
