"""Memory of bodies is taken as their bytes come: neither what is announced nor what others send takes what a client
needs. The attacks are played over sockets; the accounts are driven in any order."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenuto.deployments.entry.http.body_memory import REACH, Account, BodyMemory, IncomingBody
from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.http.open_connections import Limits
from tenuto.deployments.wire.arena import Arena
from tests.instruments.asking import until
from tests.instruments.live import PATIENCE_S
from tests.instruments.served_grpc import Served

LIMIT = 1 << 20


class Incoming(RuleBasedStateMachine):
    """Bodies of several clients come in any order, and are released in any order."""

    @initialize()
    def begin(self) -> None:
        self.arena = Arena(LIMIT, reach=REACH)
        self.pool = BodyMemory(Limits(unfinished_bytes=LIMIT))
        self.accounts = [Account(self.pool) for _ in range(4)]
        self.bodies: list[tuple[IncomingBody, Account, int]] = []

    @rule(who=st.integers(0, 3), size=st.integers(0, LIMIT // 2), mark=st.integers(0, 255))
    def expect(self, who: int, size: int, mark: int) -> None:
        account = self.accounts[who]
        before = self.pool.bytes
        try:
            self.bodies.append((IncomingBody(self.arena, account, size), account, mark))
        except HttpError:
            assert not account.has_room(size)
        assert self.pool.bytes == before  # to announce takes nothing

    @precondition(lambda self: self.bodies)
    @rule(choice=st.integers(0, 1000), size=st.integers(1, 1 << 17))
    def come(self, choice: int, size: int) -> None:
        body, account, mark = self.bodies[choice % len(self.bodies)]
        size = min(size, body.missing)
        room = body.room(memoryview(bytearray(size)))[:size]
        room[:] = bytes((mark,)) * size
        try:
            body.came(room)
        except HttpError:
            assert not account.has_room(size)
        if not body.missing:
            assert bytes(body.data) == bytes((mark,)) * body.size

    @precondition(lambda self: self.bodies)
    @rule(choice=st.integers(0, 1000))
    def release(self, choice: int) -> None:
        body, _, _ = self.bodies.pop(choice % len(self.bodies))
        slot = body.slot
        if slot is not None:
            slot.hold()  # a gpu-let reads it
        before = self.pool.bytes
        body.release()
        if slot is not None:
            assert self.pool.bytes == before
            slot.release()

    @invariant()
    def the_next_client_finds_room(self) -> None:
        if hasattr(self, "pool"):
            took = sum(account.bytes for account in self.accounts)
            assert took == self.pool.bytes == sum(body.size - body.missing for body, _, _ in self.bodies)
            assert Account(self.pool).has_room(LIMIT >> 6)  # four have halved it


Incoming.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_bodies_in_any_order = Incoming.TestCase


def test_memory_behind_the_first_goes_back_to_the_system() -> None:
    arena = Arena(LIMIT, reach=REACH)
    for _ in range(3):
        slots = [arena.take(LIMIT // 2) for _ in range(8)]
        for slot in slots:
            assert slot is not None
            slot.data[:] = b"x" * (LIMIT // 2)
        for slot in slots:
            assert slot is not None
            slot.release()
    assert bytes(slots[-1].data[:1]) == b"\0"  # type: ignore[union-attr]
    assert bytes(slots[0].data[:1]) == b"x"  # type: ignore[union-attr] # kept for the next one
    arena.close()


# --- over sockets -------------------------------------------------------------------------------------------------

pytest.importorskip("grpc")
pytest.importorskip("h2")
pytest.importorskip("hpack")
pytest.importorskip("tritonclient.grpc.aio")

from tests.instruments.http2_client import INFER, Http2Client, message  # noqa: E402

HEALTH = "grpc.health.v1.Health/Check"
KEYS = ("ann", "bob")
BODIES = (20_000, 300_000)


class Attacked(Served):
    """A gateway with little memory, its attackers and an honest client."""

    has_keys = True

    async def begin(self, *, has_keys: bool) -> None:
        self.has_keys = has_keys
        entries = [{"name": key, "sha256": hashlib.sha256(key.encode()).hexdigest(), "models": ["m"]} for key in KEYS]
        await self.start(**({"keys": entries} if has_keys else {}))
        self.entry.server.limits.unfinished_bytes = LIMIT << 3
        self.writers: list[asyncio.StreamWriter] = []

    async def attack(self, path: str, size: int, sent: int, *, key: str, count: int, calls: int) -> None:
        """Announce bodies of so many bytes and send some, over both protocols."""
        for _ in range(count):
            client = await Http2Client.connect(self.grpc_port)
            for _ in range(calls):
                stream = client.begin(path, *([("x-api-key", key)] if key else []))
                client.data(stream, message(bytes(sent), announced=size))
            self.writers.append(client.writer)
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            url = "/v2/models/m/infer" if path == INFER else "/v2/health/ready"
            shown = f"X-Api-Key: {key}\r\n" if key else ""
            head = f"POST {url} HTTP/1.1\r\nHost: localhost\r\n{shown}Inference-Header-Content-Length: 9\r\n"
            writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode() + bytes(sent))
            self.writers.append(writer)
        for writer in self.writers:
            with contextlib.suppress(ConnectionError):
                await writer.drain()

    async def honest(self, size: int, key: str) -> list[Any]:
        """Send a body over each protocol; returns what it was told. It is none of the model's, and says so late."""
        client = await Http2Client.connect(self.grpc_port)
        stream = client.begin(INFER, *([("x-api-key", key)] if self.has_keys else []))
        client.data(stream, message(b"\xff" * size), is_last=True)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        shown = f"X-Api-Key: {key}\r\n" if self.has_keys else ""
        head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\n{shown}Inference-Header-Content-Length: 9\r\n"
        writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode() + bytes(size))
        told = [await client.hear(stream), (await reader.readline())[9:12]]
        client.leave()
        writer.transport.abort()
        return told

    async def end(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        await until(lambda: not self.entry.server.unfinished_bytes)
        await self.close()


@pytest.fixture
async def attacked() -> AsyncIterator[Attacked]:
    made = Attacked()
    yield made
    await made.end()


@pytest.mark.parametrize(
    ("path", "size", "sent", "key", "count", "calls"),
    [
        (HEALTH, 1 << 16, 0, "", 70, 100),
        (HEALTH, 1 << 16, 20_000, "", 40, 30),
        (INFER, 4 << 20, 5, "ann", 8, 8),
        (INFER, 4 << 20, 900_000, "ann", 8, 1),
        (INFER, 4 << 20, 5, "", 30, 100),
        (INFER, 1 << 20, 900_000, "", 3, 1),
    ],
    ids=[
        "strangers announce",
        "strangers send",
        "a key announces",
        "a key sends",
        "connections announce",
        "connections send",
    ],
)
async def test_others_find_room(
    attacked: Attacked, path: str, size: int, sent: int, key: str, count: int, calls: int
) -> None:
    await attacked.begin(has_keys=path == HEALTH or bool(key))
    async with asyncio.timeout(PATIENCE_S):
        await attacked.attack(path, size, sent, key=key, count=count, calls=calls)
        for body in BODIES:
            assert await attacked.honest(body, "bob") == ["3", b"400"]  # it is read, and is none of the model's
