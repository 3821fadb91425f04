"""ParvaGPU's workloads, and random ones of its eleven networks, on A100s that plans may cut into MIG instances: GPUs,
attainment in virtual time, planning time, and what a change of rates moves.

`published`: policy `parvagpu` under the schedulers `eager` and `deferred`, and policy `tenuto` under `deferred`, for
the four workloads that ParvaGPU's authors published (`tests/data/parvagpu.yaml`); S6 at ten times its rates is planned
only. `short`: two thirds of the GPUs that `parvagpu` takes, objective `each`, for the published workloads, or from
`--first-seed` on for random ones. `random`: elastic plans of both policies. `moved`: rates changed by up to 10 % each,
on GPUs that are cut as before: instances that are cut anew, and those in which a process starts or loads a model.

Run: python lab/benchmarks/bench_mig.py published|short|random|moved [--seeds 40] [--first-seed N] [--seconds 20]
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
from placement_scenes import machine

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.documents import load_document
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, ModelSpec, Plan, Workload, load_policy, solve
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.planner import PlanTask, RunningPlan
from tenuto.placement.planner.change_stages import not_ready
from tenuto.placement.planner.gpu_matching import gpus_of, match_to_running, renamed
from tenuto.placement.planner.minimal_change import changes_of, plan_with_fewest_changes
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

PROFILES = Profiles([load_shipped("parvagpu-a100")])
PUBLISHED = load_document(Path(__file__).parents[2] / "tests" / "data" / "parvagpu.yaml")
ELASTIC = Cluster.parse("a100-80gb:1:mig", elastic=True)
MOST_REQUESTS = 400_000  # of one simulation
WARM_UP_SLOS = 2.0  # times the longest SLO: requests of that model wait for as long before what is in time is steady


def published(name: str, times: float = 1.0, objective: str = "weighted") -> Workload:
    models = PUBLISHED[name]["models"].items()
    entries = [{"name": n, "rate_rps": times * rate, "slo_ms": slo} for n, (rate, slo) in models]
    return Workload.model_validate({"models": entries, "objective": objective})


def drawn(seed: int) -> Workload:
    """Return 4 to 11 networks; SLOs from a fifth below the strictest published to a fifth above the loosest; rates
    within a factor of 16 of each other, in four sizes."""
    rng = random.Random(seed)
    names = sorted(PROFILES.for_type("a100"))
    slos = {n: [s["models"][n][1] for s in PUBLISHED.values() if n in s["models"]] for n in names}
    chosen, size = rng.sample(names, rng.randint(4, 11)), rng.choice((0.5, 1, 2, 4))
    models = []
    for name in chosen:
        low, high = 0.8 * min(slos[name]), 1.2 * max(slos[name])
        rate = 300 * size * 2 ** rng.uniform(-2, 2) * (0.1 if name == "bert" else 1.0)
        models.append(ModelSpec(name=name, rate_rps=round(rate, 1), slo_ms=round(rng.uniform(low, high))))
    return Workload(models=tuple(models))


def planned(policy: str, workload: Workload, cluster: Cluster = ELASTIC) -> tuple[Plan, float]:
    """Return the plan and the processor seconds that it took."""
    began = time.process_time()
    plan = solve(load_policy(policy), workload, cluster, PROFILES)
    return plan, time.process_time() - began


def attainment(workload: Workload, plan: Plan, scheduler: str, seconds: float, seed: int) -> dict[str, float]:
    """Return the part of each model's requests in time, of Poisson arrivals behind a warm-up of two longest SLOs."""
    total = sum(spec.rate_rps for spec in workload.models)
    warm_up_s = WARM_UP_SLOS * max(spec.slo_ms for spec in workload.models) / 1000.0
    lasts_s = warm_up_s + min(seconds, max(MOST_REQUESTS / total, warm_up_s))
    rng = np.random.default_rng(seed)
    times, owners = [], []
    for index, spec in enumerate(workload.models):
        count = rng.poisson(spec.rate_rps * lasts_s)
        times.append(rng.random(count) * lasts_s * 1000.0)
        owners.append(np.full(count, index, dtype=np.int32))
    arrivals, models = np.concatenate(times), np.concatenate(owners)
    order = np.argsort(arrivals, kind="stable")
    system = from_plan(plan, check_slos=False)
    result = simulate(
        make_scheduler(scheduler, system, {}), arrivals[order], models[order], duration_s=lasts_s, warmup_s=warm_up_s
    )
    counts = result.counts()
    in_time = counts[:, Outcome.OK] / np.maximum(1, counts.sum(axis=1))
    return {spec.name: float(part) for spec, part in zip(workload.models, in_time, strict=True)}


def said(found: dict[str, float]) -> str:
    part, name = min((part, name) for name, part in found.items())
    below = sum(part < 0.99 for part in found.values())
    return f"{100 * part:.1f} % ({name}), {below} below 99 %"


def cut_as(plan: Plan, *, elastic: bool) -> Cluster:
    """Return the GPUs of a plan as they are cut, which plans may cut anew."""
    groups = []
    for device in dict.fromkeys(gpu.device for gpu in plan.gpus):
        cut = [
            {"profile": mig.profile, "start": gpu.instance.start}
            for gpu in plan.gpus
            if gpu.device == device and gpu.instance and (mig := gpu.cut_as)
        ]
        groups.append({"type": "a100-80gb", "mig": "managed", "instances": cut})
    return Cluster.model_validate({"nodes": [{"name": "n0", "gpus": groups}], "elastic": elastic})


