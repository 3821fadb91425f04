"""Tensors on their way: inputs of requests and outputs of batches. They are copied as little as possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tenuto.profiles.networks.catalogue import BYTES, DTYPES, ModelSignature, SizeRange, TensorSignature
from tenuto.profiles.networks.inputs import LENGTH_BYTES

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Blocks = dict[str, list[Array]]
Buffer = bytes | bytearray | memoryview

# The Open Inference Protocol's names of the numbers that are served, and numpy's: BOOL, UINT8, INT64, FP32, … BF16 is
# widened to FP32 at the door: numpy has no type for it. BYTES is no number: `BYTES` of the catalogue.
DATATYPES = {dtype.upper().replace("FLOAT", "FP"): dtype for dtype in DTYPES}


class InputPart(msgspec.Struct):
    """One input tensor of one request.

    `data` is sent when the receiver cannot map `arena`. `arena` and `offset` say where the same bytes lie in shared
    memory (see `tenuto.deployments.wire.arena`); `arena` is "" for bytes that do not. `dtype` is numpy's name; "" for
    the type in the signature, except for `bytes`, which is always said: such tensors differ in length.
    """

    data: Buffer
    dtype: str = ""
    arena: str = ""
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return memoryview(self.data).nbytes


class RequestInputs(NamedTuple):
    """The inputs of one request of one sample, and its sizes in the order of the signature."""

    parts: list[InputPart]
    sizes: tuple[int, ...] = ()


class OutputTensor(msgspec.Struct):
    """One output of one request: name, numpy dtype name, shape without the batch dimension, raw little-endian bytes. In
    a tensor of `bytes` each element has its length in front. `axis`: see `TensorSignature`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    axis: int | None = 0

    @property
    def array(self) -> Array:
        """Its values; those of numbers as a view."""
        if self.dtype == BYTES:
            return _objects(self.data, self.shape)
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class RowOutput(NamedTuple):
    """The description of one output of a batch on the wire. The body is cut by `row_bytes`. A row of `bytes` begins
    with its own length in four bytes, and is padded to the longest of its batch. `axis`: see `TensorSignature`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    row_bytes: int
    axis: int | None = 0


_LENGTH = Struct("<I")  # format: of the Open Inference Protocol: the length in front of an element of bytes


def bytes_row(data: memoryview, at: int) -> memoryview:
    """Return the tensor of bytes of the row that begins at `at`, without its padding."""
    (length,) = _LENGTH.unpack_from(data, at)
    return data[at + LENGTH_BYTES : at + LENGTH_BYTES + length]


def pack_elements(elements: Iterable[bytes]) -> bytes:
    """Return a tensor of bytes as it travels: each element behind its length in four bytes."""
    return b"".join([_LENGTH.pack(len(element)) + element for element in elements])


def element_ends(data: Buffer, count: int) -> list[int]:
    """Return where each of the `count` elements of a tensor of bytes ends.

    Raises:
        ValueError: there are fewer or more elements.
    """
    ends, at, size = [], 0, memoryview(data).nbytes
    for _ in range(count):
        if at + LENGTH_BYTES > size:
            break
        at += LENGTH_BYTES + _LENGTH.unpack_from(data, at)[0]
        ends.append(at)
    if at != size or len(ends) != count:
        raise ValueError(f"{size} bytes do not hold {count} elements, each behind its length in four bytes")
    return ends


def read_elements(data: Buffer, count: int) -> list[bytes]:
    """Return the `count` elements of a tensor of bytes. Raises `ValueError` if there are fewer or more."""
    whole, begin, elements = memoryview(data), 0, []
    for end in element_ends(whole, count):
        elements.append(bytes(whole[begin + LENGTH_BYTES : end]))
        begin = end
    return elements


def _objects(data: Buffer, shape: tuple[int, ...]) -> Array:
    """Return a tensor of bytes as an array of objects."""
    array = np.empty(math.prod(shape), object)
    array[:] = read_elements(data, array.size)
    return array.reshape(shape)


def pack_outputs(
    outputs: Arrays, rows: int, axes: Mapping[str, int | None] = {}
) -> tuple[list[RowOutput], list[memoryview]]:
    """Return the description of a model's outputs and their buffers, in the same order. `axes`: of those whose batch is
    not in front."""
    described, buffers = [], []
    for name, array in outputs.items():
        axis = axes.get(name, 0)
        if array.dtype == object:
            packed = [pack_elements(row) for row in array.reshape(rows, math.prod(array.shape[1:])).tolist()]
            longest = max(map(len, packed))
            described.append(RowOutput(name, BYTES, array.shape[1:], LENGTH_BYTES + longest, axis))
            padded = b"".join([_LENGTH.pack(len(row)) + row.ljust(longest, b"\0") for row in packed])
            buffers.append(memoryview(padded))
            continue
        flat = np.ascontiguousarray(array).reshape(-1)
        described.append(RowOutput(name, array.dtype.name, array.shape[1:], array.nbytes // rows, axis))
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


_MOST_UNKNOWN = 1 << 12  # limit: of a size of outputs that no input tells anything of
_WIDEST_BYTES = 8  # format: the widest element: clients may send wider numbers than the signature says


def most_row_bytes(tensors: Sequence[TensorSignature], sizes: Mapping[str, SizeRange]) -> int:
    """Return how many bytes the inputs, or the outputs, of one request take at most. A size that only a run tells
    counts as the largest of the others."""
    most = {name: allowed.most for name, allowed in sizes.items()}
    other = max(most.values(), default=_MOST_UNKNOWN)
    return sum(
        [
            LENGTH_BYTES + t.most_bytes
            if t.dtype == BYTES
            else math.prod([most.get(d, other) if isinstance(d, str) else d for d in t.shape]) * _WIDEST_BYTES
            for t in tensors
        ]
    )


def most_batch_bytes(largest: Mapping[str, int], row_bytes: Mapping[str, int]) -> int:
    """Return how many bytes one side of a batch takes at most.

    Args:
        largest: the largest batch of every program.
        row_bytes: bytes of one request of every model. A row of a merged program is counted with those of all models.
    """
    together = sum(row_bytes.values())
    return max((size * row_bytes.get(program, together) for program, size in largest.items()), default=0)


def input_blocks(
    signature: ModelSignature, rows: int, parts: Iterator[InputPart], sizes: Sequence[Sequence[int]] = ()
) -> Blocks:
    """Return a member's inputs as arrays of one row each; numbers are not copied. `parts` are ordered by input, then by
    row. `sizes`: of each row; () where the model has none."""
    blocks: Blocks = {}
    named = [dict(zip(signature.sizes, each, strict=True)) for each in sizes]
    for tensor in signature.inputs:
        shapes = [(1, *tensor.shape_at(each)) for each in named] or [(1, *tensor.fixed_shape)] * rows
        mine = zip(itertools.islice(parts, rows), shapes, strict=True)
        if tensor.dtype == BYTES:
            blocks[tensor.name] = [_objects(part.data, shape) for part, shape in mine]
            continue
        dtype = tensor.dtype
        blocks[tensor.name] = [np.frombuffer(part.data, part.dtype or dtype).reshape(shape) for part, shape in mine]
    return blocks


def inline_blocks(signature: Sequence[TensorSignature], rows: int, body: memoryview) -> tuple[Blocks, memoryview]:
    """Return one array per input, cut from a body in which the rows of each input follow each other, and the rest."""
    blocks: Blocks = {}
    for tensor in signature:
        dtype = np.dtype(tensor.dtype)
        length = rows * math.prod(tensor.fixed_shape) * dtype.itemsize
        blocks[tensor.name] = [np.frombuffer(body[:length], dtype).reshape(rows, *tensor.fixed_shape)]
        body = body[length:]
    return blocks, body
