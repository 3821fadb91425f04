"""How many of gpulet's 1,023 scenarios each policy accepts: gpulet with and without interference, SBP, ideal.

The scenarios are all combinations of 0, 200, 400, 600 r/s for five models but the empty one (Choi et al., section 3).
The paper's latency tables (RTX 2080 Ti) were never published, so these are V100 figures on the `igniter-v100` profile:
four networks, ResNet-50 for two clients, SLO = twice the solo latency at a batch of 32 on the whole GPU. The
paper's comparison, on 4 GPUs: gpulet+int accepts 18 scenarios (1.8 %) fewer than ideal.

Run: python lab/benchmarks/bench_gpulet_scenarios.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from pathlib import Path

from placement_scenes import machine

from tenuto.placement import Cluster, Policy
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tenuto_lab.baselines.ideal import Ideal
from tenuto_lab.baselines.sbp import SquishyBinPacking

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.placement.policies.gpulet.turns import FIVE, IGNITER, carried, five_models

POLICIES: dict[str, Policy] = {
    "gpulet": GpuletPolicy(),
    "gpulet+int": GpuletPolicy(interference=True),
    "sbp": SquishyBinPacking(max_batch=32),
    "sbp, halves": SquishyBinPacking(halves=True, max_batch=32),
    "ideal": Ideal(),
}


def main() -> None:
    """Print accepted scenarios and planning time per policy and cluster, and the inclusions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every 20th scenario")
    parser.add_argument("--gpus", default="1,2,3,4", help="cluster sizes")
    arguments = parser.parse_args()
    scenarios = list(product((0, 200, 400, 600), repeat=len(FIVE)))[1 :: 20 if arguments.quick else 1]
    print(machine("tenuto"))
    for gpus in map(int, arguments.gpus.split(",")):
        cluster = Cluster.parse(f"v100:{gpus}")
        accepted: dict[str, set[tuple[int, ...]]] = {name: set() for name in POLICIES}
        seconds = dict.fromkeys(POLICIES, 0.0)
        unproven = 0
        for rates in scenarios:
            workload = five_models(**{name.replace("-", "_"): rate for name, rate in zip(FIVE, rates, strict=True)})
            for name, policy in POLICIES.items():
                start = time.process_time()
                plan = policy.place(workload, cluster, IGNITER)
                seconds[name] += time.process_time() - start
                if carried(plan, workload):
                    accepted[name].add(rates)
                unproven += any("search stopped" in note for note in plan.notes)
        print(f"\n{gpus} V100, {len(scenarios)} scenarios ({unproven} searches of ideal stopped early)")
        for name, found in accepted.items():
            print(f"  {name:<12} {len(found):>5} accepted, {1000 * seconds[name] / len(scenarios):8.2f} ms per plan")
        difference = len(accepted["ideal"]) - len(accepted["gpulet+int"])
        share = f"{difference / len(scenarios):.1%}"
        print(f"  gpulet+int accepts {difference} ({share}) fewer than ideal; published 18 (1.8 %)")
        print(
            f"  gpulet+int within gpulet: {accepted['gpulet+int'] <= accepted['gpulet']}; within ideal: "
            + ", ".join(f"{name} {accepted[name] <= accepted['ideal']}" for name in POLICIES if name != "ideal")
        )


if __name__ == "__main__":
    main()
