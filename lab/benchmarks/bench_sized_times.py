"""Predicted against measured times of batches of a text encoder whose requests vary in length, on the CPU.

The encoder and the lengths are those of `bench_sized_http`. Single lengths are measured on a grid; between them the
cost is that of the profile's size classes, as the scheduler counts it at first (*class*); the same times the mean of
measured over counted, which a dispatcher learns (*learned*); or interpolated at the longest request of the batch, to
which the runner pads (*longest*). Random batches of 1 to 8 requests run in turn with those of the
grid, round after round, so that other work on the machine disturbs both alike. A time is the median over the rounds:
of the clock, and of the CPU time of this process.

    python lab/benchmarks/bench_sized_times.py [--quick] [--rounds 9] [--batches 60] [--seed 1] [--grid 16 64 256]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch
from bench_sized_http import BATCHES, MEDIAN, MOST, SIGMA, encoder
from serving import heading

from tenuto.profiles import LatencyTable, ModelProfile
from tenuto.profiles.networks.inputs import Blocks, random_inputs
from tenuto.profiles.networks.model_options import RunOptions
from tenuto.profiles.networks.programs import lone_program
from tenuto.profiles.networks.runner import ProgramRunner

CLOCKS = {"clock": time.perf_counter, "CPU time": time.process_time}


def blocks(runner: ProgramRunner, lengths: Sequence[int]) -> Blocks:
    """Return a batch with requests of these lengths, each in memory of its own."""
    (signature,) = runner.signatures.values()
    rows = [random_inputs(signature.at((length,)), 1, seed=length) for length in lengths]
    return {tensor.name: [row[tensor.name] for row in rows] for tensor in signature.inputs}


def measure(batches: Sequence[Sequence[int]], rounds: int, rng: np.random.Generator) -> dict[str, list[float]]:
    """Return the median time in ms of each batch by clock."""
    runner = lone_program("encoder", encoder(), RunOptions(), BATCHES)
    inputs = [blocks(runner, lengths) for lengths in batches]
    times: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in CLOCKS}
    for turn in range(rounds + 1):
        for place in rng.permutation(len(batches)):
            before = {name: read() for name, read in CLOCKS.items()}
            runner.run_timed({"encoder": inputs[place]}, {"encoder": len(batches[place])})
            for name, read in CLOCKS.items():
                if turn:  # the first round warms up
                    times[name][place].append(1000.0 * (read() - before[name]))
    return {name: [float(np.median(each)) for each in by_batch] for name, by_batch in times.items()}


def main() -> None:
    """Print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds, ten batches")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--grid", type=int, nargs="+", default=[16, 64, MOST], help="measured lengths")
    chosen = parser.parse_args()
    rounds, count = (2, 10) if chosen.quick else (chosen.rounds, chosen.batches)
    torch.set_num_threads(1)
    rng = np.random.default_rng(chosen.seed)
    lengths = [
        np.clip(np.rint(MEDIAN * np.exp(SIGMA * rng.standard_normal(rng.integers(1, max(BATCHES) + 1)))), 1, MOST)
        for _ in range(count)
    ]
    drawn = [[int(length) for length in each] for each in lengths]
    grid = [(size, tokens) for tokens in sorted(chosen.grid) for size in BATCHES]
    times = measure([*([tokens] * size for size, tokens in grid), *drawn], rounds, rng)
    heading(
        f"{count} batches of a text encoder, {rounds} rounds, measured at {', '.join(map(str, chosen.grid))} tokens"
    )
    for clock, by_batch in times.items():
        points = [
            {"batch_size": size, "sizes": {"tokens": tokens}, "latency_ms": ms}
            for (size, tokens), ms in zip(grid, by_batch, strict=False)
        ]
        profile = ModelProfile.model_validate({"points": points})
        tables = {
            tokens: LatencyTable(points={p.batch_size: p.latency_ms for p in profile.by_class[(tokens,)].points})
            for (tokens,) in profile.measured_sizes
            if (tokens,) in profile.by_class
        }
        by_class = [profile.padded_to({"tokens": max(each)}).latency_ms(len(each)) for each in drawn]
        by_longest = [
            float(np.interp(max(each), list(tables), [table.at(len(each)) for table in tables.values()]))
            for each in drawn
        ]
        off = profile.fit_sizes()
        print(
            f"{clock}: l(1) " + ", ".join(f"{table.at(1):.1f}" for table in tables.values()) + f" ms; left out: {off}"
        )
        measured = np.array(by_batch[len(grid) :])
        learned = np.array(by_class) * float(np.mean(measured / np.array(by_class)))
        for name, predicted in (("class", by_class), ("learned", learned), ("longest", by_longest)):
            error = 100.0 * (np.array(predicted) / measured - 1.0)
            print(
                f"  {name:8s} mean error {np.abs(error).mean():5.1f} %, p95 {np.quantile(np.abs(error), 0.95):5.1f} %, "
                f"too long by {error.mean():5.1f} % in the mean"
            )


if __name__ == "__main__":
    main()
