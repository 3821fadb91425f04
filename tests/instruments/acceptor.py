"""Takes connections on a listening socket, and closes each of them when it is closed itself.

`asyncio.Server` leaves a connection open that it accepted just before its end (Python 3.11): no transport comes to be,
and Python's collector reports the socket in whichever test runs then.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

__all__ = ["Acceptor"]


_of_all_loops: set[Acceptor] = set()


class Acceptor:
    """Begins to take connections at once, on the running loop."""

    def __init__(self, listening: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        """Take the socket over; `make_protocol` makes the protocol of each connection."""
        self._listening, self._make_protocol = listening, make_protocol
        self._accepted: list[socket.socket] = []  # connections that have no transport yet
        self._connecting: set[asyncio.Task[None]] = set()
        self._transports: list[asyncio.BaseTransport] = []
        self._loop = asyncio.get_running_loop()
        for other in [each for each in _of_all_loops if each._loop.is_closed()]:
            other._end()
        _of_all_loops.add(self)
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listening.accept()
            self._accepted.append(connection)
            task = self._loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        transport, _ = await self._loop.connect_accepted_socket(self._make_protocol, connection)
        self._accepted.remove(connection)
        self._transports.append(transport)

    def close(self) -> None:
        """Close the socket and all connections that came; again: do nothing."""
        if self._listening.fileno() < 0:
            return
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for task in self._connecting:
            task.cancel()
        for connection in self._accepted:
            connection.close()
        for transport in self._transports:
            transport.close()

    def _end(self) -> None:
        """Close what the loop left open when it was closed: transports close with its next turn only."""
        _of_all_loops.discard(self)
        for each in (self._listening, *self._accepted):
            each.close()
        for transport in self._transports:
            left = getattr(transport, "_sock", None)
            if left is not None:
                left.close()
