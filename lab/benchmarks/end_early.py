"""End calls early in every way, over gRPC and HTTP/1.1, against a real `tenuto serve --emulate`, and print what the
gateway's process holds.

    python lab/benchmarks/end_early.py [--calls 200000] [--tenuto COMMAND]

The calls are spread evenly over all ways. Memory is that of the process beside shared memory; it is printed after each
tenth of the calls, and must stay as it is. `tests/deployments/entry/test_early_ends.py` counts the same exactly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from serving import heading
from walk_attacks import _KEY, Served, request, served

sys.path.insert(0, str(Path(__file__).parents[2]))
from tenuto.deployments.entry.protocols.grpc_messages import InferRequest
from tests.instruments.http2_client import INFER, Http2Client, message

_AT_ONCE = 100
_HEALTH, _STREAM = "grpc.health.v1.Health/Check", INFER.replace("ModelInfer", "ModelStreamInfer")
_BINARY = "Inference-Header-Content-Length: 9"
Way = Callable[[], Awaitable[list[str]]]


def grpc_ways(at: Served) -> dict[str, Way]:
    """Return the early ends of calls of gRPC; each makes `_AT_ONCE` calls on one connection."""
    asked = InferRequest(model_name="synthetic", raw_input_contents=[bytes(4)])
    asked.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    good, unknown = message(asked.SerializeToString()), message(InferRequest(model_name="no").SerializeToString())
    with_key = ("x-api-key", _KEY)
    kept: list[Http2Client] = []

    def way(data: bytes, *metadata: tuple[str, str], path: str = INFER, key: bool = True, resets: bool = False) -> Way:
        async def go() -> list[str]:
            if not kept:
                kept.append(await Http2Client.connect(at.grpc_port))
            client = kept[0]
            streams = []
            for _ in range(_AT_ONCE):
                stream = client.begin(path, *metadata, *([with_key] if key else []))
                client.data(stream, data, is_last=not resets)
                if resets:
                    client.reset(stream)
                else:
                    streams.append(stream)
            await client.writer.drain()
            told = [await client.hear(stream) for stream in streams]
            if client.is_lost or any(each.startswith("goaway") for each in told):
                kept.clear()
            return told or ["reset"] * _AT_ONCE

        return go

    return {
        "too large": way(message(announced=1 << 30)),
        "no memory for a message": way(message(bytes(10_000), announced=64 << 20)),
        "compressed": way(message(b"x", compressed=1)),
        "noise": way(message(b"\xff" * 40)),
        "two messages": way(2 * good),
        "no message": way(b""),
        "unknown model": way(unknown),
        "no time": way(good, ("x-slo-ms", "0")),
        "no call of ours": way(good, path="x/y"),
        "no key": way(good, key=False),
        "a health check that is too large": way(message(announced=1 << 20), path=_HEALTH, key=False),
        "metadata of 20 KiB": way(good, ("more", "x" * 20_000)),
        "another length": way(good, ("content-length", "7")),
        "a stream of noise": way(message(b"\xff" * 40), path=_STREAM),
        "given up": way(good, resets=True),
        "given up amid a message": way(message(bytes(5000), announced=60_000), resets=True),
        "given up with a wrong key": way(b"", ("x-api-key", "wrong"), key=False, resets=True),
    }


def http_ways(at: Served) -> dict[str, Way]:
    """Return the early ends of requests of HTTP/1.1; each makes `_AT_ONCE` requests, in order on few connections."""
    tensor = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}).encode()

    def way(data: bytes, *, times: int = 10, leaves: bool = False) -> Way:
        async def one() -> list[str]:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
                writer.write(data * times)
                told = []
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await writer.drain()
                    while not leaves and len(told) < times:
                        head = (await reader.readuntil(b"\r\n\r\n")).lower()
                        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
                        told.append(head[9:12].decode())
                writer.transport.abort()
                return told or ["left"]
            return ["not connected"]

        async def go() -> list[str]:
            found = await asyncio.gather(*(one() for _ in range(_AT_ONCE // times)))
            return [each for told in found for each in told]

        return go

    chunks = request(b"8000\r\n" + bytes(0x8000), "Transfer-Encoding: chunked", length="")
    return {
        "no JSON": way(request(b"{")),
        "unknown model": way(request(tensor, path="/v2/models/no/infer")),
        "no time": way(request(tensor, "X-SLO-Ms: 0")),
        "no key": way(request(tensor, key=None)),
        "too large": way(request(b"", _BINARY, length=str(1 << 30)), times=1),
        "malformed": way(b"nonsense\r\n\r\n", times=1),
        "left amid a body": way(request(bytes(20_000), _BINARY, length="60000"), times=1, leaves=True),
        "left amid chunks": way(chunks, times=1, leaves=True),
        "left amid a request": way(request(tensor), times=1, leaves=True),
        "a stream that is left": way(
            request(b'{"model":"writer","prompt":"x","max_tokens":50,"stream":true}', path="/v1/completions"),
            times=1,
            leaves=True,
        ),
    }


async def end_early(at: Served, calls: int) -> None:
    """Make so many calls, and print what they were told, and memory."""
    ways = {
        **{f"gRPC: {name}": way for name, way in grpc_ways(at).items()},
        **{f"HTTP: {name}": way for name, way in http_ways(at).items()},
    }
    told: dict[str, Counter[str]] = {name: Counter() for name in ways}
    done, tenth, began_at = 0, 0, time.monotonic()
    print(f"{'calls':>9} {'MiB':>8} {'s':>6}")
    while done < calls:
        for name, way in ways.items():
            told[name].update(await way())
            done += _AT_ONCE
        if 10 * done >= tenth * calls:
            tenth += 1
            print(f"{done:9,} {at.memory_mib:8.1f} {time.monotonic() - began_at:6.0f}", flush=True)
    print()
    for name, counts in told.items():
        print(f"{name:45} {', '.join(f'{count} × {what}' for what, count in counts.most_common(3))}")


def main() -> None:
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--tenuto", default=shutil.which("tenuto") or "tenuto")
    options = parser.parse_args()
    heading("Calls that end early")
    with tempfile.TemporaryDirectory() as folder, served(options.tenuto, Path(folder)) as at:
        asyncio.run(end_early(at, options.calls))


if __name__ == "__main__":
    main()
