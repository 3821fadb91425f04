"""HTTP requests and responses inside the gateway. They are the same whether they come over HTTP/1.1
(`http1`) or as calls of gRPC."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
import orjson

from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.arena import Slot
from tenuto.deployments.wire.tensors import Buffer
from tenuto.errors import InvalidInputError, new_incident
from tenuto.outcome import Outcome

logger = logging.getLogger("ray.serve")

JSON = b"content-type: application/json\r\n"
STATUS_LINES = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}

# What a client may say of a request's SLO: of all of it, of its first token, and of each further one. llm-d, whose
# gateway brought the names for tokens, writes them with its own name by now.
SLO_HEADERS = (b"x-slo-ms",)
TTFT_HEADERS = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
TPOT_HEADERS = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
PRIORITY_HEADER = b"x-priority"  # can only be `offline`
RETRY_AFTER = "retry_after_s"  # in a refusal's JSON
OPENAI = b"/v1/"  # what its URLs begin with
# How OpenAI's interface names an error: its type and its code.
_KINDS = {
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "model_not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    504: ("timeout_error", "deadline_exceeded"),
}
_MOST_MESSAGE = 4096  # limit: characters


class HttpError(Exception):
    """A request that ends in an error status; the message says what to do. `headers` are raw lines.

    `retry_after_s`: when to ask again; None where waiting does not help, or nobody knows how long.
    `after_s`: how long the client waits until it is told. `param`: the field of the body that is wrong, if one is.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        retry_after_s: float | None = None,
        headers: bytes = b"",
        details: Mapping[str, Any] | None = None,
        after_s: float = 0.0,
        param: str | None = None,
    ) -> None:
        if len(message) > _MOST_MESSAGE:  # it names what the client sent
            message = message[: _MOST_MESSAGE - 3] + "..."
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.headers = headers
        self.details = details or {}
        self.after_s = after_s
        self.param = param

    def __str__(self) -> str:
        return self.message

    def without_frames(self) -> HttpError:
        """Return the error without the frames in which it was raised, so that keeping it keeps nothing else alive."""
        self.__context__ = None
        return self.with_traceback(None)

    def lines(self) -> bytes:
        """Return the headers of its response as raw lines."""
        seconds = self.retry_after_s
        again = b"" if seconds is None else b"retry-after: %d\r\n" % max(1, math.ceil(seconds))
        return self.headers + JSON + again

    def payload(self, url: bytes = b"") -> bytes:
        """Return `{"error": …}`; in OpenAI's form when the client asked through that interface. It has `retry_after_s`,
        too, as the parts of a stream have no headers."""
        details = self.details if self.retry_after_s is None else {**self.details, RETRY_AFTER: self.retry_after_s}
        if not url.startswith(OPENAI):
            return orjson.dumps({"error": self.message, **details})
        kind, code = _KINDS.get(self.status, ("invalid_request_error" if self.status < 500 else "server_error", None))
        return orjson.dumps({**openai_error(self.message, kind, code, self.param), **details})


