"""gRPC's calls. A call hands what its metadata and messages ask for to the service that answers HTTP, and sends the
answer as messages.

`tenuto.deployments.entry.http.http2` brings the bytes, and `grpc_messages` reads the messages. All of this happens in
callbacks on the gateway's loop, without tasks. When the metadata alone says that a call cannot be answered, the call is
refused before its message is read.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import orjson
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from h2.utilities import HeaderValidationFlags, validate_headers

from tenuto.deployments.entry.http.body_memory import IncomingBody, unfinished
from tenuto.deployments.entry.http.bounded_cache import BoundedCache
from tenuto.deployments.entry.http.exchange import (
    PRIORITY_HEADER,
    RETRY_AFTER,
    SLO_HEADERS,
    TPOT_HEADERS,
    TTFT_HEADERS,
    Exchange,
    Head,
    HttpError,
    inflated,
    too_large,
    unexpected,
)
from tenuto.deployments.entry.http.framing import LONGEST_CACHED_HEAD_BYTES, MOST_CACHED_HEADS
from tenuto.deployments.entry.http.http2 import MOST_CALLS, CallStream, Headers, Http2Connection
from tenuto.deployments.entry.http.server import UNREAD_BYTES, HttpServer, many
from tenuto.deployments.entry.protocols.grpc_messages import (
    HEALTH,
    MANAGEMENT,
    POOL,
    SERVICE,
    InferReader,
    ManagementRoute,
    Message,
    management_answer,
    management_head,
    message,
    to_answer,
)
from tenuto.deployments.entry.protocols.oip_requests import DescribedRequest
from tenuto.deployments.wire.tensors import Buffer

_MESSAGE_S = 60.0  # limit: until a call's message has come, as for a body of HTTP
_MOST_STREAM_MESSAGES = 16  # limit: messages under way of one stream
_MOST_MANAGEMENT_BYTES = 1 << 16  # limit: of a message that carries no load, as of such a body of HTTP
_PREFIX = Struct(">BL")  # format: of a message: whether it is compressed, and its length
_HEAD = ((b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-accept-encoding", b"identity,gzip"))
_NO_GRPC = ((b":status", b"415"),)
_TRAILERS = ((b"grpc-status", b"0"),)
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_MS = {b"H": 3.6e6, b"M": 6e4, b"S": 1e3, b"m": 1.0, b"u": 1e-3, b"n": 1e-6}  # format: of `grpc-timeout`
# What of a call's metadata goes on as a header; whatever else is there says nothing to this server.
_FORWARDED = frozenset(
    (
        b"authorization",
        b"x-api-key",
        b"x-request-start",
        b"traceparent",
        PRIORITY_HEADER,
        *SLO_HEADERS,
        *TTFT_HEADERS,
        *TPOT_HEADERS,
    )
)
_READ = _FORWARDED | {b":method", b":path", b"content-type", b"grpc-timeout", b"grpc-encoding"}
# gRPC's codes, by the status of HTTP that means the same.
_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 406: 11, 413: 8, 429: 8, 501: 12, 503: 14, 504: 4}  # format
_INTERNAL = 13  # format: likewise
_LONGEST_REASON = 4096  # limit: bytes of a reason; clients of gRPC take 8 KiB of trailers, and lose longer ones
_PRINTABLE = "".join(map(chr, range(32, 127))).replace("%", "")
_OF_REQUEST = HeaderValidationFlags(is_client=False, is_trailer=False, is_response_header=False, is_push_promise=False)
_ENCODINGS = frozenset((b"identity", b"gzip"))
_ERROR = b'{"error"'  # with which the JSON of an error begins
_COMPRESSED = "is not taken. Use gzip, or send messages as they are (grpc-encoding: identity)."
_MOST_INFLATED_BYTES = 1 << 20  # limit: of a compressed message, inflated: 3 ms of the loop or less
_StreamInfer = message("inference.ModelStreamInferResponse")
_HealthRequest, _HealthResponse = (message(f"grpc.health.v1.HealthCheck{each}") for each in ("Request", "Response"))


class GrpcService(Protocol):
    """What answers calls: the service that answers HTTP."""

    def refusal(self, exchange: Exchange) -> HttpError | None:
        """See `HttpService`."""

    def handle(self, exchange: Exchange, described: DescribedRequest | None) -> None:
        """Answer a message. `described`: what it asks for, when its body is its tensors; else its body says what."""


class Metadata(NamedTuple):
    """What a call's metadata says. Clients send the same metadata again and again, so it is read once and has a
    `number`."""

    number: int
    path: bytes
    forwarded: dict[bytes, bytes]
    patience_ms: float
    problem: HttpError | None
    is_short: bool
    is_gzip: bool


def _read_metadata(number: int, headers: Headers) -> Metadata:
    """Raises `ProtocolError` when the headers are malformed."""
    fields: dict[bytes, bytes] = {}
    problem = None
    for name, value in validate_headers(headers, _OF_REQUEST):
        if name in _READ:
            if name in fields:
                problem = HttpError(400, f"the metadata says {name.decode()} twice. Say it once.")
            fields[name] = value
    timeout = _TIMEOUT.fullmatch(fields.get(b"grpc-timeout", b""))
    patience_ms = math.inf if timeout is None else int(timeout[1]) * _UNIT_MS[timeout[2]]
    encoding = fields.get(b"grpc-encoding", b"identity")
    if encoding not in _ENCODINGS:
        problem = HttpError(501, f"grpc-encoding {encoding.decode('latin-1')!r} {_COMPRESSED}")
    if fields.get(b":method") != b"POST" or not fields.get(b"content-type", b"").startswith(b"application/grpc"):
        problem = HttpError(415, "this port speaks gRPC. HTTP has a port of its own.")
    forwarded = {key: value for key, value in fields.items() if key in _FORWARDED}
    is_short = sum([len(name) + len(value) for name, value in headers]) <= LONGEST_CACHED_HEAD_BYTES
    return Metadata(number, fields.get(b":path", b""), forwarded, patience_ms, problem, is_short, encoding == b"gzip")


class GrpcExchange(Exchange, eq=False):
    """One message on its way to its answer."""

    id: str = ""
    held: IncomingBody | None = None  # the message that it came in
    _call: Call | None = None
    _unread: int = 0  # bytes of its parts since the client was not behind

    @property
    def address(self) -> str:
        return "" if self._call is None else self._call.connection.address

    def respond(self, status: int, headers: bytes, payload: Sequence[Buffer]) -> None:
        """Send the answer. Only the first call counts."""
        call = self._call
        if call is not None:
            self._end()
            try:
                call.tell(self, status, headers, payload)
            except Exception as error:
                call.fail(unexpected("a gRPC call", error))
            call.answered(self)

    def begin(self, status: int, headers: bytes) -> None:
        """Begin an answer in parts. Its head leaves with the first part."""
        del status, headers
        self.let_go()

    def send(self, part: bytes) -> None:
        """Send a part: each event of a generation becomes a message. A client that reads too slowly is given up."""
        call = self._call
        if call is not None:
            call.tell(self, 200, b"", [part.removeprefix(b"data: ")])
            self._unread = self._unread + len(part) if call.unsent else 0
            if self._unread > UNREAD_BYTES:
                call.connection.reset(call)

    def spend(self, samples: int) -> None:
        """Count samples beyond the first as work of this turn."""
        if self._call is not None:
            self._call.server.budget.spend_samples(samples)

    def end(self) -> None:
        """Note that the answer is complete."""
        call = self._call
        if call is not None:
            self._end()
            call.answered(self)

    def leave(self) -> None:
        left = self.on_left
        self._end()
        if left is not None:
            left()

    def _end(self) -> None:
        self.let_go()
        self._call = self.on_left = None

    def let_go(self) -> None:
        super().let_go()
        if self.held is not None:
            self.held.release()
            self.held = None


class Call(CallStream):
    """One call, with one message each way. Invariant: the call is answered once, or its client has left."""

    most_open = 1  # messages that are answered at once
    is_management = True  # a message carries no load, and may have no more bytes than one over HTTP
    gate: bytes | None = None  # the URL whose keys may ask; None: nobody needs a key

    def __init__(
        self, grpc: GrpcServer, connection: Http2Connection, number: int, metadata: Metadata, *, is_whole: bool
    ) -> None:
        """Take what the calls share, the connection, the call's number and metadata, and whether the client sends
        nothing more. A client without the right key is refused here."""
        super().__init__(connection, number, is_whole, _HEAD)
        self.grpc, self.server, self.metadata = grpc, connection.server, metadata
        self.is_over = False
        self._is_admitted = False  # the key's rate has let in a message that has not come yet
        self._key = ""  # its name
        self._waits = False  # its turn comes; or it has it
        self._ahead = 0  # bytes of `_came` that are counted
        self._open: set[GrpcExchange] = set()
        self._came = bytearray()  # not looked at yet
        self._body: IncomingBody | None = None  # a message that is not complete
        self._account = self.server.account(connection, "")
        self._is_compressed = False
        self._changed_s = time.monotonic()
        self._slowed: asyncio.TimerHandle | None = None  # the answer to a wrong key waits
        if self.gate is not None:
            self._admit(self.gate)

    def _admit(self, url: bytes) -> None:
        """Refuse a client that may not ask for this URL. A client with a wrong key is told late, as over HTTP."""
        exchange = self.exchange(self.grpc.head(self.metadata, b"GET", url))
        refusal = self.grpc.service.refusal(exchange)
        if refusal is None and exchange.key and not self.connection.show_key():
            refusal = many()
        self._account = self.server.account(self.connection, exchange.key)
        self._key, self._is_admitted = exchange.key, refusal is None
        if refusal is None:
            return
        self.server.count_refusal(refusal)
        if refusal.after_s:
            self.is_over = self.is_slowed = True
            loop = asyncio.get_running_loop()
            self._slowed = loop.call_later(refusal.after_s, self._end_slowed, refusal)
        else:
            self.fail(refusal)

    def _end_slowed(self, refusal: HttpError) -> None:
        """Refuse a client with a wrong key and end its connection, as over HTTP."""
        self._end(refusal)
        self.connection.end()

    # --- messages -----------------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Take bytes of the request."""
        if not self.is_over:
            self._came += data
            self._read()

    def ended(self) -> None:
        """Note that no more messages come."""
        self._read()

    def resume(self) -> None:
        """Read on, now that the others have had their turn."""
        self._waits = False
        self._read()

    def resume_sending(self) -> None:
        """Read on, now that the client has taken its answers."""
        self._read()

    def _read(self) -> None:
        """Take messages that have come, and count the bytes that have to wait."""
        if not self._waits:
            self._count_ahead(0)
            self._take_some()
        more = len(self._came) - self._ahead
        if more > 0 and not self._account.has_room(more):
            self.fail(unfinished())
        self._count_ahead(len(self._came))

    def _count_ahead(self, size: int) -> None:
        self._account.give(self._ahead - size)
        self._ahead = size

    def _take_some(self) -> None:
        """Take some messages in this turn; none while too many are open or the client does not take its answers."""
        self._waits = True
        came, before, budget, most, is_more = self._came, len(self._came), self.server.budget, MOST_CALLS, False
        try:
            while len(self._open) < self.most_open and not self.is_over and not self.is_behind:
                is_more = bool(came) and (not most or budget.left <= 0)
                if is_more or (body := self._fill(came)) is None:
                    break
                most -= 1
                try:
                    if self._is_compressed:
                        body = self._inflated(body)
                    self._take_whole(body)
                finally:
                    body.release()
        except HttpError as error:
            self.fail(error)
        except Exception as error:
            self.fail(unexpected("a gRPC call", error))
        if came and self._open and self.most_open == 1:
            self.fail(HttpError(400, "the call has more than one message. Send one."))
        self._waits = is_more and not self.is_over
        budget.spend(MOST_CALLS - most)
        if self._waits:
            (budget.wait if most and not self._open else budget.wait_behind)(self)  # who asks once goes first
        self.acknowledge(before - len(came))
        if self.has_ended and not self._open and not self._waits and not self.is_over:
            self.complete()

    def _take_whole(self, body: IncomingBody) -> None:
        try:
            self.take(body)
        except DecodeError:
            self.fail(HttpError(400, "the message is not one of this call. See open_inference.proto."))
        except HttpError as error:
            self.refuse("", error)

    def _fill(self, came: bytearray) -> IncomingBody | None:
        """Move bytes to the message that they belong to. Return the message when it is complete. Raises `HttpError`."""
        body = self._body
        if body is None:
            if len(came) < _PREFIX.size:
                return None
            body = self._body = self._expect(*_PREFIX.unpack_from(came))
            del came[: _PREFIX.size]
        size = min(len(came), body.missing)
        body.take(came[:size])
        del came[:size]
        if body.missing:
            return None
        self._body = None
        return body

    def _expect(self, is_compressed: int, size: int) -> IncomingBody:
        """Return a message that begins to come. Raises `HttpError` when it is not taken."""
        server = self.server
        self._changed_s = time.monotonic()
        if is_compressed and not self.metadata.is_gzip:
            raise HttpError(400, "a message is compressed, and grpc-encoding does not say how. Say gzip.")
        self._is_compressed = bool(is_compressed)
        if size > self._most_bytes():
            raise too_large(self._most_bytes())
        return IncomingBody(server.arena, self._account, size)

    def _inflated(self, body: IncomingBody) -> IncomingBody:
        """Return a message that came compressed; it counts with the bytes that it has now. Raises `HttpError`."""
        server = self.server
        data = inflated(body.data, b"gzip", self._most_bytes())
        plain = IncomingBody(server.arena, self._account, len(data))
        plain.take(data)
        server.budget.spend(0, len(data))
        body.release()
        return plain

    def _most_bytes(self) -> int:
        """Return how many bytes the message may have that comes, and how many when it is inflated."""
        most = _MOST_MANAGEMENT_BYTES if self.is_management else self.server.limits.most_body_bytes
        return min(most, _MOST_INFLATED_BYTES) if self._is_compressed else most

    def take(self, body: IncomingBody) -> None:
        """Take a message. Raises `HttpError` or `DecodeError`."""
        raise NotImplementedError

    def exchange(self, head: Head, body: Buffer = b"", id: str = "") -> GrpcExchange:
        """Return a message that asks for the same as an HTTP request with this head."""
        arrived_ms, patience_ms = self.connection.arrived_ms, self.metadata.patience_ms
        return GrpcExchange(head, arrived_ms, body, patience_ms=patience_ms, id=id, _call=self)

    def ask(self, exchange: GrpcExchange, body: IncomingBody, described: DescribedRequest | None = None) -> None:
        """Let the service answer a message, when the key's rate lets it in. Each message counts as a request."""
        refusal = None
        if self._is_admitted:
            self._is_admitted, exchange.key = False, self._key
        else:
            refusal = self.grpc.service.refusal(exchange)
        if refusal is not None:
            self.server.count_refusal(refusal)
            self.refuse(exchange.id, refusal)
            return
        body.hold()
        exchange.held = body
        if body.slot is not None and isinstance(exchange.body, memoryview):  # typed contents do not lie as they came
            body.slot.hold()
            exchange.slot = body.slot
        self._open.add(exchange)
        self.grpc.service.handle(exchange, described)

    # --- answering ----------------------------------------------------------------------------------------------

    def tell(self, exchange: GrpcExchange, status: int, lines: bytes, payload: Sequence[Buffer]) -> None:
        """Send the answer of the service, or a part of it. A part may be an error, too."""
        if status != 200 or bytes(payload[0][: len(_ERROR)]) == _ERROR:
            document = orjson.loads(payload[0])
            again = document.get(RETRY_AFTER)
            self.refuse(exchange.id, HttpError(status, document["error"], headers=lines, retry_after_s=again))
        else:
            self.send(self.answer(exchange, payload))

    def answer(self, exchange: GrpcExchange, payload: Sequence[Buffer]) -> Message:
        """Return the message of an answer."""
        raise NotImplementedError

    def answered(self, exchange: GrpcExchange) -> None:
        """Note that a message has its answer."""
        self._open.discard(exchange)
        if self._came or self.has_ended:
            self._read()

    def complete(self) -> None:
        """End the call: the client sends nothing more, and all its messages are answered."""
        self.fail(HttpError(400, "the call ended without a message. Send one."))

    def send(self, answer: Message) -> None:
        """Send a message. The only one ends the call."""
        if not self.is_over:
            self.is_over = self.most_open == 1
            data = answer.SerializeToString()
            self.write(b"%b%b" % (_PREFIX.pack(0, len(data)), data), _TRAILERS if self.is_over else None)
            if self.is_over:
                self.forget()

    def refuse(self, id: str, error: HttpError) -> None:
        """Tell the client that the message of this id is not answered."""
        del id
        self.fail(error)

    def fail(self, error: HttpError) -> None:
        """End the call with an error. The headers that HTTP would send become trailers."""
        if not self.is_over:
            self._end(error)

    def _end(self, error: HttpError) -> None:
        self.is_over = True
        if error.status == 415:
            self.head = _NO_GRPC
        code = _CODES.get(error.status, _INTERNAL)
        reason = quote(error.message, safe=_PRINTABLE)
        if len(reason) > _LONGEST_REASON:  # it names what the client sent
            at = reason.rfind("%", _LONGEST_REASON - 2, _LONGEST_REASON)  # amid a byte
            reason = reason[: at if at >= 0 else _LONGEST_REASON] + "..."
        trailers = [(b"grpc-status", b"%d" % code), (b"grpc-message", reason.encode())]
        for line in error.lines().splitlines():
            name, _, value = line.partition(b": ")
            if name != b"content-type":
                trailers.append((name, value))
        if error.retry_after_s is not None:  # what gRPC's own clients go by, where their policy says that they retry
            trailers.append((b"grpc-retry-pushback-ms", b"%d" % math.ceil(1000.0 * error.retry_after_s)))
        self.write(b"", tuple(dict(trailers).items()))
        self.forget()

    def left(self) -> None:
        """Drop everything, because the client has left."""
        self.is_over = True
        if self._slowed is not None:
            self._slowed.cancel()
        self.forget()

    def forget(self) -> None:
        """Drop the requests of this call and the rest of a message, because nobody waits for them."""
        if self._body is not None:
            self._body.release()
            self._body = None
        self._came.clear()
        self._count_ahead(0)
        while self._open:
            self._open.pop().leave()

    def check_time(self, now_s: float) -> None:
        """Give up a client whose message does not come."""
        is_late = self._body is not None or (self.most_open == 1 and not self._open)  # a stream may pause between
        if is_late and not self.is_over and now_s - self._changed_s > _MESSAGE_S:
            self.fail(HttpError(504, f"no message came within {_MESSAGE_S:.0f} s. Send it at once."))

    def is_idle(self) -> bool:
        return not self._open and self._body is None and not self._came


