"""Speed: simulated requests per second of wall time, how the cost grows with GPUs and models, and the scheduler alone.

python lab/benchmarks/bench_speed.py [--quick]
"""

from __future__ import annotations

import heapq
import time

from scenes import RESNET50, Model, arguments, poisson, print_machine, uniform_system, zoo

from tenuto.batching.core.scheduler import Dispatch
from tenuto.batching.core.system import System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate


def simulated(
    system: System, rate_rps: float, requests: int, scheduler: str = "deferred", options: dict[str, str] | None = None
) -> float:
    """Return simulated requests per second of wall time, best of three."""
    duration_s = requests / rate_rps
    times, which = poisson([rate_rps / len(system.models)] * len(system.models), duration_s, 0)
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        simulate(make_scheduler(scheduler, system, options), times, which, duration_s=duration_s)
        best = max(best, len(times) / (time.perf_counter() - started))
    return best


def cost(system: System, rate_rps: float, requests: int) -> str:
    """Return what a request and a batch cost, and the mean batch."""
    per_request_us = 1e6 / simulated(system, rate_rps, requests)
    duration_s = min(requests, 50_000) / rate_rps
    times, which = poisson([rate_rps / len(system.models)] * len(system.models), duration_s, 0)
    result = simulate(make_scheduler("deferred", system), times, which, duration_s=duration_s)
    batch = len(times) / max(1, len(result.batches.gpulet))
    return f"{per_request_us:6.2f} us per request, {per_request_us * batch:6.1f} us per batch of {batch:5.1f}"


def scheduler_alone(system: System, rate_rps: float, requests: int) -> float:
    """Return requests per second through the core with nothing around it but a heap of completions."""
    times, which = poisson([rate_rps / len(system.models)] * len(system.models), requests / rate_rps, 0)
    slo = [model.slo_ms for model in system.models]
    rows = [
        (at, model, number, at + slo[model])
        for number, (at, model) in enumerate(zip(times.tolist(), which.tolist(), strict=True))
    ]
    best = 0.0
    for _ in range(3):
        core = make_scheduler("deferred", system, {"rehearse": "false"})
        done: list[tuple[float, int]] = []
        spent = 0.0
        clock = time.perf_counter
        started = clock()
        for at, model, number, deadline in rows:
            while core.next_wake_ms < at or (done and done[0][0] <= at):
                if done and done[0][0] <= min(at, core.next_wake_ms):
                    now, gpulet = heapq.heappop(done)
                    core.batch_done(now, gpulet)
                else:
                    core.wake(core.next_wake_ms)
                if core.decisions:
                    for decision in core.drain():
                        if type(decision) is Dispatch:
                            heapq.heappush(done, (decision.finish_ms, decision.gpulet))
            core.add_request(at, model, number, deadline)
        spent = clock() - started
        best = max(best, len(rows) / spent)
    return best


def main() -> None:
    chosen = arguments(__doc__ or "")
    print_machine()
    requests = 100_000 if chosen.quick else 400_000
    print("\nSimulated requests per second of wall time on one core")
    for label, models, gpus, rate in (
        ("table 2, ResNet50, 8 GPUs, 5,400 r/s", [RESNET50], 8, 5400.0),
        ("A100 zoo, 37 models, 64 GPUs, 17,500 r/s", zoo("a100"), 64, 17500.0),
        ("1080Ti zoo, 35 models, 64 GPUs, 7,500 r/s", zoo("1080ti"), 64, 7500.0),
    ):
        system = uniform_system(models, gpus)
        still = simulated(system, rate, requests, "deferred", {"rehearse": "false"})
        print(f"{label:44s} {'not rehearsed':13s} {still:9,.0f}", flush=True)
        for name in ("deferred", "symphony", "eager", "timeout", "clockwork", "nexus", "shepherd"):
            if name != "deferred" and chosen.quick:
                continue
            print(f"{label:44s} {name:10s} {simulated(system, rate, requests, name):12,.0f}", flush=True)
    print("\nScheduler alone, requests per second on one core (original, C++: 300,000 to 800,000 per core)")
    for label, models, gpus, rate in (
        ("ResNet50, 8 GPUs", [RESNET50], 8, 5400.0),
        ("A100 zoo, 64 GPUs", zoo("a100"), 64, 17500.0),
    ):
        print(f"{label:44s} {scheduler_alone(uniform_system(models, gpus), rate, requests):12,.0f}", flush=True)
    print("\nCost over GPUs (10 ResNet50-like models, SLO 50 ms, load in proportion)")
    for gpus in (8, 64, 1024) if chosen.quick else (8, 16, 32, 64, 128, 256, 512, 1024):
        many: list[Model] = [(f"m{i}", 1.053, 5.072, 50.0, None) for i in range(10)]
        print(f"{gpus:5d} GPUs   {cost(uniform_system(many, gpus), 650.0 * gpus, requests)}", flush=True)
    print("\nCost over models (64 GPUs, 20,000 r/s in all, SLO 100 ms: more models, smaller batches)")
    for count in (1, 20, 400) if chosen.quick else (1, 5, 20, 50, 100, 200, 400):
        several: list[Model] = [(f"m{i}", 1.053, 5.072, 100.0, None) for i in range(count)]
        print(f"{count:5d} models {cost(uniform_system(several, 64), 20_000.0, requests)}", flush=True)


if __name__ == "__main__":
    main()
