"""What the laboratory's `gpu_check.probe` says on a GPU with 132 SMs and 140000 MiB, without one: a process that
attaches to the control program made of files. `python -m tests.mps.fake_probe MODE [MIB]`.

As NVIDIA's device plugin found it, a memory limit keyed by UUID is not applied. `FAKE_GPU_DETACHED`: CUDA does not find
the daemon, and runs without it.
"""

import json
import math
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from tests.mps.control_program import attach, fail

SMS, MEMORY_MIB = 132, 140_000


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def main() -> int:
    mode, *rest = sys.argv[1:]
    pipes = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    if "FAKE_GPU_DETACHED" not in os.environ:
        attach(pipes, os.getpid())
    share = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
    uuid = os.environ["CUDA_VISIBLE_DEVICES"]
    limit = os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", f"0={MEMORY_MIB}M")
    total = int(limit.removeprefix("0=").removesuffix("M")) if limit.startswith("0=") else MEMORY_MIB
    print("a library's warning", flush=True)
    say(
        event="ready",
        pid=os.getpid(),
        sm_count=math.floor(SMS * share / 100),
        uuid=uuid,
        free_mib=total - 500,
        total_mib=total,
    )

    def is_hit() -> bool:
        fault = pipes / "fault"
        return fault.exists() and str(os.getpid()) in fault.read_text(encoding="utf-8").split()

    if mode == "fault":
        fail(pipes)
    while mode == "busy" and not is_hit() and not select.select([sys.stdin], [], [], 0)[0]:
        time.sleep(0.02)
        say(event="alive")
    for step in range(0, int(rest[0]) if mode == "allocate" else 0, 64):
        if step + 64 > total - 500:
            say(event="refused", kind="OutOfMemoryError", text="CUDA out of memory")
            return 1
        say(event="allocated", mib=step + 64)
    if mode == "libraries":
        say(event="loaded", free_mib=total - 1000 - 100, reserved_mib=100)
    if mode in ("idle", "libraries"):
        sys.stdin.readline()
    if is_hit():
        say(event="refused", kind="AcceleratorError", text="CUDA error: unspecified launch failure")
        if mode != "idle":
            select.select([sys.stdin], [], [], 60)
        return 1
    if mode == "idle":
        say(event="alive")
    return 0


if __name__ == "__main__":
    sys.exit(main())
