"""A line that takes its time and loses packets, for kernels without `netem`: whatever comes out of one of two network
interfaces goes into the other one later, or never.

    python -m tests.instruments.far_line ONE OTHER DELAY_MS LOSS_PCT SEED

Both directions are delayed, and lose, alike; the seed says which packets. It says `ready` and runs until one of the
interfaces is taken away.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

__all__ = ["carry"]

# of <linux/if_packet.h> and <asm/socket.h>, which Python does not name
_SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING, _SO_RCVBUFFORCE = 263, 15, 23, 33
_ALL, _LARGEST, _ROOM_BYTES = 3, 70_000, 8 << 20


def _end(interface: str) -> socket.socket:
    """Return what receives and sends an interface's packets, with what the kernel left for its hardware to do."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    end.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    end.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM_BYTES)
    end.setblocking(False)
    end.bind((interface, _ALL))
    return end


def carry(one: str, other: str, delay_s: float, loss: float, seed: int) -> None:
    """Carry packets between two interfaces, of which the part `loss` is lost.

    Raises:
        OSError: one of them is there no more.
    """
    ends, rng = [_end(one), _end(other)], random.Random(seed)
    far = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()  # in order, as all take equally long
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], wait_s)[0]:
            packet = end.recv(_LARGEST)
            if rng.random() >= loss:
                under_way.append((time.monotonic() + delay_s, far[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            end.send(packet)


if __name__ == "__main__":
    with suppress(OSError):
        carry(sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1000.0, float(sys.argv[4]) / 100.0, int(sys.argv[5]))
