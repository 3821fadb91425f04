"""The two threads of a streaming gpu-let on a device that finishes a batch when the test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.gpulet.streamed_work import StreamedBatches
from tenuto.profiles.networks.runner import BatchTimes

LIMIT_S = 10.0


class Batch:
    def __init__(self, number: int, model: str = "m") -> None:
        self.number = number
        self.program = model
        self.size = 1
        self.received_at = time.perf_counter()


class Device:
    """Notes what is called; `finish` waits for a permit."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.staged = 0
        self.most_under_way = 0
        self.permits = threading.Semaphore(0)
        self.fail: dict[str, Exception] = {}

    def _note(self, what: str, number: int) -> None:
        self.calls.append(f"{what} {number}")
        error = self.fail.pop(f"{what} {number}", None)
        if error is not None:
            raise error

    def stage(self, name: str, inputs: dict[str, Any], batch_size: int) -> int:
        number = int(inputs["x"])
        self._note("stage", number)
        self.staged += 1
        self.most_under_way = max(self.most_under_way, self.staged)
        return number

    def launch(self, staged: int) -> None:
        self._note("launch", staged)

    def finish(self, staged: int) -> tuple[list[dict[str, Any]], BatchTimes]:
        assert self.permits.acquire(timeout=LIMIT_S)
        self.staged -= 1
        self._note("finish", staged)
        return [{"y": np.array(staged)}], BatchTimes(0.0, 1.0, 2.0, 3.0, 0.5, 0.0)

    def discard(self, staged: int) -> None:
        self.staged -= 1
        self._note("discard", staged)


class Bench:
    def __init__(self) -> None:
        self.device = Device()
        self.items: SimpleQueue[Any] = SimpleQueue()
        self.answers: list[tuple[int, str]] = []
        self.waited_ms: list[float] = []
        self.refused: set[int] = set()
        self.unanswerable: set[int] = set()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        """Do what a gpu-let's worker does."""
        streamed = StreamedBatches[Batch](self.device, done=self._done, failed=self._failed)
        while (item := self.items.get()) is not None:
            if isinstance(item, Batch):
                streamed.begin(item, self._inputs)
            else:
                with streamed.none_under_way():
                    self._otherwise(item)
        streamed.end()

    def _inputs(self, work: Batch) -> dict[str, Any] | None:
        number = work.number
        if number in self.refused:
            self.answers.append((number, "refused"))
            return None
        return {"x": np.array(number)}

    def _done(self, work: Batch, outputs: Sequence[dict[str, Any]], times: BatchTimes, waited_ms: float) -> None:
        assert int(outputs[0]["y"]) == work.number
        if work.number in self.unanswerable:
            raise ValueError("no bytes")
        self.waited_ms.append(waited_ms)
        self.answers.append((work.number, "ok"))

    def _failed(self, work: Batch, error: BaseException) -> None:
        self.answers.append((work.number, str(error)))

    def _otherwise(self, item: Callable[[], None]) -> None:
        self.device.calls.append(f"other with {self.device.staged} under way")
        item()

    def end(self) -> None:
        self.device.permits.release(100)
        self.items.put(None)
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()

    def until(self, claim: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not claim():
            assert time.monotonic() < end, self.device.calls
            time.sleep(0.001)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.device.permits.release(100)
    made.items.put(None)


def test_the_next_batch_is_staged_and_launched_while_one_executes(bench: Bench) -> None:
    for number in range(3):
        bench.items.put(Batch(number))
    bench.until(lambda: "launch 1" in bench.device.calls)
    assert bench.device.calls == ["stage 0", "launch 0", "stage 1", "launch 1"]
    assert bench.answers == []
    bench.device.permits.release()
    bench.until(lambda: "launch 2" in bench.device.calls)
    assert bench.answers[:1] in ([], [(0, "ok")])
    bench.end()
    assert bench.answers == [(0, "ok"), (1, "ok"), (2, "ok")]
    assert bench.device.most_under_way == 2
    assert all(waited >= 2.0 for waited in bench.waited_ms)


def test_a_refused_or_failing_batch_leaves_room_for_the_next(bench: Bench) -> None:
    bench.refused = {0}
    bench.device.fail = {
        "stage 1": ValueError("bad input"),
        "launch 2": RuntimeError("CUDA error"),
        "discard 2": RuntimeError("gone"),
        "finish 3": RuntimeError("late"),
    }
    for number in range(7):
        bench.items.put(Batch(number))
    bench.end()
    assert sorted(bench.answers) == [
        (0, "refused"),
        (1, "bad input"),
        (2, "CUDA error"),
        (3, "late"),
        (4, "ok"),
        (5, "ok"),
        (6, "ok"),
    ]


def test_an_answer_that_cannot_be_made_fails_its_batch_alone(bench: Bench) -> None:
    bench.unanswerable = {0}
    for number in range(2):
        bench.items.put(Batch(number))
    bench.end()
    assert bench.answers == [(0, "no bytes"), (1, "ok")]


def test_everything_else_happens_between_batches_and_in_order(bench: Bench) -> None:
    happened = threading.Event()
    bench.items.put(Batch(0))
    bench.items.put(Batch(1))
    bench.items.put(happened.set)
    bench.items.put(Batch(2))
    bench.until(lambda: "launch 1" in bench.device.calls)
    assert not happened.is_set()
    bench.end()
    assert happened.is_set()
    calls = bench.device.calls
    assert calls.index("finish 1") < calls.index("other with 0 under way") < calls.index("stage 2")


def test_the_end_waits_for_what_is_under_way(bench: Bench) -> None:
    bench.items.put(Batch(0))
    bench.items.put(None)
    bench.until(lambda: "launch 0" in bench.device.calls)
    assert bench.thread.is_alive()
    bench.end()
    assert bench.answers == [(0, "ok")]
