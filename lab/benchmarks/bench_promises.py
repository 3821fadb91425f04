"""What plans promise against what they serve in virtual time: every policy on random workloads nobody tuned on.

Workloads draw models, rates, SLOs, GPUs, and the part of the cluster that they need (`load`, as policy `symphony`
counts it). Plans are simulated under the scheduler `deferred` with Poisson arrivals of a seed that no planner uses.
Printed for each policy: the error of the total, the plans within 2 %, the models promised in full that got less than
98 %, and the models that got 99 %, promised in full or not. The policy's own figures (`believed`) stand beside these.

Run: python lab/benchmarks/bench_promises.py [--seeds 20] [--first-seed 1000] [--policies ffd,usher]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from placement_scenes import NETWORKS, machine, thesis

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.trial import Trials
from tenuto.errors import TenutoError
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

sys.path.insert(0, str(Path(__file__).parents[2]))

POLICIES = (
    "ffd",
    "ffd+",
    "ffd++",
    "gslice",
    "gpulets+",
    "igniter",
    "usher",
    "wao-usher",
    "ao-milp",
    "wsm-milp",
    "gpulet",
    "sbp",
    "symphony",
    "self-tuning",
    "mps-default",
    "ideal",
    "tenuto",
)
JUDGE_SEED = 7_001
IN_FULL, SERVED = 0.99, 0.98


@dataclass(frozen=True)
class Scene:
    """A random workload on a cluster, and the profiles that know its models."""

    workload: Workload
    cluster: Cluster
    profiles: Profiles


def scenes(first: int, count: int) -> Iterator[Scene]:
    """Return scenes of whole GPUs (thesis, latencies of V100) and of measured shares (iGniter's V100) in turn."""
    shares = Profiles([load_shipped("igniter-v100")])
    whole = thesis()
    for seed in range(first, first + count):
        rng = random.Random(seed)
        profiles = (whole, shares)[seed % 2]
        networks = NETWORKS if profiles is whole else ("alexnet", "resnet50", "vgg19", "ssd")
        models = rng.randint(2, 12)
        gpus = rng.randint(1, 6)
        load = rng.uniform(0.3, 1.4)
        drawn = []
        for index in range(models):
            row = rng.choice(networks)
            profile = profiles.get(row, "v100")
            slo = rng.choice((50, 100, 150, 200, 300)) if profiles is whole else rng.choice((20, 30, 50, 100))
            slo = max(slo, 2.5 * profile.latency_ms(1, 100.0))
            able = [p for p in profile.batch_sizes(100.0) if profile.latency_ms(p, 100.0) <= slo / 2]
            capacity = max(profile.throughput_rps(size, 100.0) for size in able)
            drawn.append((f"m{index}", row, slo, capacity, rng.uniform(0.3, 1.7)))
        total = sum(weight for *_, weight in drawn)
        entries = [
            {"name": name, "profile": row, "slo_ms": slo, "rate_rps": round(load * gpus * capacity * weight / total, 3)}
            for name, row, slo, capacity, weight in drawn
        ]
        yield Scene(Workload.model_validate({"models": entries}), Cluster.parse(f"v100:{gpus}"), profiles)


def served(plan: Plan, workload: Workload, seconds: float, seed: int = JUDGE_SEED) -> dict[str, tuple[float, float]]:
    """Return (offered, in time) of every model in requests per second."""
    requests = int(seconds * sum(spec.rate_rps for spec in workload.models))
    trials = Trials(
        workload.models,
        requests=min(max(requests, 5_000), 20_000),
        seed=seed,
        scheduler="deferred",
        network=NetworkDelay(),
    )
    if not plan.gpulets:
        return {spec.name: (spec.rate_rps, 0.0) for spec in workload.models}
    trial = trials.run(plan)
    return {
        spec.name: (float(offered), float(ok))
        for spec, offered, ok in zip(workload.models, trial.offered_rps, trial.ok_rps, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1_000)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    print(machine("numpy", "scipy"))
    print(
        "| policy | plans | promised / simulated: mean | worst | within 2 % | models promised in full "
        f"| of these below {100 * SERVED:g} % | got it in full | believed / simulated |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.policies.split(","):
        ratios, believed, full, broken, in_full = [], [], 0, 0, 0
        for number, scene in enumerate(scenes(given.first_seed, given.seeds)):
            try:
                plan = solve(load_policy(name), scene.workload, scene.cluster, scene.profiles)
            except TenutoError:
                continue
            got = served(plan, scene.workload, 20.0)
            promised = {n: m.goodput_rps for n, m in plan.expected.models.items()}
            total = sum(promised.values())
            # Of the rates that came, not of those planned: the draw of arrivals is not the planner's error.
            asked = {spec.name: spec.rate_rps for spec in scene.workload.models}
            real = sum(ok * asked[n] / offered if offered else 0.0 for n, (offered, ok) in got.items())
            if real <= 0:
                continue
            ratios.append(total / real)
            if plan.believed is not None:
                believed.append(plan.believed.goodput_rps / real)
            for n, rate in promised.items():
                offered, ok = got[n]
                in_full += ok >= IN_FULL * offered
                if rate >= IN_FULL * asked[n]:
                    full += 1
                    if ok < SERVED * offered:
                        broken += 1
                        if given.verbose:
                            got_pct = 100 * ok / offered
                            print(f"   {number} {n}: promised {rate:.1f} of {asked[n]:.1f}, got {got_pct:.1f} %")
            if given.verbose:
                off_pct = 100 * (total / real - 1)
                print(
                    f"  {number}: promised {total:.1f} of {sum(asked.values()):.1f}, simulated {real:.1f} "
                    f"({off_pct:+.1f} %)"
                )
        if not ratios:
            print(f"| {name} | 0 | | | | | | | |")
            continue
        r = np.array(ratios)
        worst = float(r[np.abs(r - 1).argmax()])
        own = f"{np.mean(believed):.3f}" if believed else "–"
        near_pct = 100 * np.mean(np.abs(r - 1) <= 0.02)
        print(
            f"| {name} | {len(r)} | {r.mean():.3f} | {worst:.3f} | {near_pct:.0f} % | {full} | {broken} | {in_full} "
            f"| {own} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
