"""The Open Inference Protocol over gRPC, on a socket of the gateway's own.

`tenuto.deployments.entry.grpc_messages` says what its calls mean as HTTP, and what answers HTTP answers them.

A call is refused before its message is read where its metadata alone says that it cannot be answered.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc
import orjson
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha.reflection import SERVICE_NAME, enable_server_reflection

from tenuto.deployments.entry.asgi import WholeExchange
from tenuto.deployments.entry.connection import MOST_PIPELINED
from tenuto.deployments.entry.exchange import Head, HttpError, unexpected
from tenuto.deployments.entry.framing import KEPT_HEADS
from tenuto.deployments.entry.grpc_messages import (
    COLD,
    HEALTH,
    MOST_DESCRIBED_BYTES,
    MOST_MESSAGE_BYTES,
    POOL,
    SERVICE,
    Cold,
    Message,
    cold_answer,
    cold_head,
    headers_of,
    infer_request,
    message,
    to_answer,
    to_http,
)
from tenuto.deployments.entry.open_connections import Limits
from tenuto.deployments.entry.service import InferenceService

Context = Any  # grpc.aio.ServicerContext, which has no types
Headers = dict[bytes, bytes]
Answer = Callable[[AsyncIterator[bytes], Context], Awaitable[Message]]

_MESSAGE_S = 60.0  # limit: until a call's message has come, as for a body of HTTP
_IDLE_MS = 300_000  # limit: of a connection without a call, as for HTTP
_METADATA_BYTES = 1 << 15  # limit: as for a head of HTTP
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    406: grpc.StatusCode.OUT_OF_RANGE,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class FailedCallError(Exception):
    """A call that ends in an error: the HTTP status that means the same, what to do, and the response's raw lines."""

    def __init__(self, status: int, reason: str, lines: bytes = b"") -> None:
        super().__init__(status, reason)
        self.call_id = ""  # of the request in a stream that it is about
        self.code = _CODES.get(status, grpc.StatusCode.INTERNAL)
        self.reason = reason
        self.lines = lines

    @classmethod
    def of(cls, error: Exception) -> FailedCallError:
        """Return the failure of a call that an error ended; an error that nobody expected goes to the log."""
        if isinstance(error, cls):
            return error
        if isinstance(error, DecodeError):
            return cls(400, "the message is not one of this call. See open_inference.proto.")
        told = error if isinstance(error, HttpError) else unexpected("a gRPC call", error)
        return cls(told.status, told.message, told.lines())


