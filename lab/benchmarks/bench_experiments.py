"""How long the thesis' experiments take in virtual time, beside what is asked of them.

Run: python lab/benchmarks/bench_experiments.py [--quick]
"""

from __future__ import annotations

import argparse
import time

from tenuto.loadgen.result_folder import hardware, versions
from tenuto_lab.experiments.case import DEFERRED, ROUTER, Case, run_case
from tenuto_lab.experiments.experiment import THESIS_POLICIES, Results, Settings
from tenuto_lab.experiments.registry import find_experiments
from tenuto_lab.experiments.runner import run_cases

FIVE_MODELS = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
HEAVIEST_RPS = 5000.0
HEAVIEST_LIMIT_S = 10.0
ALL_LIMIT_S = 600.0


def heaviest(duration_s: float) -> None:
    """Four GPUs, five models, 5,000 r/s: the heaviest point of figure 6.15, per policy and scheduler."""
    print(f"figure 6.15's heaviest point, {HEAVIEST_RPS:.0f} r/s for {duration_s:g} s (limit {HEAVIEST_LIMIT_S:g} s):")
    for policy in THESIS_POLICIES[1:]:
        for scheduler in (ROUTER, DEFERRED):
            case = Case(policy, FIVE_MODELS, (HEAVIEST_RPS / 5,) * 5, 250.0, 4, HEAVIEST_RPS, 1.0, duration_s, 0)
            started = time.perf_counter()
            row = run_case(case, (scheduler,))
            took = time.perf_counter() - started
            requests = row["runs"][scheduler]["requests"]
            print(f"  {policy:10} {scheduler:14} {took:6.2f} s for {requests:,} requests, planning included")


def whole(settings: Settings, jobs: int) -> None:
    """Figures 6.1, 6.10 and 6.15 with every policy that applies."""
    total = 0.0
    for experiment in find_experiments(("6.1", "6.10", "6.15")):
        cases = experiment.cases(settings)
        started = time.perf_counter()
        finished = run_cases(cases, experiment.schedulers, jobs=jobs, report=lambda *_: None)
        took = time.perf_counter() - started
        total += took
        seen = experiment.check(Results(finished.rows))
        reproduced = sum(one.status == "reproduced" for one in seen)
        print(
            f"  figure {experiment.name:5} {took:6.1f} s for {len(cases)} points under {len(experiment.schedulers)} "
            f"schedulers; {reproduced} of {len(seen)} observations reproduced"
        )
    print(f"  altogether {total:.1f} s on {jobs} processes (limit {ALL_LIMIT_S:g} s)")


def main() -> None:
    """Print the times with the hardware they were measured on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="Shorter runs and fewer points.")
    parser.add_argument("--jobs", type=int, default=2, help="Processes; default 2.")
    arguments = parser.parse_args()
    print(", ".join(f"{key} {value}" for key, value in hardware().items()))
    print(", ".join(f"{key} {value}" for key, value in versions().items() if key in ("tenuto", "numpy")))
    heaviest(10.0 if arguments.quick else 60.0)
    print("whole figures:")
    whole(Settings(quick=arguments.quick), arguments.jobs)


if __name__ == "__main__":
    main()
