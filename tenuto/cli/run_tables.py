"""The tables of a run in virtual time: models, gpu-lets, applications, scaling advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from tenuto.cli.common import stdout_console

__all__ = ["print_advice", "print_applications", "print_run", "stage_remark"]


def print_run(summary: dict[str, Any], scheduler_name: str) -> None:
    """Print the tables of a run on stdout."""
    console = stdout_console()
    table = Table(box=None, header_style="bold")
    table.add_column("model")
    headings = (
        "offered",
        "ok",
        "late",
        "expired",
        "rejected",
        "attainment",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "mean batch",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, row in summary["models"].items():
        table.add_row(
            escape(name) + stage_remark(row),
            *(str(row[key]) for key in ("offered", "ok", "late", "expired", "rejected")),
            _percent(row["attainment"]),
            *(_number(row[key]) for key in ("p50_ms", "p90_ms", "p99_ms", "mean_batch")),
        )
    console.print(table)
    print_applications(summary.get("applications") or {})
    gpulets = Table(box=None, header_style="bold")
    for heading in ("gpu-let", "utilisation", "batches", "mean batch"):
        gpulets.add_column(heading, justify="left" if heading == "gpu-let" else "right")
    for name, row in summary["gpulets"].items():
        gpulets.add_row(escape(name), _percent(row["utilisation"]), str(row["batches"]), _number(row["mean_batch"]))
    console.print(gpulets)
    console.print(
        f"{scheduler_name}: goodput {summary['goodput_rps']:,.1f} of {summary['offered_rps']:,.1f} rps offered, "
        f"attainment {_percent(summary['attainment'])}, GPUs busy {_percent(summary['gpu_utilisation'])}, "
        f"{summary['requests']:,} requests measured in {summary['wall_s']:.2f} s"
    )


def stage_remark(row: Mapping[str, Any]) -> str:
    """Return what stands behind the name of a model that is a stage of an application, which is its first part."""
    return " (stage)" if "stage_of" in row else ""


def print_applications(applications: Mapping[str, Mapping[str, Any]]) -> None:
    """Print how the requests of applications ended, end to end; nothing where there are none."""
    if not applications:
        return
    table = Table(box=None, header_style="bold")
    table.add_column("application")
    headings = (
        "offered",
        "ok",
        "late",
        "expired",
        "rejected",
        "failed",
        "attainment",
        "goodput rps",
        "SLO ms",
        "p50 ms",
        "p90 ms",
        "p99 ms",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, row in applications.items():
        table.add_row(
            escape(name),
            *(str(row[key]) for key in ("offered", "ok", "late", "expired", "rejected", "failed")),
            _percent(row["attainment"]),
            f"{row['goodput_rps']:.1f}",
            f"{row['slo_ms']:g}",
            *(_number(row[key]) for key in ("p50_ms", "p90_ms", "p99_ms")),
        )
    stdout_console().print(table)


def print_advice(series: list[dict[str, Any]]) -> None:
    """Print the scaling advice window by window."""
    if not series:
        return
    table = Table(box=None, header_style="bold")
    for heading in ("until s", "GPUs", "requests", "bad", "idle", "GPUs to add (+) or release (-)"):
        table.add_column(heading, justify="right")
    for row in series:
        table.add_row(
            f"{row['end_s']:g}",
            str(row["gpus"]),
            f"{row['requests']:,}",
            _percent(row["bad_rate"]),
            _percent(row["idle_fraction"]),
            f"{row['delta_gpus']:+d}",
        )
    stdout_console().print(table)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
