"""Silence is noticed in time, and only that of a peer that could have spoken: in made-up time for any order of events,
then over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.wire.frames import FrameProtocol, FrameSocket, connect, listen, listener
from tenuto.deployments.wire.liveness import (
    BEAT_S,
    GIVEN_UP_S,
    PATIENT_TICKS,
    SILENT_TICKS,
    Processor,
    Silence,
    end_if_stopped,
    is_stopped,
    process_behind,
    processor_of,
)
from tenuto.deployments.wire.messages import Hello
from tests.instruments.live import PATIENCE_S, until

TICK = st.tuples(
    st.sampled_from(["heard", "silent"]),
    st.sampled_from([1.0, 1.2, 1.6, 5.0, 100.0]),  # how long after the last tick it comes, in intervals
    st.sampled_from([0.0, 0.1, 0.9, 8.0]),  # for how long the peer's threads waited for a processor, in intervals
    st.booleans(),  # whether one of them still waits
)


class Peer:
    """A peer in made-up time."""

    def __init__(self, pid: int) -> None:
        self.now_s = self.waited_s = self.ran_s = 0.0
        self.is_ready = False
        self.silence = Silence(
            pid, clock=lambda: self.now_s, look=lambda _pid: Processor(self.ran_s, self.waited_s, self.is_ready)
        )

    def tick(
        self,
        *,
        heard: bool = False,
        intervals: float = 1.0,
        waited: float = 0.0,
        ran: float = 0.0,
        is_ready: bool = False,
    ) -> bool:
        self.now_s += intervals * BEAT_S
        self.waited_s += waited * BEAT_S
        self.ran_s += ran * BEAT_S
        self.is_ready = is_ready
        return self.silence.count_tick(heard=heard)


@given(st.lists(TICK, max_size=60), st.booleans())
def test_only_silence_that_the_peer_is_to_blame_for_counts(
    ticks: list[tuple[str, float, float, bool]], near: bool
) -> None:
    peer, counted = Peer(7 if near else 0), 0
    for word, intervals, waited, is_ready in ticks:
        if peer.tick(heard=word == "heard", intervals=intervals, waited=waited, is_ready=is_ready):
            assert counted + 1 >= SILENT_TICKS
            assert intervals <= 1.5
            return
        counted = 0 if word == "heard" else counted + (intervals <= 1.5)
        # Of another machine nobody knows what it waited for.
        assert counted < (PATIENT_TICKS if near else SILENT_TICKS)


@pytest.mark.parametrize("phase", [0.01, 0.25, 0.5, 0.75, 0.99])
def test_a_peer_that_stops_is_given_up_within_a_second_and_a_half_of_its_last_byte(phase: float) -> None:
    peer = Peer(7)
    for _ in range(10):
        assert not peer.tick(heard=True)
    last_byte_s = peer.now_s + phase * BEAT_S
    assert not peer.tick(heard=True)
    while not peer.tick():
        pass
    assert GIVEN_UP_S <= peer.now_s - last_byte_s <= 1.5


def test_a_starved_peer_is_waited_for_and_a_stopped_one_is_not() -> None:
    for starved in ({"waited": 0.9}, {"is_ready": True}):
        peer = Peer(7)
        assert [peer.tick(**starved) for _ in range(PATIENT_TICKS)].index(True) == PATIENT_TICKS - 1  # type: ignore[arg-type]
        peer = Peer(7)
        assert not any(peer.tick(**starved) for _ in range(SILENT_TICKS))  # type: ignore[arg-type]
        assert [peer.tick() for _ in range(SILENT_TICKS)].index(True) <= SILENT_TICKS // 2
    spinning = Peer(7)  # it has a processor, and says nothing
    assert [spinning.tick(is_ready=True, ran=1.0) for _ in range(SILENT_TICKS)].index(True) == SILENT_TICKS - 1


def test_a_watcher_that_was_stopped_itself_blames_nobody() -> None:
    peer = Peer(0)
    assert not any(peer.tick(intervals=50.0) for _ in range(100))


def test_the_kernel_knows_who_waits_and_who_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        assert not is_stopped(process.pid)
        mine = processor_of(os.getpid())
        assert mine.ran_s > 0.0
        assert mine.is_ready
        assert processor_of(1 << 30) == Processor(0.0, 0.0, is_ready=False)
        process.send_signal(signal.SIGSTOP)
        _until(lambda: is_stopped(process.pid))
        assert not processor_of(process.pid).is_ready
        end_if_stopped(process.pid)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    end_if_stopped(os.getpid())  # it runs


def _until(claim: Callable[[], bool]) -> None:
    while not claim():
        os.sched_yield()


# --- over sockets -----------------------------------------------------------------------------------------------------


def test_only_the_process_behind_a_unix_socket_is_known_and_never_this_one() -> None:
    first, second = socket.socketpair()
    with first, second, socket.socket() as remote:
        assert process_behind(first) == process_behind(remote) == 0


async def test_quiet_ends_beat_and_stay_connected() -> None:
    """One end on a loop and one on a thread, both watching; beats are all that passes."""
    beats: list[int] = []
    listening = listener("\0tenuto-test-beats")
    ended = asyncio.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        end = FrameSocket(connection)
        assert end.greet("secret") is not None
        end.watch()
        while len(beats) < 2 * SILENT_TICKS:
            assert select.select([connection], [], [], PATIENCE_S)[0]
            assert not list(end.received())
            beats.append(1)
            end.tick()
        end.close()

    thread = asyncio.to_thread(serve)
    waiting = asyncio.create_task(thread)
    protocol = await connect("\0tenuto-test-beats", Hello("secret"), lambda *_: None, lambda *_: ended.set())
    protocol.watch()
    async with asyncio.timeout(PATIENCE_S):
        await waiting
        await ended.wait()
    assert len(beats) >= 2 * SILENT_TICKS
    listening.close()


@pytest.mark.parametrize("address", ["\0tenuto-test-silent", ("127.0.0.1", 0)], ids=["unix", "tcp"])
async def test_a_peer_that_never_speaks_is_given_up_on_a_loop_and_on_a_thread(address: str | tuple[str, int]) -> None:
    listening = listener(address)
    lost: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    target = address if isinstance(address, str) else listening.getsockname()
    protocol = await connect(target, Hello(""), lambda *_: None, lambda _, error: lost.set_result(error))
    accepted, _ = listening.accept()
    protocol.watch()
    async with asyncio.timeout(PATIENCE_S):
        error = await lost
    assert isinstance(error, TimeoutError)
    assert "nothing was heard" in str(error)
    assert not protocol.is_connected
    accepted.close()

    connected = socket.socket(listening.family)
    connected.connect(target)
    accepted, _ = listening.accept()
    end = FrameSocket(accepted)
    end.watch()
    assert not end.is_lost()
    ticks = 0
    while not end.is_lost():
        await asyncio.sleep(BEAT_S)
        end.tick()
        ticks += 1
    assert ticks >= SILENT_TICKS
    with pytest.raises(ConnectionResetError):
        end.receive()
    end.close()
    connected.close()
    listening.close()


_SPEAKING = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + sys.argv[1])
while True:
    connection.sendall(b"x")
"""


