"""Nothing is left to Python's collector by what listens in tests, however early it is closed."""

import asyncio
import gc
import socket
import sys
from collections.abc import Callable

import pytest

from tests.instruments.acceptor import Acceptor


@pytest.mark.parametrize("turns", range(6))
async def test_every_connection_is_closed_however_soon_the_end_comes(turns: int) -> None:
    left = list[object]()
    hook: Callable[..., object] = sys.unraisablehook
    sys.unraisablehook = left.append
    try:
        for _ in range(20):
            listening = socket.create_server(("127.0.0.1", 0))
            acceptor = Acceptor(listening, asyncio.Protocol)
            clients = [socket.create_connection(listening.getsockname()) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            acceptor.close()
            acceptor.close()
            del acceptor, listening
            for client in clients:
                client.close()
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()
    finally:
        sys.unraisablehook = hook
    assert left == []