class BadRequestError(HttpError):
    """The client must change the request (400); the message says what."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


def openai_error(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(slots=True, eq=False)
class Head:
    """The head of a request. Clients send the same one again and again, so that heads are kept and read once.

    `headers` are by lower-case name. `is_old`: HTTP/1.0. `length` is that of the body, unless the body comes in chunks.
    `expects`: the client sends the body when it is asked for. `is_cached`: the same object stands for all requests with
    these bytes, which are few, so that the service may cache its route.
    """

    method: bytes
    url: bytes
    headers: dict[bytes, bytes]
    keep_alive: bool = True
    length: int = 0
    is_chunked: bool = False
    expects: bool = False
    is_old: bool = False
    is_cached: bool = False


class Exchange(msgspec.Struct, eq=False):
    """One HTTP request on its way to one response. `arrived_ms`: when its last bytes came, on the monotonic clock.

    A large body lies in `slot`, which the exchange releases.
    `on_left` is called when the client goes away before the end of the response.
    `patience_ms`: how long the client waits, counted from `arrived_ms`. `problem`: what is wrong with it, which is told
    where nothing is wrong with the path that it asks for. `key`: the name of the key that the client has shown.
    `has_proxy_time`: `arrived_ms` counts the time before this process.
    """

    head: Head
    arrived_ms: float
    body: Buffer = b""
    slot: Slot | None = None
    patience_ms: float = math.inf
    key: str = ""
    problem: HttpError | None = None
    on_left: Callable[[], object] | None = None
    has_proxy_time: bool = False

    @property
    def address(self) -> str:
        """Where the client is; "" when that is not known."""
        return ""

    def spend(self, samples: int) -> None:
        """Count the samples of the request as work of this turn of the loop."""

    def respond(self, status: int, headers: bytes, payload: Sequence[Buffer]) -> None:
        """Send the response; `headers` are raw lines. Only the first call counts. Nothing happens when the client is
        gone."""

    def begin(self, status: int, headers: bytes) -> None:
        """Send the head of a response whose body comes in parts: `send` each, then `end`."""

    def send(self, part: bytes) -> None:
        """Send a part of the body, which must not be empty. Nothing happens when the client is gone."""

    def end(self) -> None:
        """Note that the body is complete."""

    def leave(self) -> None:
        """Drop the request, because its client is gone."""
        left, self.on_left = self.on_left, None
        if left is not None:
            left()
        self.let_go()

    def let_go(self) -> None:
        """Give back the memory of the tensors. Whoever still reads it keeps it alive."""
        self.body = b""
        if self.slot is not None:
            self.slot.release()
            self.slot = None


def fail(exchange: Exchange, error: HttpError) -> None:
    """Respond with an error."""
    exchange.respond(error.status, error.lines(), [error.payload(exchange.head.url)])


def refuse(exchange: Exchange, error: BaseException) -> None:
    """Respond with what an error means for the client. An error that nobody expected goes to the log."""
    if isinstance(error, InvalidInputError):
        error = BadRequestError(str(error))
    fail(exchange, error if isinstance(error, HttpError) else unexpected(exchange.head.url, error))


def unexpected(url: bytes | str, error: BaseException) -> HttpError:
    """Log an error that nobody expected, and return what the client is told of it."""
    incident = new_incident()
    logger.error("a request to %r failed (%s)", url, incident, exc_info=error)
    return HttpError(500, f"internal error. The gateway's log says more under {incident}.")


def refusal_of(refused: Refused, headers: bytes = b"") -> HttpError:
    """Return the refusal of a request that the scheduling side did not execute."""
    status, details = refused.http_status, {"outcome": refused.outcome.word}
    return HttpError(status, refused.reason, retry_after_s=refused.retry_after_s, headers=headers, details=details)


def expired() -> HttpError:
    """Return the refusal of a request that can no longer be answered by its deadline."""
    details = {"outcome": Outcome.EXPIRED.word}
    return HttpError(504, "the deadline cannot be met. Raise the SLO.", retry_after_s=1.0, details=details)


def inflated(body: Buffer, encoding: bytes, limit_bytes: int) -> bytes:
    """Return what a compressed body was before it was compressed.

    Raises:
        HttpError: 413 when it inflates to more than the limit; 400 when it is damaged or its encoding is unknown.
    """
    if encoding not in (b"gzip", b"x-gzip", b"deflate"):
        raise HttpError(400, f"Content-Encoding {encoding!r} is not supported. Use gzip, deflate or none.")
    decoder = zlib.decompressobj(zlib.MAX_WBITS if encoding == b"deflate" else zlib.MAX_WBITS | 16)
    try:
        plain = decoder.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise HttpError(400, f"the compressed body is damaged: {error}. Send it whole.") from None
    if len(plain) > limit_bytes:
        raise too_large(limit_bytes)
    if not decoder.eof:
        raise HttpError(400, "the compressed body ends too early. Send it whole.")
    return plain


def too_large(limit_bytes: int) -> HttpError:
    """Return the refusal of a body that exceeds the limit."""
    limit = f"{limit_bytes >> 20} MiB" if limit_bytes >> 20 else f"{limit_bytes >> 10} KiB"
    return HttpError(413, f"the body exceeds the limit of {limit}. Send fewer samples per request.")
