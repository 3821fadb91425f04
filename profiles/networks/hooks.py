"""Hooks: what makes the input tensors of a model from a raw request body, and an answer from its output tensors.

Every model has them. `Classifier` reads pictures and texts as the model's signature says; hooks of one's own are named
by the option `hooks: package.module:factory`. The factory, which may be a class, is called with the model's signature
and returns an object with the two methods of `Hooks`. No torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from tenuto.errors import first_line, refused
from tenuto.profiles.networks.catalogue import BYTES, ModelSignature, TensorSignature
from tenuto.profiles.networks.import_factory import imported
from tenuto.profiles.networks.inputs import Arrays, check_range, fitted, packed_bytes
from tenuto.profiles.networks.preprocess import Array, postprocess, preprocess


class Hooks(Protocol):
    """What stands beside a model. A third method, `example() -> bytes`, is optional: each gpu-let tries the hooks with
    that body when it has loaded the model. `postprocess` may have a further parameter `request`: it then gets the body
    that `preprocess` got."""

    def preprocess(self, body: bytes) -> Mapping[str, Any]:
        """Return one array per input of the signature, by name, without a batch dimension.

        Raises:
            InvalidInputError: the client must send another body; the client is told the message.
        """

    def postprocess(self, outputs: Mapping[str, Array]) -> Any:
        """Return the answer to one request, in types that JSON knows or numpy's; outputs have no batch dimension."""


class Classifier:
    """The hooks of a model without hooks of its own: a JPEG, PNG or UTF-8 text in; out come the most likely classes,
    the boxes in a picture, or the embedding or score of a text."""

    def __init__(self, signature: ModelSignature) -> None:
        self.signature = signature

    def preprocess(self, body: bytes) -> dict[str, Array]:
        """Return the tensors of a picture or a text; raises `InvalidInputError` where the body is neither."""
        return preprocess(self.signature, body)

    def postprocess(self, outputs: Mapping[str, Array], request: bytes = b"") -> Any:
        """Return the five most likely classes, or what else the outputs are; boxes need the picture that came."""
        return postprocess(self.signature, outputs, request)


def sees_request(hooks: Hooks) -> bool:
    """Return whether `postprocess` also takes the body of the request."""
    return "request" in inspect.signature(hooks.postprocess).parameters


def answer_of(hooks: Hooks, outputs: Mapping[str, Array], request: bytes) -> Any:
    """Return what hooks make of outputs, and of the body if they see it."""
    more = {"request": request} if sees_request(hooks) else {}
    return hooks.postprocess(outputs, **more)


def load_hooks(source: str, signature: ModelSignature) -> Hooks:
    """Import the hooks that `package.module:factory` names, and make them for a model.

    Raises:
        InvalidInputError: they cannot be imported or made, are no hooks, or come from a package that is not allowed.
    """
    if signature.has_bytes:
        rule = "are for tensors of numbers, and the model has some of bytes"
        raise refused("hooks", source, rule, "Leave them out; the model is asked at /v2/models/{model}/infer.")
    factory = imported(source, "hooks")
    try:
        made: Hooks = factory(signature)
    except Exception as error:  # anybody's code
        rule = f"cannot be made ({type(error).__name__}: {first_line(error)})"
        raise refused("hooks", source, rule, "The factory is called with the model's signature.") from error
    missing = [name for name in ("preprocess", "postprocess") if not callable(getattr(made, name, None))]
    if missing:
        rule = f"made a {type(made).__name__} without {' and '.join(missing)}"
        raise refused(
            "hooks", source, rule, "Give it both methods; Classifier of tenuto.profiles.networks.hooks has them."
        )
    return made


