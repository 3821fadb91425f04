"""The process in the foreground of a command that serves. What serves runs in a process behind it, because a call of
Ray can block for ever, or end its process.

The foreground does little, so that it always can: it takes signals, keeps limits, looks at the processes below it, and
ends all of them. It holds no lock and asks nothing of Ray. Every process that is started below it is its own to end,
also one whose parent was killed (`PR_SET_CHILD_SUBREAPER`).

| signal | while it starts | while it serves | while it drains |
|---|---|---|---|
| SIGINT, SIGTERM | ends at once: 130, 143 | drains: 0 | ends at once: 130, 143 |
| SIGHUP | reloads once it serves | reloads | - |

On a cluster that was there before, what was begun is removed first. One more signal while it ends everything leaves at
once, whatever still runs.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # format: of prctl(2)
_LOOK_S = 1.0  # limit: between looks at the processes below; a death is to be said within 3 s
_HUNG_S = 10.0  # limit: a process that is stopped for so long is dead, and is killed: who watches it can start another
# limit: until it serves; the longest part, the loading of models, has a limit of its own that is shorter
_START_S = 900.0
# limit: Serve gives the entry, then gpu-lets, 10 s each to finish; a busy machine takes three times that
DRAIN_S = 60.0
_LEFT_S = 5.0  # limit: for what still runs when the process behind has ended
_LOST = 3  # format: exit code: the environment failed, and whoever supervises may start again

# The processes of a Ray and a Serve of our own: a part of the command line, what it is, and what its death means.
# Replicas are not listed: Serve starts them again, and the status shows it.
_VITAL = "nothing can serve without it: ending all"
_UNNEEDED, _AGAIN, _AGENT = "what serves does not need it", "it is started again", "Ray's raylet ends with it"
_KNOWN = (
    ("gcs_server", "Ray's head (GCS)", _VITAL),
    ("/raylet/raylet", "Ray's raylet", _VITAL),
    ("ray::DashboardAgent", "Ray's dashboard agent", _AGENT),
    ("ray::RuntimeEnvAgent", "Ray's runtime environment agent", _AGENT),
    ("log_monitor.py", "Ray's log monitor", _UNNEEDED),
    ("dashboard/dashboard.py", "Ray's dashboard", _UNNEEDED),
    ("autoscaler/_private/monitor.py", "Ray's autoscaler", _UNNEEDED),
    ("ray::ServeController", "Serve's controller", _AGAIN),
    ("ray::ProxyActor", "Serve's proxy", _AGAIN),
    ("ray::ServeReplica:tenuto-control", "the controller", _AGAIN),
)
# End by themselves after their last client, and may have clients of other deployments (`tenuto.mps.reaper`).
_OWN_ENDS = ("nvidia-cuda-mps", "tenuto.mps.reaper")


class Stopped(BaseException):
    """The foreground wants an end. As `KeyboardInterrupt`: no failure that anybody handles."""


class Orders:
    """What the foreground wants of the process behind it, and what that says of itself."""

    def __init__(self, line: socket.socket, limit_s: float) -> None:
        self._line = line
        self._limit_s = limit_s
        self.to_stop = threading.Event()
        self._to_reload = threading.Event()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):  # reset, where the foreground died before it read what was said to it
            while word := self._line.recv(1):
                if word == b"r":
                    self._to_reload.set()
                else:
                    self.to_stop.set()
        self.to_stop.set()  # the foreground was killed: nobody is left to keep the limit
        time.sleep(self._limit_s)
        os._exit(_LOST)

    def joined(self) -> None:
        """Say that it has joined a cluster that was there before: what it begins there does not end with it."""
        self._line.send(b"j")

    def serving(self) -> None:
        """Say that it serves from now on."""
        self._line.send(b"s")

    def ending(self) -> None:
        """Say that it ends what it started: what dies from now on is no loss."""
        with suppress(OSError):
            self._line.send(b"e")

    def sleep(self, seconds: float) -> None:
        """Wait for so long; raises `Stopped` as soon as an end is wanted."""
        if self.to_stop.wait(seconds):
            raise Stopped

    def take_reload(self) -> bool:
        """Whether a reload was ordered since the last call."""
        was_set = self._to_reload.is_set()
        self._to_reload.clear()
        return was_set


@dataclass(frozen=True)
class _Below:
    """A process below this one. `command`: the first three words of its command line, or its title."""

    pid: int
    command: str
    state: str  # as in /proc: R, S, …; T: stopped, Z: ended, and nobody has asked for its exit code


def run_in_front(work: Callable[[Orders], int], tell: Callable[[str], None]) -> int:
    """Fork, let `work` run in the process behind, and return its exit code once nothing of it runs any more.

    Args:
        work: serves until its orders say otherwise; returns an exit code, and raises nothing.
        tell: is told what happens.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    others = frozenset(_below(frozenset()))  # are not for this to end
    mine, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        code = _LOST
        try:
            mine.close()
            os.setsid()  # a terminal's Ctrl-C and hang-up come to the foreground alone
            leave_signals_to_the_foreground()
            code = work(Orders(its, DRAIN_S))
        finally:
            os._exit(code)
    its.close()
    with mine, _signals() as taken:
        return _Foreground(child, mine, taken, others, tell).run()


