"""Measured pairs of models on one GPU, as samples to fit and to judge interference models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tenuto.errors import refused
from tenuto.placement.interference import Resident
from tenuto.profiles import ModelProfile

COLUMNS = ("model_1", "model_2", "batch_1", "batch_2", "share_1_pct", "latency_1_ms", "latency_2_ms")


@dataclass(frozen=True)
class Sample:
    """A measurement: by how much neighbours that run all the time slowed a gpu-let down.

    `models` names the measured models, the gpu-let's own first.
    """

    gpulet: Resident
    neighbours: tuple[Resident, ...]
    slowdown: float
    models: tuple[str, ...] = ()


def pair_samples(
    document: Mapping[str, Any], models: Mapping[str, ModelProfile], origin: str = "pairs"
) -> list[Sample]:
    """Return two samples per measured pair: each model slowed down by the other.

    A row is two models running at once without pause, the first on `share_1_pct`, the second on the rest of the GPU,
    with their mean batch latencies in ms. The slowdown is that latency over the one alone at the same batch size and
    share in `models`; it may come out below 1 by noise and is kept as measured.

    Raises:
        InvalidInputError: columns are missing, a row is malformed, or a latency alone is not in the profile.
    """
    columns, rows = document.get("columns"), document.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list) or not set(COLUMNS) <= set(columns):
        raise refused(origin, columns, "needs `rows` and `columns`", f"Name {', '.join(COLUMNS)}.")
    where = [columns.index(column) for column in COLUMNS]
    samples = []
    for number, row in enumerate(rows):
        path = f"{origin}: rows[{number}]"
        try:
            one, two, batch_one, batch_two, share, latency_one, latency_two = (row[index] for index in where)
            first = Resident(_known(models, one, path), int(batch_one), float(share))
            second = Resident(_known(models, two, path), int(batch_two), 100.0 - float(share))
            for own, other, ms, names in (
                (first, second, latency_one, (one, two)),
                (second, first, latency_two, (two, one)),
            ):
                alone_ms = own.profile.point(own.batch_size, own.share_pct).latency_ms
                samples.append(Sample(own, (other,), _positive(ms) / alone_ms, names))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            cure = f"Give {', '.join(COLUMNS)}, latencies and shares as positive numbers."
            raise refused(path, row, "is not a measured pair", cure) from error
    return samples


def _known(models: Mapping[str, ModelProfile], name: str, path: str) -> ModelProfile:
    if name not in models:
        known = ", ".join(sorted(models))
        raise refused(path, name, "has no profile, so its latency alone is unknown", f"Known: {known}.")
    return models[name]


def _positive(latency_ms: Any) -> float:
    value = float(latency_ms)
    if not 0 < value < float("inf"):
        raise ValueError(latency_ms)
    return value
