"""Histograms with fixed buckets, counts and a sum, as Prometheus has them. Every request and batch adds to some."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tenuto.deployments.wire.status import Buckets

# unit: bounds of a histogram, in parts of the SLO. They are fine around the SLO, where attainment is decided, and
# coarse elsewhere.
_PARTS_OF_SLO = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 5.0)

# unit: bounds of a histogram in seconds, those of vLLM's times to a token
TOKEN_TIMES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
BATCH_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # unit: bounds of a histogram


def buckets_around(slo_ms: float) -> tuple[float, ...]:
    """Return upper bounds in seconds, from a hundredth of an SLO to five times it, with the SLO itself among them."""
    return tuple(float(f"{slo_ms * part / 1000.0:.4g}") for part in _PARTS_OF_SLO)


class Histogram:
    """Counts of values up to each bound and above the last. To add a value costs about half a microsecond."""

    __slots__ = ("_counts", "_sum", "bounds")

    def __init__(self, bounds: Sequence[float] = ()) -> None:
        """Take the upper bounds, in ascending order; a value equal to one is counted below it."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, in the unit of the bounds, `times` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._sum += value * times

    def add_all(self, values: Sequence[float]) -> None:
        """Count values, each once."""
        bounds, counts = self.bounds, self._counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sum += sum(values)

    def buckets(self) -> Buckets:
        """Return the counts so far."""
        return Buckets(list(self.bounds), list(self._counts), self._sum)
