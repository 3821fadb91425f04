"""The goodput a plan may promise: what its gpu-lets carry of each program within the deadlines, as a flow.

Requests of a model wait in one queue for all gpu-lets that host it. A batch is gathered for as long as its deadline
allows, so that its size follows from rate and SLO: the largest b with l(b) + b / rate <= SLO, at most the planned one
(Symphony, section 3.3). Gpu-lets that share programs, directly or through others, are one *pool*, which serves what
fits into the time of its gpu-lets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from tenuto.placement.plan import Expected, ExpectedModel, Plan
from tenuto.placement.program import Gpulet, Program
from tenuto.placement.workload import ModelSpec

__all__ = ["expected_of"]

ROUNDS = 6  # of adapting slowdowns to how busy neighbours are


@dataclass
class _Kind:
    """Gpu-lets that are alike: the same programs at the same latencies beside the same neighbours."""

    programs: tuple[Program, ...]
    gpulets: list[int] = field(default_factory=list)
    busy: float = 1.0


@dataclass(frozen=True)
class _Asked:
    """What a program is asked for: the rate of all its models, and the strictest of their SLOs."""

    rate_rps: float
    slo_ms: float
    weight: float


def expected_of(plan: Plan) -> Expected:
    """Return what a plan promises of each model, and the latency of its slowest replica's batch."""
    specs = {spec.name: spec for spec in plan.models}
    kinds = _kinds(plan)
    asked = _asked(kinds, specs)
    beside = _neighbours(plan, kinds)
    served: dict[str, float] = {}
    for _ in range(ROUNDS):
        served = {}
        busy: dict[int, float] = {}
        for pool in _pools(kinds):
            done, used = _served(pool, asked, beside, plan.objective)
            served |= done
            busy |= used
        change = max((abs(busy[id(kind)] - kind.busy) for kind in kinds), default=0.0)
        for kind in kinds:
            kind.busy = busy[id(kind)]
        if change < 1e-3:
            break
    latency = _latencies(plan)
    models = {}
    for kind in kinds:
        for program in kind.programs:
            for name in program.models:
                if name in specs:
                    part = min(1.0, served[program.name] / asked[program.name].rate_rps)
                    goodput = round(part * specs[name].rate_rps, 6)
                    models[name] = ExpectedModel(goodput_rps=goodput, latency_ms=latency[name])
    ordered = {spec.name: models[spec.name] for spec in plan.models if spec.name in models}
    return Expected(goodput_rps=round(sum(model.goodput_rps for model in ordered.values()), 6), models=ordered)


def _kinds(plan: Plan) -> list[_Kind]:
    """Return the gpu-lets of a plan by what they are alike in; thousands of them are of a few kinds."""
    by_gpu = plan.by_gpu()
    found: dict[object, _Kind] = {}
    on_gpu = {gpu: tuple(_told(g) for g in gpulets) for gpu, gpulets in by_gpu.items()}
    for index, gpulet in enumerate(plan.gpulets):
        own = _told(gpulet)
        key = (own, on_gpu[gpulet.gpu] if len(on_gpu[gpulet.gpu]) > 1 else None)
        if key not in found:
            found[key] = _Kind(tuple(p for p in gpulet.programs if p.latency is not None))
        found[key].gpulets.append(index)
    return list(found.values())


def _told(gpulet: Gpulet) -> tuple[object, ...]:
    return (
        gpulet.share_pct, tuple((r.name, r.batch_size, r.slowdown, r.latency_ms) for r in gpulet.models),
        tuple(group.models for group in gpulet.merge),
    )


def _asked(kinds: Sequence[_Kind], specs: Mapping[str, ModelSpec]) -> dict[str, _Asked]:
    found = {}
    for kind in kinds:
        for program in kind.programs:
            members = [specs[name] for name in program.models if name in specs]
            if members and program.name not in found:
                rate = sum(spec.rate_rps for spec in members)
                weight = sum(spec.weight * spec.rate_rps for spec in members) / rate
                found[program.name] = _Asked(rate, min(spec.slo_ms for spec in members), weight)
    return found


def _neighbours(plan: Plan, kinds: Sequence[_Kind]) -> dict[int, list[_Kind]]:
    """Return the kinds of the gpu-lets beside one of each kind."""
    kind_of = {index: kind for kind in kinds for index in kind.gpulets}
    at: dict[str, list[int]] = defaultdict(list)
    for index, gpulet in enumerate(plan.gpulets):
        at[gpulet.gpu].append(index)
    found = {}
    for kind in kinds:
        first = kind.gpulets[0]
        found[id(kind)] = [kind_of[other] for other in at[plan.gpulets[first].gpu] if other != first]
    return found


