"""Single graphs answer while a process merges them; then the merged program takes their place, or they go on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.gpulet import resident_programs
from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.deployments.gpulet.resident_programs import ResidentPrograms
from tenuto.deployments.process.own_loop import spare_the_collector
from tenuto.deployments.serve.user_config import MemberEntry, ProgramEntry
from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.networks.inputs import as_blocks
from tests.deployments import residual_networks
from tests.deployments.residual_networks import SIDE
from tests.instruments.forking import let_unfreeze
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


class Slowly(TorchExecutor):
    """Notes how it loads, and fails where it is told."""

    def __init__(self, fails: Sequence[int] = ()) -> None:
        super().__init__("cpu")
        self.loads: list[bool] = []
        self.fails = fails

    def load(self, program: ProgramEntry, batch_sizes: Sequence[int], prepared_file: str | None = None) -> None:
        self.loads.append(prepared_file is not None)
        if len(self.loads) - 1 in self.fails:
            raise EnvironmentFaultError("it does not fit")
        super().load(program, batch_sizes, prepared_file)


def outputs_of(executor: TorchExecutor, program: ProgramEntry, images: np.ndarray[Any, Any]) -> dict[str, Any]:
    given = {member.name: as_blocks({"image": images}) for member in program.members}
    found, _ = executor.run(program.name, given, {member.name: len(images) for member in program.members})
    return {name: arrays["logits"] for name, (arrays,) in found.items()}


def expected(model: str, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import torch

    with torch.inference_mode():
        return np.asarray(getattr(residual_networks, model)().module(torch.from_numpy(images)).numpy())


async def brought(executor: TorchExecutor, program: ProgramEntry) -> tuple[ResidentPrograms, Worker, asyncio.Event]:
    programs, worker, changed = ResidentPrograms("n0/0/a", executor, None), Worker(), asyncio.Event()
    await programs.bring([program], worker, changed.set)
    return programs, worker, changed


@pytest.mark.usefixtures("quick_workers")
def test_batches_are_answered_while_merging_and_after_without_a_gap() -> None:
    async def run() -> None:
        executor, program = Slowly(), entry("base", "tuned")
        _, worker, changed = await brought(executor, program)
        assert executor.ways() == {"base+tuned": "single graphs"}
        images = np.random.default_rng(0).standard_normal((2, 3, SIDE, SIDE), dtype=np.float32)
        right = {name: expected(name, images) for name in ("base", "tuned")}
        ways = []
        async with asyncio.timeout(PATIENCE_S):
            while not changed.is_set() or ways[-1] != "merged":
                found = await worker(lambda: (outputs_of(executor, program, images), executor.ways()["base+tuned"]))
                ways.append(found[1])
                for name, logits in found[0].items():
                    assert np.abs(logits - right[name]).max() <= 1e-5 * np.abs(right[name]).max()
                await asyncio.sleep(0.1)  # leaves the processor to the process that merges
        assert list(dict.fromkeys(ways)) == ["single graphs", "merged"]
        assert executor.facts()["base+tuned"]["operators_after"] > 0

    asyncio.run(run())


@pytest.mark.usefixtures("quick_workers")
def test_models_that_do_not_merge_go_on_as_single_graphs_and_the_log_names_the_cure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        executor = Slowly()
        _, _, changed = await brought(executor, entry("base", "stranger"))
        await asyncio.wait_for(changed.wait(), PATIENCE_S)
        assert (executor.loads, executor.ways()) == ([False], {"base+stranger": "single graphs"})

    asyncio.run(run())
    assert "goes on with single graphs" in caplog.text
    assert "Remove the group from `merge`" in caplog.text


def pretend_to_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    async def written(_members: Any, file: str) -> None:
        from tenuto.profiles.networks.programs import Member, prepare_program

        sources = [Member(name, f"tests.deployments.residual_networks:{name}") for name in ("base", "tuned")]
        await asyncio.to_thread(prepare_program, sources, file)

    monkeypatch.setattr(resident_programs, "prepare_elsewhere", written)


@pytest.mark.parametrize(
    ("fails", "loads", "way"),
    [
        ((0,), [False, True], "merged"),  # single graphs do not fit: requests wait for the merged ones
        ((1,), [False, True, False], "single graphs"),  # merged ones do not load: the single ones are back
    ],
)
def test_what_does_not_load_leaves_something_that_runs(
    monkeypatch: pytest.MonkeyPatch, fails: tuple[int, ...], loads: list[bool], way: str
) -> None:
    pretend_to_merge(monkeypatch)

    async def run() -> None:
        executor = Slowly(fails)
        _, _, changed = await brought(executor, entry("base", "tuned"))
        if way == "single graphs":
            await asyncio.wait_for(changed.wait(), PATIENCE_S)
        assert (executor.loads, executor.ways()["base+tuned"]) == (loads, way)

    asyncio.run(run())


def test_a_program_that_goes_takes_its_merging_along(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    begun = asyncio.Event()

    async def never(_members: Any, _file: str) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    monkeypatch.setattr(resident_programs, "prepare_elsewhere", never)

    async def run() -> None:
        executor = Slowly()
        programs, worker, changed = await brought(executor, entry("base", "tuned"))
        await begun.wait()
        await programs.bring([entry("base")], worker, changed.set)
        assert (ended, list(executor.ways()), changed.is_set()) == ([True], ["base"], False)
        begun.clear()
        await programs.bring([entry("base", "tuned")], worker, changed.set)
        await begun.wait()
        await programs.close()
        assert ended == [True, True]

    asyncio.run(run())


def unload() -> None:
    """Unload a network after the collector was told to spare all that is there, which holds for all of a process."""
    executor = TorchExecutor("cpu")
    executor.load(entry("base"), [1])
    held = weakref.ref(executor.program("base").network.module)
    spare_the_collector()
    let_unfreeze()
    executor.unload("base")
    assert held() is None


def test_what_is_unloaded_is_freed_though_the_collector_was_told_to_spare_it(
    worker_server: Callable[[str], list[str]],
) -> None:
    command = [sys.executable, *worker_server(f"{__name__}:unload")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
