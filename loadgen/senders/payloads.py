"""Request bodies in the binary or the JSON tensor form, the user's own files, or prompts. Bodies of tensors are made
once from a model's metadata, and clients send them in turn; a prompt, or a body whose inputs vary in size, is made for
each request, as large as it has to be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.deployments.wire.tensors import DATATYPES, pack_elements
from tenuto.errors import InvalidInputError, refused
from tenuto.files import read_file
from tenuto.loadgen.sender import Body

_MOST_BODY_BYTES = 64 << 20  # limit: bytes of a body; a gateway takes no more
_STARTS = 4096  # format: of our prompts: places where they begin; more would only make them differ more
_LARGEST_TEXT = 20_000  # format: of our elements of BYTES, which are numbers written as text


def make_bodies(metadata: Mapping[str, Any], generator: np.random.Generator, *, binary: bool = True) -> list[Body]:
    """Return eight bodies, one sample each.

    Floats are standard normal, as normalised images are. Whole numbers are all that the model knows, such as token ids;
    0 and 1 where nothing says which it knows (`unbounded_inputs`); in BYTES written as text. An input with `mask` in
    its name is all ones.

    Args:
        metadata: the server's answer to GET /v2/models/{model}.
        generator: source of randomness.
        binary: tensors are raw bytes behind a JSON header; False: JSON numbers, which cost both sides far more.

    Raises:
        InvalidInputError: an input has a datatype that cannot be generated, or varies in size.
    """
    inputs: Sequence[Mapping[str, Any]] = metadata["inputs"]
    typed = [(tensor, _dtype(metadata["name"], tensor), _shape(metadata["name"], tensor, {})) for tensor in inputs]
    drawn = ([_values(tensor, dtype, shape, generator) for tensor, dtype, shape in typed] for _ in range(8))
    return [_body(inputs, values, binary=binary) for values in drawn]


def unbounded_inputs(metadata: Mapping[str, Any]) -> list[str]:
    """Return the inputs of whole numbers of which nothing says which of them the model knows."""
    return [
        tensor["name"]
        for tensor in metadata.get("inputs", ())
        if tensor["datatype"].startswith(("INT", "UINT")) and not tensor.keys() & {"below", "example"}
        if "mask" not in tensor["name"].lower()
    ]


class SizedBodies:
    """Bodies of a model whose inputs vary in size, one sample each. Each input is a piece of one long random tensor, so
    that the bodies of all sizes together take the memory of the largest."""

    def __init__(
        self,
        metadata: Mapping[str, Any],
        most: Mapping[str, int],
        generator: np.random.Generator,
        *,
        binary: bool,
        is_streamed: bool = False,
    ) -> None:
        """Draw the tensors. Arguments and errors are those of `make_bodies`; `most` has the largest size that a body
        will have, by name, in the order of `body`. `is_streamed`: answers are streams."""
        self._is_streamed = is_streamed
        self._model, self._names, self._binary = metadata["name"], tuple(most), binary
        self._inputs: Sequence[Mapping[str, Any]] = metadata["inputs"]
        self._long: list[np.ndarray[Any, Any]] = []
        for tensor in self._inputs:
            dtype, elements = _dtype(self._model, tensor), math.prod(_shape(self._model, tensor, most))
            if elements * dtype.itemsize > _MOST_BODY_BYTES:
                raise refused(
                    f"models.{self._model}.sizes",
                    ", ".join(f"{name}: {size}" for name, size in most.items()),
                    f"makes '{tensor['name']}' larger than the {_MOST_BODY_BYTES >> 20} MiB that a gateway takes",
                    "Give the sizes a smaller `most`.",
                )
            self._long.append(_values(tensor, dtype, [elements + _STARTS], generator))

    def body(self, number: int, *sizes: int) -> Body:
        """Return the body of request `number` of a run."""
        by_name = dict(zip(self._names, sizes, strict=False))
        start = _start(number)
        shapes = [_shape(self._model, tensor, by_name) for tensor in self._inputs]
        pieces = [
            long[start : start + math.prod(shape)].reshape(shape)
            for long, shape in zip(self._long, shapes, strict=True)
        ]
        return replace(_body(self._inputs, pieces, binary=self._binary), is_streamed=self._is_streamed)


class Prompts:
    """Prompts of a model that generates. Each is a piece of one text of random token ids, so that a prompt costs little
    to make, needs no tokenizer, and is the beginning of few others."""

    def __init__(self, model: str, longest: int, vocabulary: int, generator: np.random.Generator) -> None:
        """Draw the text.

        Args:
            model: as requests name it.
            longest: the most tokens that a prompt will have.
            vocabulary: tokens that the model knows.
            generator: source of randomness.
        """
        ids = [b"%d" % token for token in generator.integers(0, vocabulary, longest + _STARTS).tolist()]
        self._model = model
        self._text = b",".join(ids)
        self._begins = np.cumsum([0, *(len(token) + 1 for token in ids)])

    def body(self, number: int, prompt_tokens: int, output_tokens: int) -> Body:
        """Return the body of request `number` of a run, which is also the seed of its answer."""
        start = _start(number)
        question = {
            "model": self._model,
            "max_tokens": output_tokens,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin, end = self._begins[[start, start + prompt_tokens]].tolist()
        return Body(
            b'%b,"prompt":[%b]}' % (json.dumps(question).encode()[:-1], self._text[begin : end - 1]), is_prompt=True
        )


def read_bodies(path: str) -> list[Body]:
    """Return a file, or every file of a folder in the order of their names, as raw bodies for a model's hooks.

    Raises:
        InvalidInputError: there is none, or one cannot be read.
    """
    try:
        files = sorted(file for file in Path(path).iterdir() if file.is_file()) if Path(path).is_dir() else [Path(path)]
        bodies = [Body(read_file(file, _MOST_BODY_BYTES), is_raw=True) for file in files]
    except OSError as error:
        raise refused(
            "--body", path, f"cannot be read ({error.strerror})", "Give a file, or a folder of files."
        ) from error
    if not bodies:
        raise refused("--body", path, "is a folder without files", "Put one file there for each body.")
    return bodies


def _start(number: int) -> int:
    """Return where request `number` of a run begins in a long text or tensor. Neighbours begin far apart."""
    return number * 2_654_435_761 % _STARTS  # paper: Knuth's multiplicative hash


def _dtype(model: str, tensor: Mapping[str, Any]) -> np.dtype[Any]:
    dtype = "int64" if tensor["datatype"] == "BYTES" else DATATYPES.get(tensor["datatype"])
    if dtype is None:
        raise _cannot_be_generated(model, tensor)
    return np.dtype(dtype)


def _shape(model: str, tensor: Mapping[str, Any], sizes: Mapping[str, int]) -> list[int]:
    """Return the shape of one sample with these sizes, with a batch dimension of 1 where the tensor has one."""
    shape = [1 if each is None else sizes.get(each, -1) if isinstance(each, str) else each for each in _named(tensor)]
    if any(size < 0 for size in shape):
        raise _cannot_be_generated(model, tensor)
    return shape


def _named(tensor: Mapping[str, Any]) -> list[int | str | None]:
    """Return the dimensions of a tensor: numbers, names of sizes, and None for the batch."""
    return tensor.get("dimensions") or [None if each == -1 else each for each in tensor["shape"]]


def _cannot_be_generated(model: str, tensor: Mapping[str, Any]) -> InvalidInputError:
    return InvalidInputError(
        f"input '{tensor['name']}' of '{model}' ({tensor['datatype']} {_named(tensor)}) cannot be generated. "
        "Only numbers and BYTES are, of fixed shapes or of sizes that the server names."
    )


def _body(inputs: Sequence[Mapping[str, Any]], values: Sequence[np.ndarray[Any, Any]], *, binary: bool) -> Body:
    """Return the body with a value for each input; those of BYTES are numbers, and are written as text."""
    described: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for tensor, array in zip(inputs, values, strict=True):
        is_bytes = tensor["datatype"] == "BYTES"
        entry: dict[str, Any] = {"name": tensor["name"], "datatype": tensor["datatype"], "shape": [*array.shape]}
        texts = [str(value) for value in array.ravel().tolist()] if is_bytes else []
        if binary:
            data = pack_elements(text.encode() for text in texts) if is_bytes else array.tobytes()
            entry["parameters"] = {"binary_data_size": len(data)}
            parts.append(data)
        else:
            entry["data"] = texts if is_bytes else array.ravel().tolist()
        described.append(entry)
    if not binary:
        return Body(json.dumps({"inputs": described}, separators=(",", ":")).encode())
    document = {"inputs": described, "parameters": {"binary_data_output": True}}
    text = json.dumps(document, separators=(",", ":")).encode()
    return Body(text + b"".join(parts), len(text))


def _values(
    tensor: Mapping[str, Any], dtype: np.dtype[Any], shape: list[int], generator: np.random.Generator
) -> np.ndarray[Any, Any]:
    if "example" in tensor:
        return np.full(shape, tensor["example"], dtype)
    if "mask" in tensor["name"].lower():
        return np.ones(shape, dtype)
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    if dtype.kind == "b":
        return generator.random(shape) < 0.5
    below = _LARGEST_TEXT if tensor["datatype"] == "BYTES" else tensor.get("below", 2)
    return generator.integers(0, below, shape).astype(dtype)
