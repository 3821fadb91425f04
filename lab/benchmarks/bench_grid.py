"""Symphony figure 7: deferred against eager over the synthetic grid of table 1, points drawn evenly.

python lab/benchmarks/bench_grid.py [--quick] [--points 300]
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
from scenes import arguments, goodput_rps, print_machine, uniform_system, zoo

MODELS = ("DenseNet121", "InceptionV3", "ResNet50V2", "VGG16", "Xception", "BERT")
N_MODELS = (8, 16, 24, 32, 48, 64)
GPUS_PER_MODEL = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
SLO_MS = (20.0, 25.0, 30.0, 40.0, 50.0)
GAMMA_SHAPE = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--points", type=int, default=None, help="how many points of the grid (default 300; quick 24)")
    parser.add_argument("--against", default="eager", help="the scheduler to compare with")


def main() -> None:
    chosen = arguments(__doc__ or "", more)
    print_machine()
    lines = {name: (alpha, beta) for name, alpha, beta, _, _ in zoo("1080ti")}
    grid = [
        point
        for point in itertools.product(MODELS, N_MODELS, GPUS_PER_MODEL, SLO_MS, GAMMA_SHAPE)
        if sum(lines[point[0]]) <= point[3]  # an SLO that a batch of one cannot meet is no workload
    ]
    wanted = chosen.points or (24 if chosen.quick else 300)
    # Evenly: every k-th point of a fixed shuffle, which spreads over all dimensions alike.
    order = np.random.default_rng(7).permutation(len(grid))[:wanted]
    # Long enough for some 20,000 requests at the goodput of either scheduler.
    ratios: dict[str, list[float]] = {name: [] for name in MODELS}
    print(f"{wanted} of {len(grid)} serveable points (6 models x 6 x 7 x 5 x 6), every model at 99 %")
    for done, index in enumerate(order, 1):
        model, count, per_model, slo, shape = grid[int(index)]
        alpha, beta = lines[model]
        gpus = max(1, round(count * per_model))
        system = uniform_system([(f"m{i}", alpha, beta, slo, None) for i in range(count)], gpus)
        fitting = max(1, int((slo - beta) / alpha / 1.5))
        ceiling = 1000.0 * gpus * fitting / (alpha * fitting + beta)
        duration_s = min(60.0, max(1.5, (15_000 if chosen.quick else 25_000) / ceiling))
        pair: list[float] = []
        for name in ("deferred", chosen.against):
            guess, growth = (pair[0], 1.1) if pair and pair[0] > 0 else (0.5 * ceiling, 1.4)
            found = goodput_rps(
                system, name, guess, duration_s=duration_s, seed=int(index), shape=shape, tolerance=0.01, growth=growth
            )
            pair.append(found)
        if min(pair) > 0:
            ratios[model].append(pair[0] / pair[1])
        if done % 25 == 0:
            print(f"  {done} points", flush=True)
    everything = np.array([ratio for values in ratios.values() for ratio in values])
    print(f"deferred / {chosen.against}")
    headings = "".join(f"{heading:>8s}" for heading in ("points", ">= 0.95", "min", "p10", "median", "p90", "max"))
    print(f"{'model':14s}{headings}")
    for label, values in (*ratios.items(), ("all", everything)):
        row = np.asarray(values)
        if len(row):
            quantiles = "".join(f"{value:8.2f}" for value in np.percentile(row, [0, 10, 50, 90, 100]))
            print(f"{label:14s}{len(row):8d}{100 * (row >= 0.95).mean():7.1f}%{quantiles}")
    print(f"share of points with a gain of 50 % or more: {100 * (everything >= 1.5).mean():.0f} % (paper: 16 %)")


if __name__ == "__main__":
    main()
