"""The files of a run: result.json with everything, requests.parquet with every request, timeline.csv second by
second.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.loadgen.application_figures import Calls, calls_by_name
from tenuto.loadgen.bench import BenchOptions, BenchResult
from tenuto.loadgen.records import Records, request_id
from tenuto.loadgen.schedule import Schedule
from tenuto.outcome import Outcome
from tenuto.placement import Plan

__all__ = ["describe", "hardware", "prepare_folder", "provenance", "versions", "write_files", "write_run"]

_OURS = ("result.json", "requests.parquet", "timeline.csv", "schedule.npz", "report.html")
_PACKAGES = ("tenuto", "ray", "torch", "torchvision", "transformers", "numpy")


def prepare_folder(folder: Path, *, force: bool) -> Path:
    """Create the report folder.

    Raises:
        InvalidInputError: it already holds a report and `force` is not set, or it is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"{folder} is a file. Give a folder for the report.")
    existing = [name for name in _OURS if (folder / name).exists()]
    if existing and not force:
        raise InvalidInputError(
            f"{folder} already holds a report ({', '.join(existing)}). Give another folder, or --force."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"{folder} cannot be created: {error.strerror}. Give another folder.") from error
    return folder


def write_run(
    folder: Path | None, result: BenchResult, options: BenchOptions, plan: Plan, *, command: Sequence[str]
) -> dict[str, Any]:
    """Return the result document; with a folder, write it and its companions there.

    Raises:
        EnvironmentFaultError: a file cannot be written; the message says which were.
    """
    document = describe(result, options, plan, command=command)
    if folder is not None:
        write_files(folder, document, result.records, result.schedule, result.queued)
    return document


def describe(result: BenchResult, options: BenchOptions, plan: Plan, *, command: Sequence[str]) -> dict[str, Any]:
    """Return the result document of a live run: figures, verdict, and all that is needed to run it again."""
    verdict = result.verdict
    return {
        "kind": "bench",
        "emulated": _is_emulated(options.url),
        **result.summary,
        "gpu_utilisation": _gpu_utilisation(plan, result.summary["gpulets"]),
        "wall_s": result.wall_s,
        "verdict": {"result": verdict.result, "reasons": list(verdict.reasons), "conditions": verdict.conditions},
        "errors": result.errors,
        "slos_ms": {
            spec.name: spec.slo_ms * options.slo_scale for spec in plan.models if spec.name in result.summary["models"]
        },
        "schedule_hash": result.schedule.hash,
        "schedule_notes": [*result.schedule.notes, *result.notes],
        "options": asdict(options),
        **provenance(command),
        "plan": plan.to_data(),
    }


