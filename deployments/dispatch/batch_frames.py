"""A batch on the wire: put together from its requests, and the gpu-let's answer taken apart into theirs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tenuto.deployments.dispatch.in_flight import Batch, Request
from tenuto.deployments.wire.answers import Answer, OutputTensor
from tenuto.deployments.wire.joint_batches import join_requests
from tenuto.outcome import Outcome

__all__ = ["pack_batch", "split_reply"]

_CLOCK_SLACK_MS = 2.5  # moments are noted a little before or after they happen


def pack_batch(batch: Batch, *, is_joint: bool) -> tuple[dict[str, Any], list[Any]]:
    """Return the header and the buffers of a batch that has requests: for each input, one per request.

    A joint batch takes note of its members, and its requests are put in their order.
    """
    requests = batch.requests
    header: dict[str, Any] = {"id": batch.sequence, "model": batch.name, "n": len(requests)}
    if is_joint:
        batch.members, buffers = join_requests(requests)
        header["members"] = batch.members
    else:
        n_inputs = len(requests[0].parts)
        buffers = [request.parts[position] for position in range(n_inputs) for request in requests]
    if any(request.client_id for request in requests):
        header["requests"] = [request.client_id for request in requests]
    return header, buffers


def split_reply(
    batch: Batch, header: Mapping[str, Any], body: memoryview, now_ms: float
) -> Iterator[tuple[Request, Answer]]:
    """Return every request of the batch with its answer; tensors are views into `body`, nothing is copied."""
    error = header.get("error")
    if error is not None:
        for request in batch.requests:
            yield request, Answer(Outcome.FAILED, gpulet=header["gpulet"], reason=str(error))
        return
    size = len(batch.requests)
    start_ms = _start_ms(batch, header, now_ms)
    for request, tensors in zip(batch.requests, _tensors(header, body), strict=True):
        yield (
            request,
            Answer(
                Outcome.OK,
                tensors,
                size,
                header["gpulet"],
                batch.sent_ms - request.received_ms,
                float(header["queue_ms"]),
                float(header["execution_ms"]),
                header["emulated"],
                start_ms=start_ms - request.received_ms,
            ),
        )


def _tensors(header: Mapping[str, Any], body: memoryview) -> Iterator[list[OutputTensor]]:
    """Return the outputs of every row of a batch, those of a joint batch member by member."""
    offset = 0
    for rows, described in header["members"]:
        outputs: list[tuple[str, str, tuple[int, ...], int, int]] = []
        for name, dtype, shape, sample_bytes in described:
            outputs.append((name, dtype, tuple(shape), offset, sample_bytes))
            offset += sample_bytes * rows
        for position in range(rows):
            yield [
                OutputTensor(name, dtype, shape, body[start + position * length : start + (position + 1) * length])
                for name, dtype, shape, start, length in outputs
            ]


def _start_ms(batch: Batch, header: Mapping[str, Any], now_ms: float) -> float:
    """Return when the batch began on the dispatcher's clock; NaN where the gpu-let's is another.

    Monotonic clocks of one machine are one clock. Those of two machines differ by the time between their starts, so
    that a batch would seem to begin before it was sent or to end after its answer came.
    """
    start_ms = float(header.get("started_ms", math.nan))
    is_ours = batch.sent_ms - _CLOCK_SLACK_MS <= start_ms <= now_ms - float(header["execution_ms"]) + _CLOCK_SLACK_MS
    return start_ms if is_ours else math.nan
