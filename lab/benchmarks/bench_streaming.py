"""What streaming gains: requests in time of one gpu-let with and without it, by scheduler and by the part of a batch
that its copies take.

The gpu-let, its socket and the dispatcher are real, the GPU is emulated: a batch of four takes 40 ms, copies included.
Poisson arrivals from inside the process, SLO 300 ms, at a rate between what the gpu-let can do without streaming and
with it. The papers state that copies overlap with kernels and give no figure for it. `--ray` does the same over HTTP on
a local Ray with clients of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import random

from serving import heading

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.entry.service.dispatching import ask
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.tensors import InputPart
from tenuto.outcome import Outcome
from tenuto.placement import Plan

LATENCY = {"alpha_ms": 4.0, "beta_ms": 24.0}
BATCH, BATCH_MS, SLO_MS = 4, 40.0, 300.0
SCHEDULERS = ("deferred", "eager", "timeout")


def capacity_rps(copies: float) -> float:
    """Return what the gpu-let can do when a part of its batches' time is hidden."""
    return BATCH / (BATCH_MS * (1.0 - copies)) * 1000.0


def plan(copies: float, *, streaming: bool, rate_rps: float) -> Plan:
    """Return a plan whose batches copy for this part of their time, four fifths of it in."""
    copy_ms = copies * BATCH_MS / BATCH
    options = {"copy_in_ms": 0.8 * copy_ms, "copy_out_ms": 0.2 * copy_ms}
    replica = {"name": "synthetic", "batch_size": BATCH, "latency": LATENCY, "latency_ms": BATCH_MS}
    return Plan.from_data(
        {
            "policy": {"name": "benchmark"},
            "gpus": [{"id": "n0/0", "type": "v100"}],
            "streaming": streaming,
            "gpulets": [{"id": "n0/0/a", "gpu": "n0/0", "models": [replica]}],
            "models": [
                {"name": "synthetic", "rate_rps": rate_rps, "slo_ms": SLO_MS, "latency": LATENCY, "options": options}
            ],
        }
    )


async def in_process(what: Plan, scheduler: str, seconds: float, seed: int) -> tuple[float, float]:
    """Return requests in time per second, and the part of the time that the gpu-let executed."""
    application = Deployment(plan=what, executor="emulated").config().gpulets[-1]
    gpulet = await LocalReplica.start(application.spec, application.user_config)
    dispatcher = Dispatcher(
        lambda plan, network: make_scheduler(scheduler, from_plan(plan, network), {}), lambda _: gpulet.endpoint
    )
    dispatcher.apply(what)
    while not dispatcher.is_ready():
        await asyncio.sleep(0.01)
    loop, draw = asyncio.get_running_loop(), random.Random(seed)
    at = begin = loop.time()
    warm = begin + 0.2 * seconds
    futures: list[asyncio.Future[Answer]] = []
    ended: dict[int, float] = {}
    rate = what.models[0].rate_rps
    counted_from, busy_from = 0, 0.0
    while at < begin + seconds:
        at += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, at - loop.time()))
        if at > warm and not counted_from:
            counted_from, busy_from = len(futures), dispatcher.gpulets()[0]["busy_s"]
        future, number, sent = ask(dispatcher, "synthetic", [InputPart(b"\0\0\0\0")]), len(futures), at

        def settle(_: asyncio.Future[Answer], number: int = number, sent: float = sent) -> None:
            ended[number] = (loop.time() - sent) * 1000.0

        future.add_done_callback(settle)
        futures.append(future)
    busy_s = dispatcher.gpulets()[0]["busy_s"] - busy_from
    answers = await asyncio.gather(*futures)
    await asyncio.sleep(0)
    ok = sum(
        answer.outcome is Outcome.OK and ended[number] <= SLO_MS
        for number, answer in enumerate(answers)
        if number >= counted_from
    )
    await dispatcher.close()
    await gpulet.close()
    return ok / (begin + seconds - warm), busy_s / (begin + seconds - warm)


def on_ray(copies: float, rate_rps: float, seconds: float, seed: int) -> list[float]:
    """Return requests in time per second without and with streaming, over HTTP on a local Ray."""
    from tenuto.deployments.serve.launcher import Launcher
    from tenuto.loadgen.bench import BenchOptions, run_bench

    goodput = []
    with Launcher() as running:
        running.connect(num_gpus=1, address="local")
        for streaming in (False, True):
            what = plan(copies, streaming=streaming, rate_rps=rate_rps)
            end_all()
            begin(running, Deployment(plan=what, port=8768, executor="emulated"), "a run", "the laboratory")
            options = BenchOptions(running.base_url, duration_s=seconds, seed=seed, clients=1)
            goodput.append(run_bench(list(what.models), options).summary["goodput_rps"])
    return goodput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="five seconds a run, one scheduler")
    parser.add_argument("--ray", action="store_true", help="over HTTP on a local Ray")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    seconds = 5.0 if given.quick else given.seconds
    heading("streaming")
    print(
        f"{'copies':>6} {'offered/s':>9} {'scheduler':>10} {'plain ok/s':>10} {'busy':>5} {'streaming ok/s':>14} "
        f"{'busy':>5} {'ratio':>6} {'possible':>8}"
    )
    for copies in (0.0, 0.1, 0.3):
        most = capacity_rps(copies) / capacity_rps(0.0)
        rate = 0.93 * capacity_rps(copies)
        if given.ray:
            before, after = on_ray(copies, rate, seconds, given.seed)
            print(
                f"{copies:6.0%} {rate:9.0f} {'Ray, HTTP':>10} {before:10.1f} {'':5} {after:14.1f} {'':5} "
                f"{after / before:6.2f} {most:8.2f}",
                flush=True,
            )
            continue
        for scheduler in SCHEDULERS[: 1 if given.quick else None]:
            found = []
            for streaming in (False, True):
                what = plan(copies, streaming=streaming, rate_rps=rate)
                found.append(asyncio.run(in_process(what, scheduler, seconds, given.seed)))
            (before, busy), (after, busy_after) = found
            print(
                f"{copies:6.0%} {rate:9.0f} {scheduler:>10} {before:10.1f} {busy:5.0%} {after:14.1f} "
                f"{busy_after:5.0%} {after / before:6.2f} {most:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
