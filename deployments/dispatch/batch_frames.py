"""A batch on the wire: put together from its requests, and the gpu-let's answer taken apart by model."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tenuto.deployments.dispatch.in_flight import Batch, Request
from tenuto.deployments.wire.answers import Executed
from tenuto.deployments.wire.bundles import Places
from tenuto.deployments.wire.messages import BatchRan, RunBatch
from tenuto.deployments.wire.tensors import Buffer, cut_rows


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
            batch.size, gpulet, emulated, batch.sent_ms, started_ms, queue_ms, ran.execution_ms, rows, outputs, data
        )
        yield batch.requests[first : first + rows], executed
        first += rows
