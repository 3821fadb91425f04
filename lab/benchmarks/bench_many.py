"""Many models on many gpu-lets, every model on each, beside the floor. Starts of our own server are measured from their
first second on, in which the scheduler knows nothing yet and rehearsals use their whole budget. The floor is measured
again before every fifth start. With `--gateways-only` the gpu-lets stay: a start kills the gateway, which holds the
scheduler, and Serve starts another one.

Scenes are drawn from the seed: l(b) of 1 to 6 ms per request and 2 to 10 ms fixed, SLOs of 6 to 12 times l(1), rates
that differ by up to four times. Open loop, Poisson, latency from the scheduled time, one client process, everything on
this machine. GPUs are emulated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench_operating import pids_of
from bench_served import LOAD, busy_program, floor_of, in_time, wait_until_ready
from serving import heading

from tenuto.deployments.control.operations import begin
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.placement import Plan

SCENES = {"24": (24, 20), "64": (64, 50)}  # gpu-lets and models
WORTH_OF_FLOOR = 0.97  # asked: of what the floor serves in time


class Measured(NamedTuple):
    """Percent in time in the first seconds after a start, and in as many that follow."""

    first: float
    then: float


def drawn(models: int, rps: float, seed: int) -> list[dict[str, Any]]:
    """Return models whose rates add up to this."""
    chance = random.Random(f"{seed} {models}")
    weights = [chance.uniform(0.5, 2.0) for _ in range(models)]
    found = []
    for index, weight in enumerate(weights):
        alpha_ms, beta_ms = chance.uniform(1.0, 6.0), chance.uniform(2.0, 10.0)
        found.append(
            {
                "name": f"m{index}",
                "alpha_ms": round(alpha_ms, 3),
                "beta_ms": round(beta_ms, 3),
                "slo_ms": round(chance.uniform(6.0, 12.0) * (alpha_ms + beta_ms), 1),
                "rate_rps": round(rps * weight / sum(weights), 3),
            }
        )
    return found


def plan_of(gpulets: int, models: list[dict[str, Any]]) -> Plan:
    """Return the plan of our own server: every model on each gpu-let, with every batch that can be in time."""
    latencies = [{"alpha_ms": model["alpha_ms"], "beta_ms": model["beta_ms"]} for model in models]
    replicas = [
        {
            "name": model["name"],
            "batch_size": int((model["slo_ms"] - model["beta_ms"]) / model["alpha_ms"]),
            "latency": latency,
        }
        for model, latency in zip(models, latencies, strict=True)
    ]
    return Plan.from_data(
        {
            "policy": {"name": "benchmark"},
            "gpus": [{"id": f"n0/{index}", "type": "v100"} for index in range(gpulets)],
            "gpulets": [{"id": f"n0/{index}/a", "gpu": f"n0/{index}", "models": replicas} for index in range(gpulets)],
            "models": [
                {"name": model["name"], "rate_rps": model["rate_rps"], "slo_ms": model["slo_ms"], "latency": latency}
                for model, latency in zip(models, latencies, strict=True)
            ],
        }
    )


def measure(port: int, models: list[dict[str, Any]], rps: float, seconds: float, seed: int) -> Measured:
    """Offer the rate twice, from now on."""
    shares = []
    for part in range(2):
        arguments = [str(port), json.dumps(models), "0", str(rps), "--seconds", str(seconds), "--warmup-s", "0"]
        command = [*LOAD, *arguments, "--seed", str(2 * seed + part)]
        shares.append(in_time(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))
    return Measured(*shares)


@contextlib.contextmanager
def served(deployment: Deployment) -> Iterator[None]:
    """Serve on a Ray of our own."""
    with Launcher() as launcher:
        launcher.connect(num_gpus=len(deployment.plan.gpus), address="local")
        begin(launcher, deployment, "a run", "the laboratory")
        yield


def replace_gateway(port: int) -> None:
    """Kill the gateway and wait until Serve has started another one."""
    for pid in pids_of("tenuto:gateway"):
        os.kill(pid, signal.SIGKILL)
    wait_until_ready(port)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scene", choices=SCENES, action="append", help="gpu-lets; default: all")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--rps", type=float, default=1200.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of a start's two parts")
    parser.add_argument("--gateways-only", action="store_true", help="a start is one of the gateway alone")
    parser.add_argument("--busy", action="store_true", help="beside a busy program at nice 10")
    parser.add_argument("--seed", type=int, default=3)
    given = parser.parse_args()
    heading(f"many gpu-lets{' beside a busy program' if given.busy else ''}, {given.rps:.0f} r/s, seed {given.seed}")
    for name in given.scene or SCENES:
        gpulets, count = SCENES[name]
        models = drawn(count, given.rps, given.seed)
        floors, found = [], []
        print(f"{count} models on {gpulets} gpu-lets")
        ours_port = unused_port()
        deployment = Deployment(plan=plan_of(gpulets, models), port=ours_port, executor="emulated")
        with served(deployment) if given.gateways_only else contextlib.nullcontext():
            for start in range(given.starts):
                if start % 5 == 0:
                    floor_port = unused_port()
                    with floor_of(floor_port, gpulets, models), busy_program(runs=given.busy):
                        floors.append(measure(floor_port, models, given.rps, given.seconds, start))
                    print(f"  floor: {floors[-1].first:.1f} %, then {floors[-1].then:.1f} % in time", flush=True)
                if given.gateways_only:
                    replace_gateway(ours_port)
                started = contextlib.nullcontext() if given.gateways_only else served(deployment)
                with started, busy_program(runs=given.busy):
                    found.append(measure(ours_port, models, given.rps, given.seconds, start))
                print(f"  start {start}: {found[-1].first:.1f} %, then {found[-1].then:.1f} %", flush=True)
        if found:
            least = WORTH_OF_FLOOR * min(map(min, floors))
            lost = sum(min(each) < least for each in found)
            print(
                f"  worst {min(each.first for each in found):.1f} %, then {min(each.then for each in found):.1f} %; "
                f"{lost} of {len(found)} below {WORTH_OF_FLOOR} of the floor's worst"
            )


if __name__ == "__main__":
    main()
