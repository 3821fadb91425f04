"""How long USHER's grouping and placement take, from 20 models on 24 GPUs to 6,000 GPUs, beside the paper's times.

Run: python lab/benchmarks/bench_usher_speed.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from statistics import fmean

from placement_scenes import machine, mixed_workload, thesis

from tenuto.placement import Cluster
from tenuto_lab.baselines.requirements import Requirement, requirements_of
from tenuto_lab.baselines.usher.grouping import group_models
from tenuto_lab.baselines.usher.usher import Usher, WaoUsher

# USHER (OSDI 2024), table 2: 20 models, 24 V100; grouping 0.1 s, decision 0.51 s.
PAPER_GROUPING_S, PAPER_DECISION_S = 0.1, 0.51
# Models, GPUs, requests per second.
FEW_MODELS = ((20, 24, 4_000), (20, 240, 60_000), (20, 1_000, 300_000), (20, 3_000, 1_000_000), (20, 6_000, 2_000_000))
MANY_MODELS = ((100, 120, 30_000), (400, 480, 120_000), (1_000, 1_200, 300_000))


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Return the median CPU time of a call in seconds."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return statistics.median(times)


def mean_need(measured: Sequence[Requirement]) -> tuple[float, float]:
    """Return Creq and Mreq averaged over the batches."""
    return fmean(one.compute_pct for one in measured), fmean(one.memory_pct for one in measured)


def main() -> None:
    """Print one line per policy and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, one repeat")
    arguments = parser.parse_args()
    sizes = FEW_MODELS[:2] if arguments.quick else FEW_MODELS + MANY_MODELS
    profiles = thesis()
    print(machine("networkx", "tenuto"))
    print(f"paper, 20 models on 24 GPUs: grouping {PAPER_GROUPING_S} s, decision {PAPER_DECISION_S} s")
    head = f"{'policy':<10} {'models':>6} {'GPUs':>6} {'rps':>9} {'grouping s':>11} {'decision s':>11} {'used':>6}"
    print(f"{head} {'goodput':>10}")
    for policy in (Usher(), WaoUsher()):
        for models, gpus, rps in sizes:
            workload, cluster = mixed_workload(models, rps), Cluster.parse(f"v100:{gpus}")
            needs = requirements_of(workload, cluster, profiles, policy.compute_metric, policy.memory_metric)
            averages = {name: mean_need(by_type["v100"].measured) for name, by_type in needs.items()}
            repeats = 1 if arguments.quick or models > 100 else 5
            grouping = median_s(lambda averages=averages: group_models(averages, 4), repeats)
            plan = policy.place(workload, cluster, profiles)
            decision = median_s(lambda w=workload, c=cluster, p=policy: p.place(w, c, profiles), repeats)
            used = len({gpulet.gpu for gpulet in plan.gpulets})
            print(
                f"{policy.name:<10} {models:>6} {gpus:>6} {rps:>9} {grouping:>11.4f} {decision:>11.3f} {used:>6} "
                f"{plan.expected.goodput_rps:>10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
