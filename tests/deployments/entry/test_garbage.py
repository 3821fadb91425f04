"""Nothing that a client does leaves objects in circles: a collection of them stops the loop, 45 to 75 ms for 30,000."""

from __future__ import annotations

import asyncio
import gc
import gzip
import hashlib
import json
import socket
import struct
import types
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import tenuto
from tests.deployments.entry.test_gateway import PLAN, TENSOR, Bench
from tests.instruments.asking import PATIENCE_S, until

pytestmark = pytest.mark.door

OURS = str(Path(tenuto.__file__).parent)
KEY = "the key"
GOOD = json.dumps({"inputs": [TENSOR]}).encode()
ASKED = {"inputs": [{**TENSOR, "shape": [2, 2], "data": [1, 2, 3, 4]}], "outputs": [{"name": "y"}], "id": "i"}


def post(
    body: bytes = GOOD,
    *lines: str,
    path: str = "/v2/models/m/infer",
    key: str | None = KEY,
    method: str = "POST",
    version: str = "1.1",
) -> bytes:
    shown = [f"Authorization: Bearer {key}"] if key is not None else []
    head = [f"{method} {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(body)}", *shown, *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def get(path: str, *lines: str) -> bytes:
    return post(b"", *lines, path=path, method="GET")


def document(**said: Any) -> bytes:
    return post(json.dumps({"inputs": [TENSOR], **said}).encode())


def tensor(**said: Any) -> bytes:
    return document(inputs=[{**TENSOR, **said}])


def binary(values: bytes, *, size: int = 8, **said: Any) -> bytes:
    entry = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [entry], **said}).encode()
    return post(text + values, f"Inference-Header-Content-Length: {len(text)}")


NAN = struct.pack("<2f", float("nan"), 1.0)
CHUNKED = post().replace(b"Content-Length: %d" % len(GOOD), b"Transfer-Encoding: chunked")[: -len(GOOD)]
SENT = {
    "plain": post(),
    "of HTTP/1.0": post(version="1.0"),
    "as asked": post(json.dumps(ASKED).encode()),
    "binary": binary(bytes(8), parameters={"binary_data_output": True}),
    "traced": post(GOOD, "traceparent: 00-11111111111111111111111111111111-2222222222222222-01"),
    "through a proxy": post(GOOD, "X-Request-Start: t=1"),
    "classes": document(outputs=[{"name": "y", "parameters": {"classification": 1}}]),
    "not finite": binary(NAN),
    "not finite, as asked": binary(NAN, outputs=[{"name": "y"}]),
    "expired": post(GOOD, "X-SLO-Ms: 0"),
    "expired by its body": document(parameters={"slo_ms": 0}),
    "several at once": post() * 20,
    "in chunks": CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD),
    "in chunks that are none": CHUNKED + b"zz\r\n",
    "in chunks without end": CHUNKED + b"1;%b\r\nx\r\n" % (b"a" * 40_000),
    "in too many chunks": CHUNKED + b"100000\r\n%b\r\n" % bytes(1 << 20) * 2,
    "more than a body may have": post().replace(b"Length: %d" % len(GOOD), b"Length: 99999999999"),
    "large": post(GOOD + b" " * 20_000),
    "read aside": post(GOOD + b" " * 100_000),
    "read aside, damaged": post(b"[" * 100_000),
    "compressed": post(gzip.compress(GOOD), "Content-Encoding: gzip"),
    "compressed, damaged": post(gzip.compress(GOOD)[:30], "Content-Encoding: gzip"),
    "compressed, too large": post(gzip.compress(bytes(5 << 20)), "Content-Encoding: gzip"),
    "of an unknown encoding": post(GOOD, "Content-Encoding: br"),
    "no JSON": post(b"not JSON"),
    "no request": post(b"[]"),
    "ragged": tensor(data=[[1], [2, 3]]),
    "too few values": tensor(data=[1]),
    "words for numbers": tensor(data=["one", "two"]),
    "of another type": tensor(datatype="INT8"),
    "of another shape": tensor(shape=[7]),
    "of an unknown name": tensor(name="nobody"),
    "with an unknown output": document(outputs=[{"name": "nobody"}]),
    "with a deadline that is none": post(GOOD, "X-SLO-Ms: soon"),
    "with a priority": document(parameters={"priority": -1}),
    "with shared memory": document(outputs=[{"name": "y", "parameters": {"shared_memory_region": "r"}}]),
    "binary, too short": binary(bytes(7)),
    "binary, announced wrongly": binary(bytes(8), size=9),
    "a picture that is none": post(b"no picture", path="/predict/m"),
    "of an unknown model": post(path="/v2/models/nobody/infer"),
    "without a key": post(key=None),
    "with an unknown key": post(key="another"),
    "of a key for another model": post(key="of n"),
    "no HTTP": b"\x16\x03\x01" + bytes(300),
    "without a host": b"GET / HTTP/1.1\r\n\r\n",
    "too long a head": get("/", "X: " + "x" * 40_000),
    "an upgrade": get("/v2", "Connection: upgrade", "Upgrade: websocket"),
    "an expectation": post(GOOD, "Expect: 100-continue"),
    "an expectation that is refused": post(GOOD, "Expect: 100-continue", path="/v2/models/nobody/infer"),
    "half a head": b"POST / HT",
    "half a body": post()[:-5],
    "half a large body": post(GOOD + b" " * 40_000)[:-5],
    "nothing": b"",
    "HEAD": post(b"", path="/v2", method="HEAD"),
    **{path: get(path) for path in ("/v2", "/v2/health/ready", "/v2/models/m", "/v2/models/m/config", "/nothing")},
    **{path: get(path) for path in ("/v2/models/stats", "/v2/models/m/stats", "/v2/models/nobody", "/docs")},
    "the list": post(b"{}", path="/v2/repository/index"),
    "a method that is none": get("/v2/repository/index"),
    "too large for that": post(bytes(1 << 17), path="/v2/repository/index"),
}


