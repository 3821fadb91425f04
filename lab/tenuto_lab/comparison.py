"""Compares runs: differences with their intervals, and "no difference" when the interval contains zero.

A side of a comparison is one run, or a folder of repeats. Over repeats the interval is Student's: paired when both
sides saw the same schedules one by one, Welch's otherwise. Two single runs are compared over 20 parts of their measured
time, paired because both saw the same requests. That interval does not know the spread between runs, and the comparison
says so. So short a part has no 99th percentile, so that figure is judged over repeats only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.errors import refused
from tenuto.loadgen.records import Records
from tenuto.loadgen.run import Run, load_document, load_run
from tenuto.outcome import Outcome

_TOKENS = ("mean_ttft_ms", "mean_tpot_ms", "tokens_per_s")  # of models that generate
CONFIDENCE = 0.95  # unit: of intervals, two-sided
_PARTS = 20  # unit: parts of a run, whose means are compared (batch means)
_LEAST_PARTS = 5  # limit: below it no interval is given


@dataclass(frozen=True)
class Side:
    """One run or several repeats; `folders` and `documents` go together."""

    name: str
    folders: tuple[Path, ...]
    documents: tuple[Mapping[str, Any], ...]

    @property
    def hashes(self) -> tuple[str, ...]:
        """Schedule hashes of the runs."""
        return tuple(str(document.get("schedule_hash")) for document in self.documents)

    @property
    def invalid(self) -> tuple[str, ...]:
        """Folders whose run is INVALID."""
        pairs = zip(self.folders, self.documents, strict=True)
        return tuple(str(folder) for folder, document in pairs if document["verdict"]["result"] == "INVALID")


@dataclass(frozen=True)
class Difference:
    """One figure of the second side against the first. `half_width`: of the 95 % interval; None if unknown."""

    metric: str
    model: str | None
    first: float | None
    second: float | None
    half_width: float | None

    @property
    def difference(self) -> float | None:
        """Second minus first."""
        return None if self.first is None or self.second is None else self.second - self.first

    @property
    def conclusion(self) -> str:
        """`higher`, `lower`, `no difference`, or `unknown` if the spread is not known."""
        gap = self.difference
        if gap is None:
            return "unknown"
        if gap == 0.0:
            return "no difference"
        if self.half_width is None:
            return "unknown"
        if abs(gap) <= self.half_width:
            return "no difference"
        return "higher" if gap > 0 else "lower"


@dataclass(frozen=True)
class Comparison:
    """Two sides, their differences, how the spread was found, and notes for the reader."""

    first: Side
    second: Side
    method: str
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...]


def load_side(path: str | Path) -> Side:
    """Read a run's folder, or a folder whose subfolders are runs.

    Raises:
        InvalidInputError: there is no run.
    """
    folder = Path(path)
    folders = (
        (folder,)
        if (folder / "result.json").exists()
        else tuple(
            sorted(child for child in (folder.iterdir() if folder.is_dir() else ()) if (child / "result.json").exists())
        )
    )
    if not folders:
        raise refused(
            str(folder),
            str(path),
            "holds no run",
            "Give a folder that `tenuto bench -o` wrote, or one with such folders.",
        )
    return Side(str(path), folders, tuple(load_document(child) for child in folders))


def compare(first: Side, second: Side, *, different_schedules: bool = False) -> Comparison:
    """Compare two sides figure by figure.

    Raises:
        InvalidInputError: they saw different schedules and `different_schedules` is not set, or share no model.
    """
    same = sorted(first.hashes) == sorted(second.hashes)
    if not same and not different_schedules:
        raise refused(
            f"{first.name} and {second.name}",
            f"{_short(first.hashes)} against {_short(second.hashes)}",
            "saw different schedules, so a difference may be the schedule's",
            "Repeat one with the other's seed, rates and duration, or pass --different-schedules.",
        )
    models = [name for name in _rows(first.documents[0]) if name in _rows(second.documents[0])]
    if not models:
        raise refused(f"{first.name} and {second.name}", "", "have no model in common", "Compare runs of one workload.")
    single = len(first.folders) == 1 and len(second.folders) == 1
    parts = _parts_of(first, second) if single and same else None
    paired = same and len(set(first.hashes)) == len(first.hashes)
    found = []
    for model, metric in _metrics(models):
        if metric == "mean_batch" and model not in first.documents[0]["models"]:
            continue  # an application has no batches of its own
        if metric in _TOKENS and any(metric not in _rows(side.documents[0])[str(model)] for side in (first, second)):
            continue
        values = [_values(side, model, metric, order=paired) for side in (first, second)]
        means = [float(np.nanmean(v)) if not np.isnan(v).all() else None for v in values]
        if single:
            half = None if parts is None else _half_width_in_parts(parts, model, metric)
        else:
            half = _half_width(*values, paired=paired)
        found.append(Difference(metric, model, means[0], means[1], half))
    return Comparison(first, second, _method(single, same, paired), tuple(found), _warnings(first, second, same=same))


def _method(single: bool, same: bool, paired: bool) -> str:
    if single:
        return (
            f"within one run each, over {_PARTS} parts of it"
            if same
            else "one run each with different schedules: spread unknown"
        )
    return "over repeats, paired by schedule" if paired else "over repeats, Welch's interval"


def _warnings(first: Side, second: Side, *, same: bool) -> tuple[str, ...]:
    found = [
        f"{folder} is INVALID: its figures do not show what they claim"
        for side in (first, second)
        for folder in side.invalid
    ]
    if not same:
        found.append("the schedules differ; part of any difference is theirs")
    if first.documents[0].get("slos_ms") != second.documents[0].get("slos_ms"):
        found.append("the SLOs differ; goodput and attainment are counted against different limits")
    if first.documents[0].get("emulated") != second.documents[0].get("emulated"):
        found.append("one side ran on emulated GPUs, the other did not")
    if first.documents[0].get("kind", "bench") != second.documents[0].get("kind", "bench"):
        found.append("one side was simulated, the other measured")
    return tuple(found)


def _short(hashes: Sequence[str]) -> str:
    return ", ".join(h[:12] for h in hashes)


def _rows(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of every application and model by name."""
    return {**(document.get("applications") or {}), **document["models"]}


