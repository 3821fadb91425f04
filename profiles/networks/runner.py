"""Runs batches of a program, from numpy to numpy, in three steps. Serving and profiling both run and time batches so.

`stage` copies a batch to the device, `launch` queues its kernels and the copy back, `finish` waits for it. On CUDA
inputs go through pinned buffers on the stream of the copies in, kernels run on the stream of the process, outputs come
back on the stream of the copies out; events keep the order. With three streams two batches may be between `stage` and
`finish`, so that the copies of one overlap with the kernels of the other; with one stream, one batch. On a CPU nothing
can overlap but the taking of the inputs. torch is imported when a runner is made, not with this module.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tenuto.errors import refused
from tenuto.profiles.networks.catalogue import BYTES, ImageInput, ModelSignature, TensorSignature
from tenuto.profiles.networks.cpu_share import cpu_cores
from tenuto.profiles.networks.inputs import (
    Arrays,
    Blocks,
    as_blocks,
    blank_inputs,
    check_range,
    fitted,
    packed_bytes,
    takes_pixels,
)
from tenuto.profiles.networks.network import Network
from tenuto.profiles.networks.preprocess import normalised
from tenuto.profiles.networks.shaped_runs import ShapedRun, own_outputs, shaped_runs

if TYPE_CHECKING:
    import torch

_FEW_CORES = 8  # fitted: with up to so many cores, a process that waits for its GPU sleeps; with more, it spins
_WHOLE_BYTES = 4  # format: of a float32
STREAMED_DEPTH = 2  # derived: batches between `stage` and `finish` when copies overlap: one executes, one is staged


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The times of a batch's steps, in ms. `execution_ms` is the time of the kernels, without copies and waiting."""

    staging_ms: float  # host memory to pinned host memory
    copy_in_ms: float  # from there to the device
    wait_ms: float  # time on the device while the batch before still ran
    execution_ms: float
    copy_out_ms: float
    begun_at_s: float  # when it began to execute, on the monotonic clock


@dataclass(frozen=True)
class Streams:
    """The CUDA streams of a process. Its programs share them, so kernels of two batches never run at the same time."""

    kernels: torch.cuda.Stream
    copy_in: torch.cuda.Stream
    copy_out: torch.cuda.Stream

    @classmethod
    def one(cls, kernels: torch.cuda.Stream) -> Streams:
        """Copy on the stream of the kernels: one batch after another."""
        return cls(kernels, kernels, kernels)

    @classmethod
    def overlapping(cls, kernels: torch.cuda.Stream) -> Streams:
        """Make two more streams, so that copies overlap with kernels."""
        import torch

        copy_in: Any = torch.cuda.Stream(kernels.device)  # type: ignore[no-untyped-call]
        copy_out: Any = torch.cuda.Stream(kernels.device)  # type: ignore[no-untyped-call]
        return cls(kernels, copy_in, copy_out)

    @property
    def depth(self) -> int:
        """How many batches may be between `stage` and `finish`."""
        return 1 if self.copy_in is self.kernels else STREAMED_DEPTH


Array = np.ndarray[Any, Any]
Answer = dict[str, "tuple[torch.Tensor, ...]"]  # the outputs of each model
Key = tuple[str, str, str]  # the key of a buffer: model, input and dtype


