"""USHER's estimator as published (OSDI 2024, section 3.2): kernels are learnt over all GPU types at once.

An operator is the sequence of kernels that it launched when it was traced. Each kernel has two regressors, one of its
time and one of the memory of its intermediate data. They take batch, size of weights, size of inputs, FLOPs and GPU
type; each is a stack of lasso, kernel ridge, gradient boosting and XGBoost. Kernels whose starts differ by at most
0.001 ms run together. A network needs the memory of its parameters and of the largest such set. Its compute is that of
the largest such set by achieved occupancy, which is learnt in the same way.

Readings of what the paper leaves open: a kernel that was seen too seldom shares a regressor with the others of its
kind; a new operator gets the kernels of the most similar traced operator; of several kernels of an operator, the last
one leaves its result; the time of a network is the sum of its kernels. On a CPU an operator is one kernel.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.errors import refused
from tenuto_lab.estimator.features import starting_together
from tenuto_lab.estimator.stacking import checked_once
from tenuto_lab.estimator.trace import Operator, Trace
from tenuto_lab.kernels.operator_times import OperatorFile, TimedOperator, TimedRun, models_learnt_from

_FASTEST_MS = 1e-4  # shorter times are below a clock's resolution
_ENOUGH = 24  # samples for a kernel to have a regressor of its own
_MOST = 600  # samples of one regressor; kernel ridge solves a system of that size
_FOLDS = 3

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class NetworkNeed:
    """What one batch needs: time in ms, memory in bytes, compute in percent of the GPU (None: no occupancy known)."""

    time_ms: float
    memory_bytes: float
    creq_pct: float | None


@dataclass(frozen=True)
class _Sample:
    """One kernel that ran: its features and its measurements."""

    kernel: str
    kind: str
    features: tuple[float, ...]
    time_ms: float
    memory_bytes: float
    occupancy_pct: float | None


@dataclass(frozen=True)
class _Kernel:
    """One kernel of an operator that is to be estimated; only the last leaves the operator's result."""

    operator: Operator
    name: str
    is_last: bool