def try_hooks(source: str, signature: ModelSignature, run: Callable[[Arrays], Arrays]) -> None:
    """Make a model's hooks and run their example through them and the model, where they have one.

    Args:
        source: `package.module:factory`.
        signature: of the model.
        run: returns the outputs of a batch.

    Raises:
        InvalidInputError: they cannot be imported or made, or failed.
    """
    hooks = load_hooks(source, signature)
    example = getattr(hooks, "example", None)
    if example is None:
        return
    try:
        body = example()
        made = made_inputs(signature, hooks.preprocess(body))
        names = (tensor.name for tensor in signature.inputs)
        outputs = run({name: array[None] for name, array in zip(names, made, strict=True)})
        answer_json(answer_of(hooks, {name: rows[0] for name, rows in outputs.items()}, body))
    except Exception as error:  # anybody's code
        rule = f"failed with their own example ({type(error).__name__}: {first_line(error)})"
        raise refused("hooks", source, rule, "Correct them, or the signature of the model.") from error


def made_inputs(signature: ModelSignature, arrays: Any, made_by: str = "preprocess") -> list[Array]:
    """Return what `preprocess` returned, or another function of that name, as the tensors of one request, in the
    signature's order. Those of bytes are arrays of objects.

    An array in one of the types that the input accepts stays as it is; others are converted where that loses no more
    than precision.

    Raises:
        InvalidInputError: an array is missing, is none of the model's, or has another shape, type or range. That is the
            fault of the hooks, whatever the client sent.
    """
    if not isinstance(arrays, Mapping):
        kind = type(arrays).__name__
        raise refused(made_by, kind, "returned no mapping", "Return the arrays by the names of the inputs.")
    names = [tensor.name for tensor in signature.inputs]
    if set(arrays) != set(names):
        given = ", ".join(map(str, arrays)) or "nothing"
        raise refused(made_by, given, "returned other inputs", f"Return exactly: {', '.join(names)}.")
    made = [_tensor(tensor, arrays[tensor.name], made_by) for tensor in signature.inputs]
    try:
        signature.sizes_of([array.shape for array in made])
    except ValueError as error:
        shapes = ", ".join(str(list(array.shape)) for array in made)
        raise refused(made_by, shapes, f"returned other shapes: {error}", "Convert them there.") from None
    return made


def _tensor(tensor: TensorSignature, value: Any, made_by: str) -> Array:
    if tensor.dtype == BYTES:
        return _bytes_tensor(tensor, value, made_by)
    try:
        array = np.asarray(value)
    except ValueError:  # a list of lists of several lengths
        array = np.asarray(None)
    try:
        if not tensor.takes(array.shape):
            raise ValueError("another shape")
        made = array if array.dtype.name in tensor.accepts else fitted(array, tensor.dtype)
    except ValueError as error:
        rule = f"must be {tensor.dtype} {list(tensor.shape)}, one sample without a batch dimension ({error})"
        description = f"{array.dtype} {list(array.shape)}"
        raise refused(f"{made_by}: {tensor.name}", description, rule, "Convert it there.") from None
    return check_range(tensor, np.ascontiguousarray(made).reshape(array.shape))


def _bytes_tensor(tensor: TensorSignature, value: Any, made_by: str) -> Array:
    array = np.asarray(value, object)
    texts = [each.encode() if isinstance(each, str) else each for each in array.flat]
    fits = tensor.takes(array.shape) and all(isinstance(each, bytes) for each in texts)
    if not fits or packed_bytes(texts) > tensor.most_bytes:
        rule = f"must be texts or bytes {list(tensor.shape)} of at most {tensor.most_bytes} bytes together"
        raise refused(f"{made_by}: {tensor.name}", str(list(array.shape)), rule, "Convert it there.")
    encoded = np.empty(array.size, object)
    encoded[:] = texts
    return encoded.reshape(array.shape)


def answer_json(answer: Any) -> bytes:
    """Return what `postprocess` returned as JSON; NaN and infinity become null, as JSON has neither.

    Raises:
        InvalidInputError: JSON cannot say it.
    """
    import orjson

    try:
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        cure = "Return numbers, texts, lists, mappings with texts as keys, and contiguous arrays of numbers."
        raise refused("postprocess", type(answer).__name__, f"JSON cannot say it ({error})", cure) from error
