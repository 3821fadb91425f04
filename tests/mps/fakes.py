"""A control daemon that lives in memory and plays every failure the real one is known for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tenuto.mps.control import ControlError
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.processes import Processes

UUID = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-99999999-2222-3333-4444-555555555555"


@dataclass
class FakeProcesses(Processes):
    """Processes that exist because a test says so: pid to the moment it began."""

    alive: dict[int, int] = field(default_factory=dict)
    number: int = 1  # of this process's PID namespace
    outside: dict[int, set[int]] = field(default_factory=dict)  # by pid: its numbers in outer namespaces

    def namespace(self) -> int | None:
        return self.number

    def numbers_elsewhere(self, pid: int, host_proc: Path | None = None) -> frozenset[int]:
        return frozenset(self.outside.get(pid, ()))

    environments: dict[int, dict[str, str] | None] = field(default_factory=dict)
    ending: dict[int, int] = field(default_factory=dict)  # by pid: how often it is still seen

    def started_at(self, pid: int) -> int | None:
        if pid in self.ending:
            self.ending[pid] -= 1
            if self.ending[pid] < 0:
                del self.ending[pid], self.alive[pid]
        return self.alive.get(pid)

    def environment_of(self, pid: int) -> dict[str, str] | None:
        return self.environments.get(pid)

    def user_of(self, pid: int) -> int | None:
        return os.getuid() if pid in self.alive else None

    def name_of(self, pid: int) -> str | None:
        return "nvidia-cuda-mps-control" if pid in self.alive else None


@dataclass
class FakeDaemon:
    """A control daemon behind a `Runner`: servers with clients, and the failures below."""

    processes: FakeProcesses
    pid: int = 700
    is_running: bool = False
    server: int | None = None
    status: str = "ACTIVE"
    client_pids: list[int] = field(default_factory=list)
    refusals_before_ready: int = 0  # slow start: so many commands fail first
    writes_pid: bool = True
    ignores_quit: bool = False
    seen_after_quit: int = 0  # times that its process is still seen
    on_command: Callable[[], None] = lambda: None
    answers: dict[str, str] = field(default_factory=dict)  # command to an answer that is not as documented
    commands: list[str] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)
    starts: int = 0
    namespaces: dict[int, int] | None = None  # by client; None: a program too old for `ps`
    takes_one_command: bool = False  # and ignores what else is on its input

    def __call__(self, arguments: list[str], text: str, environment: Mapping[str, str], timeout_s: float) -> str:
        self.environments.append(dict(environment))
        pipes = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        if arguments == ["-d"]:
            self.starts += 1
            self.is_running = True
            self.processes.alive[self.pid] = 1000 + self.starts
            if self.writes_pid:
                (pipes / "nvidia-cuda-mps-control.pid").write_text(f"{self.pid}\n", encoding="utf-8")
            return ""
        self.on_command()
        command = text.strip()
        self.commands.append(command)
        if not self.is_running:
            raise ControlError("Cannot find MPS control daemon process")
        if self.refusals_before_ready:
            self.refusals_before_ready -= 1
            raise ControlError("not ready")
        if command in self.answers:
            return self.answers[command]
        lines = command.splitlines()
        return "".join(self._answer(line) for line in (lines[:1] if self.takes_one_command else lines))

    def _answer(self, command: str) -> str:
        words = command.split()
        if words[0] == "get_default_active_thread_percentage":
            return "100.0\n"
        if words[0] == "get_server_list":
            return f"{self.server}\n" if self.server is not None else ""
        if words[0] == "get_server_status":
            return f"{self.status}\n"
        if words[0] == "get_client_list":
            return "".join(f"{pid}\n" for pid in self.client_pids)
        if words[0] == "ps" and self.namespaces is not None:
            rows = [
                f"{pid} 0 {self.server} GPU-11111111 {self.namespaces[pid]} python -m x" for pid in self.client_pids
            ]
            return "\n".join(["PID ID SERVER DEVICE NAMESPACE COMMAND", *rows])
        if words[0] == "terminate_client":
            self.client_pids.remove(int(words[2]))
            return "0\n"
        if words[0] == "quit":
            if not self.ignores_quit:
                self.is_running = False
                self.processes.ending[self.pid] = self.seen_after_quit
            return ""
        return f"Unknown command {command}\n"

    def connect(self, pid: int) -> None:
        """A CUDA process finds the daemon."""
        self.server = self.server or self.pid + 1
        self.client_pids.append(pid)


class FakeClock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Bench:
    """A node with one GPU and a fake daemon; `gpulet()` is one more process on it."""

    root: Path
    processes: FakeProcesses = field(default_factory=FakeProcesses)
    clock: FakeClock = field(default_factory=FakeClock)
    reapers: list[str] = field(default_factory=list)
    daemon: FakeDaemon = field(init=False)

    def __post_init__(self) -> None:
        self.daemon = FakeDaemon(self.processes)

    def gpulet(self, uuid: str = UUID) -> PrivateDaemon:
        return PrivateDaemon(
            uuid,
            root=self.root,
            runner=self.daemon,
            processes=self.processes,
            clock=self.clock,
            sleep=self.clock.sleep,
            start_reaper=self.reapers.append,
            wall_clock=self.clock,
        )

    def joined(self, uuid: str = UUID) -> PrivateDaemon:
        """Return one more process that uses the daemon."""
        found = self.gpulet(uuid)
        found.join()
        return found
