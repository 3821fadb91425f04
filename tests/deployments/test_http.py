import gzip
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tenuto.deployments.entry.http import HttpError, read_body, send_error

LIMIT = 1 << 20


def _receive(*chunks: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    last = len(chunks) - 1
    messages = [
        {"type": "http.request", "body": chunk, "more_body": index < last} for index, chunk in enumerate(chunks)
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    return receive


def _scope(**headers: str) -> dict[str, Any]:
    return {"headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]}


async def test_chunks_are_joined() -> None:
    assert await read_body(_scope(), _receive(b"ab", b"cd", b"e"), LIMIT) == b"abcde"


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_bodies_are_read(name: str, pack: Callable[[bytes], bytes]) -> None:
    assert await read_body(_scope(content_encoding=name), _receive(pack(b"x" * 1000)), LIMIT) == b"x" * 1000


async def _error(scope: dict[str, Any], *chunks: bytes) -> HttpError:
    with pytest.raises(HttpError) as caught:
        await read_body(scope, _receive(*chunks), LIMIT)
    return caught.value


async def test_bodies_over_the_limit_are_refused() -> None:
    assert (await _error(_scope(content_length=str(LIMIT + 1)), b"")).status == 413
    assert (await _error(_scope(), bytes(LIMIT), b"x")).status == 413
    assert (await _error(_scope(), bytes(LIMIT + 1))).status == 413
    bomb = gzip.compress(bytes(8 * LIMIT))
    assert len(bomb) < LIMIT
    assert (await _error(_scope(content_encoding="gzip"), bomb)).status == 413


async def test_damaged_and_unknown_encodings_are_refused() -> None:
    packed = gzip.compress(b"x" * 1000)
    assert "ends too early" in (await _error(_scope(content_encoding="gzip"), packed[:-4])).message
    assert "damaged" in (await _error(_scope(content_encoding="gzip"), b"nonsense")).message
    assert "not supported" in (await _error(_scope(content_encoding="br"), b"x")).message


async def test_errors_are_json_with_a_time_to_retry() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await send_error(send, HttpError(429, "busy", retry_after_s=0.2, details={"outcome": "rejected"}))
    assert sent[0]["status"] == 429
    assert (b"retry-after", b"1") in sent[0]["headers"]
    assert sent[1]["body"] == b'{"error":"busy","outcome":"rejected"}'
