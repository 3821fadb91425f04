"""Batches of a gpu-let that streams: the worker's thread stages and launches them, a second thread answers them.

At most two batches are under way: one executes, and one is staged behind it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from tenuto.deployments.gpulet.executors.streamed import StreamingExecutor
from tenuto.profiles.networks.inputs import Arrays, Blocks
from tenuto.profiles.networks.runner import STREAMED_DEPTH, BatchTimes

_ENDS_S = 60.0  # limit: time for launched batches to end


class _Batch(Protocol):
    received_at: float

    @property
    def program(self) -> str: ...

    @property
    def size(self) -> int: ...


BatchT = TypeVar("BatchT", bound=_Batch)


class StreamedBatches(Generic[BatchT]):
    """Invariant: batches are finished in the order in which they were launched, each exactly once."""

    def __init__(
        self,
        streaming: StreamingExecutor,
        *,
        done: Callable[[BatchT, Sequence[Arrays], BatchTimes, float], None],
        failed: Callable[[BatchT, BaseException], None],
        name: str = "gpu-let",
    ) -> None:
        """Start the second thread.

        Args:
            streaming: the executor of the device.
            done: answers a batch, from its outputs, its times, and its wait at this gpu-let in ms without copies.
            failed: answers a batch that could not be run.
            name: the name of the second thread.
        """
        self._streaming = streaming
        self._done = done
        self._failed = failed
        self._room = threading.Semaphore(STREAMED_DEPTH)
        self._launched: SimpleQueue[tuple[BatchT, Any, float] | None] = SimpleQueue()
        self._finisher = threading.Thread(target=self._finish_all, name=f"{name} answers", daemon=True)
        self._finisher.start()

    def begin(self, batch: BatchT, read_inputs: Callable[[BatchT], Blocks | None]) -> None:
        """Wait until there is room, copy a batch in and launch it. `read_inputs` returns None for a batch that it
        answered instead."""
        self._room.acquire()
        if not self._begin(batch, read_inputs):
            self._room.release()

    @contextlib.contextmanager
    def none_under_way(self) -> Iterator[None]:
        """Wait until all batches have ended; none is under way within the block."""
        for _ in range(STREAMED_DEPTH):
            self._room.acquire()
        try:
            yield
        finally:
            self._room.release(STREAMED_DEPTH)

    def end(self) -> None:
        """Wait until every batch is answered."""
        self._launched.put(None)
        self._finisher.join(_ENDS_S)  # a batch that hangs on a GPU ends only with the process

    def _begin(self, batch: BatchT, read_inputs: Callable[[BatchT], Blocks | None]) -> bool:
        queued_ms = (time.monotonic() - batch.received_at) * 1000.0
        try:
            inputs = read_inputs(batch)
            if inputs is None:
                return False
            staged = self._streaming.stage(batch.program, inputs, batch.size)
        except BaseException as error:
            self._failed(batch, error)
            return False
        try:
            self._streaming.launch(staged)
        except BaseException as error:
            with contextlib.suppress(BaseException):  # the error of the launch already says that the device is gone
                self._streaming.discard(staged)
            self._failed(batch, error)
            return False
        self._launched.put((batch, staged, queued_ms))
        return True

    def _finish_all(self) -> None:
        while (entry := self._launched.get()) is not None:
            batch, staged, queued_ms = entry
            try:
                outputs, times = self._streaming.finish(staged)
            except BaseException as error:
                self._room.release()
                self._failed(batch, error)
                continue
            self._room.release()
            try:
                self._done(batch, outputs, times, queued_ms + times.wait_ms)
            except BaseException as error:  # the thread must not end: it answers the batches behind this one
                self._failed(batch, error)
