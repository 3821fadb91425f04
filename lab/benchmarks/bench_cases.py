"""Symphony figures 2, 6a and 11: flat top under overload, gain over eager by batching effect, tight to loose SLOs.

python lab/benchmarks/bench_cases.py [--quick] [--figures 2,6a,11]
"""

from __future__ import annotations

import argparse

import numpy as np
from scenes import Model, arguments, goodput_rps, poisson, print_machine, uniform_system

from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figures", default="2,6a,11")


def main() -> None:
    chosen = arguments(__doc__ or "", more)
    print_machine()
    figures = chosen.figures.split(",")
    if "2" in figures:
        flat_top(chosen.quick)
    if "6a" in figures:
        by_batching_effect(chosen.quick)
    if "11" in figures:
        by_slo(chosen.quick)


def flat_top(quick: bool) -> None:
    """Offer 0 to 2 times the peak; goodput must stay, and below the peak GPU time must follow the load, where it is
    asked to.
    """
    models: list[Model] = [(f"m{i}", 1.053, 5.072, 100.0, None) for i in range(10)]
    system = uniform_system(models, 24)
    duration_s = 10.0 if quick else 30.0
    peak = goodput_rps(system, "deferred", 16000.0, duration_s=duration_s, seed=0)
    print(f"\nFlat top: 10 models, 24 GPUs, SLO 100 ms, peak {peak:,.0f} r/s")
    words = f"{'offered/peak':>12s} {'offered':>9s} {'goodput':>9s} {'of peak':>8s} {'busy':>7s} {'saved':>7s}"
    print(f"{words} {'published':>9s}")
    print("busy, saved: GPU time by default and with save_above=0; published: goodput of Symphony's rule")
    for part in np.arange(0.2, 2.01, 0.2):
        times, which = poisson([peak * part / 10] * 10, duration_s, 1)
        summary, saved, published = (
            simulate(make_scheduler(name, system, options), times, which, duration_s=duration_s).summary()
            for name, options in (("deferred", {}), ("deferred", {"save_above": 0.0}), ("symphony", {}))
        )
        offered, goodput, busy = (summary[key] for key in ("offered_rps", "goodput_rps", "gpu_utilisation"))
        print(
            f"{part:12.1f} {offered:9,.0f} {goodput:9,.0f} {goodput / peak:8.3f} {busy:7.3f} "
            f"{saved['gpu_utilisation']:7.3f} {published['goodput_rps']:9,.0f}",
            flush=True,
        )


def by_batching_effect(quick: bool) -> None:
    """Alpha 1 ms, SLO 2 l(8), 32 GPUs, 10 models: the ratio deferred / eager over beta/alpha."""
    names = ["deferred", "eager"]
    print("\nFigure 6a: alpha 1 ms, SLO 2 l(8), 32 GPUs, 10 models, goodput r/s (paper: equal at 1, growing above)")
    print("beta/alpha " + "".join(f"{name:>10s}" for name in names) + "     ratio")
    for beta in (1, 3, 6, 10, 15) if quick else range(1, 16):
        slo = 2.0 * (8.0 + beta)
        system = uniform_system([(f"m{i}", 1.0, float(beta), slo, None) for i in range(10)], 32)
        guess = 32_000.0 / (1.0 + beta / 8.0) * 0.8
        seconds = 8.0 if quick else 20.0
        rates = [goodput_rps(system, name, guess, duration_s=seconds, seed=0) for name in names]
        ratio = f"{rates[0] / rates[1]:10.2f}" if len(rates) > 1 else ""
        print(f"{beta:10d} " + "".join(f"{rate:10,.0f}" for rate in rates) + ratio, flush=True)


def by_slo(quick: bool) -> None:
    """20 ResNet50-like models on 32 GPUs: SLO, popularity and burstiness."""
    names = ["deferred", "eager", "clockwork", "nexus", "shepherd"]
    print("\nFigure 11: 20 ResNet50-like models (1.053 b + 5.072 ms), 32 GPUs, goodput r/s, every model at 99 %")
    print(f"{'arrivals':12s} {'popularity':10s} {'SLO ms':>6s} " + "".join(f"{name:>10s}" for name in names))
    popularities = {"equal": [1.0] * 20, "Zipf(0.9)": [1.0 / (rank + 1) ** 0.9 for rank in range(20)]}
    for shape, label in ((1.0, "Poisson"), (0.05, "gamma(0.05)")):
        for popularity, parts in popularities.items():
            for slo in (15, 25, 50, 100) if quick else (15, 20, 25, 30, 40, 50, 75, 100):
                system = uniform_system([(f"m{i}", 1.053, 5.072, float(slo), None) for i in range(20)], 32)
                rates = [
                    goodput_rps(
                        system,
                        name,
                        8000.0,
                        duration_s=8.0 if quick else 20.0,
                        seed=0,
                        popularity=parts,
                        shape=shape,
                        tolerance=0.01,
                    )
                    for name in names
                ]
                cells = "".join(f"{rate:10,.0f}" for rate in rates)
                print(f"{label:12s} {popularity:10s} {slo:6d} {cells}", flush=True)


if __name__ == "__main__":
    main()
