import gzip
import zlib
from collections.abc import Callable

import pytest

from tenuto.deployments.entry.http.exchange import HttpError, inflated

LIMIT = 1 << 20


@pytest.mark.parametrize(("name", "pack"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_compressed_bodies_are_read(name: bytes, pack: Callable[[bytes], bytes]) -> None:
    assert inflated(pack(b"x" * 1000), name, LIMIT) == b"x" * 1000


@pytest.mark.parametrize(
    ("body", "encoding", "status", "message"),
    [
        (gzip.compress(bytes(8 * LIMIT)), b"gzip", 413, "the body exceeds the limit of 1 MiB"),
        (gzip.compress(b"x" * 1000)[:-4], b"gzip", 400, "ends too early"),
        (b"nonsense", b"gzip", 400, "damaged"),
        (b"x", b"br", 400, "not supported"),
    ],
    ids=["bomb", "cut", "nonsense", "unknown"],
)
def test_what_cannot_be_inflated_is_refused(body: bytes, encoding: bytes, status: int, message: str) -> None:
    with pytest.raises(HttpError, match=message) as caught:
        inflated(body, encoding, LIMIT)
    assert caught.value.status == status


def test_errors_are_json_with_a_time_to_retry() -> None:
    error = HttpError(429, "busy", retry_after_s=0.2, details={"outcome": "rejected"})
    assert b"retry-after: 1\r\n" in error.lines()
    assert error.payload() == b'{"error":"busy","outcome":"rejected","retry_after_s":0.2}'
    assert b"retry-after: 2\r\n" in HttpError(503, "busy", retry_after_s=1.2).lines()  # never too early