def _pools(kinds: Sequence[_Kind]) -> Iterable[list[_Kind]]:
    """Return the kinds that share programs, directly or through others."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for kind in kinds:
        for program in kind.programs[1:]:
            parent[root(program.name)] = root(kind.programs[0].name)
    pools: dict[str, list[_Kind]] = defaultdict(list)
    for kind in kinds:
        if kind.programs:
            pools[root(kind.programs[0].name)].append(kind)
    return pools.values()


def _served(
    pool: Sequence[_Kind], asked: Mapping[str, _Asked], beside: Mapping[int, list[_Kind]], objective: str
) -> tuple[dict[str, float], dict[int, float]]:
    """Return the rate served of every program of a pool, and how busy the gpu-lets of each kind are."""
    names = list(dict.fromkeys(p.name for kind in pool for p in kind.programs if p.name in asked))
    times = [
        {p.name: _time_per_request_s(p, asked[p.name], _mean_slowdown(p, beside[id(kind)])) for p in kind.programs
         if p.name in asked}
        for kind in pool
    ]
    if len(pool) == 1:
        done = _in_one(names, times[0], asked, len(pool[0].gpulets), objective)
        load = sum(done[name] * times[0][name] for name in names)
        return done, {id(pool[0]): min(1.0, load / len(pool[0].gpulets))}
    flows = _flows(names, pool, times, asked, objective)
    done = {name: min(asked[name].rate_rps, sum(flows.get((name, k), 0.0) for k in range(len(pool)))) for name in names}
    busy = {
        id(kind): min(1.0, sum(flows.get((name, k), 0.0) * time for name, time in times[k].items()) / len(kind.gpulets))
        for k, kind in enumerate(pool)
    }
    return done, busy


def _mean_slowdown(program: Program, neighbours: Sequence[_Kind]) -> float:
    """Return the slowdown with neighbours that run part of the time."""
    if not neighbours:
        return 1.0
    return 1.0 + (program.slowdown - 1.0) * sum(kind.busy for kind in neighbours) / len(neighbours)


def _time_per_request_s(program: Program, asked: _Asked, slowdown: float) -> float:
    """Return the seconds of a gpu-let that a request takes in the largest batch that is gathered in time."""
    latency = program.latency
    assert latency is not None
    gap_ms = 1000.0 / asked.rate_rps
    best = float("inf")
    for size in range(1, program.batch_size + 1):
        batch_ms = latency.at(size) * slowdown
        if size > 1 and batch_ms + size * gap_ms > asked.slo_ms:
            break
        if batch_ms <= asked.slo_ms:
            best = min(best, batch_ms / size / 1000.0)
    return best


def _in_one(
    names: Sequence[str], times: Mapping[str, float], asked: Mapping[str, _Asked], gpulets: int, objective: str
) -> dict[str, float]:
    """Return what alike gpu-lets serve: everything, or the cheapest first, or all in the same proportion."""
    load = sum(asked[name].rate_rps * times[name] for name in names if times[name] < float("inf"))
    if load <= gpulets:
        return {name: asked[name].rate_rps if times[name] < float("inf") else 0.0 for name in names}
    if objective == "each":
        return {name: asked[name].rate_rps * gpulets / load if times[name] < float("inf") else 0.0 for name in names}
    left, done = float(gpulets), dict.fromkeys(names, 0.0)
    for name in sorted(names, key=lambda name: times[name] / (asked[name].weight if objective == "weighted" else 1.0)):
        if times[name] < float("inf"):
            done[name] = min(asked[name].rate_rps, left / times[name])
            left -= done[name] * times[name]
    return done


def _flows(
    names: Sequence[str], pool: Sequence[_Kind], times: Sequence[Mapping[str, float]], asked: Mapping[str, _Asked],
    objective: str,
) -> dict[tuple[str, int], float]:
    """Return how much of each program every kind of gpu-let serves: the best flow by the workload's objective."""
    pairs = [(name, k) for k, own in enumerate(times) for name, time in own.items() if time < float("inf")]
    if not pairs:
        return {}
    place = {name: row for row, name in enumerate(names)}
    rows = [place[name] for name, _ in pairs] + [len(names) + k for _, k in pairs]
    columns = [*range(len(pairs))] * 2
    values = [1.0] * len(pairs) + [times[k][name] for name, k in pairs]
    upper = [asked[name].rate_rps for name in names] + [float(len(kind.gpulets)) for kind in pool]
    total = sum(asked[name].rate_rps for name in names)
    worth = [-(asked[name].weight if objective == "weighted" else 1.0) / total for name, _ in pairs]
    if objective == "each":  # the least part of any rate first, then as much as possible on top
        able = {name for name, _ in pairs}
        for name in able:
            rows.append(len(upper))
            values.append(asked[name].rate_rps)
            columns.append(len(pairs))
            for column in (column for column, (other, _) in enumerate(pairs) if other == name):
                rows.append(len(upper))
                columns.append(column)
                values.append(-1.0)
            upper.append(0.0)
        worth = [*(1e-4 * value for value in worth), -1.0]
    matrix = coo_array((values, (rows, columns)), shape=(len(upper), len(worth))).tocsr()
    bounds = [(0.0, None)] * len(pairs) + [(0.0, 1.0)] * (len(worth) - len(pairs))
    result = linprog(worth, A_ub=matrix, b_ub=np.array(upper), bounds=bounds)
    return dict(zip(pairs, map(float, result.x), strict=False))


def _latencies(plan: Plan) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for gpulet in plan.gpulets:
        for replica in gpulet.models:
            before = found.get(replica.name)
            found[replica.name] = max(before, replica.latency_ms) if before and replica.latency_ms else (
                before or replica.latency_ms
            )
    return found
