"""Shared by the serving benchmarks: plans of one emulated model, configs of rivals, closed-loop load, where it ran."""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tenuto.deployments.serve.deployment import Deployment
from tenuto.loadgen.result_folder import hardware, versions
from tenuto.loadgen.sender import Reply
from tenuto.loadgen.senders.http_sender import HttpSender, post_bytes
from tenuto.placement import Plan

BODY = b'{"inputs":[{"name":"INPUT0","shape":[1,1],"datatype":"FP32","data":[1]}]}'
PATH = "/v2/models/synthetic/infer"


def synthetic_plan(
    alpha_ms: float,
    beta_ms: float,
    slo_ms: float,
    rate_rps: float,
    gpus: int,
    batch_size: int,
    options: dict[str, Any] | None = None,
) -> Plan:
    """Return a plan with one emulated model, with these options, on every one of `gpus` whole GPUs."""
    latency = {"alpha_ms": alpha_ms, "beta_ms": beta_ms}
    replica = {
        "name": "synthetic",
        "batch_size": batch_size,
        "latency": latency,
        "latency_ms": alpha_ms * batch_size + beta_ms,
    }
    return Plan.from_data(
        {
            "policy": {"name": "benchmark"},
            "gpus": [{"id": f"n0/{i}", "type": "v100"} for i in range(gpus)],
            "gpulets": [{"id": f"n0/{i}/a", "gpu": f"n0/{i}", "models": [replica]} for i in range(gpus)],
            "models": [
                {
                    "name": "synthetic",
                    "rate_rps": rate_rps,
                    "slo_ms": slo_ms,
                    "latency": latency,
                    "options": options or {},
                }
            ],
        }
    )


def rival_config(factory: str, args: dict[str, Any], port: int) -> dict[str, Any]:
    """Return a Serve config of one application of `serve_rivals`."""
    here = str(Path(__file__).parent)
    base = Deployment(plan=synthetic_plan(1, 0, 100, 1, 1, 1), port=port).config().to_data()
    application = {
        "name": factory,
        "route_prefix": "/",
        "import_path": f"serve_rivals:{factory}",
        "args": args,
        "runtime_env": {"env_vars": {"PYTHONPATH": here}},
    }
    return {**base, "applications": [application]}


def apply_rival(config: dict[str, Any], timeout_s: float = 90.0) -> str:
    """Deploy a rival's config in place of what runs, wait until it answers, and return its URL, at Serve's proxies."""
    import urllib.error
    import urllib.request

    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
    url = f"http://{config['http_options']['host']}:{config['http_options']['port']}"
    name = config["applications"][0]["name"]
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        applications = serve.status().applications
        if list(applications) == [name] and str(applications[name].status.value) == "RUNNING":
            try:
                with urllib.request.urlopen(urllib.request.Request(url + PATH, BODY), timeout=2):
                    return url
            except (urllib.error.URLError, OSError):
                pass
        time.sleep(0.3)
    raise SystemExit(f"{name} did not start: {serve.status()}")


def closed_loop(url: str, connections: int, seconds: float) -> tuple[float, float, float]:
    """Return requests per second, p50 and p99 latency in ms of `connections` clients that ask again as soon as they
    are answered."""

    async def run() -> tuple[float, float, float]:
        sender = HttpSender(url)
        request = post_bytes(PATH, BODY, {"Content-Type": "application/json"}, urlsplit(url).netloc)
        latencies: list[float] = []
        begun = [0.0] * connections
        open_loops = connections
        done = asyncio.Event()

        def answered(loop_index: int, reply: Reply) -> None:
            nonlocal open_loops
            now = time.perf_counter()
            if reply.status == 200:
                latencies.append((now - begun[loop_index]) * 1000.0)
            if now < end and reply.status:
                begun[loop_index] = now
                sender.send_bytes(request, loop_index)
            else:
                open_loops -= 1
                if open_loops == 0:
                    done.set()

        await sender.open(connections, answered)
        start = time.perf_counter()
        end = start + seconds
        for index in range(connections):
            begun[index] = time.perf_counter()
            sender.send_bytes(request, index)
        await asyncio.wait_for(done.wait(), seconds + 30)
        elapsed = time.perf_counter() - start
        sender.close()
        return len(latencies) / elapsed, float(np.percentile(latencies, 50)), float(np.percentile(latencies, 99))

    try:
        import uvloop

        return uvloop.run(run())
    except ModuleNotFoundError:
        return asyncio.run(run())


def heading(title: str) -> None:
    """Print what is measured, where and with which versions."""
    machine, packages = hardware(), versions()
    listed = ", ".join(f"{name} {version}" for name, version in packages.items())
    print(
        f"{title}\n{datetime.now(UTC).date()}, {machine['processor']}, {machine['cores']} cores, "
        f"Python {machine['python']}, {listed}"
    )
    print(f"command: {' '.join(sys.argv)}\n", flush=True)
