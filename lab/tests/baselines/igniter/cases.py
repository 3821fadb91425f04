"""The workloads of iGniter's paper and its V100 profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tenuto.placement import Plan, Workload
from tenuto.placement.interference.igniter_model import Hardware, Load, ModelConstants, inference_time_ms
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tests.placement.published import facts

FACTS = facts("igniter_workloads_and_results")


def profiles() -> Profiles:
    return Profiles([load_shipped("igniter-v100")])


def workload(rows: list[dict[str, Any]]) -> Workload:
    return Workload.model_validate(
        {
            "models": [
                {
                    "name": row.get("id", row["model"]),
                    "profile": row["model"],
                    "slo_ms": row["slo_ms"],
                    "rate_rps": row["rate_rps"],
                }
                for row in rows
            ]
        }
    )


def three() -> Workload:
    return workload(FACTS["table1_example"]["workloads"])


def twelve() -> Workload:
    return workload(FACTS["table3_workloads"])


def placed(plan: Plan) -> dict[str, tuple[float | None, int]]:
    """Return (share in percent, batch size) by model."""
    return {g.models[0].name: (g.share_pct, g.models[0].batch_size) for g in plan.gpulets}


def together(plan: Plan) -> list[set[str]]:
    """Return the models of every used GPU in order of first use."""
    return [{g.models[0].name for g in gpulets} for gpulets in plan.by_gpu().values() if gpulets]


@dataclass(frozen=True)
class Placed:
    """A model as a plan has it on a GPU, or as the paper states it."""

    name: str
    row: str
    share_pct: float
    batch_size: int
    rate_rps: float
    slo_ms: float


def gpus_of(plan: Plan, workload: Workload) -> list[list[Placed]]:
    """Return the residents of every used GPU of a plan with one model per gpu-let."""
    found = []
    for gpulets in plan.by_gpu().values():
        specs = [(g, g.models[0], workload[g.models[0].name]) for g in gpulets]
        found.append(
            [
                Placed(
                    spec.name,
                    spec.profile_row,
                    g.effective_share_pct,
                    replica.batch_size,
                    replica.rate_rps or 0.0,
                    spec.slo_ms,
                )
                for g, replica, spec in specs
            ]
        )
    return [gpu for gpu in found if gpu]


def violating(gpus: list[list[Placed]], *, measured: bool = False) -> set[str]:
    """Return the models that miss their SLO or their rate when iGniter's analytic model is what happens.

    A model violates when a batch takes more than half its SLO (the share of it that iGniter gives to execution), when
    filling the batch and running it take more than the SLO, or when its throughput is below its rate.

    Args:
        measured: take latency and throughput alone from the measured grid, and only the slowdown from the model.
    """
    rows, hardware = profiles().for_type("v100"), Hardware.of(profiles().hardware("v100"))
    bad = set()
    for gpu in gpus:
        models = [ModelConstants.of(rows[one.row].coefficients) for one in gpu]
        loads = [Load.of(model, one.batch_size, one.share_pct) for model, one in zip(models, gpu, strict=True)]
        for model, own, one in zip(models, loads, gpu, strict=True):
            time_ms = inference_time_ms(model, own, loads, hardware)
            overlapped_ms = one.batch_size * model.load_bytes / hardware.pcie_bytes_per_ms
            throughput = 1000.0 * one.batch_size / (time_ms - overlapped_ms)
            if measured:
                slowdown = time_ms / inference_time_ms(model, own, [own], hardware)
                time_ms = rows[one.row].latency_ms(one.batch_size, one.share_pct) * slowdown
                throughput = rows[one.row].throughput_rps(one.batch_size, one.share_pct) / slowdown
            filling_ms = 1000.0 * (one.batch_size - 1) / one.rate_rps
            slow = time_ms > one.slo_ms / 2 or filling_ms + time_ms > one.slo_ms
            if slow or throughput < one.rate_rps * (1 - 1e-6):
                bad.add(one.name)
    return bad
