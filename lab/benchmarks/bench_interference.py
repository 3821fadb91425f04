"""How far each interference model is off on the 600 measured V100 pairs: fitted on a part, judged on the rest.

The error is |predicted - measured| / measured of a batch's latency beside one neighbour, given its latency alone. A
model is judged on three kinds of rest: a random 30 % of the pair measurements (five draws), all measurements of one of
the six pairs of networks (six rounds), all measurements with one of the four networks (four rounds). iGniter's analytic
model has no constants from pairs, so every pair is new to it; its latencies of a batch alone are judged as well.

Published: gpulet 90 % of its pairs within 10.26 %, 95 % within 13.98 % (RTX 2080 Ti, 2,500 slowdowns, 30 % left out).
iGniter 3.82 % in the mean for ResNet-50 on a V100, and gpulet's model there 4.15 %.

Run: python lab/benchmarks/bench_interference.py [--quick]
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from placement_scenes import machine

from tenuto.errors import InvalidInputError
from tenuto.placement.interference import InterferenceModel, NoInterference, Resident
from tenuto.placement.interference.contention import Contention
from tenuto.placement.interference.gpulet_linear import CONSTANTS
from tenuto.placement.interference.igniter_model import (
    Hardware,
    IgniterInterference,
    Load,
    ModelConstants,
    inference_time_ms,
)
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.interference.contention_fit import fit_contention, load_pairs
from tenuto_lab.interference.gpulet_fit import fit_gpulet_linear
from tenuto_lab.interference.measurements import Sample

PROFILE = load_shipped("igniter-v100")
PAIRS_FILE = Path(__file__).parents[2] / "tests" / "data" / "v100_interference_pairs.json"

Samples = list[Sample]
Fit = Callable[[Samples], InterferenceModel]


class Constant:
    """The mean slowdown of what it was fitted on, for everything."""

    def __init__(self, samples: Samples) -> None:
        self.factor = sum(sample.slowdown for sample in samples) / len(samples)

    def slowdown(self, gpulet: Resident, neighbours: Sequence[Resident]) -> float:
        return self.factor if neighbours else 1.0


class Boosted:
    """scikit-learn's gradient boosting on all that the profile says: what is in the data for a model without form."""

    def __init__(self, samples: Samples) -> None:
        from sklearn.ensemble import GradientBoostingRegressor

        self.trees = GradientBoostingRegressor(n_estimators=300, max_depth=4, learning_rate=0.05, random_state=0)
        self.trees.fit([self.features(s.gpulet, s.neighbours[0]) for s in samples], [s.slowdown for s in samples])
        self.known: dict[object, float] = {}

    def features(self, own: Resident, other: Resident) -> list[float]:
        row: list[float] = []
        for one in (own, other):
            point = one.profile.point(one.batch_size, one.share_pct)
            row += [math.log(point.latency_ms), one.batch_size, one.share_pct, math.log(one.profile.gpu_ms)]
            row += [point.metrics["l2_util_pct"], point.metrics["dram_util_pct"]]
        return row

    def slowdown(self, gpulet: Resident, neighbours: Sequence[Resident]) -> float:
        return float(self.trees.predict([self.features(gpulet, neighbours[0])])[0])


def fits() -> dict[str, Fit]:
    """Return the models by what they are called in the table."""
    published = replace(CONSTANTS["2080ti"], whole_gpu=False)  # the grid has utilisations on the share itself
    return {
        "none": lambda _: NoInterference(),
        "constant": Constant,
        "gpulet, 2080 Ti constants": lambda _: published,
        "gpulet": fit_gpulet_linear,
        "igniter (analytic)": lambda _: IgniterInterference(PROFILE.coefficients),
        "contention, trend alone": lambda s: Contention(fit_contention(s).model_copy(update={"pairs": ()})),
        "contention": lambda s: Contention(fit_contention(s)),
    }


