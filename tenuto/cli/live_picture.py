"""A live picture of a running server for a terminal, with the figures of the live page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tenuto.batching.core.scheduler_status import describe_schedulers
from tenuto.cli.tables import number, percent
from tenuto.deployments.operator.live_view import LiveStatus
from tenuto.deployments.operator.window import ModelFigures
from tenuto.deployments.serve.config import application_name
from tenuto.deployments.wire.status import Event, ModelCounts

_BAR = 16  # unit: length of a bar in characters


class _Model(NamedTuple):
    name: str
    counts: ModelCounts
    now: ModelFigures


SORTS: dict[str, Callable[[_Model], tuple[float, str]]] = {
    "name": lambda model: (0.0, model.name),
    "attainment": lambda model: (2.0 if model.now.attainment is None else model.now.attainment, model.name),
    "rate": lambda model: (-model.now.offered_rps, model.name),
    "latency": lambda model: (-(model.now.p99_ms or 0.0) / (model.counts.slo_ms or 1.0), model.name),
}


def picture(live: LiveStatus, *, sort: str, lines: int) -> RenderableType:
    """Return one picture of the document at `/live`, in at most `lines` lines. Rows that do not fit are counted."""
    models = sorted(
        (_Model(name, counts, live.window.models[name]) for name, counts in live.models.items()), key=SORTS[sort]
    )
    notes = _notes(live)
    room = max(6, lines - 6 - len(notes))
    for_models = min(len(models), max(room // 2, room - len(live.gpulets)))
    for_gpulets = min(len(live.gpulets), room - for_models)
    return Group(
        _headline(live, [model.now for model in models]),
        _models(models[:for_models], len(models) - for_models),
        _gpulets(live, for_gpulets),
        *notes,
    )


def _headline(live: LiveStatus, figures: Sequence[ModelFigures]) -> Text:
    goodput, offered = sum(now.goodput_rps for now in figures), sum(now.offered_rps for now in figures)
    down = sum(not gpulet.up for gpulet in live.gpulets)
    text = Text(
        f"last {live.window.seconds:.0f} s: goodput {number(goodput)} of {number(offered)} offered /s   attainment "
    )
    text.append(percent(live.window.attainment), _style(live.window.attainment))
    text.append(f"   gpu-lets {len(live.gpulets) - down} up")
    if down:
        text.append(f", {down} down", "bold red")
    if any(gpulet.emulated for gpulet in live.gpulets):
        text.append("   emulated GPUs", "dim")
    return text


def _models(models: Sequence[_Model], hidden: int) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    rates = ("goodput/s", "offered/s", "planned/s", "attainment")
    tokens = ("TTFT ms", "TPOT ms", "tokens/s") if any(model.now.tokens_rps is not None for model in models) else ()
    padding = ("padding",) if any(model.now.by_size for model in models) else ()
    for heading in ("model", *rates, "p50 ms", "p99 ms", "SLO ms", "batch", *padding, "wait", *tokens):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for name, counts, now in models:
        is_late = now.p99_ms is not None and 0.0 < counts.slo_ms < now.p99_ms
        table.add_row(
            Text(name),
            number(now.goodput_rps),
            number(now.offered_rps),
            number(counts.rate_rps),
            Text(percent(now.attainment), _style(now.attainment)),
            number(now.p50_ms),
            Text(number(now.p99_ms), "red" if is_late else ""),
            number(counts.slo_ms),
            number(now.mean_batch),
            *(map(percent, (now.padding,)) if padding else ()),
            str(counts.queued),
            *(map(number, (now.mean_ttft_ms, now.mean_tpot_ms, now.tokens_rps)) if tokens else ()),
        )
    if hidden:
        table.add_row(Text(f"… {hidden} more", "dim"))
    return table


def _gpulets(live: LiveStatus, shown: int) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("gpu-let", "share", "busy", "", "batches/s", "of plan", "runs"):
        is_number = heading in ("share", "busy", "batches/s", "of plan")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    # Gpu-lets that are down and the busiest ones come first, as operators look for them.
    figures = live.window.gpulets
    ordered = sorted(live.gpulets, key=lambda g: (g.up, -figures[g.id].utilisation, g.id))
    for gpulet in ordered[:shown]:
        now = figures[gpulet.id]
        running = ", ".join(f"{batch.program} x{batch.batch_size}" for batch in gpulet.running)
        runs = Text(running or ", ".join(gpulet.models), "" if running else "dim")
        filled = round(_BAR * now.utilisation)
        table.add_row(
            Text(gpulet.id, "" if gpulet.up else "red"),
            "whole" if gpulet.share_pct is None else f"{gpulet.share_pct:g} %",
            percent(now.utilisation),
            Text("█" * filled + "·" * (_BAR - filled), "blue"),
            number(now.batches_rps),
            number(now.measured_to_predicted, 2),
            runs if gpulet.up else Text("down", "bold red"),
        )
    if len(ordered) > shown:
        table.add_row(Text(f"… {len(ordered) - shown} more", "dim"))
    return table


def _notes(live: LiveStatus) -> list[Text]:
    """Return idle and drained GPUs, idle models, the schedulers' settings, the last decision and two events."""
    decided = [] if live.controller is None else live.controller.log[:1]
    used = {gpu for gpulet in live.gpulets for gpu in (gpulet.gpu, *gpulet.also_on)}
    used |= {gpu for gpu in live.gpus for stray in live.strays if stray.startswith(f"{application_name(gpu)}-")}
    idle = [gpu for gpu in live.gpus if gpu not in used and gpu not in live.drained]
    lines = [f"idle GPUs: {', '.join(idle)}"] if idle else []
    lines += [f"drained GPUs: {', '.join(live.drained)}"] if live.drained else []
    lines += [f"idle until somebody asks: {', '.join(live.idle)}"] if live.idle else []
    lines += [f"in no plan: {', '.join(live.strays)}; `tenuto deploy` ends what holds GPUs so"] if live.strays else []
    lines += [f"scheduler: {line}" for line in describe_schedulers(live.schedulers)]
    lines += [_happened("controller", event) for event in decided]
    lines += [_happened("event", event) for event in live.events[:2]]
    return [Text(line, "dim") for line in lines]


def _happened(by: str, event: Event) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at_s))} {by}: {event.what}: {event.why}"


def _style(attainment: float | None) -> str:
    if attainment is None:
        return "dim"
    return "green" if attainment >= 0.99 else "yellow" if attainment >= 0.95 else "bold red"