class UnaryInferCall(Call):
    """`ModelInfer`."""

    generates = "generate"
    gate: bytes | None = b"/v2"
    is_management = False

    def take(self, body: IncomingBody) -> None:
        request, tensors = self.grpc.reader.read(body.data)
        described = request.described
        if request.problem is not None or described is not None:
            action = self.generates if request.generates else "infer"
            head = self.grpc.head(self.metadata, b"POST", f"/v2/models/{request.path}/{action}".encode())
            exchange = self.exchange(head, tensors, request.id)
            exchange.problem = request.problem
            if described is not None:
                described = described._replace(is_streamed=self.most_open > 1)
            self.ask(exchange, body, described)
            return
        url = f"/v2/models/{request.path}/{self.generates}" if request.generates else f"/predict/{request.path}"
        headers = self.metadata.forwarded
        if request.id:
            headers = {**headers, b"x-request-id": request.id.encode()}
        if request.slo_ms is not None and headers.keys().isdisjoint(SLO_HEADERS):
            headers = {**headers, SLO_HEADERS[0]: b"%.17g" % request.slo_ms}
        head = Head(b"POST", url.encode(), headers, length=len(request.body))
        self.ask(self.exchange(head, request.body, request.id), body)

    def answer(self, exchange: GrpcExchange, payload: Sequence[Buffer]) -> Message:
        return to_answer(exchange.id, payload)


