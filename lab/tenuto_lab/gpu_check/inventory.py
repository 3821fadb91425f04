"""Lists what a machine has: GPUs, driver, Python and its packages, NVIDIA's programs. A step of `scripts/gpu_check`.

NVML tells most. When it does not answer, as in some containers, PyTorch tells what it sees.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tenuto.deployments.machines.node_gpus import cluster_of
from tenuto.errors import EnvironmentFaultError
from tenuto.mps.inventory import GpuDevice, read_inventory
from tenuto.profiles.gpu_types import gpu_type_of
from tenuto_lab.gpu_check.results import Results, in_words

_PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "numpy",
    "scipy",
    "scikit-learn",
    "pydantic",
    "orjson",
    "onnxruntime",
)
_PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "ncu", "nsys", "g++", "nvcc")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write `inventory.json` and `cluster.yaml`; return 3 if there is no usable GPU."""
    parser = argparse.ArgumentParser(prog="python -m tenuto_lab.gpu_check.inventory", description=__doc__)
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--gpu", help="UUID of the GPU; default the first")
    given = parser.parse_args(arguments)
    try:
        devices, doubts = _devices()
        device = _chosen(devices, given.gpu)
    except Exception as error:  # machines without a usable GPU raise many kinds
        print(f"no GPU to check: {in_words(error)}", file=sys.stderr)
        return 3
    results = Results(given.output)
    results.write("inventory.json", {**device.to_data(), **_machine(), "doubts": doubts})
    results.write_text("cluster.yaml", cluster_of({None: [known for known in devices if not known.is_mig]}).dump())
    print(f"{device.name}, {device.sm_count} SMs, {device.memory_mib} MiB, driver {device.driver}", file=sys.stderr)
    return 0


def _devices() -> tuple[tuple[GpuDevice, ...], list[str]]:
    """Return the GPUs, and a line for each thing that is not known, with the reason."""
    try:
        return read_inventory(), []
    except EnvironmentFaultError as error:
        seen = _seen_by_torch()
        if not seen:
            raise
        return seen, [f"PyTorch tells what is known of the GPU, neither driver nor modes: {in_words(error)}"]


def _seen_by_torch() -> tuple[GpuDevice, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            GpuDevice(
                uuid=f"GPU-{getattr(properties, 'uuid', index)}",
                name=properties.name,
                type=gpu_type_of(properties.name),
                memory_mib=total >> 20,
                free_memory_mib=free >> 20,
                compute_capability=(properties.major, properties.minor),
                sm_count=properties.multi_processor_count,
                driver="unknown",
                is_mig=False,
                compute_mode="unknown",
            )
        )
    return tuple(found)


def _chosen(devices: Sequence[GpuDevice], uuid: str | None) -> GpuDevice:
    """Return the GPU asked for, or the first on which something can run."""
    wanted = [device for device in devices if uuid in (None, device.uuid)]
    found = next((device for device in wanted if not device.is_mig), None)
    if found is not None:
        return found
    if wanted:
        raise EnvironmentFaultError(
            f"{wanted[0].uuid} is in MIG mode without a MIG device. Make one, or run nvidia-smi -i {wanted[0].uuid} "
            "-mig 0."
        )
    known = ", ".join(device.uuid for device in devices) or "none"
    raise EnvironmentFaultError(f"GPU {uuid or ''} is not here. GPUs: {known}.")


def _machine() -> dict[str, Any]:
    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "packages": packages,
        "torch": _torch(),
        "shared_memory_mib": _shared_memory_mib(),
        "programs": {name: shutil.which(name) for name in _PROGRAMS},
    }


def _torch() -> dict[str, Any]:
    """Return what this PyTorch was built with, and whether it finds a GPU."""
    try:
        import torch

        cudnn: Any = torch.backends.cudnn
        version = cudnn.version() if cudnn.is_available() else None
        return {"cuda": torch.version.cuda, "cudnn": version, "finds_a_gpu": torch.cuda.is_available()}
    except Exception as error:  # a broken or missing build is the result
        return {"finds_a_gpu": False, "failed": in_words(error)}


def _shared_memory_mib() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total >> 20
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
