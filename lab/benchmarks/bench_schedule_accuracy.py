"""How faithfully the load generator sends its schedule, over HTTP and over the Python handle, and what that costs.

A peer in a second process answers every request at once: an HTTP server without a network behind it, and the far end of
the handle's sockets and bundles without a dispatcher behind it. `--live` asks a real Tenuto on Ray instead, with an
emulated model, so that the client shares the machine with all of it. Each rate is sent several times from one client;
printed are medians over the repeats, with the smallest and largest p99 beside, since other processes share the machine.

Published to compare with: the clients of Elvinger's thesis (ETH 2024, table 4.1) fell 8 to 19 % short of the rate they
were asked for. Issue 5 asks for 0.5 % and a 99th percentile of lateness under 2 ms at 500 r/s.

Run: python lab/benchmarks/bench_schedule_accuracy.py [--quick] [--via http|handle|both] [--live]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np
from serving import heading, synthetic_plan

from tenuto.deployments.entry.protocols.oip_requests import RequestReader
from tenuto.deployments.entry.service.dispatcher_client import DispatcherClient
from tenuto.deployments.entry.service.python_handle import ALONE, TenutoHandle
from tenuto.deployments.process.ray_address import join_ray
from tenuto.deployments.wire.answers import Answer, Executed
from tenuto.deployments.wire.arena import machine_id
from tenuto.deployments.wire.bundles import AnsweredRequest, pack_answers
from tenuto.deployments.wire.frames import FrameProtocol, listen
from tenuto.deployments.wire.messages import DispatcherState, Hello, Message, Requests
from tenuto.deployments.wire.peer import Endpoint, Finder
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.clients.group import LocalClient
from tenuto.loadgen.sender import Body, OnReply, Reply, Sender
from tenuto.loadgen.senders.http_sender import HttpSender
from tenuto.outcome import Outcome
from tenuto.placement import ModelSpec
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature

MODEL = "synthetic"
SLO_MS = 100.0
WANTED_OFF, WANTED_P99_MS, WANTED_RPS = 0.005, 2.0, 500
LIVE_PORT = 8791
_HEADERS = (
    b"HTTP/1.1 200 OK\r\nX-Tenuto-Queue-Ms: 1.0\r\nX-Tenuto-Batching-Ms: 1.0\r\nX-Tenuto-Execution-Ms: 1.0\r\n"
    b"X-Tenuto-Batch-Size: 1\r\nX-Tenuto-Gpulet: n0/0/a\r\nContent-Length: 14\r\n\r\n"
    b'{"outputs":[]}'
)
_SIGNATURE = ModelSignature(
    "tensor", (TensorSignature("x", "float32", (4,)),), (TensorSignature("y", "float32", (4,)),), platform="none"
)
_EXECUTED = Executed(1, "n0/0/a", True, 1.0, 2.0, 0.0, 1.0, 1, [], [])


class _NoOp(asyncio.Protocol):
    """Answers each POST as soon as it is whole; GET with the metadata of a model of four floats."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            if self._buffer.startswith(b"GET"):
                inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
                body = json.dumps({"name": MODEL, "inputs": inputs, "outputs": []}).encode()
                self._transport.write(
                    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )
                self._transport.close()
                return
            at = self._buffer.find(b"Content-Length: ") + 16
            length = int(self._buffer[at : self._buffer.find(b"\r\n", at)])
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._transport.write(_HEADERS)


def _on_bundle(protocol: FrameProtocol, message: Message, body: memoryview) -> None:
    """Answer every request of a bundle."""
    if isinstance(message, Requests):
        protocol.send(*pack_answers([AnsweredRequest(row.number, _EXECUTED) for row in message.rows], 3.0))


def _accept() -> FrameProtocol:
    state = DispatcherState(
        pid=1,
        machine=machine_id(),
        started_at_s=0.0,
        ready=True,
        ready_models=[MODEL],
        signatures={MODEL: _SIGNATURE},
        gpulets=[],
    )

    def greet(protocol: FrameProtocol, _hello: Hello) -> None:
        protocol.limit_bodies(state.most_asked_bytes())
        protocol.send(state)

    return FrameProtocol(_on_bundle, lambda *_: None, expect_token="t", on_hello=greet)


