"""What a request costs more when its gateway feeds a dispatcher in another process in bundles, against a dispatcher in
the gateway's own process: added latency and processor time per request.

There is neither HTTP nor a model. Requests are submitted open-loop, Poisson, and the gpu-let answers at once from
inside the dispatcher's process. So only the dispatcher and the wire to it are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Coroutine, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from serving import heading, synthetic_plan

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.dispatcher_process import BundleServer
from tenuto.deployments.entry.service import dispatcher_client
from tenuto.deployments.entry.service.dispatcher_client import DispatcherClient
from tenuto.deployments.entry.service.dispatching import Dispatching, ask
from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.arena import machine_id
from tenuto.deployments.wire.messages import BatchRan, GpuletState, Message, Requests, RunBatch
from tenuto.deployments.wire.peer import ConnectionEvents, Endpoint, Finder, PeerConnection
from tenuto.deployments.wire.status import GpuletMode
from tenuto.deployments.wire.tensors import Buffer, InputPart, RowOutput
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature

PLAN = synthetic_plan(0.001, 0.0, 1000.0, 1000.0, 2, 64)
SIGNATURE = ModelSignature(
    "tensor",
    (TensorSignature("INPUT0", "float32", (1,)),),
    (TensorSignature("OUTPUT0", "float32", (1,)),),
    platform="none",
)


class Echo:
    """A gpu-let that answers four bytes per request on the loop's next turn."""

    shares_memory = is_near = True

    def __init__(self, gpulet_id: str, _find: Finder, events: ConnectionEvents[GpuletState]) -> None:
        self.peer = gpulet_id
        self.state = GpuletState(
            gpulet=gpulet_id,
            gpu="g",
            pid=1,
            machine=machine_id(),
            device="none",
            emulated=True,
            share_pct=None,
            memory_mib=None,
            memory_cap_mib=None,
            sm_count=None,
            mode=GpuletMode(False, False, {}),
            cuda_mps=None,
            programs={"synthetic": 64},
            merged={},
            signatures={"synthetic": SIGNATURE},
        )
        self.is_up = False
        self._events = events

    def start(self) -> None:
        def rise() -> None:
            self.is_up = True
            self._events.peer_connected(self)

        asyncio.get_running_loop().call_soon(rise)

    async def stop(self) -> None:
        self.is_up = False

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        if isinstance(message, RunBatch):
            rows = message.size
            outputs = [RowOutput("OUTPUT0", "float32", (1,), 4)]
            ran = BatchRan(message.number, time.monotonic() * 1000.0, 0.001, 0.0, 0.0, 0.0, [(rows, outputs)])
            asyncio.get_running_loop().call_soon(self._events.message_came, self, ran, memoryview(bytes(4 * rows)))


def make_dispatcher() -> Dispatcher:
    """Return an eager dispatcher over two such gpu-lets."""

    def build(plan: Plan, network: NetworkDelay) -> Scheduler:
        return make_scheduler("eager", from_plan(plan, network), {})

    def nowhere(_gpulet_id: str) -> Finder:
        async def find() -> Endpoint:
            raise LookupError

        return find

    return Dispatcher(build, nowhere, max_queued=1_000_000, make_connection=Echo)


def run_loop(main: Coroutine[Any, Any, Any]) -> Any:
    """Run on uvloop where it is installed, as Ray Serve does."""
    try:
        import uvloop

        return uvloop.run(main)
    except ModuleNotFoundError:
        return asyncio.run(main)


def serve(pipe: Connection) -> None:
    """Be the dispatcher's process; answers each message with the processor seconds used so far."""

    async def run() -> None:
        server = BundleServer(make_dispatcher())
        server.dispatcher.apply(PLAN)
        while not server.dispatcher.is_ready():
            await asyncio.sleep(0.01)
        pipe.send(tuple(await server.listen()))
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send(time.process_time())
        await server.close(0.0)

    run_loop(run())


