"""`scripts/gpu_check --dry-run`: every step, on a GPU of virtual time beside a control program made of files.

What is walked are the steps' own programs with the arguments they have on a machine with a GPU, in processes of their
own; only models are tiny, times short, and streaming and serving run on the CPU. Nothing is measured, and the page
says so.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from tenuto.mps import inventory
from tenuto.mps.inventory import GpuDevice
from tenuto_lab.gpu_check import run as gpu_check_run
from tenuto_lab.gpu_check.page import VIRTUAL_DRIVER
from tenuto_lab.gpu_check.steps import Sizes, Step
from tests.instruments.forking import forked_workers
from tests.instruments.virtual_gpu import KINDS, UUID, VirtualGpu, fake_nvml
from tests.mps.control_program import install

__all__ = ["SIZES", "gpu", "main", "virtual_steps"]

OWN = "tests.instruments.own_models"
SIZES = Sizes(
    models=(f"{OWN}:scale", f"{OWN}:triple"),
    batch_sizes="1,8",
    shares="50,100",
    budget_s=0.01,
    seconds=0.05,
    co_run_s=0.05,
    variants="auto,plain",
    options=("width=4096",),
    device="cpu",
)
COUNTERS = Path(__file__).parent / "kernels" / "data" / "ncu_raw.csv"

_STEP, _RELAY = "VIRTUAL_CHECK_STEP", "VIRTUAL_CHECK_RELAY"
_NCU = """#!{python} -SE
import json, os, subprocess, sys

asked = sys.argv[1:]
log = asked[asked.index("--log-file") + 1]
target = asked[asked.index("--log-file") + 2 :]
relay = json.loads(os.environ["{relay}"])
environment = {{**os.environ, "{step}": json.dumps(target[2:])}}
code = subprocess.call([sys.executable, *relay["step"]], env=environment)
with open({counters!r}) as recorded, open(log, "w") as file:
    file.write(recorded.read().replace('"7.0"', '"9.0"'))  # of a V100
sys.exit(code)
"""


def gpu(**departures: Any) -> GpuDevice:
    """Return the GPU that is not there."""
    name, sms, capability, memory_mib = KINDS["h200"]
    return GpuDevice(
        **{
            "uuid": f"GPU-{UUID}",
            "name": name,
            "type": "h200",
            "memory_mib": memory_mib,
            "free_memory_mib": memory_mib,
            "compute_capability": capability,
            "sm_count": sms,
            "driver": VIRTUAL_DRIVER,
            "is_mig": False,
            "compute_mode": "default",
            **departures,
        }
    )


@contextmanager
def virtual_steps(relay: Callable[[str], list[str]], folder: Path, **departures: str) -> Iterator[gpu_check_run.Run]:
    """Give what runs a step on the virtual machine.

    Args:
        relay: from a function's name to the arguments of a process that runs it.
        folder: short enough for sockets; holds programs and the daemon.
        departures: environment of every step, such as `FAKE_GPU_DETACHED`.
    """
    install(folder)
    relays = {
        "step": relay("lab.tests.virtual_check:step_main"),
        "worker": relay("tests.instruments.virtual_gpu:worker_main"),
        "corun": relay("lab.tests.interference.virtual_co_run:main"),
    }
    ncu = folder / "ncu"
    ncu.write_text(_NCU.format(python=sys.executable, relay=_RELAY, step=_STEP, counters=str(COUNTERS)))
    ncu.chmod(0o755)
    own = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "TENUTO_MPS_ROOT": str(folder),
        "FAKE_GPU": "h200",
        _RELAY: json.dumps(relays),
        **departures,
    }

    def run(step: Step, environment: Mapping[str, str], limit_s: float) -> int:
        command = [sys.executable, *relays["step"]]
        given = {**environment, **own, _STEP: json.dumps(step.arguments)}
        try:
            return subprocess.run(command, env=given, timeout=limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            return gpu_check_run.STOPPED

    try:
        yield run
    finally:
        for path in folder.glob("*/pipe/nvidia-cuda-mps-control.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text(encoding="utf-8")), signal.SIGTERM)


def step_main() -> None:
    """Be the process of one step: Python's arguments are in the environment."""
    how, program, *arguments = json.loads(os.environ[_STEP])
    relays = json.loads(os.environ[_RELAY])
    sys.argv = [program, *arguments]
    device = gpu(is_mig="VIRTUAL_MIG" in os.environ)
    sys.modules["pynvml"] = fake_nvml(lambda: 0)
    for module in [
        inventory,
        *(found for name, found in sys.modules.items() if name.startswith(("tenuto.", "tenuto_lab."))),
    ]:
        if hasattr(module, "read_inventory"):
            module.read_inventory = lambda: (device,)  # type: ignore[attr-defined]
    for name, place in (("worker", "tenuto.profiles.measuring.measure"), ("corun", "tenuto_lab.interference.co_run")):
        importlib.import_module(place).WORKER = relays[name]  # type: ignore[attr-defined]
    if how == "-c":
        exec(program, {})
        return
    if program == "tenuto_lab.gpu_check.sharing":
        from tenuto_lab.gpu_check import sharing

        sys.exit(sharing.main(arguments, start=partial(sharing.ProbeProcess, module="tests.mps.fake_probe")))
    uses_torch = program in ("tenuto_lab.gpu_check.one_batch", "tenuto_lab.gpu_check.green_contexts")
    with _cuda() if uses_torch else nullcontext():
        runpy.run_module(program, run_name="__main__", alter_sys=True)


@contextmanager
def _cuda() -> Iterator[None]:
    """Put the GPU of virtual time in place, with the profiler's switch and green contexts."""
    import torch

    device = VirtualGpu()

    class GreenContext:
        def __init__(self, sms: int) -> None:
            self.sms = sms

        @staticmethod
        def create(num_sms: int, device_id: int) -> GreenContext:
            return GreenContext(num_sms)

        def set_context(self) -> None:
            device.sms = self.sms

        def pop_context(self) -> None:
            device.sms = device.whole_sms

    module: Any = ModuleType("torch.cuda.green_contexts")
    module.SUPPORTED, module.GreenContext = True, GreenContext
    sys.modules["torch.cuda.green_contexts"] = module
    torch.set_num_threads(1)
    with mock.patch.multiple(torch.cuda.profiler, start=lambda: None, stop=lambda: None), device.installed():
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk the steps asked for; returns the check's exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "-o" not in given and "--output" not in given:
        given += ["-o", "gpu-check-dry-run"]
    with (
        tempfile.TemporaryDirectory(prefix="m") as folder,
        forked_workers() as relay,
        virtual_steps(relay, Path(folder)) as run,
    ):
        return gpu_check_run.main(given, run=run, sizes=SIZES)


if __name__ == "__main__":
    sys.exit(main())
