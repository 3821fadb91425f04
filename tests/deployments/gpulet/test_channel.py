"""A gpu-let's sockets: read by its worker or by threads, encrypted between nodes, and never with room for more than its
programs can take."""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tenuto.deployments.gpulet.channel import ArrivedBatch, Channel
from tenuto.deployments.gpulet.inbox import Inbox
from tenuto.deployments.wire.messages import BatchRan, GpuletState, Message, RunBatch, TakeCharge, Term
from tenuto.deployments.wire.peer import Endpoint, PeerConnection
from tests.instruments.asking import PATIENCE_S, until
from tests.instruments.fake_gpulet import SIGNATURE, state

LARGEST = 512
MOST_BYTES = LARGEST * 2 * 8  # two numbers of at most eight bytes each


class Far:
    """A dispatcher's end: sends bodies, notes what comes back."""

    def __init__(self, endpoint: Endpoint) -> None:
        async def find() -> Endpoint:
            return endpoint

        self.connection = PeerConnection(GpuletState, "a", find, self)  # type: ignore[arg-type, var-annotated]
        self.answers: dict[int, bytes] = {}
        self.lost = asyncio.Event()
        self.took = False  # charge, or tried to

    def peer_connected(self, connection: Any) -> None: ...
    def state_changed(self, connection: Any) -> None: ...

    def peer_lost(self, connection: Any, reason: str) -> None:
        del connection, reason
        self.lost.set()

    def message_came(self, connection: Any, message: Message, body: memoryview) -> None:
        del connection
        assert isinstance(message, BatchRan)
        self.answers[message.number] = bytes(body)


class Worker:
    """Answers each batch with its own body, once `goes_on` is set, and notes which were dated."""

    def __init__(self) -> None:
        self.inbox: Inbox[ArrivedBatch] = Inbox()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.begun: list[int] = []
        self.dated: list[bool] = []
        self.aborted: list[int] = []
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        while (batch := self.inbox.get()) is not None:
            self.begun.append(batch.message.number)
            self.dated.append(not math.isnan(batch.received_at))
            if batch.is_given_up():
                self.aborted.append(batch.message.number)
            self.goes_on.wait(PATIENCE_S)
            ran = BatchRan(batch.message.number, math.nan, 1.0, 0.0, 0.0, 0.0, [])
            batch.answer(ran, [batch.body])

    def end(self) -> None:
        self.goes_on.set()
        self.inbox.close()
        self.thread.join()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.end()


@pytest.fixture
async def channel(worker: Worker) -> AsyncIterator[Channel]:
    made = Channel("a", "t", worker.inbox.put, worker.inbox.watch)
    made.announce(state("a", {"m": LARGEST}, {"m": SIGNATURE}, pid=1))
    yield made
    worker.end()
    made.close()


def batch(number: int) -> RunBatch:
    return RunBatch(number, "m", [("m", 1)], [], [])


async def connected(channel: Channel, host: str = "", *, encrypted: bool = False) -> Far:
    far = Far(channel.listen(host, encrypted=encrypted))
    far.connection.start()
    await until(lambda: far.connection.is_up)
    return far


async def connected_amid_a_batch(channel: Channel, worker: Worker) -> Far:
    """Connect, and let batch 0 run until `goes_on` is set."""
    far = await connected(channel)
    worker.goes_on.clear()
    far.connection.send(batch(0))
    await until(lambda: worker.begun == [0])
    return far


@pytest.mark.parametrize(("host", "encrypted"), [("", False), ("127.0.0.1", False), ("127.0.0.1", True)])
async def test_batches_and_answers_cross_at_the_same_time(channel: Channel, host: str, encrypted: bool) -> None:
    far = await connected(channel, host, encrypted=encrypted)
    assert bool(channel.listen(host, encrypted=encrypted).certificate) == encrypted
    bodies = {number: bytes([number]) * (MOST_BYTES - number) for number in range(100)}
    for number, body in bodies.items():
        far.connection.send(batch(number), [body])
    await until(lambda: len(far.answers) == len(bodies))
    assert far.answers == bodies
    await far.connection.stop()


async def test_small_batches_of_this_machine_wait_in_their_socket_and_are_not_dated(
    channel: Channel, worker: Worker
) -> None:
    far = await connected(channel)
    worker.goes_on.clear()
    for number in range(3):
        far.connection.send(batch(number), [b"1"])
        await until(lambda: worker.begun == [0])
    assert worker.begun == [0]
    assert [each.name for each in threading.enumerate() if "receives" in each.name] == []
    worker.goes_on.set()
    await until(lambda: len(far.answers) == 3)
    assert worker.begun == [0, 1, 2]
    assert not any(worker.dated[1:])
    await far.connection.stop()


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
async def test_what_a_dispatcher_asked_that_has_gone_since_is_not_begun(
    channel: Channel, worker: Worker, host: str
) -> None:
    """Its frames lie in the socket before the end of the connection, and are read before it."""
    first, second = await connected(channel, host), await connected(channel)
    worker.goes_on.clear()
    second.connection.send(batch(0))
    await until(lambda: worker.begun == [0])
    for number in (1, 2, 3):
        first.connection.send(batch(number), [b"1"])
    await first.connection.stop()
    second.connection.send(batch(4))
    await asyncio.sleep(0.05)  # it leaves
    worker.goes_on.set()
    await until(lambda: 4 in second.answers)
    await until(lambda: {number for number in worker.begun if number not in worker.aborted} == {0, 4})
    await second.connection.stop()


