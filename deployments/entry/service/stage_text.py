"""Texts that a stage of an application generates: the prompt of each, and what becomes of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from tenuto.deployments.dispatch.in_flight import OpenGeneration
from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.protocols.openai import GenerationRequest, read_generation
from tenuto.deployments.entry.protocols.openai_bodies import CompletionBody, bad_field, made_body
from tenuto.deployments.entry.protocols.texts import GrowingText, Tokenizer
from tenuto.deployments.entry.service.application_functions import StagePrompt
from tenuto.deployments.entry.service.planned_model import PlannedModel
from tenuto.deployments.security.keys import Caller
from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.tensors import OutputTensor, RequestInputs, pack_elements, read_elements
from tenuto.outcome import Outcome, Rule
from tenuto.placement.application import Stage
from tenuto.placement.application_signature import stage_signature
from tenuto.profiles.networks.catalogue import INPUT_IDS, PROMPT, TEXT_INPUT
from tenuto.profiles.networks.generating import Ending, TokenScores


def read_prompt(stage: Stage, model: PlannedModel, sample: RequestInputs) -> GenerationRequest | Refused:
    """Return what a request of a stage asks a model to write, or why it cannot; blocking where the prompt is long."""
    try:
        return _read(stage, model, sample)
    except HttpError as error:
        return Refused(Outcome.FAILED, error.message, rule=Rule.INPUT)


def _read(stage: Stage, model: PlannedModel, sample: RequestInputs) -> GenerationRequest:
    if model.interface is None or (limits := model.interface.signature.generates) is None:
        raise HttpError(503, f"'{model.name}' generates no more.")
    (tensor,), (part,) = stage_signature(stage, model.interface.signature).inputs, sample.parts
    parameters: dict[str, Any] = {"temperature": 0.0, "max_tokens": model.most_output_tokens}
    if stage.parameters is not None:
        parameters |= stage.parameters.model_dump(mode="json", exclude_none=True)
    if tensor.name == INPUT_IDS:
        prompt: str | list[int] = np.frombuffer(part.data, part.dtype or tensor.dtype).tolist()
    else:
        (data,) = read_elements(part.data, 1)
        if tensor.name == PROMPT:
            made = msgspec.json.decode(data, type=StagePrompt)
            prompt, parameters = made.prompt, parameters | made.parameters
        else:
            try:
                prompt = data.decode()
            except UnicodeDecodeError:
                raise bad_field(TEXT_INPUT, "is no text in UTF-8. Encode it so") from None
    body = made_body(CompletionBody, model=model.model, prompt=prompt, **parameters)
    return read_generation(body, model.model, model.tokenizer, limits)


class TextAsker(Protocol):
    """Who waits for the texts of a stage. Each text ends once, by one of the last two methods."""

    def stopped(self, position: int) -> None:
        """Have no more tokens made: a stop string has come."""

    def written(self, position: int, outputs: list[OutputTensor]) -> None:
        """Take a text."""

    def unwritten(self, position: int, refused: Refused) -> None:
        """Learn that there is none."""


# Takes a part of a text with its token, and behind the last one what is left, with the reason of the end and no token.
OnText = Callable[[str, int | None, Ending | None], None]


class StageText:
    """One text of a stage, while it grows (`TokenAsker`)."""

    def __init__(
        self,
        asker: TextAsker,
        position: int,
        tokenizer: Tokenizer | None,
        request: GenerationRequest,
        on_text: OnText | None = None,
        caller: Caller | None = None,
    ) -> None:
        """Begin without tokens; `position` is its place among the requests of the stage. `on_text` takes what is
        written at once, and `caller` is charged for it."""
        (choice,) = request.choices
        self._on_text, self._caller, self._uncharged = on_text, caller, choice.sampling.max_tokens
        if caller is not None:
            caller.begin_text(len(choice.prompt), self._uncharged)
        self._asker: TextAsker | None = asker
        self._position = position
        self._text = GrowingText(tokenizer, request.stops, choice.sampling.min_tokens)
        self._parts, self._tokens = list[str](), list[int]()

    def scored(self, scores: list[TokenScores]) -> None:
        """Leave scores: nobody asks for them."""

    def wrote(self, token: int) -> None:
        """Take the next token."""
        if self._asker is not None:
            self._tokens.append(token)
            self._uncharged -= 1
            if self._caller is not None:
                self._caller.spend_text()
            self._parts.append(self._text.add(token))
            if self._on_text is not None:
                self._on_text(self._parts[-1], token, None)
            if self._asker is not None and self._text.is_stopped:
                self._asker.stopped(self._position)
                self._end(Ending.STOP)

    def ended(self, finish: Ending) -> None:
        """Hand on what was written."""
        rest = self._text.end()
        self._parts.append(rest)
        self._end(Ending.STOP if self._text.is_stopped else finish, rest)

    def refused(self, generation: OpenGeneration, refused: Refused) -> None:
        """Hand on that there is no text."""
        del generation
        asker = self._asker
        self.close()
        if asker is not None:
            asker.unwritten(self._position, refused)

    def close(self) -> None:
        """Take nothing more."""
        if self._caller is not None:
            self._caller.end_text(self._uncharged)
        self._asker = self._on_text = self._caller = None

    def _end(self, finish: Ending, rest: str = "") -> None:
        asker, on_text = self._asker, self._on_text
        self.close()
        if asker is not None:
            if on_text is not None:
                on_text(rest, None, finish)
            text = memoryview(pack_elements(["".join(self._parts).encode()]))
            tokens = np.array(self._tokens, np.int64)
            why = memoryview(pack_elements([finish.value.encode()]))
            outputs = [
                OutputTensor("text_output", "bytes", (1,), text),
                OutputTensor("token_ids", "int64", tokens.shape, tokens.view(np.uint8).data),
                OutputTensor("finish_reason", "bytes", (1,), why),
            ]
            asker.written(self._position, outputs)
