"""A gpu-let's sockets: dispatchers connect here, batches come in and answers go out.

There is no event loop. The worker itself reads dispatchers of this machine (`tenuto.deployments.gpulet.inbox`). A
dispatcher of another machine, or one that sends large bodies, has a thread of its own, so that bodies come while a
batch runs. The worker sends answers; another thread sends beats and watches the dispatchers.

Of the dispatchers of one sub-cluster, the one that took charge last is in charge. Batches of the others are not begun.
Neither are batches whose dispatcher is gone, as their requests were given to other gpu-lets.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tenuto.deployments.gpulet.inbox import Source
from tenuto.deployments.wire.encryption import Identity, TlsSocket
from tenuto.deployments.wire.frames import Address, FrameSocket, WrongFrameError, listener
from tenuto.deployments.wire.liveness import BEAT_S
from tenuto.deployments.wire.messages import Generate, GpuletState, Message, RunBatch, StopGenerating, TakeCharge, Term
from tenuto.deployments.wire.peer import Endpoint
from tenuto.deployments.wire.tensors import Buffer

logger = logging.getLogger("ray.serve")

_HANDSHAKE_S = 5.0  # limit: time for a dispatcher's TLS handshake


class Peer:
    """A connected dispatcher, and its batches that are not answered yet."""

    def __init__(self, connection: FrameSocket, channel: Channel) -> None:
        self.connection = connection
        self.running: dict[int, ArrivedBatch] = {}
        self.sub_cluster: str | None = None  # None: it is the only dispatcher
        self.announcing = threading.Lock()
        self._channel = channel

    def fileno(self) -> int:
        return self.connection.fileno()

    def readable(self, *, is_fresh: bool) -> bool:
        """See `tenuto.deployments.gpulet.inbox.Source`."""
        return self._channel.read(self, is_fresh=is_fresh)

    def unwatched(self) -> None:
        """See `tenuto.deployments.gpulet.inbox.Source`."""
        self._channel.unwatched(self)

    def is_obeyed(self) -> bool:
        """Whether batches of this dispatcher may be begun now."""
        return self._channel.is_in_charge(self) and not self.connection.is_lost()


@dataclass(slots=True, eq=False)
class ArrivedBatch:
    """One batch from its arrival at the gpu-let to its answer. `received_at` is on the monotonic clock in s; it is NaN
    when the batch came while another one ran, and was read only afterwards."""

    peer: Peer
    message: RunBatch
    body: memoryview
    received_at: float
    is_aborted: bool = False

    @property
    def program(self) -> str:
        """The program to run."""
        return self.message.program

    @property
    def size(self) -> int:
        """The number of rows of all members."""
        return self.message.size

    def is_given_up(self) -> bool:
        """Whether the batch's dispatcher is gone, or another one is in charge. The worker asks this."""
        return self.is_aborted or not self.peer.is_obeyed()

    def answer(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send the answer; any thread may call this. Does nothing when the dispatcher is gone."""
        self.peer.running.pop(self.message.number, None)
        self.peer.connection.send(message, buffers)


class ArrivedSequence(NamedTuple):
    """One sequence to be generated, from its arrival at the gpu-let on. `received_at` is on the monotonic clock in
    s."""

    peer: Peer
    message: Generate
    received_at: float


class LeftSequences(NamedTuple):
    """The sequences of a dispatcher that nobody waits for any more, by its own numbers."""

    peer: Peer
    numbers: list[int]


Arrived = ArrivedBatch | ArrivedSequence | LeftSequences


class Channel:
    """Listens, and hands batches to the worker. Invariant: every peer has presented the token."""

    def __init__(
        self, name: str, token: str, on_work: Callable[[Arrived], None], watch: Callable[[Source], None]
    ) -> None:
        """Prepare; `listen` begins.

        Args:
            name: the gpu-let's id, for threads and logs.
            token: the token that a dispatcher must present.
            on_work: takes a batch, or what is about sequences, on the thread that read it; must not wait.
            watch: lets the worker read the socket of a dispatcher of this machine.
        """
        self._name = name
        self._token = token
        self._on_work = on_work
        self._watch = watch
        self._state: GpuletState | None = None
        self._identity = Identity()
        self._listeners: dict[tuple[str, bool], socket.socket] = {}
        self._peers: set[Peer] = set()
        self._in_charge: dict[str, tuple[Peer | None, Term]] = {}  # by sub-cluster
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._start_thread("beats", self._beat)

    def _start_thread(self, verb: str, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, name=f"gpu-let {self._name} {verb}", daemon=True).start()

    def listen(self, host: str = "", *, encrypted: bool = False) -> Endpoint:
        """Listen, and return where. Without a host, only this machine can connect. With a host, it is a free port of
        that address, with TLS if `encrypted`."""
        tls = self._identity.context if host and encrypted else None
        known = self._listeners.get((host, encrypted))
        if known is None:
            # Abstract names need no file that could be left behind. For small frames Unix sockets took two thirds of
            # the processor time of loopback TCP; large bodies lie in shared memory.
            known = listener((host, 0) if host else f"\0tenuto-{os.getpid()}-{id(self):x}")
            self._listeners[host, encrypted] = known
            self._start_thread("accepts", self._accept, known, tls)
        name = known.getsockname()
        address: Address = name.decode() if isinstance(name, bytes) else (name[0], name[1])
        return Endpoint(address, self._token, "" if tls is None else self._identity.certificate)

    def announce(self, state: GpuletState | None = None) -> None:
        """Send the state of this gpu-let, by default the last one with the terms of now, to all connected dispatchers,
        and to each that connects later."""
        with self._lock:
            if (state := state or self._state) is None:
                return
            terms = {name: term for name, (_, term) in self._in_charge.items()}
            self._state = msgspec.structs.replace(state, terms=terms)
            peers = list(self._peers)
        for peer in peers:
            self._send_state(peer)

    def _send_state(self, peer: Peer) -> None:
        """Send a peer the newest state. One thread does so at a time: none gets an older state after a newer one."""
        with peer.announcing:
            if (state := self._state) is not None:
                peer.connection.limit_bodies(state.most_asked_bytes())
                peer.connection.send(state)

    @property
    def is_used(self) -> bool:
        """Whether a dispatcher is connected."""
        return bool(self._peers)

    def tell(self, message: Message, peers: Sequence[Peer] | None = None) -> None:
        """Send a message to these peers, by default to all."""
        for peer in list(self._peers) if peers is None else peers:
            peer.connection.send(message)

    def close(self) -> None:
        """Take no more connections, and close all."""
        self._is_closed.set()
        for made in self._listeners.values():
            with contextlib.suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            made.close()
        for peer in list(self._peers):
            peer.connection.close()

    def _accept(self, made: socket.socket, tls: ssl.SSLContext | None) -> None:
        while True:
            try:
                connection, _ = made.accept()
            except OSError:
                if self._is_closed.wait(BEAT_S):
                    return
                continue  # too many files are open, or the peer is gone
            self._start_thread("receives", self._greet, connection, tls)

    def _greet(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Take a peer if it presents the token, and close its connection if not."""
        way: socket.socket | TlsSocket = connection
        if tls is not None:
            way = TlsSocket(connection, tls)
            try:
                way.shake_hands(_HANDSHAKE_S)
            except OSError as error:
                logger.warning("gpu-let %s closes a connection of an unknown peer: %s", self._name, error)
                connection.close()
                return
        peer = Peer(FrameSocket(way), self)
        hello = peer.connection.greet(self._token)
        if hello is None:
            peer.connection.close()
            return
        if hello.is_watched:
            peer.connection.watch()
        with self._lock:
            self._peers.add(peer)
        self._send_state(peer)
        if connection.family == socket.AF_UNIX:
            with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile
                self._watch(peer)
        else:
            self._receive(peer)

    def _receive(self, peer: Peer) -> None:
        """Receive from one peer until it is gone."""
        try:
            while True:
                message, body = peer.connection.receive()
                self._take(peer, message, body, time.monotonic())
        except (OSError, WrongFrameError) as error:
            self._lost(peer, error)
            peer.connection.close()

    def read(self, peer: Peer, *, is_fresh: bool) -> bool:
        """Take the messages that have come from a peer; False when the worker must stop watching it."""
        received_at = time.monotonic() if is_fresh else math.nan
        try:
            for message, body in peer.connection.received():
                self._take(peer, message, body, received_at)
        except (OSError, WrongFrameError) as error:
            self._lost(peer, error)
            return False
        return not peer.connection.is_amid_body

    def unwatched(self, peer: Peer) -> None:
        """Close a peer that is gone. A peer that sends a large body gets a thread instead."""
        if peer in self._peers:
            self._start_thread("receives", self._receive, peer)
        else:
            peer.connection.close()

    def _lost(self, peer: Peer, error: Exception) -> None:
        if isinstance(error, WrongFrameError):
            logger.warning("gpu-let %s closes a connection: %s", self._name, error)
        with self._lock:
            self._peers.discard(peer)
            holder, term = self._holder(peer)
            is_left = holder is peer and bool(term.gateways)
            if is_left and peer.sub_cluster is not None:
                self._in_charge[peer.sub_cluster] = peer, Term(term.number)
        _give_up(peer)  # nobody waits for its answers
        if is_left:
            self.announce()

    def _take(self, peer: Peer, message: Message, body: memoryview, received_at: float) -> None:
        if isinstance(message, RunBatch):
            batch = peer.running[message.number] = ArrivedBatch(peer, message, body, received_at)
            self._on_work(batch)
        elif isinstance(message, Generate):
            self._on_work(ArrivedSequence(peer, message, time.monotonic() if math.isnan(received_at) else received_at))
        elif isinstance(message, StopGenerating):
            self._on_work(LeftSequences(peer, message.numbers))
        elif isinstance(message, TakeCharge):
            self._put_in_charge(peer, message)
        else:
            logger.warning("gpu-let %s: nobody asked for a %s", self._name, type(message).__name__)

    def _put_in_charge(self, peer: Peer, claim: TakeCharge) -> None:
        """Let a dispatcher take charge, unless another one has a later term. The terms in the state tell dispatchers
        whether they are in charge."""
        peer.sub_cluster = name = claim.sub_cluster
        with self._lock:
            before, term = self._holder(peer)
            is_taken = claim.term.number >= term.number  # equal: the same dispatcher, maybe on another connection
            if is_taken:
                self._in_charge[name] = peer, claim.term
        if before is peer and claim.term == term:
            return
        if is_taken and before is not None and before is not peer:
            logger.warning("gpu-let %s: another dispatcher of sub-cluster %s takes charge", self._name, name)
            _give_up(before)
        self.announce()

    def _holder(self, peer: Peer) -> tuple[Peer | None, Term]:
        """Return the dispatcher in charge of this peer's sub-cluster, or the one that was last, and its term."""
        return self._in_charge.get(peer.sub_cluster or "", (None, Term()))

    def is_in_charge(self, peer: Peer) -> bool:
        """Whether no other dispatcher of the peer's sub-cluster has taken charge."""
        return peer.sub_cluster is None or self._holder(peer)[0] is peer

    def _beat(self) -> None:
        while not self._is_closed.wait(BEAT_S):
            for peer in list(self._peers):
                peer.connection.tick()


def _give_up(peer: Peer) -> None:
    """Mark all batches of a dispatcher so that none of them is begun."""
    for batch in list(peer.running.values()):
        batch.is_aborted = True
