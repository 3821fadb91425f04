"""Fits Tenuto's own interference model to measured pairs; the shipped constants were found in this way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tenuto.documents import load_document
from tenuto.errors import refused
from tenuto.placement.interference.contention import (
    TERMS,
    Constants,
    Contention,
    Pair,
    Trend,
    place_of,
    terms_of,
    trend_at,
)
from tenuto.profiles import ModelProfile
from tenuto_lab.interference.measurements import Sample, pair_samples

DAMPING = 0.1  # fitted: ridge of a pair's correction, whose features are of the order of 1


def load_pairs(path: str | Path, models: Mapping[str, ModelProfile]) -> list[Sample]:
    """Read a JSON or YAML file with `columns` (those of `COLUMNS` at least) and `rows`; see `pair_samples`."""
    return pair_samples(load_document(path), models, origin=str(path))


def fit_contention(samples: Sequence[Sample], *, name: str = "fitted", source: str = "measured pairs") -> Constants:
    """Fit the trend by least squares on all samples, then each pair's correction on the errors of the trend.

    Args:
        samples: measured pairs, each with one neighbour and with the names of the two networks in `models`.
        name: for the result.
        source: of the measurements, kept in the result.

    Raises:
        InvalidInputError: samples without names or with several neighbours, or too few different ones for the trend.
    """
    if any(len(sample.neighbours) != 1 or len(sample.models) != 2 for sample in samples):
        rule = "each sample needs one neighbour and the names of both networks"
        raise refused("measurements", "other samples", rule, "Give named pairs only.")
    blank = Contention(
        Constants(
            name=name, source=source, trend=Trend(constant=1.0, latency_ratio=0.0, share_product=0.0, largest_ratio=1.0)
        )
    )
    shapes = [blank.shape(sample.gpulet, sample.neighbours[0]) for sample in samples]
    factors = np.array([sample.slowdown for sample in samples])
    matrix = np.array([(1.0, *shape) for shape in shapes]).reshape(-1, 3)
    if np.linalg.matrix_rank(matrix) < 3:
        rule = "the trend needs pairs that differ in latencies and in shares"
        raise refused("measurements", f"{len(samples)} samples", rule, "Measure more of them.")
    constant, ratio, product = np.linalg.lstsq(matrix, factors, rcond=None)[0].tolist()
    largest = max(abs(shape[0]) for shape in shapes)
    trend = Trend(constant=constant, latency_ratio=ratio, share_product=product, largest_ratio=largest)
    missed = factors - np.array([trend_at(trend, *shape) for shape in shapes])
    pairs = []
    for own, other in sorted({(sample.models[0], sample.models[1]) for sample in samples}):
        chosen = [index for index, sample in enumerate(samples) if sample.models == (own, other)]
        first = samples[chosen[0]]
        places = np.array([place_of(samples[i].gpulet, samples[i].neighbours[0]) for i in chosen])
        terms = terms_of(places)
        damped = terms.T @ terms + DAMPING * np.eye(TERMS)
        lows, highs = places.min(axis=0).tolist(), places.max(axis=0).tolist()
        bounds = list(zip(lows, highs, strict=True))
        pairs.append(
            Pair(
                own=own,
                other=other,
                own_gpu_ms=first.gpulet.profile.gpu_ms,
                other_gpu_ms=first.neighbours[0].profile.gpu_ms,
                bounds=(bounds[0], bounds[1], bounds[2]),
                coefficients=tuple(np.linalg.solve(damped, terms.T @ missed[chosen]).tolist()),
            )
        )
    return Constants(name=name, source=source, trend=trend, pairs=tuple(pairs))
