"""A gpu-let's share: the environment that asks for it, and the proof that it was given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tenuto.mps.control import ControlError
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.folders import pipe_directory

__all__ = ["CONTEXT_MIB", "Report", "client_environment", "verify_attachment"]

CONTEXT_MIB = 600  # of a CUDA context with the libraries' workspaces, on top of a plan's memory of models


def client_environment(
    gpu_uuid: str, share_pct: float | None, memory_mib: float | None, root: Path | None = None
) -> dict[str, str]:
    """Return what a gpu-let's process must find in its environment when it starts; later is too late for CUDA.

    The share is written with the decimals it has: CUDA rounds it down to what the hardware supports. The memory cap is
    the plan's with `CONTEXT_MIB` added, since CUDA counts its own allocations too.
    """
    environment = {
        "CUDA_VISIBLE_DEVICES": gpu_uuid,
        "CUDA_MPS_PIPE_DIRECTORY": str(pipe_directory(gpu_uuid, root)),
    }
    if share_pct is not None and share_pct < 100.0:
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{share_pct:g}"
    if memory_mib is not None:
        environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"{gpu_uuid}={math.ceil(memory_mib + CONTEXT_MIB)}M"
    return environment


@dataclass(frozen=True)
class Report:
    """What a gpu-let's process says of itself after its warm-up. `sm_count` is what CUDA shows it."""

    pid: int
    gpu_uuid: str
    sm_count: int


def verify_attachment(
    report: Report, daemon: PrivateDaemon, share_pct: float | None, gpu_sm_count: int | None
) -> tuple[str, ...]:
    """Return why a gpu-let is not what its plan asks for; nothing when all four proofs hold.

    They are: it runs on the planned GPU; the daemon lists it as a client; the server is active; and it sees no more
    multiprocessors than its share. CUDA runs silently without MPS when it does not find the daemon, so none is enough.

    Args:
        report: of the process.
        daemon: of the planned GPU.
        share_pct: the planned share; None: the whole GPU.
        gpu_sm_count: multiprocessors of the whole GPU; None: unknown, which is a reason where a share is planned.
    """
    reasons = []
    if report.gpu_uuid != daemon.gpu_uuid:
        reasons.append(f"it runs on {report.gpu_uuid}, not on {daemon.gpu_uuid}")
    try:
        if report.pid not in daemon.clients():
            reasons.append(f"the CUDA MPS daemon does not list its process {report.pid} as a client")
        status = daemon.status()
        if status != "ACTIVE":
            reasons.append(f"the CUDA MPS server is {status or 'not running'}")
    except ControlError as error:
        reasons.append(str(error))
    if share_pct is not None and share_pct < 100.0:
        if gpu_sm_count is None:
            reasons.append("the multiprocessors of the whole GPU could not be counted")
        else:
            # Rounded down by the hardware, but never to nothing.
            allowed = max(1, math.floor(gpu_sm_count * share_pct / 100.0 + 1e-9))
            if report.sm_count > allowed:
                reasons.append(
                    f"it sees {report.sm_count} of {gpu_sm_count} multiprocessors, {share_pct:g} % are {allowed}"
                )
    return tuple(reasons)
