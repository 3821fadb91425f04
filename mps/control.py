"""The commands of a CUDA MPS control daemon, typed, with every answer parsed strictly (interface v2, NVIDIA's default).

The daemon takes one command on the standard input of a second `nvidia-cuda-mps-control`. Its answer is text without a
version. An answer that is not exactly as documented is an error here; nothing is guessed.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from tenuto.errors import EnvironmentFaultError
from tenuto.mps.inventory import without_mps

BINARY = "nvidia-cuda-mps-control"
ServerStatus = Literal["INITIALIZING", "ACTIVE", "FAULT"]
_STATUSES = ("INITIALIZING", "ACTIVE", "FAULT")
_PID = r"[1-9]\d*"


class ControlError(EnvironmentFaultError):
    """The control daemon cannot be asked, or gives an answer that is not documented."""


class Runner(Protocol):
    """Runs the control program; tests replace it."""

    def __call__(self, arguments: list[str], text: str, environment: Mapping[str, str], timeout_s: float) -> str:
        """Return the standard output; raises `ControlError` when the program fails or does not end in time."""
        ...


class Subprocesses:
    """Runs the installed control program."""

    def __init__(self, binary: str = BINARY) -> None:
        """Take the name or path of the program."""
        self._binary = binary

    def __call__(self, arguments: list[str], text: str, environment: Mapping[str, str], timeout_s: float) -> str:
        what = text.strip() or " ".join(arguments) or "start"
        # Files, not pipes: a daemon that is started here keeps inherited files open, so a pipe would never end.
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as output,
            tempfile.TemporaryFile("w+", encoding="utf-8") as complaint,
        ):
            try:
                ended = subprocess.run(
                    [self._binary, *arguments],
                    input=text,
                    env=dict(environment),
                    stdout=output,
                    stderr=complaint,
                    encoding="utf-8",
                    timeout=timeout_s,
                    check=False,
                    start_new_session=True,
                )
            except FileNotFoundError:
                raise ControlError(
                    f"{self._binary} is not installed. Install the CUDA MPS control program of the driver, or plan "
                    "with `mps: off`."
                ) from None
            except subprocess.TimeoutExpired:
                raise ControlError(
                    f"{self._binary} did not answer '{what}' within {timeout_s:g} s. Look into control.log, and "
                    "stop the daemon if it hangs."
                ) from None
            except OSError as error:
                raise ControlError(f"{self._binary} cannot be run: {error.strerror}.") from error
            output.seek(0)
            complaint.seek(0)
            answer = output.read()
            if ended.returncode != 0:
                words = (complaint.read() or answer).strip() or "nothing"
                raise ControlError(f"{self._binary} failed at '{what}' with code {ended.returncode} and said: {words}")
            return answer


@dataclass(frozen=True)
class MpsClient:
    """One row of the command `ps`: a client's pid and the number of its PID namespace."""

    pid: int
    namespace: int


@dataclass(frozen=True)
class Control:
    """One daemon, found through its pipe directory. Every method is one command and may raise `ControlError`."""

    pipe_directory: Path
    log_directory: Path
    gpu_uuid: str
    run: Runner
    timeout_s: float = 10.0  # limit: for the daemon's answer

    def environment(self) -> dict[str, str]:
        """Return the environment of the daemon: only its own GPU, its own directories, and no share. (A share of the
        daemon would tighten the shares of its clients.)"""
        return {
            **without_mps(os.environ),
            "CUDA_VISIBLE_DEVICES": self.gpu_uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_directory),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log_directory),
        }

    def start(self) -> None:
        """Start the daemon in the background."""
        self.run(["-d"], "", self.environment(), self.timeout_s)

    def _ask(self, command: str) -> list[str]:
        answer = self.run([], command + "\n", self.environment(), self.timeout_s)
        return [line.strip() for line in answer.splitlines() if line.strip()]

    def default_share_pct(self) -> float:
        """Return the share that later servers start with; the daemon answers this as soon as it is ready."""
        lines = self._ask("get_default_active_thread_percentage")
        if len(lines) != 1 or not re.fullmatch(r"\d+(\.\d+)?", lines[0]) or not 0 < float(lines[0]) <= 100:
            raise self._unexpected("get_default_active_thread_percentage", lines, "one percentage")
        return float(lines[0])

    def servers(self) -> tuple[int, ...]:
        """Return the pids of the daemon's servers; none before the first client."""
        return self._pids("get_server_list")

    def server_status(self, server: int) -> ServerStatus:
        """Return whether a server takes clients. FAULT: the fault of one client hit all, so all must leave."""
        lines = self._ask(f"get_server_status {server}")
        if len(lines) != 1 or lines[0] not in _STATUSES:
            raise self._unexpected(f"get_server_status {server}", lines, "INITIALIZING, ACTIVE or FAULT")
        return cast(ServerStatus, lines[0])

    def look_at(self, server: int) -> tuple[ServerStatus, tuple[int, ...]]:
        """Return a server's status and clients from one run of the program, which takes one command per line."""
        commands = f"get_server_status {server}\nget_client_list {server}"
        status, *clients = self._ask(commands) or [""]
        if status not in _STATUSES or not all(re.fullmatch(_PID, line) for line in clients):
            raise self._unexpected(commands.replace("\n", ", "), [status, *clients], "a status and one pid a line")
        return cast(ServerStatus, status), tuple(int(line) for line in clients)

    def clients(self, server: int) -> tuple[int, ...]:
        """Return the pids of a server's clients, in the daemon's own namespace of pids."""
        return self._pids(f"get_client_list {server}")

    def described_clients(self) -> tuple[MpsClient, ...]:
        """Return all clients with their PID namespaces, from `ps`; older programs do not know this command."""
        head, *rows = self._ask("ps") or [""]
        if head.split()[:5] != ["PID", "ID", "SERVER", "DEVICE", "NAMESPACE"]:
            raise self._unexpected("ps", [head, *rows], "a table of PID ID SERVER DEVICE NAMESPACE COMMAND")
        clients = []
        for row in rows:
            words = row.split(None, 5)
            if len(words) < 5 or not words[0].isdecimal() or not words[4].isdecimal():
                raise self._unexpected("ps", [row], "a row of PID ID SERVER DEVICE NAMESPACE COMMAND")
            clients.append(MpsClient(int(words[0]), int(words[4])))
        return tuple(clients)

    def terminate_client(self, server: int, client: int) -> None:
        """End a client's work on the GPU; its process then sees CUDA error 810 and must leave."""
        lines = self._ask(f"terminate_client {server} {client}")
        if lines != ["0"]:
            raise self._unexpected(f"terminate_client {server} {client}", lines, "0")

    def quit(self) -> None:
        """Stop the servers and the daemon, once their clients have left."""
        self.run([], "quit\n", self.environment(), self.timeout_s)

    def _pids(self, command: str) -> tuple[int, ...]:
        lines = self._ask(command)
        if not all(re.fullmatch(_PID, line) for line in lines):
            raise self._unexpected(command, lines, "one pid a line")
        return tuple(int(line) for line in lines)

    def _unexpected(self, command: str, lines: list[str], expected: str) -> ControlError:
        answer = " | ".join(lines)[:200] or "nothing"
        return ControlError(
            f"the CUDA MPS daemon of {self.gpu_uuid} answered '{command}' with: {answer} (expected: {expected}). "
            f"{self.log_directory / 'control.log'} may say why."
        )
