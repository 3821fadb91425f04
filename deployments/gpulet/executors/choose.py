"""The choice of a gpu-let's executor, by its plan and by what the node has. Nothing is ever substituted silently."""

from __future__ import annotations

import logging
from pathlib import Path

from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.gpulet.executors.emulated import EmulatedExecutor
from tenuto.deployments.serve.user_config import GpuletSpec
from tenuto.errors import EnvironmentFaultError

logger = logging.getLogger("ray.serve")


def has_nvidia_devices(root: Path = Path("/")) -> bool:
    """Return whether an NVIDIA driver is loaded on this node. It asks the kernel, so that no CUDA context is
    created."""
    return (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists()


def make_executor(spec: GpuletSpec) -> Executor:
    """Return the executor of a gpu-let. With `cuda_mps` this process must have joined its GPU's daemon before
    (`tenuto.deployments.gpulet.mps_sharing`).

    Raises:
        EnvironmentFaultError: the plan names a physical GPU, or asks for torch on a GPU, and this node has no NVIDIA
        driver; or the gpu-let lies on several GPUs, and would run on torch.
    """
    gpu = spec.gpu
    if spec.executor == "emulated":
        return EmulatedExecutor(gpu.type)
    if spec.also_on and (spec.executor == "torch" or gpu.is_real or gpu.type == "cpu" or has_nvidia_devices()):
        raise EnvironmentFaultError(
            f"gpu-let {spec.gpulet} lies on {1 + len(spec.also_on)} GPUs together, and the torch executor runs a model "
            "on one. Plan with a profile that has no step times for several GPUs (tensor_parallel), take a GPU type "
            "that holds the model, or emulate with --executor emulated."
        )
    if gpu.type == "cpu":
        return _torch("cpu", spec)
    if has_nvidia_devices():
        _check_share(spec)
        return _torch("cuda", spec)
    if spec.executor == "torch" or gpu.is_real or spec.mps == "required":
        raise EnvironmentFaultError(
            f"gpu-let {spec.gpulet} needs {gpu.uuid or 'a ' + gpu.type}, but this node has no NVIDIA driver. "
            "Deploy on the node the plan was made for, or write the plan with --executor emulated."
        )
    logger.warning(
        "gpu-let %s: %s is a logical GPU and this node has no NVIDIA driver: EMULATED, answers are zeros",
        spec.gpulet,
        gpu.id,
    )
    return EmulatedExecutor(gpu.type)


def _check_share(spec: GpuletSpec) -> None:
    """Refuse a share of a real GPU that CUDA MPS does not enforce, and refuse to run without CUDA MPS if required."""
    if spec.cuda_mps:
        return
    share_pct = spec.share_pct
    if (share_pct is not None and share_pct < 100) or spec.mps == "required":
        why = "`mps: off`" if spec.mps == "off" else "its GPU is not bound by UUID"
        raise EnvironmentFaultError(
            f"gpu-let {spec.gpulet} needs CUDA MPS for {100.0 if share_pct is None else share_pct:g} % of a GPU, "
            f"but cannot have it: {why}. Plan with `--cluster` and a file that `tenuto cluster -o` wrote, or plan "
            "whole GPUs with `mps: off`, or emulate with --executor emulated."
        )


def _torch(device: str, spec: GpuletSpec) -> Executor:
    from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor

    return TorchExecutor(device, share_pct=spec.share_pct, memory_mib=spec.memory_mib, streaming=spec.streaming)
