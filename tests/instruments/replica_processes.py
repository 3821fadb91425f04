"""The processes of this run's own Ray, by the names that Ray and the gateways give them."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["functions_of", "replicas", "started"]

_FUNCTIONS = "tenuto.deployments.entry.service.hook_process"


def replicas(application: str) -> list[int]:
    """The replicas of an application, the oldest first."""
    title = f"ray::ServeReplica:{application}:".encode()
    found = [pid for pid in _all() if _command(pid).startswith(title) and _is_ours(pid)]
    return sorted(found, key=started)


def functions_of(parent: int) -> list[int]:
    """The processes beside a gateway that run hooks or functions; each leads a group, which ends with it."""
    return [pid for pid in _all() if _parent(pid) == parent and _FUNCTIONS in _command(pid).decode().split("\0")]


def started(pid: int) -> int:
    """When a process was started, in ticks of the system's clock; 0 if it has ended."""
    return int(_fields(pid)[19])


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _fields(pid: int) -> list[str]:
    """What the system tells of a process behind its name; zeros if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 20


def _parent(pid: int) -> int:
    return int(_fields(pid)[1])


def _is_ours(pid: int) -> bool:
    while pid > 1 and pid != os.getpid():
        pid = _parent(pid)
    return pid > 1
