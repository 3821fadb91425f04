"""Requests and answers between a gateway and a dispatcher in another process, many in one message.

Whatever comes in one turn of the event loop leaves together at its end: an idle gateway adds no delay, and the busier
one is, the longer its turns and the larger its bundles. Holding messages back for a millisecond more saved no
measurable processor time and cost 1.2 ms of latency (tests/benchmarks/bench_bundles.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.arena import MappedArenas
from tenuto.deployments.wire.messages import MOST_BUNDLED_BYTES, AnswerRow, Answers, PartPlace
from tenuto.deployments.wire.tensors import Buffer, InputPart, OutputTensor, RowOutput, cut_rows
from tenuto.outcome import Outcome

__all__ = ["AnsweredRequest", "Bundler", "Places", "pack_answers", "read_parts", "unpack_answers"]

ItemT = TypeVar("ItemT")


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
        if self._bytes >= MOST_BUNDLED_BYTES:
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


class Places:
    """Collects where the tensors of a message lie: in shared memory that the receiver can map, or in its body."""

    def __init__(self, *, shares_memory: bool) -> None:
        self._shares_memory = shares_memory
        self.arenas: list[str] = []
        self.buffers: list[Buffer] = []

    def put(self, part: InputPart) -> PartPlace:
        """Take one more tensor."""
        if part.arena and self._shares_memory:
            if part.arena not in self.arenas:
                self.arenas.append(part.arena)
            return PartPlace(self.arenas.index(part.arena), part.offset, part.nbytes, part.dtype)
        self.buffers.append(part.data)
        return PartPlace(-1, 0, part.nbytes, part.dtype)


def read_parts(
    places: Sequence[PartPlace], arenas: Sequence[str], body: memoryview, mapped: MappedArenas
) -> tuple[list[InputPart], memoryview]:
    """Return the tensors at these places, and what follows the last of them in the body.

    Raises:
        OSError: an arena cannot be mapped.
        ValueError: a place outside of it.
    """
    parts = []
    for arena, offset, length, dtype in places:
        if arena < 0:
            parts.append(InputPart(body[:length], dtype))
            body = body[length:]
        else:
            name = arenas[arena]
            parts.append(InputPart(mapped.bytes_of(name, offset, length), dtype, name, offset))
    return parts, body


class AnsweredRequest(NamedTuple):
    """An answer between dispatcher and gateway; `lasted_ms` passed from the arrival of its bundle to its sending."""

    number: int
    lasted_ms: float
    answer: Answer


def pack_answers(answered: Sequence[AnsweredRequest]) -> tuple[Answers, list[Buffer]]:
    """Return the message and the body's buffers."""
    rows: list[AnswerRow] = []
    buffers: list[Buffer] = []
    for number, lasted_ms, answer in answered:
        start_ms = None if math.isnan(answer.start_ms) else answer.start_ms
        outputs = [RowOutput(t.name, t.dtype, t.shape, t.data.nbytes) for t in answer.outputs]
        rows.append(
            AnswerRow(
                number, lasted_ms, int(answer.outcome), answer.batch_size, answer.gpulet, answer.batching_ms,
                answer.gpulet_queue_ms, answer.execution_ms, answer.emulated, answer.retry_after_s, answer.reason,
                start_ms, outputs,
            )
        )  # fmt: skip
        buffers.extend(tensor.data for tensor in answer.outputs)
    return Answers(rows), buffers


def unpack_answers(message: Answers, body: memoryview) -> Iterator[AnsweredRequest]:
    """Return the answers of a bundle; outputs are views into `body`."""
    for row in message.rows:
        data, body = cut_rows(1, row.outputs, body)
        described = zip(row.outputs, data, strict=True)
        tensors = [OutputTensor(name, dtype, shape, its) for (name, dtype, shape, _), its in described]
        answer = Answer(
            Outcome(row.outcome), tensors, row.batch_size, row.gpulet, row.batching_ms, row.gpulet_queue_ms,
            row.execution_ms, row.emulated, row.retry_after_s, row.reason,
            math.nan if row.start_ms is None else row.start_ms,
        )  # fmt: skip
        yield AnsweredRequest(row.number, row.lasted_ms, answer)
