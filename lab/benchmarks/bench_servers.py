"""The gateway's own HTTP server beside two well-kept ones, each with nothing behind it: processor time of a request.

    python lab/benchmarks/bench_servers.py [--seconds 3] [--rounds 5]

Every server runs alone in a process, on uvloop, and answers a POST with twelve bytes of JSON once the body is there.
The processor time of that process, divided by the requests it answered, depends little on what else the machine does;
requests per second do. uvicorn reads with httptools, as ours does; aiohttp with a parser of its own in C. Ours does
three things more: it notes when bytes arrived, puts large bodies where gpu-lets can read them, and bounds what a client
may hold. Closed loop, 16 connections, one after the other and in turns; medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import uvloop
from serving import heading

from tenuto.deployments.serve.launcher import unused_port

_CONNECTIONS = 16
_ANSWER = b'{"ok": true}'
_BODIES = {"73 bytes": bytes(73), "a picture, 602,112 bytes": bytes(602_112)}


async def _ours(port: int) -> None:
    from tenuto.deployments.entry.http.exchange import JSON
    from tenuto.deployments.entry.http.http1 import HttpConnection, HttpExchange
    from tenuto.deployments.entry.http.open_connections import Limits
    from tenuto.deployments.entry.http.server import HttpServer
    from tenuto.deployments.wire.arena import Arena

    class Service:
        def refusal(self, _exchange: HttpExchange) -> None:
            return None

        def handle(self, exchange: HttpExchange) -> None:
            exchange.respond(200, JSON, [_ANSWER])

    await HttpServer(Service(), Arena(1 << 28), Limits()).listen("127.0.0.1", port, HttpConnection)
    await asyncio.Event().wait()


async def _uvicorn(port: int) -> None:
    import uvicorn

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        b"".join(parts)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_ANSWER))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": _ANSWER})

    options = {"http": "httptools", "lifespan": "off", "access_log": False, "log_level": "error"}
    await uvicorn.Server(uvicorn.Config(app, port=port, **options)).serve()  # type: ignore[arg-type]


async def _aiohttp(port: int) -> None:
    from aiohttp import web

    async def handle(request: web.BaseRequest) -> web.Response:
        await request.read()
        return web.Response(body=_ANSWER, content_type="application/json")

    server = web.Server(handle)
    await asyncio.get_running_loop().create_server(server, "127.0.0.1", port)
    await asyncio.Event().wait()


_SERVERS: dict[str, Callable[[int], Any]] = {"ours": _ours, "uvicorn (httptools)": _uvicorn, "aiohttp": _aiohttp}


def _serve(name: str, port: int, pipe: Any) -> None:
    async def told() -> None:
        asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: pipe.recv() and pipe.send(time.process_time()))
        await _SERVERS[name](port)

    uvloop.run(told())


class _Client(asyncio.Protocol):
    """Asks again as soon as it has an answer."""

    def __init__(self, asked: bytes, answered: list[int]) -> None:
        self._asked = asked
        self._answered = answered
        self._came = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._asked)

    def data_received(self, data: bytes) -> None:
        self._came += data
        head, found, body = self._came.partition(b"\r\n\r\n")
        if found and len(body) >= len(_ANSWER):
            assert head.startswith(b"HTTP/1.1 200"), head
            self._came = b""
            self._answered[0] += 1
            self.transport.write(self._asked)


async def _load(port: int, asked: bytes, seconds: float, pipe: Any) -> tuple[float, float]:
    """Return processor time of a request in µs, and requests per second."""
    answered, loop = [0], asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: _Client(asked, answered), "127.0.0.1", port))[0]
        for _ in range(_CONNECTIONS)
    ]
    await asyncio.sleep(0.5)
    pipe.send(1)
    cpu, count, began_at = pipe.recv(), answered[0], time.monotonic()
    await asyncio.sleep(seconds)
    pipe.send(1)
    used, done, passed_s = pipe.recv() - cpu, answered[0] - count, time.monotonic() - began_at
    for client in clients:
        client.abort()
    await asyncio.sleep(0.05)
    return 1e6 * used / done, done / passed_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    heading("servers with nothing behind them")
    print(", ".join(f"{name} {version(name)}" for name in ("uvicorn", "httptools", "aiohttp", "uvloop")))
    method = multiprocessing.get_context("spawn")
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    processes = []
    for name in _SERVERS:
        (here, there), port = method.Pipe(), unused_port()
        process = method.Process(target=_serve, args=(name, port, there), daemon=True)
        process.start()
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        processes.append((name, port, here, process))
    for _ in range(args.rounds):
        for name, port, pipe, _process in processes:
            for what, body in _BODIES.items():
                head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
                row = uvloop.run(_load(port, head + body, args.seconds, pipe))
                found.setdefault((what, name), []).append(row)
    print("| body | server | processor time | beside ours | requests/s |\n|---|---|---|---|---|")
    for (what, name), rows in sorted(found.items(), key=lambda pair: pair[0][0] != "73 bytes"):
        cpu, rate = (statistics.median(values) for values in zip(*rows, strict=True))
        ours = statistics.median(mine[0] / its[0] for its, mine in zip(found[what, "ours"], rows, strict=True))
        print(f"| {what} | {name} | {cpu:.0f} µs | {ours:.2f} | {rate:.0f} |")
    for *_, process in processes:
        process.kill()


if __name__ == "__main__":
    main()
