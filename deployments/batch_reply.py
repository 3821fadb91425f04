"""A gpu-let's answer to one batch, taken apart into the answers of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tenuto.deployments.answers import Answer, Outcome, OutputTensor
from tenuto.deployments.in_flight import Batch, Request

__all__ = ["split_reply"]


def split_reply(batch: Batch, header: Mapping[str, Any], body: memoryview) -> Iterator[tuple[Request, Answer]]:
    """Return every request of the batch with its answer; tensors are views into `body`, nothing is copied."""
    error = header.get("error")
    if error is not None:
        for request in batch.requests:
            yield request, Answer(Outcome.FAILED, gpulet=header["gpulet"], reason=str(error))
        return
    size = len(batch.requests)
    outputs: list[tuple[str, str, tuple[int, ...], int, int]] = []
    offset = 0
    for name, dtype, shape, sample_bytes in header["outputs"]:
        outputs.append((name, dtype, tuple(shape), offset, sample_bytes))
        offset += sample_bytes * size
    for position, request in enumerate(batch.requests):
        tensors = [
            OutputTensor(name, dtype, shape, body[start + position * length : start + (position + 1) * length])
            for name, dtype, shape, start, length in outputs
        ]
        yield (
            request,
            Answer(
                Outcome.OK,
                tensors,
                size,
                header["gpulet"],
                batch.dispatched_ms - request.received_ms,
                float(header["queue_ms"]),
                float(header["execution_ms"]),
                header["emulated"],
            ),
        )