async def load(front: Dispatching, rate_rps: float, seconds: float, size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the latency of every request in ms."""
    gaps = np.random.default_rng(0).exponential(1.0 / rate_rps, int(rate_rps * seconds))
    times = np.cumsum(gaps).tolist()
    parts = [InputPart(bytes(size))]
    latencies: list[float] = []
    done = asyncio.Event()

    def answered(begun: float, future: asyncio.Future[Answer]) -> None:
        if future.result().outcome is not Outcome.OK:
            raise SystemExit(f"a request failed: {future.result()}")
        latencies.append((time.perf_counter() - begun) * 1000.0)
        if len(latencies) == len(times):
            done.set()

    start = time.perf_counter()
    for at in times:
        if (wait := start + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        begun = time.perf_counter()
        future = ask(front, "synthetic", parts, slo_ms=5000.0)
        future.add_done_callback(lambda f, begun=begun: answered(begun, f))
    await asyncio.wait_for(done.wait(), 30)
    return np.array(latencies)


async def direct(cases: Sequence[tuple[float, int]], seconds: float) -> list[tuple[float, float, float]]:
    """Return p50, p99 in ms and processor time in µs per request of each case, dispatcher in this process."""
    dispatcher = make_dispatcher()
    dispatcher.apply(PLAN)
    while not dispatcher.is_ready():
        await asyncio.sleep(0.01)
    rows = []
    for rate_rps, size in cases:
        await load(dispatcher, rate_rps, 0.5, size)
        begun = time.process_time()
        latencies = await load(dispatcher, rate_rps, seconds, size)
        rows.append(_row(latencies, time.process_time() - begun))
    await dispatcher.close()
    return rows


class Counting(PeerConnection[Any]):
    """Counts the bundles that leave."""

    bundles = 0

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        Counting.bundles += isinstance(message, Requests)
        super().send(message, buffers)


async def bundled(
    cases: Sequence[tuple[float, int]], seconds: float, pipe: Connection
) -> tuple[list[tuple[float, float, float]], list[float], list[float]]:
    """As `direct`, with the dispatcher at the far end of a socket; processor time is that of both processes.

    Returns:
        The rows, the mean requests per bundle of each, and µs per request of the dispatcher's process alone.
    """
    endpoint = Endpoint(*pipe.recv())

    async def find() -> Endpoint:
        return endpoint

    dispatcher_client.PeerConnection = Counting  # type: ignore[misc]
    front = DispatcherClient(lambda _name: find)
    await front.apply(PLAN, {"0": ["synthetic"]})
    while not front.is_ready():
        await asyncio.sleep(0.01)
    rows, sizes, dispatching_us = [], [], []
    for rate_rps, size in cases:
        await load(front, rate_rps, 0.5, size)
        begun, begun_there = time.process_time(), _used(pipe)
        Counting.bundles = 0
        latencies = await load(front, rate_rps, seconds, size)
        there = _used(pipe) - begun_there
        rows.append(_row(latencies, time.process_time() - begun + there))
        sizes.append(len(latencies) / Counting.bundles)
        dispatching_us.append(1e6 * there / len(latencies))
    await front.close()
    pipe.send(False)
    return rows, sizes, dispatching_us


def _used(pipe: Connection) -> float:
    pipe.send(True)
    used: float = pipe.recv()
    return used


def _row(latencies: np.ndarray[Any, np.dtype[np.float64]], cpu_s: float) -> tuple[float, float, float]:
    return (float(np.percentile(latencies, 50)), float(np.percentile(latencies, 99)), cpu_s / len(latencies) * 1e6)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    seconds = 2.0 if parser.parse_args().quick else 8.0
    cases = [(200.0, 4), (1000.0, 4), (3000.0, 4), (6000.0, 4), (100.0, 602_112)]
    heading("a dispatcher in another process, against one in the gateway's own")
    before = run_loop(direct(cases, seconds))
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(far,), daemon=True)
    process.start()
    try:
        after, sizes, dispatching_us = run_loop(bundled(cases, seconds, near))
    finally:
        process.join(5)
        process.terminate()
    print("                        own process                another process            added")
    print(
        f"{'requests/s':>10s} {'bytes':>8s}"
        + f" {'p50 ms':>8s} {'p99 ms':>8s} {'CPU µs':>8s}" * 3
        + " per bundle dispatcher µs"
    )
    for (rate_rps, size), alone, apart, many, own_us in zip(cases, before, after, sizes, dispatching_us, strict=True):
        added = tuple(b - a for a, b in zip(alone, apart, strict=True))
        figures = "".join(f" {p50:8.3f} {p99:8.3f} {cpu:8.1f}" for p50, p99, cpu in (alone, apart, added))
        print(f"{rate_rps:10.0f} {size:8d}{figures} {many:10.1f} {own_us:13.1f}")
    print("\nLatencies count from the submission; the processor time of making requests is in both columns.")


if __name__ == "__main__":
    main()
