"""Frames over sockets, on an event loop and in threads: whole, in order, and nothing for strangers."""

import asyncio
import contextlib
import itertools
import socket
import ssl
import struct
import sys
import threading
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.wire import frames
from tenuto.deployments.wire.encryption import Identity
from tenuto.deployments.wire.frames import (
    FrameProtocol,
    FrameReader,
    FrameSocket,
    WrongFrameError,
    connect,
    listen,
    listener,
)
from tenuto.deployments.wire.messages import BatchFailed, Hello, Message, RunBatch, encode

PATIENCE_S = 60.0


MUCH = 1 << 30
LETTERS = st.characters(exclude_categories=["Cs"])  # all that UTF-8 has


def accept(token: str = "secret", most: int = MUCH) -> Any:
    def echo(protocol: FrameProtocol, message: Message, body: memoryview) -> None:
        protocol.send(message, [body])

    def greet(protocol: FrameProtocol, _hello: Hello) -> None:
        protocol.limit_bodies(most)

    return lambda: FrameProtocol(echo, lambda *_: None, expect_token=token, on_hello=greet)


class Inbox:
    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[Message, bytes]] = asyncio.Queue()
        self.lost = asyncio.Event()

    def on_message(self, _protocol: FrameProtocol, message: Message, body: memoryview) -> None:
        self.frames.put_nowait((message, bytes(body)))

    def on_lost(self, _protocol: FrameProtocol, _error: BaseException | None) -> None:
        self.lost.set()

    async def next(self) -> tuple[Message, bytes]:
        return await asyncio.wait_for(self.frames.get(), PATIENCE_S)


