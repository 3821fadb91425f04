"""One private CUDA MPS daemon per physical GPU: started by the first gpu-let, stopped after the last, never a foreign
one.

Each gpu-let holds a shared lock on its GPU's directory as long as it lives, so the kernel knows who is still there,
even after a kill. A gpu-let cannot stop the daemon itself, being its client until its process has ended: a small
process started with the daemon does (`tenuto.mps.reaper`), once it gets that lock exclusively. A second lock admits
gpu-lets to the GPU one after another. Which daemon is ours is written down when it is started: its pid *and* the moment
that process began, for pids are used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tenuto.mps.control import Control, ControlError, Runner, Subprocesses
from tenuto.mps.inventory import without_mps

__all__ = ["Leftover", "PrivateDaemon", "Processes", "find_leftovers", "mps_root", "pipe_directory"]

DEFAULT_ROOT = "/tmp/tenuto-mps"
MOST_PATH_BYTES = 90  # of a pipe directory: its sockets' paths may have 108 bytes
_OWNER, _PID_FILE = "owner.json", "nvidia-cuda-mps-control.pid"


def mps_root() -> Path:
    """Return the folder of all daemons on a node; TENUTO_MPS_ROOT overrides it."""
    return Path(os.environ.get("TENUTO_MPS_ROOT") or DEFAULT_ROOT)


def pipe_directory(gpu_uuid: str, root: Path | None = None) -> Path:
    """Return the pipe directory of a GPU's daemon: the same for the plan's writer, the daemon and its clients."""
    return (root if root is not None else mps_root()) / gpu_uuid.removeprefix("GPU-") / "pipe"


class Processes:
    """What is known of processes, from /proc."""

    def started_at(self, pid: int) -> int | None:
        """Return the moment a process began, in clock ticks since boot; None when there is none."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
            return None if fields[0] in ("Z", "X") else int(fields[19])
        except (OSError, ValueError, IndexError):
            return None

    def user_of(self, pid: int) -> int | None:
        """Return the user id a process runs under; None when there is none."""
        try:
            return Path(f"/proc/{pid}").stat().st_uid
        except OSError:
            return None


@dataclass(frozen=True)
class Leftover:
    """A directory of ours whose daemon is dead, or runs without any gpu-let."""

    directory: Path
    gpu_uuid: str
    pid: int
    is_running: bool


