"""`tenuto serve`: bring a plan up, keep it up, drain on Ctrl-C."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import click

from tenuto.cli.common import progress_console
from tenuto.options import split_pairs

__all__ = ["command"]


@click.command(name="serve", short_help="Start a plan on Ray Serve and wait until it is healthy; Ctrl-C drains.")
@click.argument("plan_file", metavar="PLAN")
@click.option("--emulate", is_flag=True, help="Emulate every GPU of the plan; answers are labelled so.")
@click.option(
    "--executor", type=click.Choice(["auto", "torch", "emulated"]), default=None, help="What runs the models."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind to.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on.")
@click.option(
    "--proxy-port",
    type=click.IntRange(1, 65535),
    help="Port of Serve's proxies, a slower way in.  [default: the one after PORT]",
)
@click.option(
    "--operator-port",
    type=click.IntRange(0, 65535),
    help="Port of status, metrics and the live page, on 127.0.0.1; 0: none.  [default: two after PORT]",
)
@click.option("--keys", "key_file", metavar="FILE", help="Clients' keys (`tenuto key`); TENUTO_API_KEYS adds to them.")
@click.option("--tls-cert", metavar="FILE", help="Certificate (PEM); with --tls-key the gateway speaks TLS.")
@click.option("--tls-key", metavar="FILE", help="Its key (PEM).")
@click.option("--traces", metavar="URL", help="Send spans there by OTLP over HTTP (needs tenuto[tracing]).")
@click.option(
    "--trace-ratio", default=0.0, show_default=True, type=click.FloatRange(0, 1),
    help="Share of the requests without a traceparent that are traced.",
)
@click.option("--log-json", is_flag=True, help="Write logs as JSON lines.")
@click.option("--insecure", is_flag=True, help="Let --host be reached from elsewhere without keys.")
@click.option("--scheduler", default="deferred", show_default=True, help="Batching scheduler of the dispatcher.")
@click.option("--option", "options", multiple=True, metavar="K=V", help="Option of the scheduler; repeatable.")
@click.option(
    "--gateways",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Processes that take HTTP; several feed one dispatcher per sub-cluster.",
)
@click.option(
    "--partition",
    "partition_file",
    metavar="FILE",
    help="Sub-cluster of every model: output of `tenuto partition --json`; default: one for all.",
)
@click.option(
    "--address", metavar="ADDRESS", help="Ray cluster to use; default: a running one, else a local Ray is started."
)
def command(
    plan_file: str,
    emulate: bool,
    executor: str | None,
    host: str,
    port: int,
    proxy_port: int | None,
    operator_port: int | None,
    key_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    traces: str | None,
    trace_ratio: float,
    log_json: bool,
    insecure: bool,
    scheduler: str,
    options: tuple[str, ...],
    gateways: int,
    partition_file: str | None,
    address: str | None,
) -> None:
    """Start a plan on Ray Serve, wait until it is healthy, and serve until Ctrl-C.

    Without a running Ray cluster a local one is started, and stopped at the end.

    Example: tenuto serve plan.yaml --emulate
    """
    from tenuto.batching.core.build import from_plan
    from tenuto.batching.registry import make_scheduler
    from tenuto.deployments.security.keys import read_keys
    from tenuto.deployments.serve.config import ENTRY_APPLICATION, serve_config
    from tenuto.deployments.serve.sub_clusters import read_partition
    from tenuto.deployments.serve.user_config import read_gateway_config
    from tenuto.placement import Plan

    plan = Plan.load(plan_file)
    chosen = split_pairs(options)
    make_scheduler(scheduler, from_plan(plan), chosen)  # a wrong name or option fails here, not in a replica
    config = serve_config(
        plan,
        executor="emulated" if emulate else executor or _planned_executor(plan_file),
        host=host,
        port=port,
        proxy_port=proxy_port,
        operator_port=operator_port,
        access={
            "keys": [entry.model_dump(mode="json", exclude_defaults=True) for entry in read_keys(key_file)],
            "tls_cert": tls_cert and str(Path(tls_cert).resolve()),
            "tls_key": tls_key and str(Path(tls_key).resolve()),
            "insecure": insecure,
            "traces": {"endpoint": traces, "ratio": trace_ratio} if traces is not None else None,
        },
        log_json=log_json,
        scheduler=scheduler,
        scheduler_options=chosen,
        gateways=gateways,
        partition=read_partition(partition_file) if partition_file is not None else None,
    )
    for application in config["applications"]:
        if application["name"] == ENTRY_APPLICATION:
            read_gateway_config(application["deployments"][0]["user_config"])  # refused here, not in a replica
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    _run(config, plan, stop, address)


def _planned_executor(plan_file: str) -> str:
    """Return the executor a generated Serve config was written with; `auto` for a bare plan."""
    from tenuto.documents import load_document

    data = load_document(plan_file)
    for application in data.get("applications", []):
        spec = application.get("args", {}).get("spec")
        if spec is not None:
            return str(spec["executor"])
    return "auto"


def _run(config: dict[str, Any], plan: Any, stop: threading.Event, address: str | None) -> None:
    from tenuto.deployments.serve.endpoint import get_json
    from tenuto.deployments.serve.launcher import Launcher

    console = progress_console()
    with Launcher(progress=lambda text: console.print(f"tenuto: {text}")) as launcher:
        launcher.connect(num_gpus=sum(gpu.type != "cpu" for gpu in plan.gpus), address=address)
        if not stop.is_set():
            launcher.apply(config)
            status = get_json(f"{launcher.operator_url}/status")
            for gpulet in status["gpulets"]:
                models = ", ".join(f"{name} (batch {size})" for name, size in gpulet["models"].items())
                console.print(f"tenuto: {gpulet['id']} on {gpulet['device']}, pid {gpulet['pid']}: {models}")
            console.print(
                f"tenuto: serving at {launcher.base_url}, documentation at {launcher.base_url}/docs, live page at "
                f"{launcher.operator_url}. Ctrl-C drains."
            )
            while not stop.wait(0.5):
                pass
        console.print("tenuto: draining")
    console.print("tenuto: stopped")
