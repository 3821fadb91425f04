"""Whether the process at the far end of a connection still lives. The connection does not tell: a stopped process keeps
its sockets, and the kernel goes on taking bytes for it.

Both ends send something at least once in `2 * BEAT_S`; when there is nothing else, they send a `Beat` (heartbeat). Any
byte counts as a sign of life. `Silence` judges; it knows neither sockets nor threads.
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

# Derived: four silent ticks in a row are 1.2 to 1.5 s without a byte, and within 1.5 s another process must take over.
# A process that has sent something since its last tick sends no beat with the next one, so two bytes are at most 0.6 s
# apart. After four silent ticks at least two beats are missing.
BEAT_S = 0.3
SILENT_TICKS = 4  # derived: as above
GIVEN_UP_S = BEAT_S * SILENT_TICKS  # derived: the shortest silence after which a peer is given up
# limit: chosen: a process that gets no processor for 4.8 s serves no better than one that hangs, and is given up (but
# not killed)
PATIENT_TICKS = 16
_IDLE_PART = 0.1  # fitted: a process that is ready and ran for less than this part of a time waits for a processor
# Derived: when nothing that was sent within this time is acknowledged, no batch is begun. A peer that has heard of us
# gives us up a second later at the earliest. We send at least every 0.6 s, so 0.2 s are left for the way there and
# back.
LEASE_S = 0.8
# derived: between 1 (on time) and 2 (one tick missed): a tick that comes after more than this many intervals shows that
# this process had no processor
_LATE = 1.5
_PEER = struct.Struct("3i")  # pid, uid, gid


class Silence:
    """Counts how long a peer was silent. Invariant: only silence counts that is the peer's own fault.

    When this process came late to a tick, for want of a processor, the tick does not count, as bytes of the peer may
    lie here unread. When the peer is on the same machine and waited for a processor, by the kernel's account, the tick
    does not count either; a stopped process waits for none. A peer that waits too long is given up all the same.
    """

    def __init__(
        self,
        pid: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[int], Processor] | None = None,
    ) -> None:
        """Begin to count now.

        Args:
            pid: the peer's process id if it is on this machine, else 0.
            clock: monotonic seconds.
            look: returns how much processor time a process has had so far.
        """
        self._pid = pid
        self._clock = clock
        self._look = look or processor_of
        self._ticked_at = clock()
        self._ticks = self._silent = 0  # silent ticks: those that count, and all that came in time
        self._before = _NOTHING

    def count_tick(self, *, heard: bool) -> bool:
        """Count a tick, due every `BEAT_S`; return whether the peer must be given up.

        Args:
            heard: whether any byte came since the last tick.
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
        """Whether the peer was ready to run for most of the time since the last look, but other processes ran."""
        now, before = self._look(self._pid), self._before
        waits = now.is_ready and now.ran_s - before.ran_s < _IDLE_PART * lately_s
        return waits or now.waited_s - before.waited_s > lately_s / 2


class Processor(NamedTuple):
    """Processor time of a process: how long its threads ran, how long they waited for a processor before they ran (both
    in s), and whether a thread is ready or runs now. The kernel counts a wait only once it is over."""

    ran_s: float
    waited_s: float
    is_ready: bool


_NOTHING = Processor(0.0, 0.0, is_ready=False)


def processor_of(pid: int) -> Processor:
    """Return the processor time of a process; zeros if it is not known."""
    ran_ns = waited_ns = 0
    is_ready = False
    with contextlib.suppress(OSError, ValueError, IndexError):  # a thread or the process ended, or this is not Linux
        for thread in os.scandir(f"/proc/{pid}/task"):
            ran, waited, _ = Path(thread.path, "schedstat").read_text(encoding="utf-8").split()
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
            is_ready = is_ready or _state_of(Path(thread.path)) == "R"
    return Processor(ran_ns / 1e9, waited_ns / 1e9, is_ready)


def _state_of(folder: Path) -> str:
    return (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def process_behind(connection: socket.socket) -> int:
    """Return the process id at the far end of a Unix socket. It is 0 for this process, for a process that is not
    visible from here, and for other sockets."""
    if connection.family != socket.AF_UNIX:
        return 0
    with contextlib.suppress(OSError):
        pid: int = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
        return 0 if pid == os.getpid() else pid
    return 0


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process of our machine; a debugger does not count."""
    with contextlib.suppress(OSError):
        return _state_of(Path(f"/proc/{pid}")) == "T"
    return False


def end_if_stopped(pid: int) -> None:
    """Kill a process of this machine that a signal has stopped, so that Serve starts another.

    Call it when the process is given up, while a connection to it is open, so that the id is still its own. Waiting
    would save nothing: other processes have taken over its work, and as long as it lives, its listening socket takes
    clients' connections that nobody answers.
    """
    if pid and is_stopped(pid):
        logger.warning("process %d is stopped, and is killed", pid)
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            os.kill(pid, signal.SIGKILL)
