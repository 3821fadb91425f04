"""Facts about processes from /proc: when they began, their user, and their pids in other PID namespaces.

A process in a container has one pid inside and another one outside. A CUDA MPS daemon uses the pids of its own
namespace. If the host's /proc is mounted (TENUTO_HOST_PROC, else /host/proc), pids can be translated.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

HOST_PROC = "/host/proc"


def _host_proc() -> Path:
    return Path(os.environ.get("TENUTO_HOST_PROC") or HOST_PROC)


@dataclass
class Processes:
    """Reads facts about processes. `proc` is the /proc of this process's namespace."""

    proc: Path = Path("/proc")

    def started_at(self, pid: int) -> int | None:
        """Return the moment a process began, in clock ticks since boot; None when there is none."""
        try:
            stat = (self.proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
            fields = stat.rpartition(")")[2].split()  # the program's name before it may contain anything
            return None if fields[0] in ("Z", "X") else int(fields[19])
        except (OSError, ValueError, IndexError):
            return None

    def user_of(self, pid: int) -> int | None:
        """Return the user id a process runs under; None when there is none."""
        try:
            return (self.proc / str(pid)).stat().st_uid
        except OSError:
            return None

    def name_of(self, pid: int) -> str | None:
        """Return the name of a process's program; None when this namespace does not see it."""
        try:
            words = (self.proc / str(pid) / "cmdline").read_bytes().split(b"\0")
            program = os.path.basename(os.fsdecode(words[0]))
            return program or (self.proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def environment_of(self, pid: int) -> dict[str, str] | None:
        """Return the environment a process was started with; None for another user's, or when there is none."""
        try:
            words = (self.proc / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            return None
        pairs = (os.fsdecode(word).partition("=") for word in words if word)
        return {name: value for name, _, value in pairs}

    def namespace(self) -> int | None:
        """Return the number of this process's PID namespace, as `ps` of the control program prints it."""
        return _namespace(self.proc / "self")

    def numbers_elsewhere(self, pid: int, host_proc: Path | None = None) -> frozenset[int]:
        """Return the pids of a process in outer namespaces. None are returned if the host's /proc does not show the
        process, or shows several that it could be.

        Args:
            pid: the pid in this process's namespace.
            host_proc: where the host's /proc is mounted; default TENUTO_HOST_PROC, else /host/proc.
        """
        base = host_proc if host_proc is not None else _host_proc()
        own = self.namespace()
        matching: list[tuple[int, ...]] = []
        for entry in base.glob("[0-9]*"):
            numbers = _numbers(entry)
            # NSpid lists the numbers from the reader's namespace down to the process's own.
            if len(numbers) > 1 and numbers[-1] == pid and _namespace(entry) in (own, None):
                matching.append(numbers)
        return frozenset(matching[0][:-1]) if len(matching) == 1 else frozenset()


def _numbers(entry: Path) -> tuple[int, ...]:
    try:
        for line in (entry / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return tuple(int(word) for word in line.split()[1:])
    except (OSError, ValueError):
        pass
    return ()


def _namespace(entry: Path) -> int | None:
    try:
        match = re.fullmatch(r"pid:\[(\d+)\]", os.readlink(entry / "ns" / "pid"))
    except OSError:  # another user's process, or gone
        return None
    return int(match[1]) if match else None
