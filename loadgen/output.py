"""The files of a run: result.json with everything, requests.parquet with every request, timeline.csv second by second."""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.loadgen.bench import BenchOptions, BenchResult
from tenuto.loadgen.records import Outcome, Records
from tenuto.placement import Plan

__all__ = ["hardware", "prepare_folder", "versions", "write_run"]

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
        raise InvalidInputError(f"{folder} already holds a report ({', '.join(existing)}). Give another folder, or --force.")
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
    document = {
        "emulated": _is_emulated(options.url),
        **result.summary,
        "verdict": {"result": result.verdict.result, "reasons": list(result.verdict.reasons), "conditions": result.verdict.conditions},
        "errors": result.errors,
        "schedule_hash": result.schedule.hash,
        "options": asdict(options),
        "command": list(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "plan": plan.to_data(),
    }
    if folder is not None:
        written: list[str] = []
        try:
            (folder / "result.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            written.append("result.json")
            _write_timeline(folder / "timeline.csv", result.records, options.duration_s)
            written.append("timeline.csv")
            result.schedule.save(folder / "schedule.npz")
            written.append("schedule.npz")
            _write_parquet(folder / "requests.parquet", result.records, result.schedule.names)
        except OSError as error:
            raise EnvironmentFaultError(
                f"{folder}: {error.strerror or error} while writing the report; written: {', '.join(written) or 'nothing'}. "
                "Free space or give another folder."
            ) from error
    return document


def _is_emulated(url: str) -> bool | None:
    """Return whether any gpu-let of the endpoint is emulated; None when it no longer answers."""
    from tenuto.deployments.endpoint import get_json

    try:
        status = get_json(f"{url}/status")
    except EnvironmentFaultError:
        return None
    return any(gpulet.get("emulated", False) for gpulet in status.get("gpulets", []))


def _write_timeline(path: Path, records: Records, duration_s: float) -> None:
    """Write one row per second: what was scheduled in it, and what became of that."""
    second = np.clip((records.scheduled_ms // 1000.0).astype(int), 0, max(0, int(np.ceil(duration_s)) - 1))
    length = int(np.ceil(duration_s))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["second", "offered", *(outcome.name.lower() for outcome in Outcome)])
        columns = [np.bincount(second[records.outcome == outcome], minlength=length) for outcome in Outcome]
        offered = np.bincount(second, minlength=length)
        for index in range(length):
            writer.writerow([index, int(offered[index]), *(int(column[index]) for column in columns)])


def _write_parquet(path: Path, records: Records, names: Sequence[str]) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    columns = {name: getattr(records, name) for name in Records.columns()}
    columns["model"] = np.asarray(names, dtype=object)[records.model] if len(records) else np.empty(0, dtype=object)
    outcomes = np.asarray([outcome.name.lower() for outcome in Outcome], dtype=object)
    columns["outcome"] = outcomes[records.outcome] if len(records) else np.empty(0, dtype=object)
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
    return {"processor": processor, "cores": cores, "system": f"{platform.system()} {platform.release()}", "python": platform.python_version()}


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter for the figures; absent ones are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
