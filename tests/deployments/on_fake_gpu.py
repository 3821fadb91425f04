"""Gpu-lets that believe to run on GPUs under CUDA MPS: emulated execution, a control program that is a script, and a
CUDA that attaches to it. Everything else, from Serve to locks and processes, is real."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tenuto.deployments.gpulet.mps_sharing import SharedGpu
from tenuto.deployments.gpulet.replica import GpuletReplica
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

    def join(self) -> None:
        super().join()
        journal(self._id, "begins")

    def prove(self) -> None:
        time.sleep(0.3)  # the models' load: long enough for another to come between
        journal(self._id, "ends")
        super().prove()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        with super().turn():
            journal(self._id, "begins")
            time.sleep(0.3)
            yield
            journal(self._id, "ends")


class OnFakeGpu(GpuletReplica):
    def _share_gpu(self) -> SharedGpu | None:
        uuid, share_pct = str(self._spec.gpu.uuid), self._spec.share_pct
        shared = Journaled(
            self._spec,
            devices=devices,
            visible=cuda(uuid, share_pct),
            others=lambda daemon: (),
            free_mib=lambda: 0.0,
            watch_xids=lambda uuid: None,
        )
        shared.join()
        return shared


def build(args: dict[str, Any]) -> Any:
    from ray import serve

    return serve.deployment(name="gpulet")(OnFakeGpu).bind(args["spec"])
