"""One private CUDA MPS daemon per physical GPU. The first gpu-let starts it, and it is stopped after the last one. A
foreign daemon is never used.

Each gpu-let holds a shared lock on its GPU's directory as long as it lives, so the kernel knows which gpu-lets are
there, even after a kill. A gpu-let cannot stop the daemon itself, because it is a client until its process has ended. A
small process that is started with the daemon does (`tenuto.mps.reaper`), once it gets the lock exclusively. A second
lock admits gpu-lets to the GPU one after another. When we start a daemon, we write down its pid *and* the time at which
the process began, because pids are reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tenuto.documents import write_whole
from tenuto.mps.control import BINARY, Control, ControlError, MpsClient, Runner, Subprocesses
from tenuto.mps.faults import MOST_FAULTS, WINDOW_S, FaultLog
from tenuto.mps.folders import MOST_PATH_BYTES, OWNER, Record, is_unused, pipe_directory, read_record, why_unsafe
from tenuto.mps.inventory import without_mps
from tenuto.mps.processes import Processes

_PID_FILE = "nvidia-cuda-mps-control.pid"


class PrivateDaemon:
    """The daemon of one GPU, as a gpu-let uses it: `join`, then `admitted` around the start of CUDA, at the end
    `leave`."""

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
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Take the GPU. The other arguments are for tests and unusual systems.

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
        self.processes = processes if processes is not None else Processes()
        self._clock, self._sleep = clock, sleep
        self._start_reaper = start_reaper if start_reaper is not None else detach_reaper
        self._faults = FaultLog(self._folder / "faults.json", wall_clock)
        self._presence: int | None = None
        self._server: int | None = None  # the server that `look` found last
        self.takes_two_commands: bool | None = None  # whether one run of the program takes two; None: not known yet

    def join(self, timeout_s: float = 60.0) -> None:
        """Count this process among the GPU's gpu-lets, and start the daemon unless it runs already.

        Raises:
            ControlError: the directory belongs to another user, a daemon runs there that is not ours, the program is
            missing or fails, or the daemon does not answer in time.
        """
        self._make_folder()
        with self._lock("start", timeout_s):
            self._presence = self._open("users")
            try:
                # The lock is shared, so it only waits for a process that is quitting the daemon.
                self._flock(self._presence, fcntl.LOCK_SH, timeout_s, "another gpu-let is stopping the daemon")
                if self._owned_pid() is None:
                    self._start(timeout_s)
                else:
                    self.control.default_share_pct()
            except BaseException:
                self.leave()
                raise

    def _make_folder(self) -> None:
        try:
            for folder in (self._folder.parent, self._folder):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                if (fault := why_unsafe(folder, os.getuid())) is not None:
                    raise ControlError("{}. Cure: {}.".format(*fault))
            self.control.pipe_directory.mkdir(exist_ok=True, mode=0o700)
            self.control.log_directory.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ControlError(
                f"{self._folder} cannot be used: {error.strerror}. Set TENUTO_MPS_ROOT to a folder of this user, the "
                "same when the plan is written."
            ) from error

    def _start(self, timeout_s: float) -> None:
        foreign = self._pid_in_pipe_directory()
        record = read_record(self._folder)
        is_our_dead = record is not None and record.pid == foreign  # its number may be another process's by now
        if foreign is not None and not is_our_dead and self.processes.started_at(foreign) is not None:
            if self._is_orphan(foreign):
                self._wait_until_ready(timeout_s)
                self._write_down(foreign)
                return
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
        if pid is None or self.processes.started_at(pid) is None:
            raise ControlError(
                f"the daemon of {self.gpu_uuid} answers but left no pid in {self.control.pipe_directory}, so it could "
                f"not be told from a foreign one later. {self.control.log_directory / 'control.log'} may say why."
            )
        self._write_down(pid)

    def _is_orphan(self, pid: int) -> bool:
        """Return whether a daemon in our folder without a record is ours. The process that started it may have died
        before it wrote the record. Our daemons run as this user, for this GPU and in this folder; no other one does."""
        environment = self.processes.environment_of(pid) or {}
        own_environment = self.control.environment()
        return (
            self.processes.user_of(pid) == os.getuid()
            and (self.processes.name_of(pid) or "").startswith(BINARY)
            and all(
                environment.get(key) == own_environment[key]
                for key in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY")
            )
        )

    def _write_down(self, pid: int) -> None:
        """Record a daemon as ours, and start the reaper that will stop it."""
        record = Record(pid, self.processes.started_at(pid) or 0, self.gpu_uuid, self.processes.namespace())
        write_whole(self._folder / OWNER, msgspec.json.encode(record).decode())
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
        try:
            return int((self.control.pipe_directory / _PID_FILE).read_text(encoding="utf-8").strip())
        except (OSError, ValueError):
            return None

    def _owned_pid(self) -> int | None:
        """Return the pid of our running daemon; None if there is none, or if the pid belongs to another process now.

        A daemon in another container is not visible from here; it counts as running if it answers.
        """
        record = read_record(self._folder)
        if record is None:
            return None
        if record.is_of(self.processes):
            return record.pid if self.processes.started_at(record.pid) == record.started_at else None
        try:
            self.control.default_share_pct()
        except ControlError:
            return None
        return record.pid

    def speaks_our_pids(self) -> bool:
        """Return whether the daemon was started in this process's PID namespace, so that its pids are ours."""
        record = read_record(self._folder)
        return record is not None and record.is_of(self.processes)

    @contextlib.contextmanager
    def admitted(self, timeout_s: float = 300.0) -> Iterator[None]:  # limit: for the gpu-lets before it to start
        """Hold the GPU's admission while CUDA starts and the models load. (Two starts at once would measure each
        other's memory.)

        Raises:
            ControlError: another gpu-let has not finished its start in time, the server stays in FAULT, or it has been
                in FAULT too often lately.
        """
        with self._lock("admission", timeout_s):
            self._wait_out_fault(timeout_s)
            with self._lock("faults", timeout_s):
                self._faults.over()
                wait_s = self._faults.wait_s()
            if wait_s > 0:
                raise ControlError(
                    f"{self.gpu_uuid} has faulted {MOST_FAULTS} times within {WINDOW_S / 60:g} min, so its gpu-lets "
                    f"are not started again for {wait_s:.0f} s. Find the model whose kernels fault (the gpu-lets' logs "
                    "name the batch that failed) and take it out of the plan, or check the GPU: nvidia-smi -q -d ECC. "
                    f"Once that is cured, delete {self._faults.path} to start at once."
                )
            yield

    @contextlib.contextmanager
    def turn(self, is_lost: Callable[[], bool], timeout_s: float = 300.0) -> Iterator[None]:  # limit: likewise
        """Hold the GPU's admission while a running gpu-let loads more models. It never waits for a fault of its own.

        Args:
            is_lost: returns whether this process must leave, so that waiting is useless.
            timeout_s: how long the start of another gpu-let may take.

        Raises:
            ControlError: another start took too long, the process is lost, or the server is in FAULT.
        """
        with self._lock("admission", timeout_s, is_lost):
            status = self.status()
            if status == "FAULT":
                raise ControlError(f"the CUDA MPS server of {self.gpu_uuid} is in FAULT: this process has to leave.")
            yield

    def _wait_out_fault(self, timeout_s: float) -> None:
        """Wait until all clients hit by a fault have left; before that, the server takes no new ones."""
        until = self._clock() + timeout_s
        while (status := self.status()) not in (None, "ACTIVE"):
            if status == "FAULT":
                self.note_fault()
            if self._clock() >= until:
                raise ControlError(
                    f"the CUDA MPS server of {self.gpu_uuid} stays {status} for {timeout_s:g} s: a client hit by a "
                    f"fault has not left. The clients: {', '.join(map(str, self.clients())) or 'unknown'}."
                )
            self._sleep(0.2)

    def note_fault(self) -> None:
        """Record that the server is in FAULT. All gpu-lets that see the same fault make one entry."""
        with self._lock("faults", 10.0):  # limit: for another process that counts
            self._faults.note()

    def recent_faults(self) -> int:
        """Return the number of faults of the last `WINDOW_S`."""
        return self._faults.recent()

    def status(self) -> str | None:
        """Return the server's status; None while there is no server because no client has come yet."""
        statuses = [self.control.server_status(server) for server in self.control.servers()]
        if not statuses:
            return None
        return next((status for status in ("FAULT", "INITIALIZING") if status in statuses), "ACTIVE")

    def look(self) -> tuple[str | None, tuple[int, ...]]:
        """Return status and clients as `status` and `clients` do, but from one run of the control program as long as
        the server stays the same. (Every gpu-let asks this every two seconds.)"""
        server = self._server
        if server is not None and self.takes_two_commands is not False:
            try:
                states = self.control.look_at(server)
            except ControlError:
                self._server = None
            else:
                self.takes_two_commands = True
                return states
        servers = self.control.servers()
        if servers == (server,) and self.takes_two_commands is None:
            self.takes_two_commands = False  # the server is the same, so the program did not understand
        self._server = servers[0] if len(servers) == 1 else None
        return self.status(), self.clients()

    def clients(self) -> tuple[int, ...]:
        """Return the pids of all clients."""
        return tuple(pid for server in self.control.servers() for pid in self.control.clients(server))

    def described_clients(self) -> tuple[MpsClient, ...]:
        """Return the clients with their PID namespaces; none if the control program does not tell."""
        try:
            return self.control.described_clients()
        except ControlError:
            return ()

    def terminate(self, client: int) -> None:
        """End a client that did not leave by itself. Call this before killing the process.

        Raises:
            ControlError: the process is no client of this daemon, or the daemon refuses.
        """
        for server in self.control.servers():
            if client in self.control.clients(server):
                self.control.terminate_client(server, client)
                return
        raise ControlError(f"process {client} is no client of the CUDA MPS daemon of {self.gpu_uuid}.")

    def leave(self) -> None:
        """Give up this process's place. It may stay a client of the daemon until it ends."""
        if self._presence is not None:
            os.close(self._presence)
            self._presence = None

    def is_ours(self) -> bool:
        """Return whether a daemon runs that Tenuto started."""
        return self._owned_pid() is not None

    def is_used(self) -> bool:
        """Return whether a gpu-let has a place."""
        return not is_unused(self._folder)

    def stop_if_unused(self, timeout_s: float = 10.0) -> bool:  # limit: for the daemon to end
        """Quit our daemon when no gpu-let is left and its clients have gone; returns whether it was stopped.

        Raises:
            ControlError: the daemon cannot be asked or does not end.
        """
        with self._lock("start", timeout_s):
            probe = self._open("users")
            try:
                fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False  # a gpu-let or client is still there
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
        until = self._clock() + timeout_s  # a new limit, as on a busy machine the answers before took seconds
        while self.processes.started_at(pid) is not None:
            if self._clock() >= until:
                raise ControlError(f"the CUDA MPS daemon of {self.gpu_uuid} (pid {pid}) does not end after `quit`.")
            self._sleep(0.1)
        (self._folder / OWNER).unlink(missing_ok=True)
        self._faults.clear()
        shutil.rmtree(self.control.pipe_directory, ignore_errors=True)
        return True

    def _open(self, name: str) -> int:
        return os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextlib.contextmanager
    def _lock(self, name: str, timeout_s: float, gives_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
        held = self._open(name)
        try:
            why = f"another gpu-let holds {name}.lock in {self._folder}"
            self._flock(held, fcntl.LOCK_EX, timeout_s, why, gives_up)
            yield
        finally:
            os.close(held)

    def _flock(
        self, held: int, kind: int, timeout_s: float, why: str, gives_up: Callable[[], bool] = lambda: False
    ) -> None:
        until = self._clock() + timeout_s
        while True:
            try:
                fcntl.flock(held, kind | fcntl.LOCK_NB)
                return
            except OSError:
                if gives_up():
                    raise ControlError(f"does not wait any longer, as it has to leave: {why}.") from None
                if self._clock() >= until:
                    raise ControlError(f"gave up after {timeout_s:g} s: {why}.") from None
            self._sleep(0.05)


def detach_reaper(gpu_uuid: str) -> None:
    """Start the reaper detached from this process, because Ray kills the children of a replica that ends."""
    command = [sys.executable, "-P", "-m", "tenuto.mps.reaper", gpu_uuid]
    detach = '"$@" </dev/null >/dev/null 2>&1 &'
    subprocess.run(
        ["sh", "-c", detach, "sh", *command], env=without_mps(os.environ), check=True, start_new_session=True
    )