async def test_the_dispatcher_that_took_charge_last_is_obeyed_and_no_other(channel: Channel, worker: Worker) -> None:
    """Three of one sub-cluster and one of another, in an order drawn anew each time."""
    draw = random.Random(7)
    three, other = [await connected(channel) for _ in range(3)], await connected(channel)
    other.connection.send(TakeCharge("1", Term(1)))
    in_charge, latest = None, 0
    for number in range(0, 240, 4):
        claims, term = draw.choice(three), draw.randrange(1, latest + 3)
        if term == latest and claims is not in_charge:  # no two dispatchers choose equal ones
            term += 1
        claims.connection.send(TakeCharge("0", Term(term)))
        if term > latest:
            in_charge, latest = claims, term
        # On one connection a batch behind a claim finds it made; what others ask must not overtake it.
        ahead = latest
        await until(lambda: _terms(claims) == {"0": ahead, "1": 1})  # noqa: B023
        for far, asked in zip((*three, other), range(number, number + 4), strict=True):
            far.connection.send(batch(asked))
        await until(lambda: len(worker.begun) == number + 4)  # noqa: B023
        refused = {asked for asked in worker.aborted if asked >= number}
        claimed = {far for far in three if far.took}
        claims.took = True
        expected = {
            number + index
            for index, far in enumerate(three)
            if (far in claimed or far is claims) and far is not in_charge
        }
        assert refused == expected, (term, latest)
    for far in (*three, other):
        await far.connection.stop()


def _terms(far: Far) -> dict[str, int]:
    assert far.connection.state is not None
    return {name: term.number for name, term in far.connection.state.terms.items()}


async def test_what_had_come_before_the_end_is_answered(channel: Channel, worker: Worker) -> None:
    far = await connected_amid_a_batch(channel, worker)
    far.connection.send(batch(1), [b"1"])
    await asyncio.sleep(0.05)  # it leaves
    worker.inbox.close()
    worker.goes_on.set()
    await until(lambda: far.answers == {0: b"", 1: b"1"})
    await far.connection.stop()


async def test_large_bodies_come_while_a_batch_runs(channel: Channel, worker: Worker) -> None:
    most = 1 << 20
    channel.announce(state("a", {"m": most // 16}, {"m": SIGNATURE}, pid=1))
    far = await connected(channel)
    far.connection.send(batch(0), [bytes(most)])
    await until(lambda: 0 in far.answers)
    worker.goes_on.clear()
    far.connection.send(batch(1))
    await until(lambda: worker.begun == [0, 1])
    far.connection.send(batch(2), [bytes(most)])
    await until(lambda: bool(worker.inbox))
    worker.goes_on.set()
    await until(lambda: len(far.answers) == 3)
    assert worker.dated[2]
    await far.connection.stop()


async def test_no_more_is_taken_than_the_largest_batch_can_be(channel: Channel) -> None:
    far = await connected(channel)
    assert far.connection.state is not None
    assert far.connection.state.most_asked_bytes() == MOST_BYTES
    far.connection.send(batch(1), [bytes(MOST_BYTES + 1)])
    await asyncio.wait_for(far.lost.wait(), PATIENCE_S)
    assert not far.answers
    await far.connection.stop()


async def test_strangers_get_nothing_from_an_encrypted_socket(channel: Channel) -> None:
    endpoint = channel.listen("127.0.0.1", encrypted=True)
    reader, writer = await asyncio.open_connection(*endpoint.address)
    writer.write(b"\x00" * 64)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    assert len(answer) < 16  # TLS' alert at most
    writer.close()


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
async def test_nothing_grows_with_the_number_of_dispatchers_that_are_gone(channel: Channel, host: str) -> None:
    """Killed ones end without a word, some with a batch under way; who stays hears of nothing."""
    stays = await connected(channel, host)
    heard: list[Any] = []
    stays.state_changed = heard.append  # type: ignore[method-assign]

    def held() -> list[int]:
        return [threading.active_count(), len(os.listdir("/proc/self/fd"))]

    most = [count + 10 for count in held()]  # beside one that is connected, and what is made once
    for number in range(30):
        far = await connected(channel, host)
        far.connection.send(batch(number), [bytes(MOST_BYTES)])
        await until(lambda far=far, number=number: number in far.answers)  # type: ignore[misc]
        if number % 3 == 0:
            far.connection.send(batch(1000 + number), [bytes(MOST_BYTES)])
        await far.connection.stop()
        await until(lambda: all(now <= then for now, then in zip(held(), most, strict=True)))
    assert not heard
    stays.connection.send(batch(100))
    await until(lambda: 100 in stays.answers)
    await stays.connection.stop()


async def test_a_connection_stops_although_its_search_takes_that_for_an_error() -> None:
    looks = asyncio.Event()

    async def find() -> Endpoint:
        looks.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("what was asked was cancelled") from None
        raise AssertionError

    connection = PeerConnection(GpuletState, "a", find, Far)  # type: ignore[arg-type, var-annotated]
    connection.start()
    await looks.wait()
    async with asyncio.timeout(PATIENCE_S):
        await connection.stop()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "connection gpu-let a"] == []
