"""`tenuto status`: what runs against what was planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from tenuto.cli.common import emit_json, json_option, stdout_console
from tenuto.cli.tables import number, print_table
from tenuto.mps.others import OtherProcess
from tenuto.outcome import OUTCOMES


@click.command(name="status", short_help="Show what runs against what was planned.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the gateway.")
@json_option
def command(url: str, as_json: bool) -> int:
    """Show every gpu-let and model: planned against measured.

    Exit code 1 when a gpu-let is missing.

    Example: tenuto status --url http://127.0.0.1:8000
    """
    from tenuto.deployments.serve.endpoint import get_json
    from tenuto.errors import EnvironmentFaultError

    status = get_json(f"{url.rstrip('/')}/status")
    if "gpulets" not in status:
        raise EnvironmentFaultError(f"{url}/status: {status.get('error', 'not a Tenuto server')}")
    if as_json:
        emit_json(status)
    else:
        _print(status)
    return 0 if all(gpulet["up"] for gpulet in status["gpulets"]) else 1


def _print(status: dict[str, Any]) -> None:
    from tenuto.batching.core.rehearsal import describe_schedulers
    from tenuto.deployments.dispatch.advice import describe

    console = stdout_console()
    print_table(
        ("gpu-let", "state", "device", "share", "mode", "pid", "models (batch)"),
        (
            (
                gpulet["id"],
                "up" if gpulet["up"] else "down",
                str(gpulet.get("device", "-")),
                describe_share(gpulet),
                describe_mode(gpulet["mode"]) if "mode" in gpulet else "-",
                str(gpulet.get("pid", "-")),
                ", ".join(f"{name} ({size})" for name, size in gpulet.get("models", {}).items()),
            )
            for gpulet in status["gpulets"]
        ),
        left=("state", "device", "share", "mode", "models (batch)"),
    )
    for note in sharing_notes(status["gpulets"]):
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    print_table(
        ("model", *OUTCOMES, "waiting", "mean batch", "planned ms", "executed ms (p50)"),
        (
            (
                name,
                *(str(m[key]) for key in (*OUTCOMES, "queued")),
                *(number(m[key]) for key in ("mean_batch", "planned_latency_ms", "execution_p50_ms")),
            )
            for name, m in status["models"].items()
        ),
    )
    if margin := status.get("margin"):
        console.print(
            f"margin before deadlines: {margin['margin_ms']:.2f} ms; {margin['late_share']:.2%} of the answers leave "
            f"late; {margin['refused_for_margin']} requests were refused for it"
        )
    for line in describe_schedulers(status.get("schedulers", ())):
        console.print(f"scheduler: {line}", soft_wrap=True, markup=False)
    if status.get("autoscale"):
        console.print(f"autoscale advice: {describe(status['autoscale'])}")


def describe_share(gpulet: Mapping[str, Any]) -> str:
    """Return a gpu-let's share as planned, with the multiprocessors it really has where CUDA told them."""
    share, given = gpulet.get("share_pct"), gpulet.get("cuda_mps") or {}
    planned = "-" if share is None else f"{share:g} %"
    if given.get("sm_count") is None or given.get("gpu_sm_count") is None:
        return planned
    return f"{planned} ({given['sm_count']}/{given['gpu_sm_count']} SMs)"


def sharing_notes(gpulets: list[dict[str, Any]]) -> list[str]:
    """Return what is unusual: an attachment that could not be proved by the process's own pid, and other processes."""
    notes = []
    for gpulet in gpulets:
        given = gpulet.get("cuda_mps") or {}
        if given.get("proof") not in (None, "pid"):
            notes.append(f"{gpulet['id']}: its attachment to CUDA MPS was proved by: {given['proof']}")
        if given.get("others"):
            others = ", ".join(str(OtherProcess(**other)) for other in given["others"])
            notes.append(f"{gpulet['id']}: when it started its GPU was also used outside CUDA MPS by {others}")
    return notes


def describe_mode(mode: Mapping[str, Any]) -> str:
    """Return a `GpuletMode` as data in a few words, such as `share, streaming, cuda_graphs`. Share and streaming, each
    on or off, are the four modes of the thesis' dispatcher."""
    words = [word for word in ("share", "streaming") if mode.get(word)]
    words += sorted(set(mode.get("programs", {}).values()) - {"plain", "emulated"})
    return ", ".join(words) or "plain"
