"""The files of a run: result.json with all figures, requests.parquet with one row per request, timeline.csv with one
row per second.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.documents import SCHEMA
from tenuto.loadgen.bench import BenchOptions, BenchResult, status_at
from tenuto.loadgen.records import WIDE, Records, request_id
from tenuto.loadgen.result_folder import prepare_folder, provenance, write_files
from tenuto.loadgen.schedule import Schedule
from tenuto.loadgen.verdict import add_size_classes
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tenuto.placement.workload import client_targets

_OURS = ("result.json", "requests.parquet", "timeline.csv", "schedule.npz", "report.html")


def prepare_report(folder: Path, *, force: bool) -> Path:
    """Create the folder of a report; see `prepare_folder`."""
    return prepare_folder(folder, _OURS, "report", force=force)


def describe(result: BenchResult, options: BenchOptions, plan: Plan, *, command: Sequence[str]) -> dict[str, Any]:
    """Return the result document of a live run: figures, verdict, and everything needed to repeat the run."""
    verdict = result.verdict
    add_size_classes(result.summary, result.records, plan)
    return {
        "schema": SCHEMA,
        "kind": "bench",
        **_served_by(options.url),
        **result.summary,
        "gpu_utilisation": _gpu_utilisation(plan, result.summary["gpulets"]),
        "wall_s": result.wall_s,
        "verdict": {"result": verdict.result, "reasons": list(verdict.reasons), "conditions": verdict.conditions},
        "errors": result.errors,
        "slos_ms": {
            spec.name: spec.slo_ms * options.slo_scale for spec in plan.models if spec.name in result.summary["models"]
        },
        "token_slos": {
            spec.name: spec.slo.scaled(options.slo_scale).model_dump()
            for spec in client_targets(plan.models, plan.applications)
            if spec.slo is not None
        },
        "schedule_hash": result.schedule.hash,
        "schedule_notes": [*result.schedule.notes, *result.notes],
        "options": asdict(options),
        **provenance(command),
        "plan": plan.to_data(),
    }


def _gpu_utilisation(plan: Plan, gpulets: Mapping[str, Any]) -> float:
    """Return the mean, over the plan's occupied GPUs, of the part of the time that each GPU executed. The gpu-lets of
    one GPU add up to at most 1.
    """
    busy = [
        min(1.0, sum(float(gpulets[g.id]["utilisation"]) for g in plan.on_gpu(gpu.id) if g.id in gpulets))
        for gpu in plan.gpus
        if plan.on_gpu(gpu.id)
    ]
    return sum(busy) / len(busy) if busy else 0.0


def write_run_files(
    folder: Path,
    document: Mapping[str, Any],
    records: Records,
    schedule: Schedule | None,
    queued: Mapping[int, int] | None = None,
) -> None:
    """Write result.json, timeline.csv, schedule.npz and requests.parquet. The small and most useful files come first.

    Raises:
        EnvironmentFaultError: a file cannot be written; the message says which ones were.
    """
    names = [*document["models"], *(document.get("applications") or {})]
    duration_s = float(document["options"]["duration_s"])
    run = schedule.hash[:8] if schedule is not None and document.get("kind") == "bench" else None
    contents: dict[str, str | Callable[[Path], None]] = {
        "result.json": json.dumps(document, indent=2, allow_nan=False) + "\n",
        "timeline.csv": lambda path: _write_timeline(path, records, duration_s, queued or {}),
    }
    if schedule is not None:
        contents["schedule.npz"] = schedule.save
    of_all = schedule.size_names if schedule is not None else {}
    sizes = {name: labels for name, labels in of_all.items() if name in names}  # offline models have no rows
    stages = {name: tuple(row["stages"]) for name, row in (document.get("applications") or {}).items()}
    contents["requests.parquet"] = lambda path: _write_parquet(path, records, names, run, sizes, stages)
    write_files(folder, contents)


def _served_by(url: str) -> dict[str, Any]:
    """Return whether any gpu-let of the endpoint is emulated (None if it does not say), and the status of its
    schedulers."""
    status = status_at(url)
    if status is None:
        return {"emulated": None, "schedulers": []}
    emulated = any(gpulet.emulated for gpulet in status.gpulets)
    return {"emulated": emulated, "schedulers": [scheduler.to_data() for scheduler in status.schedulers]}


def _write_timeline(path: Path, records: Records, duration_s: float, queued: Mapping[int, int]) -> None:
    """Write one row per second: how many requests were scheduled in it, how these ended, and, if the server said so,
    how many requests waited for a batch at its end."""
    length = int(np.ceil(duration_s))

    def by_second(at_ms: Any) -> Any:
        second = np.clip((at_ms // 1000.0).astype(int), 0, max(0, length - 1))
        return np.bincount(second, minlength=length)

    columns = {"offered": by_second(records.scheduled_ms)}
    for outcome in Outcome:
        columns[outcome.name.lower()] = by_second(records.scheduled_ms[records.outcome == outcome])
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["second", *columns, *(["queued"] if queued else [])])
        for index in range(length):
            last_value = [queued.get(index, "")] if queued else []
            writer.writerow([index, *(int(column[index]) for column in columns.values()), *last_value])


def _write_parquet(
    path: Path,
    records: Records,
    names: Sequence[str],
    run: str | None,
    size_names: Mapping[str, Sequence[str]],
    stages: Mapping[str, Sequence[str]],
) -> None:
    """Write one row per request, with the `model` or application that was asked. In a live run it has the `id` that the
    server saw. A column `size_NAME` has sizes by name, and `stage_NAME_ms` how long the stage of an application took;
    rows of others have 0 and NaN there."""
    import pyarrow as arrow
    from pyarrow import parquet

    columns = {name: getattr(records, name) for name in Records.columns() if name not in WIDE}
    outcomes = [outcome.name.lower() for outcome in Outcome]
    columns["model"] = arrow.DictionaryArray.from_arrays(arrow.array(records.model), arrow.array(names, arrow.string()))
    columns["outcome"] = arrow.DictionaryArray.from_arrays(arrow.array(records.outcome), arrow.array(outcomes))
    columns["gpulet"] = arrow.array(records.gpulet, arrow.string()).dictionary_encode()
    for by_name, wide, form in ((size_names, "sizes", "size_{}"), (stages, "stage_ms", "stage_{}_ms")):
        for name, labels in by_name.items():
            mine = records.model == names.index(name)
            for column, label in enumerate(labels):
                absent = np.full(len(records), WIDE[wide])
                values = columns.setdefault(form.format(label), absent)
                values[mine] = getattr(records, wide)[mine, column]
    if run is not None:
        columns["id"] = arrow.array([request_id(run, number) for number in records.request.tolist()], arrow.string())
    parquet.write_table(arrow.table(columns), path, compression="zstd")
