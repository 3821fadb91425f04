"""Batches whose rows vary in shape, or whose network takes no batch of any size in front: which rows share a run of the
network, what the run is given, and what of its outputs belongs to which row. Only numpy.

Rows share a run when they can be padded to one size (`ModelSignature.padded_sizes`), or have it; the others wait for
the next run. A network with one batch size gets its last row again until the batch is full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tenuto.errors import refused
from tenuto.profiles.networks.catalogue import BYTES, ModelSignature, TensorSignature
from tenuto.profiles.networks.inputs import Arrays, Blocks, check_range, row_sizes

Array = np.ndarray[Any, Any]

_NAME_IT = "Say what its dimensions are by the option `shapes`, with the word `batch` for that of the batch."


@dataclass(frozen=True)
class ShapedRun:
    """One run of the network: the rows of the batch that it computes, their own sizes, the sizes to which they are
    padded, and the inputs in the network's layout."""

    rows: Sequence[int]
    own: Sequence[tuple[int, ...]]
    sizes: tuple[int, ...]
    inputs: Sequence[Array]


def shaped_runs(signature: ModelSignature, blocks: Blocks) -> list[ShapedRun]:
    """Return the runs of a batch, in the order in which their first rows came.

    Raises:
        InvalidInputError: an integer is outside the model's range.
    """
    own = row_sizes(signature, blocks)
    inputs = {t.name: [row for block in blocks[t.name] for row in block] for t in signature.inputs}
    shared = [tensor.name for tensor in signature.inputs if tensor.axis is None] if _has_batch(signature) else []
    equal = [tuple(np.asarray(inputs[name][row]).tobytes() for name in shared) for row in range(len(own))]
    runs = []
    for rows in rows_by_run(signature, own, equal if shared else ()):
        sizes = common_sizes(signature, [own[row] for row in rows])
        named = dict(zip(signature.sizes, sizes, strict=True))
        filled = [*rows, *rows[-1:] * ((signature.batch or 0) - len(rows))]
        tensors = [_together(t, named, [inputs[t.name][row] for row in filled]) for t in signature.inputs]
        runs.append(ShapedRun(rows, [own[row] for row in rows], sizes, tensors))
    return runs


