"""The plainest server around Tenuto's scheduler object: one process with one connection to each emulated gpu-let, every
model on each, no Ray, hardly a check. What it reaches is what the machine and the scheduler allow."""

import argparse
import asyncio
import collections
import mmap
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import httptools
import orjson
import uvloop

from tenuto.batching.core.scheduler import Dispatch, Drop, Reject
from tenuto.batching.core.system import Host, Model, NetworkDelay, ScheduledGpulet, System
from tenuto.batching.registry import make_scheduler

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("port", type=int)
parser.add_argument("gpus", type=int)
parser.add_argument("models", help="a JSON list of models: name, alpha_ms, beta_ms, slo_ms, rate_rps")
parser.add_argument("--scheduler", default="deferred")
parser.add_argument("--ctrl-ms", type=float, default=1.0)
parser.add_argument("--response-ms", type=float, default=3.0)
parser.add_argument("--pictures", action="store_true", help="receive bodies into shared memory; no HTTP parser")
given = parser.parse_args()


def largest(model) -> int:
    """Return the largest batch that one request may wait for."""
    return int((model["slo_ms"] - model["beta_ms"]) / model["alpha_ms"])


TIMES = b"x-tenuto-queue-ms: %.3f\r\nx-tenuto-execution-ms: %.3f\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n\r\n"
_LATE = b'{"error":"the deadline could not be met"}'
EXPIRED = b"HTTP/1.1 504 Gateway Timeout\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n" % len(_LATE) + _LATE

models = orjson.loads(given.models)
hosts = {
    index: Host((0.0, *(model["alpha_ms"] * size + model["beta_ms"] for size in range(1, 1 + largest(model)))))
    for index, model in enumerate(models)
}
setup = System(
    tuple(Model(model["name"], model["slo_ms"], model["rate_rps"]) for model in models),
    tuple(ScheduledGpulet(f"g{number}/a", f"g{number}", hosts) for number in range(given.gpus)),
    NetworkDelay(ctrl_ms=given.ctrl_ms, response_ms=given.response_ms),
)
by_path = {f"/v2/models/{model['name']}/infer".encode(): index for index, model in enumerate(models)}
scheduler = make_scheduler(given.scheduler, setup, {})
waiting = {}  # request id -> (connection, the client's id)
gpulets = []  # transports
running = [collections.deque() for _ in range(given.gpus)]
REPORT = struct.Struct("<IIfd")  # of a gpu-let: number and size of the batch, its ms, when it began
counts = {"request": 0, "batch": 0}
timer = None


def now_ms() -> float:
    return time.monotonic() * 1000.0


def carry_out(now: float) -> None:
    global timer
    while scheduler.decisions:
        for decision in scheduler.drain():
            if isinstance(decision, Dispatch):
                counts["batch"] += 1
                running[decision.gpulet].append((now_ms(), list(decision.request_ids)))
                size = len(decision.request_ids)
                model = models[decision.program]
                ms = model["alpha_ms"] * size + model["beta_ms"]
                gpulets[decision.gpulet].write(struct.pack("<IIf", counts["batch"], size, ms))
            elif isinstance(decision, (Drop, Reject)):
                for request in decision.request_ids:
                    waiting.pop(request)[0].send(EXPIRED)
    if timer is not None:
        timer.cancel()
        timer = None
    if scheduler.next_wake_ms < float("inf"):
        timer = loop.call_later(max(0.0, scheduler.next_wake_ms - now) / 1000.0, wake)


def wake() -> None:
    global timer
    timer = None
    now = now_ms()
    if scheduler.next_wake_ms <= now:
        scheduler.wake(now)
    carry_out(now)


