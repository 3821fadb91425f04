"""Executors in three steps, for gpu-lets that stream: the next batch is copied in while another one executes.

Each wraps a plain executor, which loads the models and runs batches that cannot be streamed. Only `finish` waits.
Batches still execute one after another, as without streaming.
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
    """Runs batches of programs with one model. (Joint batches cannot be streamed.)

    At most `STREAMED_DEPTH` batches are between `stage` and `finish`. One thread stages and launches batches, another
    finishes them in the same order. Models are only loaded and unloaded while no batch is under way.
    """

    def stage(self, name: str, inputs: Blocks, batch_size: int) -> Any:
        """Begin to copy a batch in; return a handle for the other methods. Raises what `Executor.run` raises."""

    def launch(self, staged: Any) -> None:
        """Let a batch execute once its data is there and the batch before has ended. After an error, call `discard`."""

    def finish(self, staged: Any) -> tuple[list[Arrays], BatchTimes]:
        """Wait until a batch's outputs are back; return them, and the times of the batch's steps."""

    def discard(self, staged: Any) -> None:
        """Free the memory of a batch whose `launch` failed."""


def make_streaming(executor: Executor) -> StreamingExecutor:
    """Return the streaming form of an executor.

    Raises:
        EnvironmentFaultError: the executor has no streaming form.
    """
    if isinstance(executor, EmulatedExecutor):
        return EmulatedStreaming(executor)
    if isinstance(executor, TorchExecutor):
        return TorchStreaming(executor)
    raise EnvironmentFaultError(
        f"the executor of {executor.device} cannot stream. Plan with `streaming: false` in the workload."
    )


class TorchStreaming:
    """Streams the programs of a `TorchExecutor` made with `streaming`. On a CPU only taking the inputs overlaps."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor

    def stage(self, name: str, inputs: Blocks, batch_size: int) -> tuple[ProgramRunner, StagedBatch]:
        """Copy the inputs into pinned memory, and begin to copy them from there to the device."""
        runner = self._executor.program(name)
        return runner, runner.stage({name: inputs}, {name: batch_size})

    def launch(self, staged: tuple[ProgramRunner, StagedBatch]) -> None:
        """Queue the kernels and the copy back. On a CPU this does nothing."""
        staged[0].launch(staged[1])

    def finish(self, staged: tuple[ProgramRunner, StagedBatch]) -> tuple[list[Arrays], BatchTimes]:
        """Wait for the copy back. On a CPU, run the forward pass."""
        self._executor.use_threads()
        outputs, times = staged[0].finish(staged[1])
        (alone,) = outputs.values()
        return alone, times

    def discard(self, staged: tuple[ProgramRunner, StagedBatch]) -> None:
        """Give the buffers back once the device no longer uses them."""
        staged[0].discard(staged[1])


@dataclass(slots=True)
class _EmulatedBatch:
    """A batch of an emulated GPU. Times are s on the monotonic clock."""

    name: str
    sizes: list[tuple[int, ...]]
    size: int
    staged_at_s: float
    ready_at_s: float
    begun_at_s: float = 0.0
    ended_at_s: float = 0.0
    back_at_s: float = 0.0


class EmulatedStreaming:
    """An emulated GPU with one copy engine for each direction. The two engines and the processors each handle one batch
    at a time. A batch takes the planned latency in all. Its copies are part of this latency; their times come from the
    plan or the model's options. Without such times nothing overlaps."""

    def __init__(self, executor: EmulatedExecutor) -> None:
        self._executor = executor
        self._in_free_s = 0.0
        self._free_s = 0.0
        self._out_free_s = 0.0

    def stage(self, name: str, inputs: Blocks, batch_size: int) -> _EmulatedBatch:
        """Begin to copy a batch in, after the copy before it."""
        sizes = self._executor.sizes(name, {name: inputs}, batch_size)
        now_s = time.monotonic()
        copy_in_ms, _ = self._executor.copies_ms(name, batch_size)
        self._in_free_s = max(now_s, self._in_free_s) + copy_in_ms / 1000.0
        return _EmulatedBatch(name, sizes, batch_size, now_s, self._in_free_s)

    def launch(self, staged: _EmulatedBatch) -> None:
        """Execute after the batch before, and copy out after that batch's copy."""
        copy_in_ms, copy_out_ms = self._executor.copies_ms(staged.name, staged.size)
        execution_ms = self._executor.latency_ms(staged.name, staged.sizes) - copy_in_ms - copy_out_ms
        staged.begun_at_s = max(staged.ready_at_s, self._free_s)
        staged.ended_at_s = self._free_s = staged.begun_at_s + execution_ms / 1000.0
        staged.back_at_s = self._out_free_s = max(staged.ended_at_s, self._out_free_s) + copy_out_ms / 1000.0

    def finish(self, staged: _EmulatedBatch) -> tuple[list[Arrays], BatchTimes]:
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
        return self._executor.zeros(staged.name, staged.sizes), times

    def discard(self, staged: _EmulatedBatch) -> None:
        """Do nothing: an emulated batch holds no memory."""
