"""The logs of the processes that run: where they are, and their new lines, from every node."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from tenuto.deployments.process.ray_nodes import on_node
from tenuto.deployments.serve.config import is_ours
from tenuto.deployments.serve.states import ServeProcess, serve_processes

_MOST_BYTES = 1 << 20  # limit: bytes of a log that are read at once
_READ_S = 60.0  # limit: a node's first worker imports Ray


def process_logs() -> list[ServeProcess]:
    """Return the processes of ours that Serve has started and that have a log."""
    return [each for each in serve_processes() if is_ours(each.application) and each.log]


class LogReader:
    """Follows logs, each from its last lines on."""

    def __init__(self, last: int) -> None:
        """`last`: how many lines of each log to begin with."""
        self._last = last
        self._offsets: dict[ServeProcess, int] = {}

    def read(self, processes: Collection[ServeProcess]) -> Iterator[str]:
        """Yield the new lines, log by log. A lost node has none."""
        import ray

        for node in dict.fromkeys(process.node_id for process in processes):
            processes_here = [process for process in processes if process.node_id == node]
            files = [(process.log, self._offsets.get(process)) for process in processes_here]
            try:
                logs = ray.get(on_node(node, read_lines, files, self._last), timeout=_READ_S)
            except (ray.exceptions.TaskUnschedulableError, ray.exceptions.WorkerCrashedError):
                continue
            for process, (lines, offset) in zip(processes_here, logs, strict=True):
                self._offsets[process] = offset
                yield from lines


def read_lines(
    files: Sequence[tuple[str, int | None]], last: int, folder: str | None = None
) -> list[tuple[list[str], int]]:
    """Return the complete lines of files from an offset on, and the next offset. An incomplete line is left for later,
    unless it is longer than is read at once: then its parts are lines.

    Args:
        files: paths below the folder, each with an offset in bytes; None: begin with its last lines.
        last: how many last lines at most.
        folder: the folder of the files; default: Ray's logs on this node.
    """
    if folder is None:
        from ray._private.worker import _global_node

        folder = _global_node.get_logs_dir_path()
    logs = []
    for path, offset in files:
        with open(folder + path, "rb") as file:
            size = file.seek(0, 2)
            if offset is not None and offset > size:  # the file was begun anew
                offset = 0
            begin = file.seek(max(0, size - _MOST_BYTES) if offset is None else offset)
            read = file.read(_MOST_BYTES)
        whole, newline, _ = read.rpartition(b"\n")
        if not newline and len(read) == _MOST_BYTES:
            whole = read  # of a line that is longer than that
        lines = whole.decode("utf-8", "replace").split("\n") if newline or whole else []
        logs.append((lines if offset is not None else lines[max(0, len(lines) - last) :], begin + len(whole + newline)))
    return logs
