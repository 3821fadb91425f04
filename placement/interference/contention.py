"""Tenuto's own interference model: a trend in latencies and shares, corrected for measured pairs of networks.

It needs only latencies by batch size and share. docs/reference/interference.md says how it was found, and its error on
pairs and networks that it was not fitted on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from tenuto.documents import SCHEMA, SchemaVersion, StrictModel, dump_yaml, parse_document
from tenuto.files import parse_yaml
from tenuto.placement.interference.interference_model import Resident
from tenuto.profiles import ModelProfile

ALIKE = 0.1
"""Two networks are alike as exp(-d^2/2), d = (difference of ln GPU time per request) / ALIKE: within about 10 %.

Fitted on the 600 V100 pairs: the error on pairs left out is 0.60 %, 0.60 % with ALIKE halved, 0.70 % doubled."""

TERMS = 10  # derived: of a polynomial of degree 2 in three variables

Vector = np.ndarray[Any, np.dtype[np.float64]]
Positive = Annotated[float, Field(gt=0)]


class Trend(StrictModel):
    """factor = constant + latency_ratio * ln(l_own / l_other) + share_product * share_own * share_other.

    l is the batch's latency alone in ms. ln(l_own / l_other) is kept within +-`largest_ratio`; shares are fractions.
    """

    constant: float
    latency_ratio: float
    share_product: float
    largest_ratio: Positive


class Pair(StrictModel):
    """What the trend misses for one network slowed down by another, by batch sizes and share.

    `coefficients` belong to 1, x, y, z, x^2, xy, xz, y^2, yz, z^2 with x = (log2 b_own - 3)/2, y = (log2 b_other - 3)/2
    and z = (share_own - 0.5)/0.3. Each is kept within `bounds`, the smallest and largest x, y and z measured.
    """

    own: str
    other: str
    own_gpu_ms: Positive
    other_gpu_ms: Positive
    bounds: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
    coefficients: Annotated[tuple[float, ...], Field(min_length=TERMS, max_length=TERMS)]


class Constants(StrictModel):
    """Fitted constants, with what they were fitted on."""

    schema_version: SchemaVersion = SCHEMA
    name: str
    source: str
    trend: Trend
    pairs: tuple[Pair, ...] = ()

    def dump(self) -> str:
        """Render as YAML; `load` of the text gives equal constants."""
        return dump_yaml(self.model_dump(mode="json", by_alias=True))


class Contention:
    """Trend plus correction, at least 1; with several neighbours, what each one costs beyond 1 adds up.

    The correction is the mean of the measured pairs' corrections, weighted by how alike the networks are (`ALIKE`). GPU
    time per request (`gpu_ms`) decides that, not names: the same network under another runtime is another network. Far
    from all measured pairs the trend stands alone.

    The sum over neighbours is an assumption: no pair can show it. In iGniter's analytic model, which rests on
    measurements with up to five residents, two neighbours in the room of one cost 1.2 to 2.6 times as much.
    """

    def __init__(self, constants: Constants | None = None) -> None:
        """Take fitted constants; default: those fitted on V100 pairs."""
        self._constants = constants if constants is not None else shipped_constants()
        pairs = self._constants.pairs
        self._measured = np.array([[math.log(p.own_gpu_ms), math.log(p.other_gpu_ms)] for p in pairs]).reshape(-1, 2)
        self._bounds = np.array([p.bounds for p in pairs]).reshape(-1, 3, 2)
        self._coefficients = np.array([p.coefficients for p in pairs]).reshape(-1, TERMS)

    def slowdown(self, gpulet: Resident, neighbours: Sequence[Resident]) -> float:
        """Return the factor; see `InterferenceModel.slowdown`."""
        return 1.0 + sum(self._pair(gpulet, other) - 1.0 for other in neighbours)

    def _pair(self, own: Resident, other: Resident) -> float:
        trend = trend_at(self._constants.trend, *self.shape(own, other))
        weights = self._weights(own.profile, other.profile)
        if weights is None:
            return max(1.0, trend)
        place = np.clip(place_of(own, other), self._bounds[:, :, 0], self._bounds[:, :, 1])
        missed = (terms_of(place) * self._coefficients).sum(axis=1)
        return max(1.0, trend + float(weights @ missed))

    def shape(self, own: Resident, other: Resident) -> tuple[float, float]:
        """Return ln(l_own / l_other) and the product of the shares."""
        own_ms, other_ms = (one.profile.latency_ms(one.batch_size, one.share_pct) for one in (own, other))
        return math.log(own_ms / other_ms), own.share_pct * other.share_pct / 1e4  # unit: percent squared

    def _weights(self, own: ModelProfile, other: ModelProfile) -> Vector | None:
        """Return the weight of each measured pair, 1 at most in total; None when no measured pair is alike."""
        own_point = np.log([own.gpu_ms, other.gpu_ms])
        alike = np.exp(-0.5 * (((self._measured - own_point) / ALIKE) ** 2).sum(axis=1))
        total = float(alike.sum())
        return alike / max(1.0, total) if total > 1e-6 else None


@cache
def shipped_constants() -> Constants:
    """Return the constants fitted on the 600 V100 pairs, from `profiles/data/contention-v100.yaml`."""
    text = resources.files("tenuto.profiles").joinpath("data", "contention-v100.yaml").read_text(encoding="utf-8")
    return parse_document(Constants, parse_yaml(text), origin="contention-v100")


def trend_at(trend: Trend, ratio: float, share_product: float) -> float:
    """Return the factor of a trend, see `Trend`."""
    bounded = min(max(ratio, -trend.largest_ratio), trend.largest_ratio)
    return trend.constant + trend.latency_ratio * bounded + trend.share_product * share_product


def place_of(own: Resident, other: Resident) -> tuple[float, float, float]:
    """Return x, y and z of `Pair`."""
    # Derived: from the 600 pairs: centre and spread of their batches.
    x, y = ((math.log2(resident.batch_size) - 3.0) / 2.0 for resident in (own, other))
    return x, y, (own.share_pct / 100.0 - 0.5) / 0.3  # derived: likewise, of their shares


def terms_of(places: Vector) -> Vector:
    """Return the ten terms of `Pair`, a row each."""
    x, y, z = places.T
    return np.column_stack([np.ones_like(x), x, y, z, x * x, x * y, x * z, y * y, y * z, z * z])
