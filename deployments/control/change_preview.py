"""Works out what going over to another plan would do, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.diff import GpuletChange, LayoutChange, diff, layout_changes
from tenuto.placement import Plan
from tenuto.placement.planner.change_stages import stages
from tenuto.placement.planner.gpu_matching import gpus_of, renamed


@dataclass(frozen=True)
class ChangeStep:
    """One step of a change: its gpu-lets, those of them that start or load, and the models that no gpu-let serves until
    these are ready."""

    gpulets: tuple[str, ...]
    starting: tuple[str, ...]
    unserved: tuple[str, ...]


@dataclass(frozen=True)
class SettingChange:
    """A setting that is asked for otherwise than it runs. `stays`: it is not changed. What is no single value, and may
    hold secrets, is shown as empty."""

    name: str
    runs: str
    wanted: str
    stays: bool


@dataclass(frozen=True)
class ChangePreview:
    """What happens to every gpu-let, in which steps, and which models the new plan no longer serves. `drained`: places
    to empty; `undrained`: places free for use again; `layouts`: GPUs to cut into other MIG instances; `settings`: those
    that are asked for otherwise; `is_same`: the plan is the one that runs."""

    changes: tuple[GpuletChange, ...]
    steps: tuple[ChangeStep, ...]
    lost: tuple[str, ...]
    drained: tuple[str, ...] = ()
    undrained: tuple[str, ...] = ()
    layouts: tuple[LayoutChange, ...] = ()
    settings: tuple[SettingChange, ...] = ()
    is_same: bool = False

    @property
    def changes_nothing(self) -> bool:
        """Whether everything would go on as it runs."""
        is_touched = any(change.kind != "unchanged" for change in self.changes)
        return self.is_same and not is_touched and all(setting.stays for setting in self.settings)


def preview_change(running: Deployment, wanted: Deployment, kept: Collection[str] = ()) -> ChangePreview:
    """Return what a change from one deployment to another does, where the settings in `kept` stay as they run."""
    parts = [name for name in kept if "." in name]
    preview, after = preview_plan(running.plan, wanted.plan), wanted.left_open_as(running, parts)
    settings = [
        SettingChange(name, _shown(running.setting(name)), _shown(after.setting(name)), name in kept)
        for name in sorted(Deployment.model_fields.keys() - {"plan", "workload", "name", "nodes"})
        if after.setting(name) != running.setting(name) and not (name in kept and wanted.leaves_open(name))
    ]
    return replace(preview, settings=tuple(settings))


def _shown(value: object) -> str:
    return "none" if value is None else str(value) if isinstance(value, str | int | float) else ""


def preview_plan(running: Plan, desired: Plan) -> ChangePreview:
    """Return what a change from `running` to `desired` does, make before break."""
    target = renamed(desired, running)
    rates = {spec.name: spec.rate_rps for spec in desired.models}
    running_ids = {gpulet.id for gpulet in running.gpulets}  # they serve while they load
    served = dict.fromkeys(replica.name for gpulet in running.gpulets for replica in gpulet.models)
    steps = []
    for stage in stages(running, target, gpus_of(running, target), rates):
        holds = {r.name for g in stage.plan.gpulets if g.id in stage.ready | running_ids for r in g.models}
        planned = {spec.name for spec in stage.plan.models}
        ids = {gpulet.id for gpulet in stage.plan.gpulets}
        without = tuple(name for name in served if name in planned - holds)
        steps.append(ChangeStep(tuple(sorted(ids)), tuple(sorted(ids - stage.ready)), without))
    served_after = {replica.name for gpulet in desired.gpulets for replica in gpulet.models}
    lost = tuple(name for name in served if name not in served_after)
    undrained = tuple(name for name in running.drained if name not in desired.drained)
    layouts = layout_changes(running, target)
    is_same = target.to_data() == running.to_data()
    return ChangePreview(
        diff(running, target), tuple(steps), lost, desired.drained, undrained, layouts, is_same=is_same
    )
