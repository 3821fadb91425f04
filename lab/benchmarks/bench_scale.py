"""CPU seconds of one plan, expectation included, by policy and number of models, with as many V100 as models.

Models over eleven networks, 250 r/s each on average, SLO 150 to 300 ms; `--scarce` plans them on half as many GPUs.
With `--igniter` iGniter's workloads instead, again and again with 30 to 100 % of their rates, for policies that need
measured shares and coefficients.

Run: python lab/benchmarks/bench_scale.py [--policies symphony,usher] [--sizes 100,300] [--scarce] [--igniter]
"""

from __future__ import annotations

import argparse
import time

from bench_igniter_speed import workloads
from placement_scenes import machine, mixed_workload, thesis

from tenuto.placement import Cluster, load_policy, solve
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

POLICIES = "symphony,usher,wao-usher,sbp,ffd,gpulet,tenuto"
OF_SHARES = "igniter,ffd+,ffd++,gslice,gpulets+,self-tuning,mps-default"  # `ideal` and the MILPs say what they can do
SIZES = "100,300,1000,3000"
RATE_RPS = 250.0


def main() -> None:
    """Print one line per policy and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", help=f"default: {POLICIES}; with --igniter {OF_SHARES}")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--scarce", action="store_true", help="half as many GPUs as models")
    parser.add_argument("--igniter", action="store_true", help="iGniter's workloads by its measured shares")
    given = parser.parse_args()
    profiles = Profiles([load_shipped("igniter-v100")]) if given.igniter else thesis()
    policies = given.policies or (OF_SHARES if given.igniter else POLICIES)
    print(machine("numpy", "scipy", "highspy", "tenuto"))
    for size in map(int, given.sizes.split(",")):
        workload = workloads(size) if given.igniter else mixed_workload(size, RATE_RPS * size, seed=3)
        cluster = Cluster.parse(f"v100:{max(1, size // 2) if given.scarce else size}")
        for name in policies.split(","):
            started = time.process_time()
            plan = solve(load_policy(name), workload, cluster, profiles)
            took_s = time.process_time() - started
            print(
                f"{size:>5} models, {len(cluster.gpus):>5} GPUs, {name:<11} {took_s:8.2f} s, expected "
                f"{plan.expected.goodput_rps:,.0f} of {workload.rate_rps:,.0f} r/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
