"""`tenuto top`: a running server as it happens, in the terminal; the same figures as the live page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tenuto.cli.common import emit_json, json_option, stdout_console
from tenuto.cli.tables import number, percent

_BAR = 16  # characters
_SORTS = {
    "name": lambda model: model["name"],
    "attainment": lambda model: (2.0 if model["attainment"] is None else model["attainment"], model["name"]),
    "rate": lambda model: -model["offered_rps"],
    "latency": lambda model: -(model["p99_ms"] or 0.0) / (model["slo_ms"] or 1.0),
}


@click.command(name="top", short_help="Watch a running server in the terminal.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Where operators are answered.")
@click.option("--every-s", default=1.0, show_default=True, type=click.FloatRange(0.2, 60.0), help="Time between looks.")
@click.option("--sort", default="attainment", show_default=True, type=click.Choice(list(_SORTS)), help="Of the models.")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@json_option
def command(url: str, every_s: float, sort: str, once: bool, as_json: bool) -> int:
    """Watch goodput, attainment, latency and every gpu-let of a running server; Ctrl-C ends.

    Example: tenuto top --sort latency
    """
    from rich.live import Live

    def look() -> Mapping[str, Any]:
        return _look(url)

    console = stdout_console()
    if as_json or once:
        first = look()
        if as_json:
            emit_json(first)
        else:
            console.print(picture(first, sort=sort, lines=10_000))
        return 0
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            screen.update(picture(look(), sort=sort, lines=console.height), refresh=True)
            time.sleep(every_s)


def _look(url: str) -> Mapping[str, Any]:
    from tenuto.deployments.serve.endpoint import get_json
    from tenuto.errors import EnvironmentFaultError

    live = get_json(f"{url.rstrip('/')}/live")
    if not isinstance(live, dict) or "window" not in live:
        said = live.get("error", "not a Tenuto server") if isinstance(live, dict) else "not a Tenuto server"
        raise EnvironmentFaultError(f"{url}/live: {said}")
    return live


def picture(live: Mapping[str, Any], *, sort: str, lines: int) -> RenderableType:
    """Return one picture of what `/live` says, in at most so many lines; what does not fit is counted."""
    models = sorted(
        ({**model, **live["window"]["models"][name], "name": name} for name, model in live["models"].items()),
        key=_SORTS[sort],
    )
    notes = _notes(live)
    room = max(6, lines - 6 - len(notes))
    for_models = min(len(models), max(room // 2, room - len(live["gpulets"])))
    for_gpulets = min(len(live["gpulets"]), room - for_models)
    return Group(
        _headline(live, models),
        _models(models[:for_models], len(models) - for_models),
        _gpulets(live, for_gpulets),
        *notes,
    )


def _headline(live: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> Text:
    goodput, offered = (sum(model[key] for model in models) for key in ("goodput_rps", "offered_rps"))
    ended = sum(model["goodput_rps"] / model["attainment"] for model in models if model["attainment"])
    down = sum(not gpulet["up"] for gpulet in live["gpulets"])
    text = Text(f"goodput {number(goodput)} of {number(offered)} offered /s   attainment ")
    text.append(percent(goodput / ended if ended else None), _style(goodput / ended if ended else None))
    text.append(f"   gpu-lets {len(live['gpulets']) - down} up")
    if down:
        text.append(f", {down} down", "bold red")
    if any(gpulet.get("emulated") for gpulet in live["gpulets"]):
        text.append("   emulated GPUs", "dim")
    return text


def _models(models: Sequence[Mapping[str, Any]], hidden: int) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    rates = ("goodput/s", "offered/s", "planned/s", "attainment")
    for heading in ("model", *rates, "p50 ms", "p99 ms", "SLO ms", "batch", "wait"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for model in models:
        late = model["p99_ms"] is not None and model.get("slo_ms") and model["p99_ms"] > model["slo_ms"]
        table.add_row(
            Text(model["name"]), number(model["goodput_rps"]), number(model["offered_rps"]),
            number(model.get("rate_rps")), Text(percent(model["attainment"]), _style(model["attainment"])),
            number(model["p50_ms"]), Text(number(model["p99_ms"]), "red" if late else ""),
            number(model.get("slo_ms")), number(model["mean_batch"]), str(model["queued"]),
        )  # fmt: skip
    if hidden:
        table.add_row(Text(f"… {hidden} more", "dim"))
    return table


def _gpulets(live: Mapping[str, Any], shown: int) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("gpu-let", "share", "busy", "", "batches/s", "of plan", "runs"):
        is_number = heading in ("share", "busy", "batches/s", "of plan")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    # The busiest and those that are down are what an operator looks for.
    figures = live["window"]["gpulets"]
    ordered = sorted(live["gpulets"], key=lambda g: (g["up"], -figures[g["id"]]["utilisation"], g["id"]))
    for gpulet in ordered[:shown]:
        now = figures[gpulet["id"]]
        share = gpulet.get("share_pct")
        running = ", ".join(f"{batch['program']} x{batch['batch_size']}" for batch in gpulet.get("running", ()))
        runs = Text(running or ", ".join(gpulet.get("models", {})), "" if running else "dim")
        filled = round(_BAR * now["utilisation"])
        table.add_row(
            Text(gpulet["id"], "" if gpulet["up"] else "red"), "whole" if share is None else f"{share:g} %",
            percent(now["utilisation"]), Text("█" * filled + "·" * (_BAR - filled), "blue"),
            number(now["batches_rps"]), number(now["measured_to_predicted"], 2),
            runs if gpulet["up"] else Text("down", "bold red"),
        )  # fmt: skip
    if len(ordered) > shown:
        table.add_row(Text(f"… {len(ordered) - shown} more", "dim"))
    return table


def _notes(live: Mapping[str, Any]) -> list[Text]:
    """Return what the schedulers chose, the last decision and the last two events."""
    from tenuto.batching.core.rehearsal import describe_schedulers

    controller = live.get("controller") or {}
    entries = [("controller", entry) for entry in controller.get("log", ())[:1]]
    entries += [("event", entry) for entry in (live.get("events") or ())[:2]]
    return [Text(f"scheduler: {line}", "dim") for line in describe_schedulers(live.get("schedulers", ()))] + [
        Text(f"{_time_of_day(entry['at_s'])} {kind}: {entry['what']}: {entry['why']}", "dim") for kind, entry in entries
    ]


def _time_of_day(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def _style(attainment: float | None) -> str:
    if attainment is None:
        return "dim"
    return "green" if attainment >= 0.99 else "yellow" if attainment >= 0.95 else "bold red"
