"""The device a process runs its models on. torch is imported when it is asked for."""

from __future__ import annotations

from typing import Any

from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.gpu_types import FAST_CAPABILITY
from tenuto.profiles.networks.runner import Streams


def pick_device(device: str) -> str:
    """Return `cpu` or `cuda` for `auto`, `cpu` or `cuda`; `auto` is CUDA if this torch finds a device.

    Raises:
        EnvironmentFaultError: CUDA was asked for and there is none.
    """
    if device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "auto":
        return "cpu"
    raise EnvironmentFaultError(
        f"torch {torch.__version__} finds no CUDA device. Install a CUDA build of torch and a driver, or use the CPU."
    )


def cuda_streams(device: str, *, overlapping: bool = False) -> Streams | None:
    """Return new streams for a process that runs its programs on `cuda`; None for `cpu`.

    Args:
        device: the result of `pick_device`.
        overlapping: whether copies have streams of their own, see `Streams.overlapping`.
    """
    if device == "cpu":
        return None
    import torch

    kernels: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return Streams.overlapping(kernels) if overlapping else Streams.one(kernels)


def is_fast_device(device: str) -> bool:
    """Return whether the device is a GPU from `FAST_CAPABILITY` on, on which the fast choices are the defaults."""
    if device == "cpu":
        return False
    import torch

    return torch.cuda.get_device_capability(0) >= FAST_CAPABILITY


def loses_device(error: BaseException) -> bool:
    """Return whether an error of a batch is sticky: every later call on the device fails, and only a new process helps.

    The message does not tell: `cuDNN error: CUDNN_STATUS_EXECUTION_FAILED` may mean a lost context, or one kernel that
    was refused. So a tiny operation is tried on the device. Errors that are not CUDA's, and lack of memory, are never
    sticky.
    """
    import torch

    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.empty(1, device=torch.device("cuda:0")).fill_(1.0)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False
