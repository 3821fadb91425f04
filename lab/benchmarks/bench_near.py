"""Plans near one that runs: random small cases under every policy, and the time of a large one.

Small: 2 to 6 models on 2 to 6 V100s; then rates change, a model goes or comes, or a GPU is gone. The plan near the old
one is made without a limit and with 0 to 3 changes allowed, and judged by `tests/instruments/near_plans.py`. Large: a
tenth of the models takes half as much again, a hundredth goes, and as many come. With `--wake` one model that had left
comes back instead, as the controller's planner sees it: a model that was idle and is asked again.

Run: python lab/benchmarks/bench_near.py [--seeds 20] [--first-seed 0] [--models 1000 --gpus 1000 [--wake]]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from placement_scenes import machine, mixed_workload, thesis

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, load_policy, solve
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.plan import PolicyUsed
from tenuto.placement.plan_edits import for_workload
from tenuto.placement.planner import ChangeTerms, Durations, PlanRequest, PlanTask, RunningPlan, propose
from tenuto.placement.planner.completion import check_plan
from tenuto.placement.planner.minimal_change import changes_of, plan_with_fewest_changes

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.instruments.near_plans import POLICIES, judged

SOME = 20  # changes that are allowed of a large plan


def small(seeds: range) -> None:
    """Judge random small cases under every policy."""
    total: Counter[str] = Counter()
    for seed in seeds:
        for policy in POLICIES:
            found = judged(seed, policy)
            print(f"{seed} {policy:9} changes {found.changes}", *found.faults, sep="; ", flush=True)
            total.update(found.sums, cases=1, faults=len(found.faults))
    print(dict(total))


def timed(what: str, planned: Callable[[], Plan]) -> Plan:
    """Make a plan and print what it took and what it promises."""
    began, cpu = time.perf_counter(), time.process_time()
    plan = planned()
    took = f"{time.process_time() - cpu:.1f} s of CPU time, {time.perf_counter() - began:.1f} s"
    print(f"{what}: {took}, {plan.expected.goodput_rps:,.0f} rps on {plan.expected.gpus_used} GPUs", flush=True)
    return plan


def large(count: int, gpus: int, policy: str, seed: int) -> None:
    """Time one large case."""
    before, rng = mixed_workload(count, count * 100.0, seed), random.Random(seed)
    models = []
    for index, spec in enumerate(before.models):
        kind = rng.random()
        more = {"rate_rps": spec.rate_rps * 1.5} if kind < 0.1 else {"name": f"new-{index}"} if kind < 0.11 else {}
        models.append(spec.model_copy(update=more))
    after = before.model_copy(update={"models": tuple(models)})
    on, profiles = Cluster.parse(f"v100:{gpus}"), thesis()
    loaded = load_policy(policy)
    old = timed("before", lambda: solve(loaded, before, on, profiles))
    anew = timed("anew", lambda: solve(loaded, after, on, profiles))
    for limit in (None, SOME):
        running = RunningPlan(old, Traffic.declared(after.models), most_changes=limit)
        task = PlanTask(loaded, after, on, profiles, running=running)
        try:
            plan = timed(f"near, at most {limit}", partial(plan_with_fewest_changes, task, anew))
            check_plan(plan, on)
            print(plan.notes[-1], flush=True)
        except InvalidInputError as error:
            print(f"at most {limit}: {error}", flush=True)


def woken(count: int, gpus: int, policy: str, seeds: range) -> None:
    """Time the planner's answer when one model comes back."""
    on, profiles, used = Cluster.parse(f"v100:{gpus}"), thesis(), PolicyUsed(name=policy)
    for seed in seeds:
        workload = mixed_workload(count, count * 100.0, seed)
        plan, away = solve(load_policy(policy), workload, on, profiles), random.Random(seed).choice(workload.models)
        models = tuple(spec for spec in workload.models if spec != away)
        left = for_workload(plan, workload.model_copy(update={"models": models}))
        traffic = Traffic(Traffic.declared(workload.models).mean_rps, sigmas=3.0)
        terms = ChangeTerms(traffic.mean_rps, Durations(10.0, 3.0), 300.0, 0.2, 30.0)
        request = PlanRequest(workload, on.gpus, used, RunningPlan(left, traffic, terms))
        cpu = time.process_time()
        answer = propose(request, profiles)
        took, changes = time.process_time() - cpu, 0 if answer.plan is None else changes_of(left, answer.plan)
        print(f"{seed}: {took:.2f} s of CPU time, {answer.how}, changes: {changes}, {answer.worth.why}", flush=True)


def main() -> None:
    """Judge small cases, or time a large one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--models", type=int)
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--policy", default="symphony")
    parser.add_argument("--wake", action="store_true")
    asked = parser.parse_args()
    print(machine("numpy", "scipy"))
    if asked.wake:
        woken(asked.models, asked.gpus, asked.policy, range(asked.first_seed, asked.first_seed + asked.seeds))
    elif asked.models:
        large(asked.models, asked.gpus, asked.policy, asked.first_seed)
    else:
        small(range(asked.first_seed, asked.first_seed + asked.seeds))


if __name__ == "__main__":
    main()
