"""Workloads for the placement benchmarks, and the line that says where the figures were measured."""

from __future__ import annotations

import os
import platform
import random
from importlib.metadata import version
from pathlib import Path

from tenuto.placement import Workload
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

# The networks of the thesis profile that run at a useful rate on a V100; bloom and xlnet take dozens of GPUs each.
NETWORKS = (
    "alexnet",
    "bert",
    "densenet121",
    "efficientnet_b7",
    "gpt2",
    "inception_v3",
    "mobilenet_v2",
    "resnet50",
    "resnext50_32x4d",
    "t5",
    "vgg19",
)


def thesis() -> Profiles:
    """Return the V100 profile of the thesis."""
    return Profiles([load_shipped("thesis-v100")])


def mixed_workload(count: int, total_rps: float, seed: int = 0) -> Workload:
    """Return `count` models over the networks with unequal rates summing to about `total_rps`, SLOs 150 to 300 ms."""
    rng = random.Random(seed)
    models = []
    for index in range(count):
        row = NETWORKS[index % len(NETWORKS)]
        models.append(
            {
                "name": f"{row}-{index}",
                "profile": row,
                "rate_rps": total_rps * rng.uniform(0.3, 1.7) / count,
                "slo_ms": rng.choice([150, 200, 250, 300]),
            }
        )
    return Workload.model_validate({"models": models})


def machine(*packages: str) -> str:
    """Return processor, cores, Python and package versions in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"
