"""The workloads of iGniter's paper and its V100 profile."""

from __future__ import annotations

from typing import Any

from tenuto.placement import Plan, Workload
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tests.placement.published import facts

FACTS = facts("igniter_workloads_and_results")


def profiles() -> Profiles:
    return Profiles([load_shipped("igniter-v100")])


def workload(rows: list[dict[str, Any]]) -> Workload:
    return Workload.model_validate({"models": [
        {"name": row.get("id", row["model"]), "profile": row["model"], "slo_ms": row["slo_ms"],
         "rate_rps": row["rate_rps"]} for row in rows]})


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
