"""What a machine has: GPUs, driver, Python and its packages, NVIDIA's programs. A step of `scripts/gpu_check`."""

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

from tenuto.deployments.operator.mps_inventory import cluster_of
from tenuto.errors import EnvironmentFaultError
from tenuto.gpu_check.results import Results
from tenuto.mps.inventory import GpuDevice, read_inventory

__all__ = ["main"]

_PACKAGES = (
    "torch", "torchvision", "transformers", "numpy", "scipy", "scikit-learn", "pydantic", "orjson", "onnxruntime",
)  # fmt: skip
_PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "ncu", "nsys", "g++", "nvcc")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write `inventory.json` and `cluster.yaml`; returns 3 where there is no usable GPU."""
    parser = argparse.ArgumentParser(prog="python -m tenuto.gpu_check.inventory", description=__doc__)
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--gpu", help="UUID of the GPU; default the first")
    given = parser.parse_args(arguments)
    try:
        devices = read_inventory()
        device = _chosen(devices, given.gpu)
    except EnvironmentFaultError as error:
        print(f"no GPU to check: {error}", file=sys.stderr)
        return 3
    results = Results(given.output)
    results.write("inventory.json", {**device.to_data(), **_machine()})
    results.write_text("cluster.yaml", cluster_of({None: devices}).dump())
    print(f"{device.name}, {device.sm_count} SMs, {device.memory_mib} MiB, driver {device.driver}", file=sys.stderr)
    return 0


def _chosen(devices: Sequence[GpuDevice], uuid: str | None) -> GpuDevice:
    found = next((device for device in devices if uuid in (None, device.uuid)), None)
    if found is None:
        known = ", ".join(device.uuid for device in devices) or "none"
        raise EnvironmentFaultError(f"GPU {uuid or ''} is not here. GPUs: {known}.")
    return found


def _machine() -> dict[str, Any]:
    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "python": platform.python_version(),
        "kernel": platform.release(), "cores": os.cpu_count(), "packages": packages,
        "programs": {name: shutil.which(name) for name in _PROGRAMS},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
