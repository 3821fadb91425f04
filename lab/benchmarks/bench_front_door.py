"""Requests per second through the HTTP front door: Tenuto with a model of no latency beside a bare no-op FastAPI
deployment.

Both run on the same Ray Serve in the same mode, one after the other, asked by the same closed-loop client on the
same machine.
"""

from __future__ import annotations

import argparse

from serving import apply_rival, closed_loop, heading, rival_config, synthetic_plan

from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher

PORT = 8790


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    seconds = 3.0 if parser.parse_args().quick else 8.0
    heading("front door, emulated model of zero latency, batches of 8, two gpu-lets")
    plan = synthetic_plan(0.001, 0.0, 100.0, 2000.0, 2, 8)
    rows = []
    with Launcher() as launcher:
        launcher.connect(num_gpus=2, address="local")
        end_all()
        begin(launcher, Deployment(plan=plan, port=PORT), "a run", "the laboratory")
        closed_loop(launcher.base_url, 16, 1.0)
        for connections in (16, 64, 128):
            rows.append(
                (f"tenuto, deferred, {connections} connections", *closed_loop(launcher.base_url, connections, seconds))
            )
        end_all()
        begin(launcher, Deployment(plan=plan, port=PORT, gateways=2), "a run", "the laboratory")
        closed_loop(launcher.base_url, 16, 1.0)
        for connections in (16, 64, 128):
            rows.append(
                (f"two gateways, deferred, {connections} conn.", *closed_loop(launcher.base_url, connections, seconds))
            )
        end_all()
        begin(launcher, Deployment(plan=plan, port=PORT, scheduler="eager"), "a run", "the laboratory")
        for connections in (1, 64):
            rows.append(
                (f"tenuto, eager, {connections} connections", *closed_loop(launcher.base_url, connections, seconds))
            )
        proxied = apply_rival(rival_config("noop", {}, PORT))
        for connections in (1, 16, 64, 128):
            rows.append((f"no-op FastAPI, {connections} connections", *closed_loop(proxied, connections, seconds)))
    print(f"{'':40s} {'requests/s':>10s} {'p50 ms':>8s} {'p99 ms':>8s}")
    for name, rate, p50, p99 in rows:
        print(f"{name:40s} {rate:10.0f} {p50:8.2f} {p99:8.2f}")
    best = max(row[1] for row in rows if row[0].startswith("tenuto, deferred"))
    bare = max(row[1] for row in rows if row[0].startswith("no-op"))
    print(f"\nbest of tenuto / best of no-op: {best / bare:.2f} (target 0.5); {best:.0f} requests/s (target 1,500)")


if __name__ == "__main__":
    main()