def print_published(seconds: float, seed: int) -> None:
    print("| workload | policy, scheduler | GPUs | least attainment | planned in |\n|---|---|---|---|---|")
    for name in PUBLISHED:
        for policy, schedulers in (("parvagpu", ("eager", "deferred")), ("tenuto", ("deferred",))):
            plan, took = planned(policy, published(name))
            for scheduler in schedulers:
                found = attainment(published(name), plan, scheduler, seconds, seed)
                row = f"{policy}, {scheduler} | {plan.expected.gpus_used} | {said(found)} | {took:.1f} s |"
                print(f"| {name.upper()} | {row}", flush=True)
    plan, took = planned("tenuto", published("s6", 10.0))
    print(f"| ten times S6 | tenuto | {plan.expected.gpus_used} | | {took:.1f} s |")


def print_short(first: int, count: int, seconds: float) -> None:
    print("| workload | GPUs | mean attainment | least | most |\n|---|---|---|---|---|")
    asked = {name: (published(name, objective="each"), PUBLISHED[name]["gpus"]) for name in PUBLISHED}
    if first > 1:
        drawn_ones = {str(n): drawn(n).model_copy(update={"objective": "each"}) for n in range(first, first + count)}
        asked = {n: (each, planned("parvagpu", each)[0].expected.gpus_used) for n, each in drawn_ones.items()}
    for name, (workload, most) in asked.items():
        gpus = max(1, math.floor(2 * most / 3))
        plan, _ = planned("tenuto", workload, Cluster.parse(f"a100-80gb:{gpus}:mig"))
        found = attainment(workload, plan, "deferred", seconds, first)
        mean = sum(found.values()) / len(found)
        parts = " | ".join(f"{100 * part:.1f} %" for part in (mean, min(found.values()), max(found.values())))
        print(f"| {name.upper()} | {gpus} | {parts} |", flush=True)


def print_random(first: int, count: int, seconds: float) -> None:
    more = fewer = kept = 0
    for seed in range(first, first + count):
        workload = drawn(seed)
        (plan, took), (rival, _) = planned("tenuto", workload), planned("parvagpu", workload)
        found = attainment(workload, plan, "deferred", seconds, seed)
        ours, theirs = plan.expected.gpus_used, rival.expected.gpus_used
        more, fewer, kept = more + (ours > theirs), fewer + (ours < theirs), kept + (min(found.values()) >= 0.99)
        print(
            f"{seed}: {len(workload.models)} models, {ours} GPUs, parvagpu {theirs}, {said(found)}, {took:.1f} s",
            flush=True,
        )
    print(f"of {count}: fewer GPUs in {fewer}, more in {more}; every model at 99 % in {kept}")


def print_moved(first: int, count: int) -> None:
    moved = held = other = gpulets = near = 0
    for seed in range(first, first + count):
        workload, rng = drawn(seed), random.Random(seed)
        before, _ = planned("tenuto", workload)
        models = tuple(s.model_copy(update={"rate_rps": s.rate_rps * rng.uniform(0.9, 1.1)}) for s in workload.models)
        after, _ = planned("tenuto", Workload(models=models), cut_as(before, elastic=True))
        old = {(gpu.id, gpu.type): gpu.device for gpu in before.gpus}
        left = {gpu.device for gpu in after.gpus}
        new = Counter(gpu.device for gpu in after.gpus if (gpu.id, gpu.type) not in old and gpu.device in old.values())
        held, moved = held + len(old), moved + sum(new.values())
        laid = renamed(match_to_running(after, before, gpus_of(after), keep_idle=False), before)
        starts = not_ready(before, laid)
        filled = {gpulet.gpu for gpulet in laid.gpulets if gpulet.id in starts and gpulet.gpu in {g for g, _ in old}}
        other += len(filled)
        gpus = f"{before.expected.gpus_used} → {after.expected.gpus_used} GPUs"
        changes = f"{sum(new.values())} of {len(old)} instances cut anew, {len(filled)} with other models"
        asked, cluster = Workload(models=models), cut_as(before, elastic=True)
        running = RunningPlan(before, Traffic.declared(models))
        stays = plan_with_fewest_changes(
            PlanTask(load_policy("tenuto"), asked, cluster, PROFILES, running=running), after
        )
        gpulets, near = gpulets + len(before.gpulets), near + changes_of(before, stays)
        changes += f"; near: {changes_of(before, stays)} of {len(before.gpulets)} gpu-lets change"
        print(f"{seed}: {gpus}, {changes}, {len(left)} GPUs in use", flush=True)
    print(f"{100 * moved / held:.1f} % of {held} instances cut anew, {100 * other / held:.1f} % with other models")
    print(f"near what runs: {100 * near / gpulets:.1f} % of {gpulets} gpu-lets start or load a model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("published", "short", "random", "moved"))
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    print(machine("numpy", "scipy"))
    if given.what == "published":
        print_published(given.seconds, given.first_seed)
    elif given.what == "short":
        print_short(given.first_seed, given.seeds, given.seconds)
    elif given.what == "random":
        print_random(given.first_seed, given.seeds, given.seconds)
    else:
        print_moved(given.first_seed, given.seeds)


if __name__ == "__main__":
    main()
