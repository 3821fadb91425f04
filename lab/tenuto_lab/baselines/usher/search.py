"""USHER's Algorithms 1 and 2 (OSDI 2024, section 3.3.2): batch sizes, replica counts and GPUs for one group of models.

GPUs of one type with the same load are one *state* with a count, so thousands of GPUs cost no more than a few. The
search over configurations is exact: depth first in the order of placement, pruned by an upper bound of the goodput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from tenuto.placement.costs import FULL_PCT

DIGITS = 9  # derived: digits of loads, so that equal loads reached in another order are one state
LOOKS = 2  # limit: looks per allowed placement: choices discarded by their bound take time, too


class Need(NamedTuple):
    """A replica on one GPU type, in percent of it, and what it carries; `held_pct` is memory with its context."""

    compute_pct: float
    held_pct: float
    rate_rps: float


class State(NamedTuple):
    """GPUs in use of one type (by number) with the same load in percent; `is_own`: opened for this group."""

    kind: int
    compute_pct: float
    held_pct: float
    is_own: bool


@dataclass(frozen=True)
class Config:
    """A batch size and a replica count for one model.

    `needs` has one entry per GPU type, None when a replica does not fit or is too slow. Requirements are averages over
    the types: they decide class and order.
    """

    needs: tuple[Need | None, ...]
    batch_size: int
    replicas: int
    compute_pct: float
    memory_pct: float

    @property
    def total_pct(self) -> float:
        """Rreq = Creq + Mreq."""
        return self.compute_pct + self.memory_pct


@dataclass(frozen=True)
class Choice:
    """A model of the group with its possible configurations, fewest replicas and smallest batch first."""

    name: str
    rate_rps: float
    weight: float
    configs: tuple[Config, ...]


@dataclass(frozen=True)
class Readings:
    """How to read what the paper leaves open, and which ingredients to leave out; see the policy's options."""

    heavy_ratio: float = 1.2  # default
    neutral: str = "falling"
    pairs: str = "single"
    classify: bool = True
    sort: bool = True


Unit = tuple[int, ...]
"""What is placed at a time: one model of the group, or a pair, by position in the group."""


def placement_order(configs: Sequence[Config], readings: Readings) -> list[Unit]:
    """Return the list of Algorithm 2: compute-heavy and memory-heavy models in turn, each by falling Rreq. Neutral
    models and those without a partner come where Rreq keeps falling, or last."""
    ranked = list(range(len(configs)))
    if readings.sort:
        ranked.sort(key=lambda index: (-round(configs[index].total_pct, DIGITS), index))
    if not readings.classify:
        return [(index,) for index in ranked]
    ratio = readings.heavy_ratio
    compute = [i for i in ranked if _is_heavy(configs[i].compute_pct, configs[i].memory_pct, ratio)]
    memory = [i for i in ranked if _is_heavy(configs[i].memory_pct, configs[i].compute_pct, ratio)]
    paired = min(len(compute), len(memory))
    units: list[Unit] = []
    for pair in zip(compute, memory, strict=False):
        units += [pair] if readings.pairs == "together" else [(index,) for index in pair]
    heavy = {*compute, *memory}
    rest = sorted([*compute[paired:], *memory[paired:], *(i for i in ranked if i not in heavy)], key=ranked.index)
    for index in rest:
        own = configs[index].total_pct
        place = len(units)
        if readings.neutral == "falling" and readings.sort:
            lower = (p for p, unit in enumerate(units) if max(configs[i].total_pct for i in unit) < own - 1e-9)
            place = next(lower, len(units))
        units.insert(place, (index,))
    return units


def _is_heavy(one: float, other: float, ratio: float) -> bool:
    return one >= ratio * other and one > other


class Taken(NamedTuple):
    """GPUs that got a replica of some models: their number, and their state before (None: idle) and after."""

    models: Unit
    configs: tuple[Config, ...]
    kind: int
    before: State | None
    after: State
    gpus: int


