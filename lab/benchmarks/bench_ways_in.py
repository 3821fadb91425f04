"""The served path through each way in, with Tenuto's own load client: HTTP and the Python handle. Share in time, and
the front door: the latency of an executed request less waiting, the gpu-let's queue and execution.

Symphony's ResNet50, l(b) = 1.053 b + 5.072 ms, SLO 25 ms, on two emulated GPUs, a Ray of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet
from bench_served import ROWS, stolen
from serving import heading

from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port

STAGES = ("batching_ms", "gpulet_queue_ms", "execution_ms")


def run(plan: Path, port: int, via: str, scale: float, seconds: float, seed: int, folder: Path) -> str:
    """Offer a rate and return what came of it."""
    report = folder / f"{via}-{scale:g}"
    command = [
        str(Path(sys.executable).with_name("tenuto")),
        "bench",
        str(plan),
        "--url",
        f"http://127.0.0.1:{port}",
        "--via",
        via,
        "--rate-scale",
        str(scale),
        "--duration-s",
        str(seconds),
        "--warmup-s",
        "0.9",
        "--seed",
        str(seed),
        "--clients",
        "0",
        "--tensors",
        "json",
        "--json",
        "-o",
        str(report),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if not (report / "requests.parquet").exists():
        raise SystemExit(done.stderr)
    table = pyarrow.parquet.read_table(report / "requests.parquet")
    columns = {name: table[name].to_numpy() for name in ("scheduled_ms", "sent_ms", "answered_ms", "status", *STAGES)}
    counted = columns["scheduled_ms"] >= columns["scheduled_ms"].min() + 1000.0
    columns = {name: values[counted] for name, values in columns.items()}
    latency_ms = columns["answered_ms"] - columns["scheduled_ms"]
    executed = columns["status"] == 200
    in_time = np.mean(executed & (latency_ms <= ROWS["25"].slo_ms))
    door_ms = (latency_ms - sum(columns[stage] for stage in STAGES))[executed]
    late_ms = np.nanquantile(columns["sent_ms"] - columns["scheduled_ms"], 0.99)
    return (
        f"{via}: {len(latency_ms)} requests, {in_time:.2%} in time; front door p50 {np.quantile(door_ms, 0.5):.2f}, "
        f"p99 {np.quantile(door_ms, 0.99):.2f} ms; the client's own lateness, p99 {late_ms:.2f} ms"
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[600.0, 850.0, 1400.0])
    parser.add_argument("--via", choices=("http", "handle"), action="append", help="default: both")
    parser.add_argument("--seconds", type=float, default=9.0, help="of each rate, the first is not counted")
    parser.add_argument("--seed", type=int, default=3)
    given = parser.parse_args()
    heading(f"ways in, emulated GPUs, seed {given.seed}")
    row = ROWS["25"]
    with tempfile.TemporaryDirectory() as name, Launcher() as launcher:
        import ray

        folder = Path(name)
        plan = row.plan()
        (folder / "plan.yaml").write_text(plan.dump())
        launcher.connect(num_gpus=row.gpus, address="local")
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        port = unused_port()
        end_all()
        begin(launcher, Deployment(plan=plan, port=port, executor="emulated"), "a run", "the laboratory")
        planned = plan.models[0].rate_rps
        for rate in given.rates:
            for via in given.via or ("http", "handle"):
                before, ticks_before = stolen()
                found = run(folder / "plan.yaml", port, via, rate / planned, given.seconds, given.seed, folder)
                after, ticks = stolen()
                taken = 100.0 * (after - before) / max(1, ticks - ticks_before)
                print(f"{rate:g} r/s, {found}; {taken:.0f} % of the cores taken by others", flush=True)


if __name__ == "__main__":
    main()
