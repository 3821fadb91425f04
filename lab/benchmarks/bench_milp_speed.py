"""How long the MILP policies take on 8 to 64 GPUs, and how far from the proven bound they stop.

Run: python lab/benchmarks/bench_milp_speed.py [--quick]
"""

from __future__ import annotations

import argparse
import time

from placement_scenes import machine, mixed_workload, thesis

from tenuto.placement import Cluster
from tenuto_lab.baselines.milp.milp import AoMilp, MilpPolicy, WsmMilp

# Models, GPUs, requests per second: each size once with GPUs to spare and once overloaded.
SIZES = (
    (10, 8, 2_500),
    (10, 8, 5_000),
    (10, 16, 5_000),
    (10, 16, 10_000),
    (20, 32, 10_000),
    (20, 32, 20_000),
    (20, 64, 20_000),
    (20, 64, 40_000),
)
TARGET = "target: 10 models on 8 GPUs in under 10 s"


def main() -> None:
    """Print one line per policy and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 GPUs only")
    parser.add_argument("--time-limit-s", type=float, default=10.0)
    arguments = parser.parse_args()
    profiles = thesis()
    print(machine("scipy", "tenuto"))
    print(TARGET)
    print(f"{'policy':<22} {'models':>6} {'GPUs':>5} {'offered':>8} {'goodput':>8} {'time s':>7}  result")
    policies: list[tuple[str, MilpPolicy]] = [
        ("ao-milp", AoMilp(time_limit_s=arguments.time_limit_s)),
        ("wsm-milp", WsmMilp(time_limit_s=arguments.time_limit_s)),
        ("wsm-milp own batches", WsmMilp(time_limit_s=arguments.time_limit_s, one_batch_size=False)),
    ]
    for label, policy in policies:
        for models, gpus, rps in SIZES[:2] if arguments.quick else SIZES:
            workload = mixed_workload(models, rps)
            started = time.perf_counter()
            plan = policy.place(workload, Cluster.parse(f"v100:{gpus}"), profiles)
            elapsed = time.perf_counter() - started
            print(
                f"{label:<22} {models:>6} {gpus:>5} {workload.rate_rps:>8.0f} {plan.expected.goodput_rps:>8.0f} "
                f"{elapsed:>7.2f}  {plan.notes[0]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
