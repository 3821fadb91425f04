"""One HTTP request for generation, from its parsed body to the end of its answer, streamed or whole."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec

from tenuto.deployments.dispatch.in_flight import OpenGeneration
from tenuto.deployments.entry.call import SharedService
from tenuto.deployments.entry.dispatching import Dispatching
from tenuto.deployments.entry.exchange import JSON, Exchange, HttpError, fail
from tenuto.deployments.entry.openai import Usage, Wanted
from tenuto.deployments.entry.texts import GrowingText
from tenuto.deployments.entry.traces import Traced
from tenuto.deployments.security.keys import Caller
from tenuto.deployments.wire.answers import Refused
from tenuto.outcome import Rule
from tenuto.profiles.networks.generating import Ending

_EVENTS = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
_LINES = b"x-tenuto-gpulet: %b\r\nx-tenuto-request-id: %b\r\n"


class GenerationCall(msgspec.Struct, eq=False):
    """Invariant: the generation ends as soon as its client has left, or a stop string is in its text."""

    _service: SharedService
    _dispatching: Dispatching
    _exchange: Exchange
    _wanted: Wanted
    _text: GrowingText
    _id: str
    _traced: Traced | None
    _caller: Caller | None
    _unpaid: int = 0  # tokens for which its client has not been charged
    _parts: list[str] = []  # parts of the text that are sent with the end; msgspec copies defaults
    _tokens: list[int] = []  # of an answer that is not streamed
    _count: int = 0
    _generation: OpenGeneration | None = None
    _has_begun: bool = False
    _is_over: bool = False

    def begin(self, model: str, *, ttft_ms: float, tpot_ms: float) -> None:
        """Ask for the generation."""
        self._exchange.on_left = self._leave
        if self._caller is not None:
            self._unpaid = self._wanted.sampling.max_tokens
            self._caller.begin_text(len(self._wanted.prompt), self._unpaid)
        generation = self._dispatching.generate(
            model,
            self,
            self._wanted.prompt,
            self._wanted.sampling,
            arrived_ms=self._exchange.arrived_ms,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            client_id=self._id,
        )
        if not self._is_over:
            self._generation = generation

    def _leave(self) -> None:
        """The client is gone."""
        self._end()
        if self._generation is not None:
            self._dispatching.leave(self._generation)
            self._generation = None

    def _end(self) -> None:
        self._is_over = True
        if self._caller is not None:
            self._caller.end_text(self._unpaid)
            self._unpaid = 0

    # --- what comes (TokenAsker) ------------------------------------------------------------------------------------

    def wrote(self, token: int) -> None:
        """Send the text that a token completes."""
        if self._is_over:
            return
        self._count += 1
        if self._caller is not None:
            self._caller.spend_text()
            self._unpaid -= 1
        text = self._text.add(token)
        if self._wanted.is_streamed:
            self._stream(text, token)
        else:
            self._parts.append(text)
            self._tokens.append(token)
        if self._text.is_stopped:
            generation = self._generation
            self._end()
            self._generation = None
            if generation is not None:
                self._dispatching.leave(generation, is_answered=True)
            self._finish(Ending.STOP, generation)

    def _stream(self, text: str, token: int) -> None:
        self._open()
        if self._wanted.writer.tokenless:
            self._exchange.send(self._wanted.writer.piece(text, [token]))
        elif self._text.is_stopped:
            self._parts.append(text)  # sent with the end
        elif text:  # otherwise it is held back: it may be a part of a character or of a stop string
            self._exchange.send(self._wanted.writer.piece(text, ()))

    def _open(self) -> None:
        """Begin with a stream, once."""
        if not self._has_begun:
            self._has_begun = True
            self._exchange.begin(200, self._lines(self._generation) + _EVENTS)
            first = self._wanted.writer.first()
            if first:
                self._exchange.send(first)

    def ended(self, finish: Ending) -> None:
        """Send the end of the answer."""
        if not self._is_over:
            self._end()
            generation, self._generation = self._generation, None
            self._finish(finish, generation)

    def _finish(self, finish: Ending, generation: OpenGeneration | None) -> None:
        wanted, exchange = self._wanted, self._exchange
        usage = Usage(len(wanted.prompt), self._count)
        text = "".join(self._parts) + self._text.end()
        if self._text.is_stopped:  # a stop string may be in the text that was held back, too
            finish = Ending.STOP
        if wanted.is_streamed:
            self._open()
            exchange.send(wanted.writer.last(text, finish.value, usage))
            exchange.end()
        else:
            whole = wanted.writer.whole(text, self._tokens, finish.value, usage)
            exchange.respond(200, self._lines(generation) + JSON, [whole])
        if generation is not None:
            rule = generation.missed
            self._trace(generation, "late" if rule else "ok", rule, {"finish_reason": finish.value, **usage._asdict()})

    def refused(self, generation: OpenGeneration, refused: Refused) -> None:
        """Send the refusal; amid a stream it is the last event."""
        if self._is_over:
            return
        self._end()
        self._generation = None
        details = {"outcome": refused.outcome.word}
        error = HttpError(
            refused.outcome.http_status,
            refused.reason,
            retry_after_s=refused.retry_after_s,
            headers=self._lines(generation),
            details=details,
        )
        if self._has_begun:
            self._exchange.send(self._wanted.writer.failed(error))
            self._exchange.end()
        else:
            fail(self._exchange, error)
        told = {"loop": refused.loop.value, **Usage(len(self._wanted.prompt), self._count)._asdict()}
        self._trace(generation, refused.outcome.word, refused.rule, told)

    def _lines(self, generation: OpenGeneration | None) -> bytes:
        gpulet = b"" if generation is None else generation.gpulet.encode()
        lines = _LINES % (gpulet, self._id.encode())
        return lines if self._traced is None else lines + self._traced.header

    def _trace(self, generation: OpenGeneration, outcome: str, rule: Rule, told: dict[str, Any]) -> None:
        if self._traced is None:
            return
        now_ms = self._service.now_ms
        first_ms = now_ms if math.isnan(generation.first_ms) else generation.first_ms
        about = {"model": generation.name, "outcome": outcome, "rule": rule.value, "request_id": self._id}
        stages = {"first_token": (generation.arrived_ms, first_ms), "further_tokens": (first_ms, now_ms)}
        self._traced.end(now_ms, stages, {**about, **told})


class CollectedTokens:
    """Waits for the tokens of one generation, for `async for`."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[int | Ending | Refused] = asyncio.Queue()

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
