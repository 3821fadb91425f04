"""Latency as a function of batch size, l(b): the quantity that planning, batching and emulation share.

Two forms: the line l(b) = alpha*b + beta of the Symphony and Nexus papers, and a table of measured points.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Annotated

from pydantic import Discriminator, Field, Tag, field_validator

from tenuto.documents import Fault, StrictModel
from tenuto.errors import MissingProfileError

PositiveMs = Annotated[float, Field(gt=0)]


class LinearLatency(StrictModel):
    """l(b) = alpha_ms * b + beta_ms, in milliseconds; defined for every batch size of at least 1."""

    alpha_ms: PositiveMs
    beta_ms: Annotated[float, Field(ge=0)]

    @property
    def largest(self) -> int | None:
        """The largest measured batch size; None, as a line is known for every size."""
        return None

    def at(self, batch_size: int) -> float:
        """Return l(batch_size) in ms."""
        return self.alpha_ms * batch_size + self.beta_ms

    def scaled(self, factor: float) -> LinearLatency:
        """Return the line with both coefficients multiplied by `factor` (a slower or faster GPU)."""
        return LinearLatency(alpha_ms=self.alpha_ms * factor, beta_ms=self.beta_ms * factor)

    def largest_batch(self, budget_ms: float) -> int:
        """Return the largest batch size with l(b) <= budget_ms, or 0 when not even one request fits."""
        batch = max(0, math.floor((budget_ms - self.beta_ms) / self.alpha_ms + 1e-9))
        while batch > 0 and self.at(batch) > budget_ms:
            batch -= 1
        return batch


class LatencyTable(StrictModel):
    """Measured latencies by batch size. Between two points it is the line through them; above the largest it is
    unknown.

    Below the smallest measured batch, the smallest point's latency is used: an upper bound, as latency grows with b.
    """

    points: Annotated[dict[int, PositiveMs], Field(min_length=1)]

    @field_validator("points", mode="after")
    @classmethod
    def _sorted(cls, points: dict[int, float]) -> dict[int, float]:
        if min(points) < 1:
            raise Fault("batch sizes must be at least 1", "remove the smaller ones")
        return dict(sorted(points.items()))

    @property
    def largest(self) -> int:
        """The largest measured batch size."""
        return max(self.points)

    def at(self, batch_size: int) -> float:
        """Return l(batch_size) in ms.

        Raises:
            MissingProfileError: for a batch size above the largest measured one.
        """
        exact = self.points.get(batch_size)
        if exact is not None:
            return exact
        lower = None
        for size, latency in self.points.items():
            if size > batch_size:
                if lower is None:
                    return latency
                low_size, low_latency = lower
                return low_latency + (latency - low_latency) * (batch_size - low_size) / (size - low_size)
            lower = (size, latency)
        raise MissingProfileError(
            f"batch size {batch_size} is above the largest measured one ({self.largest}). Profile larger batches."
        )

    def scaled(self, factor: float) -> LatencyTable:
        """Return the table with every latency multiplied by `factor`."""
        return LatencyTable(points={size: latency * factor for size, latency in self.points.items()})

    def largest_batch(self, budget_ms: float) -> int:
        """Return the largest batch size up to the largest measured one with l(b) <= budget_ms, or 0."""
        return next((size for size in range(self.largest, 0, -1) if self.at(size) <= budget_ms), 0)


Latency = LinearLatency | LatencyTable


def _form(value: object) -> str:
    keys = value if isinstance(value, dict) else {}
    return "(table)" if isinstance(value, LatencyTable) or "points" in keys else "(line)"


# In a file the keys tell which form is meant, so that a wrong value is reported only once, for that form.
LatencyField = Annotated[
    Annotated[LinearLatency, Tag("(line)")] | Annotated[LatencyTable, Tag("(table)")], Discriminator(_form)
]


def between_shares(known: Iterable[float], share_pct: float, outside: str) -> tuple[float, float, float]:
    """Return the known shares next to another one, and where it lies between them: linear in 1/share, the form of
    compute-bound work (iGniter eq. 11 with k4 = 0).

    Args:
        known: other shares.
        share_pct: the share.
        outside: ends the error of a share beyond all of them.
    """
    shares = sorted(known)
    place = bisect_left(shares, share_pct)
    if not 0 < place < len(shares):
        raise MissingProfileError(f"share {share_pct:g} % is outside {outside}")
    low, high = shares[place - 1], shares[place]
    return low, high, (1 / low - 1 / share_pct) / (1 / low - 1 / high)
