"""What comes through Serve's proxies, and what FastAPI answers for our own socket."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from tenuto.deployments.entry.asgi import WholeExchange, answer_with, read_request, send_response
from tenuto.deployments.entry.exchange import Head, HttpError

LIMIT = 1 << 20
Receive = Callable[[], Awaitable[dict[str, Any]]]


def receiving(*chunks: bytes, ends: bool = True) -> Receive:
    last = len(chunks) - 1
    messages = [
        {"type": "http.request", "body": chunk, "more_body": index < last or not ends}
        for index, chunk in enumerate(chunks)
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    return receive


def scope(**headers: str) -> dict[str, Any]:
    return {
        "method": "POST",
        "path": "/app/v2/x",
        "raw_path": b"/app/v2/x",
        "root_path": "/app",
        "query_string": b"a=1",
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
    }


async def test_a_request_is_read_without_the_prefix_of_its_application() -> None:
    head, body = await read_request(scope(x_slo_ms="5"), receiving(b"ab", b"cd", b"e"), LIMIT)
    assert (head.method, head.url, head.headers) == (b"POST", b"/v2/x?a=1", {b"x-slo-ms": b"5"})
    assert body == b"abcde"


@pytest.mark.parametrize(
    ("length", "chunks", "ends", "status"),
    [
        (str(LIMIT + 1), (b"",), True, 413),
        ("", (bytes(LIMIT), b"x"), True, 413),
        ("", (bytes(LIMIT + 1),), True, 413),
        ("", (b"x",), False, 400),
    ],
)
async def test_bodies_that_are_too_long_or_stop_are_refused(
    length: str, chunks: tuple[bytes, ...], ends: bool, status: int
) -> None:
    with pytest.raises(HttpError) as caught:
        await read_request(scope(content_length=length), receiving(*chunks, ends=ends), LIMIT)
    assert caught.value.status == status


async def test_an_application_answers_a_request_of_our_own_socket() -> None:
    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        message = await receive()
        body = message["body"] + scope["path"].encode() + scope["query_string"]
        await send_response(send, 201, b"x-a: 1\r\nx-b: 2\r\n", body)

    exchange = WholeExchange(Head(b"POST", b"/a%20b?c", {}), 0.0, b"body of ")
    await answer_with(app, exchange)
    assert await exchange.response() == (201, b"x-a: 1\r\nx-b: 2\r\n", b"body of /a bc")
