"""Applications live against virtual time: the same arrivals on a local Ray with emulated GPUs, over HTTP and the Python
handle, and in the simulator. All times are stretched, so that few cores can serve them.

    python lab/benchmarks/bench_applications.py [--seconds 10] [--stretch 4]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))  # for `tests`, where this is not the folder it is started in

from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.result_folder import hardware, versions
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, solve
from tenuto.profiles import Profiles
from tenuto_lab.baselines.ffd import FirstFitDecreasing
from tests.instruments.fan_out import published

WAYS: tuple[Literal["http", "handle"], ...] = ("http", "handle")


def main() -> int:
    """Print attainment and median latency of every application, simulated and live."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each run")
    parser.add_argument("--stretch", type=float, default=4.0, help="factor on all times")
    parser.add_argument("--seed", type=int, default=5, help="of the arrivals")
    asked = parser.parse_args()
    plan = solve(FirstFitDecreasing(), published(asked.stretch), Cluster.parse("v100:2"), Profiles(()))
    simulation = Simulation.of_plan(plan, duration_s=asked.seconds, seed=asked.seed)
    rows: dict[str, dict[str, Any]] = {"virtual time": simulation.run().summary()["applications"]}
    with Launcher() as launcher:
        launcher.connect(num_gpus=2, address="local")
        end_all()
        begin(launcher, Deployment(plan=plan, executor="emulated"), "a run", "the laboratory")
        for via in WAYS:
            options = BenchOptions(launcher.base_url, asked.seconds, asked.seed, clients=1, grace_s=2.0, via=via)
            result = run_bench(plan.models, options, applications=plan.applications)
            rows[via] = result.summary["applications"]
    print(f"{hardware()}\n{versions()}")
    print("| application | offered | " + " | ".join(f"{way}: in time, median ms" for way in rows) + " |")
    print("|---|---|" + "---|" * len(rows))
    for name, expected in rows["virtual time"].items():
        cells = [f"{100 * way[name]['attainment']:.1f} %, {way[name]['p50_ms']:.0f}" for way in rows.values()]
        print(f"| {name} (SLO {expected['slo_ms']:g}) | {expected['offered']} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
