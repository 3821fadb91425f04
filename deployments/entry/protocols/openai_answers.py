"""The answers of the protocols of generation, whole or as streams (server-sent events, SSE): OpenAI's completions and
chats, and the generate extension of the Open Inference Protocol."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import orjson

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.protocols.texts import Tokenizer
from tenuto.deployments.entry.protocols.tool_calls import joined
from tenuto.profiles.networks.generating import TokenScores

EVENTS = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"  # the head of a stream
DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # format: OpenAI's for what JSON cannot hold


class ScoredToken(NamedTuple):
    """A token, where it begins in its choice's text, and its scores; the first of a prompt has none."""

    token: int
    offset: int
    scores: TokenScores | None


class Piece(NamedTuple):
    """A part of a choice, or a whole one: its text, the tokens that are shown where there is no text, and why it
    ends here. `scored` are its tokens with their scores, if these are asked for."""

    text: str
    tokens: Sequence[int] = ()
    finish: str | None = None
    scored: Sequence[ScoredToken] | None = None
    said: Mapping[str, Any] | None = None  # of a chat with tools, in place of the text

    def of(self, said: Sequence[Mapping[str, Any]], *, has_calls: bool) -> Piece:
        """Return the end of an answer that may call tools, which says this in place of the text."""
        finish = "tool_calls" if has_calls and self.finish == "stop" else self.finish
        return self._replace(text="", said=joined(said), finish=finish)


class Usage(NamedTuple):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int

    def shown(self) -> dict[str, int]:
        """Return OpenAI's `usage`."""
        return {**self._asdict(), "total_tokens": sum(self)}


class Writer(msgspec.Struct):
    """Writes the answers of OpenAI's completions. `named` is the id of the answer."""

    model: str
    named: str
    include_usage: bool = False
    has_usage_so_far: bool = False  # in every part of a stream
    so_far: Usage = Usage(0, 0)
    tokenizer: Tokenizer | None = None  # None: the tokens themselves are shown
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    kind = "text_completion"
    chunk = "text_completion"

    def first(self, choices: int) -> bytes:
        """Return the first part of a stream of so many choices."""
        del choices
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        """Return a part of a stream; the last one of a choice says why it ends."""
        return self._event([self._choice(index, self._part(piece), piece)])

    def last(self, usage: Usage) -> bytes:
        """Return the last part of a stream, behind the ends of its choices."""
        return (self._event([], usage=usage.shown()) if self.include_usage else b"") + DONE

    def failed(self, error: HttpError) -> bytes:
        """Return the last part of a stream that fails after it has begun."""
        return b"data: %b\n\n" % error.payload(b"/v1/") + DONE

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """Return an answer that is not streamed."""
        listed = [self._choice(index, self._answer(choice), choice) for index, choice in enumerate(choices)]
        return self._object(self.kind, listed, usage=usage.shown())

    def _answer(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    def _part(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    def _choice(self, index: int, content: dict[str, Any], piece: Piece) -> dict[str, Any]:
        logprobs = None if piece.scored is None else self._logprobs(piece.scored)
        choice = {**content, "index": index, "logprobs": logprobs, "finish_reason": piece.finish}
        return self._with_tokens(choice, piece.tokens)

    def _with_tokens(self, choice: dict[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
        return choice if self.tokenizer is not None else {**choice, "token_ids": list(tokens)}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        tokens, logprobs, tops = list[str](), list[float | None](), list[dict[str, float] | None]()
        for token, _, scores in scored:
            tokens.append(self._name(token))
            if scores is None:
                logprobs.append(None)
                tops.append(None)
                continue
            logprobs.append(_finite(scores.logprob))
            top: dict[str, float] = {}
            for likely, logprob in (*scores.likeliest, (token, scores.logprob)):
                top.setdefault(self._name(likely), _finite(logprob))  # tokens may look the same: the likeliest is shown
            tops.append(top)
        offsets = [each.offset for each in scored]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, token: int) -> str:
        """Return a token as completions show it: bytes that are no character are named."""
        if self.tokenizer is None:
            return f"token_id:{token}"
        text, data = self.tokenizer.token_text(token)
        broken = data is not None and data != text.encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data or b"") if broken else text

    def _event(self, choices: list[Any], **more: Any) -> bytes:
        if self.include_usage and not more:
            more = {"usage": self.so_far.shown() if self.has_usage_so_far else None}
        return b"data: %b\n\n" % self._object(self.chunk, choices, **more)

    def _object(self, kind: str, choices: list[Any], **more: Any) -> bytes:
        fields = {"id": self.named, "object": kind, "created": self.created, "model": self.model}
        return orjson.dumps({**fields, "choices": choices, **more})


class ChatWriter(Writer):
    """Writes the answers of OpenAI's chats."""

    kind = "chat.completion"
    chunk = "chat.completion.chunk"

    def first(self, choices: int) -> bytes:
        """Return the chunks that say who speaks."""
        opening = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._event([self._choice(index, opening, Piece(""))]) for index in range(choices))

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        content = []
        for token, _, scores in scored:
            if scores is not None:
                top = [self._shown(*each) for each in scores.likeliest]
                content.append({**self._shown(token, scores.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _shown(self, token: int, logprob: float) -> dict[str, Any]:
        assert self.tokenizer is not None  # there is no chat without
        text, data = self.tokenizer.token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": None if data is None else list(data)}

    def _answer(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"content": piece.text} if piece.said is None else {"content": None, **piece.said}
        calls = message.pop("tool_calls", None)
        if calls:  # only parts of a stream number them
            message["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in calls]
        return {"message": {"role": "assistant", "refusal": None, **message}}

    def _part(self, piece: Piece) -> dict[str, Any]:
        if piece.said is not None:
            return {"delta": dict(piece.said)}
        return {"delta": {"content": piece.text} if piece.text else {}}


class GenerateWriter(Writer):
    """Writes the answers of the generate extension, which have one choice; every part has the same form. `usage` is
    said by the last one of a stream."""

    usage: Usage | None = None

    def failed(self, error: HttpError) -> bytes:
        """Return the error as the last part."""
        return b"data: %b\n\n" % error.payload()

    def last(self, usage: Usage) -> bytes:
        """Return nothing: the last piece says that it is the last."""
        del usage
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        """Return a part of a stream; the last one says why it is the last."""
        del index
        ends: dict[str, Any] = {} if piece.finish is None else {"finish_reason": piece.finish}
        if piece.finish is not None and self.usage is not None:
            ends["usage"] = self.usage.shown()
        return b"data: %b\n\n" % self._form(piece, **ends)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """Return an answer that is not streamed."""
        (choice,) = choices
        return self._form(choice, finish_reason=choice.finish, usage=usage.shown())

    def _form(self, piece: Piece, **parameters: Any) -> bytes:
        fields: dict[str, Any] = {"id": self.named, "model_name": self.model, "model_version": "1"}
        fields["text_output"] = piece.text
        if parameters:
            fields["parameters"] = parameters
        return orjson.dumps(self._with_tokens(fields, piece.tokens))


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
