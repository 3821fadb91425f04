"""Run batches of one model in three steps, so that the copies of one batch overlap with the kernels of another.

On CUDA inputs go through pinned buffers on a copy stream, kernels run on the stream of the process, outputs come back
on a third one; events keep the order copy, kernels, copy back. Two batches may be between `stage` and `finish`, so
every buffer exists twice. On a CPU nothing can overlap but the taking of the inputs. torch is not imported here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tenuto.profiles.networks.torch_runner import Arrays, TorchRunner

if TYPE_CHECKING:
    import torch

__all__ = ["DEPTH", "BatchTimes", "StagedBatch", "StreamedRunner", "Streams"]

DEPTH = 2  # batches between `stage` and `finish`: one executes, one is staged


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Where the time of a batch went, in ms. `execution_ms` is the kernels' alone: neither copies nor waiting."""

    copy_in_ms: float
    wait_ms: float  # its data was on the device, and the batch before still ran
    execution_ms: float
    copy_out_ms: float
    begun_at_s: float  # when it began to execute, on the monotonic clock


class Streams:
    """The three CUDA streams of a process, shared by its models: kernels of two batches never run at once."""

    def __init__(self, kernels: torch.cuda.Stream) -> None:
        """Take the stream of the kernels and make the two of the copies."""
        import torch

        self.kernels = kernels
        self.copy_in: Any = torch.cuda.Stream(kernels.device)  # type: ignore[no-untyped-call]
        self.copy_out: Any = torch.cuda.Stream(kernels.device)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Slot:
    """The input buffers of one batch: pinned on the host, and their copies on the device; they only ever grow."""

    pinned: dict[str, torch.Tensor] = field(default_factory=dict)
    device: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class StagedBatch:
    """A batch between `stage` and `finish`. Keeps alive whatever its copies and kernels still use."""

    batch_size: int
    tensors: list[torch.Tensor]
    staging_ms: float
    staged_at_s: float
    slot: _Slot | None = None
    events: tuple[Any, ...] = ()  # copy in begun, ended; kernels begun, ended; copy out ended
    answer: tuple[torch.Tensor, ...] = ()
    host: tuple[torch.Tensor, ...] = ()


