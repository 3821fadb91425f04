"""GK-Estimator: time, compute and memory requirement of a network on a GPU type, without running the network.

After USHER (OSDI 2024, section 4.1): operators are traced, their work and sizes become features, concurrent kernels are
found by their start times, and stacked regression learns from all profiles of the type. USHER's authors learn from
profiled kernels; this estimator learns from measurements of whole models, because profiles have these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.errors import refused
from tenuto_lab.estimator.device_times import DeviceTimes, fit_device_times
from tenuto_lab.estimator.features import concurrent_sets, features, peak_threads
from tenuto_lab.estimator.roofline import KernelTimes, fit_kernel_times, fit_roofline
from tenuto_lab.estimator.stacking import StackedRegression
from tenuto_lab.estimator.trace import Trace

CREQ_METRIC = "achieved_occupancy_pct"  # the compute requirement, as the thesis measures it for USHER
MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """One measured point with its trace. None: not measured."""

    model: str
    trace: Trace
    latency_ms: float
    memory_mib: float | None = None
    creq_pct: float | None = None


@dataclass(frozen=True)
class Estimate:
    """What one batch needs; None if no profile of the type has the quantity. `roofline_ms` is the baseline."""

    batch_size: int
    latency_ms: float
    roofline_ms: float
    memory_mib: float | None
    creq_pct: float | None


@dataclass(frozen=True)
class _Target:
    """A quantity: its physical baseline, and the scale on which residuals are learnt."""

    baseline: Callable[[Trace], float]
    forward: Callable[[float], float]
    inverse: Callable[[float], float]
    regression: StackedRegression


def _logit(percent: float) -> float:
    clipped = min(max(percent, 0.5), 99.5)
    return math.log(clipped / (100 - clipped))


def _expit(value: float) -> float:
    return 100 / (1 + math.exp(-value))


class GkEstimator:
    """Trained on construction; immutable afterwards."""

    def __init__(self, samples: Sequence[Sample], *, launches_overlap: bool = True) -> None:
        """Learn from measured points of one GPU type.

        Args:
            samples: of at least two models.
            launches_overlap: the host runs ahead of the device, as with CUDA; False on a CPU.

        Raises:
            InvalidInputError: fewer than two models, which is too few to learn from.
        """
        self.models = tuple(sorted({sample.model for sample in samples}))
        if len(self.models) < 2:
            raise refused(
                "profiles",
                list(self.models),
                "an estimate needs profiles of at least two other models",
                "Measure more models with `tenuto profile`.",
            )
        measured = [s.trace for s in samples], [s.latency_ms for s in samples], [s.model for s in samples]
        self.roofline = fit_roofline(*measured)
        # A CPU runs one operator after the other and copies nothing; on a GPU the host launches ahead.
        self.kernels: DeviceTimes | KernelTimes = (
            fit_device_times(*measured) if launches_overlap else fit_kernel_times(self.roofline, *measured)
        )
        rows = np.array([features(sample.trace, self.kernels) for sample in samples])
        self._time = self._learn(samples, rows, lambda s: s.latency_ms, self.kernels.time_ms, math.log, math.exp)
        self._memory = self._creq = None
        with_memory = [sample for sample in samples if sample.memory_mib]
        if len({sample.model for sample in with_memory}) >= 2:
            baseline = _memory_baseline(with_memory)
            self._memory = self._learn(samples, rows, lambda s: s.memory_mib or None, baseline, math.log, math.exp)
        with_creq = [sample for sample in samples if sample.creq_pct is not None]
        if len({sample.model for sample in with_creq}) >= 2:
            self._creq = self._learn(
                samples, rows, lambda s: s.creq_pct, self._creq_baseline(with_creq), _logit, _expit
            )

    def estimate(self, trace: Trace) -> Estimate:
        """Return the requirements of a network at the trace's batch size."""
        row = features(trace, self.kernels)[None, :]

        def value(target: _Target | None) -> float | None:
            if target is None:
                return None
            base = target.forward(target.baseline(trace))
            return target.inverse(base + float(target.regression.predict(row)[0]))

        return Estimate(
            trace.batch_size,
            value(self._time) or 0.0,
            self.roofline.time_ms(trace),
            value(self._memory),
            value(self._creq),
        )

    def baseline(self, trace: Trace) -> Estimate:
        """Return the estimates of the physical baselines alone."""
        time_ms = self.roofline.time_ms(trace)
        return Estimate(
            trace.batch_size,
            time_ms,
            time_ms,
            self._memory.baseline(trace) if self._memory else None,
            self._creq.baseline(trace) if self._creq else None,
        )

    @staticmethod
    def _learn(
        samples: Sequence[Sample],
        rows: NDArray[np.float64],
        measured: Callable[[Sample], float | None],
        baseline: Callable[[Trace], float],
        forward: Callable[[float], float],
        inverse: Callable[[float], float],
    ) -> _Target:
        known = [(index, value) for index, s in enumerate(samples) if (value := measured(s)) is not None]
        residuals = np.array([forward(value) - forward(baseline(samples[index].trace)) for index, value in known])
        groups = [samples[index].model for index, _ in known]
        regression = StackedRegression().fit(rows[[index for index, _ in known]], residuals, groups)
        return _Target(baseline, forward, inverse, regression)

    def _creq_baseline(self, samples: Sequence[Sample]) -> Callable[[Trace], float]:
        """Creq saturates with the results computed in parallel: 100 T / (T + T0), T0 the median over the points."""

        def threads(trace: Trace) -> float:
            return max(1.0, peak_threads(concurrent_sets(trace, self.kernels)))

        halves = [
            threads(s.trace) * (100 - min(max(s.creq_pct or 0.0, 0.5), 99.5)) / min(max(s.creq_pct or 0.0, 0.5), 99.5)
            for s in samples
        ]
        half = float(np.median(halves))
        return lambda trace: 100 * threads(trace) / (threads(trace) + half)


