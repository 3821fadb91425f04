"""A gpu-let's worker thread: it owns the device, runs batches one after another and what has to happen between two.

It knows neither sockets nor Serve: batches are put from the event loop, and their answers are handed back there.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.gpulet.executors.streamed import StreamingExecutor
from tenuto.deployments.gpulet.resident_programs import ResidentPrograms
from tenuto.deployments.gpulet.streamed_work import StreamedWork
from tenuto.deployments.wire.joint_batches import cut_inputs, pack_outputs
from tenuto.deployments.wire.transport import FrameProtocol
from tenuto.profiles.networks.inputs import Arrays, Blocks
from tenuto.profiles.networks.runner import BatchTimes

__all__ = ["ArrivedBatch", "WorkerThread"]

logger = logging.getLogger("ray.serve")

_Reply = tuple[dict[str, Any], list[memoryview]]  # header and buffers


class ArrivedBatch:
    """One batch between arrival at the gpu-let and answer."""

    __slots__ = ("aborted", "body", "header", "protocol", "received_at")

    def __init__(self, protocol: FrameProtocol, header: dict[str, Any], body: memoryview, received_at: float) -> None:
        self.protocol = protocol
        self.header = header
        self.body = body
        self.received_at = received_at
        self.aborted = False

    @property
    def program(self) -> str:
        """What is to run."""
        return str(self.header["model"])

    @property
    def size(self) -> int:
        """Rows of all members."""
        return int(self.header["n"])

    @property
    def rows(self) -> dict[str, int]:
        """Rows by member."""
        return dict(self.header.get("members") or [(self.program, self.size)])


class WorkerThread:
    """Invariant: every batch that is put before `stop` is answered exactly once."""

    def __init__(
        self,
        gpulet_id: str,
        executor: Executor,
        streaming: StreamingExecutor | None,
        programs: ResidentPrograms,
        answer: Callable[[ArrivedBatch, dict[str, Any], list[memoryview]], None],
    ) -> None:
        """Start the thread; must be called on the event loop that answers are to be given on.

        Args:
            gpulet_id: for logs, the thread's name and errors.
            executor: runs batches.
            streaming: runs those that can be streamed, where the gpu-let streams.
            programs: what is resident; batches of others are refused.
            answer: takes a batch with the header and the buffers of its answer.
        """
        self._id = gpulet_id
        self._executor = executor
        self._streaming = streaming
        self._programs = programs
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._batches = 0
        self._busy_s = 0.0
        self._recent: deque[dict[str, Any]] = deque(maxlen=1024)
        self.fault: str | None = None  # why no batch can run here any more
        self._thread = threading.Thread(target=self._work, name=f"gpulet {gpulet_id}", daemon=True)
        self._thread.start()

    # --- the event loop's side ----------------------------------------------------------------------------------

    def put(self, batch: ArrivedBatch) -> None:
        """Run a batch behind those that wait; one that is marked as aborted before its turn is not run."""
        self._queue.put(batch)

    def perform(self, action: Callable[[], None]) -> asyncio.Future[None]:
        """Run something between two batches on the thread; the future carries what it raised."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._queue.put((action, future))
        return future

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    async def stop(self, timeout_s: float) -> None:
        """Finish what was put and end the thread; returns after `timeout_s` even where it still runs."""
        self._queue.put(None)
        await self._loop.run_in_executor(None, self._thread.join, timeout_s)

    def totals(self) -> dict[str, Any]:
        """Return batches run and seconds spent running them since the start."""
        return {"batches": self._batches, "busy_s": self._busy_s}

    def records(self) -> list[dict[str, Any]]:
        """Return the last batches, oldest first: requests by their clients' ids, start and end on this node's monotonic
        clock in s."""
        return list(self._recent)

    # --- the thread's side --------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._streaming is not None:
            StreamedWork[ArrivedBatch](
                self._queue, self._streaming, as_batch=_streamable, take=self._take, done=self._streamed,
                failed=lambda batch, error: self._send(batch, self._failed(batch, error)), otherwise=self._do,
                name=f"gpulet {self._id}",
            ).run()  # fmt: skip
            return
        while (item := self._queue.get()) is not None:
            self._do(item)

    def _do(self, item: Any) -> None:
        """Run one batch, or an action between two."""
        if isinstance(item, ArrivedBatch):
            self._send(item, self._run(item))
            return
        action, future = item
        try:
            action()
        except BaseException as error:
            self._loop.call_soon_threadsafe(_settle, future, error)
        else:
            self._loop.call_soon_threadsafe(_settle, future, None)

    def _send(self, batch: ArrivedBatch, reply: _Reply) -> None:
        self._loop.call_soon_threadsafe(self._answer, batch, *reply)

    def _refusal(self, batch: ArrivedBatch) -> _Reply | None:
        """Return the answer to a batch that is not to be run."""
        name = batch.program
        if batch.aborted:
            return {"error": "the batch was given up before it ran"}, []
        if name not in self._programs:
            return {
                "error": f"'{name}' is not resident on gpu-let {self._id}; the plan has just changed, send it again"
            }, []
        return None

    def _failed(self, batch: ArrivedBatch, error: Exception) -> _Reply:
        name = batch.program
        logger.error("gpu-let %s: a batch of %d for %s failed", self._id, batch.size, name, exc_info=error)
        self._note_fault(error)
        return {"error": f"running '{name}' failed: {type(error).__name__}: {error}"}, []

    def _note_fault(self, error: Exception) -> None:
        """A CUDA fault is sticky: the context is lost and only a new process helps, so fail the next health check."""
        text = str(error)
        if "CUDA error" in text or "device-side assert" in text or "CUDA driver" in text:
            self.fault = f"the CUDA context of gpu-let {self._id} is lost: {text.splitlines()[0]}"

    def _run(self, batch: ArrivedBatch) -> _Reply:
        started_at = time.perf_counter()
        refusal = self._refusal(batch)
        if refusal is not None:
            return refusal
        try:
            begun_s, execution_ms, answer, buffers = self._execute(batch)
        except Exception as error:
            return self._failed(batch, error)
        return self._ran(batch, begun_s, execution_ms, (started_at - batch.received_at) * 1000.0, answer), buffers

    def _execute(self, batch: ArrivedBatch) -> tuple[float, float, dict[str, Any], list[memoryview]]:
        """Run a batch; the gateway has checked shapes and types.

        Returns its start in s, its execution time in ms, and the outputs as part of the answer's header and buffers.
        """
        rows, body, inputs = batch.rows, batch.body, {}
        for member, count in rows.items():
            inputs[member], body = cut_inputs(self._executor.signature(member).inputs, body, count)
        begun_s = time.monotonic()
        outputs, execution_ms = self._executor.run(batch.program, inputs, rows)
        packed = [(count, *pack_outputs(outputs[member], count)) for member, count in rows.items()]
        parts = [(count, described) for count, described, _ in packed]
        return begun_s, execution_ms, {"members": parts}, [b for _, _, mine in packed for b in mine]

    def _take(self, batch: ArrivedBatch) -> Blocks | None:
        """Return the inputs of a batch to be streamed; None when it was refused."""
        refusal = self._refusal(batch)
        if refusal is not None:
            self._send(batch, refusal)
            return None
        return cut_inputs(self._executor.signature(batch.program).inputs, batch.body, batch.size)[0]

    def _streamed(self, batch: ArrivedBatch, outputs: Arrays, times: BatchTimes, queue_ms: float) -> None:
        """Answer a streamed batch. Its copies are part of its way, as they keep no other batch from executing."""
        described, buffers = pack_outputs(outputs, batch.size)
        copies = {"copy_in_ms": times.staging_ms + times.copy_in_ms, "copy_out_ms": times.copy_out_ms}
        answer = {"members": [(batch.size, described)], **copies}
        self._send(batch, (self._ran(batch, times.begun_at_s, times.execution_ms, queue_ms, answer), buffers))

    def _ran(
        self, batch: ArrivedBatch, begun_s: float, execution_ms: float, queue_ms: float, answer: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Note a batch that ran and return the header of its answer."""
        name, size = batch.program, batch.size
        requests = batch.header.get("requests", [])
        self._recent.append(
            {"model": name, "batch_size": size, "requests": requests, "started_s": begun_s,
             "ended_s": begun_s + execution_ms / 1000.0}
        )  # fmt: skip
        logger.debug("gpu-let %s: %d of %s in %.3f ms: %s", self._id, size, name, execution_ms, requests)
        self._batches += 1
        self._busy_s += execution_ms / 1000.0
        return {
            **answer,
            "execution_ms": execution_ms,
            "started_ms": begun_s * 1000.0,
            "queue_ms": queue_ms,
            "emulated": self._programs.is_emulated,
        }


def _streamable(item: Any) -> ArrivedBatch | None:
    """Return a batch that can be streamed: those of merged models run by themselves."""
    return item if isinstance(item, ArrivedBatch) and item.program in item.rows else None


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
