"""Request bodies in the binary or the JSON tensor form, the user's own files, or prompts. Bodies of tensors are made
once from a model's metadata, and clients send them in turn; a prompt is made for each request, as long as it has to be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.deployments.wire.tensors import DATATYPES, pack_elements
from tenuto.errors import InvalidInputError, refused
from tenuto.files import read_file
from tenuto.loadgen.sender import Body

_MOST_BODY_BYTES = 64 << 20  # limit: bytes of a body; a gateway takes no more
_STARTS = 4096  # format: of our prompts: places where they begin; more would only make them differ more
_LARGEST_TOKEN = 20_000  # format: of our prompts: tokens below the vocabulary of every model in the catalogue


FIXED: Sequence[Mapping[str, int]] = ({},) * 8  # format: of our bodies: their number where shapes are fixed


def make_bodies(
    metadata: Mapping[str, Any],
    generator: np.random.Generator,
    *,
    binary: bool = True,
    sizes: Sequence[Mapping[str, int]] = FIXED,
) -> list[Body]:
    """Return bodies of one sample each: one for each of `sizes`, by default eight, and not many more than 64 MiB.

    Floats are standard normal, as normalised images are. Whole numbers are token ids, in BYTES written as text. An
    input with `mask` in its name is all ones.

    Args:
        metadata: the server's answer to GET /v2/models/{model}.
        generator: source of randomness.
        binary: tensors are raw bytes behind a JSON header; False: JSON numbers, which cost both sides far more.
        sizes: of every body, by name, for a model whose inputs vary in shape.

    Raises:
        InvalidInputError: an input has a datatype, or a size that `sizes` does not have.
    """
    inputs: Sequence[Mapping[str, Any]] = metadata["inputs"]
    bodies: list[Body] = []
    for own in sizes:
        if len(bodies) >= len(FIXED) and sum(len(body.data) for body in bodies) > _MOST_BODY_BYTES:
            break
        described: list[dict[str, Any]] = []
        parts: list[bytes] = []
        for tensor in inputs:
            is_bytes = tensor["datatype"] == "BYTES"
            dtype = "int64" if is_bytes else DATATYPES.get(tensor["datatype"])
            named = tensor.get("dimensions") or [None if each == -1 else each for each in tensor["shape"]]
            shape = [1 if each is None else own.get(each, -1) if isinstance(each, str) else each for each in named]
            if dtype is None or any(size < 0 for size in shape):
                raise InvalidInputError(
                    f"input '{tensor['name']}' of '{metadata['name']}' ({tensor['datatype']} {named}) cannot be "
                    "generated. Only numbers and BYTES are, of fixed shapes or of the model's `sizes` in the workload."
                )
            values = _values(tensor["name"], np.dtype(dtype), shape, generator)
            entry: dict[str, Any] = {"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape}
            texts = [str(value) for value in values.ravel().tolist()] if is_bytes else []
            if binary:
                data = pack_elements(text.encode() for text in texts) if is_bytes else values.tobytes()
                entry["parameters"] = {"binary_data_size": len(data)}
                parts.append(data)
            else:
                entry["data"] = texts if is_bytes else values.ravel().tolist()
            described.append(entry)
        if not binary:
            text = json.dumps({"inputs": described}, separators=(",", ":")).encode()
            bodies.append(Body(text))
            continue
        document = {"inputs": described, "parameters": {"binary_data_output": True}}
        text = json.dumps(document, separators=(",", ":")).encode()
        bodies.append(Body(text + b"".join(parts), len(text)))
    return bodies


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
        # Paper: Knuth's multiplicative hash, so that neighbours begin far apart.
        start = number * 2_654_435_761 % _STARTS
        question = {
            "model": self._model,
            "max_tokens": output_tokens,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin, end = self._begins[[start, start + prompt_tokens]].tolist()
        return Body(
            b'%b,"prompt":[%b]}' % (json.dumps(question).encode()[:-1], self._text[begin : end - 1]), is_streamed=True
        )


def read_bodies(path: str, hooks: str | None) -> list[Body]:
    """Return a file, or every file of a folder in the order of their names, as raw bodies for a model's hooks.

    Args:
        path: the file or the folder.
        hooks: the model's own hooks; None if it has none.

    Raises:
        InvalidInputError: there is none, or one cannot be read.
    """
    try:
        files = sorted(file for file in Path(path).iterdir() if file.is_file()) if Path(path).is_dir() else [Path(path)]
        bodies = [Body(read_file(file, _MOST_BODY_BYTES), is_raw=True, hooks=hooks) for file in files]
    except OSError as error:
        raise refused(
            "--body", path, f"cannot be read ({error.strerror})", "Give a file, or a folder of files."
        ) from error
    if not bodies:
        raise refused("--body", path, "is a folder without files", "Put one file there for each body.")
    return bodies


def _values(name: str, dtype: np.dtype[Any], shape: list[int], generator: np.random.Generator) -> np.ndarray[Any, Any]:
    if "mask" in name.lower():
        return np.ones(shape, dtype)
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    if dtype.kind == "b":
        return generator.random(shape) < 0.5
    return generator.integers(1, min(_LARGEST_TOKEN, np.iinfo(dtype).max), shape).astype(dtype)
