"""Small plans written by hand, with latencies in them, and what is asked while one runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.placement import Gpulet, Plan, Replica, Workload
from tenuto.placement.cluster import Gpu
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.plan import PlannedGpu, PolicyUsed
from tenuto.placement.planner import ChangeTerms, Durations, PlanRequest, RunningPlan
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import LatencyTable, LinearLatency

__all__ = ["DURATIONS", "gpu", "make_plan", "replica", "request", "running"]

LATENCY = LinearLatency(alpha_ms=1.0, beta_ms=4.0)
DURATIONS = Durations(10.0, 5.0)
MEASURED = LatencyTable(points={1: 5.0, 4096: 4100.0})  # the same as a table, as plans have it of measured models


def gpu(name: str, memory_mib: float = 16_000.0, kind: str = "v100") -> Gpu:
    """Return a GPU that is there."""
    return Gpu(id=name, type=kind, memory_mib=memory_mib)


def replica(name: str, share_pct: float = 100.0, batch_size: int = 8, memory_mib: float = 1000.0) -> Replica:
    """Return a replica whose batches take 4 ms + 1 ms per request on the whole GPU, longer in proportion on less."""
    latency = MEASURED.scaled(100.0 / share_pct)
    return Replica(
        name=name, batch_size=batch_size, latency=latency, latency_ms=latency.at(batch_size), memory_mib=memory_mib
    )


def make_plan(
    gpulets: Mapping[str, tuple[float, Sequence[str]]],
    *,
    slo_ms: float = 100.0,
    rate_rps: float = 50.0,
    weights: Mapping[str, float] | None = None,
    models: Sequence[str] = (),
) -> Plan:
    """Return a plan from gpu-let ids, such as `n0/0/a`, with their share and the models they hold."""
    names = list(dict.fromkeys([*models, *(name for _, held in gpulets.values() for name in held)]))
    gpus = list(dict.fromkeys(gpulet.rsplit("/", 1)[0] for gpulet in gpulets))
    held = {name for _, resident in gpulets.values() for name in resident}
    unserved = tuple(name for name in names if name not in held)
    return Plan(
        policy=PolicyUsed(name="ffd"),
        gpus=tuple(PlannedGpu(id=name, type="v100") for name in gpus),
        gpulets=tuple(
            Gpulet(
                id=name,
                gpu=name.rsplit("/", 1)[0],
                share_pct=share,
                models=tuple(replica(model, share) for model in resident),
            )
            for name, (share, resident) in gpulets.items()
        ),
        models=tuple(
            ModelSpec(
                name=name, rate_rps=rate_rps, slo_ms=slo_ms, latency=LATENCY, weight=(weights or {}).get(name, 1.0)
            )
            for name in names
        ),
        unserved=unserved,
        unserved_reasons=dict.fromkeys(unserved, "a test wants it so"),
    )


def running(
    plan: Plan, traffic: Traffic, *, durations: Durations = DURATIONS, horizon_s: float = 300.0, **more: Any
) -> RunningPlan:
    """Return a plan that runs while this traffic comes, which is also what is expected."""
    return RunningPlan(plan, traffic, ChangeTerms(traffic.mean_rps, durations, horizon_s, 0.2, 20.0), **more)


def request(
    plan: Plan, gpus: Sequence[Gpu], rates_rps: Mapping[str, float], workload: Workload | None = None, **more: Any
) -> PlanRequest:
    """Return what is asked while a plan runs: whether another one should take its place at these rates."""
    asked = plan.workload if workload is None else workload
    return PlanRequest(asked, tuple(gpus), plan.policy, running(plan, Traffic(rates_rps)), **more)
