"""The Open Inference Protocol over gRPC, on a socket of the gateway's own.

`tenuto.deployments.entry.grpc_messages` says what its calls mean as HTTP, and what answers HTTP answers them.

A call is refused before its message is read where its metadata alone says that it cannot be answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import grpc
import orjson
from grpc_reflection.v1alpha.reflection import SERVICE_NAME, enable_server_reflection

from tenuto.deployments.entry.asgi import WholeExchange
from tenuto.deployments.entry.connection import MOST_PIPELINED
from tenuto.deployments.entry.exchange import Exchange, Head, HttpError, crash
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
from tenuto.errors import EnvironmentFaultError

Context = Any  # grpc.aio.ServicerContext, which has no types
Headers = dict[bytes, bytes]

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


class AnsweringService(Protocol):
    """What answers: `tenuto.deployments.entry.service.InferenceService`."""

    def refusal(self, exchange: Exchange) -> HttpError | None:
        """Return why a request need not send its body."""

    def handle(self, exchange: Exchange) -> None:
        """Answer a request whose body is there."""

    def slo_ms(self, model: str) -> float:
        """Return the SLO of a model in ms."""


class FailedCallError(Exception):
    """A call that ends in an error: the HTTP status that means the same, what to do, and the response's raw lines."""

    def __init__(self, status: int, reason: str, lines: bytes = b"") -> None:
        super().__init__(status, reason)
        self.call_id = ""  # of the request in a stream that it is about
        self.code = _CODES.get(status, grpc.StatusCode.INTERNAL)
        self.reason = reason
        self.lines = lines


