"""A policy that is asked twice gives the same plan twice: neither the order of a set nor the clock decides anything."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from tenuto.errors import TenutoError
from tenuto.placement import Cluster, Workload, load_policy, policy_names, solve, solver
from tenuto.plugins import LABORATORY, POLICIES
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

MODELS, GPUS = 15, 6
AN_HOUR_S = 3600.0
OF_THE_MACHINE = sorted(policy_names().keys() - LABORATORY[POLICIES])


def scenes() -> Iterator[tuple[Workload, Cluster, Profiles]]:
    """Return a case on each profile that some policy can plan from: without shares, with iGniter's coefficients, and
    with MIG instances."""
    for name, gpus, slos_ms, rate_rps in (
        ("thesis-v100", f"v100:{GPUS}", (150, 200, 300), 40),
        ("igniter-v100", f"v100:{GPUS}", (30, 40, 60), 120),
        ("parvagpu-a100", f"a100-80gb:{GPUS}:mig", (150, 200, 300), 120),
    ):
        rows = [row for row in load_shipped(name).models if row not in ("bloom", "xlnet")]
        models = [
            {
                "name": f"m{index}",
                "profile": rows[index % len(rows)],
                "rate_rps": rate_rps * (1 + index % 7),
                "slo_ms": slos_ms[index % len(slos_ms)],
            }
            for index in range(MODELS)
        ]
        yield Workload.model_validate({"models": models}), Cluster.parse(gpus), Profiles([load_shipped(name)])


def plan_of(name: str) -> dict[str, Any]:
    """Return the plan of a policy for the first case that it can plan."""
    refused: TenutoError | None = None
    for workload, cluster, profiles in scenes():
        options = {"requests": "200"} if name == "tenuto" else {}
        try:
            return solve(load_policy(name, options), workload, cluster, profiles).to_data()
        except TenutoError as error:
            refused = error
    raise AssertionError(refused)


def test_every_policy_plans_the_same_in_another_process_and_at_another_pace() -> None:
    found = []
    for hash_seed, look_takes_s in (("1", 0.0), ("2", AN_HOUR_S)):
        own = [sys.executable, "-m", "tests.placement.policies.test_twice_the_same", str(look_takes_s)]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(own, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    one, other = found
    assert [name for name in OF_THE_MACHINE if one[name] != other[name]] == []
    assert all(one[name]["gpulets"] for name in OF_THE_MACHINE)


def main(look_takes_s: float) -> None:
    """Print the plans of every policy as JSON; every look at the clock takes so long, and solvers do not get far."""
    solver.WORK //= 20
    looks = itertools.count()
    for clock in ("monotonic", "perf_counter", "process_time", "time"):
        real = getattr(time, clock)
        setattr(time, clock, lambda real=real: real() + look_takes_s * next(looks))
    print(json.dumps({name: plan_of(name) for name in OF_THE_MACHINE}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
