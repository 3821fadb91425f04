"""Gpu-lets that believe to run on GPUs under CUDA MPS: emulated execution, a control program that is a script, and a
CUDA that attaches to it. Everything else, from Serve to locks and processes, is real."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tenuto.deployments.gpulet import replica as replica_module
from tenuto.deployments.gpulet.mps_sharing import GpuEdges, SharedGpu
from tenuto.deployments.gpulet.replica import GpuletReplica
from tenuto.deployments.serve.user_config import GpuletSpec
from tenuto.mps.folders import mps_root, pipe_directory
from tenuto.mps.inventory import GpuDevice, read_inventory
from tenuto.mps.sm_count import VisibleDevice
from tests.mps.control_program import attach
from tests.mps.fake_nvml import FakeGpu, FakeNvml

GPUS = tuple(f"GPU-{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}" for digit in "12")
SM_COUNT = 80


def devices() -> tuple[GpuDevice, ...]:
    return read_inventory(FakeNvml(*(FakeGpu(uuid) for uuid in GPUS)), lambda: dict.fromkeys(GPUS, SM_COUNT))


def cuda(uuid: str, share_pct: float | None) -> Callable[[], tuple[VisibleDevice, ...]]:
    """CUDA as it is once it has attached to the daemon."""

    def visible() -> tuple[VisibleDevice, ...]:
        attach(pipe_directory(uuid), os.getpid())
        return (VisibleDevice(uuid, math.floor(SM_COUNT * (share_pct or 100.0) / 100.0)),)

    return visible


def journal(gpulet: str, event: str) -> None:
    """Write down what happened when, in one file for all processes."""
    with (mps_root() / "journal").open("a", encoding="utf-8") as file:
        file.write(f"{time.monotonic():.3f} {gpulet} {os.getpid()} {event}\n")


def read_journal(root: Path) -> list[tuple[float, str, int, str]]:
    lines = (root / "journal").read_text(encoding="utf-8").splitlines()
    return [(float(at), gpulet, int(pid), event) for at, gpulet, pid, event in map(str.split, lines)]


class Journaled(SharedGpu):
    """A shared GPU that tells when its turn to start begins and ends."""

    def __init__(self, spec: GpuletSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self.gpulet = spec.gpulet

    def join(self) -> None:
        super().join()
        journal(self.gpulet, "begins")

    def prove(self) -> None:
        time.sleep(0.3)  # the models' load: long enough for another to come between
        journal(self.gpulet, "ends")
        super().prove()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        with super().turn():
            journal(self.gpulet, "begins")
            time.sleep(0.3)
            yield
            journal(self.gpulet, "ends")


def join(spec: GpuletSpec, has_driver: bool) -> SharedGpu:
    """Join the daemon of the GPU that the plan names."""
    edges = GpuEdges(
        devices=devices,
        visible=cuda(str(spec.gpu.uuid), spec.share_pct),
        others=lambda daemon: (),
        free_mib=lambda: 0.0,
        watch_xids=lambda uuid: None,
    )
    shared = Journaled(spec, edges=edges)
    shared.join()
    return shared


class OnFakeGpu(GpuletReplica):
    async def __init__(self, spec: Mapping[str, Any]) -> None:  # type: ignore[misc]  # as its base has it
        replica_module.join_shared_gpu = join
        await super().__init__(spec)  # type: ignore[misc]


def build(args: dict[str, Any]) -> Any:
    from ray import serve

    return serve.deployment(name="gpulet")(OnFakeGpu).bind(args["spec"])
