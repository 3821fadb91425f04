"""The memory ledger of a plan: what every process needs of its GPU, and the cap it gets.

A process needs what its programs hold and the CUDA context it opens. Its cap is an upper limit that CUDA MPS and the
allocator enforce, so that one process that grows fails by itself instead of making its neighbours fail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tenuto.placement.cluster import Cluster
from tenuto.placement.plan import Plan
from tenuto.placement.program import Gpulet

HEADROOM = 1.1  # limit: of a process, times what was measured; allocators round up and libraries take workspaces
PARTS = 16  # format: caps are whole sixteenths of a GPU where there is room, so that small changes do not move them


def with_caps(plan: Plan, cluster: Cluster, contexts_mib: Mapping[str, float]) -> Plan:
    """Return the plan with a memory cap on every gpu-let whose memory is known and that has none yet.

    A gpu-let that has its GPU to itself gets all of it. Otherwise a cap is the need with some headroom in whole
    sixteenths of the GPU; where these do not fit beside each other and the caps that are there, the need and a fair
    part of what is left; where not even the needs fit, the need, which `check_plan` then refuses.

    Args:
        plan: with programs that know their memory.
        cluster: for the memory of its GPU types.
        contexts_mib: of a process's CUDA context, by GPU type.
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
    """Return the models whose memory is not known on a GPU, so that no ledger can tell whether they fit."""
    names = {r.name for g in plan.gpulets for r in g.models if r.memory_mib is None}
    return tuple(spec.name for spec in plan.models if spec.name in names)
