"""GPU utilisations of a batch that runs alone: the input of fitted interference models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tenuto.errors import MissingProfileError
from tenuto.placement.interference.interference_model import Resident

Number = TypeVar("Number", int, float)


def utilisation(resident: Resident, metric: str) -> float:
    """Return a metric of a profile in percent as a fraction, measured alone at a batch size and a share.

    Between measured batch sizes, and between measured shares, values follow the line through the nearest two (gpulet's
    repository does so for batch sizes).

    Raises:
        MissingProfileError: batch size or share outside the measured range, or the metric was not measured.
    """
    by_share = resident.profile.metrics_by_share.get(metric)
    if by_share is None:
        raise MissingProfileError(f"no point has metric '{metric}'. Profile the model with it.")
    below, above, weight = _around(by_share, resident.share_pct, f"metric '{metric}', share")
    low, high = (_on_line(by_share[share], resident.batch_size, metric) for share in (below, above))
    return (low + weight * (high - low)) / 100.0


def _on_line(values: Mapping[int, float], batch_size: int, metric: str) -> float:
    below, above, weight = _around(values, batch_size, f"metric '{metric}', batch size")
    return values[below] + weight * (values[above] - values[below])


def _around(known: Mapping[Number, object], value: Number, what: str) -> tuple[Number, Number, float]:
    """Return the nearest known values around a value, and its position between them, 0 to 1."""
    if value in known:
        return value, value, 0.0
    below, above = [each for each in known if each < value], [each for each in known if each > value]
    if not below or not above:
        least, most = min(known), max(known)
        raise MissingProfileError(f"{what} {value:g} is outside the measured range ({least:g} to {most:g}).")
    low, high = max(below), min(above)
    return low, high, (value - low) / (high - low)
