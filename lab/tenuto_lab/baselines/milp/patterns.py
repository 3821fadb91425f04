"""Patterns: the sets of replicas that fit together on one GPU, the columns of the MILP.

The MILP counts the GPUs of a type with each pattern. Deciding for every GPU apart would add the symmetry of identical
GPUs. A pattern holds at most one replica of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tenuto.placement.costs import FULL_PCT
from tenuto.placement.workload import ModelSpec
from tenuto_lab.baselines.requirements import Requirement


@dataclass(frozen=True)
class Item:
    """A replica that a pattern may hold. `carries_rps` is its throughput, at most the model's whole rate; `held_pct`
    its memory with its process's context."""

    model: int
    need: Requirement
    carries_rps: float
    slo_ms: float
    held_pct: float


@dataclass(frozen=True)
class Pattern:
    """Replicas on one GPU of a type. `exposure` sums, over the replicas, each neighbour's batch time as a part of the
    replica's SLO: 0 alone; the smaller, the less neighbours can do."""

    gpu_type: str
    items: tuple[Item, ...]

    @property
    def key(self) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Its identity: GPU type, models and batch sizes."""
        return self.gpu_type, tuple((item.model, item.need.batch_size) for item in self.items)

    @property
    def exposure(self) -> float:
        """Sum over replicas i and neighbours j of l_j / SLO_i."""
        total = sum(item.need.latency_ms for item in self.items)
        return sum((total - item.need.latency_ms) / item.slo_ms for item in self.items)

    @property
    def load(self) -> float:
        """Compute and memory used, as a part of one GPU each."""
        return sum(item.need.total_pct for item in self.items) / 100.0


class TooManyPatternsError(Exception):
    """There are more patterns than asked for; columns must be generated on demand."""


def items_of(
    workload: Sequence[ModelSpec],
    usable: Mapping[str, Mapping[str, Sequence[Requirement]]],
    context_pct: Mapping[str, float],
    *,
    one_batch_size: bool,
) -> dict[str, list[list[Item]]]:
    """Return the sensible replicas of each model by GPU type.

    A batch size is left out when another one of the model carries at least as much with no more compute and memory (the
    smaller of equals stays): it could be replaced in every plan without loss. With `one_batch_size` the other one has
    to be as good on every type, as all types change at once.

    Args:
        workload: the models.
        usable: by GPU type and model.
        context_pct: a process context's part of the memory, by GPU type.
        one_batch_size: all replicas of a model have the same size.
    """
    by_kind: dict[str, list[list[Item]]] = {kind: [] for kind in usable}
    for index, spec in enumerate(workload):
        items = {
            kind: [
                Item(
                    index, need, min(need.throughput_rps, spec.rate_rps), spec.slo_ms, need.held_pct(context_pct[kind])
                )
                for need in by_model[spec.name]
            ]
            for kind, by_model in usable.items()
        }
        if one_batch_size:
            sizes = sorted({item.need.batch_size for own in items.values() for item in own})
            by_size = {b: {k: i for k, own in items.items() for i in own if i.need.batch_size == b} for b in sizes}
            worse = {b for b in sizes if any(_is_better(by_size[c], by_size[b], c < b) for c in sizes if c != b)}
            items = {kind: [item for item in own if item.need.batch_size not in worse] for kind, own in items.items()}
        for kind, own in items.items():
            by_kind[kind].append(
                own
                if one_batch_size
                else [one for one in own if not any(_dominates(other, one) for other in own if other is not one)]
            )
    return by_kind


def _is_better(one: Mapping[str, Item], other: Mapping[str, Item], is_smaller: bool) -> bool:
    """Say whether a batch size can replace another on every type where the other is usable."""
    if not one.keys() >= other.keys():
        return False
    if any(not _at_least(one[kind], item) for kind, item in other.items()):
        return False
    return is_smaller or any(not _at_least(item, one[kind]) for kind, item in other.items())


def _at_least(one: Item, other: Item) -> bool:
    """Say whether a replica carries as much as another of the same model with no more compute and memory."""
    return (
        one.carries_rps >= other.carries_rps
        and one.need.compute_pct <= other.need.compute_pct
        and one.held_pct <= other.held_pct
    )


def _dominates(one: Item, other: Item) -> bool:
    return _at_least(one, other) and (not _at_least(other, one) or one.need.batch_size < other.need.batch_size)


def enumerate_patterns(gpu_type: str, items: Sequence[Sequence[Item]], limit: int) -> list[Pattern]:
    """Return every pattern.

    Raises:
        TooManyPatternsError: there are more than `limit`.
    """
    patterns: list[Pattern] = []
    for chosen in _combinations(items, 0, 0.0, 0.0):
        patterns.append(Pattern(gpu_type, chosen))
        if len(patterns) > limit:
            raise TooManyPatternsError
    return patterns


def _combinations(
    items: Sequence[Sequence[Item]], start: int, compute: float, memory: float
) -> Iterator[tuple[Item, ...]]:
    for index in range(start, len(items)):
        for item in items[index]:
            new_compute, new_memory = compute + item.need.compute_pct, memory + item.held_pct
            if new_compute <= FULL_PCT and new_memory <= FULL_PCT:
                yield (item,)
                for rest in _combinations(items, index + 1, new_compute, new_memory):
                    yield (item, *rest)


def patterns_worth(
    gpu_type: str, items: Sequence[Sequence[Item]], worth: Callable[[Item], float], threshold: float, limit: int
) -> tuple[list[Pattern], bool]:
    """Return patterns whose items are together worth more than `threshold`, best first; at most `limit`, and whether
    these are all.

    The search goes depth first over models by value per compute. A bound prunes it: the value that the rest of the
    GPU's compute could add at the best ratio left.
    """
    ratios: list[tuple[float, int]] = []
    for index, group in enumerate(items):
        if group:
            ratios.append((max(0.0, *(worth(item) / max(item.need.compute_pct, 1e-6) for item in group)), index))
    ratios.sort(key=lambda pair: (-pair[0], pair[1]))
    order = [index for _, index in ratios]
    best_ratio = [ratio for ratio, _ in ratios] + [0.0]
    best_value = [max(0.0, *map(worth, items[i])) for i in order]
    rest_value = [0.0] * (len(order) + 1)
    for position in range(len(order) - 1, -1, -1):
        rest_value[position] = rest_value[position + 1] + best_value[position]
    valued: list[tuple[float, Pattern]] = []
    complete = True
    steps = 0

    def descend(position: int, compute: float, memory: float, value: float, chosen: tuple[Item, ...]) -> None:
        nonlocal complete, steps
        steps += 1
        if value > threshold and chosen:
            valued.append((value, Pattern(gpu_type, tuple(sorted(chosen, key=lambda item: item.model)))))
        if len(valued) >= 4 * limit or steps > 200 * limit:  # limit: of the search
            complete = False
            return
        for later in range(position, len(order)):
            if value + min(rest_value[later], (FULL_PCT - compute) * best_ratio[later]) <= threshold:
                return
            for item in items[order[later]]:
                new_compute, new_memory = compute + item.need.compute_pct, memory + item.held_pct
                if new_compute <= FULL_PCT and new_memory <= FULL_PCT:
                    descend(later + 1, new_compute, new_memory, value + worth(item), (*chosen, item))

    descend(0, 0.0, 0.0, 0.0, ())
    valued.sort(key=lambda pair: (-pair[0], [(item.model, item.need.batch_size) for item in pair[1].items]))
    return [pattern for _, pattern in valued[:limit]], complete and len(valued) <= limit
