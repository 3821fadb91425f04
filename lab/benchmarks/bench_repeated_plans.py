"""Whether every policy plans many models on as many GPUs, and the same plan twice.

Each plan is made in two processes with different hash seeds, so that the order of a set would show. The workload is
that of `bench_scale.py` on the thesis' profile; policies that need iGniter's coefficients get its twelve workloads
again and again.

Run: python lab/benchmarks/bench_repeated_plans.py [--models 1000] [--gpus 1000] [--limit-s 300] [POLICY ...]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from placement_scenes import machine, mixed_workload, thesis

from tenuto.errors import TenutoError, first_line
from tenuto.placement import Cluster, Workload, load_policy, policy_names, solve
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

sys.path.insert(0, str(Path(__file__).parents[2]))
from lab.tests.baselines.igniter.cases import twelve


def many(count: int) -> Workload:
    """Return so many models, iGniter's twelve again and again."""
    rows = twelve().models
    models = (
        rows[index % len(rows)].model_copy(update={"name": f"{rows[index % len(rows)].name}-{index}"})
        for index in range(count)
    )
    return Workload(models=tuple(models))


def planned(name: str, models: int, gpus: int) -> str:
    """Return the fingerprint of a policy's plan, GPUs in use, models left out, rate and time; or why there is none."""
    cluster, policy, why = Cluster.parse(f"v100:{gpus}"), load_policy(name), ""
    scenes = (
        lambda: (mixed_workload(models, 250.0 * models), thesis()),
        lambda: (many(models), Profiles([load_shipped("igniter-v100")])),
    )
    for scene in scenes:
        started = time.process_time()
        try:
            plan = solve(policy, scene()[0], cluster, scene()[1])
        except TenutoError as error:
            why = f"refused: {first_line(error)}"
            continue
        taken_s = time.process_time() - started
        used = len({gpulet.gpu for gpulet in plan.gpulets})
        digest = hashlib.sha256(repr(plan.to_data()).encode()).hexdigest()[:12]
        rate_rps = plan.expected.goodput_rps
        return f"{digest} | {used:,} | {len(plan.unserved_reasons):,} | {rate_rps:,.0f} | {taken_s:.1f}"
    return why


def main() -> None:
    """Print a line per policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policies", nargs="*")
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--limit-s", type=float, default=300.0, help="of each plan")
    parser.add_argument("--once", action="store_true", help="print one fingerprint only")
    given = parser.parse_args()
    if given.once:
        print(planned(given.policies[0], given.models, given.gpus))
        return
    print(machine("tenuto", "highspy"))
    print("policy | twice the same | plan | GPUs used | not as asked | r/s expected | CPU s")
    for name in given.policies or sorted(policy_names()):
        own = [sys.executable, __file__, name, "--once", "--models", str(given.models), "--gpus", str(given.gpus)]
        found = []
        for seed in ("1", "2"):
            try:
                environment = {**os.environ, "PYTHONHASHSEED": seed}
                ran = subprocess.run(own, env=environment, capture_output=True, text=True, timeout=given.limit_s)
                found.append((ran.stdout.strip().splitlines() or [f"failed: {ran.stderr[-200:]}"])[-1])
            except subprocess.TimeoutExpired:
                found.append(f"no plan within {given.limit_s:g} s")
                break
        same = len(found) == 2 and found[0].split(" | ")[0] == found[1].split(" | ")[0]
        print(f"{name} | {'yes' if same else f'NO: {found[-1]}'} | {found[0]}", flush=True)


if __name__ == "__main__":
    main()
