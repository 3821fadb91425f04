"""Whatever ends a call early, on whichever protocol: nothing of it outlives it. Each way is gone many times, and what
the process holds is counted: an exception that is raised again and again keeps the frames of each time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import itertools
import json
import logging
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tenuto.deployments.entry.service.dispatcher_client import DispatcherClient
from tenuto.deployments.entry.service.python_handle import RequestFailedError, TenutoHandle
from tenuto.deployments.security.keys import new_key
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.wire.peer import Endpoint
from tenuto.errors import InvalidInputError
from tests.deployments.entry.test_generation import Bench, plan
from tests.instruments.live import PATIENCE_S

pytest.importorskip("h2")
hpack = pytest.importorskip("hpack")
messages = pytest.importorskip("tenuto.deployments.entry.protocols.grpc_messages")

from tests.instruments.http2_client import HEADERS, WINDOW_UPDATE, Http2Client, message  # noqa: E402

pytestmark = pytest.mark.door

ROUNDS, TIMES = 3, 8  # the first round warms caches up
MOST_BLOCKS = 8  # of one call; an exception that keeps its frames has more, a timer that was cancelled fewer
RECORDS = 4096  # of the last requests, which are kept on purpose
LARGE = (1 << 20) + 1  # more than may be unfinished, and less than a body may have
STREAM = "inference.GRPCInferenceService/ModelStreamInfer"
HEALTH = "grpc.health.v1.Health/Check"
INFER = "inference.GRPCInferenceService/ModelInfer"
TENSOR = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
Way = Callable[[], Awaitable[object]]


def asked(model: str = "plain", **more: Any) -> bytes:
    """Return a `ModelInferRequest`."""
    made = messages.InferRequest(model_name=model, **more)
    made.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(1.0)
    data: bytes = made.SerializeToString()
    return data


class Ends:
    """A gateway with all its protocols, and every early end of a call."""

    def __init__(self, *, has_keys: bool) -> None:
        self.bench = Bench()
        self.bench.grpc_port, self.bench.unfinished_mib = unused_port(), 1
        self.key, self._digest = new_key()
        self.has_keys = has_keys
        self._http2: Http2Client | None = None

    async def start(self) -> None:
        entry = {"name": "ann", "sha256": self._digest, "models": ["plain", "slow"], "rate_rps": 1e9}
        scarce = {"name": "bob", "sha256": new_key()[1], "models": ["plain"], "rate_rps": 0.0001, "burst": 1}
        self.scarce, scarce["sha256"] = new_key()
        await self.bench.start(**({"keys": [entry, scarce]} if self.has_keys else {}))

        async def find() -> Endpoint:
            return await self.bench.entry.endpoint("")

        dispatchers = DispatcherClient(lambda _name: find)
        await dispatchers.apply(plan(), {"gateway": [spec.name for spec in plan().models]})
        self.handle = TenutoHandle(dispatchers)

    async def close(self) -> None:
        if self._http2 is not None:
            self._http2.leave()
        await self.handle.close()
        await self.bench.close()

    # --- HTTP/1.1 -----------------------------------------------------------------------------------------------

    def http(self, path: str, body: bytes = b"", *lines: str, key: str | None = None, method: str = "POST") -> bytes:
        said = [f"{method} {path} HTTP/1.1", "Host: localhost", *lines]
        if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in lines):
            said.append(f"Content-Length: {len(body)}")
        if key or self.has_keys:
            said.append(f"X-Api-Key: {key or self.key}")
        return "\r\n".join(said).encode() + b"\r\n\r\n" + body

    def said(self, data: bytes, *, leaves: bool = False) -> Way:
        """Say something on a connection of its own, and hear the beginning of an answer; or leave before."""

        async def go() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.bench.port)
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
                if not leaves:
                    await reader.read(1 << 16)
            writer.transport.abort()

        return go

    def read_a_little(self, path: str, **document: Any) -> Way:
        """Begin to read a stream, and leave."""
        body = json.dumps(document).encode()

        async def go() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.bench.port)
            writer.write(self.http(path, body))
            await reader.readuntil(b"data: ")
            writer.transport.abort()

        return go

    # --- gRPC ---------------------------------------------------------------------------------------------------

    async def connection(self) -> Http2Client:
        """Return the connection that all calls share."""
        if self._http2 is None or self._http2.is_lost:
            self._http2 = await Http2Client.connect(self.bench.grpc_port)
        return self._http2

    def called(
        self,
        data: bytes | None = None,
        *metadata: tuple[str, str],
        path: str = INFER,
        key: str | None = None,
        is_last: bool = True,
        how: Callable[[Http2Client, int], object] | None = None,
        hears: bool = True,
        **options: Any,
    ) -> Way:
        """Begin a call and send this of it; then do what `how` does."""

        async def go() -> None:
            client = await self.connection()
            shown = [("x-api-key", key or self.key)] if (key or self.has_keys) and key != "" else []
            stream = client.begin(path, *metadata, *shown, is_whole=data is None and how is None, **options)
            if data is not None:
                client.data(stream, data, is_last=is_last)
            if how is not None:
                how(client, stream)
            if hears:
                said = await client.hear(stream)
                if said.startswith(("goaway", "lost")):
                    client.leave()
                    self._http2 = None

        return go

    async def crowded(self) -> None:
        """Ask for memory that the client does not leave to others."""
        client = await self.connection()
        shown = [("x-api-key", self.key)] if self.has_keys else []
        first = client.begin(INFER, *shown)
        client.data(first, message(bytes(LARGE * 2 // 5), announced=LARGE * 2 // 5 + 1))
        for size, sent in ((LARGE // 4, 0), (60_000, 59_000), (60_000, 59_000), (60_000, 59_000), (60_000, 59_000)):
            stream = client.begin(INFER, *shown)
            client.data(stream, message(bytes(sent), announced=size), is_last=True)
            await client.hear(stream)
        client.reset(first)

    async def left_amid(self) -> None:
        """Begin calls, and end the connection."""
        client = await Http2Client.connect(self.bench.grpc_port)
        for _ in range(3):
            stream = client.begin(INFER, *([("x-api-key", self.key)] if self.has_keys else []))
            client.data(stream, message(bytes(20_000), announced=40_000))
        await client.writer.drain()
        client.leave()

    # --- Python handles and the channel of gpu-lets and dispatchers -------------------------------------------------

    async def cancelled(self) -> None:
        future = self.handle.submit("plain", [bytes(4)])
        await asyncio.sleep(0)
        future.cancel()

    async def expired(self) -> None:
        with contextlib.suppress(RequestFailedError, InvalidInputError):
            await self.handle.infer("plain", {"INPUT0": [1.0]}, slo_ms=1e-6)

    async def unfit(self) -> None:
        with contextlib.suppress(InvalidInputError):
            await self.handle.infer("nobody", {"INPUT0": [1.0]})
        with contextlib.suppress(InvalidInputError):
            await self.handle.infer("plain", {"INPUT0": [1.0, 2.0]})

    async def stopped(self) -> None:
        async with contextlib.aclosing(self.handle.generate_tokens("slow", [1, 2], max_tokens=50)) as tokens:
            async for _ in tokens:
                break

    async def not_known(self) -> None:
        """Begin with what is no frame, and so without the token."""
        at = await self.bench.entry.endpoint("")
        assert isinstance(at.address, str)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
            made.connect(at.address)
            made.setblocking(False)
            made.sendall(b"\xff" * 64)
            await asyncio.get_running_loop().sock_recv(made, 1)

    # --- all ------------------------------------------------------------------------------------------------------

    def ways(self) -> dict[str, Way]:
        """Return every early end that there is, by its name."""
        infer, said, called, http = "/v2/models/plain/infer", self.said, self.called, self.http
        tensor = json.dumps(TENSOR).encode()
        chunk = b"8000\r\n" + bytes(0x8000) + b"\r\n"
        binary = "Inference-Header-Content-Length: 10"
        found: dict[str, Way] = {
            "HTTP: no request": said(b"nonsense\r\n\r\n"),
            "HTTP: headers that are too long": said(http("/x", b"", "X: " + "x" * 40_000)),
            "HTTP: an unknown path": said(http("/x")),
            "HTTP: an unknown model": said(http("/v2/models/nobody/infer", tensor)),
            "HTTP: no JSON": said(http(infer, b"{")),
            "HTTP: another shape": said(http(infer, tensor.replace(b"[1, 1]", b"[1, 7]"))),
            "HTTP: a body that is too large": said(http(infer, b"", "Content-Length: 999999999", binary)),
            "HTTP: more than there is memory for": said(http(infer, b"x", f"Content-Length: {LARGE}", binary)),
            "HTTP: more chunks than there is memory for": said(http(infer, chunk * 40, "Transfer-Encoding: chunked")),
            "HTTP: chunks that are none": said(http(infer, b"zz\r\n", "Transfer-Encoding: chunked")),
            "HTTP: left amid chunks": said(http(infer, chunk, "Transfer-Encoding: chunked"), leaves=True),
            "HTTP: left amid a head": said(http(infer)[:-4], leaves=True),
            "HTTP: left amid a body": said(http(infer, bytes(30_000), "Content-Length: 60000", binary), leaves=True),
            "HTTP: left amid a request": said(http(infer, tensor), leaves=True),
            "HTTP: no time": said(http(infer, tensor, "X-SLO-Ms: 0")),
            "HTTP: a damaged gzip": said(http(infer, b"xxxx", "Content-Encoding: gzip")),
            "HTTP: a prompt that is too long": said(http("/v1/completions", b"", "Content-Length: 9999999")),
            "HTTP: a generation of nobody": said(http("/v1/completions", b'{"model":"nobody","prompt":"x"}')),
            "HTTP: a left generation": said(
                http("/v1/completions", b'{"model":"slow","prompt":"x","max_tokens":99}'), leaves=True
            ),
            "events: left": self.read_a_little("/v1/completions", model="slow", prompt="x", max_tokens=99, stream=True),
            "events: left, of generate": self.read_a_little(
                "/v2/models/slow/generate_stream", text_input="x", parameters={"max_tokens": 99}
            ),
            "gRPC: no call of ours": called(message(), path="x/y"),
            "gRPC: no gRPC": called(message(), ("content-type", "text/html")),
            "gRPC: malformed metadata": called(message(), ("connection", "close")),
            "gRPC: compressed": called(message(b"x", compressed=1)),
            "gRPC: a damaged gzip": called(message(b"x", compressed=1), ("grpc-encoding", "gzip")),
            "gRPC: a message that is too large": called(message(announced=999_999_999)),
            "gRPC: more than there is memory for": called(message(announced=LARGE), is_last=False),
            "gRPC: no memory beside another": self.crowded,
            "gRPC: a health check that is too large": called(message(announced=1 << 17), path=HEALTH),
            "gRPC: no message": called(b""),
            "gRPC: no data": called(),
            "gRPC: noise": called(message(b"\xff" * 40)),
            "gRPC: two messages": called(2 * message(asked())),
            "gRPC: an unknown model": called(message(asked("nobody"))),
            "gRPC: no time": called(message(asked()), ("x-slo-ms", "0")),
            "gRPC: no patience": called(message(asked()), ("grpc-timeout", "1n")),
            "gRPC: an unknown service": called(message(b"\x0a\x01x"), path=HEALTH),
            "gRPC: a stream of noise": called(message(b"\xff" * 40), path=STREAM),
            "gRPC: given up": called(message(asked()), how=Http2Client.reset, hears=False),
            "gRPC: given up amid a message": called(
                message(bytes(20_000), announced=40_000), is_last=False, how=Http2Client.reset, hears=False
            ),
            "gRPC: given up before a message": called(how=Http2Client.reset, hears=False),
            "gRPC: a stream that is given up": called(
                message(asked()), path=STREAM, is_last=False, how=Http2Client.reset, hears=False
            ),
            "gRPC: more metadata than is taken": called(message(asked()), ("more", "x" * 20_000)),
            "gRPC: another length": called(message(asked()), ("content-length", "7")),
            "gRPC: more than its window": called(bytes(1 << 21), is_last=False, path=STREAM),
            "gRPC: a window that does not grow": called(
                how=lambda client, stream: client.frame(WINDOW_UPDATE, 0, stream, bytes(4))
            ),
            "gRPC: headers amid a call": called(
                how=lambda client, stream: client.trailers(stream, [("x", "y")], is_last=False)
            ),
            "gRPC: a header block of another": called(
                how=lambda client, stream: (
                    client.frame(HEADERS, 0, stream + 2, b"") or client.frame(HEADERS, 0, stream, b"")
                )
            ),
            "gRPC: left amid messages": self.left_amid,
            "Python: cancelled": self.cancelled,
            "Python: no time": self.expired,
            "Python: what does not fit": self.unfit,
            "Python: a generation that is left": self.stopped,
            "channel: not known": self.not_known,
        }
        if self.has_keys:
            found |= {
                "HTTP: above its rate": said(http(infer, tensor, key=self.scarce)),
                "HTTP: another's model": said(http("/v2/models/mute/infer", tensor)),
                "HTTP: no key": said(http(infer, tensor).replace(b"X-Api-Key", b"X-No-Key")),
                "gRPC: above its rate": called(message(asked()), key=self.scarce),
                "gRPC: another's model": called(message(asked("mute"))),
                "gRPC: no key": called(message(asked()), key=""),
                "gRPC: a wrong key, given up": called(key="wrong", how=Http2Client.reset, hears=False),
            }
        return found


@pytest.fixture(params=[False, True], ids=["open", "keys"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    made = Ends(has_keys=request.param)
    await made.start()
    yield made
    await made.close()


def test_no_exception_lives_as_long_as_a_module() -> None:
    """Whoever raised it would add frames to it each time."""
    importlib.import_module("tenuto.deployments.gpulet.worker")
    lasting = {
        f"{module.__name__}.{name}"
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("tenuto.")
        for holder in (module, *(each for each in vars(module).values() if isinstance(each, type)))
        for name, value in vars(holder).items()
        if isinstance(value, BaseException)
    }
    assert lasting == set()


async def test_nothing_of_a_call_outlives_its_early_end(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ray.serve"), "disabled", True)  # the tests' log keeps what is said
    await asyncio.gather(*(ends.expired() for _ in range(RECORDS)))
    ways = ends.ways()
    if ends.has_keys:  # the others ask the same with and without keys
        ways = {name: way for name, way in ways.items() if "key" in name or "another's" in name or "rate" in name}
    grown = {}
    for name, way in ways.items():
        held = []
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(ROUNDS):
                for _ in range(TIMES):
                    await way()
                held.append(await held_blocks(ends))
        least = min(after - before for before, after in itertools.pairwise(held))
        if least >= MOST_BLOCKS * TIMES:
            grown[name] = least / TIMES
    assert grown == {}


async def held_blocks(ends: Ends) -> int:
    """Return how many blocks of memory the process has, once nothing is under way any more."""
    server = ends.bench.entry.server
    while server.status().unfinished_bytes or not all(each.is_idle for each in server.places.taken()):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    gc.collect()
    return sys.getallocatedblocks()
