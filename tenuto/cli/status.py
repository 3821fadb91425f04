"""`tenuto status`: what runs against what was planned."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from tenuto.cli.common import emit_json, json_option, stdout_console

__all__ = ["command"]


@click.command(name="status", short_help="Show what runs against what was planned.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the gateway.")
@json_option
def command(url: str, as_json: bool) -> int:
    """Show every gpu-let and model: planned against measured. Exit code 1 when a gpu-let is missing.

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
    from tenuto.deployments.dispatch.advice import describe
    from tenuto.deployments.gpulet.modes import describe_mode
    from tenuto.deployments.operator.mps_notes import describe_share, sharing_notes

    console = stdout_console()
    gpulets = Table("gpu-let", "state", "device", "share", "mode", "pid", "models (batch)", title="gpu-lets")
    for gpulet in status["gpulets"]:
        models = ", ".join(f"{name} ({size})" for name, size in gpulet.get("models", {}).items())
        gpulets.add_row(
            gpulet["id"],
            "up" if gpulet["up"] else "down",
            str(gpulet.get("device", "-")),
            describe_share(gpulet),
            describe_mode(gpulet["mode"]) if "mode" in gpulet else "-",
            str(gpulet.get("pid", "-")),
            models,
        )
    console.print(gpulets)
    for note in sharing_notes(status["gpulets"]):
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    table = Table(
        "model",
        "ok",
        "late",
        "expired",
        "rejected",
        "failed",
        "waiting",
        "mean batch",
        "planned ms",
        "executed ms (p50)",
        title="models",
    )
    for name, m in status["models"].items():
        table.add_row(
            name,
            *(str(m[key]) for key in ("ok", "late", "expired", "rejected", "failed", "queued")),
            _number(m["mean_batch"]),
            _number(m["planned_latency_ms"]),
            _number(m["execution_p50_ms"]),
        )
    console.print(table)
    if status.get("autoscale"):
        console.print(f"autoscale advice: {describe(status['autoscale'])}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
