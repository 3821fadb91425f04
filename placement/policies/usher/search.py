"""USHER's Algorithms 1 and 2: batch sizes, replica counts and GPUs for one group of models.

GPUs in the same state are handled together as a *room*, so that thousands of GPUs cost no more than a few. The search
over
configurations is exact: depth first in the order of placement, pruned by an upper bound of the goodput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tenuto.placement.policies.shared.requirements import Requirement

__all__ = ["Choice", "Config", "Placement", "Room", "Search", "place_replicas"]

FULL = 100.0 + 1e-9  # percent of a GPU; the margin is for rounding in sums
UNLIMITED = 10**9  # GPUs that may still be bought


class Room(NamedTuple):
    """`gpus` GPUs of one type with the same load in percent, numbered from `start` within their type."""

    gpu_type: str
    start: int
    gpus: int
    compute_pct: float = 0.0
    memory_pct: float = 0.0
    used: bool = False

    def takes(self, config: Config) -> bool:
        """Say whether one replica of a configuration fits on a GPU of this room."""
        need = config.needs.get(self.gpu_type)
        return (
            need is not None
            and self.compute_pct + need.compute_pct <= FULL
            and self.memory_pct + need.memory_pct <= FULL
        )


@dataclass(frozen=True)
class Config:
    """A batch size and a replica count for one model. `needs` says what a replica costs on each usable GPU type."""

    needs: Mapping[str, Requirement]
    batch_size: int
    replicas: int
    order_pct: float  # Rreq on the highest type: the order of placement within the group

    def rate_rps(self, placed: Mapping[str, int]) -> float:
        """Return the requests per second that `placed` replicas per GPU type carry."""
        return sum(self.needs[kind].throughput_rps * count for kind, count in placed.items())


@dataclass(frozen=True)
class Choice:
    """A model of the group with what may be chosen for it, fewest replicas and smallest batch first."""

    name: str
    rate_rps: float
    weight: float
    configs: tuple[Config, ...]


@dataclass(frozen=True)
class Placement:
    """A model's configuration and the GPUs it got: (GPU type, first number, count) ranges."""

    config: Config
    ranges: tuple[tuple[str, int, int], ...]


def heaviness(compute_pct: float, memory_pct: float, ratio: float) -> int:
    """Return 1 for compute-heavy (Creq >= ratio * Mreq), -1 for memory-heavy, 0 for balanced or empty."""
    if compute_pct >= ratio * memory_pct and compute_pct > memory_pct:
        return 1
    if memory_pct >= ratio * compute_pct and memory_pct > compute_pct:
        return -1
    return 0


def place_replicas(
    rooms: Sequence[Room], config: Config, heavy_ratio: float, *, balance: bool = True
) -> tuple[list[Room], list[tuple[str, int, int]]]:
    """Algorithm 2: put replicas of one model on different GPUs, as many as fit; returns the new rooms and the ranges
    taken.

    GPUs in use come before idle ones. Among those, a compute-heavy replica prefers GPUs loaded memory-heavily and the
    other way round, then the GPU on which |sum Creq - sum Mreq| becomes smallest, then the lowest number; the paper
    leaves the order of ties open. With `balance` off: the lowest number (first fit).
    """
    kinds = {kind: position for position, kind in enumerate(config.needs)}
    own = {kind: heaviness(need.compute_pct, need.memory_pct, heavy_ratio) for kind, need in config.needs.items()}
    candidates: list[tuple[tuple[float, ...], int, float, float]] = []
    for index, room in enumerate(rooms):
        need = config.needs.get(room.gpu_type)
        if need is None:
            continue
        compute, memory = room.compute_pct + need.compute_pct, room.memory_pct + need.memory_pct
        if compute > FULL or memory > FULL:
            continue
        if not room.used:
            key: tuple[float, ...] = (1, kinds[room.gpu_type], 0, room.start)
        elif balance:
            there = heaviness(room.compute_pct, room.memory_pct, heavy_ratio)
            key = (0, own[room.gpu_type] * there, round(abs(compute - memory), 9), room.start)
        else:
            key = (0, kinds[room.gpu_type], 0, room.start)
        candidates.append((key, index, compute, memory))
    candidates.sort()
    left = config.replicas
    ranges: list[tuple[str, int, int]] = []
    after = list(rooms)
    for _, index, compute, memory in candidates:
        if left == 0:
            break
        room = rooms[index]
        count = min(left, room.gpus)
        after[index] = Room(room.gpu_type, room.start, count, compute, memory, True)
        if count < room.gpus:
            after.append(room._replace(start=room.start + count, gpus=room.gpus - count))
        ranges.append((room.gpu_type, room.start, count))
        left -= count
    return after, ranges


