"""The figures and the verdict of a run, from its records: goodput, attainment, percentiles, the latency split, and
whether the run is valid.

All definitions are those of docs/reference/metrics.md: attainment divides by offered, percentiles come from raw
values, and p99 is given only with at least 459 samples. (With fewer, it is not sure with 99 % confidence that any
sample lies above the 99th percentile.)"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tenuto.batching.core.build import size_classes_of
from tenuto.batching.virtual.result import P99_SAMPLES
from tenuto.batching.virtual.writing import token_figures
from tenuto.loadgen.figures import application_figures, counted, latency_figures, outcome_figures, percentile
from tenuto.loadgen.records import Records
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tenuto.placement.application import Application, online
from tenuto.profiles.size_classes import find_classes

TARGET_ATTAINMENT = 0.99  # unit: the attainment that PASS asks for unless another is given


@dataclass(frozen=True)
class Verdict:
    """PASS: every model and application kept its SLO. FAIL: some did not. INVALID: the run was faulty, so its figures
    prove nothing.
    """

    result: str
    reasons: tuple[str, ...] = ()
    conditions: dict[str, Any] = field(default_factory=dict)


def summarise(
    records: Records,
    names: Sequence[str],
    *,
    warmup_ms: float,
    duration_ms: float,
    applications: Sequence[Application] = (),
    generating: Collection[str] = (),
) -> dict[str, Any]:
    """Return the summary with the keys of `tenuto simulate --json`, plus the latency split.

    Args:
        records: every request of the run.
        names: names of models by index, and behind them those of applications.
        warmup_ms: requests scheduled before this are left out.
        duration_ms: end of the measured window.
        applications: the applications, with the SLOs to judge them by.
        generating: models that generate, which have figures of tokens too.
    """
    measured = records.within(warmup_ms, duration_ms)
    length_s = (duration_ms - warmup_ms) / 1000.0
    ok = int((measured.outcome == Outcome.OK).sum())
    by_name = {name: measured.where(measured.model == index) for index, name in enumerate(names)}
    rows: dict[str, dict[str, Any]] = {}
    for application in online(applications):
        mine = by_name.pop(application.name)
        rows[application.name] = application_figures(mine, application, length_s)
        if application.streams:
            rows[application.name] |= _tokens(mine.where(mine.status == 200), length_s)
    models = {name: _model(mine) for name, mine in by_name.items()}
    for name in models.keys() & set(generating):
        models[name] |= _tokens(by_name[name].where(by_name[name].status == 200), length_s)
    summary: dict[str, Any] = {
        "offered_rps": len(measured) / length_s,
        "goodput_rps": ok / length_s,
        "attainment": ok / len(measured) if len(measured) else None,
        "requests": len(measured),
        "models": models,
        "gpulets": _gpulets(measured, length_s),
        "window_ms": [warmup_ms, duration_ms],
    }
    return summary | {"applications": rows} if rows else summary


def add_size_classes(summary: dict[str, Any], records: Records, plan: Plan) -> None:
    """Add to the figures of each model that is planned by size those of its size classes, and of larger requests."""
    begin_ms, end_ms = summary["window_ms"]
    measured = records.within(begin_ms, end_ms)
    classes_of = size_classes_of(plan)
    for index, (name, figures) in enumerate(summary["models"].items()):
        classes = classes_of.get(name)
        if not classes:
            continue
        names = tuple(plan.model(name).sizes)
        mine = measured.where(measured.model == index)
        places = find_classes(classes, mine.sizes[:, : len(names)])
        figures["by_size"] = []
        for place in (*range(len(classes)), *([-1] if (places < 0).any() else [])):
            ended = mine.where(places == place)
            row = outcome_figures(counted(ended.outcome))
            figures["by_size"].append(
                {
                    "sizes": None if place < 0 else dict(zip(names, classes[place], strict=True)),
                    **row,
                    "goodput_rps": row["ok"] / ((end_ms - begin_ms) / 1000.0),
                    **latency_figures(ended.where(ended.status == 200).latency_ms),
                }
            )


def _model(records: Records) -> dict[str, Any]:
    answered = records.where(records.status == 200)
    batched = answered.batch_size[answered.batch_size > 0]
    return {
        **outcome_figures(counted(records.outcome)),
        **latency_figures(answered.latency_ms),
        # The mean is over batches, not over requests: a batch of b appears b times.
        "mean_batch": float(batched.size / (1.0 / batched).sum()) if batched.size else None,
        "split_p95_ms": {
            "batching": percentile(answered.batching_ms, 95),
            "gpulet_queue": percentile(answered.gpulet_queue_ms, 95),
            "execution": percentile(answered.execution_ms, 95),
            "front_door": percentile(answered.front_door_ms, 95),
        },
        "execution_p50_ms": percentile(answered.execution_ms, 50),
    }


def _tokens(answered: Records, length_s: float) -> dict[str, Any]:
    rate = float(answered.output_tokens.sum()) / length_s
    return token_figures(answered.ttft_ms, answered.tpot_ms, answered.latency_ms, rate, P99_SAMPLES)


def _gpulets(records: Records, length_s: float) -> dict[str, Any]:
    """Return batches and busy time per gpu-let, as its answers reported them."""
    figures: dict[str, Any] = {}
    answered = records.where((records.status == 200) & (records.batch_size > 0))
    for gpulet in sorted({str(g) for g in answered.gpulet}):
        rows = answered.where(answered.gpulet == gpulet)
        batches = float((1.0 / rows.batch_size).sum())
        busy_s = float((rows.execution_ms / rows.batch_size).sum()) / 1000.0
        figures[gpulet] = {
            "utilisation": min(1.0, busy_s / length_s),
            "batches": round(batches),
            "mean_batch": len(rows) / batches if batches else None,
        }
    return figures


def judged_rows(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the figures by which a run is judged: those of applications, and of models that clients ask."""
    return {**(summary.get("applications") or {}), **summary["models"]}