class GpuStates:
    """The GPUs as Algorithm 2 sees them: used ones by state, idle ones by type.

    `place` changes nothing and returns a new object.
    """

    __slots__ = ("idle", "prices", "used")

    def __init__(self, used: dict[State, int], idle: tuple[float, ...], prices: Sequence[float]) -> None:
        self.used, self.idle, self.prices = used, idle, prices

    def as_others(self) -> GpuStates:
        """Return the states for the next group, which owns no GPU yet."""
        used: dict[State, int] = {}
        for state, count in self.used.items():
            other = state._replace(is_own=False)
            used[other] = used.get(other, 0) + count
        return GpuStates(used, self.idle, self.prices)

    def place(
        self, unit: Unit, configs: tuple[Config, ...], replicas: int, having: Sequence[Taken] = ()
    ) -> tuple[GpuStates, list[Taken], float]:
        """Place as many replicas as fit, each with those of the rest of the unit, on different GPUs.

        The group's own GPUs come first, then other groups'; of several, the one left with the least free compute and
        memory. Then come idle ones, the cheapest type first, which then belong to the group. Return the new states,
        what was taken, and the cost of the opened GPUs.

        Args:
            unit: the models, by position in the group.
            configs: of each.
            replicas: of each.
            having: GPUs that already have a replica of the unit.
        """
        needs = _together(configs)
        options = []
        for state in self.used:
            need = needs[state.kind]
            if need is not None:
                compute, held = state.compute_pct + need.compute_pct, state.held_pct + need.held_pct
                if compute <= FULL_PCT and held <= FULL_PCT:
                    options.append((not state.is_own, -round(compute + held, DIGITS), state, compute, held))
        options.sort()
        used, idle, left, cost = self.used, self.idle, replicas, 0.0
        taken: list[Taken] = []
        if options:
            used = dict(used)
        for _, _, state, compute, held in options:
            if left == 0:
                break
            count = min(left, used[state] - sum(each.gpus for each in having if each.after == state))
            if count <= 0:
                continue
            after = State(state.kind, round(compute, DIGITS), round(held, DIGITS), state.is_own)
            taken.append(Taken(unit, configs, state.kind, state, after, count))
            left -= count
            _move(used, state, after, count)
        if left:
            for kind in sorted(range(len(needs)), key=self.prices.__getitem__):
                count = int(min(left, idle[kind]))
                need = needs[kind]
                if count and need is not None and need.compute_pct <= FULL_PCT and need.held_pct <= FULL_PCT:
                    if used is self.used:
                        used = dict(used)
                    fresh = State(kind, round(need.compute_pct, DIGITS), round(need.held_pct, DIGITS), True)
                    used[fresh] = used.get(fresh, 0) + count
                    idle = (*idle[:kind], idle[kind] - count, *idle[kind + 1 :])
                    taken.append(Taken(unit, configs, kind, None, fresh, count))
                    left -= count
                    cost += count * self.prices[kind]
        return GpuStates(used, idle, self.prices), taken, cost

    def place_unit(self, unit: Unit, configs: Mapping[int, Config]) -> tuple[GpuStates, list[Taken], float]:
        """Place all replicas of a model or a pair: pairs together while both have replicas, then singly."""
        mine = tuple(configs[index] for index in unit)
        if len(unit) == 1:
            return self.place(unit, mine, mine[0].replicas)
        states, taken, cost = self.place(unit, mine, min(config.replicas for config in mine))
        pairs = list(taken)
        together = sum(each.gpus for each in pairs)
        for index, config in zip(unit, mine, strict=True):
            states, more, extra = states.place((index,), (config,), config.replicas - together, pairs)
            taken, cost = taken + more, cost + extra
        return states, taken, cost

    def useful(self, choices: Sequence[Choice]) -> tuple[GpuStates, dict[State, int]]:
        """Return the states without those where no configuration of these models fits, and those states."""
        least: list[tuple[float, float]] = []
        for kind in range(len(self.prices)):
            configs = [config for choice in choices for config in choice.configs]
            needs = [need for config in configs if (need := config.needs[kind]) is not None]
            least.append(
                (
                    min((n.compute_pct for n in needs), default=FULL_PCT),
                    min((n.held_pct for n in needs), default=FULL_PCT),
                )
            )
        full = {
            state: count
            for state, count in self.used.items()
            if state.compute_pct + least[state.kind][0] > FULL_PCT or state.held_pct + least[state.kind][1] > FULL_PCT
        }
        return GpuStates({s: n for s, n in self.used.items() if s not in full}, self.idle, self.prices), full


def _together(configs: tuple[Config, ...]) -> tuple[Need | None, ...]:
    if len(configs) == 1:
        return configs[0].needs
    sums: list[Need | None] = []
    for needs in zip(*(config.needs for config in configs), strict=True):
        known = [need for need in needs if need is not None]
        whole = len(known) == len(needs)
        sums.append(Need(*(sum(values) for values in zip(*known, strict=True))) if whole else None)
    return tuple(sums)


