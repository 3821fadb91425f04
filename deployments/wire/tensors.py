"""Tensors on their way: inputs of requests and outputs of batches, without copying either where it can be avoided."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tenuto.profiles.networks.catalogue import TensorSignature

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Blocks = dict[str, list[Array]]
Buffer = bytes | bytearray | memoryview


class InputPart(msgspec.Struct):
    """One input tensor of one request.

    `data` is what is sent where the receiver cannot map `arena`; `arena` and `offset` say where the same bytes lie in
    shared memory (see `tenuto.deployments.wire.arena`), "" for bytes that lie nowhere but here. `dtype` is numpy's
    name, "" for the signature's own.
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
    """One output of a batch as it is described on the wire: the bytes of a row say how the body is cut."""

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
    """Return the bytes of each output, all rows of it, and what follows them in the body."""
    data = []
    for output in described:
        length = output.row_bytes * rows
        data.append(body[:length])
        body = body[length:]
    return data, body


_WIDEST_BYTES = 8  # format: of an element: clients may send wider numbers than the signature's


def most_row_bytes(tensors: Sequence[TensorSignature]) -> int:
    """Return how many bytes the inputs, or the outputs, of one request take at most."""
    return sum([math.prod(t.shape) * max(_WIDEST_BYTES, np.dtype(t.dtype).itemsize) for t in tensors])


def most_batch_bytes(largest: Mapping[str, int], row_bytes: Mapping[str, int]) -> int:
    """Return how many bytes one side of a batch takes at most.

    Args:
        largest: batch of every program.
        row_bytes: of one request of every model. A program that is no model of its own has rows of all of them.
    """
    together = sum(row_bytes.values())
    return max((size * row_bytes.get(program, together) for program, size in largest.items()), default=0)


def input_blocks(signature: Sequence[TensorSignature], rows: int, parts: Iterator[InputPart]) -> Blocks:
    """Return a member's inputs as arrays of one row each, without copying; `parts` come input by input, row by row."""
    blocks: Blocks = {}
    for tensor in signature:
        shape, mine = (1, *tensor.shape), itertools.islice(parts, rows)
        blocks[tensor.name] = [np.frombuffer(part.data, part.dtype or tensor.dtype).reshape(shape) for part in mine]
    return blocks


def inline_blocks(signature: Sequence[TensorSignature], rows: int, body: memoryview) -> tuple[Blocks, memoryview]:
    """Cut one array per input off a body in which rows of each input follow one another; return them and the rest."""
    blocks: Blocks = {}
    for tensor in signature:
        dtype = np.dtype(tensor.dtype)
        length = rows * math.prod(tensor.shape) * dtype.itemsize
        blocks[tensor.name] = [np.frombuffer(body[:length], dtype).reshape(rows, *tensor.shape)]
        body = body[length:]
    return blocks, body
