"""The functions of an application in their process: `map` makes the requests of a stage, `outputs` the answer.

The gateway calls them as it calls hooks (`hook_process`). Tensors in shared memory are mapped, all others are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.protocols.openai_bodies import GenerateParameters, made_body
from tenuto.deployments.wire.arena import MappedArenas
from tenuto.deployments.wire.bundles import read_parts
from tenuto.deployments.wire.messages import PartPlace
from tenuto.deployments.wire.tensors import Array, InputPart, OutputTensor, pack_elements
from tenuto.errors import refused
from tenuto.profiles.networks.catalogue import BYTES, DTYPES, INPUT_IDS, PROMPT, TEXT_INPUT, ModelSignature
from tenuto.profiles.networks.hooks import made_inputs
from tenuto.profiles.networks.import_factory import imported

Described = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
MadeTensor = tuple[str, str, tuple[int, ...], int]  # the same, and its length in bytes
MadeTensors = tuple[list[list[MadeTensor]], list[memoryview]]  # of each request or of an answer, and the bytes of all


_PARAMETERS = "parameters"


class StagePrompt(msgspec.Struct, forbid_unknown_fields=True):
    """What a function made for a model that generates: a text or tokens, and parameters of the generate extension."""

    prompt: str | list[int]
    parameters: dict[str, Any]


class SetUpFunctions(msgspec.Struct, frozen=True, tag=7):
    """The first message: which functions, and for each the model whose requests it makes; None: it makes the answer."""

    functions: list[str]
    models: list[ModelSignature | None]


class CallFunction(msgspec.Struct, frozen=True, tag=8):
    """Call the function at this place of `SetUpFunctions`, which may make at most so many requests.

    `request` describes the inputs of the application; a body of bytes follows them under the name `body`, if there is
    one. `stages` has the outputs of each request of the stages before; None: there is no answer. `arenas` and `places`
    say where all these tensors lie, one after the other.
    """

    function: int
    most: int
    request: list[Described]
    body: str
    stages: dict[str, list[list[Described] | None]]
    arenas: list[str]
    places: list[PartPlace]


class ApplicationFunctions:
    """The functions of one application."""

    def __init__(self, call: SetUpFunctions) -> None:
        """Import them; raises `InvalidInputError` if one cannot be, or is not allowed."""
        self._functions: list[Callable[..., Any]] = [imported(source, "function") for source in call.functions]
        for source, function in zip(call.functions, self._functions, strict=True):
            if not callable(function):
                raise refused("function", source, "cannot be called", "Name a function: package.module:function.")
        self._sources, self._models, self._arenas = call.functions, call.models, MappedArenas()

    def call(self, call: CallFunction, body: bytes) -> Any:
        """Return what a function returns; raises whatever it raises."""
        parts = iter(read_parts(call.places, call.arenas, memoryview(body), self._arenas)[0])
        request = _arrays(call.request, parts)
        if call.body:
            request[call.body] = bytes(next(parts).data)
        stages = {
            label: [None if each is None else _arrays(each, parts) for each in answers]
            for label, answers in call.stages.items()
        }
        return self._functions[call.function](request, stages)

    def packed(self, call: CallFunction, made: Any) -> MadeTensors:
        """Return what a function returned as it travels; raises `InvalidInputError` if it fits nothing."""
        source, model = self._sources[call.function], self._models[call.function]
        if model is None:
            return _packed([[_output(name, value) for name, value in _mapping(source, made).items()]])
        requests = [made] if isinstance(made, Mapping) else made
        if not isinstance(requests, list | tuple):
            rule = f"returned a {type(made).__name__}"
            raise refused(source, None, rule, "Return the inputs of a request by name, or a list of such.")
        if len(requests) > call.most:
            rule = f"made {len(requests)} requests, `most` is {call.most}"
            raise refused(source, None, rule, "Raise `most` of the stage, or make fewer.")
        if model.generates is not None:
            requests = [{PROMPT: _packed_prompt(source, each)} for each in requests]
        return pack_requests(model, [made_inputs(model, each, source) for each in requests])


def _arrays(described: Sequence[Described], parts: Iterator[InputPart]) -> dict[str, Any]:
    """Return tensors by name, as arrays that cannot be written: others read the same memory."""
    arrays = {}
    for name, dtype, shape in described:
        data = memoryview(next(parts).data).toreadonly()
        arrays[name] = OutputTensor(name, dtype, shape, data).array
    return arrays


def _mapping(source: str, made: Any) -> Mapping[str, Any]:
    if not isinstance(made, Mapping) or not made or not all(isinstance(name, str) for name in made):
        rule = f"returned a {type(made).__name__} without names of outputs"
        raise refused(source, None, rule, "Return a mapping of names to arrays, texts or bytes.")
    return made


def _packed_prompt(source: str, made: Any) -> list[bytes]:
    """Return the prompt that a function returned, as the only element of a tensor."""
    keys = set(made) if isinstance(made, Mapping) else set[str]()
    if len(keys & {TEXT_INPUT, INPUT_IDS}) != 1 or keys - {TEXT_INPUT, INPUT_IDS, _PARAMETERS}:
        given = ", ".join(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
        cure = f"Return {TEXT_INPUT} or {INPUT_IDS}, and {_PARAMETERS} where they differ from the stage's."
        raise refused(source, given, "made no prompt", cure)
    try:
        if TEXT_INPUT in keys:
            text = np.asarray(made[TEXT_INPUT], object).item()  # also the only element of an array
            prompt: Any = text.decode() if isinstance(text, bytes) else msgspec.convert(text, str)
        else:
            prompt = msgspec.convert(np.asarray(made[INPUT_IDS]).tolist(), list[int])
        parameters = dict(made.get(_PARAMETERS) or {})
        made_body(GenerateParameters, **parameters)
        return [msgspec.json.encode(StagePrompt(prompt, parameters))]
    except (HttpError, msgspec.MsgspecError, ValueError, TypeError) as error:
        raise refused(source, None, f"made no prompt ({error})", "Correct it in the function.") from None


def _output(name: str, value: Any) -> tuple[str, Array]:
    """Return an output of the application: an array of numbers, a text or bytes, or several texts."""
    values = [value] if isinstance(value, str | bytes) else value
    try:
        array = np.asarray(values)
        if array.dtype.kind in "OUS":
            array = np.asarray(values, object)  # as bytes that end with zeros would lose them
            texts = np.empty(array.size, object)
            texts[:] = [each.encode() if isinstance(each, str) else _checked_bytes(each) for each in array.flat]
            array = texts.reshape(array.shape)
        elif array.dtype.name not in DTYPES:
            raise TypeError(f"numpy's {array.dtype.name}")
    except (ValueError, TypeError) as error:
        rule = f"is no array of numbers, no text and no bytes ({error})"
        raise refused(f"outputs.{name}", type(value).__name__, rule, "Convert it in the function.") from None
    return name, array


def _checked_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(type(value).__name__)
    return value


def pack_requests(model: ModelSignature, requests: Sequence[Sequence[Array]]) -> MadeTensors:
    """Return the inputs of requests of a model as they travel."""
    return _packed([[(t.name, array) for t, array in zip(model.inputs, each, strict=True)] for each in requests])


def _packed(requests: Sequence[Sequence[tuple[str, Array]]]) -> MadeTensors:
    made: MadeTensors = [], []
    for request in requests:
        made[0].append([])
        for name, array in request:
            is_bytes = array.dtype == object
            flat = (
                pack_elements(array.flat) if is_bytes else np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            )
            part = memoryview(flat)
            made[0][-1].append((name, BYTES if is_bytes else array.dtype.name, array.shape, part.nbytes))
            made[1].append(part)
    return made
