"""Learns the times of single kernels from timed operators, and estimates networks that were not seen from them.

After USHER (OSDI 2024, section 4.1): features of a kernel are the batch's work and sizes; stacked regression learns the
errors of the roofline of its kind. An estimator is for one GPU type. A network's time is the sum of its kernels' times,
times one fitted factor for the rest. If the occupancy of kernels was recorded (on a GPU), a network's compute
requirement is the largest sum over kernels that start together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenuto_lab.estimator.features import concurrent_sets
from tenuto_lab.estimator.roofline import KINDS, fit_kernel_times, fit_roofline
from tenuto_lab.estimator.stacking import StackedRegression
from tenuto_lab.estimator.trace import Operator, Trace
from tenuto_lab.kernels.operator_times import TimedRun, models_learnt_from

_FASTEST_MS = 1e-4  # shorter times are below a clock's resolution
_PER_MODEL = 400  # kernels of one model that are learnt from; more are thinned evenly


class KernelEstimator:
    """Trained on construction; immutable afterwards. It gives the times of operators."""

    def __init__(self, runs: Sequence[TimedRun]) -> None:
        """Learn from timed operators of one GPU type.

        Raises:
            InvalidInputError: fewer than two models, which is too few to learn from.
        """
        self.models = models_learnt_from(runs)
        samples = [sample for name in self.models for sample in _thinned([r for r in runs if r.model == name])]
        traces = [_alone(operator) for _, operator, _ in samples]
        times = [max(ms, _FASTEST_MS) for _, _, ms in samples]
        groups = [name for name, _, _ in samples]
        self.roofline = fit_roofline(traces, times, groups)
        self.baseline = fit_kernel_times(self.roofline, traces, times, groups)
        rows = np.array([self._features(operator) for _, operator, _ in samples])
        residuals = np.log(times) - np.log([self.baseline.operator_ms(operator) for _, operator, _ in samples])
        self._regression = StackedRegression().fit(rows, residuals, groups)
        self._beyond = 1.0
        factors = [run.latency_ms / self._sum_ms([o.operator() for o in run.operators]) for run in runs]
        self._beyond = statistics.median(factors)
        self._occupancy = _learn_occupancy(runs, self._features)

    def creq_pct(self, trace: Trace) -> float | None:
        """Return the compute requirement in percent of the GPU; None if no occupancy of two models was recorded.

        It is the largest sum of occupancies over kernels that start within tau of each other (USHER, section 4.1).
        """
        if self._occupancy is None:
            return None
        occupancy = self._occupancy
        sets = concurrent_sets(trace, self._once(trace.operators))
        return min(100.0, max((math.fsum(occupancy.pct(o) for o in one) for one in sets), default=0.0))

    def _once(self, operators: Sequence[Operator]) -> _Known:
        return _Known(dict(zip(map(id, operators), self.operators_ms(operators), strict=True)))

    def _features(self, operator: Operator) -> NDArray[np.float64]:
        sizes = (operator.flops, operator.read_bytes, operator.written_bytes, operator.weight_bytes)
        logs = [math.log(size + 1.0) for size in sizes]
        kinds = [float(operator.kind == kind) for kind in KINDS]
        intensity = math.log((operator.flops + 1.0) / (operator.moved_bytes + 1.0))
        return np.array([*logs, intensity, math.log(self.baseline.operator_ms(operator)), *kinds])

    def operator_ms(self, operator: Operator) -> float:
        """Return the time of one operator in ms."""
        return self.operators_ms([operator])[0]

    def operators_ms(self, operators: Sequence[Operator]) -> list[float]:
        """Return the times of several operators in ms."""
        rows = np.array([self._features(operator) for operator in operators])
        bases = np.array([self.baseline.operator_ms(operator) for operator in operators])
        made: list[float] = (bases * np.exp(self._regression.predict(rows))).tolist()
        return made

    def _sum_ms(self, operators: Sequence[Operator]) -> float:
        return math.fsum(self.operators_ms(operators))

    def time_ms(self, trace: Trace) -> float:
        """Return the time of one batch of a network in ms."""
        return self._beyond * self._sum_ms(trace.operators)


@dataclass(frozen=True)
class _Known:
    """Times of operators learnt at once, which is much quicker than one by one."""

    by_identity: Mapping[int, float]

    def operator_ms(self, operator: Operator) -> float:
        return self.by_identity[id(operator)]


@dataclass(frozen=True)
class _Occupancy:
    """Occupancy of a kernel: 100 E / (E + E0) for E results written in parallel, and a correction by regression."""

    half: float
    features: Callable[[Operator], NDArray[np.float64]]
    regression: StackedRegression

    def base(self, operator: Operator) -> float:
        elements = max(1.0, operator.written_bytes / 4.0)
        return _logit(100.0 * elements / (elements + self.half))

    def pct(self, operator: Operator) -> float:
        added = float(self.regression.predict(self.features(operator)[None, :])[0])
        return 100.0 / (1.0 + math.exp(-(self.base(operator) + added)))


def _learn_occupancy(
    runs: Sequence[TimedRun], features: Callable[[Operator], NDArray[np.float64]]
) -> _Occupancy | None:
    known = [
        (run.model, timed.operator(), timed.occupancy_pct)
        for run in runs
        for timed in run.operators
        if timed.occupancy_pct
    ]
    if len({name for name, _, _ in known}) < 2:
        return None
    known = known[:: max(1, math.ceil(len(known) / (_PER_MODEL * len({name for name, _, _ in known}))))]
    halves = [max(1.0, o.written_bytes / 4.0) * (100.0 - min(pct, 99.5)) / pct for _, o, pct in known]
    start = _Occupancy(statistics.median(halves), features, StackedRegression())
    rows = np.array([features(operator) for _, operator, _ in known])
    residuals = np.array([_logit(pct) - start.base(operator) for _, operator, pct in known])
    start.regression.fit(rows, residuals, [name for name, _, _ in known])
    return start


def _logit(percent: float) -> float:
    clipped = min(max(percent, 0.5), 99.5)
    return math.log(clipped / (100.0 - clipped))


def _alone(operator: Operator) -> Trace:
    return Trace(1, (operator,), operator.weight_bytes, operator.read_bytes, operator.written_bytes)


def _thinned(runs: Sequence[TimedRun]) -> list[tuple[str, Operator, float]]:
    every = [(run.model, timed.operator(), timed.time_ms) for run in runs for timed in run.operators]
    step = max(1, math.ceil(len(every) / _PER_MODEL))
    return every[::step]


@dataclass(frozen=True)
class KernelErrorReport:
    """Leave-one-model-out errors in percent: of networks' times (mean over runs), of kernels' (median), and plain."""

    models: int
    runs: int
    kernels: int
    time_pct: float
    roofline_pct: float
    kernel_median_pct: float
    per_model_time_pct: Mapping[str, float]


def leave_one_model_out_kernels(runs: Sequence[TimedRun]) -> KernelErrorReport | None:
    """Estimate every model by an estimator that has not seen it; None with fewer than three models."""
    names = sorted({run.model for run in runs})
    if len(names) < 3:
        return None
    per_model: dict[str, float] = {}
    every: list[float] = []
    plain: list[float] = []
    single: list[float] = []
    for name in names:
        estimator = KernelEstimator([run for run in runs if run.model != name])
        mine = []
        for run in (run for run in runs if run.model == name):
            operators = tuple(timed.operator() for timed in run.operators)
            trace = Trace(run.batch_size, operators, 0.0, 0.0, 0.0)
            mine.append(_error_pct(estimator.time_ms(trace), run.latency_ms))
            plain.append(_error_pct(estimator.roofline.time_ms(trace), run.latency_ms))
            single += [
                _error_pct(made, timed.time_ms)
                for made, timed in zip(estimator.operators_ms(operators), run.operators, strict=True)
                if timed.time_ms > _FASTEST_MS
            ]
        per_model[name] = statistics.fmean(mine)
        every += mine
    kernels = sum(len(run.operators) for run in runs)
    return KernelErrorReport(
        len(names),
        len(runs),
        kernels,
        statistics.fmean(every),
        statistics.fmean(plain),
        statistics.median(single),
        per_model,
    )


def _error_pct(made: float, measured: float) -> float:
    return abs(made - measured) / measured * 100.0
