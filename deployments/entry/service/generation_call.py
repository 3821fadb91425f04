"""One HTTP request for generation, from its parsed body to the end of its answer, streamed or whole. Each choice of the
answer is a generation of its own."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Any

import msgspec

from tenuto.deployments.dispatch.in_flight import OpenGeneration
from tenuto.deployments.entry.http.exchange import JSON, Exchange, HttpError, fail, refusal_of, unexpected
from tenuto.deployments.entry.protocols.openai import AskedChoice, GenerationRequest
from tenuto.deployments.entry.protocols.openai_answers import EVENTS, Piece, ScoredToken, Usage
from tenuto.deployments.entry.protocols.texts import GrowingText, Tokenizer
from tenuto.deployments.entry.protocols.tool_calls import ToolAnswer, joined
from tenuto.deployments.entry.service.dispatching import Dispatching
from tenuto.deployments.entry.service.infer_call import SharedService
from tenuto.deployments.entry.service.traces import Traced
from tenuto.deployments.security.keys import Caller
from tenuto.deployments.wire.answers import Refused
from tenuto.outcome import Rule
from tenuto.profiles.networks.generating import Ending, TokenScores

_LINES = b"x-tenuto-gpulet: %b\r\nx-tenuto-request-id: %b\r\n"


class _Choice(msgspec.Struct, eq=False):
    """One of the generations of a request, which it asks for as the one who waits for its tokens. Invariant: it ends
    as soon as a stop string is in its text."""

    _call: GenerationCall
    index: int
    asked: AskedChoice
    _text: GrowingText
    _answer: ToolAnswer | None  # of a chat with tools
    unpaid: int  # tokens for which its client has not been charged
    # What is not sent yet; msgspec copies defaults.
    _parts: list[str] = []
    _tokens: list[int] = []
    _said: list[dict[str, Any]] = []  # by an answer that may call tools
    _scored: list[ScoredToken] = []
    _scores: deque[TokenScores] = msgspec.field(default_factory=deque)  # of tokens that come next
    count: int = 0
    generation: OpenGeneration | None = None
    is_over: bool = False

    def end(self) -> OpenGeneration | None:
        """Take nothing more; return the generation, to which this refers no more."""
        self.is_over = True
        if self._call.caller is not None:
            self._call.caller.end_text(self.unpaid)
        generation, self.generation = self.generation, None
        return generation

    def _take(self, text: str = "", finish: Ending | None = None) -> Piece:
        """Return what is not sent yet, and then this text."""
        scored = self._scored if self._scored or (finish and not self._call.request.is_streamed) else None
        asks = self.asked.sampling.logprobs is not None
        why = None if finish is None else finish.value
        piece = Piece("".join(self._parts) + text, self._tokens, why, scored if asks else None)
        self._parts, self._tokens, self._scored = [], [], []
        return piece

    def _echo(self) -> None:
        """Begin with the prompt, when its scores are there."""
        prompt, echo = self.asked.prompt, self.asked.echo
        if echo is None:
            return
        self._parts.append(echo)
        self._tokens += prompt
        if self.asked.sampling.prompt_logprobs:
            text = GrowingText(self._call.tokenizer)
            for place, token in enumerate(prompt):
                self._scored.append(ScoredToken(token, text.length, self._scores.popleft() if place else None))
                text.add(token)

    # --- what comes (TokenAsker) ------------------------------------------------------------------------------------

    def scored(self, scores: list[TokenScores]) -> None:
        """Take the scores of tokens that come next."""
        self._scores += scores

    def wrote(self, token: int) -> None:
        """Send the text that a token completes."""
        if self.is_over or self.asked.is_echo_only:
            return
        try:
            self._write(token)
        except Exception as error:
            self._call.crashed(error)

    def _write(self, token: int) -> None:
        if not self.count:
            self._echo()
        self.count += 1
        if self._call.caller is not None:
            self._call.caller.spend_text()
            self.unpaid -= 1
        if self.asked.sampling.logprobs is not None:
            offset = len(self.asked.echo or "") + self._text.length
            self._scored.append(ScoredToken(token, offset, self._scores.popleft()))
        text = self._text.add(token)
        if self._answer is None:
            self._parts.append(text)
        elif message_part := self._answer.add(text):
            self._said.append(message_part)
        self._tokens.append(token)
        if self._text.is_stopped:
            generation = self.end()
            if generation is not None:
                self._call.leave(generation, is_answered=True)
            self._finish(Ending.STOP, generation)
        elif self._call.request.is_streamed:
            self._stream(text)

    def _stream(self, text: str) -> None:
        if self._answer is not None:
            parts = joined(self._said)
            if parts or self._scored:
                self._said = []
                self._call.send(self, self._take()._replace(said=parts))
        elif text or self._call.tokenizer is None or self._scored or (self.count == 1 and self.asked.echo):
            self._call.send(self, self._take())
        # Otherwise it is held back: it may be a part of a character or of a stop string.

    def ended(self, finish: Ending) -> None:
        """Send the end."""
        if self.is_over:
            return
        try:
            self._finish(finish, self.end())
        except Exception as error:
            self._call.crashed(error)

    def _finish(self, finish: Ending, generation: OpenGeneration | None) -> None:
        if not self.count:
            self._echo()
        text = self._text.end()
        if self._text.is_stopped:  # a stop string may be in the text that was held back, too
            finish = Ending.STOP
        if self.asked.is_echo_only:
            finish = Ending.LENGTH
        piece = self._take("" if self._answer is not None else text, finish)
        if self._answer is not None:
            is_whole = finish is Ending.STOP and not self._text.is_stopped
            self._said += [self._answer.add(text), self._answer.end(is_whole=is_whole)]
            piece = piece.of(self._said, has_calls=self._answer.calls > 0)
        self._call.ended(self, piece, generation)

    def refused(self, generation: OpenGeneration, refused: Refused) -> None:
        """Send the refusal, which is that of the whole request."""
        if not self.is_over:
            self.end()
            self._call.refused(generation, refused)


class GenerationCall(msgspec.Struct, eq=False):
    """Invariant: all generations of a request end as soon as its client has left, or one of them has failed."""

    _service: SharedService
    _dispatching: Dispatching
    _exchange: Exchange
    request: GenerationRequest
    tokenizer: Tokenizer | None
    _id: str
    _traced: Traced | None
    caller: Caller | None
    _model: str = ""
    _choices: list[_Choice] = []  # msgspec copies defaults; they refer to this, until they are over
    _pieces: dict[int, Piece] = {}  # of the choices that have ended
    _tokens: int = 0  # of those
    _first_ms: float = math.inf
    _missed: Rule = Rule.NONE
    _has_begun: bool = False

    def begin(self, model: str, *, ttft_ms: float, tpot_ms: float, offline: bool) -> None:
        """Ask for the generations."""
        self._exchange.on_left = self._leave
        self._model = model
        for index, asked in enumerate(self.request.choices):
            answer = None if self.request.answer is None else self.request.answer()
            most, fewest = asked.sampling.max_tokens, asked.sampling.min_tokens
            text = GrowingText(self.tokenizer, self.request.stops, fewest, with_special=answer is not None)
            self._choices.append(_Choice(self, index, asked, text, answer, most))
            if self.caller is not None:
                self.caller.begin_text(len(asked.prompt), most)
        try:
            self._ask_choices(model, ttft_ms=ttft_ms, tpot_ms=tpot_ms, offline=offline)
        except BaseException as error:
            self._leave()
            if isinstance(error, KeyError):
                raise HttpError(404, f"'{model}' is not served any more. See /v2/models.") from None
            raise

    def _ask_choices(self, model: str, *, ttft_ms: float, tpot_ms: float, offline: bool) -> None:
        for choice in list(self._choices):
            generation = self._dispatching.generate(
                model,
                choice,
                choice.asked.prompt,
                choice.asked.sampling,
                arrived_ms=self._exchange.arrived_ms,
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
                client_id=self._id,
                offline=offline,
                client=self._exchange.key,
            )
            if choice.is_over:  # it was refused at once, and the others with it
                return
            choice.generation = generation

    def _leave(self) -> None:
        """Leave what is still made: the client is gone, or the request has failed."""
        choices, self._choices = self._choices, []
        for choice in choices:
            if not choice.is_over:
                generation = choice.end()
                if generation is not None:
                    self.leave(generation)

    def leave(self, generation: OpenGeneration, *, is_answered: bool = False) -> None:
        """Have no more tokens made."""
        self._dispatching.leave(generation, is_answered=is_answered)

    def send(self, choice: _Choice, piece: Piece) -> None:
        """Send a part of a choice."""
        self._open(choice.generation)
        self._send(choice, piece)

    def _send(self, choice: _Choice, piece: Piece) -> None:
        writer = self.request.writer
        if writer.has_usage_so_far:
            writer.so_far = self._usage(sum(each.count for each in self._choices))
        self._exchange.send(writer.piece(choice.index, piece))

    def _open(self, generation: OpenGeneration | None) -> None:
        """Begin with a stream, once."""
        if not self._has_begun:
            self._has_begun = True
            self._exchange.begin(200, self._lines(generation) + EVENTS)
            first = self.request.writer.first(len(self._choices))
            if first:
                self._exchange.send(first)

    def ended(self, choice: _Choice, piece: Piece, generation: OpenGeneration | None) -> None:
        """Send the end of a choice, and behind the last one that of the answer."""
        exchange, writer = self._exchange, self.request.writer
        self._pieces[choice.index] = piece
        self._tokens += choice.count
        if generation is not None:
            self._first_ms = min(self._first_ms, generation.first_ms)
            self._missed = self._missed or generation.missed
        if self.request.is_streamed:
            self._open(generation)
            self._send(choice, piece)
        if len(self._pieces) < len(self._choices):
            return
        usage = self._usage(self._tokens)
        if self.request.is_streamed:
            last = writer.last(usage)
            if last:
                exchange.send(last)
            exchange.end()
        else:
            pieces = [self._pieces[index] for index in range(len(self._choices))]
            exchange.respond(200, self._lines(generation) + JSON, [writer.whole(pieces, usage)])
        self._choices = []
        about = {"finish_reason": piece.finish, **usage._asdict()}
        self._trace("late" if self._missed else "ok", self._missed, about)

    def _usage(self, tokens: int) -> Usage:
        """Return the tokens of the request. A prompt counts once, however many choices it has."""
        return Usage(sum(len(each.prompt) for each in self.request.choices[:: self.request.n]), tokens)

    def refused(self, generation: OpenGeneration, refused: Refused) -> None:
        """Send the refusal of a choice, which is that of the request; amid a stream it is the last event."""
        details = {"loop": refused.loop.value, **self._usage(sum(each.count for each in self._choices))._asdict()}
        self._leave()
        self._fail(refusal_of(refused, self._lines(generation)))
        self._first_ms = min(self._first_ms, generation.first_ms)
        self._trace(refused.outcome.word, refused.rule, details)

    def crashed(self, error: Exception) -> None:
        """End the request, of which an answer could not be written: other requests share who wrote it."""
        self._leave()
        self._fail(unexpected(self._exchange.head.url, error))

    def _fail(self, error: HttpError) -> None:
        if self._has_begun:
            self._exchange.send(self.request.writer.failed(error))
            self._exchange.end()
        else:
            fail(self._exchange, error)

    def _lines(self, generation: OpenGeneration | None) -> bytes:
        gpulet = b"" if generation is None else generation.gpulet.encode()
        lines = _LINES % (gpulet, self._id.encode())
        return lines if self._traced is None else lines + self._traced.header

    def _trace(self, outcome: str, rule: Rule, details: dict[str, Any]) -> None:
        if self._traced is None:
            return
        now_ms, arrived_ms = self._service.now_ms, self._exchange.arrived_ms
        first_ms = min(self._first_ms, now_ms)
        about = {"model": self._model, "outcome": outcome, "rule": rule.value, "request_id": self._id}
        stages = {"first_token": (arrived_ms, first_ms), "further_tokens": (first_ms, now_ms)}
        self._traced.end(now_ms, stages, {**about, **details})


class CollectedTokens:
    """Waits for the tokens of one generation, for `async for`."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[int | Ending | Refused] = asyncio.Queue()

    def scored(self, scores: list[TokenScores]) -> None:
        """Leave scores: nobody asks for them."""

    def wrote(self, token: int) -> None:
        """Keep a token."""
        self.came.put_nowait(token)

    def ended(self, finish: Ending) -> None:
        """Keep the end."""
        self.came.put_nowait(finish)

    def refused(self, generation: OpenGeneration, refused: Refused) -> None:
        """Keep the refusal."""
        del generation
        self.came.put_nowait(refused)
