"""Shares of this machine's GPU for processes that are measured, from a running CUDA MPS daemon or a private one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tenuto.errors import EnvironmentFaultError
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.inventory import read_inventory
from tenuto.mps.share import client_environment
from tenuto.profiles.measuring.telemetry import first_visible_uuid

_DEFAULT_PIPES = "/tmp/nvidia-mps"  # NVIDIA's default of CUDA_MPS_PIPE_DIRECTORY
_PID_FILE = "nvidia-cuda-mps-control.pid"


@dataclass(frozen=True)
class GpuShares:
    """Gives processes shares of one GPU. `sm_count` is that of the whole GPU; `environment` returns for a share in
    percent the variables that a process needs in its environment when it starts.

    If it does not attach, CUDA silently runs without the share. So the number of SMs that it sees must be checked.
    """

    sm_count: int
    environment: Callable[[float], Mapping[str, str]]


def running_daemon(environment: Mapping[str, str] | None = None) -> Callable[[float], Mapping[str, str]] | None:
    """Return a function from a share to its environment; None if the pipe directory has no daemon's pid file.

    Args:
        environment: default this process's; CUDA_MPS_PIPE_DIRECTORY in it names the daemon.
    """
    pipes = (os.environ if environment is None else environment).get("CUDA_MPS_PIPE_DIRECTORY", _DEFAULT_PIPES)
    if not (Path(pipes) / _PID_FILE).is_file():
        return None
    return lambda share_pct: {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share_pct:g}"}


@contextlib.contextmanager
def shares_of(device: str, *, needed: bool) -> Iterator[GpuShares | None]:
    """Give the shares of the first visible GPU as long as this context lasts.

    None on a CPU (a share is a number of threads there), if no share is needed, or if there is no GPU.

    Raises:
        EnvironmentFaultError: there is a GPU and a share is needed, but its daemon cannot be started, or its SMs cannot
            be counted.
    """
    if device == "cpu" or not needed:
        yield None
        return
    try:
        uuid = first_visible_uuid()
    except EnvironmentFaultError:
        yield None  # there is no GPU, or NVML does not know it; measuring reports that
        return
    sm_count = next((device.sm_count for device in read_inventory() if device.uuid == uuid), None)
    if sm_count is None:
        raise EnvironmentFaultError(f"there is no {uuid}, which CUDA_VISIBLE_DEVICES names. Run `tenuto cluster`.")
    running = running_daemon()
    if running is not None:
        yield GpuShares(sm_count, running)
        return
    daemon = PrivateDaemon(uuid)
    daemon.join()
    try:
        yield GpuShares(sm_count, lambda share_pct: client_environment(uuid, share_pct, None))
    finally:
        daemon.leave()
