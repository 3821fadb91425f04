"""Whether each row of a batch gets the answer that it gets alone: requests of different clients share batches, and are
padded to the longest of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tenuto.errors import refused
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.inputs import random_inputs
from tenuto.profiles.networks.runner import ProgramRunner

Row = Mapping[str, np.ndarray[Any, Any]]

_REFUSED = 0.05  # limit: of an output's largest value; kernels for other batch sizes changed a real network by 0.006
_NOTED = 0.01  # limit: likewise


def check_rows(runner: ProgramRunner, sizes: Sequence[tuple[int, ...]], most_rows: int, seed: int) -> list[str]:
    """Return notes on outputs that change a little with the rest of their batch, or with padding.

    Args:
        runner: a program of one model.
        sizes: the sizes that are measured; `[()]` for fixed shapes.
        most_rows: the largest batch that is measured.
        seed: of the inputs.

    Raises:
        InvalidInputError: rows depend on each other, or on padding.
    """
    ((name, signature),) = runner.signatures.items()
    if most_rows < 2 or all(tensor.axis is None for tensor in signature.inputs):
        return []
    smallest, largest = min(sizes), max(sizes)
    row, beside, other = (_row(signature, smallest, seed + more) for more in range(3))
    common = {tensor.name: row[tensor.name] for tensor in signature.inputs if tensor.axis is None}
    alone = _first_outputs(runner, name, [row])
    one, two = (_first_outputs(runner, name, [row, {**each, **common}]) for each in (beside, other))
    rule, cure = "the rows of a batch change each other's outputs", _cure(signature)
    notes = [*_judge(name, one, two, rule, cure), *_judge(name, alone, one, rule, cure)]
    if empty := [
        key for key, array in alone.items() if array.dtype.kind == "f" and array.size and np.isnan(array).all()
    ]:
        notes.append(
            f"{', '.join(empty)}: nothing but NaN for made-up inputs; give it values that it takes (`example`)"
        )
    if smallest != largest and signature.padded_sizes:
        longer = _row(signature, largest, seed)
        padded = _first_outputs(runner, name, [row, {**longer, **common}])
        cure = "Give other values by the option `pad`, a mask among the inputs, or none to share runs by shape only."
        notes += _judge(name, alone, padded, "the padding of a batch changes outputs", cure)
    return list(dict.fromkeys(notes))


def _cure(signature: ModelSignature) -> str:
    """Return the option by which a file has no batch; a network of one's own is corrected."""
    shapes = {
        tensor.name: [*tensor.shape[: tensor.axis], 1, *tensor.shape[tensor.axis :]]
        for tensor in signature.inputs
        if tensor.axis is not None
    }
    option = json.dumps({"shapes": shapes})
    return f"Serve its requests one by one, for a file by the options {option}, or correct the network."


def _row(signature: ModelSignature, sizes: tuple[int, ...], seed: int) -> Row:
    return random_inputs(signature.at(sizes), 1, seed)


def _first_outputs(runner: ProgramRunner, name: str, rows: Sequence[Row]) -> Row:
    """Return the outputs of the first row of a batch."""
    blocks = {key: [row[key] for row in rows] for key in rows[0]}
    outputs, _ = runner.run_timed({name: blocks}, {name: len(rows)})
    return {key: array[:1] for key, array in outputs[name][0].items()}


def _judge(name: str, expected: Row, measured: Row, rule: str, cure: str) -> list[str]:
    """Return a note where outputs differ more than rounding explains; raises `InvalidInputError` where they differ so
    much that they are others."""
    worst = {key: part for key, array in expected.items() if (part := _difference(array, measured[key])) > _NOTED}
    if not worst:
        return []
    differences = ", ".join(f"{key} by {100.0 * part:.2g} %" for key, part in worst.items())
    if max(worst.values()) > _REFUSED:
        raise refused(name, differences, f"{rule} (of their largest value)", cure)
    return [f"{rule}: {differences} of their largest value, as dynamic quantisation or other kernels do"]


def _difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Return how much of its largest value an output changes: 1 for other shapes, texts or places of NaN."""
    if one.shape != other.shape or one.dtype == object:
        return float(one.shape != other.shape or not np.array_equal(one, other))
    first, second = (np.nan_to_num(array.astype(np.float64), nan=0.0) for array in (one, other))
    if not np.array_equal(np.isnan(one), np.isnan(other)):
        return 1.0
    largest = max(float(np.abs(first).max(initial=0.0)), float(np.finfo(np.float32).tiny))
    return float(np.abs(first - second).max(initial=0.0)) / largest
