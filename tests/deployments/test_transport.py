import asyncio
import contextlib
from typing import Any

import pytest

from tenuto.deployments.wire.transport import FrameProtocol, connect, listen


async def _echo_server(name: str, token: str = "secret") -> asyncio.Server:
    def on_frame(protocol: FrameProtocol, header: dict[str, Any], body: memoryview) -> None:
        protocol.send({"echo": header}, [body])

    return await listen(name, token, on_frame, lambda _protocol, _error: None)


class _Inbox:
    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[dict[str, Any], bytes]] = asyncio.Queue()
        self.lost = asyncio.Event()

    def on_frame(self, _protocol: FrameProtocol, header: dict[str, Any], body: memoryview) -> None:
        self.frames.put_nowait((header, bytes(body)))

    def on_lost(self, _protocol: FrameProtocol, _error: BaseException | None) -> None:
        self.lost.set()


@pytest.mark.parametrize("address", ["\0tenuto-test-echo", ("127.0.0.1", 0)])
async def test_frames_arrive_whole_and_in_order(address: Any) -> None:
    server = await _echo_server(address)
    target = address if isinstance(address, str) else server.sockets[0].getsockname()
    inbox = _Inbox()
    connection = await connect(target, "secret", inbox.on_frame, inbox.on_lost)
    big = bytes(range(256)) * 4096
    connection.send({"n": 1}, [b"ab", memoryview(b"cd")])
    connection.send({"n": 2})
    connection.send({"n": 3}, [big, big])
    answers = [await asyncio.wait_for(inbox.frames.get(), 5) for _ in range(3)]
    assert answers == [({"echo": {"n": 1}}, b"abcd"), ({"echo": {"n": 2}}, b""), ({"echo": {"n": 3}}, big + big)]
    connection.close()
    await asyncio.wait_for(inbox.lost.wait(), 5)
    assert not connection.is_connected
    server.close()


async def test_a_wrong_token_is_refused() -> None:
    server = await _echo_server("\0tenuto-test-token")
    inbox = _Inbox()
    connection = await connect("\0tenuto-test-token", "guess", inbox.on_frame, inbox.on_lost)
    connection.send({"n": 1})
    await asyncio.wait_for(inbox.lost.wait(), 5)
    assert inbox.frames.empty()
    server.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, b"\x02\0\0\0" + bytes(8) + b"{]"])
async def test_garbage_closes_the_connection_and_not_the_server(garbage: bytes) -> None:
    server = await _echo_server(("127.0.0.1", 0))  # type: ignore[arg-type]
    host, port = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(garbage)
    with contextlib.suppress(ConnectionResetError):  # closed with our garbage unread
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    inbox = _Inbox()
    connection = await connect((host, port), "secret", inbox.on_frame, inbox.on_lost)
    connection.send({"still": "here"})
    assert (await asyncio.wait_for(inbox.frames.get(), 5))[0] == {"echo": {"still": "here"}}
    connection.close()
    server.close()


async def test_connecting_to_nobody_is_an_os_error() -> None:
    with pytest.raises(OSError, match=r"refused"):
        await connect("\0tenuto-test-nobody", "t", lambda *_: None, lambda *_: None)


async def test_the_memory_of_large_bodies_is_used_again_only_when_nobody_looks() -> None:
    kept: list[memoryview] = []
    arrived = asyncio.Event()

    def on_frame(_protocol: FrameProtocol, _header: dict[str, Any], body: memoryview) -> None:
        kept.append(body)
        arrived.set()

    name = "\0tenuto-test-large"
    server = await listen(name, "t", on_frame, lambda *_: None)
    client = await connect(name, "t", lambda *_: None, lambda *_: None)
    size = (16 << 20) + 1

    async def send(value: int, count: int = size) -> memoryview:
        arrived.clear()
        client.send({"x": 1}, [bytes([value]) * count])
        await asyncio.wait_for(arrived.wait(), 20)
        return kept.pop()

    first = await send(1)
    second = await send(2)
    assert first.obj is not second.obj
    assert (first[0], first[-1], second[0]) == (1, 1, 2)
    part, address = first[5:6], id(first.obj)
    del first, second
    third = await send(3)
    assert id(third.obj) != address
    assert part[0] == 1  # a slice keeps its memory too
    del part, third
    buffers = {id((await send(number)).obj) for number in range(4, 8)}
    assert len(buffers) <= 2
    smaller = await send(9, size - 1)
    assert (len(smaller), smaller[-1]) == (size - 1, 9)
    client.close()
    server.close()
