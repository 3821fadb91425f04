"""How policy `tenuto` cuts GPUs into MIG instances: which layouts, and which models in how many processes in which
instance.

There are few ways to cut a GPU, and instances of one size are alike. So a small integer program over layouts, and over
the part of each model's load on each size, says how often each layout is cut: it is as small for thousands of GPUs as
for one. Then the instances are filled, the whole ones with one model each, what is left of models together: they take
turns. Its batches may be larger than half the SLO allows, as the scheduler defers them and processes run out of phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tenuto.placement.expectation.outlook import EVENED_OUT
from tenuto.placement.policies.shared.mig_cutting import CuttableGpus, FilledInstance, InstanceModel, InstanceWay
from tenuto.placement.program import held_mib
from tenuto.placement.solver import Rows, integer_program
from tenuto.profiles.mig_instances import MEMORY_SLICES, InstanceProfile

# Derived: of its SLO, what a batch of a model and its wait for a process may take together.
IN_TIME = 1.0
# Derived: models that take turns find all processes busy for a fifth of the time at usual loads; of the batches that
# then wait for the first of them, a twentieth may wait too long, so that 99 % do not.
TOO_LONG = 0.05
SPARER = (1.0, 0.9, 0.8)  # fitted: times `IN_TIME`, one after the other
FULL = 0.99  # fitted: the part of its time that any instance may work in the mean
LEVELS = 12  # fitted: parts of its time that are tried, from what a flow needs up to `FULL`
SLIVER = 0.02  # fitted: of an instance's time; less of a model is not worth a replica where others have room
NOTHING_LEFT = 1e-6  # derived: of a rate, above the rounding of sums


class CutModel:
    """A model with its ways in instances of every size."""

    def __init__(self, model: InstanceModel) -> None:
        self.name, self.rate_rps, self.slo_ms = model.spec.name, model.spec.rate_rps, model.spec.slo_ms
        self._ways: dict[str, dict[int, list[InstanceWay]]] = {}
        self._known: dict[tuple[str, int, float, float | None], InstanceWay | None] = {}
        for size, ways in model.ways.items():
            for way in ways:  # a few were measured to be faster beside others than alone: none is planned to be so
                planned = replace(way, latency_ms=way.slowdown * way.alone_ms)
                self._ways.setdefault(size, {}).setdefault(way.processes, []).append(planned)

    def processes(self, size: str) -> Iterable[int]:
        """Return the numbers of processes that were measured in an instance of a size."""
        return self._ways.get(size, {})

    def way(self, size: str, processes: int, most_ms: float, slowest: float | None = None) -> InstanceWay | None:
        """Return the way with most throughput that answers within a time; None where there is none. With `slowest`
        other models take turns with it, the slowest of which is so many times as slow among its equals."""
        key = size, processes, most_ms, slowest
        if key not in self._known:
            ways = self._ways.get(size, {}).get(processes, ())
            beside = ways if slowest is None else (_beside(way, slowest) for way in ways)
            able = [way for way in beside if _answers_ms(way, is_alone=slowest is None) <= most_ms]
            self._known[key] = max(able, key=lambda way: way.rate_rps, default=None)
        return self._known[key]

    def best(self, size: str, most_ms: float) -> InstanceWay | None:
        """Return the same of any number of processes."""
        ways = [self.way(size, processes, most_ms) for processes in self.processes(size)]
        return max((way for way in ways if way is not None), key=lambda way: way.rate_rps, default=None)


def _beside(way: InstanceWay, slowest: float) -> InstanceWay:
    """Return a way where the other processes also have a model that is so many times as slow among its equals: it is as
    slow as the mean of these, as in every plan (`placement.expectation.sharing`)."""
    others = max(way.slowdown, slowest)
    mean = (way.slowdown + (way.processes - 1) * others) / way.processes
    return replace(way, latency_ms=way.latency_ms * mean / way.slowdown)


def _answers_ms(way: InstanceWay, *, is_alone: bool) -> float:
    """Return what a batch and its wait for a process take. `n` processes of one model run out of phase: one ends every
    n-th part of a batch. Where models take turns they end at random: a wait of x batches is exceeded with probability
    (1 - x)^n."""
    waits = 1.0 / way.processes if is_alone else 1.0 - TOO_LONG ** (1.0 / way.processes)
    return way.latency_ms * (1.0 + waits)


Layout = tuple[tuple[str, int], ...]
"""Instances of a GPU: MIG profile and the memory slice where each begins."""


def layouts_of(profiles: Mapping[str, InstanceProfile]) -> list[Layout]:
    """Return the ways to cut a GPU to which no instance can be added; of those with the same sizes one."""
    layouts: dict[tuple[str, ...], Layout] = {}

    def extend(placed: Layout, free: frozenset[int]) -> None:
        is_full = True
        for name, size in profiles.items():
            for start in size.starts:
                taken = frozenset(range(start, start + size.slices))
                if taken <= free:
                    is_full = False
                    if not placed or start > placed[-1][1]:
                        extend((*placed, (name, start)), free - taken)
        if is_full:
            layouts.setdefault(tuple(sorted(name for name, _ in placed)), placed)

    extend((), frozenset(range(MEMORY_SLICES)))
    return list(layouts.values())


@dataclass(frozen=True)
class CutGpus:
    """GPUs by layout, their instances filled, and the part of all rates that these carry."""

    layouts: Mapping[Layout, int]
    instances: Sequence[FilledInstance]
    part: float


class Cutting:
    """The models of a workload on GPUs of one type that may be cut."""

    def __init__(self, gpus: CuttableGpus, models: Sequence[CutModel]) -> None:
        """`models`: those of the workload that some instance serves in time."""
        self._models = {model.name: model for model in models}
        self._profiles, self._room_mib, self._context_mib = gpus.sizes, gpus.room_mib, gpus.context_mib
        self._layouts = layouts_of(gpus.sizes)
        self._spare = 1.0

    def like(self, sizes: Iterable[str]) -> Layout | None:
        """Return the layout with instances of these sizes; None where one more would fit."""
        sorted_sizes = sorted(sizes)
        return next((each for each in self._layouts if sorted(size for size, _ in each) == sorted_sizes), None)

    def flow(self, gpus: float) -> float:
        """Return how many times all rates so many GPUs carry as a flow, at best."""
        return self._spread(gpus, is_whole=False)[0]

    def on(
        self, gpus: int, spare: float = 1.0, now: Mapping[Layout, int] | None = None, *, evens_out: bool = False
    ) -> CutGpus | None:
        """Return so many GPUs cut and filled so that all rates are carried, or else equal parts of them; None where no
        part is.

        Args:
            gpus: at most so many.
            spare: times `IN_TIME`.
            now: how often each layout is cut; none of these is cut anew, and of fewer GPUs some are left away.
            evens_out: no model is to be served a larger part than another.
        """
        self._spare = spare
        times, layouts, parts = self._spread(gpus, is_whole=True, now=now)
        instances = Counter(size for layout, count in layouts.items() for size, _ in layout for _ in range(count))
        full = EVENED_OUT if evens_out and FULL * times < 1.0 else FULL
        whole = min(1.0, full * times)
        # Fitted: each part that is tried is a fiftieth lower.
        for part in (whole, *(whole * (1.0 - 0.02 * step) for step in range(1, LEVELS))):
            low = part / times if times > 0.0 else full
            for step in range(LEVELS):
                level = low + (full - low) * step / (LEVELS - 1)
                filled = self._filled(instances, parts, part, level)
                if filled is not None:
                    return CutGpus(layouts, filled, part)
        return None

    def _alone_ms(self, model: CutModel) -> float:
        return self._spare * IN_TIME * model.slo_ms

    def _spread(
        self, gpus: float, *, is_whole: bool, now: Mapping[Layout, int] | None = None
    ) -> tuple[float, dict[Layout, int], dict[tuple[str, str], float]]:
        """Return how many times all rates can be carried as a flow, how often each layout is then cut, and the part of
        each model's rate on each size of instance."""
        sizes, models = list(self._profiles), list(self._models.values())
        pairs = [
            (m, s, model.rate_rps / way.rate_rps)
            for m, model in enumerate(models)
            for s, size in enumerate(sizes)
            if (way := model.best(size, self._alone_ms(model))) is not None
        ]
        # Columns: the part of a model on a size, times `times`; how often each layout is cut; `times`.
        first, last = len(pairs), len(pairs) + len(self._layouts)
        counts = [Counter(name for name, _ in layout) for layout in self._layouts]
        rows = Rows()
        for m in range(len(models)):
            own = [column for column, (model, _, _) in enumerate(pairs) if model == m]
            rows.add([*own, last], [*[1.0] * len(own), -1.0], 0.0, least=0.0)
        for s, size in enumerate(sizes):
            work = {column: takes for column, (_, place, takes) in enumerate(pairs) if place == s}
            instances = {first + place: -float(each[size]) for place, each in enumerate(counts) if each[size]}
            rows.add([*work, *instances], [*work.values(), *instances.values()], 0.0)
        rows.add(range(first, last), [1.0] * (last - first), gpus)
        least, most = np.zeros(last + 1), np.full(last + 1, np.inf)
        if now is not None:
            bounded = most if gpus <= sum(now.values()) else least
            bounded[first:last] = [now.get(layout, 0) for layout in self._layouts]
        cost, whole = [*[0.0] * last, -1.0], [is_whole and first <= column < last for column in range(last + 1)]
        # Limit: the search ends this near the best.
        solution = integer_program(cost, rows, least, most, whole, gap=0.002)
        if solution.x is None or solution.x[last] <= 0.0:
            return 0.0, {}, {}
        times = float(solution.x[last])
        layouts = {each: round(n) for each, n in zip(self._layouts, solution.x[first:last], strict=True) if round(n)}
        parts = {
            (models[m].name, sizes[s]): float(solution.x[column]) / times
            for column, (m, s, _) in enumerate(pairs)
            if solution.x[column] > NOTHING_LEFT * times
        }
        return times, layouts, parts

    def _filled(
        self, instances: Mapping[str, int], parts: Mapping[tuple[str, str], float], part: float, level: float
    ) -> list[FilledInstance] | None:
        """Return the instances, none of which works more than `level` of its time, with a part of all rates; None where
        they do not hold it."""
        filled: list[FilledInstance] = []
        left, rest = dict(instances), dict.fromkeys(self._models, 0.0)
        for (name, size), of_rate in parts.items():
            model = self._models[name]
            rate, way = part * of_rate * model.rate_rps, model.best(size, self._alone_ms(model))
            if way is None:
                continue
            whole = min(left[size], int(rate / (level * way.rate_rps) + NOTHING_LEFT))
            filled += [FilledInstance(size, {name: level * way.rate_rps}, {name: way})] * whole
            left[size] -= whole
            rest[name] += rate - whole * level * way.rate_rps
        begun: list[FilledInstance] = []
        for name in sorted(rest, key=lambda name: (-self._gpcs_for(name, rest[name]), name)):
            model, rate = self._models[name], rest[name]
            while rate > NOTHING_LEFT * model.rate_rps:
                best = max(self._options(model, rate, level, begun, left), key=lambda each: each[:3], default=None)
                if best is None:
                    return None
                takes, _, at, instance = best
                rate -= takes
                if at < len(begun):
                    begun[at] = instance
                else:
                    begun.append(instance)
                    left[instance.size] -= 1
        return filled + begun

    def _gpcs_for(self, name: str, rate_rps: float) -> float:
        """Return how many GPCs a rate takes where it takes fewest."""
        model = self._models[name]
        ways = ((size, model.best(size, self._alone_ms(model))) for size in self._profiles)
        needs = (self._profiles[size].gpcs * rate_rps / way.rate_rps for size, way in ways if way is not None)
        return min(needs, default=0.0)

    def _options(
        self, model: CutModel, rate_rps: float, level: float, begun: Sequence[FilledInstance], left: Mapping[str, int]
    ) -> Iterable[tuple[float, float, int, FilledInstance]]:
        """Yield where (a part of) a model's rate can go: how much, less what is idle there then in GPCs, the place of
        the instance among those begun, and the instance as it is then."""
        options = [(at, self._joined(instance, model, rate_rps, level)) for at, instance in enumerate(begun)]
        for size, count in left.items():
            way = model.best(size, self._alone_ms(model)) if count else None
            if way is not None:
                rates = {model.name: min(rate_rps, level * way.rate_rps)}
                options.append((len(begun), FilledInstance(size, rates, {model.name: way})))
        for at, instance in options:
            if instance is not None:
                idle = (level - instance.busy) * self._profiles[instance.size].gpcs
                yield instance.rates_rps[model.name], -idle, at, instance

    def _joined(
        self, instance: FilledInstance, model: CutModel, rate_rps: float, level: float
    ) -> FilledInstance | None:
        """Return an instance with one model more, and as much of its rate as there is room for; None where there is
        hardly any, or no number of processes lets each answer in time."""
        if model.name in instance.rates_rps:
            return None
        together = [*(self._models[name] for name in instance.rates_rps), model]
        most_ms = self._spare * IN_TIME * min(each.slo_ms for each in together)
        best: tuple[float, float, FilledInstance] | None = None
        for processes in model.processes(instance.size):
            able = _taking_turns(together, instance.size, processes, most_ms)
            held = held_mib((way.memory_mib, way.weights_mib) for way in able.values())
            if not able or processes * (held + self._context_mib) > self._room_mib[instance.size]:
                continue
            room = level - sum(rate / able[name].rate_rps for name, rate in instance.rates_rps.items())
            takes = min(rate_rps, room * able[model.name].rate_rps)
            if takes > 0.0 and (takes == rate_rps or takes > SLIVER * able[model.name].rate_rps):
                filled = FilledInstance(instance.size, {**instance.rates_rps, model.name: takes}, able)
                if best is None or (takes, -filled.busy) > best[:2]:
                    best = takes, -filled.busy, filled
        return None if best is None else best[2]


def _taking_turns(models: Sequence[CutModel], size: str, processes: int, most_ms: float) -> dict[str, InstanceWay]:
    """Return how models run that take turns in the processes of an instance; nothing where one does not answer within a
    time."""
    slowest = 1.0
    while True:
        ways = {each.name: each.way(size, processes, most_ms, slowest) for each in models}
        able = {name: way for name, way in ways.items() if way is not None}
        if len(able) < len(ways):
            return {}
        slowest_way = max(way.slowdown for way in able.values())
        if slowest_way <= slowest:
            return able
        slowest = slowest_way