class GpuletConnection(asyncio.Protocol):
    def connection_made(self, transport):
        self.index = len(gpulets)
        self.received = b""
        self.ended_ms = 0.0
        gpulets.append(transport)

    def data_received(self, data):
        self.received += data
        now = now_ms()
        while len(self.received) >= REPORT.size:
            _, size, execution_ms, begun_ms = REPORT.unpack_from(self.received)
            self.received = self.received[REPORT.size :]
            sent_ms, requests = running[self.index].popleft()
            queue_ms = max(0.0, self.ended_ms - sent_ms)
            self.ended_ms = begun_ms + execution_ms
            scheduler.batch_done(now, self.index)
            if scheduler.next_wake_ms <= now:
                scheduler.wake(now)
            carry_out(now)
            for request in requests:
                connection, client_id = waiting.pop(request)
                output = {"name": "OUTPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}
                body = orjson.dumps(
                    {
                        "model_name": "synthetic",
                        "id": client_id,
                        "outputs": [output],
                        "parameters": {"batch_size": size, "execution_ms": execution_ms},
                    }
                )
                times = TIMES % (sent_ms - connection.arrived_ms + queue_ms, execution_ms)
                connection.send(OK + times + LENGTH % len(body) + body)


class ClientConnection(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data):
        self.arrived_ms = now_ms()
        self.parser.feed_data(data)

    def on_message_begin(self):
        self.chunks = []
        self.json_length = None

    def on_header(self, name, value):
        if name.lower() == b"inference-header-content-length":
            self.json_length = int(value)

    def on_url(self, url):
        self.url = url

    def on_body(self, body):
        self.chunks.append(body)

    def on_message_complete(self):
        if self.url.startswith(b"/v2/health"):
            self.transport.write(OK + LENGTH % 2 + b"{}")
            return
        ask(self, by_path[self.url], orjson.loads(b"".join(self.chunks)[: self.json_length]))

    def send(self, response):
        if not self.transport.is_closing():
            self.transport.write(response)


class PictureConnection(asyncio.BufferedProtocol):
    """Bodies go from the socket to a slot of shared memory, one for each connection; heads are looked through for the
    two lengths alone."""

    def connection_made(self, transport):
        self.transport = transport
        self.room = memoryview(bytearray(1 << 14))
        self.slot = self.rest = None

    def get_buffer(self, sizehint):
        return self.room if self.rest is None else self.rest

    def buffer_updated(self, nbytes):
        if self.rest is None:
            data = bytes(self.room[:nbytes])
            end = data.index(b"\r\n\r\n") + 4  # this client sends a head at once
            if b"/v2/health" in data[:end]:
                self.transport.write(OK + LENGTH % 2 + b"{}")
                return
            length = self.number(data[:end], b"Content-Length: ")
            self.json_length = self.number(data[:end], b"Inference-Header-Content-Length: ")
            if self.slot is None:
                file = os.memfd_create("floor")
                os.ftruncate(file, length)
                self.slot = memoryview(mmap.mmap(file, length))
            self.slot[: nbytes - end] = data[end:]
            self.rest = self.slot[nbytes - end :]
        else:
            self.rest = self.rest[nbytes:]
        if not len(self.rest):
            self.rest = None
            document = orjson.loads(self.slot[: self.json_length])
            self.arrived_ms = now_ms()
            ask(self, 0, document)

    def number(self, head, name):
        return int(head.split(b"\r\n" + name)[1].split(b"\r\n")[0])

    def send(self, response):
        if not self.transport.is_closing():
            self.transport.write(response)


def ask(connection, model, document) -> None:
    counts["request"] += 1
    waiting[counts["request"]] = (connection, document.get("id", ""))
    deadline_ms = connection.arrived_ms + models[model]["slo_ms"]
    scheduler.add_request(connection.arrived_ms, model, counts["request"], deadline_ms)
    carry_out(connection.arrived_ms)


async def main() -> None:
    global loop
    loop = asyncio.get_running_loop()
    inner = await loop.create_server(GpuletConnection, "127.0.0.1", 0)
    port = str(inner.sockets[0].getsockname()[1])
    program = str(Path(__file__).with_name("gpulet.py"))
    for _ in range(given.gpus):
        subprocess.Popen([sys.executable, program, port])
    while len(gpulets) < given.gpus:
        await asyncio.sleep(0.05)
    protocol = PictureConnection if given.pictures else ClientConnection
    await loop.create_server(protocol, "127.0.0.1", given.port, backlog=4096)
    print("ready", flush=True)
    await asyncio.Event().wait()


uvloop.run(main())
