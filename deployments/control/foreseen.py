"""Works out what going over to another plan would do, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tenuto.deployments.control.fit import gpus_of, renamed
from tenuto.deployments.control.interface import Durations
from tenuto.deployments.control.worth import stages
from tenuto.deployments.serve.diff import GpuletChange, LayoutChange, diff, layout_changes
from tenuto.placement import Plan


@dataclass(frozen=True)
class ChangeStep:
    """One step of a change: its gpu-lets, those of them that start or load, and the models that no gpu-let serves until
    these are ready."""

    gpulets: tuple[str, ...]
    starting: tuple[str, ...]
    unserved: tuple[str, ...]


@dataclass(frozen=True)
class ForeseenChange:
    """What happens to every gpu-let, in which steps, and which models the new plan no longer serves. `drained`: places
    to empty; `undrained`: places free for use again; `layouts`: GPUs to cut into other MIG instances."""

    changes: tuple[GpuletChange, ...]
    steps: tuple[ChangeStep, ...]
    lost: tuple[str, ...]
    drained: tuple[str, ...] = ()
    undrained: tuple[str, ...] = ()
    layouts: tuple[LayoutChange, ...] = ()


def foresee(running: Plan, wanted: Plan, strays: Collection[str] = ()) -> ForeseenChange:
    """Return what a change from `running` to `wanted` does, make before break, after strays (gpu-lets in no plan) are
    ended."""
    target = renamed(wanted, running)
    rates = {spec.name: spec.rate_rps for spec in wanted.models}
    there = {gpulet.id for gpulet in running.gpulets}  # they serve while they load
    served = dict.fromkeys(replica.name for gpulet in running.gpulets for replica in gpulet.models)
    steps = []
    for plan, ready, _ in stages(running, target, gpus_of(running, target), rates, Durations(1.0, 1.0)):
        holds = {r.name for g in plan.gpulets if g.id in ready | there for r in g.models}
        asked = {spec.name for spec in plan.models}
        ids = {gpulet.id for gpulet in plan.gpulets}
        without = tuple(name for name in served if name in asked - holds)
        steps.append(ChangeStep(tuple(sorted(ids)), tuple(sorted(ids - ready)), without))
    kept = {replica.name for gpulet in wanted.gpulets for replica in gpulet.models}
    ended = tuple(GpuletChange(name, "stop", ("it runs and is in no plan",)) for name in strays)
    changes = (*ended, *diff(running, target))
    lost = tuple(name for name in served if name not in kept)
    undrained = tuple(name for name in running.drained if name not in wanted.drained)
    return ForeseenChange(changes, tuple(steps), lost, wanted.drained, undrained, layout_changes(running, target))