class UsherEstimator:
    """Trained on construction; immutable afterwards."""

    def __init__(self, files: Sequence[OperatorFile]) -> None:
        """Learn from the timed operators of one or more GPU types.

        Raises:
            InvalidInputError: fewer than two models, which is too few to learn from.
        """
        self.types = tuple(sorted({file.gpu_type for file in files}))
        self.models = models_learnt_from(run for file in files for run in file.runs)
        self._sequences: dict[tuple[str, str], list[tuple[Floats, tuple[str, ...]]]] = defaultdict(list)
        samples: list[_Sample] = []
        for file in files:
            for run in file.runs:
                for timed in run.operators:
                    operator = timed.operator()
                    key, names = (file.gpu_type, operator.name), _names(timed)
                    self._sequences[key].append((np.log1p(_sizes(operator, run.batch_size)), names))
                    samples += self._samples(file.gpu_type, run.batch_size, timed)
        self._time = _ByKernel(samples, lambda s: math.log(max(s.time_ms, _FASTEST_MS)))
        self._memory = _ByKernel(samples, lambda s: math.log1p(s.memory_bytes))
        occupied = [sample for sample in samples if sample.occupancy_pct]
        self._occupancy = _ByKernel(occupied, lambda s: _logit(s.occupancy_pct or 0.0)) if occupied else None

    def need(self, trace: Trace, gpu_type: str) -> NetworkNeed:
        """Return what one batch of a network needs on a GPU type.

        Raises:
            InvalidInputError: no operator was timed on this type.
        """
        kernels = self._kernels(trace, gpu_type)
        known, rows = self._features(trace, gpu_type, kernels)
        times = self._times_ms(known, rows)
        memory = [max(0.0, math.expm1(value)) for value in self._memory.predict(known, rows)]
        sets = starting_together(trace, [len(mine) for mine in kernels], times)
        most = max((math.fsum(memory[index] for index in one) for one in sets), default=0.0)
        creq = None
        if self._occupancy is not None:
            occupancy = 100.0 / (1.0 + np.exp(-self._occupancy.predict(known, rows)))
            creq = min(100.0, max((math.fsum(occupancy[index] for index in one) for one in sets), default=0.0))
        return NetworkNeed(math.fsum(times), trace.weight_bytes + most, creq)

    def time_ms(self, trace: Trace, gpu_type: str) -> float:
        """Return `need(...).time_ms` alone, in a third of the time.

        Raises:
            InvalidInputError: no operator was timed on this type.
        """
        return math.fsum(self._times_ms(*self._features(trace, gpu_type, self._kernels(trace, gpu_type))))

    def _times_ms(self, known: Sequence[tuple[str, str]], rows: Floats) -> list[float]:
        return np.exp(self._time.predict(known, rows)).tolist()  # type: ignore[no-any-return]

    def _features(
        self, trace: Trace, gpu_type: str, kernels: Sequence[Sequence[_Kernel]]
    ) -> tuple[list[tuple[str, str]], Floats]:
        """Return name and kind of each kernel, and the rows that quantities are learnt from."""
        flat = [kernel for mine in kernels for kernel in mine]
        rows = [self._row(kernel.operator, gpu_type, trace.batch_size, kernel.is_last) for kernel in flat]
        return [(kernel.name, kernel.operator.kind) for kernel in flat], np.array(rows)

    def _samples(self, gpu_type: str, batch_size: int, timed: TimedOperator) -> Iterable[_Sample]:
        operator = timed.operator()
        parts = [(k.name, k.time_ms, k.occupancy_pct) for k in timed.kernels]
        for index, (name, time_ms, occupancy) in enumerate(parts or [(timed.name, timed.time_ms, timed.occupancy_pct)]):
            is_last = index >= len(parts) - 1
            yield _Sample(
                name,
                operator.kind,
                tuple(self._row(operator, gpu_type, batch_size, is_last)),
                time_ms,
                operator.written_bytes if is_last else 0.0,
                occupancy,
            )

    def _kernels(self, trace: Trace, gpu_type: str) -> list[list[_Kernel]]:
        """Return the kernels of each operator."""
        if gpu_type not in self.types:
            raise refused("GPU type", gpu_type, "is in none of the operator files", f"Types: {', '.join(self.types)}.")
        return [self._kernels_of(operator, gpu_type, trace.batch_size) for operator in trace.operators]

    def _kernels_of(self, operator: Operator, gpu_type: str, batch_size: int) -> list[_Kernel]:
        """Return the kernels of an operator: those of the most similar one of its name that was traced."""
        seen = self._sequences.get((gpu_type, operator.name))
        if not seen:
            return [_Kernel(operator, operator.name, is_last=True)]
        sizes = np.log1p(_sizes(operator, batch_size))
        _, names = min(seen, key=lambda known: float(np.abs(known[0] - sizes).sum()))
        return [_Kernel(operator, name, is_last=index == len(names) - 1) for index, name in enumerate(names)]

    def _row(self, operator: Operator, gpu_type: str, batch_size: int, is_last: bool) -> list[float]:
        logs = [math.log1p(value) for value in _sizes(operator, batch_size)]
        return [*logs, float(is_last), *(float(gpu_type == known) for known in self.types)]


def _sizes(operator: Operator, batch_size: int) -> tuple[float, ...]:
    """Return the published features in their order: batch, weights, inputs, FLOPs."""
    return (float(batch_size), operator.weight_bytes, operator.read_bytes, operator.flops)


def _names(timed: TimedOperator) -> tuple[str, ...]:
    return tuple(kernel.name for kernel in timed.kernels) or (timed.name,)