def random_parts(samples: Samples, draws: int) -> Iterator[tuple[Samples, Samples]]:
    """Leave out a random 30 % of the pair measurements, both slowdowns of each."""
    rows = len(samples) // 2
    for seed in range(draws):
        order = list(range(rows))
        random.Random(seed).shuffle(order)
        kept = set(order[: int(0.7 * rows)])
        yield (
            [s for i, s in enumerate(samples) if i // 2 in kept],
            [s for i, s in enumerate(samples) if i // 2 not in kept],
        )


def pairs_left_out(samples: Samples) -> Iterator[tuple[Samples, Samples]]:
    """Leave out all measurements of a pair of networks, one pair after another."""
    for pair in sorted({tuple(sorted(s.models)) for s in samples}):
        out = [tuple(sorted(s.models)) == pair for s in samples]
        yield (
            [s for s, o in zip(samples, out, strict=True) if not o],
            [s for s, o in zip(samples, out, strict=True) if o],
        )


def networks_left_out(samples: Samples) -> Iterator[tuple[Samples, Samples]]:
    """Leave out all measurements with a network, one network after another."""
    for name in sorted({s.models[0] for s in samples}):
        yield [s for s in samples if name not in s.models], [s for s in samples if name in s.models]


def errors(fit: Fit, parts: Iterator[tuple[Samples, Samples]]) -> Any:
    """Return the relative errors in percent over all rests."""
    found = []
    for train, rest in parts:
        model = fit(train)
        found += [abs(model.slowdown(s.gpulet, s.neighbours) / s.slowdown - 1) * 100 for s in rest]
    return np.array(found)


def line(name: str, error: Any) -> str:
    """Return mean, median, p90 and p95."""
    p50, p90, p95 = np.percentile(error, [50, 90, 95])
    return f"  {name:<28} {error.mean():6.2f} {p50:6.2f} {p90:6.2f} {p95:6.2f}"


def igniter_latencies(samples: Samples) -> None:
    """Print how far iGniter's latencies, not only its slowdowns, are off, per network."""
    hardware = Hardware.of(PROFILE.coefficients)
    print("\niGniter's analytic latency against the measured one, mean error in %: alone, beside a neighbour, beside")
    print("a neighbour given the latency alone; published: ResNet-50 3.82 (1.10 to 9.29), AlexNet 3.91 to 5.90,")
    print("VGG-19 0.04 to 2.32, SSD 0.89 to 7.61 in other co-locations")
    for name, model in PROFILE.models.items():
        constants = ModelConstants.of(model.coefficients)
        alone, beside, given = [], [], []
        for sample in samples:
            if sample.models[0] != name:
                continue
            loads = [
                Load.of(ModelConstants.of(r.profile.coefficients), r.batch_size, r.share_pct)
                for r in (sample.gpulet, *sample.neighbours)
            ]
            measured = sample.gpulet.profile.latency_ms(sample.gpulet.batch_size, sample.gpulet.share_pct)
            own = inference_time_ms(constants, loads[0], loads[:1], hardware)
            shared = inference_time_ms(constants, loads[0], loads, hardware)
            alone.append(abs(own / measured - 1) * 100)
            beside.append(abs(shared / (measured * sample.slowdown) - 1) * 100)
            given.append(abs(shared / own / sample.slowdown - 1) * 100)
        print(f"  {name:<10} {np.mean(alone):6.2f} {np.mean(beside):6.2f} {np.mean(given):6.2f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one random draw, no gradient boosting")
    parser.add_argument(
        "--pairs", type=Path, default=PAIRS_FILE, help="file of measured pairs; see docs/reference/interference.md"
    )
    arguments = parser.parse_args()
    try:
        samples = load_pairs(arguments.pairs, PROFILE.models)
    except InvalidInputError as error:
        parser.error(str(error))
    factors = np.array([s.slowdown for s in samples])
    print(f"{machine('tenuto', 'numpy')}, {time.strftime('%Y-%m-%d')}")
    print(
        f"{len(samples)} slowdowns of {len(samples) // 2} pairs, {factors.min():.3f} to {factors.max():.3f}, "
        f"mean {factors.mean():.3f}; measured on {PROFILE.measured.hardware if PROFILE.measured else 'a V100'}"
    )
    models = fits()
    if not arguments.quick:
        try:
            import sklearn  # noqa: F401

            models["gradient boosting"] = Boosted
        except ImportError:
            print("scikit-learn is not installed: no gradient boosting", file=sys.stderr)
    kinds: dict[str, Callable[[], Iterator[tuple[Samples, Samples]]]] = {
        "a random 30 % left out": lambda: random_parts(samples, 1 if arguments.quick else 5),
        "a pair of networks left out": lambda: pairs_left_out(samples),
        "a network left out": lambda: networks_left_out(samples),
    }
    for kind, parts in kinds.items():
        print(f"\nerror in %, {kind:<30}   mean    p50    p90    p95")
        for name, fit in models.items():
            print(line(name, errors(fit, parts())))
    print("  published: gpulet p90 10.26, p95 13.98 (2080 Ti); mean for ResNet-50 on a V100: iGniter 3.82, gpulet 4.15")
    igniter_latencies(samples)


if __name__ == "__main__":
    main()
