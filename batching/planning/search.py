"""The search for a plan: other policies' layouts as starts, small changes that are expected to serve more, and trials
in virtual time of the few that come out best."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.fairness import BALANCED, balanced, is_shared_out
from tenuto.batching.planning.judging import Forecast, Judged, Worth
from tenuto.batching.planning.layout import Builder, Layout, layout_of
from tenuto.batching.planning.moves import common_layouts, moves
from tenuto.batching.planning.trial import Trials
from tenuto.errors import TenutoError, first_line
from tenuto.options import option
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.cluster import Gpu, GpuGroup, Node
from tenuto.placement.interference.named import interference_models
from tenuto.placement.watch import Watch
from tenuto.profiles import Profiles

HEADROOM = 1.5  # of the largest batch that runs, for rates above those planned
CONFIRMING = 3  # times as many requests where a layout is neither clearly enough nor clearly not
GAIN = 1e-3  # a change must serve this much more, relatively, to be kept
NEAR = 0.03  # forecasts that are this much apart are told apart by trials: what the model may be wrong by
FINALISTS = 4  # layouts that are tried at most, besides starts
NEAR_START = 0.1  # other policies' plans further apart are not tried: what the model is wrong by at worst
CLEARLY = 0.02  # better than a start in a trial: by less, other and more arrivals decide, less kind to what was chosen
STARTS = ("symphony", "sbp", "ffd", "igniter", "gpulet", "usher", "wao-usher")  # the quickest first
# An interference model is wrong by 3 % in the mean where a pair was not measured, over the models of a plan by a third.
BESIDE = 0.01  # part of what is served beside neighbours that is not counted
SEARCHING = ("usher", "wao-usher", "ao-milp", "wsm-milp", "ideal")  # policies that may take seconds
WITH_NEIGHBOURS = ("gpulet",)  # policies that plan without an interference model or with one: both are starts
QUICKLY = {"symphony": {"time_limit_s": "0"}}  # moves and swaps come as near as the solver does in seconds
CLIMBS = 2  # starts from which changes are searched for
ROOMY = 0.5  # of its time: a busiest gpu-let below it has headroom enough
CROWDED = 0.75  # of its time: a busiest gpu-let above it can spare none
ALIKE = 0.05  # of its time: busiest gpu-lets below that which differ by less have the same headroom


@dataclass(kw_only=True, eq=False)
class SearchOptions:
    """The options of a search, see `TenutoPolicy`."""

    scheduler: str = "deferred"
    interference: str = "contention"
    starts: tuple[str, ...] = STARTS
    tries: int = option(40, minimum=1)
    requests: int = option(8_000, minimum=1)
    attainment: float = option(0.99, above=0, maximum=1)
    max_batch: int = option(128, minimum=1)
    seed: int = option(0, minimum=0)
    network_ms: tuple[float, ...] = option((0.0, 0.0, 0.0), minimum=0)

    @property
    def starting(self) -> tuple[str, ...]:
        """The policies whose plans are starts."""
        return tuple(name for name in self.starts if name not in ("none", ""))


@dataclass(frozen=True)
class Found:
    """A layout of some GPUs, what it began as and what it serves: by the model, and where it was tried by its trial.

    `is_start`: it is another policy's, with that policy's own largest batches.
    """

    gpus: tuple[Gpu, ...]
    layout: Layout
    start: str
    forecast: Judged
    trial: Judged | None = None
    is_start: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The largest batch of every replica."""
        return tuple(replica.batch_size for gpulet in self.forecast.plan.gpulets for replica in gpulet.models)

    @property
    def judged(self) -> Judged:
        """The trial, or the forecast where there was none."""
        return self.forecast if self.trial is None else self.trial

    @property
    def busiest(self) -> float:
        return float(self.judged.busy.max())

    @property
    def by_headroom(self) -> tuple[float, ...]:
        """A key by which layouts that serve everything are sorted, see `Search.expected`."""
        crowded = self.busiest if self.busiest > CROWDED else ALIKE * round(max(self.busiest, ROOMY) / ALIKE)
        return 0.0, crowded, len(self.forecast.plan.gpulets), self.busiest


