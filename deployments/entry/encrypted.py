"""TLS on the gateway's sockets. Handshakes take turns, so that the loop does not stop when many clients begin at once.

A server signs in a handshake, which takes as long as several requests (RSA, 2,048 bits: 1 ms). A client decides how
it sends its part: whole, in pieces, or in two attempts. So every step of a handshake waits for its turn, whatever the
step turns out to be.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from typing import Any

from tenuto.deployments.entry.open_connections import OpenConnections
from tenuto.deployments.entry.turns import Turns

_HANDSHAKE_S = 10.0  # limit: from the connection to the end of its handshake, as for the headers of a request

# What is overridden has no types in typeshed, or those of a later Python.
_AsyncioTls: Any = sslproto.SSLProtocol


class EncryptedConnection(_AsyncioTls):  # type: ignore[misc]
    """asyncio's TLS around a connection, on any event loop.

    `_do_handshake`, `_on_handshake_complete`, `_incoming`, `_state` and `_transport` are asyncio's own names, the same
    from Python 3.11 on; where one has gone, `tests/deployments/entry/test_encrypted.py` fails.
    """

    max_size = 1 << 14  # limit: of one read. asyncio takes a buffer of so many bytes for each connection
    has_key = False

    def __init__(
        self,
        connection: asyncio.BufferedProtocol,
        context: ssl.SSLContext,
        turns: Turns,
        unfinished: OpenConnections[EncryptedConnection],
    ) -> None:
        """Take the connection inside, whose turns they are, and where unfinished handshakes have their places."""
        super().__init__(
            asyncio.get_running_loop(), connection, context, None, server_side=True, ssl_handshake_timeout=_HANDSHAKE_S
        )
        self._turns = turns
        self._unfinished = unfinished
        self._waits = False  # its turn comes

    def connection_made(self, transport: asyncio.Transport) -> None:
        if self._unfinished.admit(self):
            super().connection_made(transport)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unfinished.forget(self)
        super().connection_lost(exc)

    def _do_handshake(self) -> None:
        if self._incoming.pending and not self._waits:
            self._waits = True
            self._transport.pause_reading()
            self._turns.wait_for_handshake(self)

    def go_on(self) -> None:
        """Do one step of the handshake."""
        self._waits = False
        if self._state == sslproto.SSLProtocolState.DO_HANDSHAKE:
            self._transport.resume_reading()
            super()._do_handshake()

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
