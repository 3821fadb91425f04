"""Programs of several models are loaded as those of one, and what is unloaded is freed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.deployments.gpulet.resident_programs import ResidentPrograms
from tenuto.deployments.serve.user_config import MemberEntry, ProgramEntry
from tenuto.profiles.networks.inputs import as_blocks
from tests.deployments import residual_networks
from tests.deployments.residual_networks import SIDE
from tests.instruments.live import PATIENCE_S


def entry(*factories: str) -> ProgramEntry:
    members = [MemberEntry(name=f, source=f"tests.deployments.residual_networks:{f}") for f in factories]
    return ProgramEntry(name="+".join(factories), batch_size=2, members=tuple(members))


class Worker:
    """One thread beside the loop, as a gpu-let has."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    def __call__(self, action: Callable[[], Any]) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self.pool, action)


def outputs_of(executor: TorchExecutor, program: ProgramEntry, images: np.ndarray[Any, Any]) -> dict[str, Any]:
    given = {member.name: as_blocks({"image": images}) for member in program.members}
    found, _ = executor.run(program.name, given, {member.name: len(images) for member in program.members})
    return {name: arrays["logits"] for name, arrays in found.items()}


def expected(model: str, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import torch

    with torch.inference_mode():
        return np.asarray(getattr(residual_networks, model)().module(torch.from_numpy(images)).numpy())


def brought(executor: TorchExecutor, *wanted: ProgramEntry) -> None:
    asyncio.run(ResidentPrograms("n0/0/a", executor, None).bring(wanted, Worker()))


def test_a_joint_program_is_loaded_merged_and_answers_as_its_members() -> None:
    executor, program = TorchExecutor("cpu"), entry("base", "tuned")
    brought(executor, program)
    assert executor.ways() == {"base+tuned": "merged"}
    assert executor.facts()["base+tuned"]["operators_after"] > 0
    images = np.random.default_rng(0).standard_normal((2, 3, SIDE, SIDE), dtype=np.float32)
    for name, logits in outputs_of(executor, program, images).items():
        right = expected(name, images)
        assert np.abs(logits - right).max() <= 1e-5 * np.abs(right).max()


def test_models_that_do_not_merge_run_as_single_graphs_and_the_log_names_the_cure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = TorchExecutor("cpu")
    brought(executor, entry("base", "stranger"))
    assert executor.ways() == {"base+stranger": "single graphs"}
    assert "Remove the group from `merge`" in caplog.text


UNLOADS = """
import weakref
from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.deployments.process.own_loop import spare_the_collector
from tests.deployments.gpulet.test_resident_programs import entry
executor = TorchExecutor("cpu")
executor.load(entry("base"), [1])
held = weakref.ref(executor.program("base").network.module)
spare_the_collector()
executor.unload("base")
assert held() is None
"""


def test_what_is_unloaded_is_freed_though_the_collector_was_told_to_spare_it() -> None:
    # In a process of its own: what the collector is told holds for all of a process.
    done = subprocess.run([sys.executable, "-c", UNLOADS], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