def _serve(pipe: Connection, socket_name: str) -> None:
    """Be both peers, on an HTTP port and on a Unix socket, until killed."""

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(_NoOp, "127.0.0.1", 0)
        bundles = await listen(socket_name, _accept)
        pipe.send(server.sockets[0].getsockname()[1])
        async with bundles:  # uvloop closes a server that nobody keeps
            await server.serve_forever()

    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())


class _HandleSender:
    """Sends tensors through a `TenutoHandle`, and reports outcomes as HTTP does."""

    def __init__(self) -> None:
        self._handle: TenutoHandle | None = None
        self._on_reply: OnReply = lambda _token, _reply: None

    async def open(self, connections: int, on_reply: OnReply) -> None:
        self._on_reply = on_reply
        self._handle = self._handle or await TenutoHandle.connect()

    def prepare(self, model: str, body: Body, slo_ms: float | None = None) -> tuple[str, list[bytes], float | None]:
        assert self._handle is not None
        interface = self._handle.interface(model)
        parts = RequestReader(interface.inputs, interface.signature).read(body.data, body.json_length).parts[0]
        return model, [bytes(part.data) for part in parts], slo_ms

    def send(self, prepared: tuple[str, list[bytes], float | None], request_id: str, token: int) -> None:
        assert self._handle is not None
        model, parts, slo_ms = prepared
        future = self._handle.submit(model, parts, slo_ms, request_id)
        future.add_done_callback(lambda done: self._on_reply(token, _reply_of(done)))

    def close(self) -> None:
        self._on_reply = lambda _token, _reply: None
        if self._handle is not None:
            self._closing = asyncio.ensure_future(self._handle.close())


def _reply_of(done: asyncio.Future[Answer]) -> Reply:
    answer = done.result()
    error = "" if answer.outcome is Outcome.OK else f"{answer.outcome.word}: {answer.reason}"
    times = answer.batching_ms, answer.gpulet_queue_ms, answer.execution_ms
    return Reply(answer.http_status, *times, answer.batch_size, answer.gpulet, error)


class _NoOpHandleSender(_HandleSender):
    """The handle's sender, connected to the peer of this benchmark and not to what Ray finds."""

    def __init__(self, socket_name: str) -> None:
        super().__init__()
        self._socket_name = socket_name

    async def open(self, connections: int, on_reply: OnReply) -> None:
        async def endpoint() -> Endpoint:
            return Endpoint(self._socket_name, "t")

        def find(_name: str) -> Finder:
            return endpoint

        front = DispatcherClient(find)
        await front.apply(synthetic_plan(0.001, 0.0, SLO_MS, 1000.0, 1, 1), {ALONE: [MODEL]})
        self._handle = TenutoHandle(front)
        await super().open(connections, on_reply)


@dataclass(frozen=True)
class _Run:
    """What one repeat showed."""

    off: float
    p50_ms: float
    p99_ms: float
    cost_us: float
    in_time: float
    priority: str

    @property
    def is_held(self) -> bool:
        return abs(self.off) <= WANTED_OFF and self.p99_ms < WANTED_P99_MS


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _run(options: BenchOptions, rate_rps: float, make: Callable[[str, str], Sender]) -> _Run:
    before = _processor_s()
    model = ModelSpec(name=MODEL, rate_rps=rate_rps, slo_ms=SLO_MS)
    result = run_bench([model], options, clients=LocalClient(make))
    spent_s = _processor_s() - before
    records = result.records
    if result.verdict.conditions["sent"] == 0:
        raise SystemExit(f"nothing was sent: {'; '.join(result.verdict.reasons)}")
    sent_ms = records.sent_ms[~np.isnan(records.sent_ms)]
    late_ms = records.lateness_ms[~np.isnan(records.lateness_ms)]
    # The schedule's own count varies with its seed; what was asked for is the schedule.
    within = int((sent_ms < 1000.0 * options.duration_s).sum())
    return _Run(
        off=within / len(records) - 1.0,
        p50_ms=float(np.percentile(late_ms, 50)),
        p99_ms=float(np.percentile(late_ms, 99)),
        cost_us=1e6 * spent_s / len(records),
        in_time=result.summary["attainment"] or 0.0,
        priority=result.verdict.conditions["client_priority"],
    )


@contextlib.contextmanager
def _peer() -> Iterator[tuple[str, dict[str, Callable[[str, str], Sender]]]]:
    """Start the no-op peer; return its URL and, by way of asking, what makes a sender."""
    with tempfile.TemporaryDirectory() as folder:
        socket_name = str(Path(folder) / "peer")
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        server = context.Process(target=_serve, args=(theirs, socket_name), daemon=True)
        server.start()
        try:
            url = f"http://127.0.0.1:{ours.recv()}"
            yield url, {"http": HttpSender, "handle": lambda _url, _key: _NoOpHandleSender(socket_name)}
        finally:
            server.terminate()
            server.join()


