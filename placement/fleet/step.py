"""A step of a fleet: which cells change, in which order, made from which observation. It is a file in a folder of Git;
what is true of it is read from the cells each time, so that a step that is half carried out, stale or doubled is seen.

The order is room first, traffic next, then what is no longer needed. A cell either gives or takes models in one step
(`traffic_spread`), so that each cell changes once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tenuto.documents import SCHEMA, SchemaVersion, StrictModel
from tenuto.placement.cluster import NAME
from tenuto.placement.fleet.fleet_plan import FleetPlan
from tenuto.placement.plan import Plan

NOTHING_RUNS = "nothing"
_DIGITS = 16  # format: characters of a plan's fingerprint

Phase = Literal["canary", "room", "traffic", "release"]
PHASES: tuple[Phase, ...] = ("canary", "room", "traffic", "release")


def fingerprint(plan: Plan | None) -> str:
    """Return what tells a plan from others: what runs where, for which rates and terms. The ids of gpu-lets do
    not count, as a deployment gives new ones to processes that start anew."""
    if plan is None or not plan.gpulets:
        return NOTHING_RUNS
    held = sorted(
        (gpulet.gpus, gpulet.effective_share_pct, sorted((r.name, r.batch_size) for r in gpulet.models))
        for gpulet in plan.gpulets
    )
    terms = [each.model_dump(mode="json") for each in (*plan.models, *plan.applications)]
    return hashlib.sha256(json.dumps([held, sorted(terms, key=str)], default=str).encode()).hexdigest()[:_DIGITS]


class CellChange(StrictModel):
    """The change of one cell: the file with its plan, and the fingerprints of the plan before and of this one."""

    cell: Annotated[str, Field(pattern=NAME)]
    file: str
    phase: Phase
    before: str
    after: str


class FleetStep(StrictModel):
    """Changes in their order. `fleet` is the file that the step was made from, `others` are the fingerprints of what
    runs in the cells that stay; of these `idle` get no traffic. `id` tells this step from others; proxies say it where
    its weights are in force."""

    schema_version: SchemaVersion = SCHEMA
    id: str
    fleet: str
    version: str
    changes: tuple[CellChange, ...] = ()
    others: dict[str, str] = Field(default_factory=dict)
    idle: tuple[str, ...] = ()


class StepWeights(StrictModel):
    """Which part of the requests to each model each cell gets after a step, by the step's id."""

    step: str
    models: Mapping[str, Mapping[str, Annotated[float, Field(ge=0)]]]


def make_step(
    plan: FleetPlan,
    running: Mapping[str, str],
    files: Mapping[str, str],
    *,
    fleet: str,
    version: str,
    canary: str | None,
) -> FleetStep:
    """Return the step to a plan. `running` has the fingerprint of what runs in each cell, `files` the files of the new
    plans."""
    changes = []
    for name, new in plan.plans.items():
        phase: Phase = "canary" if name == canary else "release" if name in plan.spread.givers else "room"
        after = fingerprint(new)
        if after != running[name]:
            changes.append(CellChange(cell=name, file=files[name], phase=phase, before=running[name], after=after))
    changes.sort(key=lambda change: (PHASES.index(change.phase), change.cell))
    others = {name: before for name, before in running.items() if name not in {change.cell for change in changes}}
    traffic = {model: dict(shares) for model, shares in plan.traffic.items()}
    idle = tuple(name for name in others if not any(name in shares for shares in traffic.values()))
    content = json.dumps([[c.model_dump() for c in changes], others, traffic], sort_keys=True)
    number = hashlib.sha256(content.encode()).hexdigest()[:_DIGITS]
    return FleetStep(id=number, fleet=fleet, version=version, changes=tuple(changes), others=others, idle=idle)


@dataclass(frozen=True)
class SeenCell:
    """What a cell says now: the fingerprint of its plan, and why it may not be changed; None: it does not answer."""

    running: str | None
    unready: str = ""


@dataclass(frozen=True)
class StepCheck:
    """What is true of a step. `states` is by cell `done`, `to do`, or why neither. `problems` forbid to go on; `todo`
    is what comes next, empty when all is done."""

    states: Mapping[str, str]
    problems: Sequence[str]
    todo: str


def check_step(step: FleetStep, seen: Mapping[str, SeenCell], traffic_id: str | None) -> StepCheck:
    """Return what is true of a step now.

    Args:
        step: the step.
        seen: what each cell says now.
        traffic_id: the step whose weights the proxies say that they have; None: nobody was asked, or nobody says.
    """
    states, problems, is_stale = dict[str, str](), list[str](), False
    for change in step.changes:
        cell = seen.get(change.cell, SeenCell(None))
        running = change.before if cell.running is None and change.before == NOTHING_RUNS else cell.running
        states[change.cell] = {change.before: "to do", change.after: "done"}.get(running or "", "does not answer")
        if running is None:
            problems.append(f"{change.cell} does not answer, so that nobody knows what runs there")
        if cell.running not in (None, change.after, change.before):
            states[change.cell], is_stale = "runs another plan", True
            problems.append(f"{change.cell} runs neither the plan before nor the new one: somebody else changed it")
        if cell.unready:
            problems.append(f"{change.cell} is not to be changed now: {cell.unready}")
    for name, before in step.others.items():
        running = seen.get(name, SeenCell(None)).running
        if running is None and name not in step.idle:
            problems.append(f"{name} does not answer, and has traffic; if it is lost, plan with --without {name}")
        if running not in (None, before):
            is_stale = True
            problems.append(f"{name} runs another plan than when the step was made")
    open_in = {p: [c for c in step.changes if c.phase == p and states[c.cell] != "done"] for p in PHASES}
    room = [*open_in["canary"], *open_in["room"]]
    released = [c.cell for c in step.changes if c.phase == "release" and states[c.cell] == "done"]
    has_traffic = traffic_id == step.id
    if room and (released or has_traffic):
        what = f"{', '.join(released)} gave models up" if released else "the proxies have the new weights"
        problems.append(f"out of order: {what} before {', '.join(c.cell for c in room)} had room")
    if is_stale:
        todo = "observe the fleet and plan again; nothing of this step needs to be taken back"
    elif room:
        todo = f"deploy {room[0].file} to {room[0].cell}"
    elif not has_traffic and (open_in["release"] or traffic_id is not None):
        todo = "give the proxies the new weights"
    elif open_in["release"]:
        todo = f"deploy {open_in['release'][0].file} to {open_in['release'][0].cell}"
    else:
        todo = "" if has_traffic else "give the proxies the new weights, if they do not have them"
    return StepCheck(states, tuple(problems), todo)
