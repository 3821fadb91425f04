"""The environment that gives a process a share of the GPU: under a running CUDA MPS daemon, or a private one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.measuring.measure import ShareEnvironment
from tenuto.profiles.measuring.telemetry import first_visible_uuid

__all__ = ["running_daemon", "shares_of"]

_DEFAULT_PIPES = "/tmp/nvidia-mps"  # NVIDIA's default of CUDA_MPS_PIPE_DIRECTORY
_PID_FILE = "nvidia-cuda-mps-control.pid"


def running_daemon(environment: Mapping[str, str] | None = None) -> ShareEnvironment | None:
    """Return the environment of a share, or None where no daemon's pid file is in its pipe directory.

    Whether a process really attached is checked by the SMs it sees: CUDA runs without the share otherwise, silently.

    Args:
        environment: default this process's; CUDA_MPS_PIPE_DIRECTORY in it names the daemon.
    """
    pipes = (os.environ if environment is None else environment).get("CUDA_MPS_PIPE_DIRECTORY", _DEFAULT_PIPES)
    if not (Path(pipes) / _PID_FILE).is_file():
        return None

    def share(share_pct: float) -> Mapping[str, str]:
        return {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share_pct:g}"}

    return share


@contextlib.contextmanager
def shares_of(device: str, *, needed: bool) -> Iterator[ShareEnvironment | None]:
    """Give the environment of a share: of a daemon that runs, or of a private one as long as this context lasts.

    None on a CPU, where a share is a number of threads, and where no share is needed.

    Raises:
        EnvironmentFaultError: there is a GPU and a share is needed, but its daemon cannot be started.
    """
    running = running_daemon()
    if device == "cpu" or not needed or running is not None:
        yield running
        return
    try:
        uuid = first_visible_uuid()
    except EnvironmentFaultError:
        yield None  # no GPU here, or none that NVML knows; measuring says what that means
        return
    from tenuto.mps.daemon import PrivateDaemon
    from tenuto.mps.share import client_environment

    daemon = PrivateDaemon(uuid)
    daemon.join()
    try:
        yield lambda share_pct: client_environment(uuid, share_pct, None)
    finally:
        daemon.leave()