class Search:
    """Algorithm 1 for one group: the configurations with the highest goodput, or the lowest cost on an open cluster.

    Models are placed by descending Rreq of the configuration tried. Equal results: the fewest replicas, then the
    smallest batches, model by model in the workload's order, which is the order of a plain loop over all combinations.

    Args:
        prices: price per hour by GPU type when GPUs are bought, else None.
        node_limit: placements tried before the search settles for the best so far; `cut` then says so.
    """

    def __init__(
        self, choices: Sequence[Choice], rooms: Sequence[Room], heavy_ratio: float, *, balance: bool = True,
        prices: Mapping[str, float] | None = None, node_limit: int = 40_000,
    ) -> None:
        self.rooms, self.heavy_ratio, self.balance = list(rooms), heavy_ratio, balance
        self.prices, self.node_limit, self.nodes, self.cut = prices, node_limit, 0, False
        self.bounds: list[float] = []
        self.choices: list[Choice] = []
        for choice in choices:
            bound = max((self._alone(choice, config) for config in choice.configs), default=0.0)
            if bound > 0:
                self.choices.append(choice)
                self.bounds.append(bound)
        self.best: tuple[float, float, tuple[int, ...]] | None = None  # -goodput, cost, configuration numbers
        self.best_placements: dict[str, Placement] = {}
        self.best_rooms = self.rooms

    def run(self) -> dict[str, Placement]:
        """Return the placement of every model that got a GPU; `best_rooms` holds the state afterwards."""
        chosen = [0] * len(self.choices)
        self._descend(self.rooms, chosen, frozenset(range(len(chosen))), (float("inf"), 0), 0.0, 0.0, {})
        return {name: placement for name, placement in self.best_placements.items() if placement.ranges}

    def _value(self, choice: Choice, config: Config, ranges: Sequence[tuple[str, int, int]]) -> float:
        placed: dict[str, int] = {}
        for kind, _, count in ranges:
            placed[kind] = placed.get(kind, 0) + count
        return choice.weight * min(choice.rate_rps, config.rate_rps(placed))

    def _alone(self, choice: Choice, config: Config) -> float:
        """Return the weighted goodput of a model when the rest of the group is not there: an upper bound."""
        _, ranges = place_replicas(self.rooms, config, self.heavy_ratio, balance=self.balance)
        return self._value(choice, config, ranges)

    def _cost(self, ranges: Sequence[tuple[str, int, int]], rooms: Sequence[Room]) -> float:
        if self.prices is None:
            return 0.0
        idle = {(room.gpu_type, room.start) for room in rooms if not room.used}
        return sum(self.prices[kind] * count for kind, start, count in ranges if (kind, start) in idle)

    def _descend(
        self, rooms: list[Room], chosen: list[int], left: frozenset[int], last: tuple[float, int],
        goodput: float, cost: float, placements: dict[str, Placement],
    ) -> None:
        if not left:
            result = (-round(goodput, 6), round(cost, 6), tuple(chosen))
            if self.best is None or result < self.best:
                self.best, self.best_placements, self.best_rooms = result, dict(placements), rooms
            return
        bound = goodput + sum(self.bounds[index] for index in left)
        if self.best is not None and (-round(bound, 6), round(cost, 6), self._least(chosen, left)) >= self.best:
            return
        for index in sorted(left):
            choice = self.choices[index]
            rest = left - {index}
            for number, config in enumerate(choice.configs):
                key = (config.order_pct, -index)
                if key >= last or not all(self._can_follow(other, key) for other in rest):
                    continue
                self.nodes += 1
                if self.nodes > self.node_limit and self.best is not None:
                    self.cut = True
                    return
                after, ranges = place_replicas(rooms, config, self.heavy_ratio, balance=self.balance)
                chosen[index] = number
                placements[choice.name] = Placement(config, tuple(ranges))
                self._descend(after, chosen, rest, key, goodput + self._value(choice, config, ranges),
                              cost + self._cost(ranges, rooms), placements)
                chosen[index] = 0
                del placements[choice.name]

    def _can_follow(self, index: int, key: tuple[float, int]) -> bool:
        return any((config.order_pct, -index) < key for config in self.choices[index].configs)

    @staticmethod
    def _least(chosen: Sequence[int], left: frozenset[int]) -> tuple[int, ...]:
        return tuple(0 if index in left else number for index, number in enumerate(chosen))
