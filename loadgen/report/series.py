"""The data of the charts, computed from the records: rates over time, distributions, predictions. All data is binned,
so that a page for a million requests is no larger than one for a thousand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenuto.errors import MissingProfileError
from tenuto.loadgen.records import Records
from tenuto.loadgen.run import Run
from tenuto.outcome import Outcome
from tenuto.placement import Gpulet, Plan

Floats = NDArray[np.float64]
Curve = tuple[str, Floats, Floats]  # a name with latencies and shares
_BINS = 120  # unit: time bins of a run
_CDF_POINTS = 300  # format: points of a distribution


@dataclass(frozen=True)
class Timeline:
    """Rates by bin of the whole run, warm-up included; `at_s` is the middle of each bin."""

    at_s: Floats
    offered_rps: Floats
    ok_rps: Floats


def bin_edges_ms(run: Run) -> Floats:
    """Return the edges of the time bins of a run: whole seconds if the run is short enough."""
    end_ms = max(run.end_ms, 1.0)
    width_ms = max(1000.0, 1000.0 * math.ceil(end_ms / 1000.0 / _BINS)) if end_ms > 10_000 else end_ms / 20.0
    return np.append(np.arange(0.0, end_ms - 1e-6, width_ms), end_ms)


def timeline(run: Run, at_ms: Floats, outcome: NDArray[np.int8]) -> Timeline:
    """Return offered and ok requests per second, of requests with these scheduled times and outcomes."""
    edges = bin_edges_ms(run)
    length_s = np.diff(edges) / 1000.0
    offered, ok = np.histogram(at_ms, edges)[0], np.histogram(at_ms[outcome == Outcome.OK], edges)[0]
    return Timeline((edges[:-1] + edges[1:]) / 2000.0, offered / length_s, ok / length_s)


def waiting_and_under_way(run: Run) -> tuple[Floats, Floats, Floats]:
    """Return times (s), requests not yet executing, and requests not yet answered, at 240 instants.

    Execution is taken to end when the answer arrives, so it includes the way back; a generation executes from its first
    token on. A request that was never answered waits until its deadline."""
    records = run.records
    instants = np.linspace(0.0, max(run.end_ms, 1.0), 2 * _BINS)
    slo = np.array([run.slos_ms[name] for name in run.names])
    deadline = records.scheduled_ms + slo[records.model] if len(records) else np.empty(0)
    end = np.where(np.isnan(records.answered_ms), deadline, records.answered_ms)
    begin = end - np.nan_to_num(records.execution_ms)
    begin = np.where(np.isnan(records.first_token_ms), begin, records.first_token_ms)
    arrived = np.searchsorted(np.sort(records.scheduled_ms), instants, side="right")
    ended = np.searchsorted(np.sort(end), instants, side="right")
    begun = np.searchsorted(np.sort(begin), instants, side="right")
    return instants / 1000.0, np.maximum(0, arrived - begun).astype(float), np.maximum(0, arrived - ended).astype(float)


def cdf(latency_ms: Floats, offered: int) -> tuple[Floats, Floats]:
    """Return latencies and the share of *offered* requests answered within them, thinned to 300 points."""
    known = np.sort(latency_ms[~np.isnan(latency_ms)])
    if not known.size or not offered:
        return np.empty(0), np.empty(0)
    index = np.unique(np.linspace(0, known.size - 1, min(known.size, _CDF_POINTS)).round().astype(int))
    return known[index], (index + 1) / offered


def binned(run: Run, at_ms: Floats, values: Floats, weights: Floats | None = None) -> tuple[Floats, Floats]:
    """Return the middle of each time bin (s) and the weighted mean of the values in it; NaN if there are none."""
    edges = bin_edges_ms(run)
    known = ~np.isnan(values) & ~np.isnan(at_ms)
    weight = np.ones(int(known.sum())) if weights is None else weights[known]
    total = np.histogram(at_ms[known], edges, weights=values[known] * weight)[0]
    count = np.histogram(at_ms[known], edges, weights=weight)[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        return (edges[:-1] + edges[1:]) / 2000.0, np.where(count > 0, total / count, np.nan)


def batch_counts(records: Records) -> tuple[NDArray[np.int64], Floats]:
    """Return batch sizes and how many batches had each size. (A batch of b has b records.)"""
    sizes, requests = np.unique(records.batch_size[records.batch_size > 0], return_counts=True)
    return sizes.astype(np.int64), requests / sizes


@dataclass(frozen=True)
class Prediction:
    """Measured executions of one replica, beside the plan's predictions for the same batches.

    `at_ms`, `measured_ms`, `predicted_ms` and `weight` have one entry per request; the weight counts each batch once.
    """

    gpulet: str
    model: str
    batch_size: int
    at_ms: Floats
    measured_ms: Floats
    predicted_ms: Floats
    weight: Floats

    @property
    def batches(self) -> int:
        """How many batches ran."""
        return round(float(self.weight.sum()))

    @property
    def usual_measured_ms(self) -> float | None:
        """Median of the measured times; None without a batch."""
        return _median(self.measured_ms)

    @property
    def usual_predicted_ms(self) -> float | None:
        """Median of the predicted times; None without a prediction or a batch."""
        return _median(self.predicted_ms)

    @property
    def error(self) -> float | None:
        """Median of measured / predicted - 1; None without a prediction or a batch."""
        ratio = _median(self.measured_ms / self.predicted_ms)
        return None if ratio is None else ratio - 1.0


def _median(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else None


def predictions(run: Run) -> list[Prediction]:
    """Return one entry per replica of the plan, in the plan's order, also for replicas that ran nothing."""
    if run.plan is None:
        return []
    records = run.measured
    records = records.where((records.batch_size > 0) & ~np.isnan(records.execution_ms))
    gpulets = records.gpulet.astype(str)
    index_of = {name: index for index, name in enumerate(run.names)}
    by_replica = []
    for gpulet in run.plan.gpulets:
        mine = records.where(gpulets == gpulet.id)
        for name, size in ((replica.name, replica.batch_size) for replica in gpulet.models):
            rows = mine.where(mine.model == index_of.get(name, -1))
            at_ms = np.where(np.isnan(rows.answered_ms), rows.scheduled_ms, rows.answered_ms)
            predicted_ms = _predicted_ms(run.plan, gpulet, name, rows.batch_size)
            weight = 1.0 / rows.batch_size
            by_replica.append(Prediction(gpulet.id, name, size, at_ms, rows.execution_ms, predicted_ms, weight))
    return by_replica


def _predicted_ms(plan: Plan, gpulet: Gpulet, model: str, batch_sizes: NDArray[np.int32]) -> Floats:
    replica = next(r for r in gpulet.models if r.name == model)
    program = next(program for program in gpulet.programs if model in program.models)
    latency = program.latency or (None if program.is_joint else plan.model(model).latency)
    slowdown = program.slowdown
    sizes, index = np.unique(batch_sizes, return_inverse=True)
    values = np.full(sizes.size, np.nan)
    for position, size in enumerate(sizes.tolist()):
        if latency is None:
            if size == replica.batch_size and replica.latency_ms is not None:
                values[position] = replica.latency_ms
            continue
        try:
            values[position] = latency.at(int(size)) * slowdown
        except MissingProfileError:
            continue
    return values[index]
