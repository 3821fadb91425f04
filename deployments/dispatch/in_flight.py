"""What a dispatcher knows of a request and of a batch while they are its own; a batch on the wire, put together from
its requests, and the gpu-let's answer taken apart by model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.arena import Held
from tenuto.deployments.wire.bundles import Places
from tenuto.deployments.wire.messages import BatchRan, RunBatch
from tenuto.deployments.wire.tensors import Buffer, InputPart, cut_rows


class Asker(Protocol):
    """Whoever asks. One of the two is called, once, unless the request is cancelled before."""

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        """The request ran, as this row of that model's part of a batch."""

    def refused(self, request: Request, refused: Refused) -> None:
        """The request did not run, or failed."""


class Request(msgspec.Struct, eq=False):
    """A request between its admission and its end. Times are ms on the dispatcher's clock.

    `model` is its index in the present plan. `parts` holds one tensor per input of the model, in signature order, from
    `Dispatcher.start` on; `memory` what they lie in, if others read it too. `client_id` is what its client calls it;
    `reserve_ms` is kept of its deadline for the way back. `is_waiting`: in no batch. `yields`: others of its model go
    first.

    It does not know its batch, nor does who asked know it after its end: what refers to itself is left to Python's
    collector, which stops the process for 85 ms where 50,000 objects wait for it.
    """

    id: int
    name: str
    model: int
    arrived_ms: float
    deadline_ms: float
    reserve_ms: float
    client_id: str
    asker: Asker
    parts: Sequence[InputPart] = ()
    memory: Held | None = None
    is_waiting: bool = True
    was_retried: bool = False
    yields: bool = False


@dataclass(slots=True, eq=False)
class Batch:
    """A batch from its dispatch until its answer. Moments are ms; those of the plan as the core dates them.

    `members` are the models in it with their rows, in the order of the requests. `sent_ms` is on the clock, which is a
    little earlier than `dispatched_ms` where the core was woken early. `generation` is that of the plan.
    """

    number: int
    program: int
    name: str
    members: list[tuple[str, int]]
    requests: list[Request]
    generation: int
    dispatched_ms: float
    sent_ms: float
    start_ms: float
    finish_ms: float
    _held: list[Held] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Rows of all members."""
        return len(self.requests)

    def take(self) -> None:
        """Mark the requests as dispatched in this batch, and keep their memory for as long as a gpu-let may read it."""
        for request in self.requests:
            request.is_waiting = False
            if request.memory is not None:
                request.memory.hold()
                self._held.append(request.memory)

    def let_go(self) -> None:
        """No gpu-let reads the requests' memory any more."""
        for memory in self._held:
            memory.release()
        self._held.clear()


def pack_batch(batch: Batch, *, shares_memory: bool) -> tuple[RunBatch, list[Buffer]]:
    """Return the message and the body of a batch that has requests, for a gpu-let that can map our memory or not."""
    requests = batch.requests
    ids = [request.client_id for request in requests]
    if len(batch.members) == 1 and len(requests[0].parts) == 1:
        ordered = [request.parts[0] for request in requests]
    else:
        ordered = []
        first = 0
        for _, rows in batch.members:
            mine = requests[first : first + rows]
            first += rows
            ordered += [request.parts[position] for position in range(len(mine[0].parts)) for request in mine]
    if not any(part.arena or part.dtype for part in ordered):
        return RunBatch(batch.number, batch.name, batch.members, [], [], ids), [part.data for part in ordered]
    places = Places(shares_memory=shares_memory)
    found = [places.put(part) for part in ordered]
    return RunBatch(batch.number, batch.name, batch.members, places.arenas, found, ids), places.buffers


def split_reply(
    batch: Batch, ran: BatchRan, body: memoryview, *, gpulet: str, emulated: bool, shares_clock: bool, way_ms: float
) -> Iterator[tuple[list[Request], Executed]]:
    """Return the requests of each model in the batch with what became of them; nothing is copied.

    Args:
        batch: as it was sent.
        ran: what came back.
        body: its outputs.
        gpulet: which one ran it.
        emulated: whether it only waited.
        shares_clock: whether its moments are on this machine's clock; else the start is not known here.
        way_ms: what the way there takes as a rule, for a batch whose arrival the gpu-let did not see.
    """
    started_ms = ran.started_at_ms if shares_clock else math.nan
    queue_ms = max(0.0, ran.started_at_ms - batch.sent_ms - way_ms) if math.isnan(ran.queue_ms) else ran.queue_ms
    first = 0
    for rows, outputs in ran.members:
        data, body = cut_rows(rows, outputs, body)
        executed = Executed(
            batch.size,
            gpulet,
            emulated,
            batch.sent_ms,
            started_ms,
            queue_ms,
            ran.execution_ms,
            rows,
            outputs,
            data,
            batch.finish_ms - batch.start_ms,
        )
        yield batch.requests[first : first + rows], executed
        first += rows
