"""A first plan for the MILP, found in milliseconds: GPUs are filled one after the other with what is worth most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tenuto.placement.costs import FULL_PCT
from tenuto_lab.baselines.milp.patterns import Item, Pattern
from tenuto_lab.baselines.milp.placement_program import PlacementProgram


def greedy_patterns(
    program: PlacementProgram, items: Mapping[str, Sequence[Sequence[Item]]], start: Sequence[tuple[Pattern, int]] = ()
) -> list[tuple[Pattern, int]]:
    """Return patterns with their counts: `start`, and GPUs filled one by one until rates or GPUs run out.

    Each GPU gets next the replica that carries most of what is left for its compute and memory. When GPUs are bought,
    the type whose GPU then carries most for its price comes next, until every rate is carried.

    Args:
        program: what is to be solved.
        items: sensible replicas by GPU type and model.
        start: counts in advance; their replicas count, and fix the batch size when there is one per model.
    """
    return _Filling(program, items, start).run()


class _Filling:
    def __init__(
        self,
        program: PlacementProgram,
        items: Mapping[str, Sequence[Sequence[Item]]],
        start: Sequence[tuple[Pattern, int]],
    ) -> None:
        self._program = program
        self._left = np.array([spec.rate_rps for spec in program.models])
        self._weight = np.array([spec.weight for spec in program.models])
        self._may = np.full(len(program.models), np.inf if program.max_replicas is None else program.max_replicas)
        self._size = np.zeros(len(program.models), dtype=np.int64)  # the one batch size of a model; 0: open
        self._counts: dict[tuple[str, tuple[tuple[int, int], ...]], tuple[Pattern, int]] = {}
        self._items = {kind: [item for group in by_model for item in group] for kind, by_model in items.items()}
        self._columns = {
            kind: (
                np.array([item.model for item in own], dtype=np.int64),
                np.array([item.carries_rps for item in own]),
                np.array([item.need.compute_pct for item in own]),
                np.array([item.held_pct for item in own]),
                np.array([item.need.batch_size for item in own], dtype=np.int64),
            )
            for kind, own in self._items.items()
        }
        for pattern, count in start:
            for _ in range(count):
                self._use(pattern)

    def run(self) -> list[tuple[Pattern, int]]:
        free = dict(self._program.gpu_counts or {})
        for pattern, count in self._counts.values():
            if pattern.gpu_type in free:
                free[pattern.gpu_type] -= count
        while (self._left > 1e-9).any():
            best: tuple[float, Pattern] | None = None
            for kind in self._program.types:
                if self._program.buys or free[kind] > 0:
                    pattern, value = self._filled(kind)
                    value /= max(self._program.prices[kind], 1e-9) if self._program.buys else 1.0
                    if pattern.items and (best is None or value > best[0]):
                        best = (value, pattern)
            if best is None:
                break
            self._use(best[1])
            if not self._program.buys:
                free[best[1].gpu_type] -= 1
        return list(self._counts.values())

    def _filled(self, kind: str) -> tuple[Pattern, float]:
        """Return a GPU filled with the replicas that are left to place, and the weighted rate it carries."""
        model, carries, compute, held, size = self._columns[kind]
        chosen: list[Item] = []
        free_compute = free_held = FULL_PCT
        value = 0.0
        if not len(model):
            return Pattern(kind, ()), 0.0
        gain = self._weight[model] * np.minimum(carries, self._left[model])
        allowed = (gain > 1e-9) & (self._may[model] > 0)
        if self._program.one_batch_size:
            allowed &= (self._size[model] == 0) | (self._size[model] == size)
        per_room = gain / np.maximum(np.maximum(compute, held), 1e-9)
        while True:
            fits = allowed & (compute <= free_compute) & (held <= free_held)
            if not fits.any():
                return Pattern(kind, tuple(sorted(chosen, key=lambda item: item.model))), value
            best = int(np.where(fits, per_room, -1.0).argmax())
            chosen.append(self._items[kind][best])
            value += float(gain[best])
            free_compute, free_held = free_compute - compute[best], free_held - held[best]
            allowed &= model != model[best]

    def _use(self, pattern: Pattern) -> None:
        for item in pattern.items:
            self._left[item.model] = max(0.0, self._left[item.model] - item.carries_rps)
            self._may[item.model] -= 1
            if self._program.one_batch_size:
                self._size[item.model] = item.need.batch_size
        _, count = self._counts.get(pattern.key, (pattern, 0))
        self._counts[pattern.key] = (pattern, count + 1)
