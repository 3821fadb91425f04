"""TLS on the gateway's sockets. Handshakes, reads and endings take turns, so that the loop does not stop when many
clients begin, send or leave at once.

A server signs in a handshake, which takes as long as several requests (RSA, 2,048 bits: 1 ms). A client decides how
it sends its part: whole, in pieces, or in two attempts. So every step of a handshake waits for its turn, whatever the
step turns out to be. To end a connection takes 20 µs, and 1,000 clients may leave in one moment: an end waits as a step
of a handshake does. What has come is decrypted in a turn that has work left, and waits for one otherwise.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from collections.abc import Callable
from typing import Any

from tenuto.deployments.entry.http.loop_budget import LoopBudget, Resumable
from tenuto.deployments.entry.http.open_connections import OpenConnections

_HANDSHAKE_S = 10.0  # limit: from the connection to the end of its handshake, as for the headers of a request

_READ_OVER_BYTES = 1 << 12  # limit: of a read that is not decrypted in this turn
_UNREAD_BYTES = 1 << 16  # limit: of answers that a client does not read, as without TLS

# What is overridden has no types in typeshed, or those of a later Python.
_AsyncioTls: Any = sslproto.SSLProtocol


class TlsConnection(_AsyncioTls):  # type: ignore[misc]
    """asyncio's TLS around a connection, on any event loop.

    `_do_handshake`, `_on_handshake_complete`, `_do_read`, `_incoming`, `_state`, `_transport`, `_app_transport`,
    `_set_read_buffer_limits` and `_set_write_buffer_limits` are asyncio's own names, the same from Python 3.11 on;
    where one has gone, `tests/deployments/entry/test_encrypted.py` fails.
    """

    max_size = 1 << 14  # limit: of one read. asyncio takes a buffer of so many bytes for each connection
    has_key = False

    def __init__(
        self,
        connection: asyncio.BufferedProtocol,
        context: ssl.SSLContext,
        budget: LoopBudget,
        unfinished: OpenConnections[TlsConnection],
    ) -> None:
        """Take the connection inside, whose turns they are, and where unfinished handshakes have their places."""
        super().__init__(
            asyncio.get_running_loop(), connection, context, None, server_side=True, ssl_handshake_timeout=_HANDSHAKE_S
        )
        self._budget = budget
        self._unfinished = unfinished
        self._waits = False  # its turn comes
        self._has_left = self._is_lost = False  # its client says so, or its transport; the turn for it has not come
        self._why_lost: Exception | None = None
        # asyncio would take 256 KiB from a client whose requests wait. Two reads hold at least one whole record.
        self._set_read_buffer_limits(2 * self.max_size)
        self._set_write_buffer_limits(_UNREAD_BYTES)  # and 512 KiB for one that does not read

    def connection_made(self, transport: asyncio.Transport) -> None:
        if self._unfinished.admit(self):
            super().connection_made(transport)
        else:
            transport.abort()

    def get_buffer(self, n: int) -> memoryview:
        room: memoryview = super().get_buffer(n)
        return room if self._budget.left > 0 else room[:_READ_OVER_BYTES]

    def _do_handshake(self) -> None:
        if self._incoming.pending and not self._waits:
            self._transport.pause_reading()
            self._wait(self._budget.wait_for_tls)

    def _do_read(self) -> None:
        """Decrypt what has come, in a turn that has work left."""
        if self._budget.left > 0 or self._state != sslproto.SSLProtocolState.WRAPPED:
            super()._do_read()
        elif self._incoming.pending and not self._waits:
            self._transport.pause_reading()
            self._wait(self._budget.wait)

    def eof_received(self) -> bool:
        self._has_left = True
        self._wait(self._budget.wait_for_tls)
        return True  # closed in its turn

    def connection_lost(self, exc: Exception | None) -> None:
        self._unfinished.forget(self)
        self._is_lost, self._why_lost = True, exc
        if self._app_transport is not None:
            self._app_transport._closed = True  # nothing more is written
        self._wait(self._budget.wait_for_tls)

    def _wait(self, for_turn: Callable[[Resumable], None]) -> None:
        if not self._waits:
            self._waits = True
            for_turn(self)

    def resume(self) -> None:
        """Do one step: of the handshake, of reading what has come, or of the end."""
        self._waits = False
        if self._is_lost:
            super().connection_lost(self._why_lost)
            return
        if not self._ssl_reading_paused:
            self._transport.resume_reading()
        if self._state == sslproto.SSLProtocolState.DO_HANDSHAKE and not self._has_left:
            super()._do_handshake()
        else:
            super()._do_read()
        if self._has_left and self._transport is not None and not super().eof_received():
            self._transport.close()

    def _on_handshake_complete(self, handshake_exc: BaseException | None) -> None:
        self._unfinished.forget(self)
        super()._on_handshake_complete(handshake_exc)

    @property
    def gives_way(self) -> bool:
        """Whether its client has sent nothing that waits."""
        return not self._waits

    def give_way(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
