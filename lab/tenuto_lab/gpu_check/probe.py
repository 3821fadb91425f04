"""A small CUDA process for `scripts/gpu_check`: says what it sees, then does one thing. It writes a JSON object a line.

Started as `python -m tenuto_lab.gpu_check.probe MODE [MIB]`. Modes: `look` (say and leave), `idle` (hold a context),
`busy` (compute until told to stop), `allocate` (take MIB of memory), `libraries` (load cuBLAS and cuDNN, then say
again), `fault` (cause a fatal fault on the device).
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any

from tenuto.errors import first_line

_SIZE = 4096  # of the square matrices that keep the GPU busy
_PER_REPORT = 20
_LINGER_S = 60.0


def main(arguments: list[str] | None = None) -> int:
    """Run one mode; return the exit code: 0, or 1 if the device refused."""
    mode, *rest = sys.argv[1:] if arguments is None else arguments
    import torch

    def say(**event: Any) -> None:
        print(json.dumps(event), flush=True)

    try:
        device = torch.device("cuda:0")
        torch.zeros(1, device=device)
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        say(
            event="ready",
            pid=os.getpid(),
            sm_count=properties.multi_processor_count,
            uuid=f"GPU-{properties.uuid}",
            free_mib=free // 2**20,
            total_mib=total // 2**20,
        )
        if mode == "idle":
            sys.stdin.readline()
            torch.ones(1, device=device).item()  # whether the device still answers
            say(event="alive")
        elif mode == "busy":
            matrix = torch.randn(_SIZE, _SIZE, device=device)
            while not _told():
                for _ in range(_PER_REPORT):
                    torch.mm(matrix, matrix)
                torch.cuda.synchronize()
                say(event="alive")
        elif mode == "allocate":
            blocks = []
            for step in range(0, int(rest[0]), 64):
                blocks.append(torch.empty(64 * 2**20, dtype=torch.uint8, device=device))
                say(event="allocated", mib=step + 64)
        elif mode == "libraries":
            image = torch.randn(8, 3, 64, 64, device=device)
            torch.nn.functional.conv2d(image, torch.randn(16, 3, 3, 3, device=device)).sum().item()
            torch.mm(torch.randn(512, 512, device=device), torch.randn(512, 512, device=device)).sum().item()
            free, _ = torch.cuda.mem_get_info(device)
            say(event="loaded", free_mib=free // 2**20, reserved_mib=torch.cuda.memory_reserved(0) // 2**20)
            sys.stdin.readline()
        elif mode == "fault":
            torch.zeros(4, device=device)[torch.tensor([10**9], device=device)].sum().item()
            say(event="survived")
    except (RuntimeError, torch.OutOfMemoryError) as error:
        say(event="refused", kind=type(error).__name__, text=first_line(error))
        if mode in ("busy", "fault"):
            _told(_LINGER_S)  # the server shows a fault only until the last client that it hit has left
        return 1
    return 0


def _told(wait_s: float = 0.0) -> bool:
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


if __name__ == "__main__":
    sys.exit(main())
