"""The figures of one run of a plan, from its records alone, so that simulated and live runs are read in one way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tenuto.loadgen.records import Records
from tenuto.loadgen.verdict import summarise
from tenuto.placement import Plan


def run_figures(
    plan: Plan, records: Records, *, warmup_ms: float, duration_ms: float, stretch: float = 1.0
) -> dict[str, Any]:
    """Return rates, outcomes, stages and batches by model.

    Throughput counts every answer within the measured window, late ones too. `records` index the plan's models; with
    a time stretch, times are divided and rates multiplied by it.
    """
    names = [spec.name for spec in plan.models]
    summary = summarise(records, names, warmup_ms=warmup_ms, duration_ms=duration_ms)
    window_s = (duration_ms - warmup_ms) / 1000.0 / stretch
    answered = (records.answered_ms >= warmup_ms) & (records.answered_ms < duration_ms) & (records.status == 200)
    models = {}
    for index, name in enumerate(names):
        mine = summary["models"][name]
        models[name] = {
            "offered_rps": mine["offered"] / window_s,
            "goodput_rps": mine["ok"] / window_s,
            "throughput_rps": float((answered & (records.model == index)).sum()) / window_s,
            "attainment": mine["attainment"],
            "p95_ms": _divided(mine.get("split_p95_ms"), stretch),
            "mean_batch": mine["mean_batch"],
            "replicas": _replicas(plan, records, index, name, stretch),
        }
    return {
        "offered_rps": sum(model["offered_rps"] for model in models.values()),
        "goodput_rps": sum(model["goodput_rps"] for model in models.values()),
        "throughput_rps": sum(model["throughput_rps"] for model in models.values()),
        "requests": len(records),
        "models": models,
    }


def _divided(split: Mapping[str, float | None] | None, stretch: float) -> dict[str, float | None] | None:
    return None if split is None else {key: None if ms is None else ms / stretch for key, ms in split.items()}


def _replicas(plan: Plan, records: Records, index: int, name: str, stretch: float) -> list[dict[str, Any]]:
    """Return, for each replica of a model, its part of the load, its batches, and how many of them were full.

    Each request carries its batch's size; its inverse is the request's part of the batch.
    """
    ran = records.where((records.model == index) & (records.batch_size > 0))
    rows = []
    for gpulet in plan.gpulets:
        for replica in gpulet.models:
            if replica.name != name:
                continue
            mine = ran.where(ran.gpulet == gpulet.id)
            parts = 1.0 / mine.batch_size
            batches = float(parts.sum())
            full = float(parts[mine.batch_size >= replica.batch_size].sum())
            took = float(np.dot(np.nan_to_num(mine.execution_ms), parts))
            rows.append(
                {
                    "gpulet": gpulet.id,
                    "gpu": gpulet.gpu,
                    "batch_size": replica.batch_size,
                    "load_share": len(mine) / len(ran) if len(ran) else None,
                    "batches": round(batches),
                    "full_share": full / batches if batches else None,
                    "mean_batch": len(mine) / batches if batches else None,
                    "execution_ms": took / batches / stretch if batches else None,
                }
            )
    return rows