class StreamedCall(UnaryInferCall):
    """`ModelStreamInfer`. Each request is answered as soon as its answer is ready. A generation is answered with a
    message for each piece of its text, and so is an application that streams."""

    most_open = _MOST_STREAM_MESSAGES
    generates = "generate_stream"

    def answer(self, exchange: GrpcExchange, payload: Sequence[Buffer]) -> Message:
        return _StreamInfer(infer_response=super().answer(exchange, payload))

    def refuse(self, id: str, error: HttpError) -> None:
        """Tell the client that a message is not answered, and go on with the next one."""
        answer = _StreamInfer(error_message=error.message)
        answer.infer_response.id = id
        if error.retry_after_s is not None:
            answer.infer_response.parameters[RETRY_AFTER].double_param = error.retry_after_s
        self.send(answer)

    def complete(self) -> None:
        self.is_over = True
        self.write(b"", _TRAILERS)


class ManagementCall(Call):
    """A call that carries no load. The route of HTTP that means the same answers it."""

    def __init__(self, *begun: Any, route: ManagementRoute, is_whole: bool) -> None:
        self._route = route
        # Which model is asked for stands in the message.
        self.gate = b"/v2" if "{model}" in route.path else route.path.encode()
        super().__init__(*begun, is_whole=is_whole)

    def take(self, body: IncomingBody) -> None:
        request = message(f"inference.{self._route.request}").FromString(bytes(body.data))
        self.ask(self.exchange(management_head(self._route, request, self.metadata.forwarded)), body)

    def tell(self, exchange: GrpcExchange, status: int, lines: bytes, payload: Sequence[Buffer]) -> None:
        if status == 503 and self._route.answer.endswith("ReadyResponse"):
            self.send(message(f"inference.{self._route.answer}")(ready=False))
        else:
            super().tell(exchange, status, lines, payload)

    def answer(self, exchange: GrpcExchange, payload: Sequence[Buffer]) -> Message:
        del exchange
        return management_answer(self._route, b"".join(payload))


