"""A gpu-let's sockets: encrypted between nodes, and never with room for more than its programs can take."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tenuto.deployments.gpulet.channel import ArrivedBatch, Channel
from tenuto.deployments.wire.messages import BatchRan, GpuletState, Message, RunBatch
from tenuto.deployments.wire.peer import Endpoint, PeerLink
from tests.instruments.asking import PATIENCE_S, until
from tests.instruments.fake_gpulet import SIGNATURE, state

LARGEST = 512


class Far:
    """A dispatcher's end: sends bodies, notes what comes back."""

    def __init__(self, endpoint: Endpoint) -> None:
        async def find() -> Endpoint:
            return endpoint

        self.link = PeerLink(GpuletState, "a", find, self)  # type: ignore[arg-type, var-annotated]
        self.answers: dict[int, bytes] = {}
        self.lost = asyncio.Event()

    def link_up(self, link: Any) -> None: ...
    def state_changed(self, link: Any) -> None: ...

    def link_down(self, link: Any, reason: str) -> None:
        del link, reason
        self.lost.set()

    def message_came(self, link: Any, message: Message, body: memoryview) -> None:
        del link
        assert isinstance(message, BatchRan)
        self.answers[message.number] = bytes(body)


def echo(channel_queue: queue.SimpleQueue[ArrivedBatch | None]) -> None:
    """Be the worker: answer each batch with its own body, from another thread than the one that receives."""
    while (batch := channel_queue.get()) is not None:
        ran = BatchRan(batch.message.number, math.nan, 1.0, 0.0, 0.0, 0.0, [])
        batch.answer(ran, [batch.body])


@pytest.fixture
async def channel() -> AsyncIterator[Channel]:
    arrived: queue.SimpleQueue[ArrivedBatch | None] = queue.SimpleQueue()
    made = Channel("a", "t", arrived.put)
    worker = threading.Thread(target=echo, args=(arrived,))
    worker.start()
    made.announce(state("a", {"m": LARGEST}, {"m": SIGNATURE}, pid=1))
    yield made
    arrived.put(None)
    worker.join()
    made.close()


@pytest.mark.parametrize(("host", "encrypted"), [("", False), ("127.0.0.1", False), ("127.0.0.1", True)])
async def test_batches_and_answers_cross_at_the_same_time(channel: Channel, host: str, encrypted: bool) -> None:
    endpoint = channel.listen(host, encrypted=encrypted)
    assert bool(endpoint.certificate) == encrypted
    far = Far(endpoint)
    far.link.start()
    await until(lambda: far.link.is_up)
    assert far.link.state is not None
    size = far.link.state.most_asked_bytes()
    bodies = {number: bytes([number]) * (size - number) for number in range(100)}
    for number, body in bodies.items():
        far.link.send(RunBatch(number, "m", [("m", 1)], [], [], []), [body])
    await until(lambda: len(far.answers) == len(bodies))
    assert far.answers == bodies
    await far.link.stop()


async def test_no_more_is_taken_than_the_largest_batch_can_be(channel: Channel) -> None:
    far = Far(channel.listen())
    far.link.start()
    await until(lambda: far.link.is_up)
    assert far.link.state is not None
    assert far.link.state.most_asked_bytes() == LARGEST * 2 * 8  # two numbers of at most eight bytes each
    far.link.send(RunBatch(1, "m", [("m", 1)], [], [], []), [bytes(LARGEST * 2 * 8 + 1)])
    await asyncio.wait_for(far.lost.wait(), PATIENCE_S)
    assert not far.answers
    await far.link.stop()


async def test_strangers_get_nothing_from_an_encrypted_socket(channel: Channel) -> None:
    endpoint = channel.listen("127.0.0.1", encrypted=True)
    reader, writer = await asyncio.open_connection(*endpoint.address)
    writer.write(b"\x00" * 64)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    assert len(answer) < 16  # TLS' alert at most
    writer.close()
