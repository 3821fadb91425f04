"""The processes of this run's own Ray, by the names that Ray and the gateways give them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from pathlib import Path

__all__ = ["dead_arenas", "functions_of", "replicas", "started"]

_ARENA = "/memfd:tenuto-arena"
# Started as a module, or as the relay to one that is forked; the server that forks has the name among its arguments.
_FUNCTIONS = re.compile(rb"(\0-m\0|/)tenuto\.deployments\.entry\.service\.hook_process(\.py)?\0")


def replicas(application: str) -> list[int]:
    """The replicas of an application, the oldest first."""
    title = f"ray::ServeReplica:{application}:".encode()
    found = [pid for pid in _all() if _command(pid).startswith(title) and _is_ours(pid)]
    return sorted(found, key=started)


def functions_of(parent: int) -> list[int]:
    """The processes beside a gateway that run hooks or functions; each leads a group, which ends with it."""
    return [pid for pid in _all() if _parent(pid) == parent and _FUNCTIONS.search(_command(pid))]


def started(pid: int) -> int:
    """When a process was started, in ticks of the system's clock; 0 if it has ended."""
    return int(_fields(pid)[19])


def dead_arenas() -> set[str]:
    """The shared memory that processes of ours map although the one that made it has ended."""
    ours = [pid for pid in _all() if _is_ours(pid)]
    mapped = {line.split()[4] for pid in ours for line in _text(f"/proc/{pid}/maps").splitlines() if _ARENA in line}
    owned = set[str]()
    for file in itertools.chain.from_iterable(Path("/proc", str(pid), "fd").glob("*") for pid in ours):
        with contextlib.suppress(OSError):
            if _ARENA in os.readlink(file):
                owned.add(str(file.stat().st_ino))
    return mapped - owned


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:  # it has ended
        return ""


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
