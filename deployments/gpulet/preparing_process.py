"""Makes one network of a program's members in a process of its own, while their single graphs answer requests (USHER,
section 4).

PyTorch changes modules for the whole process while it traces, so a gpu-let cannot trace beside the batches it runs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tenuto.profiles.measuring.worker_process import WorkerProcess, serve_parent
from tenuto.profiles.networks.programs import Member, prepare_program

WORKER = ["-m", "tenuto.deployments.gpulet.preparing_process"]


async def prepare_elsewhere(members: Sequence[Member], file: str) -> None:
    """Run `prepare_program` in a process that sees no GPU and has low priority. When this call is cancelled, it ends.

    Raises:
        TenutoError: the error of `prepare_program`, or the process was killed.
    """
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = WorkerProcess([*WORKER, file], environment, "+".join(member.name for member in members))
    process.tell(msgspec.json.encode(members).decode())
    loop = asyncio.get_running_loop()
    try:
        await loop.run_in_executor(None, process.next_event)
    finally:
        await loop.run_in_executor(None, process.end)


def _prepare(report: Callable[[Any], None]) -> None:
    del report  # only errors are reported, which `serve_parent` does
    os.nice(10)
    members = msgspec.json.decode(sys.stdin.buffer.readline(), type=list[Member])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    prepare_program(members, sys.argv[1])


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(130)


def main() -> None:
    """Prepare the program that the parent names, for as long as the parent lives."""
    serve_parent(_prepare)


if __name__ == "__main__":
    main()
