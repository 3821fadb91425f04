"""The values of a tensor in JSON, flat or nested, as the tensor's bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from tenuto.deployments.entry.http.exchange import BadRequestError
from tenuto.deployments.wire.tensors import DATATYPES, Buffer, pack_elements
from tenuto.profiles.networks.catalogue import TensorSignature

_PART_BYTES = 1 << 15  # limit: of JSON numbers that are read at once, 2 ms or less: other threads wait so long
# The characters of JSON values of a tensor, beside brackets and commas.
_SCALARS = b"0123456789+-.eEtrufals \t\r\n"
# How the values of a tensor are packed.
CODES = dict(zip(DATATYPES.values(), "?BHIQbhiqefd", strict=True))
# The types of values, by numpy's kind of a tensor's type.
VALUE_TYPES: dict[str, Any] = {"b": list[bool], "i": list[int], "u": list[int], "f": list[float], "S": list[str]}
_DECODERS: dict[str, Callable[[bytes], list[Any]]] = {
    kind: msgspec.json.Decoder(values).decode for kind, values in VALUE_TYPES.items()
}


def count_byte(text: Buffer, mark: bytes) -> int:
    """Return how often one byte is in a text; `bytes.count` takes five times as long if it is there often."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == mark[0]))


def short_repr(value: Any) -> str:
    """Return a value that a client sent for a message about it: its first 37 characters where it is longer than 40."""
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."  # format: characters in a message


def check_count(given: int, needed: int, spec: TensorSignature, shape: list[int]) -> None:
    """Raise `BadRequestError` when an input has another number of values than its shape needs."""
    if given != needed:
        raise BadRequestError(f"input '{spec.name}' has {given} values; shape {short_repr(shape)} needs {needed}.")


def pack_numbers(text: bytes, spec: TensorSignature, dtype: str, shape: list[int]) -> bytes:
    """Convert JSON numbers, nested or flat, without silent rounding or wrapping; in parts, where they are many."""
    code, decode = CODES[dtype], _DECODERS[np.dtype(dtype).kind]
    if not text.startswith(b"["):
        decode(text)  # raises
    if 0 in shape and not text.strip(b"[], \t\r\n"):
        return b""
    check_count(count_byte(text, b",") + 1, math.prod(shape), spec, shape)
    is_nested = text.find(b"[", 1) > 0
    if is_nested:
        _check_nesting(text, spec, shape)
    parts = []
    at, end = 1, len(text) - 1
    while at < end:
        until = text.find(b",", min(at + _PART_BYTES, end))
        until = end if until < 0 else until
        part = text[at:until]
        some = decode(b"[%b]" % (part.translate(None, b"[]") if is_nested else part))
        parts.append(struct.pack(f"<{len(some)}{code}", *some))
        at = until + 1
    return b"".join(parts)


def pack_texts(data: Any, spec: TensorSignature, shape: list[int]) -> bytes:
    """Return texts in JSON, nested or flat, as a tensor of bytes."""
    try:
        texts = np.array(data if type(data) is list else msgspec.json.decode(bytes(data)), object)
        elements = [text.encode() for text in texts.flat]  # an element of ragged lists is a list
    except (msgspec.DecodeError, RecursionError, AttributeError, UnicodeEncodeError):
        raise BadRequestError(f"the data of input '{spec.name}' is not all BYTES values, which are texts.") from None
    check_count(len(elements), math.prod(shape), spec, shape)
    whole = (1, *shape) if len(shape) == len(spec.shape) else tuple(shape)
    if texts.shape not in ((len(elements),), whole, whole[1:] if whole[0] == 1 else whole):
        raise BadRequestError(
            f"the data of input '{spec.name}' is not nested as shape {short_repr(shape)} is. Nest it so, or not at all."
        )
    return pack_elements(elements)


def _check_nesting(text: bytes, spec: TensorSignature, shape: list[int]) -> None:
    """Refuse nested lists that are not as long as the shape says, each of them. The shape has as many values as the
    text: any other could be larger than memory."""
    nested = text.translate(None, _SCALARS)
    whole = [1, *shape] if len(shape) == len(spec.shape) else shape
    if nested not in (_skeleton(whole), _skeleton(whole[1:]) if whole[0] == 1 else b""):
        raise BadRequestError(
            f"the data of input '{spec.name}' is ragged, or not nested as shape {short_repr(shape)} is. Nest it so, or "
            "not at all."
        )


def _skeleton(shape: Sequence[int]) -> bytes:
    """Return what is left of nested lists of a shape without their values: `[[,],[,]]` for (2, 2)."""
    skeleton = b""
    for size in reversed(shape):
        skeleton = b"[%b]" % b",".join([skeleton] * size)
    return skeleton
