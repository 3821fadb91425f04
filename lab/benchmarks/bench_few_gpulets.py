"""Few gpu-lets, few models, SLOs of a few batch latencies: a batch that is held until frontrun often meets no idle one.

Symphony's evaluation has 8 GPUs and more. Here 1 to 4 gpu-lets each hold 2 or 6 ResNet50-like models (1.053 b + 5.072
ms); goodput with 99 % of every model in time (objective `each`), beside eager and Symphony as published.

    python lab/benchmarks/bench_few_gpulets.py [--quick] [--gpulets 1,2,4] [--models 2,6]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from scenes import arguments, goodput_rps, print_machine, uniform_system

ALPHA_MS, BETA_MS = 1.053, 5.072


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpulets", default="1,2,4", help="how many, several by commas")
    parser.add_argument("--models", default="2,6", help="how many, several by commas")


def main() -> None:
    """Print goodput by gpu-lets, models and SLO."""
    chosen = arguments(__doc__ or "", more)
    print_machine()
    print(f"{'gpu-lets':>8} {'models':>6} {'SLO ms':>6} {'deferred':>10} {'eager':>10} {'symphony':>10} {'/eager':>7}")
    for gpulets in map(int, chosen.gpulets.split(",")):
        for count in map(int, chosen.models.split(",")):
            for batches in (2.5, 4.0, 8.0):
                slo_ms = round(batches * (ALPHA_MS + BETA_MS), 1)
                models = [(f"m{i}", ALPHA_MS, BETA_MS, slo_ms, None) for i in range(count)]
                system = replace(uniform_system(models, gpulets), objective="each")
                seconds = (60.0 if chosen.quick else 240.0) / gpulets
                guess = 500.0 * gpulets / (ALPHA_MS + BETA_MS)
                found = [
                    goodput_rps(system, name, guess, duration_s=seconds, seed=0, tolerance=0.02, growth=1.5)
                    for name in ("deferred", "eager", "symphony")
                ]
                ratio = f"{found[0] / found[1]:>7.2f}" if found[1] else f"{'-':>7}"
                rates = " ".join(f"{rate:>10,.1f}" for rate in found)
                print(f"{gpulets:>8} {count:>6} {slo_ms:>6g} {rates} {ratio}", flush=True)


if __name__ == "__main__":
    main()
