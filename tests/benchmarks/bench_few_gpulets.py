"""Few gpu-lets, few models, SLOs of a few batch latencies: where holding a batch until frontrun meets a busy gpu-let.

Symphony's evaluation has 8 GPUs and more. Here 1 to 4 gpu-lets each hold 2 or 6 ResNet50-like models (1.053 b + 5.072
ms); goodput with 99 % of every model in time (objective `each`), beside eager and Symphony as published.

    python tests/benchmarks/bench_few_gpulets.py [--quick]
"""

from __future__ import annotations

from dataclasses import replace

from scenes import arguments, goodput_rps, print_machine, uniform_system

ALPHA_MS, BETA_MS = 1.053, 5.072


def main() -> None:
    """Print goodput by gpu-lets, models and SLO."""
    chosen = arguments(__doc__ or "")
    print_machine()
    print(f"{'gpu-lets':>8} {'models':>6} {'SLO ms':>6} {'deferred':>10} {'eager':>10} {'symphony':>10} {'/eager':>7}")
    for gpulets in (1, 2) if chosen.quick else (1, 2, 4):
        for count in (2, 6):
            for batches in (2.5, 4.0, 8.0):
                slo_ms = round(batches * (ALPHA_MS + BETA_MS), 1)
                models = [(f"m{i}", ALPHA_MS, BETA_MS, slo_ms, None) for i in range(count)]
                system = replace(uniform_system(models, gpulets), objective="each")
                guess = 500.0 * gpulets / (ALPHA_MS + BETA_MS)
                found = [
                    goodput_rps(
                        system, name, guess, duration_s=15.0 if chosen.quick else 60.0, seed=0, tolerance=0.02,
                        growth=1.5,
                    )
                    for name in ("deferred", "eager", "symphony")
                ]  # fmt: skip
                ratio = f"{found[0] / found[1]:>7.2f}" if found[1] else f"{'-':>7}"
                rates = " ".join(f"{rate:>10,.1f}" for rate in found)
                print(f"{gpulets:>8} {count:>6} {slo_ms:>6g} {rates} {ratio}", flush=True)


if __name__ == "__main__":
    main()
