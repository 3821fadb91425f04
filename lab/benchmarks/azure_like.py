"""A day of invocations per function and minute, in the format of the Azure Functions trace of 2019, made up.

The published files are too large to be shipped. The day imitates their known traits: few functions make most of the
load; most follow the time of day; some come as regularly as timers, some in bursts of minutes to hours. Figures made
with it say "Azure-like". The same benchmarks run on the published files (`--trace`).
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["MINUTES", "write_day"]

MINUTES = 1440
FUNCTIONS = 1000
POPULARITY = 0.9  # Zipf exponent, as in Symphony's evaluation
KINDS = ("daily", "flat", "timer", "bursty")
PARTS = (0.5, 0.2, 0.15, 0.15)  # of the functions


def write_day(path: Path, seed: int, invocations: int = 20_000_000, swing: float | None = None) -> None:
    """Write one day's file; the same seed gives the same bytes.

    With `swing` every function follows the time of day with this amplitude (0.6: from 0.4 to 1.6 of its mean), as where
    all clients live in one part of the world; the published load swings less, as half of it does not follow the day.
    """
    rng = np.random.default_rng(seed)
    weights = np.arange(1, FUNCTIONS + 1) ** -POPULARITY
    rng.shuffle(weights)
    noon = rng.uniform(0, MINUTES)  # the hour of most load, about the same for most functions
    counts = [
        rng.poisson(invocations * weight / weights.sum() / MINUTES * _shape(rng, noon, swing))
        for weight in weights.tolist()
    ]
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["HashOwner", "HashApp", "HashFunction", "Trigger", *range(1, MINUTES + 1)])
        for number, row in enumerate(counts):
            writer.writerow([f"o{number // 7}", f"a{number // 3}", f"f{number}", "any", *row.tolist()])


def _shape(rng: np.random.Generator, noon: float, swing: float | None) -> NDArray[np.float64]:
    """Return the load of a function by minute, with a mean of 1."""
    minute = np.arange(MINUTES)
    kind = rng.choice(KINDS, p=PARTS) if swing is None else "daily"
    if kind == "timer":
        period = int(rng.choice([1, 1, 1, 5, 10, 15]))
        shape = (minute % period == rng.integers(period)).astype(np.float64)
    elif kind == "bursty":
        shape = np.zeros(MINUTES)
        at = float(rng.exponential(120.0))
        while at < MINUTES:
            length = float(rng.lognormal(3.0, 0.8))  # 20 minutes, some much longer
            shape[int(at) : int(at + length) + 1] = rng.lognormal(0.0, 0.4)
            at += length + float(rng.exponential(120.0))
        shape += 0.05
    else:
        amplitude = swing or (rng.uniform(0.3, 0.8) if kind == "daily" else 0.05)
        shape = 1.0 + amplitude * np.cos(2 * np.pi * (minute - noon - rng.normal(0.0, 90.0)) / MINUTES)
    noise = np.zeros(MINUTES)
    for step in range(1, MINUTES):
        noise[step] = 0.95 * noise[step - 1] + rng.normal(0.0, 0.03)
    shape = shape * np.exp(noise)
    mean: float = shape.mean()
    result: NDArray[np.float64] = shape / mean
    return result