def _move(used: dict[State, int], before: State, after: State, count: int) -> None:
    used[before] -= count
    if not used[before]:
        del used[before]
    used[after] = used.get(after, 0) + count


Result = tuple[float, float, tuple[int, ...]]
"""-goodput, cost, configuration numbers by model: the smaller the better."""


class Search:
    """Algorithm 1 for one group: the configurations with the highest goodput; of these the cheapest, then the fewest
    replicas and smallest batches, model by model in the workload's order.

    Args:
        choices: the models of the group.
        states: the GPUs after the groups before.
        buys: GPUs are bought, so cost counts.
        node_limit: placements before the search settles for the best so far, which `cut` then says. 0: take the first
            configurations that could carry everything.
    """

    # Limit: placements tried for one group.
    def __init__(
        self, choices: Sequence[Choice], states: GpuStates, readings: Readings, *, buys: bool, node_limit: int = 40_000
    ) -> None:
        self._choices, self._readings, self._buys, self._limit = choices, readings, buys, node_limit
        self._states, self._full = states.useful(choices)
        self.nodes, self.cut, self._looked = 0, False, 0
        self._alone = [[self._at_most(choice, config) for config in choice.configs] for choice in choices]
        self._most = [max(values) for values in self._alone]
        rates = (max(self._per_compute(c, config) for config in c.configs) for c in choices)
        self._dearest = list(zip(rates, self._most, strict=True))  # most goodput per percent of compute, and in all
        self._best: Result | None = None
        self.states = states
        self.taken: list[Taken] = []

    def run(self) -> None:
        """Find the best configurations. Then `taken` says where their replicas are, `states` what is left."""
        first = [next(n for n, v in enumerate(values) if v >= max(values) - 1e-9) for values in self._alone]
        self._try(first)
        enough = self._best is not None and -self._best[0] >= round(sum(self._most), 6)
        if self._limit and (not enough or self._buys):
            self._improve(first)
            self._descend(self._sequences(), self._states, {}, 0.0, 0.0)
        if self._best is not None:
            chosen = self._best[2]
            states, self.taken, _ = self._placed_as(chosen)
            used = dict(self._full)
            for state, count in states.used.items():
                used[state] = used.get(state, 0) + count
            self.states = GpuStates(used, states.idle, states.prices)

    # --- one configuration ----------------------------------------------------------------------------------------

    def _at_most(self, choice: Choice, config: Config) -> float:
        """Return the most a configuration carries: alone on the cluster when there is one type, else on its best type,
        to which other models of the group may lead it."""
        if len(self._states.prices) == 1:
            return self._value(choice, config, self._states.place((0,), (config,), config.replicas)[1])
        best_rps = max(need.rate_rps for need in config.needs if need is not None)
        return choice.weight * min(choice.rate_rps, best_rps * config.replicas)

    def _placed_as(self, numbers: Sequence[int]) -> tuple[GpuStates, list[Taken], float]:
        configs = [choice.configs[number] for choice, number in zip(self._choices, numbers, strict=True)]
        states, cost = self._states, 0.0
        taken: list[Taken] = []
        for unit in placement_order(configs, self._readings):
            states, more, extra = states.place_unit(unit, dict(enumerate(configs)))
            taken, cost = taken + more, cost + extra
            self.nodes += 1
        return states, taken, cost

    def _try(self, numbers: Sequence[int]) -> Result:
        _, taken, cost = self._placed_as(numbers)
        goodput = 0.0
        for index, (choice, number) in enumerate(zip(self._choices, numbers, strict=True)):
            goodput += self._value(choice, choice.configs[number], [each for each in taken if index in each.models])
        result = (-round(goodput, 6), round(cost, 6) if self._buys else 0.0, tuple(numbers))
        if self._best is None or result < self._best:
            self._best = result
        return result

    def _improve(self, numbers: Sequence[int]) -> None:
        """Change one model at a time while that helps, so that the search has something to beat."""
        present, best, is_better = list(numbers), self._try(numbers), True
        while is_better and self.nodes < self._limit // 2:
            is_better = False
            for index, choice in enumerate(self._choices):
                for number in range(len(choice.configs)):
                    other = [*present[:index], number, *present[index + 1 :]]
                    result = self._try(other)
                    if result < best:
                        present, best, is_better = other, result, True

    @staticmethod
    def _value(choice: Choice, config: Config, taken: Sequence[Taken]) -> float:
        """Return the weighted goodput of the replicas in these places."""
        rates = ((need.rate_rps if (need := config.needs[each.kind]) else 0.0) * each.gpus for each in taken)
        return choice.weight * min(choice.rate_rps, sum(rates))

    @staticmethod
    def _per_compute(choice: Choice, config: Config) -> float:
        """Return the most goodput a percent of compute can give."""
        return max(choice.weight * need.rate_rps / need.compute_pct for need in config.needs if need is not None)

    # --- all configurations ---------------------------------------------------------------------------------------

    def _sequences(self) -> _Node:
        """Return all orders of placement as a tree: what may come next after what has been placed.

        The order depends on the batch sizes alone, so the way down chooses replica counts.
        """
        sizes: list[dict[tuple[int, float, float], list[int]]] = [
            {(c.batch_size, c.compute_pct, c.memory_pct): [] for c in choice.configs} for choice in self._choices
        ]
        for choice, by_size in zip(self._choices, sizes, strict=True):
            for number, config in enumerate(choice.configs):
                by_size[config.batch_size, config.compute_pct, config.memory_pct].append(number)
        root = _Node()
        for numbers in product(*(list(by_size.values()) for by_size in sizes)):
            configs = [choice.configs[n[0]] for choice, n in zip(self._choices, numbers, strict=True)]
            node = root
            for unit in placement_order(configs, self._readings):
                key = (unit, tuple(tuple(numbers[index]) for index in unit))
                node = node.setdefault(key, _Node())
        return root

    def _descend(self, node: _Node, states: GpuStates, chosen: dict[int, int], goodput: float, cost: float) -> None:
        if not node:
            numbers = tuple(chosen[index] for index in range(len(self._choices)))
            result = (-round(goodput, 6), round(cost, 6) if self._buys else 0.0, numbers)
            if self._best is None or result < self._best:
                self._best = result
            return
        for (unit, options), after in node.items():
            rest = [i for i in range(len(self._choices)) if i not in chosen and i not in unit]
            for numbers in product(*options):
                if self.cut:
                    return
                picked = {**chosen, **dict(zip(unit, numbers, strict=True))}
                alone = sum(self._alone[i][picked[i]] for i in unit)
                self._looked += 1
                if self._looked > LOOKS * self._limit:
                    self.cut = True
                    return
                if self._is_hopeless(goodput + alone, cost, picked, rest, states):
                    continue
                self.nodes += 1
                if self.nodes > self._limit:
                    self.cut = True
                    return
                mine = {i: self._choices[i].configs[picked[i]] for i in unit}
                below, taken, extra = states.place_unit(unit, mine)
                value = sum(
                    self._value(self._choices[i], config, [each for each in taken if i in each.models])
                    for i, config in mine.items()
                )
                if self._is_hopeless(goodput + value, cost + extra, picked, rest, below):
                    continue
                self._descend(after, below, picked, goodput + value, cost + extra)

    def _is_hopeless(
        self, goodput: float, cost: float, chosen: Mapping[int, int], rest: Sequence[int], states: GpuStates
    ) -> bool:
        """Say whether nothing below can beat the best: with all free compute spent on the best of the rest, or with the
        rest alone on the cluster."""
        if self._best is None:
            return False
        bound = goodput
        for index in rest:
            bound += self._most[index]
        if -round(bound, 6) > self._best[0]:
            return True
        if not self._buys and rest:
            free = 100.0 * sum(states.idle)
            for state, count in states.used.items():
                free += (FULL_PCT - state.compute_pct) * count
            bound = goodput
            for rate, most in sorted([self._dearest[index] for index in rest], reverse=True):
                bound += min(most, rate * free)
                free -= min(free, most / rate)
            if -round(bound, 6) > self._best[0]:
                return True
        if -round(bound, 6) < self._best[0]:
            return False
        least = tuple(chosen.get(index, 0) for index in range(len(self._choices)))
        return (-round(bound, 6), round(cost, 6) if self._buys else 0.0, least) >= self._best


class _Node(dict[tuple[Unit, tuple[tuple[int, ...], ...]], "_Node"]):
    """What may be placed next: a unit and, for each of its models, the configurations of one batch size."""
