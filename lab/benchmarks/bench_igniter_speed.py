"""How long iGniter's placement takes, from its paper's 12 workloads to 2,000, beside the paper's times; and how many
GPUs its baselines take for the same workloads.

Run: python lab/benchmarks/bench_igniter_speed.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from pathlib import Path

from placement_scenes import machine

from tenuto.placement import Cluster, Policy, Workload
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.first_fit import FirstFitPlus, FirstFitPlusPlus
from tenuto_lab.baselines.gpulets_plus import GpuletsPlus
from tenuto_lab.baselines.gslice import Gslice
from tenuto_lab.baselines.igniter.igniter import Igniter

FACTS = json.loads((Path(__file__).parents[2] / "tests" / "data" / "igniter_workloads_and_results.json").read_text())
PUBLISHED = {"igniter": "igniter", "ffd+": "ffd_plus", "gslice": "gslice_plus", "gpulets+": "gpu_lets_plus"}


def workloads(count: int, seed: int = 0) -> Workload:
    """Return the paper's workloads; beyond twelve again and again, with rates of 30 to 100 % of theirs."""
    rng = random.Random(seed)
    rows = FACTS["table3_workloads"]
    models = []
    for index in range(count):
        row = rows[index % len(rows)]
        part = 1.0 if index < len(rows) else rng.uniform(0.3, 1.0)
        models.append(
            {
                "name": f"{row['id']}-{index}",
                "profile": row["model"],
                "slo_ms": row["slo_ms"],
                "rate_rps": row["rate_rps"] * part,
            }
        )
    return Workload.model_validate({"models": models})


def main() -> None:
    """Print one line per policy and number of workloads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 100 workloads")
    quick = parser.parse_args().quick
    profiles, cluster = Profiles([load_shipped("igniter-v100")]), Cluster.parse("v100:1", elastic=True)
    overhead, gpus = FACTS["headline"]["overhead"], FACTS["headline"]["gpus"]
    policies: dict[str, Policy] = {
        "igniter": Igniter(),
        "ffd++": FirstFitPlusPlus(),
        "ffd+": FirstFitPlus(),
        "gslice": Gslice(),
        "gpulets+": GpuletsPlus(),
    }
    print(machine("tenuto"))
    print(
        f"paper (iGniter): 12 workloads {overhead['12_workloads_ms']} ms, 1,000 workloads "
        f"{overhead['1000_workloads_s']} s; its GPUs for the 12 stand in brackets"
    )
    print(f"{'policy':<13} {'workloads':>9} {'ms, median':>11} {'ms, slowest':>11} {'GPUs':>9}")
    for name, policy in policies.items():
        for count in (12, 100) if quick else (12, 50, 100, 250, 500, 1_000, 2_000):
            if name != "igniter" and count > 1_000:
                continue
            workload = workloads(count)
            times = []
            plan = policy.place(workload, cluster, profiles)
            for _ in range(25 if count <= 100 else 5 if count < 1_000 else 3):
                started = time.process_time()
                policy.place(workload, cluster, profiles)
                times.append(1000.0 * (time.process_time() - started))
            stated = f" ({gpus[PUBLISHED[name]]})" if count == 12 and name in PUBLISHED else ""
            used = len({gpulet.gpu for gpulet in plan.gpulets})
            found = f"{statistics.median(times):>11.2f} {max(times):>11.2f} {f'{used}{stated}':>9}"
            print(f"{name:<13} {count:>9,} {found}", flush=True)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process {peak_mib:.0f} MiB (paper: {overhead['12_workloads_mb']} MB for 12 workloads)")


if __name__ == "__main__":
    main()
