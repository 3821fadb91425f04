"""A lasting connection to one peer: find the peer over Ray, connect, send, notice its end or silence, find it again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from tenuto.deployments.wire.arena import machine_id
from tenuto.deployments.wire.frames import Address, FrameProtocol, connect
from tenuto.deployments.wire.messages import DispatcherState, GpuletState, Hello, Message
from tenuto.deployments.wire.tensors import Buffer

logger = logging.getLogger("ray.serve")

_RETRY_S = (0.1, 0.2, 0.5, 1.0)  # pace: pauses between tries to connect

PeerState = GpuletState | DispatcherState


class Endpoint(NamedTuple):
    """Where a peer listens, and the token that it expects. An endpoint travels over Ray.

    `certificate`: the peer's certificate as PEM if the connection must be encrypted, else "".
    """

    address: Address
    token: str
    certificate: str = ""


# Asks a peer's application for its endpoint; waits until its replica is ready.
Finder = Callable[[], Awaitable[Endpoint]]
StateT = TypeVar("StateT", bound=PeerState)
StateT_contra = TypeVar("StateT_contra", bound=PeerState, contravariant=True)
StateT_co = TypeVar("StateT_co", bound=PeerState, covariant=True)


class ConnectionEvents(Protocol[StateT_contra]):
    """The events that the owner of a connection is told, always on the event loop."""

    def peer_connected(self, connection: Connection[StateT_contra]) -> None:
        """The peer is connected and has sent its state: `connection.state`."""

    def peer_lost(self, connection: Connection[StateT_contra], reason: str) -> None:
        """The connection is gone; messages without an answer are lost."""

    def state_changed(self, connection: Connection[StateT_contra]) -> None:
        """The peer sent its state again."""

    def message_came(self, connection: Connection[StateT_contra], message: Message, body: memoryview) -> None:
        """The peer sent another message."""


class Connection(Protocol[StateT_co]):
    """A connection to one peer. `PeerConnection` uses sockets; there are others that have no process at the far end."""

    @property
    def peer(self) -> str:
        """The name of the gpu-let or sub-cluster at the far end."""

    @property
    def state(self) -> StateT_co | None:
        """The state that the peer sent last; None before the first."""

    @property
    def is_up(self) -> bool:
        """Whether messages can be sent now."""

    @property
    def shares_memory(self) -> bool:
        """Whether the peer can map our arenas."""

    @property
    def is_near(self) -> bool:
        """Whether the peer can read messages at once, as they go over a Unix socket."""

    def start(self) -> None:
        """Begin to connect; returns at once."""

    async def stop(self) -> None:
        """Close for good."""

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send a message; silent when the connection has just gone (`peer_lost` follows)."""


class PeerConnection(Generic[StateT]):
    """Keeps one peer connected for as long as it exists. Invariant: at most one connection at a time."""

    def __init__(
        self,
        kind: type[StateT],
        peer: str,
        find: Finder,
        events: ConnectionEvents[StateT],
        *,
        name: str = "gpu-let",
        is_watched: bool = True,
        gateway: str = "",
    ) -> None:
        """Prepare; `start` begins.

        Args:
            kind: the type of the peer's state, which is its first message.
            peer: the peer's name.
            find: asks where the peer listens.
            events: is told what happens.
            name: the kind of peer for logs; it stands before the peer's name.
            is_watched: whether the peer may give this process up when it falls silent.
            gateway: the name of this gateway, if this process is one.
        """
        self.peer = peer
        self.state: StateT | None = None
        self.is_near = False
        self._kind = kind
        self._is_watched = is_watched
        self._gateway = gateway
        self._name = f"{name} {peer}"
        self._find = find
        self._events = events
        self._machine = machine_id()
        self._protocol: FrameProtocol | None = None
        self._is_up = False
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether messages can be sent now."""
        return self._is_up and self._protocol is not None and self._protocol.is_connected

    @property
    def shares_memory(self) -> bool:
        """Whether the peer can map our arenas."""
        return self.state is not None and self.state.machine == self._machine

    def start(self) -> None:
        """Begin to look for the peer; returns at once."""
        self._task = asyncio.create_task(self._keep_connected(), name=f"connection {self._name}")

    async def stop(self) -> None:
        """Close the connection and stop looking. Its owner hears of the loss before this returns, and of nothing
        more."""
        while self._task is not None and not self._task.done():
            self._task.cancel()  # again: who waits for Ray may be told of it as of any error
            await asyncio.wait([self._task], timeout=_RETRY_S[0])
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.close()
        self._lost(f"{self._name} is not needed any more")

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send a message; silent when the connection has just gone (`peer_lost` follows)."""
        if self._protocol is not None:
            self._protocol.send(message, buffers)

    async def _keep_connected(self) -> None:
        failures = 0
        while True:
            try:
                endpoint = await self._find()
                self._ended.clear()
                self.is_near = isinstance(endpoint.address, str)
                hello = Hello(endpoint.token, self._machine, self._is_watched, self._gateway)
                self._protocol = await connect(
                    endpoint.address, hello, self._on_message, self._on_lost, certificate=endpoint.certificate
                )
                self._protocol.watch()
            except asyncio.CancelledError:
                raise
            except Exception as error:  # Ray raises many kinds while an application starts or restarts
                if failures in (0, 30):
                    logger.info("%s cannot be reached yet: %s: %s", self._name, type(error).__name__, error)
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
                continue
            failures = 0
            await self._ended.wait()
            self._protocol = None
            await asyncio.sleep(_RETRY_S[0])  # a peer that closes at once must not be tried in a tight loop

    def _on_message(self, protocol: FrameProtocol, message: Message, body: memoryview) -> None:
        if isinstance(message, self._kind):
            protocol.limit_bodies(message.most_answered_bytes())
            known, self.state = self.state, message
            if self._is_up:
                self._events.state_changed(self)
                return
            self._is_up = True
            again = "again, " if known is not None and known.pid != message.pid else ""
            logger.info("%s is connected (%spid %d)", self._name, again, message.pid)
            self._events.peer_connected(self)
        elif self._is_up:
            self._events.message_came(self, message, body)

    def _on_lost(self, protocol: FrameProtocol, error: BaseException | None) -> None:
        if protocol is self._protocol:
            self._protocol = None
        self._ended.set()
        if self._is_up:
            reason = f"{self._name} closed its connection" + (f" ({error})" if error else "")
            logger.warning("%s", reason)
            self._lost(reason)

    def _lost(self, reason: str) -> None:
        if self._is_up:
            self._is_up = False
            self._events.peer_lost(self, reason)
