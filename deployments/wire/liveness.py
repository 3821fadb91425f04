"""Whether the process at the far end of a connection still lives, though its connection does: a stopped process keeps
its sockets, and the kernel goes on taking bytes for it.

Both ends say something at least twice in `2 * BEAT_S`, a `Beat` where there is nothing else to say. Any byte counts as
life. `Silence` judges; it knows neither sockets nor threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("ray.serve")

# Derived: four silent ticks in a row are 1.2 to 1.5 s without a byte, the 1.5 s within which another has to take over.
# Whoever has sent something since its last tick sends no beat with this one, so that two bytes are at most 0.6 s apart:
# at least two beats are missing then.
BEAT_S = 0.3
SILENT_TICKS = 4  # derived: as above
GIVEN_UP_S = BEAT_S * SILENT_TICKS  # derived: the shortest silence after which a peer is given up
PATIENT_TICKS = 16  # limit: chosen: who gets no processor for 4.8 s serves no better than who hangs, and is not killed
_IDLE_PART = 0.1  # limit: of a time: who ran for less of it, and is ready to, waits for a processor
# Derived: a batch is not begun when nothing that was sent within this time is acknowledged. Whoever has heard of us
# gives us up a second later at the earliest; we send every 0.6 s at least: 0.2 s are left for the way there and back.
LEASE_S = 0.8
# derived: between on time and one tick missed; a tick that comes after more than so many intervals says that this
# process had no processor
_LATE = 1.5
_PEER = struct.Struct("3i")  # pid, uid, gid


class Silence:
    """How long nothing was heard. Invariant: only silence that the peer is to blame for counts.

    A tick does not count when this process came late to it, for want of a processor: what the peer sent may lie here
    unread. On the same machine ticks do not count either in which the peer waited for a processor, by the kernel's
    account; a stopped process waits for none. A peer that waits for too long is given up all the same.
    """

    def __init__(
        self,
        pid: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[int], Processor] | None = None,
    ) -> None:
        """Begin now.

        Args:
            pid: of the peer, where it is a process of this machine, else 0.
            clock: monotonic seconds.
            look: returns what a process has had of the processors so far.
        """
        self._pid = pid
        self._clock = clock
        self._look = look or processor_of
        self._ticked_at = clock()
        self._ticks = self._silent = 0  # silent ones: those that count, and all that came in time
        self._before = _NOTHING

    def is_over(self, *, heard: bool) -> bool:
        """Take a tick, due every `BEAT_S`; return whether the peer is to be given up.

        Args:
            heard: whether anything came since the last tick.
        """
        now = self._clock()
        is_late = now - self._ticked_at > _LATE * BEAT_S
        self._ticked_at = now
        if heard:
            self._ticks = self._silent = 0
        elif not is_late:
            self._ticks += 1
            self._silent += 1
        half = SILENT_TICKS // 2
        if self._pid and self._ticks == half:
            self._before = self._look(self._pid)
        if self._ticks < SILENT_TICKS:
            return False
        if self._pid and self._silent < PATIENT_TICKS and self._has_starved(half * BEAT_S):
            self._ticks = half
            self._before = self._look(self._pid)
            return False
        return True

    def _has_starved(self, lately_s: float) -> bool:
        """Whether the peer was ready to run for most of the time since the look before, and others ran."""
        now, before = self._look(self._pid), self._before
        waits = now.is_ready and now.ran_s - before.ran_s < _IDLE_PART * lately_s
        return waits or now.waited_s - before.waited_s > lately_s / 2


class Processor(NamedTuple):
    """What the threads of a process have had of the processors: how long they ran and how long they were ready before
    they ran, in s, and whether one is ready or runs now. The kernel counts a wait only once it is over."""

    ran_s: float
    waited_s: float
    is_ready: bool


_NOTHING = Processor(0.0, 0.0, is_ready=False)


def processor_of(pid: int) -> Processor:
    """Return what a process has had of the processors; nothing where nobody knows."""
    ran_ns = waited_ns = 0
    is_ready = False
    with contextlib.suppress(OSError, ValueError, IndexError):  # a thread or the process ended, or another system
        for thread in os.scandir(f"/proc/{pid}/task"):
            ran, waited, _ = Path(thread.path, "schedstat").read_text().split()
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
            is_ready = is_ready or _state_of(Path(thread.path)) == "R"
    return Processor(ran_ns / 1e9, waited_ns / 1e9, is_ready)


def _state_of(folder: Path) -> str:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0]


def process_behind(connection: socket.socket) -> int:
    """Return the process at the far end of a Unix socket; 0 for this process, one that is not seen from here, and other
    sockets."""
    if connection.family != socket.AF_UNIX:
        return 0
    with contextlib.suppress(OSError):
        pid: int = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
        return 0 if pid == os.getpid() else pid
    return 0


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped by a signal, and by no debugger."""
    with contextlib.suppress(OSError):
        return _state_of(Path(f"/proc/{pid}")) == "T"
    return False


def end_if_stopped(pid: int) -> None:
    """Kill a process of this machine that a signal has stopped, so that Serve starts another.

    Call it when the process is given up, while a connection to it is open, so that the number is still its own. To wait
    would save nothing: others have what it held, and its listening socket goes on taking clients' connections that
    nobody answers, for as long as it lives.
    """
    if pid and is_stopped(pid):
        logger.warning("process %d is stopped, and is killed", pid)
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            os.kill(pid, signal.SIGKILL)
