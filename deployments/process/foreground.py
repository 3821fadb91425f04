"""The process in the foreground of a command that serves. A process behind it does the serving, because a call of Ray
can block for ever or end its process.

This is where SIGTERM becomes a graceful shutdown (drain).

The foreground does so little that nothing can block it: it takes signals, keeps limits, watches the processes below it,
and ends them. It holds no lock and asks nothing of Ray. It can end every process below it, also one whose parent was
killed (`PR_SET_CHILD_SUBREAPER`).

| signal | while it starts | while it serves | while it drains |
|---|---|---|---|
| SIGINT, SIGTERM | ends at once: 130, 143 | drains: 0 | ends at once: 130, 143 |
| SIGHUP | reloads once it serves | reloads | - |

When the command joined a running cluster, it first removes there what it has begun. One more signal while the
foreground ends everything makes it leave at once, whatever still runs.
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
_LOOK_S = 1.0  # pace: time between looks at the processes below; a death must be reported within 3 s
_HUNG_S = 10.0  # limit: a process that is stopped this long counts as dead and is killed, so that it can be replaced
# limit: time until the command serves; the longest part, loading models, has a shorter limit of its own
_START_S = 900.0
# limit: Serve gives all processes `UserConfig.ends_s` to end, 40 s at most; a busy machine takes longer for the rest
DRAIN_S = 60.0
_LEFT_S = 5.0  # limit: time for other processes to end after the process behind has ended
_LOOKS_S = 20.0  # limit: until the foreground has looked, on a busy machine
_TAKEN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_LOST = 3  # format: exit code: the environment failed, and a supervisor may start the command again

# Processes of our own Ray and Serve: a part of the command line, what the process is, and what its death means.
# Replicas are not listed: Serve starts them again, and the status shows it.
_VITAL = "nothing can serve without it: ending all. Run the command again; Ray's session_latest/logs say more"
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
# These end by themselves after their last client, which may be of another deployment (`tenuto.mps.reaper`).
_OWN_ENDS = ("nvidia-cuda-mps", "tenuto.mps.reaper")


class Stopped(BaseException):
    """The foreground orders an end. It is no `Exception`, as `KeyboardInterrupt` is none, so that nobody handles it."""


class Orders:
    """The line between the foreground and the process behind it: orders come in, and reports go out."""

    def __init__(self, line: socket.socket, limit_s: float) -> None:
        self._line = line
        self._limit_s = limit_s
        self.to_stop = threading.Event()
        self._to_reload = threading.Event()
        self._has_looked = threading.Event()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):  # the connection is reset if the foreground died before it read our reports
            while word := self._line.recv(1):
                if word == b"r":
                    self._to_reload.set()
                elif word == b"l":
                    self._has_looked.set()
                else:
                    self.to_stop.set()
        self.to_stop.set()  # the foreground was killed, so this process must keep the limit itself
        time.sleep(self._limit_s)
        os._exit(_LOST)

    def joined(self) -> None:
        """Report that this process has joined a running cluster, so what it begins there does not end with it."""
        self._line.send(b"j")

    def serving(self) -> None:
        """Report that this process serves from now on."""
        self._line.send(b"s")

    def ending(self) -> None:
        """Report that this process ends what it started, so deaths of processes from now on are no loss."""
        with suppress(OSError):
            self._line.send(b"e")

    def await_look(self) -> None:
        """Have the foreground look at the processes below it, and wait until it has. When one has died without which
        nothing can serve, or is about to with its agent, the foreground says so and ends all, this process too."""
        self._has_looked.clear()
        with suppress(OSError):
            self._line.send(b"l")
            self._has_looked.wait(_LOOKS_S)

    def sleep(self, seconds: float) -> None:
        """Wait; raises `Stopped` as soon as the foreground orders an end."""
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
    state: str  # as in /proc: R, S, …; T: stopped; Z: ended, but its parent has not read its exit code


def run_in_front(work: Callable[[Orders], int], tell: Callable[[str], None]) -> int:
    """Fork, let `work` run in the process behind, and return its exit code when it and all its processes have ended.

    Args:
        work: serves until its orders say otherwise; returns an exit code, and raises nothing.
        tell: is called with messages about what happens.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    others = frozenset(_below(frozenset()))  # processes that were there before, which must not be ended
    mine, its = socket.socketpair()
    with mine, _signals() as taken:
        signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)  # what comes now is not told to the foreground twice
        child = os.fork()
        if child == 0:
            code = _LOST
            try:
                mine.close()
                os.setsid()  # so that a terminal's Ctrl-C and hang-up come only to the foreground
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                leave_signals_to_the_foreground()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _TAKEN)
                code = work(Orders(its, DRAIN_S))
            finally:
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TAKEN)
        its.close()
        return _Foreground(child, mine, taken, others, tell).run()