def _memory_baseline(samples: Sequence[Sample]) -> Callable[[Trace], float]:
    """Weights plus a constant plus a multiple of the peak of activations, fitted to relative errors."""
    from scipy.optimize import nnls

    memory = np.array([sample.memory_mib or 0.0 for sample in samples])
    terms = np.array([[s.trace.weight_bytes / MIB, s.trace.peak_bytes / MIB, 1.0] for s in samples])
    (weights, peak, constant), _ = nnls(terms / memory[:, None], np.ones(len(memory)))

    def baseline(trace: Trace) -> float:
        made = weights * trace.weight_bytes / MIB + peak * trace.peak_bytes / MIB + constant
        return float(max(made, 1e-3))

    return baseline


@dataclass(frozen=True)
class ErrorReport:
    """Leave-one-model-out errors in percent: the mean over points, of the estimator and of the baseline alone.

    For time and memory relative to the measured value; for Creq in percentage points.
    """

    models: int
    points: int
    time_pct: float
    time_baseline_pct: float
    memory_pct: float | None
    memory_baseline_pct: float | None
    creq_points: float | None
    creq_baseline_points: float | None
    per_model_time_pct: Mapping[str, float]
    time_median_pct: float = 0.0

    @property
    def worst(self) -> tuple[str, float]:
        """Return the model whose time was estimated worst, and by how many percent."""
        return max(self.per_model_time_pct.items(), key=lambda item: item[1])


def leave_one_model_out(samples: Sequence[Sample], *, launches_overlap: bool = True) -> ErrorReport | None:
    """Estimate every model by an estimator that has not seen it; None with fewer than three models."""
    names = sorted({sample.model for sample in samples})
    if len(names) < 3:
        return None
    errors: dict[str, list[float]] = {key: [] for key in ("time", "time0", "memory", "memory0", "creq", "creq0")}
    per_model: dict[str, float] = {}
    for name in names:
        others = [sample for sample in samples if sample.model != name]
        estimator = GkEstimator(others, launches_overlap=launches_overlap)
        mine = []
        for sample in (sample for sample in samples if sample.model == name):
            made, base = estimator.estimate(sample.trace), estimator.baseline(sample.trace)
            mine.append(_relative(made.latency_ms, sample.latency_ms))
            errors["time0"].append(_relative(base.latency_ms, sample.latency_ms))
            if sample.memory_mib and made.memory_mib is not None and base.memory_mib is not None:
                errors["memory"].append(_relative(made.memory_mib, sample.memory_mib))
                errors["memory0"].append(_relative(base.memory_mib, sample.memory_mib))
            if sample.creq_pct is not None and made.creq_pct is not None and base.creq_pct is not None:
                errors["creq"].append(abs(made.creq_pct - sample.creq_pct))
                errors["creq0"].append(abs(base.creq_pct - sample.creq_pct))
        errors["time"] += mine
        per_model[name] = float(np.mean(mine))
    means: dict[str, Any] = {key: float(np.mean(values)) if values else None for key, values in errors.items()}
    return ErrorReport(
        len(names),
        len(samples),
        means["time"],
        means["time0"],
        means["memory"],
        means["memory0"],
        means["creq"],
        means["creq0"],
        per_model,
        float(np.median(errors["time"])),
    )


def _relative(made: float, measured: float) -> float:
    return abs(made - measured) / measured * 100.0