@contextlib.contextmanager
def _live() -> Iterator[tuple[str, dict[str, Callable[[str, str], Sender]]]]:
    """Serve a model that takes 2 ms + 0.01 ms per request, in batches up to 32, on two emulated GPUs.

    In a process of its own, as a user would: the one that starts Ray in Serve's fast mode may make handles on one event
    loop only.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.yaml"
        plan.write_text(synthetic_plan(0.01, 2.0, SLO_MS, 1000.0, 2, 32).dump(), encoding="utf-8")
        words = ["serve", str(plan), "--emulate", "--port", str(LIVE_PORT)]
        with (Path(folder) / "log").open("w") as log:
            command = [sys.executable, "-c", "from tenuto.cli import main; main()", *words]
            server = subprocess.Popen(command, stdout=log, stderr=log)
            url = f"http://127.0.0.1:{LIVE_PORT}"
            try:
                end = time.monotonic() + 120.0
                while not _is_ready(url):
                    if server.poll() is not None or time.monotonic() > end:
                        raise SystemExit((Path(folder) / "log").read_text(encoding="utf-8"))
                    time.sleep(0.5)
                join_ray()
                yield url, {"http": HttpSender, "handle": lambda _url, _key: _HandleSender()}
            finally:
                server.send_signal(signal.SIGINT)
                server.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/models/{MODEL}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> int:
    """Print a table per way of asking, then the highest rate that keeps both bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rates, three repeats of 2 s each")
    parser.add_argument("--via", choices=["http", "handle", "both"], default="both")
    parser.add_argument("--rates", type=lambda text: tuple(map(int, text.split(","))), help="r/s, such as 500,1000")
    parser.add_argument("--live", action="store_true", help="ask a real Tenuto on Ray with an emulated model")
    chosen = parser.parse_args()
    rates: tuple[int, ...] = (200, 500, 600, 1000, 2000, 3000, 4000, 6000, 8000, 10000, 12000, 15000)
    repeats, duration_s = 5, 5.0
    if chosen.live:
        rates = (200, 500, 600, 800, 1000, 1500, 2000)
    if chosen.quick:
        rates, repeats, duration_s = (200, 500, 1000), 3, 2.0
    rates = chosen.rates or rates
    far_end = "Tenuto on Ray, emulated model" if chosen.live else "no-op peer"
    heading(
        f"one local client, {far_end} on the same machine, Poisson, medians of {repeats} repeats of {duration_s:g} s"
    )
    best: dict[str, int] = {}
    with _live() if chosen.live else _peer() as (url, makers):
        for via in ("http", "handle") if chosen.via == "both" else (chosen.via,):
            best[via] = 0
            print(
                f"over {via}\nasked r/s       off   late p50   late p99 (least, most)    held  cost/request  in time"
                "  priority  load average"
            )
            for rate in rates:
                runs = [
                    _run(BenchOptions(url, duration_s=duration_s, seed=seed, clients=0, grace_s=1.0), rate, makers[via])
                    for seed in range(repeats)
                ]
                p99s = [run.p99_ms for run in runs]
                off = median(run.off for run in runs)
                if abs(off) <= WANTED_OFF and median(p99s) < WANTED_P99_MS:
                    best[via] = rate
                cost_us, in_time = median(run.cost_us for run in runs), median(run.in_time for run in runs)
                print(
                    f"{rate:9d} {100 * off:7.2f} % {median(run.p50_ms for run in runs):7.2f} ms {median(p99s):7.2f} ms"
                    f" ({min(p99s):5.2f}, {max(p99s):6.2f}) {sum(run.is_held for run in runs):3d} of {repeats}"
                    f" {cost_us:10.0f} µs {100 * in_time:7.2f} %"
                    f"  {runs[0].priority:8s}  {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    for via, rate in best.items():
        print(
            f"highest rate over {via} within 0.5 % and with a p99 of lateness under 2 ms: {rate} r/s (asked for: 500)"
        )
    print("thesis, table 4.1: 8 to 19 % below the rate asked for")
    return 0 if min(best.values()) >= WANTED_RPS else 1


if __name__ == "__main__":
    sys.exit(main())
