"""A model as the gateway sees it: what the plan says of it, its tensors, and how a raw image or text becomes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from tenuto.deployments.entry.oip import RequestReader, TensorSpec
from tenuto.deployments.wire.tensors import Buffer, InputPart, OutputTensor
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature
from tenuto.profiles.networks.preprocess import Prediction, postprocess, preprocess


@dataclass(frozen=True)
class ModelInterface:
    """Built from what a gpu-let reports after loading the model."""

    signature: ModelSignature
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, signature: ModelSignature) -> ModelInterface:
        """Build from what a gpu-let reported."""
        return cls(signature, _specs(signature.inputs), _specs(signature.outputs))

    def preprocess(self, body: Buffer) -> list[InputPart]:
        """Return one tensor per input from an image or a text; blocking, call it off the event loop.

        Raises:
            InvalidInputError: the body is not what the model reads.
        """
        arrays = preprocess(self.signature, bytes(body))
        return [_part(tensor, np.ascontiguousarray(arrays[tensor.name])) for tensor in self.inputs]

    def postprocess(self, outputs: Sequence[OutputTensor]) -> list[Prediction]:
        """Return the most likely classes of one request."""
        arrays = {t.name: np.frombuffer(t.data, dtype=t.dtype).reshape(t.shape) for t in outputs}
        return postprocess(self.signature, arrays)


def _specs(tensors: Sequence[TensorSignature]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.name, t.dtype, t.shape, t.below, t.accepts) for t in tensors)


def _part(spec: TensorSpec, array: np.ndarray[Any, Any]) -> InputPart:
    """Return an array as it travels: in its own type where the model takes that, else in the signature's."""
    if array.dtype.name in spec.accepts:
        return InputPart(array.tobytes(), array.dtype.name)
    return InputPart(array.astype(spec.dtype, copy=False).tobytes())


class PlannedModel:
    """A model of the plan as requests meet it. `is_ready`: a gpu-let has said what it takes, and can be used."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.named = b'"model_name":%b,"model_version":"1"' % orjson.dumps(name)  # as answers say it
        self.slo_ms = 0.0
        self.alone_ms = 0.0  # a batch of one, on the fastest of its gpu-lets
        self.interface: ModelInterface | None = None  # None until a gpu-let has loaded it
        self.is_ready = False
        self.reader = RequestReader(())

    def follow(self, slo_ms: float, alone_ms: float, signature: ModelSignature | None, *, is_ready: bool) -> None:
        """Take what the plan and the gpu-lets say now."""
        self.slo_ms, self.alone_ms = slo_ms, alone_ms
        if signature is not None and (self.interface is None or self.interface.signature != signature):
            self.interface = ModelInterface.of(signature)
            self.reader = RequestReader(self.interface.inputs)
        self.is_ready = is_ready and self.interface is not None
