"""The two threads of a gpu-let that streams. The first stages and launches batches; the second answers them.

At most two batches are under way: one executes, and one is staged behind it. Loading, unloading and joint batches
happen between batches, on the first thread, as in a gpu-let that does not stream.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
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


class _Items(Protocol):
    def get(self) -> Any: ...


Work = TypeVar("Work", bound=_Batch)


class StreamedWork(Generic[Work]):
    """Invariant: batches are finished in the order in which they were launched, each exactly once."""

    def __init__(
        self,
        items: _Items,
        streaming: StreamingExecutor,
        *,
        as_batch: Callable[[Any], Work | None],
        take: Callable[[Work], Blocks | None],
        done: Callable[[Work, Arrays, BatchTimes, float], None],
        failed: Callable[[Work, BaseException], None],
        otherwise: Callable[[Any], None],
        name: str = "gpu-let",
    ) -> None:
        """Prepare; the first thread must call `run`.

        Args:
            items: gives out the items to do; None is the last.
            streaming: the executor of the device.
            as_batch: returns an item as a batch if it can be streamed, else None.
            take: returns a batch's inputs, or None when it was answered without being run.
            done: answers a batch, from its outputs, its times, and its wait at this gpu-let in ms without copies.
            failed: answers a batch that could not be run.
            otherwise: does an item that cannot be streamed; no batch is under way then.
            name: the name of the second thread.
        """
        self._items = items
        self._streaming = streaming
        self._as_batch = as_batch
        self._take = take
        self._done = done
        self._failed = failed
        self._otherwise = otherwise
        self._room = threading.Semaphore(STREAMED_DEPTH)
        self._launched: SimpleQueue[tuple[Work, Any, float] | None] = SimpleQueue()
        self._finisher = threading.Thread(target=self._finish_all, name=f"{name} answers", daemon=True)

    def run(self) -> None:
        """Do all items until None comes; return when every batch is answered."""
        self._finisher.start()
        while (item := self._items.get()) is not None:
            work = self._as_batch(item)
            if work is not None:
                self._room.acquire()
                if not self._begin(work):
                    self._room.release()
                continue
            self._wait_until_empty()
            try:
                self._otherwise(item)
            finally:
                for _ in range(STREAMED_DEPTH):
                    self._room.release()
        self._launched.put(None)
        self._finisher.join(_ENDS_S)  # a batch that hangs on a GPU ends only with the process

    def _wait_until_empty(self) -> None:
        for _ in range(STREAMED_DEPTH):
            self._room.acquire()

    def _begin(self, work: Work) -> bool:
        """Copy a batch in and launch it; False if it was answered instead."""
        queued_ms = (time.monotonic() - work.received_at) * 1000.0
        try:
            inputs = self._take(work)
            if inputs is None:
                return False
            staged = self._streaming.stage(work.program, inputs, work.size)
        except BaseException as error:
            self._failed(work, error)
            return False
        try:
            self._streaming.launch(staged)
        except BaseException as error:
            with contextlib.suppress(BaseException):  # the error of the launch already says that the device is gone
                self._streaming.discard(staged)
            self._failed(work, error)
            return False
        self._launched.put((work, staged, queued_ms))
        return True

    def _finish_all(self) -> None:
        while (entry := self._launched.get()) is not None:
            work, staged, queued_ms = entry
            try:
                outputs, times = self._streaming.finish(staged)
            except BaseException as error:
                self._room.release()
                self._failed(work, error)
                continue
            self._room.release()
            try:
                self._done(work, outputs, times, queued_ms + times.wait_ms)
            except BaseException as error:  # the thread must not end: it answers the batches behind this one
                self._failed(work, error)
