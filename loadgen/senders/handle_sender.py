"""The sender through the Python handle: the same requests as over HTTP, but without the HTTP server."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from collections.abc import AsyncGenerator
from typing import Any

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.protocols.oip_requests import RequestReader
from tenuto.deployments.entry.service.python_handle import RequestFailedError, TenutoHandle
from tenuto.deployments.wire.answers import Answer
from tenuto.errors import EnvironmentFaultError, TenutoError, UnavailableError
from tenuto.loadgen.sender import Body, OnReply, Reply

# model; parts and sizes, or a prompt; SLO in ms; whether the answer is a stream
Prepared = tuple[str, tuple[list[Any], tuple[int, ...]] | Body, float | None, bool]


class HandleSender:
    """Sends through a `TenutoHandle`. Outcomes become the same statuses as over HTTP."""

    def __init__(self, handle: TenutoHandle | None = None) -> None:
        """`handle`: a connected handle; by default `open` connects to the Ray cluster of this process."""
        self._handle = handle
        self._on_reply: OnReply = lambda _token, _reply: None
        self._closing: asyncio.Task[None] | None = None
        self._streams: set[asyncio.Task[None]] = set()

    async def open(self, connections: int, on_reply: OnReply) -> None:  # noqa: ARG002
        """Connect. One connection per dispatcher carries all requests."""
        self._on_reply = on_reply
        if self._handle is None:
            self._handle = await TenutoHandle.connect()

    def prepare(self, model: str, body: Body, slo_ms: float | None = None) -> Prepared:
        """Cut a request into the buffers of its only sample, if it is not a prompt.

        Raises:
            EnvironmentFaultError: the model cannot be asked, or the body does not fit it.
        """
        assert self._handle is not None
        if body.is_prompt:
            return model, body, slo_ms, True
        try:
            name, _, version = model.partition(":")
            interface = self._handle.interface(name, version or None)
            if body.is_raw:
                parts, sizes = interface.preprocess(body.data, body.hooks)
                if any(part.dtype for part in parts):
                    raise UnavailableError("its pictures travel as pixels. Use HTTP.")
            else:
                read = RequestReader(interface.inputs, interface.signature).read(body.data, body.json_length)
                parts, sizes = read.parts[0], read.header.sizes
        except (HttpError, TenutoError) as error:
            raise EnvironmentFaultError(f"'{model}' cannot be asked over the handle: {error}") from error
        return model, ([part.data for part in parts], sizes), slo_ms, body.is_streamed

    def send(self, prepared: Prepared, request_id: str, token: int) -> None:
        """Send with the next bundle."""
        assert self._handle is not None
        model, parts, slo_ms, is_streamed = prepared
        name, _, version = model.partition(":")
        if is_streamed:
            stream: AsyncGenerator[Any]
            if isinstance(parts, Body):
                stream = _tokens(self._handle, name, parts, request_id, slo_ms)
            else:
                stream = self._handle.stream_parts(name, *parts, slo_ms, request_id)
            task = asyncio.ensure_future(self._read(stream, token))
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
            return
        assert not isinstance(parts, Body)
        future = self._handle.submit(name, parts[0], slo_ms, request_id, version or None, parts[1])
        future.add_done_callback(functools.partial(self._answered, token))

    async def _read(self, stream: AsyncGenerator[Any], token: int) -> None:
        """Read a stream of tokens to its end."""
        reply, first_at = Reply(200), math.nan
        try:
            async for _ in stream:
                now = time.monotonic()
                first_at = first_at if reply.tokens else now
                reply.tokens += 1
                reply.writing_ms = (now - first_at) * 1000.0
        except RequestFailedError as error:
            reply = Reply(error.answer.http_status, error=str(error))
        except TenutoError as error:
            reply = Reply(0, error=str(error))
        self._on_reply(token, reply)

    def _answered(self, token: int, future: asyncio.Future[Answer]) -> None:
        if future.cancelled():
            self._on_reply(token, Reply(0, error="cancelled"))
            return
        answer = future.result()
        self._on_reply(
            token,
            Reply(
                answer.http_status,
                answer.batching_ms,
                answer.gpulet_queue_ms,
                answer.execution_ms,
                answer.batch_size,
                answer.gpulet,
                answer.reason and f"{answer.outcome.word}: {answer.reason}",
                stage_ms=answer.stage_ms,
            ),
        )

    def close(self) -> None:
        """Disconnect soon; open requests get no answer any more."""
        if self._handle is not None:
            self._on_reply = lambda _token, _reply: None
            for task in self._streams:
                task.cancel()
            self._closing = asyncio.ensure_future(self._handle.close())


def _tokens(
    handle: TenutoHandle, model: str, body: Body, request_id: str, ttft_ms: float | None
) -> AsyncGenerator[int]:
    """Ask a model that generates."""
    question = json.loads(body.data)
    return handle.generate_tokens(
        model,
        question["prompt"],
        max_tokens=question["max_tokens"],
        temperature=1.0,  # what OpenAI's interface takes where nothing is said
        seed=question["seed"],
        slo_ms=ttft_ms,
        request_id=request_id,
    )
