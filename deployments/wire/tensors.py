"""Tensors on their way: inputs of requests and outputs of batches. They are copied as little as possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tenuto.profiles.networks.catalogue import DTYPES, TensorSignature

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Blocks = dict[str, list[Array]]
Buffer = bytes | bytearray | memoryview

# The Open Inference Protocol's names of the types that are served, and numpy's: BOOL, UINT8, INT64, FP32, … BYTES and
# BF16 are not accepted: numpy has no type of fixed width for them.
DATATYPES = {dtype.upper().replace("FLOAT", "FP"): dtype for dtype in DTYPES}


class InputPart(msgspec.Struct):
    """One input tensor of one request.

    `data` is sent when the receiver cannot map `arena`. `arena` and `offset` say where the same bytes lie in shared
    memory (see `tenuto.deployments.wire.arena`); `arena` is "" for bytes that do not. `dtype` is numpy's name; "" for
    the type in the signature.
    """

    data: Buffer
    dtype: str = ""
    arena: str = ""
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return memoryview(self.data).nbytes


class OutputTensor(msgspec.Struct):
    """One output of one request: name, numpy dtype name, shape without the batch dimension, raw little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class RowOutput(NamedTuple):
    """The description of one output of a batch on the wire. The body is cut by `row_bytes`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    row_bytes: int


def pack_outputs(outputs: Arrays, rows: int) -> tuple[list[RowOutput], list[memoryview]]:
    """Return the description of a model's outputs and their buffers, in the same order."""
    described, buffers = [], []
    for name, array in outputs.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        described.append(RowOutput(name, array.dtype.name, array.shape[1:], array.nbytes // rows))
        buffers.append(flat.view(np.uint8).data)
    return described, buffers


def cut_rows(rows: int, described: Sequence[RowOutput], body: memoryview) -> tuple[list[memoryview], memoryview]:
    """Return for each output the bytes of all its rows, and the rest of the body."""
    data = []
    for output in described:
        length = output.row_bytes * rows
        data.append(body[:length])
        body = body[length:]
    return data, body


_WIDEST_BYTES = 8  # format: the widest element: clients may send wider numbers than the signature says


def most_row_bytes(tensors: Sequence[TensorSignature]) -> int:
    """Return how many bytes the inputs, or the outputs, of one request take at most."""
    return sum([math.prod(t.shape) * max(_WIDEST_BYTES, np.dtype(t.dtype).itemsize) for t in tensors])


def most_batch_bytes(largest: Mapping[str, int], row_bytes: Mapping[str, int]) -> int:
    """Return how many bytes one side of a batch takes at most.

    Args:
        largest: the largest batch of every program.
        row_bytes: bytes of one request of every model. A row of a merged program is counted with those of all models.
    """
    together = sum(row_bytes.values())
    return max((size * row_bytes.get(program, together) for program, size in largest.items()), default=0)


def input_blocks(signature: Sequence[TensorSignature], rows: int, parts: Iterator[InputPart]) -> Blocks:
    """Return a member's inputs as arrays of one row each, without copying. `parts` are ordered by input, then by
    row."""
    blocks: Blocks = {}
    for tensor in signature:
        shape, mine = (1, *tensor.shape), itertools.islice(parts, rows)
        blocks[tensor.name] = [np.frombuffer(part.data, part.dtype or tensor.dtype).reshape(shape) for part in mine]
    return blocks


def inline_blocks(signature: Sequence[TensorSignature], rows: int, body: memoryview) -> tuple[Blocks, memoryview]:
    """Return one array per input, cut from a body in which the rows of each input follow each other, and the rest."""
    blocks: Blocks = {}
    for tensor in signature:
        dtype = np.dtype(tensor.dtype)
        length = rows * math.prod(tensor.shape) * dtype.itemsize
        blocks[tensor.name] = [np.frombuffer(body[:length], dtype).reshape(rows, *tensor.shape)]
        body = body[length:]
    return blocks, body
