"""USHER's Algorithms 1 and 2 word by word: every configuration tried, every replica placed by itself, GPU by GPU.

Written from the paper's steps and imports nothing of the project, so that it can judge it. Slow on purpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product

EPSILON = 1e-9


@dataclass(frozen=True)
class Model:
    """A model: rate, and (Creq %, Mreq %, requests/s) by GPU type and batch size; all of them are within its SLO."""

    name: str
    rate: float
    needs: dict[str, dict[int, tuple[float, float, float]]]


@dataclass
class Gpu:
    kind: str
    compute: float = 0.0
    memory: float = 0.0
    group: int = -1
    replicas: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Readings:
    neutral: str = "falling"
    pairs: str = "single"
    classify: bool = True
    sort: bool = True
    replication: bool = True
    ratio: float = 1.2


def counts_of(model: Model, gpus: dict[str, int], elastic: bool, readings: Readings) -> list[int]:
    """RD: c, 2c, ..., 6c, where c GPUs of the highest type carry the rate at the largest batch."""
    highest = max(model.needs, key=lambda kind: model.needs[kind][max(model.needs[kind])][2])
    carries = model.needs[highest][max(model.needs[highest])][2]
    least = math.ceil(model.rate / carries - 1e-9)
    most = math.inf if elastic else sum(gpus[kind] for kind in model.needs)
    return [m * least for m in range(1, 7 if readings.replication else 2) if m * least <= most]


def mean(model: Model, size: int) -> tuple[float, float]:
    """Creq and Mreq of a batch size, averaged over the GPU types."""
    known = [by_size[size] for by_size in model.needs.values() if size in by_size]
    return sum(n[0] for n in known) / len(known), sum(n[1] for n in known) / len(known)


def order(chosen: dict[str, tuple[Model, int, int]], readings: Readings) -> list[tuple[str, ...]]:
    """The list of Algorithm 2, step 3."""
    names = list(chosen)
    needs = {name: mean(model, size) for name, (model, size, _) in chosen.items()}
    total = {name: sum(needs[name]) for name in names}
    ranked = sorted(names, key=lambda n: (-round(total[n], 9), names.index(n))) if readings.sort else names
    if not readings.classify:
        return [(name,) for name in ranked]
    heavy_c = [n for n in ranked if needs[n][0] >= readings.ratio * needs[n][1] and needs[n][0] > needs[n][1]]
    heavy_m = [n for n in ranked if needs[n][1] >= readings.ratio * needs[n][0] and needs[n][1] > needs[n][0]]
    found: list[tuple[str, ...]] = []
    while heavy_c and heavy_m:
        pair = (heavy_c.pop(0), heavy_m.pop(0))
        found += [pair] if readings.pairs == "together" else [(pair[0],), (pair[1],)]
    placed = {name for unit in found for name in unit}
    for name in [n for n in ranked if n not in placed]:
        at = len(found)
        if readings.neutral == "falling" and readings.sort:
            for position, unit in enumerate(found):
                if max(total[n] for n in unit) < total[name] - 1e-9:
                    at = position
                    break
        found.insert(at, (name,))
    return found


def place(
    unit: tuple[str, ...],
    chosen: dict[str, tuple[Model, int, int]],
    wanted: int,
    gpus: list[Gpu],
    idle: dict[str, float],
    prices: dict[str, float],
    group: int,
) -> int:
    """Place that many replicas of a unit one by one, no model twice on a GPU; return how many found a place."""

    needs: dict[str, tuple[float, float]] = {}
    for kind in prices:
        parts = [chosen[name][0].needs.get(kind, {}).get(chosen[name][1]) for name in unit]
        if None not in parts:
            needs[kind] = sum(part[0] for part in parts if part), sum(part[1] for part in parts if part)
    rank = {kind: position for position, kind in enumerate(prices)}
    found = 0
    for _ in range(wanted):
        best = None
        for index, gpu in enumerate(gpus):
            if gpu.kind not in needs or any(held in unit for held, _ in gpu.replicas):
                continue
            own = needs[gpu.kind]
            compute, memory = gpu.compute + own[0], gpu.memory + own[1]
            if compute > 100 + EPSILON or memory > 100 + EPSILON:
                continue
            key = (gpu.group != group, round(200 - compute - memory, 9), rank[gpu.kind], compute, index)
            if best is None or key < best[0]:
                best = (key, index)
        if best is None:
            kinds = [k for k in needs if idle[k] > 0 and max(needs[k]) <= 100 + EPSILON]
            if not kinds:
                break
            kind = min(kinds, key=lambda k: prices[k])
            idle[kind] -= 1
            gpus.append(Gpu(kind, group=group))
            best = ((), len(gpus) - 1)
        gpu = gpus[best[1]]
        own = needs[gpu.kind]
        gpu.compute, gpu.memory = gpu.compute + own[0], gpu.memory + own[1]
        gpu.replicas += [(name, chosen[name][1]) for name in unit]
        found += 1
    return found


def solve_group(
    members: list[Model],
    gpus: list[Gpu],
    idle: dict[str, float],
    prices: dict[str, float],
    counts: dict[str, int],
    *,
    elastic: bool,
    group: int,
    readings: Readings,
) -> tuple[float, float, list[Gpu], dict[str, float]]:
    """Algorithm 1: try every configuration; the highest goodput, then the lowest cost, then the fewest replicas and
    smallest batches, model by model."""
    options = []
    for model in members:
        sizes = sorted({size for by_size in model.needs.values() for size in by_size})
        options.append(sorted((rd, size) for rd in counts_of(model, counts, elastic, readings) for size in sizes))
    best = None
    for configuration in product(*options):
        chosen = {m.name: (m, size, rd) for m, (rd, size) in zip(members, configuration, strict=True)}
        trial = [Gpu(g.kind, g.compute, g.memory, g.group, list(g.replicas)) for g in gpus]
        left = dict(idle)
        for unit in order(chosen, readings):
            both = place(unit, chosen, min(chosen[n][2] for n in unit), trial, left, prices, group)
            if len(unit) > 1:
                for name in unit:
                    place((name,), chosen, chosen[name][2] - both, trial, left, prices, group)
        goodput = 0.0
        for model in members:
            carried = sum(
                model.needs[g.kind][size][2] for g in trial for name, size in g.replicas if name == model.name
            )
            goodput += min(model.rate, carried)
        cost = sum(prices[g.kind] for g in trial) if elastic else 0.0
        key = (-round(goodput, 6), round(cost, 6), configuration)
        if best is None or key < best[0]:
            best = (key, goodput, trial, left)
    if best is None:
        return 0.0, 0.0, gpus, idle
    return best[1], best[0][1], best[2], best[3]


def solve(
    groups: list[list[Model]], counts: dict[str, int], prices: dict[str, float], *, elastic: bool, readings: Readings
) -> tuple[float, float, dict[str, float]]:
    """Return the goodput, the cost of the GPUs in use and the goodput by model of all groups one after the other."""
    gpus: list[Gpu] = []
    idle = {kind: math.inf if elastic else float(count) for kind, count in counts.items()}
    for number, group in enumerate(groups):
        members = [model for model in group if counts_of(model, counts, elastic, readings)]
        if members:
            _, _, gpus, idle = solve_group(
                members, gpus, idle, prices, counts, elastic=elastic, group=number, readings=readings
            )
    by_model = {}
    for group in groups:
        for model in group:
            carried = sum(model.needs[g.kind][size][2] for g in gpus for n, size in g.replicas if n == model.name)
            by_model[model.name] = min(model.rate, carried)
    return sum(by_model.values()), sum(prices[g.kind] for g in gpus), by_model