def leave_signals_to_the_foreground() -> None:
    """Let signals do nothing in the process behind. They are handled and not ignored, as processes that it starts would
    inherit that. `ray.init` sets its own handlers, so call this again after it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


@contextmanager
def _signals() -> Iterator[int]:
    """Yield a file descriptor that gives the number of each signal as a byte. The handlers themselves do nothing,
    because Python runs them between any two instructions, even one inside the other."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in _TAKEN}
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
        self._code: int | None = None  # the exit code when the start was interrupted
        self._until_at = time.monotonic() + _START_S
        self._known: dict[int, str] = {}  # processes of `_KNOWN` that run, by pid
        self._has_to_look = self._raylet_ends = False
        self._stopped_at: dict[int, float] = {}

    def run(self) -> int:
        while True:
            waiting = [number for number in (self._taken, self._line.fileno()) if number >= 0]
            ready, _, _ = select.select(waiting, [], [], _LOOK_S)
            report = b""
            if self._line.fileno() in ready:  # before signals: who was told that it serves may have sent them
                report = self._line.recv(16)
                if not report:
                    self._line.close()
                self._is_joined = self._is_joined or b"j" in report
                if b"s" in report and not self._is_draining:
                    self._is_serving, self._until_at = True, float("inf")
                if b"e" in report and not self._is_draining:
                    self._is_draining, self._until_at = True, time.monotonic() + DRAIN_S
            code = self._obey(os.read(self._taken, 64)) if self._taken in ready else None
            if code is not None:
                return self._end(code)
            below = _below(self._others)
            # Before `_reap`, so that the cause is reported, too.
            is_lost = not self._is_draining and self._report_lost(below)
            ended = self._reap(below)
            if ended is not None:
                if os.WIFSIGNALED(ended):
                    self._tell(f"the process that serves was killed by signal {os.WTERMSIG(ended)}; ending all")
                # Ray itself ends a process with 1 when its raylet has died.
                code = _LOST if is_lost or os.WIFSIGNALED(ended) else os.WEXITSTATUS(ended)
                patience_s = 0.0 if os.WIFSIGNALED(ended) else _LEFT_S
                return self._end(code if self._code is None else self._code, patience_s)
            if is_lost:
                return self._end(_LOST)
            self._has_to_look = self._has_to_look or b"l" in report
            if self._has_to_look and not self._raylet_ends:
                self._has_to_look = False
                with suppress(OSError):
                    self._line.send(b"l")
            self._kill_hung(below)
            if time.monotonic() > self._until_at:
                what = "drained" if self._is_draining else "begun to serve"
                limit_s = DRAIN_S if self._is_draining else _START_S
                self._tell(f"has not {what} within {limit_s:g} s; ending all by force")
                return self._end(_LOST)

    def _obey(self, taken: bytes) -> int | None:
        """Take signals; return the exit code when everything must end at once."""
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
        """Take the exit states of processes that ended; return that of the process behind, None while it runs."""
        own_status = None
        for pid in [process.pid for process in below.values() if process.state == "Z"]:
            with suppress(ChildProcessError):  # the child of another process
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended == self._child:
                    own_status = status
        return own_status

    def _report_lost(self, below: dict[int, _Below]) -> bool:
        """Report which known processes have ended since the last look; return whether serving has become impossible."""
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
                self._raylet_ends = self._raylet_ends or then is _AGENT
        return any(what in gone for _, what, then in _KNOWN if then is _VITAL)

    def _kill_hung(self, below: dict[int, _Below]) -> None:
        """Kill processes that have been stopped for long, so that they are started again or their loss is seen.
        Processes that serving does not need are spared, as the death of a stopped agent of Ray would end all."""
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
        """End all processes below; those that have not ended after `patience_s` are killed. Return the exit code."""
        soon = time.monotonic() + patience_s
        late, looked_at = soon + _LEFT_S, float("inf")
        while time.monotonic() < late:
            below = _below(self._others)
            self._reap(below)
            left = [process for process in below.values() if not any(own in process.command for own in _OWN_ENDS)]
            if not left:
                break
            for process in left if time.monotonic() >= soon else ():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            if select.select([self._taken], [], [], 0.05)[0]:  # pace: between two looks
                taken = os.read(self._taken, 64)
                if signal.SIGINT in taken or signal.SIGTERM in taken:
                    if patience_s == 0.0 and time.monotonic() > looked_at + 1.0:  # it came after all were killed once
                        os._exit(code)
                    soon = time.monotonic()
            looked_at = min(looked_at, time.monotonic())
        else:
            self._tell(f"could not end {', '.join(str(p.pid) for p in left)}")
        return code


def _is_spared(process: _Below) -> bool:
    return any(part in process.command for part, _, then in _KNOWN if then in (_UNNEEDED, _AGENT))


def _name_of(process: _Below) -> str:
    known = [what for part, what, _ in _KNOWN if part in process.command]
    return f"{known[0] if known else process.command.split(' ')[0] or 'a process'} (pid {process.pid})"


def _below(others: frozenset[int]) -> dict[int, _Below]:
    """Return all processes below this one by pid, without `others` and the processes below those."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            state, parent = (
                (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            )
            children.setdefault(int(parent), []).append((int(entry.name), state))
    processes: dict[int, _Below] = {}
    waiting = [os.getpid()]
    while waiting:
        for pid, state in children.get(waiting.pop(), ()):
            if pid in others:
                continue
            words: list[bytes] = []
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]
            processes[pid] = _Below(pid, b" ".join(words).decode(errors="replace"), state)
            waiting.append(pid)
    return processes
