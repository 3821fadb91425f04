"""Reading requests and writing responses over plain ASGI: bodies with a limit, errors with a reason and a cure."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

__all__ = ["HttpError", "Receive", "Scope", "Send", "header", "read_body", "send_error", "send_json", "send_response"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class HttpError(Exception):
    """A request that ends in an error status; the message says what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        retry_after_s: float | None = None,
        headers: Headers | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.headers = headers or []
        self.details = details or {}


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return a request header by lower-case name, or None."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Return the whole body.

    Raises:
        HttpError: 413 as soon as the body, or what it inflates to, is known to exceed `limit_bytes`; 400 for a damaged
            or unknown encoding.
    """
    announced = header(scope, b"content-length")
    too_large = HttpError(
        413, f"the body exceeds the limit of {limit_bytes >> 20} MiB. Send fewer samples per request."
    )
    if announced is not None and announced.isdigit() and int(announced) > limit_bytes:
        raise too_large
    encoding = header(scope, b"content-encoding")
    if encoding not in (None, b"identity", b"gzip", b"deflate"):
        raise HttpError(400, f"Content-Encoding {encoding!r} is not supported. Use gzip, deflate or none.")
    body = await _raw_body(receive, limit_bytes, too_large)
    return body if encoding in (None, b"identity") else _inflated(body, encoding == b"gzip", limit_bytes, too_large)


async def _raw_body(receive: Receive, limit_bytes: int, too_large: HttpError) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > limit_bytes:
            raise too_large
        return body
    chunks = [body]
    total = len(body)
    while message.get("more_body", False):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, "the connection closed within the body.")
        chunk = message.get("body", b"")
        total += len(chunk)
        if total > limit_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _inflated(body: bytes, is_gzip: bool, limit_bytes: int, too_large: HttpError) -> bytes:
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 16 if is_gzip else zlib.MAX_WBITS)
    try:
        plain = decoder.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise HttpError(400, f"the compressed body is damaged: {error}. Send it whole.") from None
    if len(plain) > limit_bytes:
        raise too_large
    if not decoder.eof:
        raise HttpError(400, "the compressed body ends too early. Send it whole.")
    return plain


async def send_response(send: Send, status: int, payload: bytes, headers: Headers) -> None:
    """Send a complete response."""
    headers.append((b"content-length", b"%d" % len(payload)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})


async def send_json(send: Send, status: int, document: Any, headers: Headers | None = None) -> None:
    """Send a JSON document."""
    await send_response(
        send, status, orjson.dumps(document), [*(headers or []), (b"content-type", b"application/json")]
    )


async def send_error(send: Send, error: HttpError) -> None:
    """Send an error as `{"error": …}`, with Retry-After where waiting helps."""
    headers = list(error.headers)
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
    await send_json(send, error.status, {"error": error.message, **error.details}, headers)