class PrivateDaemon:
    """The daemon of one GPU, as a gpu-let sees it: `join`, `admitted` around the start of CUDA, at the end `leave`."""

    def __init__(
        self,
        gpu_uuid: str,
        *,
        root: Path | None = None,
        runner: Runner | None = None,
        processes: Processes | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        start_reaper: Callable[[str], None] | None = None,
    ) -> None:
        """Take the GPU; everything after it is for tests and unusual systems.

        Raises:
            ControlError: the pipe directory's path is too long for a socket.
        """
        self.gpu_uuid = gpu_uuid
        pipes = pipe_directory(gpu_uuid, root)
        if len(os.fsencode(pipes)) > MOST_PATH_BYTES:
            raise ControlError(
                f"{pipes} has more than {MOST_PATH_BYTES} bytes, too many for a socket. Set TENUTO_MPS_ROOT to a "
                "shorter folder."
            )
        self._folder = pipes.parent
        self.control = Control(pipes, self._folder / "log", gpu_uuid, runner if runner is not None else Subprocesses())
        self._processes = processes if processes is not None else Processes()
        self._clock, self._sleep = clock, sleep
        self._start_reaper = start_reaper if start_reaper is not None else _start_reaper
        self._presence: int | None = None

    def join(self, timeout_s: float = 60.0) -> None:
        """Count this process among the GPU's gpu-lets, and start the daemon unless it runs already.

        Raises:
            ControlError: the directory belongs to somebody else, a daemon runs there that is not ours, the program is
            missing or fails, or the daemon does not answer in time.
        """
        self._make_folder()
        with self._lock("start", timeout_s):
            self._presence = self._open("users")
            # Shared, so it only waits for one that is just quitting the daemon.
            self._flock(self._presence, fcntl.LOCK_SH, timeout_s, "another gpu-let is stopping the daemon")
            try:
                if self._owned_pid() is None:
                    self._start(timeout_s)
                else:
                    self.control.default_share_pct()
            except BaseException:
                self._forget_presence()
                raise

    def _make_folder(self) -> None:
        try:
            self.control.pipe_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.control.log_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            owner = self._folder.stat().st_uid
        except OSError as error:
            raise ControlError(
                f"{self._folder} cannot be used: {error.strerror}. Set TENUTO_MPS_ROOT to a folder of this user, the "
                "same when the plan is written."
            ) from error
        if owner != os.getuid():
            raise ControlError(
                f"{self._folder} belongs to user {owner}, and this process runs as {os.getuid()}: CUDA MPS serves one "
                "user. Run everything as one user, or set TENUTO_MPS_ROOT."
            )

    def _start(self, timeout_s: float) -> None:
        foreign = self._pid_in_pipe_directory()
        if foreign is not None and self._processes.started_at(foreign) is not None:
            raise ControlError(
                f"process {foreign} runs a CUDA MPS daemon in {self.control.pipe_directory} that Tenuto did not start. "
                f"Stop it yourself (echo quit | CUDA_MPS_PIPE_DIRECTORY={self.control.pipe_directory} "
                "nvidia-cuda-mps-control), or set TENUTO_MPS_ROOT."
            )
        shutil.rmtree(self.control.pipe_directory, ignore_errors=True)  # sockets of a daemon that died
        self.control.pipe_directory.mkdir(mode=0o700, exist_ok=True)
        self.control.start()
        self._wait_until_ready(timeout_s)
        pid = self._pid_in_pipe_directory()
        began = self._processes.started_at(pid) if pid is not None else None
        if pid is None or began is None:
            raise ControlError(
                f"the daemon of {self.gpu_uuid} answers but left no pid in {self.control.pipe_directory}, so it could "
                f"not be told from a foreign one later. {self.control.log_directory / 'control.log'} may say why."
            )
        record = {"pid": pid, "started_at": began, "gpu_uuid": self.gpu_uuid, "uid": os.getuid()}
        partial = self._folder / f"{_OWNER}.part"
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(self._folder / _OWNER)
        self._start_reaper(self.gpu_uuid)

    def _wait_until_ready(self, timeout_s: float) -> None:
        until = self._clock() + timeout_s
        while True:
            try:
                self.control.default_share_pct()
                return
            except ControlError as error:
                if self._clock() >= until:
                    raise ControlError(
                        f"the CUDA MPS daemon of {self.gpu_uuid} is not ready after {timeout_s:g} s: {error}"
                    ) from error
            self._sleep(0.1)

    def _pid_in_pipe_directory(self) -> int | None:
        return _read_pid(self.control.pipe_directory / _PID_FILE)

    def _owned_pid(self) -> int | None:
        """Return the pid of our running daemon; None when there is none or the pid is another process's by now."""
        return _owned_pid(self._folder, self._processes)

    @contextlib.contextmanager
    def admitted(self, timeout_s: float = 300.0) -> Iterator[None]:
        """Hold the GPU's admission while CUDA starts and the models load: start-ups at one time mis-measure memory.

        Raises:
            ControlError: another gpu-let has not finished its start in time, or the server stays in FAULT.
        """
        with self._lock("admission", timeout_s):
            self._wait_out_fault(timeout_s)
            yield

    def _wait_out_fault(self, timeout_s: float) -> None:
        """Wait until clients hit by a fault have left; the server takes nobody before."""
        until = self._clock() + timeout_s
        while (status := self.status()) not in (None, "ACTIVE"):
            if self._clock() >= until:
                raise ControlError(
                    f"the CUDA MPS server of {self.gpu_uuid} stays {status} for {timeout_s:g} s: a client hit by a "
                    f"fault has not left. The clients: {', '.join(map(str, self.clients())) or 'unknown'}."
                )
            self._sleep(0.2)

    def status(self) -> str | None:
        """Return the server's status; None while there is no server because no client has come yet."""
        found = [self.control.server_status(server) for server in self.control.servers()]
        if not found:
            return None
        return next((status for status in ("FAULT", "INITIALIZING") if status in found), "ACTIVE")

    def clients(self) -> tuple[int, ...]:
        """Return the pids of all clients."""
        return tuple(pid for server in self.control.servers() for pid in self.control.clients(server))

    def terminate(self, client: int) -> None:
        """End a client that did not leave by itself; call it before killing the process.

        Raises:
            ControlError: it is no client of this daemon, or the daemon refuses.
        """
        for server in self.control.servers():
            if client in self.control.clients(server):
                self.control.terminate_client(server, client)
                return
        raise ControlError(f"process {client} is no client of the CUDA MPS daemon of {self.gpu_uuid}.")

    def leave(self) -> None:
        """Count this process out; it may stay a client of the daemon until it ends."""
        self._forget_presence()

    def is_ours(self) -> bool:
        """Return whether a daemon runs that Tenuto started."""
        return self._owned_pid() is not None

    def is_used(self) -> bool:
        """Return whether a gpu-let is counted in."""
        return not _nobody_uses(self._folder)

    def stop_if_unused(self, timeout_s: float = 10.0) -> bool:
        """Quit our daemon when no gpu-let is left and its clients have gone; returns whether it was stopped.

        Raises:
            ControlError: the daemon cannot be asked or does not end.
        """
        with self._lock("start", timeout_s):
            probe = self._open("users")
            try:
                fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False  # somebody is still there
            else:
                return self._quit(timeout_s)
            finally:
                os.close(probe)

    def _quit(self, timeout_s: float) -> bool:
        pid = self._owned_pid()
        if pid is None:
            return False
        until = self._clock() + timeout_s
        while self.clients():
            if self._clock() >= until:
                return False
            self._sleep(0.1)
        self.control.quit()
        while self._processes.started_at(pid) is not None:
            if self._clock() >= until:
                raise ControlError(f"the CUDA MPS daemon of {self.gpu_uuid} (pid {pid}) does not end after `quit`.")
            self._sleep(0.1)
        (self._folder / _OWNER).unlink(missing_ok=True)
        shutil.rmtree(self.control.pipe_directory, ignore_errors=True)
        return True

    def _forget_presence(self) -> None:
        if self._presence is not None:
            os.close(self._presence)
            self._presence = None

    def _open(self, name: str) -> int:
        return os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextlib.contextmanager
    def _lock(self, name: str, timeout_s: float) -> Iterator[None]:
        held = self._open(name)
        try:
            self._flock(held, fcntl.LOCK_EX, timeout_s, f"another gpu-let holds {name}.lock in {self._folder}")
            yield
        finally:
            os.close(held)

    def _flock(self, held: int, kind: int, timeout_s: float, why: str) -> None:
        until = self._clock() + timeout_s
        while True:
            try:
                fcntl.flock(held, kind | fcntl.LOCK_NB)
                return
            except OSError:
                if self._clock() >= until:
                    raise ControlError(f"gave up after {timeout_s:g} s: {why}.") from None
            self._sleep(0.05)