class Door(Bench):
    """A gateway with keys, whose operators have a port of their own."""

    async def send(self, sent: bytes, *, how: str = "to its end") -> bytes:
        """Send bytes on a connection of their own; `how`: `to its end`, `and leaves`, or `and resets`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = b""
        try:
            writer.write(sent)
            if how == "to its end":
                writer.write_eof()
                answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
            elif how == "and resets":
                await asyncio.sleep(0)
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except ConnectionError:
            pass  # what was sent beyond a refusal was not read
        writer.close()
        return answer

    async def until_alone(self) -> None:
        """Wait until nobody is connected any more."""
        await until(lambda: not self.entry.server.status().connections)

    async def until_ready(self) -> None:
        """Wait until all gpu-lets are connected."""
        async with asyncio.timeout(PATIENCE_S):
            while b" 200 OK" not in await self.send(get("/v2/health/ready")):
                await asyncio.sleep(0.005)


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    made = Door()
    for gpulet in made.gpulets.values():
        await gpulet.start()
    keys = [
        {"name": "anna", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), "rate_rps": 1e6},
        {"name": "ben", "sha256": hashlib.sha256(b"of n").hexdigest(), "models": ["n"]},
    ]
    await made.follow(PLAN, keys=keys, max_body_mib=1)
    await made.until_ready()
    yield made
    await made.close()


def name_of(found: object) -> str:
    """Return what an object is called that belongs to us; "" where it is somebody else's."""
    code = None
    if isinstance(found, types.FrameType):
        code = found.f_code
    elif isinstance(found, types.TracebackType):
        code = found.tb_frame.f_code
    elif isinstance(found, types.FunctionType):
        code = found.__code__
    elif isinstance(found, types.CoroutineType):
        code = found.cr_code
    if code is not None:
        return code.co_qualname if code.co_filename.startswith(OURS) else ""
    kind = type(found)
    return kind.__qualname__ if kind.__module__.startswith(("tenuto", "httptools")) else ""


class Garbage:
    """What of ours only a collection finds, by name, once nobody is connected."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def __aenter__(self) -> Garbage:
        await self._door.until_alone()
        gc.collect()
        gc.disable()
        gc.freeze()
        return self

    async def __aexit__(self, *_: object) -> None:
        gc.unfreeze()
        gc.enable()

    async def found(self) -> dict[str, int]:
        await self._door.until_alone()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            return dict(Counter(name for each in gc.garbage if (name := name_of(each))))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.collect()


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of the gpu-let of this test
@pytest.mark.parametrize("how", ["to its end", "and leaves", "and resets"])
async def test_no_request_leaves_a_circle(door: Door, how: str, caplog: pytest.LogCaptureFixture) -> None:
    for sent in SENT.values():  # what is made once
        await door.send(sent, how=how)
    left = {}
    async with Garbage(door) as garbage:
        for name, sent in SENT.items():
            await door.send(sent, how=how)
            if found := await garbage.found():
                left[name] = found
    assert left == {}
    assert [line.getMessage() for line in caplog.records if line.levelname == "ERROR"] == []


async def test_nor_one_whose_client_or_gpulet_is_gone(door: Door) -> None:
    gpulet = door.gpulets["a"]
    gpulet.hold = True
    soon = "X-SLO-Ms: 300"
    sent = (post(GOOD, soon), post(json.dumps(ASKED).encode(), soon), post(GOOD + b" " * 40_000, soon))
    for _ in range(2):
        async with Garbage(door) as garbage:
            waiting = [asyncio.create_task(door.send(each)) for each in sent]
            await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
            await asyncio.gather(*(door.send(each, how="and resets") for each in sent))
            gpulet.die()
            await asyncio.gather(*waiting)
            assert await garbage.found() == {}
        await gpulet.start()
        await door.until_ready()
