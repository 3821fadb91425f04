"""Executors in three steps, for gpu-lets that stream: the next batch is copied in while one executes.

Each wraps the plain executor that loads the models and runs what cannot be streamed. Nothing here waits but `finish`;
what executes is one batch after the other, as without streaming.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.gpulet.executors.emulated import EmulatedExecutor
from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.networks.inputs import Arrays, Blocks
from tenuto.profiles.networks.runner import BatchTimes, ProgramRunner, StagedBatch


class StreamingExecutor(Protocol):
    """Runs programs of one model, by its name; merged ones run by themselves.

    At most `STREAMED_DEPTH` batches are between `stage` and `finish`. One thread stages and launches, another finishes
    them, in order; models are loaded and unloaded while no batch is under way.
    """

    def stage(self, name: str, inputs: Blocks, batch_size: int) -> Any:
        """Begin to copy a batch in and return what stands for it; errors as those of `Executor.run`."""

    def launch(self, staged: Any) -> None:
        """Let it execute once its data is there and the batch before has ended; after an error, discard it."""

    def finish(self, staged: Any) -> tuple[Arrays, BatchTimes]:
        """Wait until a batch's outputs are back and return them, and where its time went."""

    def discard(self, staged: Any) -> None:
        """Free what a batch holds whose `launch` failed."""


def make_streaming(executor: Executor) -> StreamingExecutor:
    """Return the streaming form of an executor.

    Raises:
        EnvironmentFaultError: it has none.
    """
    if isinstance(executor, EmulatedExecutor):
        return EmulatedStreaming(executor)
    if isinstance(executor, TorchExecutor):
        return TorchStreaming(executor)
    raise EnvironmentFaultError(
        f"the executor of {executor.device} cannot stream. Plan with `streaming: false` in the workload."
    )


class TorchStreaming:
    """Streams what an executor runs that was made for it; on a CPU only the taking of inputs overlaps."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor

    def stage(self, name: str, inputs: Blocks, batch_size: int) -> tuple[ProgramRunner, StagedBatch]:
        """Copy into pinned memory, and begin to copy from there to the device."""
        runner = self._executor.program(name)
        return runner, runner.stage({name: inputs}, {name: batch_size})

    def launch(self, staged: tuple[ProgramRunner, StagedBatch]) -> None:
        """Queue the kernels and the copy back; on a CPU nothing is begun."""
        staged[0].launch(staged[1])

    def finish(self, staged: tuple[ProgramRunner, StagedBatch]) -> tuple[Arrays, BatchTimes]:
        """Wait for the copy back; on a CPU, run the forward pass."""
        self._executor.use_threads()
        outputs, times = staged[0].finish(staged[1])
        (alone,) = outputs.values()
        return alone, times

    def discard(self, staged: tuple[ProgramRunner, StagedBatch]) -> None:
        """Give the buffers back once the device no longer uses them."""
        staged[0].discard(staged[1])


@dataclass(slots=True)
class _EmulatedBatch:
    """A batch of an emulated GPU; moments on the monotonic clock in s."""

    name: str
    size: int
    staged_at_s: float
    ready_at_s: float
    begun_at_s: float = 0.0
    ended_at_s: float = 0.0
    back_at_s: float = 0.0


class EmulatedStreaming:
    """An emulated GPU with a copy engine for each direction beside its processors: three things that do one batch at a
    time each. A batch takes the plan's latency in all, of which its copies take what the plan or the model's options
    say; without either, nothing overlaps."""

    def __init__(self, executor: EmulatedExecutor) -> None:
        self._executor = executor
        self._in_free_s = 0.0
        self._free_s = 0.0
        self._out_free_s = 0.0

    def stage(self, name: str, inputs: Blocks, batch_size: int) -> _EmulatedBatch:
        """Begin to copy in, behind the copy before."""
        del inputs
        now_s = time.monotonic()
        copy_in_ms, _ = self._executor.copies_ms(name, batch_size)
        self._in_free_s = max(now_s, self._in_free_s) + copy_in_ms / 1000.0
        return _EmulatedBatch(name, batch_size, now_s, self._in_free_s)

    def launch(self, staged: _EmulatedBatch) -> None:
        """Execute behind the batch before, and copy out behind its copy."""
        copy_in_ms, copy_out_ms = self._executor.copies_ms(staged.name, staged.size)
        execution_ms = self._executor.latency_ms(staged.name, staged.size) - copy_in_ms - copy_out_ms
        staged.begun_at_s = max(staged.ready_at_s, self._free_s)
        staged.ended_at_s = self._free_s = staged.begun_at_s + execution_ms / 1000.0
        staged.back_at_s = self._out_free_s = max(staged.ended_at_s, self._out_free_s) + copy_out_ms / 1000.0

    def finish(self, staged: _EmulatedBatch) -> tuple[Arrays, BatchTimes]:
        """Wait until the batch would be back, and return zeros."""
        while (rest := staged.back_at_s - time.monotonic()) > 0:
            time.sleep(rest)
        times = BatchTimes(
            0.0,
            (staged.ready_at_s - staged.staged_at_s) * 1000.0,
            (staged.begun_at_s - staged.ready_at_s) * 1000.0,
            (staged.ended_at_s - staged.begun_at_s) * 1000.0,
            (staged.back_at_s - staged.ended_at_s) * 1000.0,
            staged.begun_at_s,
        )
        return self._executor.zeros({staged.name: staged.size})[staged.name], times

    def discard(self, staged: _EmulatedBatch) -> None:
        """Nothing is held."""
