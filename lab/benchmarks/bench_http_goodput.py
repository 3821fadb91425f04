"""Goodput over HTTP: Tenuto beside Ray Serve's `@serve.batch` on the same emulated model, open-loop Poisson, p99
within 100 ms.

For each server and GPU count the highest rate is searched at which at least 99 % of the requests are answered in
time, then
the overload is offered: twice what full batches per SLO could carry. `@serve.batch` runs with its best window (one
batch of the size that the rate asks for) and with load shedding in the overload.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from serving import apply_rival, heading, rival_config, synthetic_plan

from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.placement import ModelSpec
from tenuto.profiles import LinearLatency

PORT = 8791
ALPHA_MS, BETA_MS, SLO_MS = 4.212, 20.288, 100.0
OVERLOAD_RPS = {2: 375.0, 4: 749.0}
TARGETS = {2: (230, 285), 4: (520, 600)}
# The figures for other servers, each tuned, on a machine like this: at 99 % in time, and in time under
# overload.
OTHERS = {2: "Triton 209, Mosec 193, LitServe 185", 4: "Triton 500, Mosec 500, LitServe 433"}


def measure(url: str, rate_rps: float, seconds: float, seed: int) -> tuple[float, float]:
    """Return attainment and answers in time per second at an offered rate; the run must be valid."""
    spec = ModelSpec(
        name="synthetic", rate_rps=rate_rps, slo_ms=SLO_MS, latency=LinearLatency(alpha_ms=ALPHA_MS, beta_ms=BETA_MS)
    )
    result = run_bench([spec], BenchOptions(url, seconds, seed, clients=1, warmup_s=1.0))
    mark = "" if result.verdict.result != "INVALID" else f"  INVALID: {'; '.join(result.verdict.reasons)}"
    attainment = result.summary["attainment"]
    print(
        f"    {rate_rps:6.1f} r/s: {100 * attainment:6.2f} % in time, "
        f"goodput {result.summary['goodput_rps']:.1f}{mark}",
        flush=True,
    )
    return attainment, result.summary["goodput_rps"]


def search(url: str, low: float, high: float, seconds: float, step: float) -> float:
    """Return the highest rate with at least 99 % in time, to within `step`."""
    best = 0.0
    while high - low > step:
        middle = (low + high) / 2
        attainment, _ = measure(url, middle, seconds, seed=1)
        if attainment >= 0.99:
            best, low = middle, middle
        else:
            high = middle
    return best


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter runs, two GPUs only")
    parser.add_argument("--gpus", type=int, choices=(2, 4), action="append", help="only this many GPUs; repeatable")
    options = parser.parse_args()
    seconds = 8.0 if options.quick else 20.0
    heading(
        f"goodput over HTTP, emulated model {ALPHA_MS} b + {BETA_MS} ms, SLO {SLO_MS:g} ms, Poisson, "
        f"{seconds:g} s per run"
    )
    rows = []
    with Launcher() as launcher:
        launcher.connect(num_gpus=4, address="local")
        for gpus in options.gpus or ((2,) if options.quick else (2, 4)):
            bound = TARGETS[gpus][0]

            def tenuto(gpus: int = gpus, bound: float = bound) -> str:
                plan = synthetic_plan(ALPHA_MS, BETA_MS, SLO_MS, bound, gpus, 18)
                end_all()
                begin(launcher, Deployment(plan=plan, port=PORT), "a run", "the laboratory")
                return launcher.base_url

            def serve_batch(gpus: int = gpus) -> str:
                args = {
                    "alpha_ms": ALPHA_MS,
                    "beta_ms": BETA_MS,
                    "max_batch": 18,
                    "wait_ms": 25.0,
                    "replicas": gpus,
                    "queued": 30,
                    "ongoing": 36,
                }
                return apply_rival(rival_config("serve_batch", args, PORT))

            servers: list[tuple[str, Callable[[], str], float, float]] = [
                ("tenuto", tenuto, 0.8 * bound, 1.3 * bound),
                ("@serve.batch", serve_batch, 0.1 * bound, 0.9 * bound),
            ]
            for name, start, low, high in servers:
                print(f"  {name}, {gpus} GPUs", flush=True)
                url = start()
                rate = search(url, low, high, seconds, 0.03 * bound)
                _, overload = measure(url, OVERLOAD_RPS[gpus], seconds, seed=1)
                rows.append((name, gpus, rate, overload))
    print(
        f"\n{'server':14s} {'GPUs':>4s} {'99 % in time, r/s':>18s} {'target':>7s} "
        f"{'overload, in time r/s':>22s} {'target':>7s}"
    )
    for name, gpus, rate, overload in rows:
        wanted = TARGETS[gpus] if name == "tenuto" else ("", "")
        print(f"{name:14s} {gpus:4d} {rate:18.0f} {wanted[0]:>7} {overload:22.0f} {wanted[1]:>7}")
    for gpus, text in OTHERS.items():
        print(f"others at {gpus} GPUs (their figures, not measured here): {text}")


if __name__ == "__main__":
    main()