def _metrics(models: Sequence[str]) -> list[tuple[str | None, str]]:
    whole: list[tuple[str | None, str]] = [(None, "goodput_rps"), (None, "attainment")]
    return whole + [
        (name, metric)
        for name in models
        for metric in ("attainment", "p50_ms", "p90_ms", "p99_ms", "mean_batch", *_TOKENS)
    ]


def _values(side: Side, model: str | None, metric: str, *, order: bool) -> NDArray[np.float64]:
    """Return a metric of every run, in order of schedule hash if asked; NaN for runs without it."""
    documents = list(side.documents)
    if order:
        documents.sort(key=lambda document: str(document.get("schedule_hash")))
    sources = [document if model is None else _rows(document).get(model, {}) for document in documents]
    return np.array([math.nan if source.get(metric) is None else source[metric] for source in sources], dtype=float)


def _half_width(first: NDArray[np.float64], second: NDArray[np.float64], *, paired: bool) -> float | None:
    """Return half the interval of the difference of means: paired t, or Welch's with Satterthwaite's degrees of
    freedom.
    """
    if paired:
        return _paired_half_width(second - first, least=2)
    first, second = first[~np.isnan(first)], second[~np.isnan(second)]
    if len(first) < 2 or len(second) < 2:
        return None
    a, b = first.var(ddof=1) / len(first), second.var(ddof=1) / len(second)
    if a + b == 0:
        return 0.0
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return _student(math.sqrt(a + b), float(freedom))


def _paired_half_width(gaps: NDArray[np.float64], *, least: int) -> float | None:
    """Return half the interval of the mean of paired differences; None if there are too few of them."""
    gaps = gaps[~np.isnan(gaps)]
    return _student(float(gaps.std(ddof=1)) / math.sqrt(len(gaps)), len(gaps) - 1) if len(gaps) >= least else None


def _student(error: float, freedom: float) -> float:
    from scipy.special import stdtrit  # quantiles of Student's t; all of scipy.stats takes half a second to import

    return float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * error


# --- one run against one run --------------------------------------------------------------------------------------


def _parts_of(first: Side, second: Side) -> tuple[Run, Run, NDArray[np.float64]] | None:
    """Return both runs and the edges of the parts of the time that both measured; None if this time is too short."""
    runs = (load_run(first.folders[0]), load_run(second.folders[0]))
    begin, end = max(r.begin_ms for r in runs), min(r.end_ms for r in runs)
    return None if end <= begin else (*runs, np.linspace(begin, end, _PARTS + 1))


def _half_width_in_parts(parts: tuple[Run, Run, NDArray[np.float64]], model: str | None, metric: str) -> float | None:
    if metric == "p99_ms":
        return None
    first, second, edges = parts
    columns = [_by_part(run, edges, model, metric) for run in (first, second)]
    return _paired_half_width(columns[1] - columns[0], least=_LEAST_PARTS)


def _by_part(run: Run, edges: NDArray[np.float64], model: str | None, metric: str) -> NDArray[np.float64]:
    records = run.records if model is None else run.records.where(run.records.model == run.names.index(model))
    part = np.searchsorted(edges, records.scheduled_ms, side="right") - 1
    part[records.scheduled_ms == edges[-1]] = len(edges)
    length_s = float(edges[1] - edges[0]) / 1000.0
    return np.array([_figure(records.where(part == index), metric, length_s) for index in range(len(edges) - 1)])


def _figure(records: Records, metric: str, length_s: float) -> float:
    if metric == "goodput_rps":
        return float((records.outcome == Outcome.OK).sum()) / length_s
    if not len(records):
        return math.nan
    if metric == "attainment":
        return float((records.outcome == Outcome.OK).mean())
    if metric == "mean_batch":
        sizes = records.batch_size[records.batch_size > 0]
        return float(sizes.size / (1.0 / sizes).sum()) if sizes.size else math.nan
    if metric in _TOKENS:
        answered = records.where(records.status == 200)
        if metric == "tokens_per_s":
            return float(answered.output_tokens.sum()) / length_s
        values = answered.ttft_ms if metric == "mean_ttft_ms" else answered.tpot_ms
        values = values[~np.isnan(values)]
        return float(values.mean()) if values.size else math.nan
    latency = records.latency_ms[records.status == 200]
    latency = latency[~np.isnan(latency)]
    return float(np.percentile(latency, 50 if metric == "p50_ms" else 90)) if latency.size else math.nan
