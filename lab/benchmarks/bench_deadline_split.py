"""How many GPUs applications take on an elastic cluster with the planner's split of their deadlines, beside brute force
over all splits on a grid: for each of them, policy `tenuto` searches batches and layouts by trials, as for its own, on
one GPU less than the best so far. Splits are left out whose largest batches in time take more GPU time than that.

    python lab/benchmarks/bench_deadline_split.py [--seeds 1000-1039]
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator

import numpy as np

from tenuto.batching.planning.tenuto_policy import TenutoPolicy
from tenuto.documents import parse_document
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.application import Application
from tenuto.placement.costs import costs_of
from tenuto.placement.deadline_split import batch_choices, least_price
from tenuto.profiles import Profiles

CLUSTER = Cluster.parse("v100:1", elastic=True)
STEPS = {2: 20, 3: 12, 4: 8}  # parts of the SLO that budgets are multiples of, by the number of stages
MOST_SPLITS = 24  # drawn of the grid where it has more


def random_workload(seed: int) -> Workload:
    """Return one application of 2 to 4 stages, whose cheapest batches take 0.7 to 3.5 GPUs."""
    draws = np.random.default_rng([seed, 45])
    count = int(draws.integers(2, 5))
    shape = str(draws.choice(["chain", "fork", "any"]))
    stages = []
    for place in range(count):
        earlier = range(place)
        after = {
            "chain": [place - 1] if place else [],
            "fork": [0] if place else [],
            "any": [before for before in earlier if draws.random() < 0.6],
        }[shape]
        latency = {"alpha_ms": float(np.exp(draws.uniform(-1.5, 1.0))), "beta_ms": float(draws.uniform(1.0, 15.0))}
        times = int(draws.choice([1, 1, 1, 2, 4]))
        stages.append({"model": f"m{place}", "after": [f"m{a}" for a in after], "latency": latency, "count": times})
    application = {"name": "app", "rate_rps": 1.0, "slo_ms": 1.0, "stages": stages}
    unit = parse_document(Workload, {"applications": [application]})
    costs = costs_of(unit, CLUSTER, Profiles(()))
    alone_ms = {s["model"]: s["latency"]["alpha_ms"] + s["latency"]["beta_ms"] for s in stages}
    ends: dict[str, float] = {}
    for stage in stages:
        ends[stage["model"]] = alone_ms[stage["model"]] + max((ends[a] for a in stage["after"]), default=0.0)
    slo_ms = float(draws.uniform(4.0, 14.0)) * max(ends.values())
    price = CLUSTER.prices["v100"]
    each = sum(batch_choices(costs[m.name], m.rate_rps, CLUSTER.prices)[-1].cost for m in unit.models)
    rate_rps = float(draws.uniform(0.7, 3.5)) * price / each
    return parse_document(Workload, {"applications": [{**application, "rate_rps": rate_rps, "slo_ms": slo_ms}]})


def grid(application: Application, seed: int) -> list[tuple[int, ...]]:
    """Return the splits in parts of the SLO such that no path exceeds it and no stage could have a part more."""
    steps = STEPS[len(application.stages)]

    def is_within(parts: tuple[int, ...]) -> bool:
        ends: dict[str, int] = {}
        for stage, part in zip(application.stages, parts, strict=True):
            ends[stage.label] = part + max((ends[label] for label in stage.after), default=0)
        return max(ends.values()) <= steps

    def larger(parts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for place in range(len(parts)):
            yield (*parts[:place], parts[place] + 1, *parts[place + 1 :])

    every = itertools.product(range(1, steps + 1), repeat=len(application.stages))
    splits = [parts for parts in every if is_within(parts) and not any(map(is_within, larger(parts)))]
    if len(splits) > MOST_SPLITS:
        chosen = np.random.default_rng([seed, 46]).choice(len(splits), MOST_SPLITS, replace=False)
        splits = [splits[place] for place in sorted(chosen.tolist())]
    return splits


def with_split(workload: Workload, parts: tuple[int, ...]) -> Workload:
    """Return the workload with these parts of its application's deadline."""
    (application,) = workload.applications
    budgets = [part * application.slo_ms / STEPS[len(parts)] for part in parts]
    stages = [s.model_copy(update={"budget_ms": ms}) for s, ms in zip(application.stages, budgets, strict=True)]
    return workload.with_budgets([application.model_copy(update={"stages": tuple(stages)})])


def least_gpus(workload: Workload) -> float:
    """Return the GPU time that the models take at least, in GPUs: with the batches within their SLOs, without waiting;
    infinite where one request is late."""
    costs, gpus = costs_of(workload, CLUSTER, Profiles(())), 0.0
    for model in workload.models:
        steps = costs[model.name]["v100"].steps()
        each = [ms / size for size, ms in enumerate(steps) if size and ms <= model.slo_ms]
        gpus += model.rate_rps * min(each, default=math.inf) / 1000.0
    return gpus


def price_of(plan: Plan) -> float:
    """Return the price of a plan; infinite where it serves a model less than asked."""
    return math.inf if plan.unserved_reasons else plan.expected.price


def main() -> int:
    """Print a row for each workload, and how many are within 2 % of the best."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0-9", help="of the workloads, first and last")
    parser.add_argument("--requests", type=int, default=2000, help="of a trial")
    given = parser.parse_args()
    first, last = map(int, given.seeds.split("-"))
    policy, near = TenutoPolicy(requests=given.requests), 0
    print("| seed | stages | splits tried | bound | best | planner | s |\n|---|---|---|---|---|---|---|")
    for seed in range(first, last + 1):
        work, begun = random_workload(seed), time.perf_counter()
        own = price_of(solve(policy, work, CLUSTER, Profiles(())))
        took_s = time.perf_counter() - begun
        bound = least_price(work, CLUSTER, Profiles(()))
        best, tried, price = own, 0, CLUSTER.prices["v100"]
        for parts in grid(work.applications[0], seed):
            split, fewer = with_split(work, parts), round(best / price) - 1
            if best <= bound * (1.0 + 1e-6) or fewer < 1:
                break
            while fewer and least_gpus(split) <= fewer:
                tried += 1
                if solve(policy, split, Cluster.parse(f"v100:{fewer}"), Profiles(())).unserved_reasons:
                    break
                best, fewer = fewer * price, fewer - 1
        near += own <= 1.02 * best
        cells = (seed, len(work.models), tried, *(f"{x:.2f}" for x in (bound, best, own)), f"{took_s:.1f}")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    count = last - first + 1
    print(f"within 2 % of the best: planner {near} of {count}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
