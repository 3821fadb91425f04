"""Requests and answers between a gateway and a dispatcher in another process, many in one message.

The plain data of a bundle: its header holds one row per request or answer, its body their tensors one after the other.
Whatever comes in one turn of the event loop leaves together at its end: an idle gateway adds no delay, and the busier
one is, the longer its turns and the larger its bundles. Holding messages back for a millisecond more saved no
measurable processor time and cost 1.2 ms of latency (tests/benchmarks/bench_bundles.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from tenuto.deployments.wire.answers import Answer, OutputTensor
from tenuto.outcome import Outcome

__all__ = ["AnswerRow", "Bundler", "RequestRow", "pack_answers", "pack_requests", "unpack_answers",
           "unpack_requests"]  # fmt: skip

_MOST_BYTES = 16 << 20

ItemT = TypeVar("ItemT")
Buffers = list[bytes | memoryview]


class Bundler(Generic[ItemT]):
    """Collects what is added and hands it over in bundles, on the running loop."""

    def __init__(self, hand_over: Callable[[list[ItemT]], None]) -> None:
        self._hand_over = hand_over
        self._items: list[ItemT] = []
        self._bytes = 0
        self._handle: asyncio.Handle | None = None

    def add(self, item: ItemT, size_bytes: int = 0) -> None:
        """Take one more; it leaves with this turn of the loop, or now if the bundle has become large."""
        self._items.append(item)
        self._bytes += size_bytes
        if self._bytes >= _MOST_BYTES:
            self.flush()
        elif self._handle is None:
            self._handle = asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Hand over what there is, now."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._items:
            items, self._items, self._bytes = self._items, [], 0
            self._hand_over(items)

    def drop(self) -> None:
        """Forget what has not left: the connection is gone."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._items, self._bytes = [], 0


class RequestRow(NamedTuple):
    """One request on its way to the dispatcher. `allowed_ms` counts from the sending of the bundle.

    `parts` None: the request of this number was cancelled by its client.
    """

    number: int
    model: str
    allowed_ms: float
    client_id: str
    parts: Sequence[bytes | memoryview] | None


def pack_requests(rows: Sequence[RequestRow], reserve_ms: float) -> tuple[dict[str, Any], Buffers]:
    """Return the header and the body's buffers; `reserve_ms` is what the way back may take."""
    described: list[list[Any]] = []
    cancelled: list[int] = []
    buffers: Buffers = []
    for row in rows:
        if row.parts is None:
            cancelled.append(row.number)
        else:
            lengths = [memoryview(part).nbytes for part in row.parts]
            described.append([row.number, row.model, row.allowed_ms, row.client_id, lengths])
            buffers.extend(row.parts)
    return {"requests": described, "cancelled": cancelled, "reserve_ms": reserve_ms}, buffers


def unpack_requests(header: Mapping[str, Any], body: memoryview) -> Iterator[RequestRow]:
    """Return the requests of a bundle, then the cancellations; parts are views into `body`."""
    offset = 0
    for number, model, allowed_ms, client_id, lengths in header["requests"]:
        parts = []
        for length in lengths:
            parts.append(body[offset : offset + length])
            offset += length
        yield RequestRow(number, model, allowed_ms, client_id, parts)
    for number in header["cancelled"]:
        yield RequestRow(number, "", 0.0, "", None)


class AnswerRow(NamedTuple):
    """One answer on its way back. `lasted_ms` is the time between the arrival of its request and its sending."""

    number: int
    lasted_ms: float
    answer: Answer


def pack_answers(rows: Sequence[AnswerRow]) -> tuple[dict[str, Any], Buffers]:
    """Return the header and the body's buffers."""
    described: list[list[Any]] = []
    buffers: Buffers = []
    for number, lasted_ms, answer in rows:
        start_ms = None if math.isnan(answer.start_ms) else answer.start_ms
        described.append(
            [
                number, lasted_ms, answer.outcome.word, answer.batch_size, answer.gpulet, answer.batching_ms,
                answer.gpulet_queue_ms, answer.execution_ms, answer.emulated, answer.retry_after_s, answer.reason,
                start_ms, [[t.name, t.dtype, t.shape, t.data.nbytes] for t in answer.outputs],
            ]
        )  # fmt: skip
        buffers.extend(tensor.data for tensor in answer.outputs)
    return {"answers": described}, buffers


def unpack_answers(header: Mapping[str, Any], body: memoryview) -> Iterator[AnswerRow]:
    """Return the answers of a bundle; outputs are views into `body`."""
    offset = 0
    for (
        number, lasted_ms, outcome, batch_size, gpulet, batching_ms, gpulet_queue_ms, execution_ms, emulated,
        retry_after_s, reason, start_ms, outputs,
    ) in header["answers"]:  # fmt: skip
        tensors = []
        for name, dtype, shape, length in outputs:
            tensors.append(OutputTensor(name, dtype, tuple(shape), body[offset : offset + length]))
            offset += length
        answer = Answer(
            Outcome.of_word(outcome), tensors, batch_size, gpulet, batching_ms, gpulet_queue_ms, execution_ms, emulated,
            retry_after_s, reason, math.nan if start_ms is None else start_ms,
        )  # fmt: skip
        yield AnswerRow(number, lasted_ms, answer)
