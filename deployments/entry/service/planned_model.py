"""A model as the gateway sees it: its entry in the plan, its tensors, and the hooks that make them of a raw body."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from tenuto.deployments.entry.protocols.oip_requests import RequestReader, TensorSpec
from tenuto.deployments.entry.protocols.texts import Tokenizer, tokenizer_of
from tenuto.deployments.entry.service.hook_pool import HookPool
from tenuto.deployments.wire.tensors import Buffer, InputPart, OutputTensor, RequestInputs
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.placement.generates import Lengths, TokenSlo
from tenuto.placement.versions import split_name
from tenuto.placement.workload import ModelSpec
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature
from tenuto.profiles.networks.hooks import Classifier, made_inputs
from tenuto.profiles.networks.model_options import HookOptions
from tenuto.profiles.networks.preprocess import TextTokens, open_tokenizer, text_arrays

logger = logging.getLogger("ray.serve")


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

    @property
    def is_openai(self) -> bool:
        """Whether OpenAI's interface can ask it: it generates, or makes embeddings or scores of texts."""
        signature = self.signature
        return signature.generates is not None or (signature.text is not None and signature.answers != "classes")

    def preprocess(self, body: Buffer) -> RequestInputs:
        """Return the tensors of a picture or a text; blocking, call it off the event loop. Raises `InvalidInputError`
        where it is neither."""
        arrays = made_inputs(self.signature, Classifier(self.signature).preprocess(bytes(body)))
        parts = [_part(tensor, array) for tensor, array in zip(self.inputs, arrays, strict=True)]
        return RequestInputs(parts, self.signature.sizes_of([array.shape for array in arrays]))

    def text_samples(self, texts: Sequence[TextTokens]) -> list[RequestInputs]:
        """Return the tensors of each text, which the model can take."""
        samples = [[InputPart(array.tobytes()) for array in arrays] for arrays in text_arrays(texts, self.signature)]
        sizes = [(len(text.ids),) if self.signature.sizes else () for text in texts]
        return [RequestInputs(*sample) for sample in zip(samples, sizes, strict=True)]

    def postprocess(self, outputs: Sequence[OutputTensor], request: Buffer) -> Any:
        """Return the most likely classes of one request with this body, or what else the model answers."""
        picture = bytes(request) if self.signature.answers == "boxes" else b""
        return Classifier(self.signature).postprocess({t.name: t.array for t in outputs}, picture)


def _specs(tensors: Sequence[TensorSignature]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(t.name, t.dtype, t.shape, t.below, t.accepts, t.most_bytes, t.pad, t.axis, t.example)
        for t in tensors
    )


def _part(spec: TensorSpec, array: np.ndarray[Any, Any]) -> InputPart:
    """Return an array as it travels."""
    return InputPart(array.tobytes(), "" if array.dtype.name == spec.dtype else array.dtype.name)


class PlannedModel:
    """A model of the plan, or a version of one, for requests. `is_ready`: a gpu-let has reported its tensors, and can
    be used."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, self.version = split_name(name)
        named = orjson.dumps(self.model), orjson.dumps(self.version)
        self.named = b'"model_name":%b,"model_version":%b' % named  # as in answers
        self.slo_ms = 0.0
        self.alone_ms = 0.0  # a batch of one, on the fastest of its gpu-lets
        self.offline = False  # all its requests are
        self.interface: ModelInterface | None = None  # None until a gpu-let has loaded it
        self.is_ready = False
        self.reader = RequestReader(())
        self.hooks: HookPool | None = None  # None: the hooks for pictures and texts
        self._hooked: tuple[HookOptions, ModelSignature, float] | None = None  # what they were made for
        self.tokenizer: Tokenizer | None = None
        self.ttft_ms = self.tpot_ms = math.inf  # the SLO of one that generates, or streams
        self.output_tokens: Lengths | None = None  # what it writes, if the plan says that
        self._texts_of: ModelSpec | None = None  # what the tokenizer was opened for

    def follow(
        self, slo_ms: float, alone_ms: float, signature: ModelSignature | None, hooks: HookOptions, *, is_ready: bool
    ) -> None:
        """Take the present plan and reports of gpu-lets. A model with hooks of its own needs a running event loop."""
        self.slo_ms, self.alone_ms = slo_ms, alone_ms
        if signature is not None and (self.interface is None or self.interface.signature != signature):
            self.interface = ModelInterface.of(signature)
            self.reader = RequestReader(self.interface.inputs, signature)
        self.is_ready = is_ready and self.interface is not None
        if hooks.hooks is None or self.interface is None:
            self.close()
        elif self._hooked != (hooks, self.interface.signature, slo_ms):
            self.close()
            self._hooked = hooks, self.interface.signature, slo_ms
            self.hooks = HookPool(self.name, hooks, self.interface.signature, slo_ms)

    def follow_texts(self, spec: ModelSpec) -> None:
        """Open the tokenizer of a model that reads texts, so that no request has to, once for each entry in the
        workload; take the SLO of one that generates, and whether it is offline."""
        self.offline = spec.offline
        if spec.slo is not None:
            self.ttft_ms, self.tpot_ms = spec.slo.ttft_ms, spec.slo.tpot_ms
        if spec.generates is not None:
            self.output_tokens = spec.generates.output_tokens
        if self.interface is None or self._texts_of == spec:
            return
        self.tokenizer, self._texts_of = None, spec
        text = self.interface.signature.text
        try:
            if self.interface.signature.generates is not None:
                self.tokenizer = tokenizer_of(spec)
            elif text is not None and text.tokenizer_path is not None:
                open_tokenizer(text.tokenizer_path, text.sequence_length if text.truncate else None)
        except (InvalidInputError, EnvironmentFaultError) as error:
            logger.warning("%s takes no texts: %s", self.name, error)

    @property
    def most_output_tokens(self) -> int | None:
        """The most tokens of an answer, if the plan says that."""
        most = math.inf if self.output_tokens is None else self.output_tokens.most
        return int(most) if most < math.inf else None

    def bounds_within(self, time_ms: float, most_tokens: int) -> TokenSlo | None:
        """Return the bounds for an answer of at most so many tokens that has to end in this time; None for a model
        without an SLO."""
        if self.ttft_ms == math.inf:
            return None
        tokens = most_tokens if self.output_tokens is None else min(self.output_tokens.mean, most_tokens)
        return TokenSlo(ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms).within(time_ms, tokens)

    @property
    def after_ms(self) -> float:
        """The part of a deadline that is kept for `postprocess`: at most half of what a lone request has to spare, so
        that requests still run and this time can be measured again."""
        return 0.0 if self.hooks is None else min(self.hooks.after_ms, max(0.0, self.slo_ms - self.alone_ms) / 2.0)

    def close(self) -> None:
        """End its hooks."""
        if self.hooks is not None:
            self.hooks.close()
        self.hooks = self._hooked = None