def leave_signals_to_the_foreground() -> None:
    """Let signals do nothing in the process behind. Not ignored: what it starts would inherit that. `ray.init` puts a
    handler of its own, so that this is called again after it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


@contextmanager
def _signals() -> Iterator[int]:
    """Yield a file descriptor that gives the number of each signal as a byte. Handlers do nothing: Python runs them
    between any two instructions, one inside the other, and what they did could be half done."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


class _Foreground:
    def __init__(
        self, child: int, line: socket.socket, taken: int, others: frozenset[int], tell: Callable[[str], None]
    ) -> None:
        self._child, self._line, self._taken, self._others, self._tell = child, line, taken, others, tell
        self._is_serving = self._is_draining = self._is_joined = False
        self._code: int | None = None  # of an end in the middle of the start
        self._until_at = time.monotonic() + _START_S
        self._known: dict[int, str] = {}  # processes that are looked for, by number
        self._stopped_at: dict[int, float] = {}

    def run(self) -> int:
        while True:
            waiting = [number for number in (self._taken, self._line.fileno()) if number >= 0]
            ready, _, _ = select.select(waiting, [], [], _LOOK_S)
            code = self._obey(os.read(self._taken, 64)) if self._taken in ready else None
            if code is not None:
                return self._end(code)
            if self._line.fileno() in ready:
                said = self._line.recv(16)
                if b"e" in said and not self._is_draining:
                    self._is_draining, self._until_at = True, time.monotonic() + DRAIN_S
                elif b"j" in said:
                    self._is_joined = True
                elif said and not self._is_draining:
                    self._is_serving, self._until_at = True, float("inf")
                elif not said:
                    self._line.close()
            below = _below(self._others)
            is_lost = not self._is_draining and self._lost(below)  # said also where what serves ended by that at once
            ended = self._reap(below)
            if ended is not None:
                if os.WIFSIGNALED(ended):
                    self._tell(f"the process that serves was killed by signal {os.WTERMSIG(ended)}; ending all")
                code = _LOST if os.WIFSIGNALED(ended) else os.WEXITSTATUS(ended)
                patience_s = 0.0 if os.WIFSIGNALED(ended) else _LEFT_S
                return self._end(code if self._code is None else self._code, patience_s)
            if is_lost:
                return self._end(_LOST)
            self._kill_hung(below)
            if time.monotonic() > self._until_at:
                what = "drained" if self._is_draining else "begun to serve"
                limit_s = DRAIN_S if self._is_draining else _START_S
                self._tell(f"has not {what} within {limit_s:g} s; ending all by force")
                return self._end(_LOST)

    def _obey(self, taken: bytes) -> int | None:
        """Take signals; return the exit code where everything is to end at once."""
        for number in taken:
            if number == signal.SIGHUP:
                with suppress(OSError):
                    self._line.send(b"r")
            elif number in (signal.SIGINT, signal.SIGTERM):
                if self._is_draining or not (self._is_serving or self._is_joined):
                    return 128 + number
                if not self._is_serving:
                    self._code = 128 + number
                self._is_draining, self._until_at = True, time.monotonic() + DRAIN_S
                with suppress(OSError):
                    self._line.send(b"d")
        return None

    def _reap(self, below: dict[int, _Below]) -> int | None:
        """Take the exit states of what ended below; return that of the process behind, None while it runs."""
        found = None
        for pid in [process.pid for process in below.values() if process.state == "Z"]:
            with suppress(ChildProcessError):  # of another process below
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended == self._child:
                    found = status
        return found

    def _lost(self, below: dict[int, _Below]) -> bool:
        """Say which known processes have ended since the last look; return whether nothing can serve any more."""
        gone = {self._known[pid] for pid in self._known if pid not in below or below[pid].state == "Z"}
        self._known = {
            pid: what
            for pid, process in below.items()
            for part, what, _ in _KNOWN
            if part in process.command and process.state != "Z"
        }
        for _, what, then in _KNOWN:
            if what in gone:
                self._tell(f"{what} died: {then}")
        return any(what in gone for _, what, then in _KNOWN if then is _VITAL)

    def _kill_hung(self, below: dict[int, _Below]) -> None:
        """Kill what has been stopped for long, so that it is started again, or its loss is seen. But not what serves
        does without: the death of a stopped agent would take all with it."""
        now = time.monotonic()
        stopped = {pid: process for pid, process in below.items() if process.state == "T"}
        for pid in stopped.keys() - self._stopped_at.keys():
            then = "what serves goes on without it"
            if not _is_spared(stopped[pid]):
                then = f"it is killed if it does not go on within {_HUNG_S:g} s"
            self._tell(f"{_name_of(stopped[pid])} is stopped; {then}")
        self._stopped_at = {pid: self._stopped_at.get(pid, now) for pid in stopped}
        for pid, since in self._stopped_at.items():
            if now - since > _HUNG_S and not _is_spared(stopped[pid]):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _end(self, code: int, patience_s: float = 0.0) -> int:
        """End everything below, at once or as far as it has not ended by itself until then; return the exit code."""
        soon = time.monotonic() + patience_s
        late = soon + _LEFT_S
        while time.monotonic() < late:
            below = _below(self._others)
            self._reap(below)
            left = [process for process in below.values() if not any(own in process.command for own in _OWN_ENDS)]
            if not left:
                break
            for process in left if time.monotonic() >= soon else ():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            if select.select([self._taken], [], [], 0.05)[0]:
                taken = os.read(self._taken, 64)
                if signal.SIGINT in taken or signal.SIGTERM in taken:
                    if patience_s == 0.0 and time.monotonic() > soon + 1.0:
                        os._exit(code)
                    soon = time.monotonic()
        else:
            self._tell(f"could not end {', '.join(str(p.pid) for p in left)}")
        return code


def _is_spared(process: _Below) -> bool:
    return any(part in process.command for part, _, then in _KNOWN if then in (_UNNEEDED, _AGENT))


def _name_of(process: _Below) -> str:
    known = [what for part, what, _ in _KNOWN if part in process.command]
    return f"{known[0] if known else process.command.split(' ')[0] or 'a process'} (pid {process.pid})"


def _below(others: frozenset[int]) -> dict[int, _Below]:
    """Return all processes below this one, by number, but for some others and what is below those."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append((int(entry.name), state))
    found: dict[int, _Below] = {}
    waiting = [os.getpid()]
    while waiting:
        for pid, state in children.get(waiting.pop(), ()):
            if pid in others:
                continue
            words: list[bytes] = []
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]
            found[pid] = _Below(pid, b" ".join(words).decode(errors="replace"), state)
            waiting.append(pid)
    return found