async def test_a_machine_that_is_gone_without_a_word_is_noticed_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the kernel is told: no test may cut a line."""
    option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    found = []

    class Seen(FrameProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            found.append(transport.get_extra_info("socket").getsockopt(*option))

    monkeypatch.setattr(frames, "FrameProtocol", Seen)
    server = await listen(("127.0.0.1", 0), lambda: Seen(lambda *_: None, lambda *_: None, expect_token=""))
    target = server.sockets[0].getsockname()
    connection = await connect(target, Hello("", ""), lambda *_: None, lambda *_: None)
    with socket.create_connection(target) as made:
        FrameSocket(made)
        found.append(made.getsockopt(*option))
    while len(found) < 3:
        await asyncio.sleep(0.01)
    assert found == [1000] * 3
    connection.close()
    server.close()


@pytest.mark.parametrize(
    ("address", "identity"),
    [("\0tenuto-test-echo", None), (("127.0.0.1", 0), None), (("127.0.0.1", 0), Identity())],
    ids=["unix", "tcp", "tls"],
)
async def test_frames_arrive_whole_and_in_order(address: Any, identity: Identity | None) -> None:
    server = await listen(address, accept(), identity)
    target = address if isinstance(address, str) else server.sockets[0].getsockname()
    inbox = Inbox()
    certificate = identity.certificate if identity else ""
    connection = await connect(target, Hello("secret"), inbox.on_message, inbox.on_lost, certificate=certificate)
    connection.limit_bodies(MUCH)
    big = bytes(range(256)) * 4096
    connection.send(BatchFailed(1, ""), [b"ab", memoryview(b"cd")])
    connection.send(BatchFailed(2, ""))
    connection.send(BatchFailed(3, ""), [big, big])
    assert [await inbox.next() for _ in range(3)] == [
        (BatchFailed(1, ""), b"abcd"),
        (BatchFailed(2, ""), b""),
        (BatchFailed(3, ""), big + big),
    ]
    connection.close()
    await asyncio.wait_for(inbox.lost.wait(), PATIENCE_S)
    assert not connection.is_connected
    server.close()


@given(
    sent=st.lists(st.tuples(st.text(LETTERS, max_size=50), st.binary(max_size=3000)), max_size=6),
    cuts=st.lists(st.integers(1, 4000), min_size=1, max_size=40),
)
def test_frames_survive_any_cutting_of_the_stream(sent: list[tuple[str, bytes]], cuts: list[int]) -> None:
    stream = b"".join(b"".join(frames.framed(BatchFailed(1, reason), [body])) for reason, body in sent)
    reader = FrameReader(MUCH)
    found: list[tuple[str, bytes]] = []
    at = 0
    while at < len(stream):
        room = reader.room()
        piece = stream[at : at + min(cuts[at % len(cuts)], len(room))]
        room[: len(piece)] = piece
        at += len(piece)
        reader.received(len(piece))
        while (frame := reader.next_frame()) is not None:
            message, body = frame
            assert isinstance(message, BatchFailed)
            found.append((message.reason, bytes(body)))
    assert found == sent


@pytest.mark.parametrize("hello", [Hello("guess"), Hello("ge\u00fcbt"), BatchFailed(1, "")])
async def test_a_stranger_is_refused(hello: Any) -> None:
    server = await listen("\0tenuto-test-token", accept())
    inbox = Inbox()
    connection = await connect("\0tenuto-test-token", hello, inbox.on_message, inbox.on_lost)
    connection.send(BatchFailed(1, ""))
    await asyncio.wait_for(inbox.lost.wait(), PATIENCE_S)
    assert inbox.frames.empty()
    server.close()


@given(st.binary(max_size=400), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(1, 50))
def test_any_bytes_are_frames_or_refused_and_nothing_is_allocated_for_a_promise(
    noise: bytes, message_bytes: int, body_bytes: int, step: int
) -> None:
    reader = FrameReader(most_body_bytes=0)  # as it is before a peer has shown its token
    reader.most_message_bytes = 4096
    data = noise[:13] + struct.pack("<IQ", message_bytes, body_bytes) + noise
    with contextlib.suppress(WrongFrameError):
        for at in range(0, len(data), step):
            piece = data[at : at + step]
            while piece:
                room = reader.room()
                count = min(len(room), len(piece))
                room[:count] = piece[:count]
                reader.received(count)
                piece = piece[count:]
                while reader.next_frame() is not None:
                    pass
    assert len(reader.room()) <= 1 << 16


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
    struct.pack("<IQ", 2, 0) + b"{]",
    struct.pack("<IQ", 20, 1 << 30) + encode(Hello("secret")).ljust(20),  # a gigabyte, before any token
    struct.pack("<IQ", 1 << 20, 0),
]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_closes_the_connection_and_not_the_server(garbage: bytes) -> None:
    server = await listen(("127.0.0.1", 0), accept())
    host, port = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(garbage)
    with contextlib.suppress(ConnectionResetError):  # closed with our garbage unread
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()
    inbox = Inbox()
    connection = await connect((host, port), Hello("secret"), inbox.on_message, inbox.on_lost)
    connection.send(BatchFailed(7, ""))
    assert await inbox.next() == (BatchFailed(7, ""), b"")
    connection.close()
    server.close()


async def test_a_body_beyond_the_limit_closes_the_connection() -> None:
    server = await listen("\0tenuto-test-limit", accept(most=1000))
    inbox = Inbox()
    connection = await connect("\0tenuto-test-limit", Hello("secret"), inbox.on_message, inbox.on_lost)
    connection.limit_bodies(1000)
    connection.limit_bodies(10)  # what was asked for by the larger one may still come
    connection.send(BatchFailed(1, ""), [bytes(1000)])
    assert (await inbox.next())[1] == bytes(1000)
    connection.send(BatchFailed(2, ""), [bytes(1001)])
    await asyncio.wait_for(inbox.lost.wait(), PATIENCE_S)
    server.close()


async def test_nobody_else_can_pose_as_an_encrypted_peer() -> None:
    identity = Identity()
    server = await listen(("127.0.0.1", 0), accept(), identity)
    where = server.sockets[0].getsockname()
    inbox = Inbox()
    with pytest.raises(ssl.SSLCertVerificationError):
        await connect(where, Hello("secret"), inbox.on_message, inbox.on_lost, certificate=Identity().certificate)
    plain = await connect(where, Hello("secret"), inbox.on_message, inbox.on_lost)
    plain.send(BatchFailed(1, ""))
    await asyncio.wait_for(inbox.lost.wait(), PATIENCE_S)
    assert inbox.frames.empty()
    server.close()


async def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FIRST_FRAME_S", 0.01)
    server = await listen("\0tenuto-test-silent", accept())
    reader, writer = await asyncio.open_unix_connection("\0tenuto-test-silent")
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()
    server.close()


async def test_connecting_to_nobody_is_an_os_error() -> None:
    with pytest.raises(OSError, match=r"refused"):
        await connect("\0tenuto-test-nobody", Hello("t"), lambda *_: None, lambda *_: None)


async def test_the_memory_of_large_bodies_is_used_again_only_when_nobody_looks() -> None:
    kept: list[memoryview] = []
    arrived = asyncio.Event()

    def on_message(_protocol: FrameProtocol, _message: Message, body: memoryview) -> None:
        kept.append(body)
        arrived.set()

    name = "\0tenuto-test-large"
    server = await listen(
        name,
        lambda: FrameProtocol(
            on_message, lambda *_: None, expect_token="t", on_hello=lambda protocol, _: protocol.limit_bodies(MUCH)
        ),
    )
    client = await connect(name, Hello("t"), lambda *_: None, lambda *_: None)
    size = (16 << 20) + 1

    async def send(value: int, count: int = size) -> memoryview:
        arrived.clear()
        client.send(BatchFailed(1, ""), [bytes([value]) * count])
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)
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


def pair(token: str = "t") -> tuple[FrameSocket, FrameSocket]:
    """Two ends of one connection, the second of which has been greeted."""
    waiting = listener("\0tenuto-test-threads")
    client = socket.socket(socket.AF_UNIX)
    client.connect("\0tenuto-test-threads")
    server, _ = waiting.accept()
    waiting.close()
    ends = FrameSocket(client), FrameSocket(server)
    for end in ends:
        end.limit_bodies(MUCH)
    ends[0].send(Hello(token))
    return ends


def test_threads_exchange_frames_larger_than_what_a_socket_takes() -> None:
    client, server = pair()
    assert server.greet("t") == Hello("t")
    batch = RunBatch(1, "m", [("m", 2)], [], [])
    bodies = [bytes([number]) * (1 << 20) for number in range(4)]
    sender = threading.Thread(target=client.send, args=(batch, bodies))
    sender.start()
    message, body = server.receive()
    sender.join()
    assert message == batch
    assert bytes(body) == b"".join(bodies)
    client.close()
    with pytest.raises(OSError, match="closed by the peer"):
        server.receive()
    server.send(BatchFailed(1, ""))  # to nobody: silent
    server.close()


def stream(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as waiting:
        client = socket.create_connection(waiting.getsockname())
        return waiting.accept()[0], client


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("action", ["tick", "is_lost", "send"])
def test_whoever_closes_it_in_the_midst_ends_no_other_thread(kind: str, action: str) -> None:
    """One thread closes a connection that is gone, while another beats or answers: before any line of that."""
    act: Any = {
        "tick": lambda end: end.tick(),
        "is_lost": lambda end: end.is_lost(),
        "send": lambda end: end.send(BatchFailed(1, "")),
    }[action]
    for before in itertools.count():
        near, far = stream(kind)
        end = FrameSocket(near)
        end.watch()
        lines = 0

        def trace(frame: FrameType, event: str, _argument: Any, end: Any = end, before: int = before) -> Any:
            nonlocal lines
            if frame.f_code.co_filename != frames.__file__:
                return None
            if event == "line":
                lines += 1
                if lines == before:
                    sys.settrace(None)
                    end.close()
            return trace

        sys.settrace(trace)
        try:
            act(end)
        finally:
            sys.settrace(None)
            far.close()
            end.close()
        if lines < before:
            break
    assert before > 3


def test_a_stranger_who_sends_a_byte_now_and_then_has_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FIRST_FRAME_S", 0.05)
    far, near = socket.socketpair()
    server, refused = FrameSocket(near), threading.Event()
    stranger = threading.Thread(target=lambda: refused.set() if server.greet("t") is None else None)
    stranger.start()
    far.sendall(struct.pack("<IQ", 4096, 0))
    sent = 0
    with contextlib.suppress(BrokenPipeError):
        while not refused.wait(0.005) and sent < 4000:
            far.sendall(b"\0")
            sent += 1
    stranger.join(PATIENCE_S)
    far.close()
    server.close()
    assert sent < 4000


@pytest.mark.parametrize("token", ["guess", "ge\u00fcbt", ""])
def test_a_thread_refuses_a_stranger(token: str) -> None:
    client, server = pair(token)
    assert server.greet("t") is None
    client.close()
    server.close()
