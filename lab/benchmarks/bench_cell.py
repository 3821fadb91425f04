"""What one Ray cluster pays for the number of its gpu-lets: how long a deployment, a changed rate and a status take,
and the processor time and memory of its processes at rest.

Every gpu-let is emulated and has a model of its own that nobody asks. All processes are on this machine, so that the
time of a deployment is mostly that of starting so many processes here; the processor time at rest is each process's
own, and most of Serve's is in its controller, which a cell has once.

Run: python lab/benchmarks/bench_cell.py [--sizes 10,25,50,100] [--rest-s 20]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench_operating import descendants
from scenes import print_machine

from tenuto.deployments.control.operations import Operations, begin
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.loadgen.bench import status_at
from tenuto.placement import Plan

LATENCY = {"alpha_ms": 2.0, "beta_ms": 8.0}
ROLES = {  # words of a process's title, the first that are in it
    "Serve's controller": ("ServeController",),
    "gateway": ("gateway",),
    "dispatcher": ("dispatcher",),
    "our controller": ("controller", "tenuto-control", "control#"),
    "gpu-lets": ("gpulet",),
    "Ray's state": ("gcs_server",),
    "raylet": ("raylet",),
    "proxy": ("ProxyActor",),
}
SETTLES_S = 10.0


def cell_plan(gpulets: int, rate_rps: float) -> Plan:
    """Return a plan of so many gpu-lets, each with a model of its own."""
    gpus = [{"id": f"n0/{number}", "type": "v100"} for number in range(gpulets)]
    models = [f"m{number}" for number in range(gpulets)]
    hosted = [[{"name": name, "batch_size": 8, "latency": LATENCY}] for name in models]
    return Plan.from_data(
        {
            "policy": {"name": "ffd"},
            "gpus": gpus,
            "gpulets": [{"id": f"{g['id']}/a", "gpu": g["id"], "models": m} for g, m in zip(gpus, hosted, strict=True)],
            "models": [{"name": name, "rate_rps": rate_rps, "slo_ms": 500.0, "latency": LATENCY} for name in models],
        }
    )


def role_of(title: str) -> str:
    return next((role for role, words in ROLES.items() if any(word in title for word in words)), "others")


def processes() -> dict[int, tuple[str, float, float]]:
    """Return role, processor seconds and memory of its own in MiB of the processes that descend from this one."""
    seen = {}
    for pid, title in descendants().items():
        try:
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            rows = [row.split() for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
        except OSError:  # it has ended
            continue
        own_kib = sum(int(row[1]) for row in rows if row[0].startswith("Private_"))
        seen[pid] = role_of(title), sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), own_kib / 1024.0
    del seen[os.getpid()]
    return seen


def at_rest(seconds: float) -> dict[str, tuple[int, float, float]]:
    """Return by role how many processes there are, the part of a core that they take together, and their MiB."""
    before, began_s = processes(), time.monotonic()
    time.sleep(seconds)
    after, passed_s = processes(), time.monotonic() - began_s
    figures: dict[str, tuple[int, float, float]] = defaultdict(lambda: (0, 0.0, 0.0))
    for pid, (role, cpu_s, memory_mib) in after.items():
        count, cores, mib = figures[role]
        used_s = cpu_s - before[pid][1] if pid in before else 0.0
        figures[role] = count + 1, cores + used_s / passed_s, mib + memory_mib
    return figures


def measure(gpulets: int, rest_s: float) -> None:
    """Deploy so many gpu-lets, print what that costs, and end them."""
    with Launcher(progress=lambda text: print(f"  {text}", file=sys.stderr)) as launcher:
        launcher.connect(num_gpus=gpulets, address="local")
        settings: dict[str, Any] = {"executor": "emulated", "port": unused_port()}
        deployment = Deployment.model_validate({"plan": cell_plan(gpulets, 1.0).to_data(), **settings})
        began_s = time.monotonic()
        begin(launcher, deployment, "a run", "the laboratory")
        deployed_s = time.monotonic() - began_s
        time.sleep(SETTLES_S)
        rest = at_rest(rest_s)
        began_s = time.monotonic()
        status = status_at(deployment.url)
        status_s = time.monotonic() - began_s
        assert status is not None
        assert all(gpulet.up for gpulet in status.gpulets)
        changed = Deployment.model_validate({"plan": cell_plan(gpulets, 2.0).to_data(), **settings})
        with Operations(None, lambda _text: None) as operator:
            began_s = time.monotonic()
            operator.deploy(changed, "a benchmark")
            changed_s = time.monotonic() - began_s
    print(
        f"{gpulets} gpu-lets: deployed in {deployed_s:.1f} s, all rates changed in {changed_s:.1f} s, status in "
        f"{status_s:.2f} s"
    )
    for role, (count, cores, mib) in sorted(rest.items(), key=lambda row: -row[1][1]):
        print(f"  {role:20} {count:4} processes {100.0 * cores:7.1f} % of a core {mib:8,.0f} MiB")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10,25,50,100")
    parser.add_argument("--rest-s", type=float, default=20.0)
    given = parser.parse_args()
    print_machine()
    for size in map(int, given.sizes.split(",")):
        measure(size, given.rest_s)


if __name__ == "__main__":
    main()
