"""Batches that a model accepts, as arrays: blank ones to warm up and pad with, random ones to measure and compare."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tenuto.errors import refused
from tenuto.profiles.networks.catalogue import BYTES, ModelSignature, TensorSignature

Arrays = dict[str, "np.ndarray[Any, Any]"]
"""One model's tensors by name, each with a leading batch dimension."""

Blocks = Mapping[str, Sequence["np.ndarray[Any, Any]"]]
"""One model's inputs by name, each as a list of arrays; their rows, one array after another, are the batch. Every
request arrives in memory of its own, and need not be joined with others before the copy to a device. The rows of one
array have one shape, and all inputs of a model are cut into arrays alike."""

LENGTH_BYTES = 4  # format: of the Open Inference Protocol: the length in front of an element of bytes


def as_blocks(arrays: Arrays) -> Blocks:
    """Return inputs as blocks of one array each."""
    return {name: (array,) for name, array in arrays.items()}


def row_sizes(signature: ModelSignature, blocks: Blocks) -> list[tuple[int, ...]]:
    """Return the sizes of every row, whose shapes were checked when it came."""
    sizes: list[tuple[int, ...]] = []
    places = signature.size_places
    for arrays in zip(*(blocks[tensor.name] for tensor in signature.inputs), strict=True):
        sizes += [tuple([arrays[at].shape[axis + 1] for at, axis in places])] * len(arrays[0])
    return sizes


def blank_inputs(signature: ModelSignature, rows: int, *, pixels: bool = False) -> Arrays:
    """Return a batch of zeros, but with ones in attention masks, and of the examples that inputs have. With `pixels`,
    pictures are uint8 if the model takes them so. Elements of bytes are the text `0`. Sizes that vary are the largest;
    `ModelSignature.at` has others."""
    return {
        t.name: np.full((rows, *t.fixed_shape), b"0", dtype=object)
        if t.dtype == BYTES
        else np.full((rows, *t.fixed_shape), _blank(t), dtype=_dtype(t, pixels))
        for t in signature.at(signature.most_sizes).inputs
    }


def _blank(tensor: TensorSignature) -> float:
    if tensor.example is not None:
        return tensor.example
    return 1 if tensor.name == "attention_mask" else 0


def takes_pixels(signature: ModelSignature) -> bool:
    """Return whether pictures may come as uint8 pixels."""
    return any("uint8" in tensor.accepts for tensor in signature.inputs)


def sends_pixels(signature: ModelSignature) -> bool:
    """Return whether pictures should be sent as uint8 pixels."""
    return signature.image is not None and signature.image.as_pixels and takes_pixels(signature)


def _dtype(tensor: TensorSignature, pixels: bool) -> np.dtype[Any]:
    return np.dtype("uint8" if pixels and "uint8" in tensor.accepts else tensor.dtype)


def random_inputs(signature: ModelSignature, rows: int, seed: int = 0, *, pixels: bool = False) -> Arrays:
    """Return a batch of seeded noise: identifiers from the whole vocabulary, every position attended; `pixels` as in
    `blank_inputs`. Elements of bytes and inputs with an example stay blank."""
    generator = np.random.default_rng(seed)
    inputs = blank_inputs(signature, rows, pixels=pixels)
    for tensor in signature.inputs:
        if tensor.dtype == BYTES or tensor.example is not None:
            continue
        dtype = _dtype(tensor, pixels)
        shape: tuple[int, ...] = inputs[tensor.name].shape
        if np.issubdtype(dtype, np.floating):
            inputs[tensor.name] = generator.standard_normal(shape, dtype=np.float32).astype(dtype)
        elif dtype != tensor.dtype:
            inputs[tensor.name] = generator.integers(0, 256, shape, dtype=np.uint8)
        elif tensor.name != "attention_mask":
            inputs[tensor.name] = generator.integers(0, tensor.below or 2, shape).astype(dtype)
        if tensor.axis is None:
            inputs[tensor.name][1:] = inputs[tensor.name][:1]  # rows that share a run have it in common
    return inputs


def fitted(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return the array in another type, where that loses no more than precision.

    Raises:
        ValueError: the types are of different kinds, or a value does not fit; the message says which.
    """
    target = np.dtype(dtype)
    if array.dtype == target:
        return array
    are_integers = array.dtype.kind in "iu" and target.kind in "iu"
    if not are_integers and not np.can_cast(array.dtype, target, casting="same_kind"):
        raise ValueError(f"{array.dtype} is no {target}")
    with np.errstate(over="ignore"):
        made = array.astype(target)
    fits = made == array if target.kind in "iu" else np.isfinite(made) | ~np.isfinite(array)
    if not fits.all():
        raise ValueError(f"{array[~fits].flat[0]} does not fit {target}")
    return made


def check_range(spec: TensorSignature, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array, but refuse integers outside the model's range: on CUDA these would destroy the context with all
    its models.

    Raises:
        InvalidInputError: a value is below 0 or not below `spec.below`.
    """
    if spec.below is not None and array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= spec.below:
            raise refused(
                spec.name,
                low if low < 0 else high,
                f"values must be in [0, {spec.below})",
                "Use the model's own tokenizer.",
            )
    return array


def packed_bytes(elements: Collection[bytes]) -> int:
    """Return how many bytes elements take on the wire, each behind its length."""
    return LENGTH_BYTES * len(elements) + sum(map(len, elements))