def _start_reaper(gpu_uuid: str) -> None:
    """Start the reaper as nobody's child, as Ray kills the children of a replica that ends."""
    command = [sys.executable, "-m", "tenuto.mps.reaper", gpu_uuid]
    detach = '"$@" </dev/null >/dev/null 2>&1 &'
    subprocess.run(
        ["sh", "-c", detach, "sh", *command], env=without_mps(os.environ), check=True, start_new_session=True
    )


def _read_pid(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return None


def _owned_pid(folder: Path, processes: Processes) -> int | None:
    try:
        record = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
        pid, began = int(record["pid"]), int(record["started_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if processes.started_at(pid) == began else None


def find_leftovers(root: Path | None = None, processes: Processes | None = None) -> tuple[Leftover, ...]:
    """Return what gpu-lets of this user left behind: records of dead daemons, and daemons that nobody uses."""
    known = processes if processes is not None else Processes()
    base = root if root is not None else mps_root()
    found = []
    for path in sorted(base.glob(f"*/{_OWNER}")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            uuid, pid = str(record["gpu_uuid"]), int(record["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        running = _owned_pid(path.parent, known) is not None
        if not running or _nobody_uses(path.parent):
            found.append(Leftover(path.parent, uuid, pid, running))
    return tuple(found)


def _nobody_uses(folder: Path) -> bool:
    try:
        probe = os.open(folder / "users.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(probe)
