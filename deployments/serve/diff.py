"""What a new plan changes, gpu-let by gpu-let: only the route, a reconfiguration in place, or a restart.

A change of `GpuletProcess` needs a new process. Everything else of a gpu-let changes in place. The entry always gets
the whole plan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from tenuto.placement.cluster import excludes
from tenuto.placement.plan import GpuletProcess, Plan, PlannedGpu
from tenuto.placement.program import Gpulet

ChangeKind = Literal["unchanged", "route-only", "reconfigure", "restart", "start", "stop"]


@dataclass(frozen=True)
class GpuletChange:
    """The change of one gpu-let, and why. `route-only`: the gateways send it other requests, or allow them another
    time; its process and its models are not touched."""

    gpulet: str
    kind: ChangeKind
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayoutChange:
    """A GPU that is cut into other MIG instances, the dearest kind of change: the instances that go are emptied first.
    `before` and `after` are the instances that go and come, as `3g.40gb at 4`, and `all` for the whole GPU; `emptied`
    are the gpu-lets that end before they can, which carry `rate_rps`."""

    gpu: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    emptied: tuple[str, ...]
    rate_rps: float


def diff(old: Plan, new: Plan) -> tuple[GpuletChange, ...]:
    """Return the changes from plan `old` to plan `new`; every gpu-let of either plan appears exactly once."""
    before = {gpulet.id: gpulet for gpulet in old.gpulets}
    after = {gpulet.id: gpulet for gpulet in new.gpulets}
    then, now = old.processes(), new.processes()
    changes = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            changes.append(GpuletChange(name, "stop", ("not in the new plan",)))
        elif name not in before:
            changes.append(GpuletChange(name, "start", ("not in the old plan",)))
        else:
            changes.append(_restart(name, then[name], now[name]) or _in_place(old, before[name], new, after[name]))
    return tuple(changes)


def layout_changes(old: Plan, new: Plan) -> tuple[LayoutChange, ...]:
    """Return the GPUs that the new plan cuts into other MIG instances. Idle instances and GPUs count as free."""
    before, after = _places(old), _places(new)
    changes = []
    held = old.by_gpu()
    for device in before.keys() & after.keys():
        gone = [gpu for gpu in before[device] if any(excludes(gpu, other) for other in after[device])]
        present = {(gpu.id, gpu.type) for gpu in before[device]}
        come = [gpu for gpu in after[device] if (gpu.id, gpu.type) not in present]
        if come and any(gpu.instance is not None for gpu in (*gone, *come)):
            gpulets = [gpulet for gpu in gone for gpulet in held[gpu.id]]
            rate = sum(replica.rate_rps or 0.0 for gpulet in gpulets for replica in gpulet.models)
            shown = (tuple(map(_cut_as, gone)), tuple(map(_cut_as, come)))
            changes.append(LayoutChange(device, *shown, tuple(gpulet.id for gpulet in gpulets), round(rate, 6)))
    return tuple(sorted(changes, key=lambda change: change.gpu))


def _places(plan: Plan) -> dict[str, list[PlannedGpu]]:
    places: dict[str, list[PlannedGpu]] = {}
    for gpu in plan.gpus:
        places.setdefault(gpu.device, []).append(gpu)
    return places


def _cut_as(gpu: PlannedGpu) -> str:
    return "all" if gpu.instance is None or gpu.cut_as is None else f"{gpu.cut_as.profile} at {gpu.instance.start}"


def _restart(gpulet: str, before: GpuletProcess, after: GpuletProcess) -> GpuletChange | None:
    if before == after:
        return None
    then, now = asdict(before), asdict(after)
    words = {"share_pct": "share", "memory_mib": "memory limit", "mps": "MPS", "cuda_mps": "CUDA MPS", "gpu": "GPU"}
    reasons = tuple(
        f"{words.get(key, key.replace('_', ' '))}: {_shown(then[key])} → {_shown(now[key])}"
        for key in then
        if then[key] != now[key]
    )
    return GpuletChange(gpulet, "restart", reasons)


def _in_place(old: Plan, before: Gpulet, new: Plan, after: Gpulet) -> GpuletChange:
    models_before, models_after = _models(old, before), _models(new, after)
    reasons = tuple(
        _model_reason(name, models_before.get(name), models_after.get(name))
        for name in sorted(models_before.keys() | models_after.keys())
        if models_before.get(name) != models_after.get(name)
    )
    if reasons:
        return GpuletChange(after.id, "reconfigure", reasons)
    routes_before, routes_after = _routes(old, before), _routes(new, after)
    changed = tuple(key for key in routes_after if routes_before.get(key) != routes_after[key])
    return GpuletChange(after.id, "route-only" if changed else "unchanged", changed)


def _routes(plan: Plan, gpulet: Gpulet) -> dict[str, list[Any]]:
    """Return what only the gateways know of a gpu-let: what its models are asked and promised."""
    settings: dict[str, list[Any]] = {key: [value] for key, value in dict(gpulet).items() if key != "models"}
    for replica in gpulet.models:
        for part in (replica, plan.model(replica.name)):
            for key, value in dict(part).items():
                settings.setdefault(f"{replica.name}: {key.replace('_', ' ')}", []).append(value)
    return settings


def _models(plan: Plan, gpulet: Gpulet) -> dict[str, dict[str, Any]]:
    """Return what can change in place: the resident models, how they are built, and their batch sizes."""
    settings = {}
    for replica in gpulet.models:
        spec = plan.model(replica.name)
        settings[replica.name] = {
            "batch size": replica.batch_size,
            "source": spec.source,
            "weights": spec.weights_path,
            "options": spec.options,
            "latency": replica.latency,
            "latency by size": replica.by_size,
            "padding": replica.pads,
            "slowdown": replica.slowdown,
            "copies": (replica.copy_in_ms, replica.copy_out_ms),
        }
    for program in gpulet.programs:
        if program.is_joint:
            settings[f"program {program.name}"] = {"batch size": program.batch_size, "latency": program.latency}
    return settings


def _model_reason(name: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    if before is None:
        return f"{name}: added"
    if after is None:
        return f"{name}: removed"
    changed = [
        f"{key} {before[key]} → {after[key]}" if key == "batch size" else key
        for key in before
        if before[key] != after[key]
    ]
    return f"{name}: {', '.join(changed)}"


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
