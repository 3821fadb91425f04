"""What the gateway and its scheduler do for a request, as a count that other programs do not change: instructions of
Python, calls of Python functions and of C functions, beside another build.

    python lab/benchmarks/bench_instructions.py [--beside CHECKOUT] [--by-function 30]

Everything from the bytes of a request to those of its answer runs in one process and in virtual time, over connections
that keep what is written: HTTP, tensors, the scheduler, batches as they travel to gpu-lets and back. *Closed loop*: two
groups of eight connections, scheduler `eager`, one JSON number each. *Open loop*: Poisson arrivals, SLO 25 ms,
Symphony's ResNet50 on two GPUs, scheduler `deferred`. Only what this repository wrote is counted. The processor time is
that of the same runs without counting, with asyncio's loop and this file's own part in it: the median of the rounds,
both builds in turns. `--beside`: a checkout of another build with an environment of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

BODY = b'{"inputs":[{"name":"INPUT0","shape":[1,1],"datatype":"FP32","data":[1]}]}'
HEAD = b"POST /v2/models/synthetic/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
_WARM_UP = 400  # requests that are not counted


class Work:
    """What was executed, by function, or how long it took."""

    def __init__(self, *, is_timed: bool) -> None:
        self.processor_s = 0.0
        self.watched = self.timed if is_timed else self.counted
        self.instructions: Counter[CodeType] = Counter()
        self.calls: Counter[CodeType] = Counter()
        self.c_calls: Counter[CodeType] = Counter()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count nothing, and take the processor time."""
        before = time.process_time()
        yield
        self.processor_s = time.process_time() - before

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the functions of `tenuto`."""
        instructions, calls, c_calls = self.instructions, self.calls, self.c_calls
        names: dict[CodeType, bool] = {}

        def inside(frame: FrameType, event: str, _argument: Any) -> Any:
            if event == "opcode":
                instructions[frame.f_code] += 1
            return inside

        def trace(frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
            code = frame.f_code
            ours = names.get(code)
            if ours is None:
                ours = names[code] = frame.f_globals.get("__name__", "").startswith("tenuto.")
            if not ours:
                return None
            calls[code] += 1
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            return inside

        def profile(frame: FrameType, event: str, _argument: Any) -> None:
            if event == "c_call" and names.get(frame.f_code):
                c_calls[frame.f_code] += 1

        sys.settrace(trace)
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.settrace(None)
            sys.setprofile(None)


class _Wire:
    """A transport that gives away what is written."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        self._on_write = on_write

    def write(self, data: bytes) -> None:
        self._on_write(data)

    def writelines(self, parts: Sequence[bytes]) -> None:
        self._on_write(b"".join(parts))

    def get_extra_info(self, name: str) -> Any:
        return _NoSocket() if name == "socket" else None

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        raise AssertionError("nobody sends ahead here")

    def resume_reading(self) -> None:
        pass

    close = abort = resume_reading


class _NoSocket:
    import socket

    family = socket.AF_UNIX

    def getsockopt(self, *_: Any) -> bytes:
        return bytes(12)