def rows_by_run(
    signature: ModelSignature, own: Sequence[tuple[int, ...]], equal: Sequence[tuple[bytes, ...]] = ()
) -> Iterator[list[int]]:
    """Yield the rows of each run of a batch. `own`: the sizes of each row; `equal`: of each row, what must be equal
    beside the shape for rows to share a run."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    firm = [name not in signature.padded_sizes for name in signature.sizes]
    if any(firm) or equal:
        for row, sizes in enumerate(own):
            key = *itertools.compress(sizes, firm), *(equal[row] if equal else ())
            groups.setdefault(key, []).append(row)
    elif own:
        groups[()] = [*range(len(own))]
    most = signature.batch or len(own) if _has_batch(signature) else 1
    for group in groups.values():
        ordered = sorted(group, key=own.__getitem__)
        yield from (ordered[at : at + most] for at in range(0, len(ordered), most))


def _has_batch(signature: ModelSignature) -> bool:
    return any(tensor.axis is not None for tensor in signature.inputs)


def common_sizes(signature: ModelSignature, own: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sizes to which these rows are padded."""
    multiples = [allowed.multiple for allowed in signature.sizes.values()]
    return tuple(
        -(-max(sizes) // multiple) * multiple for sizes, multiple in zip(zip(*own, strict=True), multiples, strict=True)
    )


def _together(tensor: TensorSignature, sizes: dict[str, int], rows: Sequence[Array]) -> Array:
    """Return one input of a run in the network's layout, padded; raises `InvalidInputError` for a value that the model
    does not know."""
    dtype = object if tensor.dtype == BYTES else np.dtype(tensor.dtype)
    if tensor.axis is None:
        return check_range(tensor, np.asarray(rows[0], dtype))
    shape = tensor.shape_at(sizes)
    if all(row.shape == shape for row in rows):
        whole = np.stack(rows) if len(rows) > 1 else rows[0][None]
    else:
        whole = np.full((len(rows), *shape), 0 if tensor.pad is None else tensor.pad, rows[0].dtype)
        for into, row in zip(whole, rows, strict=True):
            into[tuple(map(slice, row.shape))] = row
    return np.moveaxis(check_range(tensor, whole.astype(dtype, copy=False)), 0, tensor.axis)


def own_outputs(signature: ModelSignature, runs: Sequence[tuple[ShapedRun, Sequence[Array]]]) -> list[Arrays]:
    """Return the outputs of a batch, in the order of its rows, from those of each run. Rows that follow each other with
    equal shapes are one part.

    Raises:
        InvalidInputError: the outputs are not as the signature says.
    """
    names = [tensor.name for tensor in signature.outputs]
    wholes = [_whole(signature, run, arrays) for run, arrays in runs]
    (run, _), whole = runs[0], wholes[0]
    if len(runs) == 1 and all(a <= b for a, b in itertools.pairwise(run.rows)) and not _is_cut(signature, run):
        return [{name: each[: len(run.rows)] for name, each in zip(names, whole, strict=True)}]
    by_row = {
        row: outputs
        for (run, _), whole in zip(runs, wholes, strict=True)
        for row, outputs in _rows_of(signature, run, whole)
    }
    ordered = [by_row[row] for row in range(len(by_row))]
    parts = itertools.groupby(ordered, lambda outputs: [array.shape for array in outputs])
    return [dict(zip(names, map(np.stack, zip(*rows, strict=True)), strict=True)) for _, rows in parts]


def _whole(signature: ModelSignature, run: ShapedRun, arrays: Sequence[Array]) -> list[Array]:
    """Return the outputs of a run with its rows in front."""
    padded = {
        name: size for name, size in zip(signature.sizes, run.sizes, strict=True) if name in signature.padded_sizes
    }
    outputs = zip(signature.outputs, arrays, strict=True)
    count = signature.batch or len(run.rows)
    return [_rows_in_front(tensor.at(padded), array, count) for tensor, array in outputs]


def _is_cut(signature: ModelSignature, run: ShapedRun) -> bool:
    """Whether an output of a row is smaller than that of the run."""
    named = {d for tensor in signature.outputs for d in tensor.shape}
    return any(
        own[at] < size
        for at, (name, size) in enumerate(zip(signature.sizes, run.sizes, strict=True))
        if name in named
        for own in run.own
    )


def _rows_of(
    signature: ModelSignature, run: ShapedRun, whole: Sequence[Array]
) -> Iterator[tuple[int, tuple[Array, ...]]]:
    """Yield each row of a run with its own outputs."""
    for at, (row, own) in enumerate(zip(run.rows, run.own, strict=True)):
        named = {
            name: size for name, size, padded in zip(signature.sizes, own, run.sizes, strict=True) if size < padded
        }
        yield (
            row,
            tuple(
                each[at][tuple(slice(named.get(d) if isinstance(d, str) else None) for d in tensor.shape)]
                for tensor, each in zip(signature.outputs, whole, strict=True)
            ),
        )


def _rows_in_front(tensor: TensorSignature, array: Array, rows: int) -> Array:
    """Return an output of a run with its rows in front; raises `InvalidInputError` where it has another shape."""
    if tensor.axis is None:
        whole = array[None]
    elif tensor.axis < array.ndim:
        whole = np.moveaxis(array, tensor.axis, 0)
    else:
        whole = array
    if not tensor.takes(whole.shape[1:]) or len(whole) != rows:
        shown = f"the signature says {list(tensor.whole_shape(rows))}"
        raise refused(f"output {tensor.name}", list(array.shape), shown, _NAME_IT)
    return whole