class GrpcServer:
    """One socket. Invariant: the bytes of messages that are not answered stay below `limits.unfinished_bytes`."""

    def __init__(self, service: AnsweringService, limits: Limits) -> None:
        """Prepare; must be called on the loop."""
        self.address: tuple[str, int] | None = None
        self._service = service
        self._limits = limits
        self._server: Any = None
        self._unfinished_bytes = 0
        self._heads: dict[tuple[Any, ...], Head] = {}

    async def listen(self, host: str, port: int, *, is_shared: bool, tls: tuple[str, str] | None) -> None:
        """Open the socket.

        Args:
            host: address to bind to.
            port: 0: a free one.
            is_shared: with other gateways of this machine.
            tls: files of a certificate and its key.

        Raises:
            EnvironmentFaultError: somebody else has the port.
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
                bound = server.add_insecure_port(where)
            else:
                certificate, key = (Path(name).read_bytes() for name in tls)
                bound = server.add_secure_port(where, grpc.ssl_server_credentials([(key, certificate)]))
        except RuntimeError as error:
            reason = f"{where} cannot be listened on. Choose another port with --grpc-port."
            raise EnvironmentFaultError(reason) from error
        await server.start()
        self._server, self.address = server, (host, bound)

    async def close(self, grace_s: float = 0.0) -> None:
        """Take no new calls, and end those under way after so many seconds."""
        server, self._server, self.address = self._server, None, None
        if server is not None:
            await server.stop(grace_s)

    def _handlers(self) -> list[Any]:
        # To us every call is a stream: only of streams is the metadata seen before the message.
        methods = {"ModelInfer": grpc.stream_unary_rpc_method_handler(self._infer, None, _serialize)}
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream, None, _serialize)
        for name, call in COLD.items():
            answer = self._cold(call, message(f"inference.{name}Request"))
            methods[name] = grpc.stream_unary_rpc_method_handler(answer, None, _serialize)
        health = {"Check": grpc.stream_unary_rpc_method_handler(self._check, None, _serialize)}
        return [
            grpc.method_handlers_generic_handler(SERVICE, methods),
            grpc.method_handlers_generic_handler(HEALTH, health),
        ]

    # --- calls ----------------------------------------------------------------------------------------------------

    async def _infer(self, requests: AsyncIterator[bytes], context: Context) -> Message:
        try:
            headers = await self._admitted(context)
            data = await _only(requests)
            return await self._answer(data, headers, context)
        except FailedCallError as error:
            return await _abort(context, error)

    async def _stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Answer the requests of a stream in the order in which they end; so many at once as are taken pipelined."""
        answer = message("inference.ModelStreamInferResponse")
        room, writing = asyncio.Semaphore(MOST_PIPELINED), asyncio.Lock()

        async def one(data: bytes) -> None:
            try:
                found = answer(infer_response=await self._answer(data, dict(headers), context))
            except FailedCallError as error:
                found = answer(error_message=error.reason)
                found.infer_response.id = error.call_id
            async with writing:
                await context.write(found)
            room.release()

        try:
            headers = await self._admitted(context)
        except FailedCallError as error:
            await _abort(context, error)
        async with asyncio.TaskGroup() as tasks:
            async for data in requests:
                tasks.create_task(one(data))
                await room.acquire()

    def _cold(self, call: Cold, request: Message) -> Callable[[AsyncIterator[bytes], Context], Awaitable[Message]]:
        async def answer(requests: AsyncIterator[bytes], context: Context) -> Message:
            try:
                headers = headers_of(context.invocation_metadata())
                found = request.FromString((await _only(requests))[:MOST_DESCRIBED_BYTES])
                return cold_answer(call, await self._asked(cold_head(call, found, headers), b"", context))
            except FailedCallError as error:
                if call.answer.endswith("ReadyResponse") and error.code is grpc.StatusCode.UNAVAILABLE:
                    return message(f"inference.{call.answer}")(ready=False)
                return await _abort(context, error)

        return answer

    async def _check(self, requests: AsyncIterator[bytes], context: Context) -> Message:
        """Answer gRPC's own health check: as load balancers do, without a key."""
        asked = message("grpc.health.v1.HealthCheckRequest").FromString(await _only(requests))
        answer = message("grpc.health.v1.HealthCheckResponse")
        if asked.service not in ("", SERVICE):
            return await _abort(context, FailedCallError(404, f"no service '{asked.service}' is here."))
        try:
            await self._asked(Head(b"GET", b"/v2/health/ready", {}), b"", context)
        except FailedCallError:
            return answer(status="NOT_SERVING")
        return answer(status="SERVING")

    # --- what they have in common -----------------------------------------------------------------------------------

    async def _admitted(self, context: Context) -> Headers:
        """Return what a call's metadata says.

        Raises:
            FailedCallError: nobody who says so may ask.
        """
        headers = headers_of(context.invocation_metadata())
        refusal = self._service.refusal(
            WholeExchange(self._known(Head(b"GET", b"/v2", headers)), b"", _now_ms(), _peer(context))
        )
        if refusal is not None:
            await asyncio.sleep(refusal.after_s)
            raise FailedCallError(refusal.status, refusal.message, refusal.lines())
        return headers

    def _known(self, head: Head) -> Head:
        """Return the head that said the same before: where it leads is found once."""
        key = (head.url, *head.headers.items())
        found = self._heads.get(key)
        if found is None:
            if len(self._heads) >= KEPT_HEADS:
                self._heads.clear()
            found = self._heads[key] = head
        return found

    async def _answer(self, data: bytes, headers: Headers, context: Context) -> Message:
        """Return the answer to a `ModelInferRequest`; raises `FailedCallError`."""
        arrived_ms, asked = _now_ms(), None
        self._unfinished_bytes += len(data)
        try:
            if self._unfinished_bytes > self._limits.unfinished_bytes:
                raise FailedCallError(429, "too many messages are unanswered. Retry in a second.")
            remaining_s = context.time_remaining()
            remaining_ms = None if remaining_s is None else 1000.0 * remaining_s

            def read() -> tuple[Message, Head, bytes]:
                asked = infer_request(data)
                slo_ms = self._service.slo_ms(asked.model_name)
                return asked, *to_http(asked, headers, remaining_ms, slo_ms)

            is_long = len(data) > MOST_DESCRIBED_BYTES
            asked, head, body = await asyncio.to_thread(read) if is_long else read()
            exchange = WholeExchange(self._known(head), body, arrived_ms, _peer(context))
            return to_answer(asked, *await self._responded(exchange))
        except HttpError as error:
            raise FailedCallError(error.status, error.message, error.lines()) from None
        except FailedCallError as error:
            error.call_id = "" if asked is None else asked.id
            raise
        finally:
            self._unfinished_bytes -= len(data)

    async def _asked(self, head: Head, body: bytes, context: Context) -> bytes:
        exchange = WholeExchange(head, body, _now_ms(), _peer(context))
        refusal = self._service.refusal(exchange)
        if refusal is not None:
            raise FailedCallError(refusal.status, refusal.message, refusal.lines())
        return (await self._responded(exchange))[1]

    async def _responded(self, exchange: WholeExchange) -> tuple[bytes, bytes]:
        """Let the service answer; returns raw header lines and payload. Raises `FailedCallError` for an error."""
        try:
            self._service.handle(exchange)
        except Exception as error:
            crash(exchange, error)
        status, lines, payload = await exchange.response()
        if status != 200:
            raise FailedCallError(status, orjson.loads(payload)["error"], lines)
        return lines, payload


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
    """Return where a client is: `ipv4:127.0.0.1:1234` says so with its port."""
    address: str = context.peer().partition(":")[2].rpartition(":")[0]
    return address


def _now_ms() -> float:
    return time.monotonic() * 1000.0
