"""The memory ledger of a plan: what every process needs of its GPU, and the cap it gets. A plan fits in memory or is
refused.

A process needs the memory of its programs and of the CUDA context that it opens. Its cap is a limit that CUDA MPS and
the allocator enforce. So when a process grows, that process fails, and not its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tenuto.placement.cluster import Cluster
from tenuto.placement.plan import Plan
from tenuto.placement.program import Gpulet

HEADROOM = 1.1  # fitted: cap over measured memory; allocators round up and libraries take workspaces
PARTS = 16  # format: caps are whole sixteenths of a GPU where there is room, so that small changes do not move them


def with_caps(plan: Plan, cluster: Cluster, contexts_mib: Mapping[str, float]) -> Plan:
    """Return the plan with a memory cap on every gpu-let whose memory is known and that has none yet.

    When a gpu-let has its GPU to itself, it gets all of it. Otherwise its cap is its need with some headroom, rounded
    up to whole sixteenths of the GPU. When these caps do not fit beside each other and beside caps that are given, each
    gpu-let gets its need and a fair part of the memory that is left. When not even the needs fit, each cap is the need,
    and `check_plan` refuses the plan.

    Args:
        plan: with programs that know their memory.
        cluster: gives the memory of its GPU types.
        contexts_mib: the memory of a process's CUDA context, by GPU type.
    """
    sizes = {kind: gpu.memory_mib for kind, gpu in cluster.one_of_each.items()}
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    caps: dict[str, float] = {}
    for gpu_id, gpulets in plan.by_gpu().items():
        kind = types.get(gpu_id, "")
        if kind in sizes and gpulets:
            caps |= _caps(gpulets, sizes[kind], contexts_mib.get(kind, 0.0))
    capped = (
        gpulet.model_copy(update={"memory_mib": caps[gpulet.id]})
        if gpulet.memory_mib is None and gpulet.id in caps
        else gpulet
        for gpulet in plan.gpulets
    )
    return plan.model_copy(update={"gpulets": tuple(capped)})


def _caps(gpulets: Sequence[Gpulet], memory_mib: float, context_mib: float) -> dict[str, float]:
    free = [gpulet for gpulet in gpulets if gpulet.memory_mib is None]
    left_mib = memory_mib - sum(gpulet.memory_mib or 0.0 for gpulet in gpulets)
    needs = {gpulet.id: held + context_mib for gpulet in free if (held := gpulet.held_mib) is not None}
    total = sum(needs.values())
    if total > left_mib:
        return {name: round(need, 3) for name, need in needs.items()}
    if len(gpulets) == 1:
        return dict.fromkeys(needs, memory_mib)
    step = memory_mib / PARTS
    caps = {name: math.ceil(HEADROOM * need / step - 1e-9) * step for name, need in needs.items()}
    if sum(caps.values()) > left_mib:
        caps = {name: need * left_mib / total for name, need in needs.items()}
    return {name: round(cap, 3) for name, cap in caps.items()}


def unknown_memory(plan: Plan) -> tuple[str, ...]:
    """Return the models whose memory is not known on some GPU. No ledger can tell whether they fit."""
    names = {r.name for g in plan.gpulets for r in g.models if r.memory_mib is None}
    return tuple(spec.name for spec in plan.models if spec.name in names)