def planned(
    starts: Mapping[str, tuple[str, Mapping[str, Any]]], workload: Workload, cluster: Cluster, profiles: Profiles,
    watch: Watch, refused: dict[str, str],
) -> Iterator[tuple[str, Plan]]:  # fmt: skip
    """Plan with other policies, each by its name and options; `refused` gets why a policy cannot plan.

    Once there is a plan, an interruption ends it.
    """
    has_plan = False
    for start, (name, options) in starts.items():
        if has_plan and watch.is_stopped():
            return
        watch.say(f"planning with {name} as a start")
        policy = load_policy(name, options)
        try:
            plan = solve(policy, workload, cluster, profiles)
        except TenutoError as error:
            refused[name] = first_line(error)
        else:
            has_plan = True
            yield start, plan


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
        enough = self.aim if cluster.elastic else 1.0
        run = partial(
            Trials, workload.models, scheduler=options.scheduler, objective=workload.objective,
            network=NetworkDelay(*options.network_ms),
        )  # fmt: skip
        worth = Worth(workload.models, workload.objective, enough)
        self._forecast = Forecast(workload.models, worth)
        self._cautious = Forecast(workload.models, worth, is_cautious=True)
        self.offered_value = self._forecast.offered_value
        self.forecasts = 0
        self.trials = run(requests=options.requests, seed=options.seed, enough=enough)
        self._confirming = partial(run, requests=CONFIRMING * options.requests, seed=options.seed + 1)
        self.refused: dict[str, str] = {}

    def best(self, gpus: tuple[Gpu, ...]) -> Found | None:
        """Return the layout found that serves most on exactly these GPUs, in trials of those that are expected to; None
        where no model can be served.

        What serves everything in its trial is taken, with batches no larger than it needs if it does so with them too:
        neighbours and schedulers that wait for full ones gain by it. Else those that come within 2 % of the best are
        told apart by longer trials, in which a start is left only for what serves more: neither the model nor a lucky
        draw is a reason to.
        """
        found = self.expected(gpus)
        if not found or self.watch.is_stopped():
            return found[0] if found else None
        tried: dict[tuple[Layout, float], Found] = {}  # what differs in nothing but batches that are never run is one
        for each in self._finalists(found):
            most = max((value for _, value in tried), default=0.0)
            one = self.tried(each, floor=(1.0 - CLEARLY) * most)
            if one is not None:
                tried.setdefault((one.layout, one.judged.value), one)
                if one.judged.keeps(self.aim):
                    return self._tightened(one)
            if tried and self.watch.is_stopped():
                break
        if found[0].forecast.keeps(self.aim) and not self.watch.is_stopped():
            one = self.tried(self._safer(found[0]))
            if one is not None:
                tried.setdefault((one.layout, one.judged.value), one)
                if one.judged.keeps(self.aim):
                    return self._tightened(one)
        return self._told_apart([*tried.values()]) if tried else found[0]

    def _safer(self, found: Found) -> Found:
        """Return what changes make of a layout that the model wrongly finds to serve everything, by the same model at
        more load."""
        harder = self._cautious.of(found.forecast.plan)
        safer = self._climbed(replace(found, forecast=harder), {found.layout}, self._cautious)
        forecast = self._foreseen(safer.layout, safer.gpus, set())
        return found if forecast is None else replace(safer, forecast=forecast, is_start=False)

    def _told_apart(self, tried: Sequence[Found]) -> Found:
        """Return the best of those that came near it in their trials, by longer trials on other arrivals.

        What neighbours cost is a model's word: gpu-lets with neighbours count for a little less.
        """
        by_value = sorted(tried, key=lambda each: -each.judged.value)
        near = [each for each in by_value if each.judged.value >= (1.0 - CLEARLY) * by_value[0].judged.value]
        near = near[:FINALISTS] + [each for each in near[FINALISTS:] if each.is_start]
        near.sort(key=lambda each: not each.is_start)
        if len(near) == 1 or self.watch.is_stopped():
            return by_value[0]
        self.watch.say(f"longer trials in virtual time of the {len(near)} best")
        longer, best, most = self._confirming(), near[0], 0.0
        for each in near:
            value = longer.run(each.forecast.plan, floor=most).value * (1.0 - BESIDE * each.judged.beside_others)
            if value > most:
                best, most = each, value
        return best

    def _tightened(self, best: Found) -> Found:
        """Return it with batches no larger than it needs if it serves as much with them in its trial."""
        if self.watch.is_stopped():
            return best
        tight = self._refined(best)
        if tight.sizes == best.sizes:
            return best
        tried = self.tried(tight, floor=best.judged.value)
        return best if tried is None or tried.judged.value < best.judged.value else tried

    def _finalists(self, found: Sequence[Found]) -> list[Found]:
        """Return what to try of layouts in the order of their forecasts: first the one that is expected to serve
        everything, else the starts near the best one; then the best."""
        most = found[0].forecast.value
        best = [each for each in found if each.forecast.value >= (1.0 - NEAR) * most][:FINALISTS]
        starts = [each for each in found if each.is_start and each.forecast.value >= (1.0 - NEAR_START) * most]
        first = found[:1] if found[0].forecast.keeps(self.aim) else []
        return list({id(each): each for each in (*first, *starts, *best)}.values())

    def expected(self, gpus: tuple[Gpu, ...], *, search_from: float = 0.0) -> list[Found]:
        """Return layouts of exactly these GPUs, that which is expected to serve most first; of those that serve
        everything, the one with most headroom, whose busiest gpu-let is the least busy; where several have as much or
        are busy for less than half of their time, the one with the fewest gpu-lets: each is a process.

        Args:
            gpus: to lay out.
            search_from: the part of the offered rates the best start must serve for a search to begin there.
        """
        seen: set[Layout] = set()
        found: list[Found] = []
        for start, layout, caps in self._starting(gpus):
            if found and self.watch.is_stopped():
                break
            forecast = self._foreseen(layout, gpus, seen, caps)
            if forecast is not None:
                found.append(Found(gpus, layout, start, forecast, is_start=caps is not None))
        found.sort(key=lambda each: -each.forecast.value)
        if not found or self.watch.is_stopped():
            return found
        most = found[0].forecast.value
        if not found[0].forecast.keeps(self.aim) and most >= search_from * self.offered_value:
            found += [self._climbed(start, seen) for start in found[:CLIMBS]]
        found += [self._refined(each) for each in found]
        enough = {each.layout for each in found if each.forecast.keeps(self.aim)}
        found.sort(key=lambda f: f.by_headroom if f.layout in enough else (1.0, -f.forecast.value))
        return list({(each.layout, each.sizes): each for each in reversed(found)}.values())[::-1]

    def _starting(
        self, gpus: tuple[Gpu, ...]
    ) -> list[tuple[str, Layout, Mapping[tuple[str, str], int] | None]]:
        """Return the layouts of the other policies' plans, with their largest batches and without, and those in which
        all GPUs are alike."""
        names = [spec.name for spec in self._workload.models]
        cluster = _as_cluster(gpus)
        starts = [(f"the plan of {name}", plan) for name, plan in self.starts(cluster)]
        if is_shared_out(self._workload, self._cluster):
            starts.append((BALANCED, balanced(self._workload, cluster, self._profiles)))
        layouts: list[tuple[str, Layout, Mapping[tuple[str, str], int] | None]] = []
        for start, plan in starts:
            layout, caps = layout_of(plan, gpus, self.builder)
            layouts += [(start, layout, caps), (start, layout, None)]
        alike = () if layouts and self.watch.is_stopped() else common_layouts(gpus, names, self.builder)
        return layouts + [("every model on every GPU", layout, None) for layout in alike]

    def tried(self, found: Found, *, floor: float = 0.0, attainment: float = 0.0) -> Found | None:
        """Return it with its trial; None where that ended early, because it cannot reach the value `floor` any more or
        this attainment of every model."""
        self.watch.say(f"trial {self.trials.count + 1} in virtual time, of {len(found.gpus)} GPUs")
        trial = self.trials.run(found.forecast.plan, floor=floor, attainment=attainment)
        return None if trial.value < 0.0 else replace(found, trial=trial)

    def safe(self, found: Found) -> Found | None:
        """Return it with its trial if it may be bought: every model keeps its attainment with half of the misses to
        spare, since other arrivals are less kind, or on longer, other arrivals too."""
        least = self._options.attainment
        tried = self.tried(found, attainment=least)
        if tried is None or tried.judged.keeps(self.aim):
            return tried
        if not tried.judged.keeps(least):
            return None
        return tried if self._confirming().run(found.forecast.plan, attainment=least).keeps(least) else None

    def starts(self, cluster: Cluster) -> list[tuple[str, Plan]]:
        """Return the plans of the other policies that can plan here; on a part of what could be bought, of those that
        always plan at once."""
        variants: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for name in self._options.starting:
            if name in SEARCHING and self._cluster.elastic and not cluster.elastic:
                continue
            variants[name] = name, QUICKLY.get(name, {})
            if name in WITH_NEIGHBOURS and self._options.interference != "none":
                variants[f"{name}, with interference"] = name, {"interference": self._options.interference}
        return [*planned(variants, self._workload, cluster, self._profiles, self.watch, self.refused)]

    def _climbed(self, start: Found, seen: set[Layout], by: Forecast | None = None) -> Found:
        """Follow the first change that is expected to serve more, until none is or its part of the tries is spent."""
        here, left, is_better = start, max(1, self._options.tries // CLIMBS), True
        while is_better and left > 0 and not here.forecast.keeps(self.aim) and not self.watch.is_stopped():
            is_better = False
            for layout in moves(here.layout, here.forecast, here.gpus, self.builder):
                if self.watch.is_stopped():
                    break
                forecast = self._foreseen(layout, here.gpus, seen, by=by)
                if forecast is None:
                    continue
                left -= 1
                if forecast.value > here.forecast.value * (1.0 + GAIN):
                    here, is_better = replace(here, layout=layout, forecast=forecast, is_start=False), True
                    break
                if left <= 0:
                    break
        return here

    def _refined(self, found: Found) -> Found:
        """Return the layout with batches no larger than it needs, which disturb neighbours less, if that serves it.

        A layout allows every batch that can be in time, and expects neighbours to cost what such batches would.
        """
        forecast = found.forecast
        by_gpu = forecast.plan.by_gpu()
        caps = {}
        for index, gpulet in enumerate(forecast.plan.gpulets):
            is_shared = len(by_gpu[gpulet.gpu]) > 1
            for place, spec in enumerate(self._workload.models):
                # Alone on its GPU a gpu-let disturbs nobody, and as long as such are alike they are one pool.
                runs = int(forecast.largest[index, place]) if is_shared else 0
                runs = runs or int(forecast.largest[:, place].max())
                caps[gpulet.id, spec.name] = max(1, math.ceil(HEADROOM * runs))
        again = self._foreseen(found.layout, found.gpus, set(), caps)
        if again is None or again.value < forecast.value * (1.0 - GAIN):
            return found
        if forecast.keeps(self.aim) and not again.keeps(self.aim):
            return found
        return replace(found, forecast=again, is_start=False)

    def _foreseen(
        self, layout: Layout, gpus: Sequence[Gpu], seen: set[Layout],
        caps: Mapping[tuple[str, str], int] | None = None, by: Forecast | None = None,
    ) -> Judged | None:  # fmt: skip
        """Judge a layout that is feasible and was not seen before, or one with largest batches of its own."""
        if not any(layout) or (caps is None and layout in seen):
            return None
        if caps is None:
            seen.add(layout)
        plan = self.builder.plan(layout, gpus, self._cluster, caps)
        if plan is None:
            return None
        self.forecasts += 1
        if self.forecasts % 50 == 0:
            self.watch.say(f"{self.forecasts} layouts looked at, now of {len(gpus)} GPUs")
        return (by or self._forecast).of(plan)


def _as_cluster(gpus: Sequence[Gpu]) -> Cluster:
    counts = Counter((gpu.type, gpu.memory_mib, gpu.price_per_hour) for gpu in gpus)
    groups = tuple(
        GpuGroup(type=kind, count=count, memory_mib=memory_mib, price_per_hour=price)
        for (kind, memory_mib, price), count in counts.items()
    )
    return Cluster(nodes=(Node(name="n0", gpus=groups),))
