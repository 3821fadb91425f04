"""`tenuto lab`: what can be counted of plans and of Tenuto's own sources, and how a command goes through them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from tenuto.cli import load_verb
from tenuto.cli.common import (
    Number,
    command_line,
    json_option,
    output_option,
    printed_as_json,
    profiles_from,
    say,
    tell,
)
from tenuto.cli.tables import number, print_table
from tenuto.cli.virtual import VirtualArguments, virtual_arguments
from tenuto.errors import refused
from tenuto.loadgen.result_folder import provenance
from tenuto.placement import Plan
from tenuto_lab.curves import AXES, Curve, check_axes, curves, in_virtual_time
from tenuto_lab.house.constants import ORIGINS, find_constants
from tenuto_lab.house.lines import lines_by_room
from tenuto_lab.house.rooms import with_figures
from tenuto_lab.house.sources import APART, checkout, read_sources
from tenuto_lab.house.walk import summary, walked
from tenuto_lab.usher_balance import balances

_root = click.argument("root", metavar="[ROOT]", required=False, type=click.Path(exists=True, file_okay=False))


@click.group("lab", short_help="Count: GPUs of a plan by USHER; Tenuto's own sources.")
def command() -> None:
    """Count how full plans make GPUs, and what Tenuto's own sources are made of; draw attainment.

    Example: tenuto lab lines
    """


@command.command("balance", short_help="USHER's Cuti, Muti and models of every GPU of a plan.")
@click.argument("plan", metavar="PLAN", type=click.Path(exists=True, dir_okay=False))
@click.option("--profiles", "names", multiple=True, metavar="FILE|NAME", help="As of `tenuto plan`; repeatable.")
@json_option
def _balance(plan: str, names: tuple[str, ...]) -> None:
    """Print how full a plan makes each GPU, as USHER counts it (section 3.3).

    Cuti and Muti are the sums of the compute and memory requirements of the replicas there, in percent of the GPU; a
    GPU is balanced where they are alike.

    Example: tenuto lab balance plan.yaml --profiles thesis-v100
    """
    loaded = Plan.load(plan)
    found = balances(loaded, profiles_from(names, {gpu.type for gpu in loaded.gpus}))
    if printed_as_json({"gpus": [{**each._asdict(), "apart_pct": each.apart_pct} for each in found]}):
        return
    rows = ((g.gpu, number(g.cuti_pct), number(g.muti_pct), number(g.apart_pct), str(g.models)) for g in found)
    print_table(("GPU", "Cuti %", "Muti %", "|Cuti - Muti|", "models"), rows)


@command.command("curves", short_help="Attainment at other rates, SLOs and burstiness.")
@virtual_arguments
@click.option("--rate-scale", type=Number(), default=1.0, help="Factor on every rate, such as `tenuto goodput` finds.")
@click.option(
    "--curve",
    "texts",
    multiple=True,
    metavar="AXIS[=V,V,…]",
    help=f"Attainment against one of {', '.join(AXES)}; repeatable.  [default: all]",
)
@output_option("Folder for curves.html and result.json.", is_folder=True)
@click.option("--force", is_flag=True, help="Replace an answer that is already in DIR.")
def _curves(
    arguments: VirtualArguments, rate_scale: float, texts: tuple[str, ...], folder: str | None, force: bool
) -> None:
    """Run PLAN or WORKLOAD in virtual time with one thing changed at a time: every rate, every SLO, or burstiness.

    Example: tenuto lab curves workload.yaml --gpus v100:4 --curve cv=0.5,1,2 -o curves
    """
    from tenuto_lab.experiments.curves_page import prepare_curves_folder, write_curves

    axes, drawn = _axes(texts), dict[str, Curve]()
    out = None if folder is None else prepare_curves_folder(Path(folder), force=force)
    simulation = arguments.simulation()  # so that wrong input is an error, and not a point of a curve
    for curve in curves(in_virtual_time(arguments.simulation), axes, rate_scale):
        drawn[curve.axis], (factors, trial) = curve, curve.points[-1]
        state = trial.invalid or f"{100 * trial.worst_attainment:.2f} % in time at worst"
        tell(f"{curve.axis} {getattr(factors, curve.axis):g}: {state}")
    document = {
        "kind": "curves",
        "source": arguments.source,
        "how": f"in virtual time with {arguments.scheduler_name}, {arguments.duration_s:g} s a run (emulated)",
        "rate_scale": rate_scale,
        "curves": [curve.summary() for curve in drawn.values()],
        "settings": {"scheduler": arguments.scheduler_name, "seed": arguments.seed},
        "applications": [application.name for application in simulation.applications],
    }
    printed_as_json(document)
    if out is not None:
        tell(f"page: {write_curves(out, document | provenance(command_line()))}")


def _axes(texts: tuple[str, ...]) -> dict[str, tuple[float, ...]]:
    axes: dict[str, tuple[float, ...]] = {} if texts else dict(AXES)
    for text in texts:
        axis, _, values = text.partition("=")
        try:
            axes[axis] = tuple(float(part) for part in values.split(",")) if values else AXES.get(axis, ())
        except ValueError:
            raise refused("--curve", text, "must list numbers behind '='", f"Write {axis}=0.5,1,2.") from None
    check_axes(axes)
    return axes


@command.command("lines", short_help="Lines of code proper, by room.")
@_root
@json_option
def _lines(root: str | None) -> None:
    """Print the lines of code proper of every room: without blank lines, comments, docstrings and imports.

    ROOT is a checkout; default: the one that Tenuto is installed from. What serves is the machine; tests, laboratory,
    scripts and docs are apart.

    Example: tenuto lab lines
    """
    rooms = lines_by_room(read_sources(_root_of(root)))
    folders: Counter[str] = Counter()
    for room, lines in rooms.items():
        folders[room.partition("/")[0]] += lines
    machine = sum(lines for folder, lines in folders.items() if folder not in APART)
    if printed_as_json({"machine": machine, "folders": dict(folders), "rooms": dict(rooms)}):
        return
    rows: list[tuple[str, str, str]] = []
    for folder, lines in folders.most_common():
        rows.append((folder, "", f"{lines:,}"))
        inside = [(room, own) for room, own in rooms.most_common() if room.partition("/")[0] == folder]
        rows += [("", room.removeprefix(f"{folder}/"), f"{own:,}") for room, own in inside if len(inside) > 1]
    print_table(("folder", "room", "lines"), rows, left=("room",))
    say(f"the machine: {machine:,} lines")


@command.command("rooms", short_help="The figures behind the marks of CONTRIBUTING.")
@click.option("--write", is_flag=True, help="Write them into CONTRIBUTING.md.")
@json_option
def _rooms(write: bool) -> None:
    """Print which figures of CONTRIBUTING's table of marks are off by more than a tenth, and what they are now.

    Example: tenuto lab rooms --write
    """
    page = checkout() / "CONTRIBUTING.md"
    text, stale = with_figures(page.read_text(encoding="utf-8"), list(read_sources(checkout())))
    if write:
        page.write_text(text, encoding="utf-8")
    if printed_as_json({"stale": {rooms: asdict(figures) for rooms, figures in stale.items()}}):
        return
    print_table(("rooms", "lines / files / arrows"), ((rooms, str(now)) for rooms, now in stale.items()))
    say(f"{len(stale)} rooms have other figures than CONTRIBUTING.md{', which has them now' if write else ''}")


@command.command("constants", short_help="Numeric constants, and where their values come from.")
@_root
@click.option("--origin", type=click.Choice(ORIGINS), help="Only those of this origin.")
@click.option("--room", metavar="FOLDER", help="Only those below this folder, such as batching/core.")
@json_option
def _constants(root: str | None, origin: str | None, room: str | None) -> None:
    """List the numbers of the machine's modules with the source of their values.

    Constants, fields, defaults and literals are read. A number that steers is derived, from a paper, fitted, or the
    default of what a user sets, and its comment says so; one that steers nothing begins its comment with unit, format,
    pace or limit. Those that say neither are unsourced. ROOT as for `tenuto lab lines`.

    Example: tenuto lab constants --origin fitted
    """
    found = [
        constant
        for constant in find_constants(source for source in read_sources(_root_of(root)) if source.is_machine)
        if (origin is None or constant.origin == origin) and (room is None or Path(constant.place).is_relative_to(room))
    ]
    counted = Counter(constant.origin for constant in found)
    told = [{**asdict(constant), "origin": constant.origin} for constant in found]
    if printed_as_json({"count": {each: counted[each] for each in ORIGINS}, "constants": told}):
        return
    print_table(
        ("where", "name", "value", "origin", "what is said of it"),
        ((c.place, c.name, c.value, c.origin, c.said) for c in found),
        left=("name", "value", "origin", "what is said of it"),
    )
    say(", ".join(f"{counted[each]} {each}" for each in ORIGINS if counted[each]))


@command.command(
    "walk", short_help="The stays of a command in modules, in order.", context_settings={"ignore_unknown_options": True}
)
@click.argument("words", metavar="VERB…", nargs=-1, required=True, type=click.UNPROCESSED)
def _walk(words: tuple[str, ...]) -> None:
    """Run a verb and list its stays: which modules it goes through in this process, in order, and when it comes back.

    Each function counts at its first call. A stay is an uninterrupted run of such calls in one module; a return is a
    stay in a module that was left before. What the verb prints goes to stdout first. Other processes are not walked.

    Example: tenuto lab walk plan workload.yaml --gpus v100:4
    """
    verb = load_verb(words[0])
    if verb is None:
        raise click.UsageError(f"unknown command '{words[0]}'.")
    with walked() as stays:
        verb.main(list(words[1:]), prog_name=f"tenuto {words[0]}", standalone_mode=False)
    print_table(
        ("stay", "", "room", "module", "begins with", "called by"),
        (
            (
                str(number),
                "again" if stay.is_return else "",
                stay.room,
                stay.module.rpartition(".")[2],
                stay.function,
                stay.called_by,
            )
            for number, stay in enumerate(stays, 1)
        ),
        left=("", "room", "module", "begins with", "called by"),
    )
    say(summary(stays))


def _root_of(given: str | None) -> Path:
    return checkout() if given is None else Path(given)
