"""Joint batches of models that run as one merged program, on the wire: whose rows are whose, there and back.

The frame of a joint batch names the group as its model and carries `members`, pairs of a model and its number of rows;
the body holds the inputs of one member after the other. Its answer carries `members` as well, each with its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tenuto.deployments.dispatch.in_flight import Request
from tenuto.profiles.networks.catalogue import TensorSignature

__all__ = ["cut_inputs", "join_requests", "pack_outputs"]

Arrays = dict[str, "np.ndarray[Any, Any]"]
Blocks = dict[str, list["np.ndarray[Any, Any]"]]


def join_requests(requests: list[Request]) -> tuple[list[tuple[str, int]], list[Any]]:
    """Put the requests of a joint batch in order, one model's after the other's, and return whose they are and their
    buffers: for each member, for each of its inputs, one per request."""
    requests.sort(key=lambda request: request.name)
    rows: dict[str, list[Request]] = {}
    for request in requests:
        rows.setdefault(request.name, []).append(request)
    buffers = [
        request.parts[position] for mine in rows.values() for position in range(len(mine[0].parts)) for request in mine
    ]
    return [(name, len(mine)) for name, mine in rows.items()], buffers


def cut_inputs(tensors: Sequence[TensorSignature], body: memoryview, size: int) -> tuple[Blocks, memoryview]:
    """Cut one array per input off a body, without copying, and return them and what is left of it."""
    inputs: Blocks = {}
    offset = 0
    for tensor in tensors:
        dtype = np.dtype(tensor.dtype)
        shape = (size, *tensor.shape)
        length = int(np.prod(shape)) * dtype.itemsize
        inputs[tensor.name] = [np.frombuffer(body[offset : offset + length], dtype=dtype).reshape(shape)]
        offset += length
    return inputs, body[offset:]


def pack_outputs(outputs: Arrays, size: int) -> tuple[list[tuple[str, str, tuple[int, ...], int]], list[memoryview]]:
    """Return the description of a model's outputs (name, type, shape and bytes of a row), and their buffers."""
    described, buffers = [], []
    for name, array in outputs.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        described.append((name, array.dtype.name, array.shape[1:], array.nbytes // size))
        buffers.append(flat.view(np.uint8).data)
    return described, buffers
