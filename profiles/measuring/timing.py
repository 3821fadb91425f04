"""When to stop repeating a measurement, and which figures to report. The clock is an argument; torch is not needed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tenuto.profiles.profile import Fit, ProfilePoint

TOLERANCE_PCT = 1.5  # limit: a median is known when half the width of its 95 % confidence interval is this small
MIN_RUNS, MAX_RUNS = 10, 500  # limit: there are never fewer and never more runs, whatever the interval
AGREEMENT_PCT = 2 * TOLERANCE_PCT  # derived: two correct medians are at most this far apart


@dataclass(frozen=True)
class Timing:
    """Repeated measurements of one thing, in ms.

    `spread_ms` is half the distance of the 10th and 90th percentile; `uncertainty_pct` half the width of the median's
    95 % confidence interval, in percent of the median (from order statistics: no distribution is assumed).
    """

    median_ms: float
    spread_ms: float
    uncertainty_pct: float
    fastest_ms: float
    runs: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        """Summarise at least one sample."""
        ordered = sorted(samples_ms)
        median = statistics.median(ordered)
        low, high = _median_interval(len(ordered))
        least, most = np.quantile(ordered, (0.1, 0.9))
        return cls(
            median_ms=median,
            spread_ms=float(most - least) / 2,
            # Unit: percent, of half the interval.
            uncertainty_pct=50.0 * (ordered[high] - ordered[low]) / median if median > 0 else 0.0,
            fastest_ms=ordered[0],
            runs=len(ordered),
        )


def _median_interval(count: int) -> tuple[int, int]:
    """Return the indices of the order statistics around the median that hold it with 95 % (normal approximation)."""
    half = 1.96 * math.sqrt(count) / 2  # derived: 95 % of a normal distribution
    return max(0, math.floor(count / 2 - half)), min(count - 1, math.ceil(count / 2 + half))


def measure_repeatedly(
    run: Callable[[], object], clock_s: Callable[[], float], *, budget_s: float
) -> tuple[Timing, float]:
    """Measure in two rounds with half the budget each. When their medians differ by more than `AGREEMENT_PCT`, repeat.

    A further round begins only if some of the budget is left. It replaces the earlier of the two rounds, as a cold
    cache or another process may have disturbed that one.

    Args:
        run: one repetition; blocks until the work is done.
        clock_s: monotonic clock.
        budget_s: seconds for all rounds; only a round's first three runs may exceed it.

    Returns:
        The summary of the last two rounds, and by how many percent their medians differ. A repeated profile would
        differ about as much.
    """
    began = clock_s()
    rounds = [sample(run, clock_s, budget_s / 2) for _ in range(2)]
    # Limit: less time is not worth a round.
    while _difference_pct(*rounds) > AGREEMENT_PCT and (left_s := budget_s - (clock_s() - began)) > budget_s / 10:
        rounds = [rounds[1], sample(run, clock_s, left_s)]
    return Timing.of([*rounds[0], *rounds[1]]), _difference_pct(*rounds)


def _difference_pct(one: Sequence[float], other: Sequence[float]) -> float:
    first, second = statistics.median(one), statistics.median(other)
    return 100.0 * abs(first - second) / min(first, second) if min(first, second) > 0 else 0.0


def sample(run: Callable[[], object], clock_s: Callable[[], float], budget_s: float) -> list[float]:
    """Time `run` in ms until its median is known within `TOLERANCE_PCT`, or the budget is spent.

    Three runs are made whatever the budget is: a model that takes seconds is still measured more than once.
    """
    samples: list[float] = []
    began = clock_s()
    while True:
        started = clock_s()
        run()
        ended = clock_s()
        samples.append((ended - started) * 1000.0)
        if len(samples) >= MAX_RUNS or (len(samples) >= 3 and ended - began >= budget_s):
            return samples
        if len(samples) >= MIN_RUNS and len(samples) % 5 == 0:  # pace
            timing = Timing.of(samples)
            if timing.uncertainty_pct <= TOLERANCE_PCT:
                return samples


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float, float | None, float] | None:
    """Fit l(b) = alpha*b + beta by least squares.

    Args:
        points: (batch size, latency in ms).

    Returns:
        alpha in ms, beta in ms, r squared (None where all latencies are equal), largest error in percent of a
        point's latency; or None with fewer than two batch sizes.
    """
    if len({size for size, _ in points}) < 2:
        return None
    sizes, latencies = zip(*points, strict=True)
    alpha, beta = statistics.linear_regression(sizes, latencies)
    errors = [lat - (alpha * b + beta) for b, lat in points]
    total = len(points) * statistics.pvariance(latencies)
    r_squared = 1.0 - sum(e * e for e in errors) / total if total > 0 else None
    return alpha, beta, r_squared, max(abs(e) / lat * 100.0 for e, (_, lat) in zip(errors, points, strict=True))


def fit_points(points: Sequence[ProfilePoint]) -> Fit | None:
    """Return the line through the points of the whole device, rounded for a file; None if there is none, as for a
    network that was measured at several sizes."""
    if len({tuple(point.sizes.values()) for point in points}) > 1:
        return None
    line = fit_line([(point.batch_size, point.latency_ms) for point in points if point.share_pct == 100.0])
    if line is None:
        return None
    alpha, beta, r_squared, error = line
    return Fit(
        alpha_ms=round(alpha, 5),
        beta_ms=round(beta, 5),
        max_error_pct=round(error, 2),
        r_squared=None if r_squared is None else round(r_squared, 5),
    )
