"""A gpu-let's worker thread. It owns the device, runs batches one after another, and does other work between batches.

It knows neither sockets nor Serve: others give it batches, and a batch sends its own answer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from tenuto.batching.core.deferred_steps import DeferredSteps
from tenuto.batching.core.step_scheduler import StepLimits, StepScheduler
from tenuto.deployments.gpulet.channel import Arrived, ArrivedBatch, ArrivedSequence, LeftSequences
from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.gpulet.executors.streamed import StreamingExecutor
from tenuto.deployments.gpulet.inbox import Inbox, Source
from tenuto.deployments.gpulet.resident_programs import ResidentPrograms
from tenuto.deployments.gpulet.sequences import OpenSequences
from tenuto.deployments.gpulet.streamed_work import StreamedBatches
from tenuto.deployments.serve.user_config import GeneratesEntry
from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.arena import MappedArenas
from tenuto.deployments.wire.bundles import read_parts
from tenuto.deployments.wire.messages import BatchFailed, BatchRan, EndedSequence, Generated, Message
from tenuto.deployments.wire.tensors import RowOutput, inline_blocks, input_blocks, most_row_bytes, pack_outputs
from tenuto.errors import first_line, new_incident, refused
from tenuto.outcome import Outcome
from tenuto.profiles.networks.device import loses_device
from tenuto.profiles.networks.inputs import Arrays, Blocks
from tenuto.profiles.networks.runner import BatchTimes

logger = logging.getLogger("ray.serve")

_Action = tuple[Callable[[], None], "asyncio.Future[None]"]
_Item = Arrived | _Action


class WorkerThread:
    """Invariant: every batch that is put before `stop` is answered exactly once."""

    def __init__(
        self,
        gpulet_id: str,
        executor: Executor,
        streaming: StreamingExecutor | None,
        programs: ResidentPrograms,
        on_fault: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Start the thread; must be called on the event loop that `perform` is called on.

        Args:
            gpulet_id: the id for logs, errors and the thread's name.
            executor: runs batches.
            streaming: runs batches that can be streamed, if the gpu-let streams.
            programs: the resident programs; batches of other programs are refused.
            on_fault: called once, on the thread, when no batch can run here any more.
        """
        self._id = gpulet_id
        self._executor = executor
        self._streaming = streaming
        self._programs = programs
        self._on_fault = on_fault
        self._loop = asyncio.get_running_loop()
        self._inbox: Inbox[_Item] = Inbox()
        self._arenas = MappedArenas()
        self._begun: dict[int, tuple[float, str]] = {}  # by `id(batch)`: when it began, and its program
        self._sequences: dict[str, OpenSequences] = {}  # by program
        self._ends_s = math.inf  # until when sequences go on that are open when the thread is stopped
        self.fault: str | None = None  # why no batch can run here any more
        self._thread = threading.Thread(target=self._work, name=f"gpulet {gpulet_id}", daemon=True)
        self._thread.start()

    # --- for other threads --------------------------------------------------------------------------------------

    def put(self, work: Arrived) -> None:
        """Run a batch after those that wait; when it is marked as aborted before its turn, it is not run. Sequences
        join or leave before the next step."""
        self._inbox.put(work)

    def watch(self, source: Source) -> None:
        """Read this socket from now on, whenever the worker would otherwise wait."""
        self._inbox.watch(source)

    def perform(self, action: Callable[[], None]) -> asyncio.Future[None]:
        """Run a function on the thread, between two batches. The future has the error that it raised."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put((action, future))
        return future

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def longest(self) -> tuple[float, str] | None:
        """Return when the oldest batch on the device began (monotonic s), and its program; None if none runs."""
        return next(iter(self._begun.copy().values()), None)

    async def stop(self, batches_s: float, generations_s: float) -> None:
        """Finish all batches and generations that have come, and end the thread. What is left of these is ended after
        `generations_s`. Returns `batches_s` later even if the thread still runs."""
        self._ends_s = time.monotonic() + generations_s
        self._inbox.close()
        limit_s = batches_s + (generations_s if self._sequences else 0.0)
        await self._loop.run_in_executor(None, self._thread.join, limit_s)
        if not self._thread.is_alive():
            self._inbox.release()

    # --- on the thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._streaming is not None:
            self._stream(self._streaming)
            return
        idle_s: float | None = None
        while (item := self._inbox.get(idle_s)) is not None or idle_s is not None:
            if item is not None:
                self._do(item)
                is_last = False
            else:
                is_last = self._inbox.is_closed and time.monotonic() > self._ends_s
            idle_s = self._steps(item is None, is_last=is_last)

    def _stream(self, executor: StreamingExecutor) -> None:
        """Do all items. Actions and joint batches, which cannot be streamed, are done while no batch is under way."""
        streamed = StreamedBatches(executor, done=self._streamed, failed=self._failed, name=f"gpulet {self._id}")
        while (item := self._inbox.get()) is not None:
            if isinstance(item, ArrivedBatch) and item.message.members[0][0] == item.program:
                streamed.begin(item, self._streamed_inputs)
            else:
                with streamed.none_under_way():
                    self._do(item)
        streamed.end()

    def _steps(self, runs: bool, *, is_last: bool) -> float | None:
        """Run a step of each model that has sequences, unless more has come meanwhile; return how long to wait for
        more, None where no sequence is open."""
        waits_s = None
        for name, sequences in list(self._sequences.items()):
            is_here = self._programs.generating(name) is not None
            if is_last or not is_here or self._executor.generator(name) is not sequences.generator:
                sequences.end_all()
                del self._sequences[name]
            elif sequences:
                begun = id(sequences)
                self._begun[begun] = time.monotonic(), name
                idle_s = sequences.step() if runs else 0.0
                del self._begun[begun]
                waits_s = idle_s if waits_s is None else min(waits_s, idle_s)
            else:
                del self._sequences[name]  # the next one finds what is expected by then
        return waits_s

    def _do(self, item: _Item) -> None:
        """Run one batch, or one action between batches."""
        if isinstance(item, ArrivedBatch):
            self._run(item)
            return
        if isinstance(item, ArrivedSequence):
            self._generate(item)
            return
        if isinstance(item, LeftSequences):
            for sequences in self._sequences.values():
                sequences.forget_left(item)
            return
        action, future = item
        try:
            action()
        except BaseException as error:
            self._loop.call_soon_threadsafe(_settle, future, error)
        else:
            self._loop.call_soon_threadsafe(_settle, future, None)

    def _run(self, batch: ArrivedBatch) -> None:
        queue_ms = (time.monotonic() - batch.received_at) * 1000.0
        if (refusal := self._refusal(batch)) is not None:
            batch.answer(refusal)
            return
        rows = dict(batch.message.members)
        try:
            inputs = self._inputs(batch)
            begun_s = time.monotonic()
            self._begun[id(batch)] = begun_s, batch.program
            outputs, execution_ms = self._executor.run(batch.program, inputs, rows)
            packed = [part for member, count in rows.items() for part in self._packed(member, count, outputs[member])]
        except BaseException as error:  # a model may also raise SystemExit, which must not end the thread
            self._failed(batch, error)
            return
        del self._begun[id(batch)]
        members = [(count, described) for count, described, _ in packed]
        ran = BatchRan(batch.message.number, begun_s * 1000.0, execution_ms, queue_ms, 0.0, 0.0, members)
        batch.answer(ran, [buffer for _, _, buffers in packed for buffer in buffers])

    def _packed(
        self, member: str, rows: int, outputs: Sequence[Arrays]
    ) -> list[tuple[int, list[RowOutput], list[memoryview]]]:
        """Return the number of rows of each part of a member's outputs, and how it travels."""
        signature = self._executor.signature(member)
        axes = {spec.name: spec.axis for spec in signature.outputs}
        counts = [rows] if len(outputs) == 1 else [len(next(iter(part.values()))) for part in outputs]
        packed = [(count, *pack_outputs(part, count, axes)) for count, part in zip(counts, outputs, strict=True)]
        if not signature.is_plain:
            most = most_row_bytes(signature.outputs, signature.sizes)
            largest = max([sum([output.row_bytes for output in described]) for _, described, _ in packed])
            if largest > most:
                rule, cure = f"a request's outputs take at most {most} bytes", "Raise the `most` of its sizes."
                raise refused(f"outputs of {member}", largest, rule, cure)
        return packed

    def _generate(self, arrived: ArrivedSequence) -> None:
        """Take a sequence, or answer why not."""
        name, entry = arrived.message.model, self._programs.generating(arrived.message.model)
        absent = f"'{name}' is not resident on gpu-let {self._id}; the plan has just changed"
        if entry is None or self.fault is not None:
            refused = Refused(Outcome.FAILED, absent if entry is None else self.fault or "", 1.0, self._id)
            ended = EndedSequence.failed(arrived.message.number, refused, may_retry=True)
            arrived.peer.connection.send(Generated([], [ended]))
            return
        sequences = self._sequences.get(name)
        if sequences is None or sequences.generator is not self._executor.generator(name):
            sequences = self._sequences[name] = self._sequences_of(name, entry)
        sequences.add(arrived)

    def _sequences_of(self, name: str, entry: GeneratesEntry) -> OpenSequences:
        most = entry.max_batch_tokens
        order = None if entry.steps is None else DeferredSteps(entry.steps, most)
        steps = StepScheduler(StepLimits(entry.max_sequences, most, entry.kv_tokens, entry.block_tokens), order)
        return OpenSequences(self._id, name, self._executor.generator(name), steps, self._step_failed)

    def _step_failed(self, error: BaseException, incident: str) -> bool:
        """Log a step that failed; return whether the device is lost."""
        logger.error("gpu-let %s: a step failed (%s)", self._id, incident, exc_info=error)
        lost = self._lose_device(error)
        if lost and self.fault is not None:
            self._on_fault(self.fault)
        return lost

    def _refusal(self, batch: ArrivedBatch) -> Message | None:
        """Return the answer to a batch that must not be run; None if it may run."""
        number = batch.message.number
        if batch.is_given_up():
            return BatchFailed(number, "the batch was given up before it ran", may_retry=True)
        if self.fault is not None:
            return BatchFailed(number, f"gpu-let {self._id} runs no more batches; its log says why", may_retry=True)
        if batch.program not in self._programs:
            reason = f"'{batch.program}' is not resident on gpu-let {self._id}; the plan has just changed"
            return BatchFailed(number, reason, may_retry=True)
        return None

    def _inputs(self, batch: ArrivedBatch) -> dict[str, Blocks]:
        """Return the inputs by member. The gateway has already checked their shapes and types.

        Raises:
            OSError, ValueError: the shared memory of an input is gone.
        """
        message, body = batch.message, batch.body
        inputs: dict[str, Blocks] = {}
        if not message.places:
            for member, rows in message.members:
                inputs[member], body = inline_blocks(self._executor.signature(member).inputs, rows, body)
            return inputs
        parts, _ = read_parts(message.places, message.arenas, body, self._arenas)
        remaining, sizes = iter(parts), iter(message.sizes)
        for member, rows in message.members:
            mine = list(itertools.islice(sizes, rows))
            inputs[member] = input_blocks(self._executor.signature(member), rows, remaining, mine)
        return inputs

    def _streamed_inputs(self, batch: ArrivedBatch) -> Blocks | None:
        """Return the inputs of a batch that is streamed; None when the batch was refused."""
        if (refusal := self._refusal(batch)) is not None:
            batch.answer(refusal)
            return None
        self._begun[id(batch)] = time.monotonic(), batch.program
        return self._inputs(batch)[batch.program]

    def _streamed(self, batch: ArrivedBatch, outputs: Sequence[Arrays], times: BatchTimes, queue_ms: float) -> None:
        """Answer a streamed batch. Its copies count as part of its way, as other batches execute meanwhile."""
        self._begun.pop(id(batch), None)
        packed = self._packed(batch.program, batch.size, outputs)
        copies = (times.staging_ms + times.copy_in_ms, times.copy_out_ms)
        took = times.begun_at_s * 1000.0, times.execution_ms, queue_ms, *copies
        members = [(count, described) for count, described, _ in packed]
        batch.answer(
            BatchRan(batch.message.number, *took, members), [each for *_, buffers in packed for each in buffers]
        )

    def _failed(self, batch: ArrivedBatch, error: BaseException) -> None:
        """Answer a batch that could not be run. The error itself only goes to the log, as it may contain things that
        clients must not know."""
        self._begun.pop(id(batch), None)
        incident = new_incident()
        text = "gpu-let %s: a batch of %d for %s failed (%s)"
        logger.error(text, self._id, batch.size, batch.program, incident, exc_info=error)
        lost = self._lose_device(error)
        reason = f"running '{batch.program}' failed; the log of gpu-let {self._id} says why under {incident}"
        batch.answer(BatchFailed(batch.message.number, reason, may_retry=self.fault is not None))
        if lost and self.fault is not None:
            self._on_fault(self.fault)

    def _lose_device(self, error: BaseException) -> bool:
        """Return whether an error has just cost the device."""
        lost = self.fault is None and self._executor.device.startswith("cuda") and loses_device(error)
        if lost:
            self.fault = f"the CUDA context of gpu-let {self._id} is lost: {first_line(error)}"
        return lost


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