@dataclass(slots=True)
class _Slot:
    """The input buffers of one batch, pinned on the host, and their copies on the device. Buffers only grow."""

    pinned: dict[Key, torch.Tensor] = field(default_factory=dict)
    device: dict[Key, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class StagedBatch:
    """A batch between `stage` and `finish`. It keeps the memory alive that its copies and kernels still use."""

    rows: Mapping[str, int]
    calls: list[dict[str, list[torch.Tensor]]]  # of the network; more than one only where shapes vary
    staging_ms: float
    staged_at_s: float
    slot: _Slot | None = None
    events: tuple[Any, ...] = ()  # copy in begun, ended; kernels begun, ended; copy out ended
    answers: list[Answer] = field(default_factory=list)
    host: list[Answer] = field(default_factory=list)
    runs: list[ShapedRun] = field(default_factory=list)  # of a model that is not plain: its only one


class ProgramRunner:
    """One program on one device. One thread stages and launches, one (the same or another) finishes in the same order.

    Invariant: a slot is written only while no batch is in it, that is after the `finish` or `discard` of the last one.
    """

    def __init__(self, network: Network, streams: Streams | None = None) -> None:
        """`network`: the computation of the program, on its device; `streams`: given if that is CUDA."""
        import torch

        self._torch = torch
        self.network = network
        self._streams = streams
        self._free = deque(_Slot() for _ in range(1 if streams is None else streams.depth))

    @property
    def signatures(self) -> Mapping[str, ModelSignature]:
        """The signature of each of the program's models."""
        return self.network.signatures

    @property
    def depth(self) -> int:
        """How many batches may be between `stage` and `finish`; on a CPU it does not matter."""
        return STREAMED_DEPTH if self._streams is None else self._streams.depth

    @property
    def on_cuda(self) -> bool:
        """Whether batches run on a CUDA device."""
        return self._streams is not None

    def run(self, inputs: Mapping[str, Blocks], rows: Mapping[str, int]) -> dict[str, Arrays]:
        """Run one batch whose rows have equal shapes and return its outputs by model; blocks until they are there.

        Args:
            inputs: the inputs by model; they may be in read-only memory.
            rows: the number of rows by model; models without rows may be left out.

        Raises:
            InvalidInputError: an integer is outside a model's range; this is found before anything runs.
        """
        return {name: part for name, (part,) in self.run_timed(inputs, rows)[0].items()}

    def run_timed(
        self, inputs: Mapping[str, Blocks], rows: Mapping[str, int]
    ) -> tuple[dict[str, list[Arrays]], BatchTimes]:
        """Run one batch; return the outputs of each model, in parts of rows that follow each other with equal shapes,
        and the times of its steps."""
        batch = self.stage(inputs, rows)
        try:
            self.launch(batch)
        except BaseException:
            with contextlib.suppress(Exception):  # the device may be lost, but the first error says more
                self.discard(batch)
            raise
        return self.finish(batch)

    def warm_up(self, runs: int) -> None:
        """Run blank batches of every size that is prepared before requests come."""
        self.reserve()
        for rows in self.network.warm_up_rows():
            for _ in range(runs):
                self.warm_up_with(rows)
        for name, signature in self.signatures.items():
            if self.on_cuda and takes_pixels(signature):
                rows = {name: self.network.largest_batch}
                self.run(self._blank(rows, pixels=True), rows)

    def warm_up_with(self, rows: Mapping[str, int]) -> None:
        """Run one blank batch."""
        self.run(self._blank(rows), rows)

    def _blank(self, rows: Mapping[str, int], *, pixels: bool = False) -> dict[str, Blocks]:
        return {
            name: as_blocks(blank_inputs(self.signatures[name], count, pixels=pixels)) for name, count in rows.items()
        }

    def reserve(self, rows: int | None = None) -> None:
        """Make every buffer large enough for a batch of `rows` of any model; default: the largest planned batch."""
        if self._streams is None:
            return
        rows = self.network.largest_batch if rows is None else rows
        for name, signature in self.signatures.items():
            if not signature.is_plain:
                continue
            for pixels in (False, True) if takes_pixels(signature) else (False,):
                blank = self._blank({name: rows}, pixels=pixels)
                staged = [self.stage(blank, {name: rows}) for _ in range(self.depth)]
                for batch in staged:
                    self.discard(batch)

    def stage(self, inputs: Mapping[str, Blocks], rows: Mapping[str, int]) -> StagedBatch:
        """Begin to copy a batch to the device, whatever runs there; returns without waiting for the copy.

        Args:
            inputs: see `run`; on CUDA they are not needed any more afterwards.
            rows: see `run`.

        Raises:
            InvalidInputError: an integer is outside a model's range; nothing was begun.
            RuntimeError: `depth` batches are under way already.
        """
        began_s = time.monotonic()
        rows = {name: count for name, count in rows.items() if count}
        if any(not self.signatures[name].is_plain for name in rows):
            return self._stage_shaped(inputs, rows, began_s)
        blocks = {
            (name, key, mine[0].dtype.name): mine
            for name in rows
            for key, mine in self._padded(name, inputs[name], rows[name])
        }
        if self._streams is None:
            given: dict[str, list[Any]] = {name: [] for name in rows}
            for (name, _, _), mine in blocks.items():
                whole = _as_one(mine)
                given[name].append(whole if whole.dtype == object else self._torch.from_numpy(whole))
            now_s = time.monotonic()
            return StagedBatch(rows, [given], (now_s - began_s) * 1000.0, now_s)
        if not self._free:
            raise RuntimeError(f"{self._streams.depth} batches are staged already; finish one first")
        torch, slot, stream = self._torch, self._free.popleft(), self._streams.copy_in
        try:
            filled = {key: self._fill(slot, key, mine) for key, mine in blocks.items() if key[2] != "object"}
            now_s = time.monotonic()
            events = tuple(torch.cuda.Event(enable_timing=True, blocking=blocking) for blocking in self._waits)
            tensors: dict[str, list[Any]] = {name: [] for name in rows}
            with torch.inference_mode(), torch.cuda.stream(stream):
                events[0].record(stream)
                for key, mine in blocks.items():
                    count = filled.get(key)
                    if count is None:
                        tensors[key[0]].append(_as_one(mine))
                        continue
                    target = slot.device[key][:count]
                    target.copy_(slot.pinned[key][:count], non_blocking=True)
                    tensors[key[0]].append(target)
                events[1].record(stream)
        except BaseException:
            self._free.append(slot)
            raise
        return StagedBatch(rows, [tensors], (now_s - began_s) * 1000.0, now_s, slot, events)

    def _stage_shaped(self, inputs: Mapping[str, Blocks], rows: Mapping[str, int], began_s: float) -> StagedBatch:
        """Begin to copy a batch of a model that is not plain, which is alone in its program. Its runs follow each
        other; on CUDA its inputs are not pinned."""
        torch, streams = self._torch, self._streams
        (name,) = rows
        runs = shaped_runs(self.signatures[name], inputs[name])
        calls = [{name: [_as_given(torch, array) for array in run.inputs]} for run in runs]
        now_s = time.monotonic()
        staging_ms = (now_s - began_s) * 1000.0
        if streams is None:
            return StagedBatch(rows, calls, staging_ms, now_s, runs=runs)
        if not self._free:
            raise RuntimeError(f"{streams.depth} batches are staged already; finish one first")
        events = tuple(torch.cuda.Event(enable_timing=True, blocking=each) for each in self._waits)
        device = torch.device("cuda:0")
        with torch.inference_mode(), torch.cuda.stream(streams.copy_in):
            events[0].record(streams.copy_in)
            calls = [{name: [_on_device(each, device) for each in call[name]]} for call in calls]
            events[1].record(streams.copy_in)
        return StagedBatch(rows, calls, staging_ms, now_s, self._free.popleft(), events, runs=runs)

    @property
    def _waits(self) -> list[bool]:
        """Which of a batch's events a thread waits for asleep: the last. With few cores it must sleep, as a spinning
        thread takes a whole core."""
        return [False] * 4 + [cpu_cores() <= _FEW_CORES]  # format: the events before the last

    def launch(self, batch: StagedBatch) -> None:
        """Queue the kernels after those of the batch before, and the copy back after them. On CUDA it does not wait.

        On a CPU nothing is begun, as `finish` runs the forward pass. After an error the batch must be discarded.
        """
        streams, torch = self._streams, self._torch
        if streams is None:
            return
        _, copied, begun, ended, out = batch.events
        with torch.inference_mode():
            with torch.cuda.stream(streams.kernels):
                streams.kernels.wait_event(copied)
                begun.record(streams.kernels)
                batch.answers = [self.network(call) for call in batch.calls]
                ended.record(streams.kernels)
            with torch.cuda.stream(streams.copy_out):
                streams.copy_out.wait_event(ended)
                # The memory is new every time: the answer leaves the process from it while the next batch comes back.
                batch.host = [
                    {name: tuple(self._copied_out(each) for each in answer) for name, answer in answers.items()}
                    for answers in batch.answers
                ]
                out.record(streams.copy_out)

    def _copied_out(self, output: Any) -> Any:
        """Begin to copy an output to pinned memory; an array of bytes lies in the host's memory already."""
        if not isinstance(output, self._torch.Tensor):
            return output
        target = self._torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        target.copy_(output, non_blocking=True)
        return target

    def finish(self, batch: StagedBatch) -> tuple[dict[str, list[Arrays]], BatchTimes]:
        """Wait for a batch and return its outputs, which the caller may keep, and the times of its steps; see
        `run_timed`.

        Raises:
            InvalidInputError: the outputs are not as the signature says.
        """
        if self._streams is None:
            begun_s = time.monotonic()
            with self._torch.inference_mode():
                answers = [self.network(call) for call in batch.calls]
            outputs = self._outputs(answers, batch)
            ended_s = time.monotonic()
            waited_ms = (begun_s - batch.staged_at_s) * 1000.0
            return outputs, BatchTimes(batch.staging_ms, 0.0, waited_ms, (ended_s - begun_s) * 1000.0, 0.0, begun_s)
        begin, copied, begun, ended, out = batch.events
        try:
            out.synchronize()
            times = BatchTimes(
                batch.staging_ms,
                begin.elapsed_time(copied),
                copied.elapsed_time(begun),
                begun.elapsed_time(ended),
                ended.elapsed_time(out),
                batch.staged_at_s + begin.elapsed_time(begun) / 1000.0,
            )
            return self._outputs(batch.host, batch), times
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
        batch.answers, batch.calls = [], []
        if slot is not None:
            self._free.append(slot)

    def _padded(self, name: str, inputs: Blocks, rows: int) -> Iterator[tuple[str, Sequence[Array]]]:
        """Yield a model's inputs in the signature's order, padded with blank rows if its options say so."""
        signature = self.signatures[name]
        more = self.network.padded(rows) - rows
        for spec in signature.inputs:
            given = inputs[spec.name]
            if spec.dtype != BYTES:
                given = _of_one_type(spec, signature.image, [check_range(spec, block) for block in given])
            if more > 0:
                came = given[0].dtype
                blank = blank_inputs(signature, more, pixels=came == np.uint8)[spec.name]
                given = [*given, blank.astype(came, copy=False)]
            yield spec.name, given

    def _fill(self, slot: _Slot, key: Key, blocks: Sequence[Array]) -> int:
        """Copy blocks into a pinned buffer of an unused slot; return the number of their rows."""
        count = sum(len(block) for block in blocks)
        held = slot.pinned.get(key)
        if held is None or held.shape[0] < count:
            held = self._grow(slot, key, count, blocks[0].shape[1:])
        into, at = held.numpy(), 0
        for block in blocks:
            np.copyto(into[at : at + len(block)], block)
            at += len(block)
        return count

    def _grow(self, slot: _Slot, key: Key, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
        torch, streams = self._torch, self._streams
        kind = torch.from_numpy(np.empty(0, np.dtype(key[2]))).dtype
        # The allocator reuses memory in the order of the stream on which it was first allocated.
        with torch.cuda.stream(None if streams is None else streams.copy_in):
            slot.device[key] = torch.empty((rows, *shape), dtype=kind, device=torch.device("cuda:0"))
        slot.pinned[key] = torch.empty((rows, *shape), dtype=kind, pin_memory=True)
        return slot.pinned[key]

    def _outputs(self, answers: Sequence[Answer], batch: StagedBatch) -> dict[str, list[Arrays]]:
        """Return host tensors as the arrays of the signatures, without the padding."""
        rows = batch.rows.items()
        if not batch.runs:
            return {name: [_as_arrays(self.signatures[name], answers[0][name], count)] for name, count in rows}
        ((name, _),) = rows
        signature = self.signatures[name]
        arrays = [list(_values_of(signature, answer[name])) for answer in answers]
        return {name: own_outputs(signature, list(zip(batch.runs, arrays, strict=True)))}


def _values_of(signature: ModelSignature, answer: tuple[torch.Tensor, ...]) -> Iterator[Array]:
    """Yield the outputs of a run in the types of the signature, in the network's layout."""
    _check_count(signature, answer)
    for spec, tensor in zip(signature.outputs, answer, strict=True):
        yield np.asarray(tensor, object) if spec.dtype == BYTES else _numbers(spec, tensor)


def _check_count(signature: ModelSignature, answer: tuple[torch.Tensor, ...]) -> None:
    if len(answer) != len(signature.outputs):
        raise refused(
            "signature.outputs",
            len(signature.outputs),
            f"the model returned {len(answer)} tensors",
            "Name every output of the model in its signature, in order.",
        )


def _numbers(spec: TensorSignature, tensor: torch.Tensor) -> Array:
    """Return an output of numbers in the type of the signature; raises `InvalidInputError` where it does not fit."""
    is_half = tensor.is_floating_point() and tensor.element_size() < _WHOLE_BYTES  # numpy has no bfloat16
    try:
        return fitted((tensor.float() if is_half else tensor).numpy(), spec.dtype)
    except ValueError as error:
        rule = f"the model returned another type: {error}"
        raise refused(f"output {spec.name}", spec.dtype, rule, "Correct the model's signature.") from None


def _as_arrays(signature: ModelSignature, answer: tuple[torch.Tensor, ...], rows: int) -> Arrays:
    _check_count(signature, answer)
    outputs = {}
    for spec, tensor in zip(signature.outputs, answer, strict=True):
        if spec.dtype == BYTES:
            outputs[spec.name] = _bytes_output(spec, tensor, rows)
            continue
        array = tensor[:rows]
        if array.shape != (rows, *spec.shape):
            raise refused(
                f"output {spec.name}",
                list(array.shape),
                f"the signature says {[rows, *spec.shape]}",
                "Correct the model's signature.",
            )
        outputs[spec.name] = np.ascontiguousarray(_numbers(spec, array))
    return outputs


def _bytes_output(spec: TensorSignature, output: Any, rows: int) -> Array:
    """Return an output of bytes as an array of objects, without the padding.

    Raises:
        InvalidInputError: it has another shape or other elements than `bytes`, or a sample is longer than the signature
            allows.
    """
    array = np.asarray(output, object)[:rows] if isinstance(output, np.ndarray) else np.empty(0, object)
    if array.shape != (rows, *spec.shape) or not all(type(each) is bytes for each in array.flat):
        raise refused(
            f"output {spec.name}",
            f"{type(output).__name__} {list(getattr(output, 'shape', ()))}",
            f"the signature says an array of bytes objects of shape {[rows, *spec.shape]}",
            "Return numpy.array(..., dtype=object) with elements of type bytes, or correct the model's signature.",
        )
    for row in array.reshape(rows, math.prod(array.shape[1:])):
        if (size := packed_bytes(row)) > spec.most_bytes:
            rule = f"a sample takes at most {spec.most_bytes} bytes, the lengths of its elements included"
            raise refused(f"output {spec.name}", size, rule, "Shorten it, or raise `most_bytes` in the signature.")
    return array


def _of_one_type(spec: TensorSignature, image: ImageInput | None, blocks: Sequence[Array]) -> Sequence[Array]:
    """Return blocks of one type: that of the signature. Only pictures that all came in one type keep it."""
    came = {block.dtype.name for block in blocks}
    if came == {spec.dtype} or (image is not None and len(came) == 1):
        return blocks
    return [
        normalised(block, image)
        if image is not None and block.dtype == np.uint8
        else block.astype(spec.dtype, copy=False)
        for block in blocks
    ]


def _as_given(torch: Any, array: Array) -> Any:
    """Return an input of a run as the network takes it."""
    array = _wrappable(array)
    return array if array.dtype == object else torch.from_numpy(array)


def _on_device(each: Any, device: torch.device) -> Any:
    return each if isinstance(each, np.ndarray) else each.to(device)


def _as_one(blocks: Sequence[Array]) -> Array:
    """Return blocks as one array that torch may wrap."""
    return _wrappable(blocks[0] if len(blocks) == 1 else np.concatenate(blocks))


def _wrappable(array: Array) -> Array:
    """Return an array that torch may wrap. (It warns about read-only memory, although inference never writes to
    inputs.)"""
    if array.flags.writeable and array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.array(array, order="C")