class HealthCall(Call):
    """gRPC's own health check. It needs no key, because load balancers ask for it."""

    def take(self, body: IncomingBody) -> None:
        request = _HealthRequest.FromString(bytes(body.data))
        if request.service not in ("", SERVICE):
            raise HttpError(404, f"no service '{request.service}' is here.")
        self.ask(self.exchange(Head(b"GET", b"/v2/health/ready", {})), body)

    def tell(self, exchange: GrpcExchange, status: int, lines: bytes, payload: Sequence[Buffer]) -> None:
        del exchange, lines, payload
        self.send(_HealthResponse(status="SERVING" if status == 200 else "NOT_SERVING"))


class ReflectionCall(StreamedCall):
    """Says which calls this server offers, for `grpcurl` and the like."""

    gate = None
    is_management = True

    def take(self, body: IncomingBody) -> None:
        request = ServerReflectionRequest.FromString(bytes(body.data))
        for answer in self.grpc.reflection.ServerReflectionInfo(iter((request,)), None):
            self.send(answer)


class GrpcServer:
    """What all calls of a gateway share."""

    def __init__(
        self, service: GrpcService, takes_bytes: Callable[[str, str], bool] = lambda _model, _version: False
    ) -> None:
        """Take the service that answers; `takes_bytes`: see `InferReader`."""
        self.service = service
        self.reader = InferReader(takes_bytes)
        self.reflection = ReflectionServicer((SERVICE, HEALTH, REFLECTION), POOL)
        self._known: BoundedCache[Headers, Metadata] = BoundedCache(MOST_CACHED_HEADS)
        # By metadata, method and URL.
        self._heads: BoundedCache[tuple[int, bytes, bytes], Head] = BoundedCache(MOST_CACHED_HEADS)
        self._numbers = itertools.count()
        named: dict[str, Callable[..., Call]] = {
            f"{SERVICE}/ModelInfer": UnaryInferCall,
            f"{SERVICE}/ModelStreamInfer": StreamedCall,
            f"{HEALTH}/Check": HealthCall,
            f"{REFLECTION}/ServerReflectionInfo": ReflectionCall,
            **{f"{SERVICE}/{name}": partial(ManagementCall, route=route) for name, route in MANAGEMENT.items()},
        }
        self._calls = {f"/{name}".encode(): made for name, made in named.items()}

    def connection(self, server: HttpServer) -> Http2Connection:
        """Return what serves a new client."""
        return Http2Connection(server, self._begin)

    def head(self, metadata: Metadata, method: bytes, url: bytes) -> Head:
        """Return the head of a request. The same URL gets the same head, so its route is looked up once."""
        key = metadata.number, method, url
        head = self._heads.get(key)
        if head is None:
            head = Head(method, url, metadata.forwarded, is_cached=metadata.is_short)
            if metadata.is_short:
                self._heads.add(key, head)
        return head

    def _begin(self, connection: Http2Connection, number: int, headers: Headers, is_whole: bool) -> None:
        """Begin a call. Raises `ProtocolError` when its headers are malformed."""
        metadata = self._known.get(headers)
        if metadata is None:
            metadata = _read_metadata(next(self._numbers), headers)
            if metadata.is_short:
                self._known.add(headers, metadata)
        made = self._calls.get(metadata.path) if metadata.problem is None else None
        call = (made or Call)(self, connection, number, metadata, is_whole=is_whole)
        if made is None:
            reason = f"there is no call {metadata.path.decode('latin-1')}. See open_inference.proto."
            call.fail(metadata.problem or HttpError(501, reason))
