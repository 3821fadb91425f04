"""Requests and answers between a gateway and a dispatcher in another process, many in one message.

All items that come in one turn of the event loop leave together at its end. So an idle gateway adds no delay; a busy
gateway has longer turns and thus larger bundles. Holding messages for another millisecond saved no measurable processor
time and cost 1.2 ms of latency (lab/benchmarks/bench_bundles.py).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.arena import MappedArenas
from tenuto.deployments.wire.messages import MOST_BUNDLED_BYTES, Answers, ExecutedRows, PartPlace
from tenuto.deployments.wire.tensors import Buffer, InputPart, cut_rows

ItemT = TypeVar("ItemT")


class Bundler(Generic[ItemT]):
    """Collects items and hands them over in bundles, on the running loop."""

    def __init__(self, hand_over: Callable[[list[ItemT]], None]) -> None:
        self._hand_over = hand_over
        self._items: list[ItemT] = []
        self._bytes = 0
        self._handle: asyncio.Handle | None = None

    def add(self, item: ItemT, size_bytes: int = 0) -> None:
        """Add an item. It leaves at the end of this turn of the loop, or now if the bundle has become large."""
        self._items.append(item)
        self._bytes += size_bytes
        if self._bytes >= MOST_BUNDLED_BYTES:
            self.flush()
        elif self._handle is None:
            self._handle = asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Hand over the items now."""
        items = self.drop()
        if items:
            self._hand_over(items)

    def drop(self) -> list[ItemT]:
        """Forget the items, as the connection is gone. Return them."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        items, self._items, self._bytes = self._items, [], 0
        return items


class Places:
    """Collects where the tensors of a message lie: in shared memory that the receiver can map, or in the body."""

    def __init__(self, *, shares_memory: bool) -> None:
        self._shares_memory = shares_memory
        self.arenas: list[str] = []
        self.buffers: list[Buffer] = []

    def put(self, part: InputPart) -> PartPlace:
        """Add a tensor; returns its place."""
        if part.arena and self._shares_memory:
            if part.arena not in self.arenas:
                self.arenas.append(part.arena)
            return PartPlace(self.arenas.index(part.arena), part.offset, part.nbytes, part.dtype)
        self.buffers.append(part.data)
        return PartPlace(-1, 0, part.nbytes, part.dtype)


def read_parts(
    places: Sequence[PartPlace], arenas: Sequence[str], body: memoryview, mapped: MappedArenas
) -> tuple[list[InputPart], memoryview]:
    """Return the tensors at these places, and the rest of the body after them.

    Raises:
        OSError: an arena cannot be mapped.
        ValueError: a place lies outside of its arena.
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


def clock_ahead_ms(sent_at_ms: float, now_ms: float, *, shares_memory: bool) -> float:
    """Return by how much the receiver's clock is ahead of the sender's, from a bundle that was sent at `sent_at_ms`.

    The clocks of two machines begin at different times, so here the bundle's time on its way counts as zero. Processes
    that share memory are on one machine and have the same clock.
    """
    return 0.0 if shares_memory else now_ms - sent_at_ms


class AnsweredRequest(NamedTuple):
    """The end of the request with this number: a row of an execution, or a refusal."""

    number: int
    end: Executed | Refused
    row: int = 0


def pack_answers(answered: Sequence[AnsweredRequest], sent_at_ms: float) -> tuple[Answers, list[Buffer]]:
    """Return the message and the buffers of its body. Requests of one batch that follow each other are joined."""
    executed: list[ExecutedRows] = []
    refused: list[tuple[int, Refused]] = []
    buffers: list[Buffer] = []
    for _, same in itertools.groupby(answered, lambda answer: id(answer.end)):
        numbers, ends, rows = zip(*same, strict=True)
        end = ends[0]
        if isinstance(end, Refused):
            refused += [(number, end) for number in numbers]
            continue
        executed.append(
            ExecutedRows(
                list(numbers),
                end.batch_size,
                end.gpulet,
                end.emulated,
                end.sent_ms,
                end.started_ms,
                end.gpulet_queue_ms,
                end.execution_ms,
                end.planned_ms,
                end.outputs,
            )
        )
        begin, stop = rows[0], rows[0] + len(rows)
        is_slice = rows == tuple(range(begin, stop))
        for output, data in zip(end.outputs, end.data, strict=True):
            size = output.row_bytes
            if is_slice:
                buffers.append(data[begin * size : stop * size])
            else:
                buffers += [data[row * size : (row + 1) * size] for row in rows]
    return Answers(sent_at_ms, executed, refused), buffers


def unpack_answers(message: Answers, body: memoryview, ahead_ms: float) -> Iterator[AnsweredRequest]:
    """Return the answers of a bundle; outputs are views into `body`.

    Args:
        message: a message that `pack_answers` made.
        body: the body of its frame.
        ahead_ms: by how much the clock here is ahead of the sender's.
    """
    for numbers, size, gpulet, emulated, sent_ms, started_ms, queue_ms, run_ms, planned_ms, outputs in message.executed:
        data, body = cut_rows(len(numbers), outputs, body)
        executed = Executed(
            size,
            gpulet,
            emulated,
            sent_ms + ahead_ms,
            started_ms + ahead_ms,
            queue_ms,
            run_ms,
            len(numbers),
            outputs,
            data,
            planned_ms,
        )
        for row, number in enumerate(numbers):
            yield AnsweredRequest(number, executed, row)
    for number, refused in message.refused:
        yield AnsweredRequest(number, refused)