class StreamedRunner:
    """A `TorchRunner` in three steps: `stage` and `launch` by one thread, `finish` in the same order by one other.

    Invariant: a slot is written only while no batch is in it, that is after the `finish` or `discard` of the last one.
    """

    def __init__(self, runner: TorchRunner, streams: Streams | None) -> None:
        """Take the runner, and the streams where it is on CUDA."""
        import torch

        self._torch = torch
        self._runner = runner
        self._streams = streams
        self._free = deque(_Slot() for _ in range(DEPTH))

    def stage(self, inputs: Mapping[str, np.ndarray[Any, Any]], batch_size: int) -> StagedBatch:
        """Begin to copy a batch to the device, whatever runs there; returns without waiting for the copy.

        Args:
            inputs: one array per input with a leading batch dimension; not needed any more afterwards on CUDA.
            batch_size: rows in them.

        Raises:
            InvalidInputError: an integer is outside the model's range; nothing was begun.
            RuntimeError: two batches are under way already.
        """
        began_s = time.monotonic()
        arrays, size = self._runner.prepare(inputs, batch_size)
        if self._streams is None:
            tensors = self._runner.as_tensors(arrays)
            now_s = time.monotonic()
            return StagedBatch(batch_size, tensors, (now_s - began_s) * 1000.0, now_s)
        if not self._free:
            raise RuntimeError(f"{DEPTH} batches are staged already; finish one first")
        torch, slot = self._torch, self._free.popleft()
        try:
            self._fit(slot, arrays, size, self._streams)
            for spec, array in zip(self._runner.signature.inputs, arrays, strict=True):
                np.copyto(slot.pinned[spec.name].numpy()[:size], array)
            now_s = time.monotonic()
            events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(5))
            stream = self._streams.copy_in
            tensors = []
            with torch.inference_mode(), torch.cuda.stream(stream):
                events[0].record(stream)
                for spec in self._runner.signature.inputs:
                    target = slot.device[spec.name][:size]
                    target.copy_(slot.pinned[spec.name][:size], non_blocking=True)
                    tensors.append(target)
                events[1].record(stream)
        except BaseException:
            self._free.append(slot)
            raise
        return StagedBatch(batch_size, tensors, (now_s - began_s) * 1000.0, now_s, slot, events)

    def launch(self, batch: StagedBatch) -> None:
        """Queue the kernels behind those of the batch before and the copy back behind them; does not wait on CUDA.

        On a CPU nothing is begun: the forward pass is `finish`'s. After an error the batch must be discarded.
        """
        streams, torch = self._streams, self._torch
        if streams is None:
            return
        _, copied, begun, ended, out = batch.events
        with torch.inference_mode():
            with torch.cuda.stream(streams.kernels):
                streams.kernels.wait_event(copied)
                begun.record(streams.kernels)
                batch.answer = self._runner.forward(batch.tensors)
                ended.record(streams.kernels)
            with torch.cuda.stream(streams.copy_out):
                streams.copy_out.wait_event(ended)
                # New every time: the answer leaves the process from this memory, while the next batch comes back.
                batch.host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in batch.answer)
                for target, tensor in zip(batch.host, batch.answer, strict=True):
                    target.copy_(tensor, non_blocking=True)
                out.record(streams.copy_out)

    def finish(self, batch: StagedBatch) -> tuple[Arrays, BatchTimes]:
        """Wait for a batch and return its outputs as arrays of the caller's own, and where its time went."""
        if self._streams is None:
            begun_s = time.monotonic()
            with self._torch.inference_mode():
                answer = self._runner.forward(batch.tensors)
            outputs = self._runner.outputs(answer, batch.batch_size)
            ended_s = time.monotonic()
            waited_ms = (begun_s - batch.staged_at_s) * 1000.0
            return outputs, BatchTimes(batch.staging_ms, waited_ms, (ended_s - begun_s) * 1000.0, 0.0, begun_s)
        begin, copied, begun, ended, out = batch.events
        try:
            out.synchronize()
            times = BatchTimes(
                batch.staging_ms + begin.elapsed_time(copied), copied.elapsed_time(begun), begun.elapsed_time(ended),
                ended.elapsed_time(out), batch.staged_at_s + begin.elapsed_time(begun) / 1000.0,
            )  # fmt: skip
            return self._runner.outputs(batch.host, batch.batch_size), times
        finally:
            self._release(batch)

    def discard(self, batch: StagedBatch) -> None:
        """Give up a batch whose `launch` failed, once the device no longer uses its buffers."""
        if self._streams is None:
            return
        try:
            for stream in (self._streams.copy_in, self._streams.kernels, self._streams.copy_out):
                stream.synchronize()
        finally:
            self._release(batch)

    def _release(self, batch: StagedBatch) -> None:
        slot, batch.slot = batch.slot, None
        batch.answer, batch.tensors = (), []
        if slot is not None:
            self._free.append(slot)

    def _fit(self, slot: _Slot, arrays: list[np.ndarray[Any, Any]], size: int, streams: Streams) -> None:
        """Make the buffers of a slot that nobody uses large enough for a batch."""
        torch = self._torch
        for spec, array in zip(self._runner.signature.inputs, arrays, strict=True):
            held = slot.pinned.get(spec.name)
            if held is not None and held.shape[0] >= size:
                continue
            rows = max((size, *self._runner.warm_sizes))
            kind = torch.from_numpy(np.empty(0, np.dtype(spec.dtype))).dtype
            shape = (rows, *array.shape[1:])
            slot.pinned[spec.name] = torch.empty(shape, dtype=kind, pin_memory=True)
            with torch.cuda.stream(streams.copy_in):  # the allocator reuses memory in the order of its first stream
                slot.device[spec.name] = torch.empty(shape, dtype=kind, device=self._runner.device)
