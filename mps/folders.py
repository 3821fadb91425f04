"""The folders of the daemons on a node: where they are, the records of daemons in them, and leftovers."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tenuto.errors import InvalidInputError
from tenuto.files import read_file
from tenuto.mps.processes import Processes

DEFAULT_ROOT = "/tmp/tenuto-mps"
MOST_PATH_BYTES = 90  # limit: bytes of a pipe directory's path, as the paths of its sockets may have 108 bytes
OWNER = "owner.json"


def mps_root() -> Path:
    """Return the folder of all daemons on a node; TENUTO_MPS_ROOT overrides it."""
    return Path(os.environ.get("TENUTO_MPS_ROOT") or DEFAULT_ROOT)


def why_unsafe(folder: Path, user: int) -> tuple[str, str] | None:
    """Return why a folder must not hold daemons of a user, and the cure; None if it may, or is not there yet.

    Whoever else may write into the folder could put something of theirs in the place of a daemon's pipes.
    """
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror})", "export TENUTO_MPS_ROOT to a folder of this user"
    if stat.S_ISLNK(status.st_mode):
        return f"{folder} is a link", f"rm {folder}"
    if status.st_uid != user:
        return (
            f"{folder} belongs to user {status.st_uid}, this is user {user}: CUDA MPS serves one user",
            "run as that user, or export TENUTO_MPS_ROOT to a folder of this one",
        )
    if not stat.S_ISDIR(status.st_mode) or not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is not a folder this user can write", f"chmod u+rwx {folder}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write into {folder}", f"chmod go-w {folder}"
    return None


def pipe_directory(gpu_uuid: str, root: Path | None = None) -> Path:
    """Return the pipe directory of a GPU's daemon: the same for the plan's writer, the daemon and its clients."""
    return (root if root is not None else mps_root()) / gpu_uuid.removeprefix("GPU-") / "pipe"


@dataclass(frozen=True)
class Leftover:
    """A directory of ours whose daemon is dead, or runs without any gpu-let."""

    directory: Path
    gpu_uuid: str
    pid: int
    is_running: bool


class Record(msgspec.Struct, frozen=True):
    """The record of a daemon, written when it was started."""

    pid: int
    started_at: int
    gpu_uuid: str
    pid_namespace: int | None = None

    def is_of(self, processes: Processes) -> bool:
        """Return whether the daemon's pid belongs to this process's PID namespace."""
        return self.pid_namespace is None or self.pid_namespace == processes.namespace()


def read_record(folder: Path) -> Record | None:
    """Return the record in a GPU's folder; None if there is none, or if it cannot be read."""
    try:
        return msgspec.json.decode(read_file(folder / OWNER), type=Record)
    except (InvalidInputError, msgspec.MsgspecError):
        return None


def find_leftovers(root: Path | None = None, processes: Processes | None = None) -> tuple[Leftover, ...]:
    """Return the leftovers of this user's gpu-lets: records of dead daemons, and daemons that nobody uses.

    A daemon of another container counts as running.
    """
    known = processes if processes is not None else Processes()
    base = root if root is not None else mps_root()
    if why_unsafe(base, os.getuid()) is not None:
        return ()  # what lies there may be another user's
    leftovers = []
    for path in sorted(base.glob(f"*/{OWNER}")):
        record = read_record(path.parent)
        if record is None:
            continue
        running = not record.is_of(known) or known.started_at(record.pid) == record.started_at
        if not running or is_unused(path.parent):
            leftovers.append(Leftover(path.parent, record.gpu_uuid, record.pid, running))
    return tuple(leftovers)


def is_unused(folder: Path) -> bool:
    """Return whether no gpu-let of the GPU lives."""
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
