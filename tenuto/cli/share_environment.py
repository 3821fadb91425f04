"""The environment that gives a process a share of the GPU under a CUDA MPS daemon that is running already."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tenuto.profiles.measure import ShareEnvironment

__all__ = ["running_daemon"]

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