def judge(
    records: Records,
    summary: Mapping[str, Any],
    slos_ms: Sequence[float],
    *,
    interrupted: bool = False,
    lost_clients: Sequence[str] = (),
) -> Verdict:
    """Return the verdict of a run.

    A run is invalid when the load generator did not follow the schedule: requests were not sent, the 99th percentile of
    lateness is above 5 % of the smallest SLO (at least 5 ms), a client was lost, or the run was interrupted."""
    lateness = records.lateness_ms
    scheduled = len(lateness)
    unsent = int(np.isnan(lateness).sum())
    p99 = float(np.percentile(lateness[~np.isnan(lateness)], 99)) if unsent < scheduled else float("inf")
    limit = max(5.0, 0.05 * min(slos_ms)) if slos_ms else 5.0  # limit: how late a client may send in a run that counts
    conditions = {
        "scheduled": scheduled,
        "sent": scheduled - unsent,
        "lateness_p99_ms": None if np.isinf(p99) else p99,
        "lateness_limit_ms": limit,
        "target_attainment": TARGET_ATTAINMENT,
    }
    invalid = []
    if interrupted:
        invalid.append("the run was interrupted; figures cover its first part only")
    invalid += lost_clients
    if scheduled == 0:
        invalid.append("nothing was scheduled; lengthen the run or raise the rate")
    elif unsent and not interrupted:
        invalid.append(f"{unsent} of {scheduled} requests were not sent")
    elif p99 > limit and not interrupted:
        invalid.append(
            f"the generator was late: p99 {p99:.1f} ms, limit {limit:.1f} ms. Use more --clients or a lower rate"
        )
    if invalid:
        return Verdict("INVALID", tuple(invalid), conditions)
    missed = [
        f"{name}: {100 * row['attainment']:.2f} % in time, {100 * TARGET_ATTAINMENT:g} % wanted"
        for name, row in judged_rows(summary).items()
        if row["attainment"] is not None and row["attainment"] < TARGET_ATTAINMENT
    ]
    return Verdict("FAIL" if missed else "PASS", tuple(missed), conditions)