class GrpcServer:
    """One socket. Invariant: the bytes of messages that are not answered stay below `limits.unfinished_bytes`."""

    def __init__(self, service: InferenceService, limits: Limits) -> None:
        """Prepare; must be called on the loop."""
        self._service = service
        self._limits = limits
        self._server: Any = None
        self._unfinished_bytes = 0
        self._heads: dict[tuple[Any, ...], Head] = {}

    async def listen(self, host: str, port: int, *, is_shared: bool, tls: tuple[bytes, bytes] | None) -> None:
        """Open the socket.

        Args:
            host: address to bind to.
            port: to listen on.
            is_shared: with other gateways of this machine.
            tls: a certificate and its key as PEM; None: not encrypted.

        Raises:
            OSError: the port belongs to somebody else.
        """
        options = [
            ("grpc.so_reuseport", int(is_shared)),
            ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES + MOST_DESCRIBED_BYTES),
            ("grpc.max_metadata_size", _METADATA_BYTES),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
        ]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=self._limits.connections)
        server.add_generic_rpc_handlers(self._handlers())
        enable_server_reflection((SERVICE, HEALTH, SERVICE_NAME), server, pool=POOL)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                server.add_insecure_port(where)
            else:
                server.add_secure_port(where, grpc.ssl_server_credentials([tls[::-1]]))
        except RuntimeError as error:
            raise OSError(errno.EADDRINUSE, "gRPC's library cannot bind to it") from error
        await server.start()
        self._server = server

    async def close(self, grace_s: float = 0.0) -> None:
        """Take no new calls, and end those under way after so many seconds."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)

    def _handlers(self) -> list[Any]:
        # To us every call is a stream: only of streams is the metadata seen before the message.
        methods = {"ModelInfer": _unary(self._infer)}
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream, None, _serialize)
        for name, call in COLD.items():
            methods[name] = _unary(self._cold(call, message(f"inference.{name}Request")))
        return [
            grpc.method_handlers_generic_handler(SERVICE, methods),
            grpc.method_handlers_generic_handler(HEALTH, {"Check": _unary(self._check)}),
        ]

    # --- calls ----------------------------------------------------------------------------------------------------

    async def _infer(self, requests: AsyncIterator[bytes], context: Context) -> Message:
        headers = await self._admitted(context, b"/v2")
        return await self._answer(await _only(requests), headers, context)

    async def _stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Answer the requests of a stream in the order in which they end; so many at once as are taken pipelined."""
        answer = message("inference.ModelStreamInferResponse")
        room, writing = asyncio.Semaphore(MOST_PIPELINED), asyncio.Lock()

        async def one(data: bytes) -> None:
            try:
                found = answer(infer_response=await self._answer(data, headers, context))
            except FailedCallError as error:
                found = answer(error_message=error.reason)
                found.infer_response.id = error.call_id
            async with writing:
                await context.write(found)
            room.release()

        try:
            headers = await self._admitted(context, b"/v2")
        except FailedCallError as error:
            await _abort(context, error)
        async with asyncio.TaskGroup() as tasks:
            async for data in requests:
                tasks.create_task(one(data))
                await room.acquire()

    def _cold(self, call: Cold, request: Message) -> Answer:
        # Which model is asked for stands in the message, which comes later.
        url = b"/v2" if "{model}" in call.route else call.route.encode()

        async def answer(requests: AsyncIterator[bytes], context: Context) -> Message:
            headers = await self._admitted(context, url)
            asked = request.FromString((await _only(requests))[:MOST_DESCRIBED_BYTES])
            try:
                return cold_answer(call, (await self._responded(cold_head(call, asked, headers), b"", context))[1])
            except FailedCallError as error:
                if call.answer.endswith("ReadyResponse") and error.code is grpc.StatusCode.UNAVAILABLE:
                    return message(f"inference.{call.answer}")(ready=False)
                raise

        return answer

    async def _check(self, requests: AsyncIterator[bytes], context: Context) -> Message:
        """Answer gRPC's own health check: as load balancers do, without a key."""
        asked = message("grpc.health.v1.HealthCheckRequest").FromString(await _only(requests))
        answer = message("grpc.health.v1.HealthCheckResponse")
        if asked.service not in ("", SERVICE):
            raise FailedCallError(404, f"no service '{asked.service}' is here.")
        try:
            await self._responded(Head(b"GET", b"/v2/health/ready", {}), b"", context)
        except FailedCallError:
            return answer(status="NOT_SERVING")
        return answer(status="SERVING")

    # --- what they have in common -----------------------------------------------------------------------------------

    async def _admitted(self, context: Context, url: bytes) -> Headers:
        """Return what a call's metadata says, before its message is read.

        Raises:
            FailedCallError: nobody who says so may ask for this URL; a wrong key hears it late, as over HTTP.
        """
        headers = headers_of(context.invocation_metadata())
        refusal = self._service.refusal(self._exchange(Head(b"GET", url, headers), b"", context))
        if refusal is not None:
            await asyncio.sleep(refusal.after_s)
            raise FailedCallError(refusal.status, refusal.message, refusal.lines())
        return headers

    def _exchange(self, head: Head, body: bytes, context: Context) -> WholeExchange:
        """Return a request, with the head that said the same before: where it leads is found once."""
        key = (head.method, head.url, *head.headers.items())
        known = self._heads.get(key)
        if known is None:
            if len(self._heads) >= KEPT_HEADS:
                self._heads.clear()
            known = self._heads[key] = head
        return WholeExchange(known, body, self._service.now_ms, _peer(context))

    async def _answer(self, data: bytes, headers: Headers, context: Context) -> Message:
        """Return the answer to a `ModelInferRequest`; raises `FailedCallError`."""
        asked = None
        self._unfinished_bytes += len(data)
        try:
            if self._unfinished_bytes > self._limits.unfinished_bytes:
                raise FailedCallError(429, "too many messages are unanswered. Retry in a second.")
            remaining_s = context.time_remaining()
            remaining_ms = None if remaining_s is None else 1000.0 * remaining_s

            def read() -> tuple[Message, Head, bytes]:
                asked = infer_request(data)
                slo_ms = self._service.slo_ms(asked.model_name, asked.model_version)
                return asked, *to_http(asked, headers, remaining_ms, slo_ms)

            is_long = len(data) > MOST_DESCRIBED_BYTES
            asked, head, body = await asyncio.to_thread(read) if is_long else read()
            return to_answer(asked, *await self._responded(head, body, context))
        except Exception as error:
            failed = FailedCallError.of(error)
            failed.call_id = "" if asked is None else asked.id
            raise failed from None
        finally:
            self._unfinished_bytes -= len(data)

    async def _responded(self, head: Head, body: bytes, context: Context) -> tuple[bytes, bytes]:
        """Let the service answer; returns raw header lines and payload. Raises `FailedCallError` for an error."""
        exchange = self._exchange(head, body, context)
        self._service.handle(exchange)
        status, lines, payload = await exchange.response()
        if status != 200:
            raise FailedCallError(status, orjson.loads(payload)["error"], lines)
        return lines, payload


def _unary(answer: Answer) -> Any:
    """Return the handler of a call with one message each way."""

    async def call(requests: AsyncIterator[bytes], context: Context) -> Message:
        try:
            return await answer(requests, context)
        except Exception as error:
            failed = FailedCallError.of(error)
        return await _abort(context, failed)

    return grpc.stream_unary_rpc_method_handler(call, None, _serialize)


def _serialize(answer: Message) -> bytes:
    found: bytes = answer.SerializeToString()
    return found


async def _only(requests: AsyncIterator[bytes]) -> bytes:
    """Return the one message of a call."""
    try:
        async with asyncio.timeout(_MESSAGE_S):
            async for data in requests:
                return data
    except TimeoutError:
        raise FailedCallError(504, f"no message came within {_MESSAGE_S:.0f} s. Send it at once.") from None
    raise FailedCallError(400, "the call ended without a message. Send one.")


async def _abort(context: Context, error: FailedCallError) -> Any:
    """End a call with an error; the headers that HTTP would have go behind it."""
    pairs = [line.decode("latin-1").split(": ", 1) for line in error.lines.splitlines()]
    trailing = tuple([(key, value) for key, value in pairs if key != "content-type"])
    await context.abort(error.code, error.reason, trailing)


def _peer(context: Context) -> str:
    """Return where a client is, which gRPC says as `ipv4:127.0.0.1:1234` or `ipv6:%5B::1%5D:1234`."""
    return unquote(context.peer()).partition(":")[2].rpartition(":")[0].strip("[]")
