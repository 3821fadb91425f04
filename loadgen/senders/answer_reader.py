"""The answers of one connection, read as they come: single ones, and streams of tokens."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import httptools
import orjson

from tenuto.loadgen.sender import Reply


class AnswerReader:
    """Reads one HTTP answer after the other. The body of a stream is server-sent events of OpenAI's completions, or of
    the generate extension."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._reply = Reply(0)  # what is read now
        self._headers: dict[bytes, bytes] = {}
        self._body = b""  # of a refusal; of a stream: the beginning of an event
        self._is_stream = self._is_over = False
        self._first_at: float | None = None
        self.keeps_connection = False  # whether another answer may follow the last one

    def feed(self, data: bytes) -> Reply | None:
        """Read on; return the answer that ends here. Raises `ValueError` for what is none."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ValueError(str(error) or type(error).__name__) from error
        if not self._is_over:
            return None
        self._is_over = False
        return self._reply

    # --- what the parser calls --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin anew."""
        self._reply, self._headers, self._body = Reply(0), {}, b""
        self._is_stream, self._first_at = False, None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Take the status, and what the server tells of the request's way."""
        reply, headers = self._reply, self._headers
        reply.status = self._parser.get_status_code()
        self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if (gpulet := headers.get(b"x-tenuto-gpulet")) is not None:
            reply.gpulet = sys.intern(gpulet.decode("latin-1"))
        if (stages := headers.get(b"x-tenuto-stages")) is not None:
            reply.stage_ms = _stage_ms(stages.decode("latin-1"))
        if (batching := headers.get(b"x-tenuto-batching-ms")) is not None:
            reply.batching_ms = float(batching)
            reply.gpulet_queue_ms = float(headers.get(b"x-tenuto-queue-ms", 0.0)) - reply.batching_ms
            reply.execution_ms = float(headers.get(b"x-tenuto-execution-ms", 0.0))
            reply.batch_size = int(headers.get(b"x-tenuto-batch-size", 0))

    def on_body(self, body: bytes) -> None:
        """Take the events of a stream that are whole now, or more of the reason of a refusal."""
        if self._is_stream:
            *events, self._body = (self._body + body).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    self._take(orjson.loads(event[6:]))
        elif self._reply.status != 200:
            self._body += body

    def _take(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        reply = self._reply
        if "error" in event:  # amid a stream it is the last event, behind status 200
            error = event["error"]
            reason = error.get("message", error) if isinstance(error, dict) else error  # the former is OpenAI's form
            reply.status, reply.error = 0, f"the stream broke off: {reason}"
        elif event.get("choices") or "text_output" in event:
            self._first_at = now if self._first_at is None else self._first_at
            reply.writing_ms = (now - self._first_at) * 1000.0
            reply.tokens += 1
        if usage := event.get("usage") or event.get("parameters", {}).get("usage"):
            reply.tokens = usage["completion_tokens"]  # an event may have several tokens, and the last has none

    def on_message_complete(self) -> None:
        """End it."""
        self._is_over, self.keeps_connection = True, self._parser.should_keep_alive()
        reply = self._reply
        if reply.status not in (0, 200):
            reply.error = f"HTTP {reply.status}: {_reason(self._body) or 'no reason given'}"
        elif self._is_stream and not reply.error and self._first_at is None:
            reply.status, reply.error = 0, "the stream ended without a token"


def _stage_ms(stages: str) -> dict[str, float]:
    """Return how long each stage took, of a header like `detect;begin=0.2;end=14.8;requests=1, …`."""
    times = {}
    for stage in stages.split(", ") if stages else ():
        label, *values = stage.split(";")
        known = dict(value.split("=", 1) for value in values)
        times[sys.intern(label)] = float(known["end"]) - float(known["begin"])
    return times


def _reason(body: bytes) -> str:
    try:
        document = json.loads(body)
    except ValueError:
        return body[:300].decode("utf-8", "replace").strip()
    error = document.get("error", document) if isinstance(document, dict) else document
    return str(error.get("message", error) if isinstance(error, dict) else error)  # the former is OpenAI's form
