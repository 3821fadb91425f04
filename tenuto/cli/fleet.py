"""`tenuto fleet`: which model runs in which cell of a fleet, as files: observe, plan, simulate, compare, check."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from tenuto import __version__
from tenuto.cli.common import (
    Number,
    NumberRange,
    Target,
    json_option,
    named_values,
    notice,
    output_option,
    printed_as_json,
    profiles_from,
    profiles_option,
    say,
    tell,
    wants_json,
    write_file,
)
from tenuto.cli.tables import percent, print_table
from tenuto.cli.virtual import read_losses
from tenuto.deployments.serve.executor_choice import ExecutorChoice
from tenuto.documents import dump_yaml, parse_document
from tenuto.errors import EnvironmentFaultError, first_line, one_of, refused
from tenuto.options import split_pairs
from tenuto.outcome import ATTAINED
from tenuto.placement import Plan, load_policy
from tenuto.placement.cluster import Cluster
from tenuto.placement.fleet.fleet_file import FleetFile, running_plan
from tenuto.placement.fleet.fleet_plan import CellState, FleetPlan, FleetTask, plan_fleet
from tenuto.placement.fleet.step import CellChange, FleetStep, SeenCell, StepWeights, check_step, fingerprint, make_step
from tenuto.placement.fleet.traffic_spread import after_loss
from tenuto.placement.placement_constraints import domain_of
from tenuto.placement.planner.completion import policy_used
from tenuto.placement.policy import DEFAULT_POLICY
from tenuto.placement.slo_rules import load_workload

if TYPE_CHECKING:
    from tenuto.deployments.fleet.observation import CellReport
    from tenuto.deployments.wire.status import SystemStatus

_STEP, _WEIGHTS, _CELLS, _LOST = "step.yaml", "weights.yaml", "cells", "lost"
_ANSWER_S = 5.0  # limit: for a proxy's answer
_EVERY_S = 5.0  # default: between looks at a fleet


@click.group("fleet", short_help="Spread one workload over several clusters.")
def command() -> None:
    """Decide which model runs in which cell, a Ray cluster with its own Tenuto, and how much of its traffic goes there.

    These commands write files and change nothing. `tenuto deploy`, `kubectl apply` or a GitOps tool applies them.

    Example: tenuto fleet observe --cell east=http://10.0.0.1:8000 -o fleet.yaml
    """


@command.command("observe", short_help="Write down what runs in each cell.")
@click.option(
    "--cell",
    "cells",
    multiple=True,
    metavar="NAME=URL[,URL]",
    help="A cell by the URL for clients, and the one for operators.",
)
@click.option("-o", "--output", "path", required=True, type=Target(), metavar="FILE", help="Fleet file.")
@click.option("--page", type=Target(), metavar="FILE", help="Also draw the fleet: an HTML page.")
@click.option(
    "--watch",
    "every_s",
    is_flag=False,
    flag_value=_EVERY_S,
    type=NumberRange(1.0, 3600.0),
    metavar="[SECONDS]",
    help=f"Ask again and write again every so many seconds ({_EVERY_S:g}) until Ctrl-C. With --json: once.",
)
@json_option
def observe(cells: tuple[str, ...], path: str, page: str | None, every_s: float | None) -> int:
    """Ask each cell what it is and what runs there. Cells that FILE has already are asked again.

    Exit code 1: a cell did not answer. It keeps its last state.

    Example: tenuto fleet observe --cell east=http://10.0.0.1:8000 --cell west=http://10.1.0.1:8000 -o fleet.yaml
    """
    every_s = None if wants_json() else every_s
    last: dict[str, SystemStatus] = {}
    seen = _ask_and_write(cells, path, page, last, every_s)
    while every_s is not None:
        last |= {name: each.status for name, each in seen.items() if each.status is not None}
        time.sleep(every_s)
        seen = _ask_and_write(cells, path, page, last, every_s)
    return int(any(each.plan is None for each in seen.values()))


def _ask_and_write(
    cells: tuple[str, ...], path: str, page: str | None, last: Mapping[str, SystemStatus], every_s: float | None
) -> dict[str, CellReport]:
    """Ask the cells, and write and print what they say; `last` is what they said at the last look."""
    before = FleetFile.load(path) if Path(path).exists() else None
    known = {} if before is None else {cell.name: cell for cell in before.cells}
    urls = {name: (cell.url, cell.operator_url or cell.url) for name, cell in known.items() if cell.url is not None}
    for name, value in named_values("--cell", cells, "east=http://10.0.0.1:8000").items():
        url, _, operators = value.partition(",")
        urls[name] = (url.rstrip("/"), (operators or url).rstrip("/"))
    if not urls:
        raise refused("--cell", None, "is not given, and FILE has no cell with a URL", "Name one: --cell NAME=URL.")
    from tenuto.deployments.fleet.observation import CellReport
    from tenuto.deployments.fleet.observation import observe as ask_cells

    seen = ask_cells(urls, known)
    _say_notes(seen)
    listed = [seen[name].cell if name in seen else cell for name, cell in known.items()]
    listed += [each.cell for name, each in seen.items() if name not in known]
    if not any(listed):
        raise refused("--cell", ", ".join(urls), "no cell answers", "Check the URLs, and `tenuto status` of each.")
    fleet = parse_document(
        FleetFile, {"cells": [cell.model_dump() for cell in listed if cell is not None]}, origin=path
    )
    for name, each in seen.items():
        if each.cell is not None and each.plan is not None and each.cell.plan is not None:
            text = json.dumps(each.plan.to_data())
            write_file(str(Path(path).parent / each.cell.plan), text, what=f"what runs in {name}")
    write_file(path, fleet.dump())
    if page is not None:
        from tenuto.loadgen.report.fleet_page import render_fleet

        reports = {cell.name: seen.get(cell.name, CellReport(cell, None)) for cell in fleet.cells} | seen
        plans = {cell.name: reports[cell.name].plan or running_plan(cell, Path(path).parent) for cell in fleet.cells}
        write_file(page, render_fleet(reports, plans, last, datetime.now(UTC), every_s), option="--page")
    if not printed_as_json(fleet.model_dump(mode="json", by_alias=True)):
        rows = [
            (cell.name, str(len(cell.cluster.gpus)), str(len(cell.rates_rps)), cell.version or "-", cell.unready or "-")
            for cell in fleet.cells
        ]
        print_table(("cell", "GPUs", "models", "version", "not ready"), rows, left=("version", "not ready"))
    return seen


def _say_notes(seen: Mapping[str, CellReport]) -> None:
    for note in (note for each in seen.values() for note in each.notes):
        notice(note)


@command.command("plan", short_help="Write the next step of a fleet.")
@click.argument("workload_file", metavar="WORKLOAD")
@click.argument("fleet_file", metavar="FLEET")
@output_option("Folder of the step.", is_folder=True, required=True)
@click.option("--policy", "policy_name", default=DEFAULT_POLICY, metavar="NAME", help="Placement policy of every cell.")
@click.option("--option", "options", multiple=True, metavar="K=V", help="Option of the policy; repeatable.")
@profiles_option("shipped ones for the GPU types")
@click.option(
    "--at-most",
    default=1.0,
    type=NumberRange(0, 1),
    metavar="PART",
    help="Part of all GPU time that may move between cells.",
)
@click.option("--without", multiple=True, metavar="CELL", help="Leave this cell empty; repeatable.")
@click.option("--canary", metavar="CELL", help="Change this cell first.")
@click.option("--kubernetes", is_flag=True, help="Write cells as parts of RayServices.")
@click.option("--bind", default=":8000", metavar="[ADDRESS]:PORT", help="Where HAProxy listens.")
@click.option("--gateway", default="tenuto", metavar="NAME", help="Gateway of the HTTPRoutes.")
@click.option("--executor", type=click.Choice(get_args(ExecutorChoice)), default="auto", help="As in `tenuto plan`.")
@json_option
def plan(
    workload_file: str,
    fleet_file: str,
    folder: str,
    policy_name: str,
    options: tuple[str, ...],
    profile_names: tuple[str, ...],
    at_most: float,
    without: tuple[str, ...],
    canary: str | None,
    kubernetes: bool,
    bind: str,
    gateway: str,
    executor: str,
) -> int:
    """Spread WORKLOAD over the cells of FLEET, and write what changes: plans of cells, weights of traffic, the order.

    Exit code 1: no cell has room for some requests, or a model would not survive as it asks.

    Example: tenuto fleet plan workload.yaml fleet.yaml -o step --at-most 0.02
    """
    fleet = FleetFile.load(fleet_file)
    names = [cell.name for cell in fleet.cells]
    if re.fullmatch(r"[\w.\[\]:*-]*:\d{1,5}", bind, re.ASCII) is None:
        raise refused("--bind", bind, "is no address with a port", "Write for example 127.0.0.1:8000.")
    for option, given in (("--without", without), ("--canary", (canary,) if canary else ())):
        for name in given:
            if name not in names:
                raise refused(option, name, "no such cell", one_of(name, names))
    cells = [cell for cell in fleet.cells if cell.name not in without]
    if not cells:
        raise refused("--without", ", ".join(without), "no cell would be left", "Leave one.")
    base = Path(fleet_file).parent
    joint = Cluster.of(gpu for cell in cells for gpu in cell.cluster.gpus)
    profiles = profiles_from(profile_names, joint.gpu_types)
    workload = load_workload(workload_file, joint, profiles)
    states = [CellState(c.name, c.cluster, c.rates_rps, partial(running_plan, c, base)) for c in cells]
    policy = policy_used(load_policy(policy_name, split_pairs(options)))
    done = plan_fleet(FleetTask(workload, states, policy, profiles, at_most, os.cpu_count() or 1))
    running = {c.name: fingerprint(done.before.get(c.name)) for c in cells}
    running |= {c.name: fingerprint(running_plan(c, base)) for c in fleet.cells if c.name in without}
    files = {name: f"{_CELLS}/{name}.yaml" for name in done.plans}
    relative = os.path.relpath(fleet_file, folder)
    step = make_step(done, running, files, fleet=relative, version=__version__, canary=canary)
    _write_step(Path(folder), step, done, fleet, executor, bind=bind, gateway=gateway, kubernetes=kubernetes)
    if not printed_as_json({"step": step.model_dump(mode="json"), "traffic": done.traffic, "moved": done.spread.moved}):
        _print_plan(done, step, without)
    return int(bool(done.spread.lacking) or bool(done.spread.unmet))


def _write_step(
    folder: Path,
    step: FleetStep,
    done: FleetPlan,
    fleet: FleetFile,
    executor: str,
    *,
    bind: str,
    gateway: str,
    kubernetes: bool,
) -> None:
    from tenuto.deployments.fleet.proxy_config import haproxy_files, http_routes
    from tenuto.deployments.serve.deployment import Deployment
    from tenuto.deployments.serve.rayservice import rayservice

    urls = {cell.name: cell.url for cell in fleet.cells if cell.url is not None}
    texts = {_WEIGHTS: dump_yaml(StepWeights(step=step.id, models=done.traffic).model_dump(mode="json"))}
    if urls:
        texts |= haproxy_files(done.traffic, urls, step.id, bind)
        texts["httproutes.yaml"] = http_routes(done.traffic, urls, step.id, gateway)
        for cell in urls:
            if left := after_loss(done.traffic, cell):
                texts[f"{_LOST}/{cell}.yaml"] = http_routes(left, urls, step.id, gateway)
    for change in step.changes:
        plan = done.plans[change.cell]
        serve = Deployment.model_validate({"plan": plan, "executor": executor}).config().to_data
        texts[change.file] = rayservice(plan, executor) if kubernetes else dump_yaml(serve())
    texts[_STEP] = dump_yaml(step.model_dump(mode="json", by_alias=True))
    for place in (_CELLS, _LOST):
        (folder / place).mkdir(parents=True, exist_ok=True)
        for old in (folder / place).glob("*.yaml"):
            if f"{place}/{old.name}" not in texts:
                old.unlink()
    for name, text in texts.items():
        write_file(str(folder / name), text)


def _print_plan(done: FleetPlan, step: FleetStep, without: tuple[str, ...]) -> None:
    rows = []
    for change in step.changes:
        expected, gpus = done.plans[change.cell].expected, len(done.plans[change.cell].gpus)
        price = "-" if expected.cost_per_hour is None else f"{expected.cost_per_hour:,.2f}"
        rows.append((change.cell, change.phase, f"{expected.gpus_used} of {gpus}", price))
    print_table(("cell", "when", "GPUs", "$/h"), rows, left=("when",))
    for name, plan in done.plans.items():
        for model, why in plan.unserved_reasons.items():
            say(f"below: {name}: {model}: {why}")
    for model, part in done.spread.lacking.items():
        say(f"no room: {model}: for {percent(part)} of its requests no cell has room")
    for model, why in done.spread.unmet.items():
        say(f"does not survive: {model}: {why}")
    for cell in without:
        say(f"{cell} gets no traffic; end it with `tenuto delete` once its requests are answered")
    moves = f"{percent(done.spread.moved)} of the GPU time moves between cells"
    say(f"step {step.id}: {len(step.changes)} cells change, {moves}")


@command.command("diff", short_help="Show what a step does to each cell.")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@json_option
def diff(folder: str) -> None:
    """Show for each cell of the step in DIR which gpu-lets start, change in place and stop.

    Example: tenuto fleet diff step
    """
    from tenuto.deployments.control.change_preview import preview_plan

    step = FleetStep.load(Path(folder) / _STEP)
    fleet, previews = FleetFile.load(Path(folder) / step.fleet), {}
    for change in step.changes:
        new = _plan_after(folder, change)
        before = _plan_before(step, folder, fleet, change.cell, change.before)
        previews[change.cell] = preview_plan(before or new.model_copy(update={"gpulets": ()}), new)
    if printed_as_json(previews):
        return
    for cell, preview in previews.items():
        kinds = [change.kind for change in preview.changes]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        say(f"{cell}: {counts or 'nothing changes'}; {len(preview.steps)} steps")
        for change_ in preview.changes:
            if change_.kind not in ("unchanged", "route-only"):
                say(f"  {change_.gpulet}: {change_.kind}: {'; '.join(change_.reasons)}")
        interrupted = dict.fromkeys(name for part in preview.steps for name in part.unserved)
        if interrupted:
            say(f"  unserved meanwhile: {', '.join(interrupted)}")
    if not previews:
        say("no cell changes")


def _plan_before(step: FleetStep, folder: str, fleet: FleetFile, cell: str, known: str) -> Plan | None:
    """Return the plan that ran in a cell when the step was made, whose fingerprint is `known`."""
    path = Path(folder) / step.fleet
    before = running_plan(fleet[cell], path.parent)
    if fingerprint(before) != known:
        cure = "Make the step again with `tenuto fleet plan`."
        raise refused(_STEP, cell, f"{path} has another plan than the step was made from", cure)
    return before


def _plan_after(folder: str, change: CellChange) -> Plan:
    """Return the plan that a step gives a cell. Raises `InvalidInputError` when its file has another one, as of a step
    that was written in part."""
    path = Path(folder) / change.file
    new = Plan.load(path)
    if fingerprint(new) != change.after:
        cure = "Make the step again with `tenuto fleet plan`."
        raise refused(str(path), change.cell, f"is not the plan that {_STEP} was made with", cure)
    return new


@command.command("simulate", short_help="Run a fleet in virtual time, and lose a cell.")
@click.argument("workload_file", metavar="WORKLOAD")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@click.option(
    "--lose",
    "lost",
    multiple=True,
    metavar="KIND:NAME@S",
    help="Lose a cell, rack, node (CELL/NODE) or gpu (CELL/GPU) after so many seconds: cell:west@60s; repeatable.",
)
@click.option("--duration-s", type=Number(), default=120.0, help="Length of the run in virtual time.")
@click.option("--seed", type=int, default=0, help="Seed of the arrivals.")
@profiles_option("shipped ones for the GPU types")
@json_option
def simulate(
    workload_file: str, folder: str, lost: tuple[str, ...], duration_s: float, seed: int, profile_names: tuple[str, ...]
) -> int:
    """Send the requests of WORKLOAD to the cells as they are after the step in DIR, in virtual time.

    Requests go to cells by the weights of the step. Of a cell that is lost they are lost too, until HAProxy's health
    checks would see it; then they follow the weights without it. Exit code 1: a model is below 99 % outside the minute
    after a loss.

    Example: tenuto fleet simulate workload.yaml step --lose cell:west@60s
    """
    from tenuto.loadgen.simulated_fleet import CellLoss, FleetSimulation

    step = FleetStep.load(Path(folder) / _STEP)
    fleet = FleetFile.load(Path(folder) / step.fleet)
    plans = {name: _plan_before(step, folder, fleet, name, known) for name, known in step.others.items()}
    plans |= {change.cell: _plan_after(folder, change) for change in step.changes}
    gpus = {(cell.name, gpu.id): gpu for cell in fleet.cells for gpu in cell.cluster.gpus}

    def domain(gpu: tuple[str, str], kind: str) -> str:
        if kind == "cell" or (kind == "rack" and gpus[gpu].rack is not None):
            return gpu[0] if kind == "cell" else str(gpus[gpu].rack)
        return f"{gpu[0]}/{domain_of(gpus[gpu], kind)}"

    losses = [
        CellLoss(at_s, cell, frozenset(gpu for at, gpu in gone if at == cell), is_whole=kind == "cell")
        for at_s, kind, gone in read_losses(lost, gpus, domain, ("gpu", "node", "rack", "cell"))
        for cell in sorted({cell for cell, _ in gone})
    ]
    joint = Cluster.of(gpus.values())
    workload = load_workload(workload_file, joint, profiles_from(profile_names, joint.gpu_types))
    weights = StepWeights.load(Path(folder) / _WEIGHTS)
    if weights.step != step.id:
        cure = "Make the step again with `tenuto fleet plan`."
        raise refused(_WEIGHTS, weights.step, f"are those of another step than {step.id}", cure)
    running = {name: plan for name, plan in plans.items() if plan is not None and plan.gpulets}
    run = FleetSimulation(workload, running, weights.models, duration_s, seed, losses, Path(workload_file).parent).run(
        lambda cell: tell(f"cell {cell}")
    )
    summary = run.summary()
    if not printed_as_json(summary):
        _print_simulated(summary, has_losses=bool(losses))
    attained = (each["otherwise"]["attainment"] for each in summary["models"].values())
    return int(any(part is not None and part < ATTAINED for part in attained))


def _print_simulated(summary: Mapping[str, Any], *, has_losses: bool) -> None:
    parts = {"otherwise": "in time", "after_losses": "minute of loss"} if has_losses else {"otherwise": "in time"}
    rows = []
    for name, row in summary["models"].items():
        lost = ", ".join(
            f"{cell} {each['offered'] - each['ok']:,} of {each['offered']:,}" for cell, each in row["cells"].items()
        )
        rows.append(
            (name, f"{row['offered']:,}", *(percent(row[part]["attainment"]) for part in parts), lost or "no cell")
        )
    print_table(("model", "offered", *parts.values(), "not in time"), rows, left=("not in time",))
    say(f"{percent(summary['attainment'])} of {summary['offered']:,} requests in time")


@command.command("check", short_help="Say whether a step is safe now, and what comes next.")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--front", metavar="URL", help="A HAProxy with the configuration of a step: asked whose weights it has.")
@json_option
def check(folder: str, front: str | None) -> int:
    """Ask the cells what runs, and say which changes of the step in DIR are done, and which comes next.

    Exit code 1: the step must not go on.

    Example: tenuto fleet check step --front http://127.0.0.1:8000
    """
    step = FleetStep.load(Path(folder) / _STEP)
    path = Path(folder) / step.fleet
    fleet = FleetFile.load(path)
    for change in step.changes:
        _plan_after(folder, change)
    urls = {cell.name: (cell.url, cell.operator_url or cell.url) for cell in fleet.cells if cell.url is not None}
    seen = {
        c.name: SeenCell(fingerprint(running_plan(c, path.parent)), c.unready) for c in fleet.cells if c.url is None
    }
    if urls:
        from tenuto.deployments.fleet.observation import observe as ask_cells

        answers = ask_cells(urls, {cell.name: cell for cell in fleet.cells})
        _say_notes(answers)
        for name, each in answers.items():
            if each.plan is not None and each.cell is not None:
                seen[name] = SeenCell(fingerprint(each.plan), each.cell.unready)
    result = check_step(step, seen, None if front is None else _weights_in_force(front))
    if not printed_as_json(result):
        for cell, state in result.states.items():
            say(f"{cell}: {state}")
        for problem in result.problems:
            say(f"not safe: {problem}")
        say(f"next: {result.todo}" if result.todo else "all is done")
    return int(bool(result.problems))


def _weights_in_force(front: str) -> str:
    """Return the id of the step whose weights a HAProxy has; empty when it does not say."""
    from tenuto.deployments.fleet.proxy_config import STEP_PATH
    from tenuto.deployments.serve.endpoint import ask_directly

    try:
        status, body = ask_directly(front.rstrip("/") + STEP_PATH, _ANSWER_S)
    except EnvironmentFaultError as error:
        tell(f"{front} does not say whose weights it has: {first_line(error)}")
        return ""
    return body.decode("ascii", "replace") if status == 200 else ""  # format: of HTTP
