"""Raises the largest batches of a plan, so that the plan has room for more requests without a new process.

A policy chooses the batch that a rate needs. The scheduler chooses at every moment which batch runs; the plan's batch
is only a limit. A higher limit costs nothing until more requests come. Then it helps at once, while a change of plan
takes time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tenuto.errors import InvalidInputError
from tenuto.placement.cluster import Gpu, smallest_of_each
from tenuto.placement.costs import latency_up_to
from tenuto.placement.plan import Plan
from tenuto.placement.program import Gpulet, Replica
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import Profiles
from tenuto.profiles.latency import Latency

GROWTH = 1.25  # derived: finer than the powers of two at which batches are profiled
STEPS = 24  # derived: 1.25^24 = 212, beyond 128, the largest batch profiled


def enlarge_batches(plan: Plan, workload: Workload, profiles: Profiles, gpus: Sequence[Gpu]) -> Plan:
    """Return the plan with the largest batches that its gpu-lets can run in turns.

    On each gpu-let all batches grow by one factor. They grow while a round of all batches and one more batch ends
    within every model's SLO (gpulet, section 4: duty cycle + l(b) <= SLO), the batches were profiled, and memory
    allows. Then single models' batches grow where room is left, shortest SLO first. Gpu-lets with a joint program stay
    as they are, and so do gpu-lets whose batches already break that rule.
    """
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    memory = {kind: gpu.memory_mib for kind, gpu in smallest_of_each(gpus).items()}
    specs = {spec.name: spec for spec in workload.models}
    by_gpu: dict[str, list[Gpulet]] = plan.by_gpu()
    gpulets = []
    for gpulet in plan.gpulets:
        kind = types[gpulet.gpu]
        if gpulet.also_on:
            gpulets.append(gpulet)  # it generates, and forms no batches
            continue
        others = sum(other.needs_mib for other in by_gpu[gpulet.gpu] if other.id != gpulet.id)
        room_mib = min(gpulet.memory_mib or float("inf"), memory.get(kind, float("inf")) - others)
        larger = _raised(gpulet, specs, profiles, kind, room_mib)
        by_gpu[gpulet.gpu] = [larger if other.id == gpulet.id else other for other in by_gpu[gpulet.gpu]]
        gpulets.append(larger)
    return plan.model_copy(update={"gpulets": tuple(gpulets)})


def _raised(
    gpulet: Gpulet, specs: Mapping[str, ModelSpec], profiles: Profiles, gpu_type: str, room_mib: float
) -> Gpulet:
    if gpulet.joint_models or not specs.keys() >= {replica.name for replica in gpulet.models}:
        return gpulet
    share_pct = gpulet.effective_share_pct

    def grown(best: tuple[Replica, ...], names: Collection[str]) -> tuple[Replica, ...]:
        """Return the replicas with the batches of these models as large as they can be."""
        for step in range(1, STEPS):
            models = tuple(
                _with_batch(first, specs[first.name], profiles, gpu_type, share_pct, GROWTH**step)
                if first.name in names
                else replica
                for first, replica in zip(gpulet.models, best, strict=True)
            )
            if any(new.batch_size < old.batch_size for new, old in zip(models, best, strict=True)):
                continue
            if not _take_turns(models, specs) or sum(replica.memory_mib or 0.0 for replica in models) > room_mib:
                break
            best = models
        return best

    best = grown(gpulet.models, {replica.name for replica in gpulet.models})
    for replica in sorted(gpulet.models, key=lambda replica: specs[replica.name].slo_ms):
        best = grown(best, {replica.name})
    return gpulet if best == gpulet.models else gpulet.model_copy(update={"models": best})


def _with_batch(
    replica: Replica, spec: ModelSpec, profiles: Profiles, gpu_type: str, share_pct: float, factor: float
) -> Replica:
    """Return a replica whose largest batch is `factor` times as large, at most the largest profiled."""
    try:
        model = profile_of(spec, gpu_type, profiles)
        latency = model.latency(share_pct)
    except InvalidInputError:
        return replica
    largest = latency.largest or 4 * replica.batch_size  # limit: of a line, which names no largest
    size = max(replica.batch_size, min(largest, int(factor * replica.batch_size + 0.999)))  # derived: rounds up
    if size == replica.batch_size or replica.latency is None:
        return replica
    larger = with_latency(replica, latency, latency, size)
    return larger.model_copy(update={"memory_mib": model.memory_mib(size, share_pct)})


def with_latency(replica: Replica, before: Latency, after: Latency, batch_size: int) -> Replica:
    """Return a replica whose profile's latency changes, with batches up to this size. The plan's latency may include
    more than the profile's, such as what a share costs that was not profiled; their ratio stays."""
    assert replica.latency is not None
    ratio = replica.latency.at(replica.batch_size) / before.at(replica.batch_size)
    curve = latency_up_to(after, batch_size).scaled(ratio)
    latency_ms = round(curve.at(batch_size) * replica.slowdown, 6)
    return replica.model_copy(update={"batch_size": batch_size, "latency": curve, "latency_ms": latency_ms})


def _take_turns(models: Sequence[Replica], specs: Mapping[str, ModelSpec]) -> bool:
    """Whether a round of all batches and one more batch of any model end within its SLO."""
    ms = [r.latency.at(r.batch_size) * r.slowdown if r.latency is not None else float("inf") for r in models]
    return all(sum(ms) + own <= specs[r.name].slo_ms + 1e-6 for r, own in zip(models, ms, strict=True))
