"""Which executor a gpu-let gets, from what its plan asks for and what the node has. Never a silent substitute."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.gpulet.executors.emulated import EmulatedExecutor
from tenuto.errors import EnvironmentFaultError

logger = logging.getLogger("ray.serve")


def has_nvidia_devices(root: Path = Path("/")) -> bool:
    """Return whether an NVIDIA driver is loaded on this node; asks the kernel, so that no CUDA context is created."""
    return (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists()


def make_executor(spec: Mapping[str, Any]) -> Executor:
    """Return the executor of a gpu-let.

    Args:
        spec: `executor` (auto, torch, emulated), `gpu` (type, uuid), `share_pct`, `memory_mib`, `mps`, `streaming`, and
            `cuda_mps`: whether this process has joined its GPU's daemon, see `tenuto.deployments.gpulet.mps_sharing`.

    Raises:
        EnvironmentFaultError: the plan names a physical GPU, or asks for torch on a GPU, and this node has no NVIDIA
        driver.
    """
    wanted, gpu = spec["executor"], spec["gpu"]
    if wanted == "emulated":
        return EmulatedExecutor(gpu["type"])
    if gpu["type"] == "cpu":
        return _torch("cpu", spec)
    if has_nvidia_devices():
        _check_share(spec)
        return _torch("cuda", spec)
    if wanted == "torch" or gpu["uuid"] is not None or spec.get("mps") == "required":
        raise EnvironmentFaultError(
            f"gpu-let {spec['gpulet']} needs {gpu['uuid'] or 'a ' + gpu['type']}, but this node has no NVIDIA driver. "
            "Deploy on the node the plan was made for, or write the plan with --executor emulated."
        )
    logger.warning(
        "gpu-let %s: %s is a logical GPU and this node has no NVIDIA driver: EMULATED, answers are zeros",
        spec["gpulet"],
        gpu["id"],
    )
    return EmulatedExecutor(gpu["type"])


def _check_share(spec: Mapping[str, Any]) -> None:
    """Refuse a share of a real GPU unless CUDA MPS holds the process to it, and no CUDA MPS where it is required."""
    if spec.get("cuda_mps"):
        return
    share_pct = spec.get("share_pct")
    if (share_pct is not None and share_pct < 100) or spec.get("mps") == "required":
        why = "`mps: off`" if spec.get("mps") == "off" else "its GPU is not bound by UUID"
        raise EnvironmentFaultError(
            f"gpu-let {spec['gpulet']} needs CUDA MPS for {100.0 if share_pct is None else share_pct:g} % of a GPU, "
            f"but cannot have it: {why}. Plan with `--cluster` and a file that `tenuto cluster -o` wrote, or plan "
            "whole GPUs with `mps: off`, or emulate with --executor emulated."
        )


def _torch(device: str, spec: Mapping[str, Any]) -> Executor:
    from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor

    return TorchExecutor(
        device, share_pct=spec.get("share_pct"), memory_mib=spec.get("memory_mib"),
        streaming=bool(spec.get("streaming")),
    )  # fmt: skip
