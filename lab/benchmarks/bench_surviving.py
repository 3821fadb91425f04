"""Whether models survive what their plans say: each domain of random plans taken away in virtual time.

Workloads draw models, rates, SLOs, nodes, racks, GPUs and load; each model draws `spread` and `survive`. Policies take
turns. Every GPU, node or rack that holds a replica of such a model is lost in a run of its own, a third of the way in,
under the scheduler `deferred` with Poisson arrivals of a seed that no planner uses. A model survives when, of the
requests after the loss, at least 99 % of `survive` times its planned part are in time. When fewer are, six times as
many other arrivals decide, because 10,000 arrivals are a few seconds, in which one burst of a model's 200 requests is
more than 1 %. Both are counted (`short`: too few of the first arrivals; `broken`: also too few of the others). Models
of which the plan itself says that they do not survive are counted apart.

Run: python lab/benchmarks/bench_surviving.py [--seeds 40] [--first-seed 5000] [--elastic]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

import numpy as np
from placement_scenes import NETWORKS, machine, thesis

from tenuto.batching.planning.losses import LossTrials
from tenuto.loadgen.simulated import Simulation
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.placement_constraints import domain_of
from tenuto.placement.planner.fault_tolerance import not_surviving
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

POLICIES = ("tenuto", "symphony", "usher", "wao-usher", "ao-milp", "wsm-milp", "gpulet", "igniter")
HELD = 0.99
REQUESTS = 10_000  # of one run
LONGER = 6  # times as many, where that shows less


def scene(seed: int, policy: str, *, elastic: bool) -> tuple[Workload, Cluster, Profiles]:
    """Return a random workload whose models ask to survive, a cluster of two to four nodes, and the profiles."""
    profiles, networks = thesis(), NETWORKS
    if policy == "igniter":  # whose coefficients only its own profile has
        profiles, networks = Profiles([load_shipped("igniter-v100")]), ("alexnet", "resnet50", "vgg19", "ssd")
    rng = random.Random(seed)
    nodes, each = rng.randint(2, 4), rng.randint(1, 3)
    load = rng.uniform(0.15, 0.5) * nodes * each
    count = rng.randint(2, 8)
    parts = [rng.uniform(0.3, 1.7) for _ in range(count)]
    kinds = ("gpu",) if elastic else ("gpu", "node", "rack")
    models = []
    for index, part in enumerate(parts):
        row = rng.choice(networks)
        profile = profiles.get(row, "v100")
        slo_ms = max(rng.choice((50, 100, 150, 200, 300)), 2.5 * profile.latency_ms(1, 100.0))
        size = max(b for b in profile.batch_sizes() if b == 1 or profile.latency_ms(b, 100.0) <= slo_ms / 2)
        rate = load * part / sum(parts) * profile.throughput_rps(size)
        model = {"name": f"{row}-{index}", "profile": row, "rate_rps": round(rate, 3), "slo_ms": round(slo_ms, 3)}
        if rng.random() < 0.7:
            model |= {"spread": rng.choice(kinds), "survive": rng.choice((0.5, 1.0))}
        models.append(model)
    given = [
        {"name": f"n{node}", "rack": f"r{node % 2}", "gpus": [{"type": "v100", "count": each}]} for node in range(nodes)
    ]
    cluster = {"nodes": given[:1] if elastic else given, "elastic": elastic}
    return Workload.model_validate({"models": models}), Cluster.model_validate(cluster), profiles


def after_loss(plan: Plan, gpus: frozenset[str], seed: int, times: int = 1) -> dict[str, float]:
    """Return which part of each model's requests that arrive after the loss is in time, in `times` as long a run."""
    duration_s = times * min(45.0, REQUESTS / sum(spec.rate_rps for spec in plan.models))
    at_s = duration_s / 3.0
    run = Simulation.of_plan(plan, duration_s=duration_s, warmup_s=at_s, seed=seed, losses=((at_s, gpus),)).run()
    counts = run.result.counts()
    names = [model.name for model in run.result.system.models]
    return {
        name: float(row[Outcome.OK]) / max(1, row.sum()) for name, row in zip(names, counts, strict=True) if row.sum()
    }


def main() -> None:
    """Judge, and print a line per plan and the sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first-seed", type=int, default=5_000)
    parser.add_argument("--elastic", action="store_true")
    asked = parser.parse_args()
    print(machine("numpy", "scipy"))
    total: Counter[str] = Counter()
    for index in range(asked.seeds):
        seed = asked.first_seed + index
        policy = POLICIES[seed % len(POLICIES)]
        workload, cluster, profiles = scene(seed, policy, elastic=asked.elastic)
        began = time.perf_counter()
        plan = solve(load_policy(policy), workload, cluster, profiles, trial=LossTrials())
        took_s = time.perf_counter() - began
        refused = not_surviving(plan)
        least, promised = 1.0, 0
        broken: list[str] = []
        short: list[str] = []
        longer: dict[frozenset[str], dict[str, float]] = {}
        after: dict[frozenset[str], dict[str, float]] = {}  # the loss of a node with one GPU is that of the GPU
        for kind in ("gpu", "node", "rack"):
            names = [s for s in plan.models if s.survive and (s.spread or "gpu") == kind]
            domains = {domain_of(gpu, kind) for gpu in plan.gpus if plan.on_gpu(gpu.id)} if names else set[str]()
            for domain in sorted(domains):
                lost = frozenset(gpu.id for gpu in plan.gpus if domain_of(gpu, kind) == domain)
                for spec in names:
                    expected = plan.expected.models.get(spec.name)
                    if expected is None or not expected.goodput_rps or spec.name in refused:
                        continue
                    if lost not in after:
                        after[lost] = after_loss(plan, lost, seed + 77_000)
                    promised += 1
                    asked_part = spec.survive * expected.goodput_rps / spec.rate_rps
                    left = after[lost].get(spec.name, 0.0) / asked_part
                    least = min(least, left)
                    if left < HELD:
                        if lost not in longer:
                            longer[lost] = after_loss(plan, lost, seed + 88_000, LONGER)
                        others = longer[lost].get(spec.name, 0.0) / asked_part
                        (broken if others < HELD else short).append(
                            f"{spec.name} after {kind} {domain}: {100 * left:.1f} %, then {100 * others:.1f} %"
                        )
        total.update(
            plans=1,
            held=not broken,
            promised=promised,
            broken=len(broken),
            short=len(short + broken),
            refused=len(refused),
        )
        gpus = np.unique([gpulet.gpu for gpulet in plan.gpulets])
        print(
            f"{seed} {policy:9} {len(workload.models)} models, {len(gpus)} of {len(plan.gpus)} GPUs, "
            f"{len(plan.gpulets)} gpu-lets, {took_s:.1f} s: least {100 * least:.1f} %, not promised "
            f"{len(refused)}",
            *(f"BROKEN {line}" for line in broken),
            *short,
            sep="; ",
            flush=True,
        )
    print(dict(total))


if __name__ == "__main__":
    sys.exit(main())