@pytest.mark.parametrize("is_of_loop", [True, False], ids=["loop", "thread"])
async def test_a_stopped_process_is_killed_when_it_is_given_up_and_not_later(is_of_loop: bool) -> None:
    """Its listening socket takes connections as long as it lives. It is told to go on at the moment it is given
    up: that is too late."""
    name = f"tenuto-test-stopped-{os.getpid()}-{is_of_loop}"
    listening = listener("\0" + name)
    process = subprocess.Popen([sys.executable, "-c", _SPEAKING, name])
    accepted, _ = await asyncio.to_thread(listening.accept)
    accepted.recv(1)
    process.send_signal(signal.SIGSTOP)
    _until(lambda: is_stopped(process.pid))
    accepted.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while accepted.recv(1 << 16):
            pass
    async with asyncio.timeout(PATIENCE_S):
        if is_of_loop:
            lost = asyncio.Event()

            def on_lost(*_: object) -> None:
                process.send_signal(signal.SIGCONT)
                lost.set()

            protocol = FrameProtocol(lambda *_: None, on_lost)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, accepted)
            protocol.watch()
            await lost.wait()
        else:
            end = FrameSocket(accepted)
            end.watch()
            while not end.is_lost():
                await asyncio.sleep(BEAT_S)
                end.tick()
            process.send_signal(signal.SIGCONT)
            end.close()
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == -signal.SIGKILL
    listening.close()


async def test_a_loop_that_its_user_keeps_busy_is_not_given_up_where_it_asks_for_that() -> None:
    watched: list[bool] = []

    def greet(protocol: FrameProtocol, hello: Hello) -> None:
        watched.append(hello.is_watched)
        if hello.is_watched:
            protocol.watch()

    server = await listen(
        "\0tenuto-test-busy", lambda: FrameProtocol(lambda *_: None, lambda *_: None, expect_token="", on_hello=greet)
    )
    for is_watched in (True, False):
        connection = await connect("\0tenuto-test-busy", Hello("", "", is_watched), lambda *_: None, lambda *_: None)
        async with asyncio.timeout(PATIENCE_S):
            while not watched:
                await asyncio.sleep(0.001)
        assert watched.pop() is is_watched
        connection.close()
    server.close()


def test_what_lies_unread_is_no_silence() -> None:
    """A worker amid a long batch reads nothing; its dispatcher has spoken all the same."""
    first, second = socket.socketpair()
    end = FrameSocket(first)
    end.watch()
    second.send(b"x")
    for _ in range(3 * SILENT_TICKS):
        end.tick()
    assert not end.is_lost()
    second.close()
    assert end.is_lost()  # though the byte is not read
    end.close()


def test_a_peer_that_speaks_and_acknowledges_nothing_may_have_given_us_up() -> None:
    """Its words may be long on their way."""
    listening = listener(("127.0.0.1", 0))
    with socket.create_connection(listening.getsockname()) as connected:
        accepted, _ = listening.accept()
        end = FrameSocket(accepted)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)  # the kernel does not judge here
        with contextlib.suppress(BlockingIOError):
            while accepted.send(bytes(1 << 20), socket.MSG_DONTWAIT):
                pass

        def is_lost() -> bool:
            connected.send(b"x")
            return end.is_lost()

        until(is_lost)
        end.close()
    listening.close()


@pytest.mark.parametrize("size", [1 << 10, 1 << 24])
def test_beating_never_waits_for_a_peer_that_takes_nothing(size: int) -> None:
    first, second = socket.socketpair()
    with second:
        first.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while first.send(bytes(size)):
                pass
        first.setblocking(True)
        end = FrameSocket(first)
        for _ in range(10):
            end.tick()  # it would wait for more than a second if it waited
        assert not end.is_lost()
        end.close()