class _ByKernel:
    """One quantity: a stack for each kernel; for kernels that were seen too seldom, stacks for each kind and for
    everything. A stack is fitted when it is first needed, because a network has few of all kernels."""

    def __init__(self, samples: Sequence[_Sample], target: Callable[[_Sample], float]) -> None:
        groups: dict[tuple[str, ...], list[_Sample]] = defaultdict(list)
        for sample in samples:
            for key in (("kernel", sample.kernel), ("kind", sample.kind), ("all",)):
                groups[key].append(sample)
        self._groups = {key: mine for key, mine in groups.items() if len(mine) >= _ENOUGH or key == ("all",)}
        self._target = target
        self._stacks: dict[tuple[str, ...], Any] = {}

    def predict(self, kernels: Sequence[tuple[str, str]], rows: Floats) -> Floats:
        """Return the quantity of kernels by name and kind, each with its row of features."""
        found = np.zeros(len(kernels))
        places: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for index, (name, kind) in enumerate(kernels):
            keys = (("kernel", name), ("kind", kind), ("all",))
            places[next(key for key in keys if key in self._groups)].append(index)
        for key, indices in places.items():
            if key not in self._stacks:
                self._stacks[key] = _stack(self._groups[key], self._target)
            found[indices] = self._stacks[key].predict(rows[indices])
        return found


def _stack(samples: Sequence[_Sample], target: Callable[[_Sample], float]) -> Any:
    """Fit lasso, kernel ridge, gradient boosting and XGBoost, and mix their predictions of unseen data."""
    from sklearn.dummy import DummyRegressor
    from sklearn.ensemble import GradientBoostingRegressor, StackingRegressor
    from sklearn.kernel_ridge import KernelRidge
    from sklearn.linear_model import Lasso, LinearRegression
    from sklearn.model_selection import KFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from xgboost import XGBRegressor

    kept = samples[:: max(1, math.ceil(len(samples) / _MOST))]
    rows = np.array([sample.features for sample in kept])
    values = np.array([target(sample) for sample in kept])
    if len(kept) < 2 * _FOLDS or float(np.ptp(values)) == 0.0:
        return DummyRegressor(strategy="median").fit(rows, values)
    learners = [
        ("lasso", make_pipeline(StandardScaler(), Lasso(alpha=0.01, max_iter=20_000))),
        ("kernel ridge", make_pipeline(StandardScaler(), KernelRidge(kernel="rbf", alpha=0.1, gamma=0.1))),
        ("gradient boosting", GradientBoostingRegressor(n_estimators=40, max_depth=3, random_state=0)),
        ("xgboost", XGBRegressor(n_estimators=40, max_depth=4, learning_rate=0.2, n_jobs=1, random_state=0)),
    ]
    folds = KFold(_FOLDS, shuffle=True, random_state=0)
    stack = StackingRegressor(learners, final_estimator=LinearRegression(positive=True), cv=folds)
    with checked_once(rows, values):
        return stack.fit(rows, values)


def _logit(percent: float) -> float:
    clipped = min(max(percent, 0.5), 99.5)
    return math.log(clipped / (100.0 - clipped))


@dataclass(frozen=True)
class UsherErrors:
    """Errors on models left out one by one, in percent of what was measured: mean over runs, and by model."""

    models: int
    runs: int
    time_pct: float
    per_model_time_pct: Mapping[str, float]


def usher_errors(files: Sequence[OperatorFile]) -> UsherErrors | None:
    """Estimate the time of every model by an estimator that has not seen it; None with fewer than three models."""
    names = sorted({run.model for file in files for run in file.runs})
    if len(names) < 3:
        return None
    per_model: dict[str, float] = {}
    every: list[float] = []
    for name in names:
        others = [kept for file in files if (kept := file.without(partial(eq, name))) is not None]
        estimator = UsherEstimator(others)
        mine = [
            abs(estimator.time_ms(_trace(run), file.gpu_type) - run.latency_ms) / run.latency_ms * 100.0
            for file in files
            for run in file.runs
            if run.model == name and file.gpu_type in estimator.types
        ]
        if mine:
            per_model[name] = statistics.fmean(mine)
            every += mine
    return UsherErrors(len(per_model), len(every), statistics.fmean(every), per_model)


def _trace(run: TimedRun) -> Trace:
    return Trace(run.batch_size, tuple(timed.operator() for timed in run.operators), 0.0, 0.0, 0.0)