def _gpu_utilisation(plan: Plan, gpulets: Mapping[str, Any]) -> float:
    """Return the mean over the plan's occupied GPUs of the time each executed; gpu-lets beside each other add up to
    at most 1.
    """
    busy = [
        min(1.0, sum(float(gpulets[g.id]["utilisation"]) for g in plan.on_gpu(gpu.id) if g.id in gpulets))
        for gpu in plan.gpus
        if plan.on_gpu(gpu.id)
    ]
    return sum(busy) / len(busy) if busy else 0.0


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Return when, on what and with what a run was made."""
    return {
        "command": list(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
    }


def write_files(
    folder: Path,
    document: Mapping[str, Any],
    records: Records,
    schedule: Schedule | None,
    queued: Mapping[int, int] | None = None,
) -> None:
    """Write result.json, timeline.csv, schedule.npz and requests.parquet, the small and most telling ones first.

    Raises:
        EnvironmentFaultError: a file cannot be written; the message says which were.
    """
    names = list(document["models"])
    duration_s = float(document["options"]["duration_s"])
    run = schedule.hash[:8] if schedule is not None and document.get("kind") == "bench" else None
    steps: list[tuple[str, Callable[[Path], None]]] = [
        ("result.json", lambda path: _write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")),
        (
            "timeline.csv",
            lambda path: _write_timeline(path, records, duration_s, queued or {}, calls_by_name(document, records)),
        ),
        ("requests.parquet", lambda path: _write_parquet(path, records, names, run, document)),
    ]
    if schedule is not None:
        steps.insert(2, ("schedule.npz", schedule.save))
    written: list[str] = []
    for name, write in steps:
        # Under another name first: what carries a report's name is whole.
        partial = folder / f".{name.split('.')[0]}.part.{name.split('.')[1]}"
        try:
            write(partial)
            partial.replace(folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise EnvironmentFaultError(
                f"{folder / name}: {error.strerror or error}. Written before: {', '.join(written) or 'nothing'}. "
                "Free space or give another folder."
            ) from error
        written.append(name)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _is_emulated(url: str) -> bool | None:
    """Return whether any gpu-let of the endpoint is emulated; None when it no longer answers."""
    from tenuto.deployments.serve.endpoint import get_json

    try:
        status = get_json(f"{url}/status")
    except EnvironmentFaultError:
        return None
    return any(gpulet.get("emulated", False) for gpulet in status.get("gpulets", []))


def _write_timeline(
    path: Path, records: Records, duration_s: float, queued: Mapping[int, int], calls: Mapping[str, Calls]
) -> None:
    """Write one row per second: what was scheduled in it, what became of that, and, where the server said so, how many
    requests waited for a batch at its end. Applications have columns of their own: offered and ok, end to end."""
    length = int(np.ceil(duration_s))

    def by_second(at_ms: Any) -> Any:
        second = np.clip((at_ms // 1000.0).astype(int), 0, max(0, length - 1))
        return np.bincount(second, minlength=length)

    columns = {"offered": by_second(records.scheduled_ms)}
    for outcome in Outcome:
        columns[outcome.name.lower()] = by_second(records.scheduled_ms[records.outcome == outcome])
    for name, mine in calls.items():
        columns[f"{name} offered"] = by_second(mine.at_ms)
        columns[f"{name} ok"] = by_second(mine.at_ms[mine.outcome == Outcome.OK])
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["second", *columns, *(["queued"] if queued else [])])
        for index in range(length):
            last_value = [queued.get(index, "")] if queued else []
            writer.writerow([index, *(int(column[index]) for column in columns.values()), *last_value])


def _write_parquet(
    path: Path, records: Records, names: Sequence[str], run: str | None, document: Mapping[str, Any]
) -> None:
    """Write one row per request; of a live run with the `id` the server knew it by, and with the `application` and the
    number of its request, where it belongs to one."""
    import pyarrow as arrow
    from pyarrow import parquet

    columns = {name: getattr(records, name) for name in Records.columns() if name not in ("call", "call_at_ms")}
    outcomes = [outcome.name.lower() for outcome in Outcome]
    columns["model"] = arrow.DictionaryArray.from_arrays(arrow.array(records.model), arrow.array(names, arrow.string()))
    columns["outcome"] = arrow.DictionaryArray.from_arrays(arrow.array(records.outcome), arrow.array(outcomes))
    columns["gpulet"] = arrow.array(records.gpulet, arrow.string()).dictionary_encode()
    if document.get("applications"):
        alone = records.call < 0
        owners = np.array([document["models"][name].get("stage_of") for name in names], dtype=object)
        columns["application"] = arrow.array(owners[records.model], arrow.string()).dictionary_encode()
        columns["application_request"] = arrow.array(records.call, mask=alone)
        columns["application_scheduled_ms"] = arrow.array(records.call_at_ms, mask=alone)
    if run is not None:
        columns["id"] = arrow.array([request_id(run, number) for number in records.request.tolist()], arrow.string())
    parquet.write_table(arrow.table(columns), path, compression="zstd")


def hardware() -> dict[str, Any]:
    """Return what the figures were measured on: processor, cores, memory."""
    processor = platform.processor() or platform.machine()
    cores = None
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
        cores = len(os.sched_getaffinity(0))
    except OSError:
        pass
    return {
        "processor": processor,
        "cores": cores,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter for the figures; absent ones are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