def _feed(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    room = memoryview(protocol.get_buffer(-1))
    room[: len(data)] = data
    protocol.buffer_updated(len(data))


def _plan(alpha_ms: float, beta_ms: float, slo_ms: float, largest: int) -> Any:
    from tenuto.placement import Plan

    latency = {"alpha_ms": alpha_ms, "beta_ms": beta_ms}
    took = {"batch_size": largest, "latency": latency, "latency_ms": alpha_ms * largest + beta_ms}
    model = {"name": "synthetic", "rate_rps": 1000.0, "slo_ms": slo_ms, "latency": latency}
    return Plan.from_data(
        {
            "policy": {"name": "benchmark"},
            "gpus": [{"id": f"n0/{i}", "type": "v100"} for i in range(2)],
            "gpulets": [
                {"id": f"n0/{i}/a", "gpu": f"n0/{i}", "models": [{"name": "synthetic", **took}]} for i in range(2)
            ],
            "models": [model],
        }
    )


class _Gpulet:
    """A gpu-let at the far end of a connection of frames, without process or socket; it takes l(b) for a batch."""

    shares_memory = is_near = is_up = True

    def __init__(self, gpulet_id: str, events: Any, plan: Any) -> None:
        from tenuto.deployments.wire.frames import FrameProtocol, FrameReader
        from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature
        from tests.instruments.fake_gpulet import state

        one = (TensorSignature("INPUT0", "float32", (1,)),)
        signature = ModelSignature("tensor", one, (TensorSignature("OUTPUT0", "float32", (1,)),), platform="fake")
        hosted = next(gpulet for gpulet in plan.gpulets if gpulet.id == gpulet_id).models[0]
        self.peer, self.batches, self.rows = gpulet_id, 0, 0
        self.state = state(gpulet_id, {"synthetic": hosted.batch_size}, {"synthetic": signature})
        self._latency = hosted.latency
        self._events = events
        self._free_s = 0.0
        self._protocol = FrameProtocol(self._on_message, lambda *_: None)
        self._protocol.connection_made(_Wire(self._take))  # type: ignore[arg-type]
        self._protocol.limit_bodies(1 << 20)
        self._reader = FrameReader(1 << 20)

    def start(self) -> None:
        asyncio.get_running_loop().call_soon(lambda: self._events.peer_connected(self))

    async def stop(self) -> None:
        self._protocol.connection_lost(None)

    def send(self, message: Any, buffers: Sequence[Any] = ()) -> None:
        self._protocol.send(message, buffers)

    def _on_message(self, _protocol: Any, message: Any, body: memoryview) -> None:
        self._events.message_came(self, message, body)

    def _take(self, data: bytes) -> None:
        from tenuto.deployments.wire.messages import BatchRan, RunBatch
        from tenuto.deployments.wire.tensors import RowOutput

        trace, profile = sys.gettrace(), sys.getprofile()
        sys.settrace(None)
        sys.setprofile(None)
        self._reader.room()[: len(data)] = data
        self._reader.received(len(data))
        loop = asyncio.get_running_loop()
        while (frame := self._reader.next_frame()) is not None:
            asked = frame[0]
            if not isinstance(asked, RunBatch):
                continue
            size = asked.size
            self.batches, self.rows = self.batches + 1, self.rows + size
            took_ms = self._latency.at(size)
            arrived_s = loop.time() + 2e-4
            start_s = max(arrived_s, self._free_s)
            self._free_s = start_s + took_ms / 1e3
            queue_ms = 1e3 * (start_s - arrived_s)
            members = [(size, [RowOutput("OUTPUT0", "float32", (1,), 4)])]
            ran = BatchRan(asked.number, 1e3 * start_s, took_ms, queue_ms, 0.0, 0.0, members)
            loop.call_at(self._free_s + 2e-4, self._answer, ran, bytes(4 * size))
        sys.settrace(trace)
        sys.setprofile(profile)

    def _answer(self, ran: Any, body: bytes) -> None:
        from tenuto.deployments.wire.frames import framed

        trace, profile = sys.gettrace(), sys.getprofile()
        sys.settrace(None)
        sys.setprofile(None)
        (data,) = framed(ran, [body])
        sys.settrace(trace)
        sys.setprofile(profile)
        _feed(self._protocol, data)


class _Gateway:
    """All of a gateway that requests meet, and its gpu-lets."""

    def __init__(self, plan: Any, scheduler: str) -> None:
        from tenuto.batching.core.build import from_plan
        from tenuto.batching.registry import make_scheduler
        from tenuto.deployments.dispatch.dispatcher import Dispatcher
        from tenuto.deployments.entry.http.loop_budget import LoopBudget
        from tenuto.deployments.entry.http.open_connections import Limits
        from tenuto.deployments.entry.http.server import HttpServer
        from tenuto.deployments.entry.service.inference import InferenceService
        from tenuto.deployments.wire.arena import Arena

        loop, arena = asyncio.get_running_loop(), Arena(1 << 24)
        self.service = InferenceService(lambda *_: None, clock=loop.time)
        self.server = HttpServer(self.service, arena, Limits())
        self.server.budget = LoopBudget(loop, loop.time)
        options = {"rehearse": "false"} if scheduler == "deferred" else {}
        self.gpulets: list[_Gpulet] = []

        def connect(gpulet_id: str, _find: Any, events: Any) -> Any:
            self.gpulets.append(_Gpulet(gpulet_id, events, plan))
            return self.gpulets[-1]

        self.dispatcher = Dispatcher(
            lambda plan, network: make_scheduler(scheduler, from_plan(plan, network), options),
            lambda _gpulet: None,  # type: ignore[arg-type, return-value]
            clock=loop.time,
            make_connection=connect,
        )
        self._plan = plan

    async def begin(self) -> None:
        self.dispatcher.apply(self._plan)
        for _ in range(5):
            await asyncio.sleep(0)
        assert self.dispatcher.is_ready()
        self.service.follow(self.dispatcher)

    def connect(self, on_answer: Callable[[bytes], None]) -> Any:
        from tenuto.deployments.entry.http.http1 import HttpConnection

        connection = HttpConnection(self.server)
        connection.connection_made(_Wire(on_answer))  # type: ignore[arg-type]
        return connection

    async def end(self) -> None:
        await self.dispatcher.close()
        self.service.close()


async def _closed_loop(work: Work, requests: int) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    gateway = _Gateway(_plan(0.001, 1.0, 1000.0, 512), "eager")
    await gateway.begin()
    count = 0
    done = asyncio.Event()

    def client() -> Callable[[], None]:
        def answered(answer: bytes) -> None:
            nonlocal count
            assert done.is_set() or answer.startswith(b"HTTP/1.1 200"), answer
            count += 1
            if count >= requests:
                done.set()
            else:
                loop.call_soon(ask)

        connection = gateway.connect(answered)

        def ask() -> None:
            _feed(connection, REQUEST)

        return ask

    for group in range(2):
        for _ in range(8):
            loop.call_at(loop.time() + 0.01 + 0.0005 * group, client())
    return await _run(gateway, work, requests, lambda: count, done)


async def _open_loop(work: Work, requests: int, rate: float, seed: int) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    gateway = _Gateway(_plan(1.053, 5.072, 25.0, 18), "deferred")
    await gateway.begin()
    chance = random.Random(seed)
    at_s, count, done, pool = loop.time() + 0.01, 0, asyncio.Event(), deque[Any]()

    def ask() -> None:
        nonlocal at_s
        if not pool:
            slot: list[Any] = []

            def answered(_answer: bytes) -> None:
                nonlocal count
                count += 1
                pool.append(slot[0])
                if count >= requests:
                    done.set()

            slot.append(gateway.connect(answered))
            pool.append(slot[0])
        _feed(pool.popleft(), REQUEST)
        at_s += chance.expovariate(rate)
        if not done.is_set():
            loop.call_at(at_s, ask)

    loop.call_at(at_s, ask)
    return await _run(gateway, work, requests, lambda: count, done)


async def _run(
    gateway: _Gateway, work: Work, requests: int, count: Callable[[], int], done: asyncio.Event
) -> dict[str, float]:
    while count() < _WARM_UP:
        await asyncio.sleep(0.0101)
    before, batches = count(), sum(gpulet.batches for gpulet in gateway.gpulets)
    rows = sum(gpulet.rows for gpulet in gateway.gpulets)
    with work.watched():
        await done.wait()
    ended = count() - before
    await gateway.end()
    batches, rows = (
        sum(gpulet.batches for gpulet in gateway.gpulets) - batches,
        sum(gpulet.rows for gpulet in gateway.gpulets) - rows,
    )
    return {
        "instructions": sum(work.instructions.values()) / ended,
        "python_calls": sum(work.calls.values()) / ended,
        "c_calls": sum(work.c_calls.values()) / ended,
        "processor_us": 1e6 * work.processor_s / ended,
        "mean_batch": rows / batches,
        "executed": rows / ended,
    }


def measure(requests: int, rates: Sequence[float], seed: int, shown: int) -> dict[str, dict[str, float]]:
    """Return the counts and times of this build by load; prints those of `shown` functions."""
    from tests.instruments.virtual_loop import VirtualLoop

    found = {}
    loads: dict[str, Callable[[Work], Any]] = {"closed loop, 16": lambda work: _closed_loop(work, requests)}
    for rate in rates:
        loads[f"open loop, {rate:g} r/s"] = lambda work, rate=rate: _open_loop(work, requests, rate, seed)  # type: ignore[misc]
    for name, load in loads.items():
        work, timed = Work(is_timed=False), Work(is_timed=True)
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            found[name] = runner.run(load(work))
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            found[name]["processor_us"] = runner.run(load(timed))["processor_us"]
        if shown:
            counted = requests - _WARM_UP
            print(f"\n{name}", file=sys.stderr)
            for code, number in work.instructions.most_common(shown):
                file = code.co_filename.rpartition("tenuto/")[2].rpartition("deployments/")[2]
                place = f"{'/'.join(Path(file).parts[-2:])}:{code.co_qualname}"
                calls = work.calls[code] / counted, work.c_calls[code] / counted
                print(f"{number / counted:8.1f} {calls[0]:6.2f} {calls[1]:6.2f}  {place}", file=sys.stderr)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2400, help="of each load; the first 400 are not counted")
    parser.add_argument("--rates", type=float, nargs="*", default=[300.0, 850.0, 1498.0], help="of the open loop")
    parser.add_argument("--seed", type=int, default=3, help="of the arrivals")
    parser.add_argument("--rounds", type=int, default=3, help="of each build")
    parser.add_argument("--beside", metavar="CHECKOUT", help="a checkout of another build, with `.venv`")
    parser.add_argument("--by-function", type=int, default=0, metavar="N", help="show the N functions that do most")
    parser.add_argument("--json", action="store_true", help="print the figures of one round alone")
    args = parser.parse_args()
    here = Path(__file__).resolve()
    sys.path.insert(0, str(Path.cwd() if args.json else here.parents[2]))
    if args.json or args.by_function:
        print(json.dumps(measure(args.requests, args.rates, args.seed, args.by_function)))
        return
    builds = {"": (sys.executable, here.parents[2])}
    if args.beside:
        builds[", the other build"] = (f"{args.beside}/.venv/bin/python", args.beside)
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {which: [] for which in builds}
    options = ["--requests", str(args.requests), "--seed", str(args.seed), "--rates", *map(str, args.rates)]
    for _ in range(args.rounds):
        for which, (python, checkout) in builds.items():
            command = [python, str(here), "--json", *options]
            ran = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
            rounds[which].append(json.loads(ran.stdout))
    print("| of one request | mean batch | instructions | Python calls | C calls | processor time |")
    print("|---|---|---|---|---|---|")
    for load in rounds[""][0]:
        for which, found in rounds.items():
            row = {key: statistics.median(each[load][key] for each in found) for key in found[0][load]}
            counts = " | ".join(f"{row[key]:,.0f}" for key in ("instructions", "python_calls", "c_calls"))
            print(f"| {load}{which} | {row['mean_batch']:.1f} | {counts} | {row['processor_us']:.0f} µs |")
        if args.beside:
            both = list(zip(*(rounds[which] for which in builds), strict=True))
            count, cpu = (
                statistics.median(mine[load][key] / other[load][key] for mine, other in both)
                for key in ("instructions", "processor_us")
            )
            print(f"| ratio | | {count:.3f} | | | {cpu:.2f} |")


if __name__ == "__main__":
    main()
