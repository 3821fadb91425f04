"""Symphony figures 9 and 10: the 1080Ti and A100 zoos on 64 GPUs by both criteria; GPUs needed for 15,000 r/s.

python lab/benchmarks/bench_zoo.py [--quick] [--schedulers deferred,eager,…]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from scenes import RESNET50, Model, arguments, goodput_rps, poisson, print_machine, spread, uniform_system, zoo

from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate

# The original program on a virtual clock: Symphony (all, each), Shepherd (all), Nexus with a static plan (all).
PUBLISHED = {
    ("1080ti", "all"): (7631, 7304, 4667, 3803),
    ("1080ti", "strong"): (20405, 20195, 7700, 8185),
    ("1080ti", "weak"): (3988, 3918, 2992, 3112),
    ("a100", "all"): (18011, 17284, 7827, 5846),
    ("a100", "strong"): (58891, 57965, 12000, 9666),
    ("a100", "weak"): (6500, 6387, 5932, 5771),
}


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedulers", default="deferred,symphony,eager,clockwork,nexus,shepherd")
    parser.add_argument("--zoos", default="all,strong,weak", help="which part of each zoo")
    parser.add_argument("--skip-gpus", action="store_true", help="leave out the GPUs needed for 15,000 r/s")


def main() -> None:
    chosen = arguments(__doc__ or "", more)
    print_machine()
    seeds = range(chosen.seeds or (1 if chosen.quick else 3))
    duration_s = 15.0 if chosen.quick else 60.0
    names = chosen.schedulers.split(",")
    print(f"64 GPUs, equal popularity, Poisson, no network delay, {duration_s:g} s, goodput in r/s: mean (range)")
    print(f"{'zoo':14s} {'scheduler':10s} {'criterion':9s} {'goodput':>24s} {'original':>9s} {'gain':>7s}")
    for (gpu_type, part), (all_rps, each_rps, shepherd_rps, nexus_rps) in PUBLISHED.items():
        if part not in chosen.zoos.split(","):
            continue
        plain = uniform_system(zoo(gpu_type, part), 64)
        for name in names:
            for criterion, original in (("all", all_rps), ("each", each_rps)):
                system = replace(plain, objective="total" if criterion == "all" else "each")
                together = {"shepherd": shepherd_rps, "nexus": nexus_rps} if criterion == "all" else {}
                beside = {"deferred": original, "symphony": original, **together}.get(name)
                guess = original * (0.9 if name in ("deferred", "symphony") else 0.4)
                rates = [
                    goodput_rps(
                        system,
                        name,
                        guess,
                        duration_s=duration_s,
                        seed=seed,
                        criterion="all" if criterion == "all" else "each",
                    )
                    for seed in seeds
                ]
                gain = f"{100 * (statistics.mean(rates) / beside - 1):+.1f} %" if beside else ""
                label = f"{gpu_type} {part}"
                cells = f"{name:10s} {criterion:9s} {spread(rates):>24s} {beside or '-':>9} {gain:>7s}"
                print(f"{label:14s} {cells}", flush=True)
    if not chosen.skip_gpus:
        gpus_for_15k(names, 15.0 if chosen.quick else 30.0)


def gpus_for_15k(names: Sequence[str], duration_s: float) -> None:
    """Print the fewest GPUs with which every model keeps 99 % at 15,000 r/s."""
    print("\nGPUs needed for 15,000 r/s, every model at 99 %")
    print("paper: Nexus and Shepherd need 2-6 more for one ResNet50,")
    print("166 % and 90 % more for the mixed zoo)")
    scenes = (("one ResNet50", [RESNET50]), ("1080ti zoo", zoo("1080ti")), ("a100 zoo", zoo("a100")))
    for label, models in scenes:
        for name in names:
            print(f"{label:14s} {name:10s} {fewest_gpus(name, models, duration_s) or '>1024'}", flush=True)


def fewest_gpus(name: str, models: list[Model], duration_s: float) -> int | None:
    """Return the fewest GPUs by bisection; None above 1024."""
    times, which = poisson([15000.0 / len(models)] * len(models), duration_s, 0)

    def enough(gpus: int) -> bool:
        result = simulate(make_scheduler(name, uniform_system(models, gpus)), times, which, duration_s=duration_s)
        return bool(result.attainments().min() >= 0.99)

    low, high = 1, 16
    while not enough(high):
        low, high = high, high * 2
        if high > 1024:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


if __name__ == "__main__":
    main()
