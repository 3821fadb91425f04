"""`tenuto status`: show what runs beside what was planned, once or live."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from tenuto.cli.common import NumberRange, json_option, printed_as_json, say, stdout_console
from tenuto.cli.deploying import address_option, deployment_at
from tenuto.cli.tables import number, percent, print_table
from tenuto.outcome import OUTCOMES

if TYPE_CHECKING:
    from tenuto.deployments.operator.live_view import LiveStatus
    from tenuto.deployments.wire.status import GpuletStatus, MpsStatus, SystemStatus

_SORTS = ("name", "attainment", "rate", "latency")


@click.command(name="status", short_help="Show what runs beside what was planned, once or live.")
@address_option
@click.option(
    "--watch",
    is_flag=True,
    help="Show figures of the last ten seconds (at first, of one second) until Ctrl-C. Into a file: show them once.",
)
@click.option("--every-s", default=1.0, type=NumberRange(0.2, 60.0), help="Time between looks.")
@click.option("--sort", default="attainment", type=click.Choice(_SORTS), help="Models, watched.")
@json_option
def command(address: str | None, watch: bool, every_s: float, sort: str) -> int:
    """Show planned beside measured figures of every gpu-let and model, since the start; with --watch, recent ones.

    The exit code is 1 when a gpu-let is missing, or when one that is in no plan holds a GPU.

    Example: tenuto status --watch --sort latency
    """
    from tenuto.deployments.operator.live_view import LiveStatus
    from tenuto.deployments.serve.endpoint import get_told
    from tenuto.deployments.wire.status import SystemStatus

    base = deployment_at(address).operator_url
    if watch:
        _watch(lambda: get_told(f"{base}/live", LiveStatus), every_s, sort)
        return 0
    status = get_told(f"{base}/status", SystemStatus)
    if not printed_as_json(status):
        _print(status)
    return 0 if all(gpulet.up for gpulet in status.gpulets) and not status.strays else 1


def _watch(look: Callable[[], LiveStatus], every_s: float, sort: str) -> None:
    """Show one picture after another. When stdout is a file, or with --json, show one."""
    from rich.live import Live

    from tenuto.cli.live_picture import picture

    console, first = stdout_console(), look()
    if printed_as_json(first):
        return
    if not console.is_terminal:
        console.print(picture(first, sort=sort, lines=10_000))
        return
    shown = picture(first, sort=sort, lines=console.height)
    with Live(shown, console=console, screen=True, auto_refresh=False) as on:
        while True:
            time.sleep(every_s)
            on.update(picture(look(), sort=sort, lines=console.height), refresh=True)


def _print(status: SystemStatus) -> None:
    from tenuto.batching.core.build import from_plan
    from tenuto.batching.core.scheduler_status import describe_schedulers
    from tenuto.deployments.operator.window import mean_ms, quantile_s
    from tenuto.placement import Plan

    print_table(
        ("gpu-let", "state", "device", "share", "mode", "pid", "models (batch)"),
        (
            (
                gpulet.id,
                "up" if gpulet.up else "down",
                gpulet.device or "-",
                describe_share(gpulet.share_pct, gpulet.cuda_mps),
                "-" if gpulet.mode is None else str(gpulet.mode),
                "-" if gpulet.pid is None else str(gpulet.pid),
                ", ".join(f"{name} ({size})" for name, size in gpulet.models.items()),
            )
            for gpulet in status.gpulets
        ),
        left=("state", "device", "share", "mode", "models (batch)"),
    )
    for note in sharing_notes(status.gpulets):
        say(f"note: {note}")
    for place in status.drained:
        say(f"note: {place} is drained; `tenuto undrain {place}` lets it be used again")
    for name, start_s in status.idle.items():
        say(f"note: {name} is idle: nobody asks it. The next request brings it back, in about {start_s:.0f} s")
    for note in status.controller.gpu_notes if status.controller is not None else ():
        say(f"note: {note}")
    for stray in status.strays:
        say(f"note: {stray} holds a GPU and is in no plan; `tenuto deploy` ends it")
    if (offline := status.offline) is not None:
        answered = f"{offline.completed:,} lines completed, {offline.failed:,} failed"
        say(f"offline: {offline.open_batches} batches with {offline.waiting:,} lines to go; {answered}")
        if offline.problem:
            say(f"note: batches wait: {offline.problem}")
    print_table(
        ("model", *OUTCOMES, "waiting", "mean batch", "planned ms", "executed ms (p50)"),
        (
            (
                name,
                *(str(count) for count in (*model.by_outcome.values(), model.queued)),
                *(number(it) for it in (model.mean_batch, model.planned_latency_ms, model.execution_p50_ms)),
            )
            for name, model in status.models.items()
        ),
    )
    if offline_counts := {name: m.offline for name, m in status.models.items() if m.offline is not None}:
        print_table(
            ("offline", *OUTCOMES, "waiting", "GPU s"),
            (
                (name, *(str(count) for count in (*counts.by_outcome.values(), counts.queued)), number(counts.gpu_s))
                for name, counts in offline_counts.items()
            ),
        )
        waiting = [name for name, counts in offline_counts.items() if counts.queued]
        if waiting and status.plan is not None and "gpulets" in status.plan:
            plan = Plan.from_data(status.plan, is_whole=False)
            for line in from_plan(plan, check_slos=False).without_gap(waiting):
                say(f"note: {line}")
    if status.applications:
        print_table(
            ("application", *OUTCOMES, "under way", "SLO ms", "answered ms (p50)"),
            (
                (
                    name,
                    *(str(count) for count in (*counts.by_outcome.values(), counts.under_way)),
                    number(counts.slo_ms),
                    number(None if (p50_s := quantile_s(counts.latency_s, 0.5)) is None else 1e3 * p50_s),
                )
                for name, counts in status.applications.items()
            ),
        )
    sized = [(name, row) for name, model in status.models.items() for row in model.by_size]
    if sized:
        print_table(
            ("model", "size up to", *OUTCOMES, "padding"),
            ((name, str(row), *map(str, row.by_outcome.values()), percent(row.padding)) for name, row in sized),
            left=("size up to",),
        )
    writing = {name: model for name, model in status.models.items() if model.generated_tokens}
    if writing:
        print_table(
            ("generates", "prompt tokens", "written tokens", "mean TTFT ms", "mean TPOT ms"),
            (
                (
                    name,
                    f"{model.prompt_tokens:,}",
                    f"{model.generated_tokens:,}",
                    *(number(mean_ms(times)) for times in (model.ttft_s, model.tpot_s)),
                )
                for name, model in writing.items()
            ),
        )
    if (margin := status.margin) is not None:
        say(
            f"margin before deadlines: {margin.margin_ms:.2f} ms; {margin.late_share:.2%} of the answers leave "
            f"late; {margin.refused_for_margin} requests were refused for it"
        )
    if (door := status.front_door) is not None and door.turned_away:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(door.turned_away.items()))
        say(f"turned away at the door: {reasons}; wrong keys: {door.wrong_keys}")
    for line in describe_schedulers(status.schedulers):
        say(f"scheduler: {line}")


def describe_share(share_pct: float | None, given: MpsStatus | None) -> str:
    """Return a gpu-let's planned share, with its real number of multiprocessors if CUDA told it."""
    planned = "-" if share_pct is None else f"{share_pct:g} %"
    if given is None or given.sm_count is None or given.gpu_sm_count is None:
        return planned
    return f"{planned} ({given.sm_count}/{given.gpu_sm_count} SMs)"


def sharing_notes(gpulets: Sequence[GpuletStatus]) -> list[str]:
    """Return notes on unusual facts: an attachment that was not proved by the process's own pid, or other processes on
    the GPU."""
    notes = []
    for gpulet in gpulets:
        given = gpulet.cuda_mps
        if given is not None and given.proof not in (None, "pid"):
            notes.append(f"{gpulet.id}: its attachment to CUDA MPS was proved by: {given.proof}")
        if given is not None and given.others:
            others = ", ".join(map(str, given.others))
            notes.append(f"{gpulet.id}: when it started its GPU was also used outside CUDA MPS by {others}")
    return notes
