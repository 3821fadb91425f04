"""A small Open Inference Protocol server for tests: answers as told, on its own thread, and can die in the middle."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.instruments.live import PATIENCE_S

OK_HEADERS = (
    "X-Tenuto-Queue-Ms: 3.000\r\nX-Tenuto-Batching-Ms: 2.000\r\nX-Tenuto-Execution-Ms: 5.000\r\n"
    "X-Tenuto-Batch-Size: 4\r\nX-Tenuto-Gpulet: n0/0/A\r\n"
)


@dataclass
class Answer:
    """What to answer to one inference request. `status` 0 closes the connection, None never answers.

    `once`: what must hold before it is answered, so that no test guesses how long something takes. `pieces`: a body
    that is sent in so many chunks, with a pause of `gap_s` between them.
    """

    status: int | None = 200
    delay_s: float = 0.0
    body: bytes = b'{"outputs":[]}'
    headers: str = OK_HEADERS
    chunked: bool = False
    once: Callable[[], bool] = lambda: True
    pieces: tuple[bytes, ...] = ()
    gap_s: float = 0.0


@dataclass
class FakeServer:
    """`answer(number, model, headers)` decides per inference request; requests are kept for inspection."""

    models: dict[str, dict[str, Any]]
    answer: Callable[[int, str, dict[str, str]], Answer] = lambda _number, _model, _headers: Answer()
    plan: dict[str, Any] | None = None
    emulated: bool = True
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def die(self) -> None:
        """Stop listening and cut every connection."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, started: threading.Event, ended: asyncio.Event) -> None:
        # A client opens hundreds of connections at once; of those that do not fit the queue, each waits for a second.
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 24, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        started.set()
        await ended.wait()
        self._cut()
        await asyncio.sleep(0)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.strip().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._respond(writer, first.split(" ")[1], headers, body):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _respond(self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], body: bytes) -> bool:
        if not path.endswith(("/infer", "/generate_stream", "/v1/completions")):
            status, document = self._document(path)
            _write(writer, status, json.dumps(document).encode(), "")
            return True
        self.requests.append((path, headers, body))
        model = json.loads(body)["model"] if path == "/v1/completions" else path.split("/")[3]
        answer = self.answer(len(self.requests) - 1, model, headers)
        if answer.delay_s:
            await asyncio.sleep(answer.delay_s)
        while not answer.once():
            await asyncio.sleep(0.005)
        if answer.status is None:
            await asyncio.sleep(3600)
        if answer.status == 0:
            return False
        assert answer.status is not None
        if answer.pieces:
            writer.write(f"HTTP/1.1 200 X\r\n{answer.headers}Transfer-Encoding: chunked\r\n\r\n".encode())
            for piece in answer.pieces:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await asyncio.sleep(answer.gap_s)
            writer.write(b"0\r\n\r\n")
            return True
        _write(writer, answer.status, answer.body, answer.headers, chunked=answer.chunked)
        return True

    def _document(self, path: str) -> tuple[int, Any]:
        if path == "/status":
            return 200, {
                "plan": self.plan,
                "models": {},
                "gpulets": [{"id": "n0/0/A", "up": True, "emulated": self.emulated}],
            }
        name = path.removeprefix("/v2/models/").removeprefix("/v1/models/")
        if name in self.models:
            return 200, {"name": name, **self.models[name]}
        return 404, {"error": f"unknown model '{name}'"}


def _write(writer: asyncio.StreamWriter, status: int, body: bytes, headers: str, *, chunked: bool = False) -> None:
    if chunked:
        framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        length = "Transfer-Encoding: chunked\r\n"
    else:
        framed, length = body, f"Content-Length: {len(body)}\r\n"
    writer.write(f"HTTP/1.1 {status} X\r\n{headers}{length}\r\n".encode() + framed)


def signature(*shape: int, datatype: str = "FP32", name: str = "input") -> dict[str, Any]:
    """Return model metadata with one input."""
    return {"inputs": [{"name": name, "datatype": datatype, "shape": [-1, *shape]}], "outputs": []}


@contextmanager
def fake_server(models: dict[str, dict[str, Any]] | None = None, **settings: Any) -> Iterator[FakeServer]:
    """Serve until the block ends; by default one model `m` with four floats in."""
    server = FakeServer(models if models is not None else {"m": signature(4)}, **settings)
    started = threading.Event()
    ended = asyncio.Event()

    def work() -> None:
        asyncio.set_event_loop(server._loop)
        server._loop.run_until_complete(server._serve(started, ended))
        for task in asyncio.all_tasks(server._loop):
            task.cancel()
        server._loop.run_until_complete(asyncio.sleep(0.01))
        server._loop.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield server
    finally:
        server._loop.call_soon_threadsafe(ended.set)
        thread.join(PATIENCE_S)
