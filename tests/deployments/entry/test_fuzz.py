"""Whatever a client sends, the gateway answers with a 4xx that says why, or does it: never 500, never silence.

TENUTO_FUZZ_CASES sets how many cases each test draws; the suite draws a sample.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.deployments.entry.test_gateway import PLAN, TENSOR, Bench
from tests.instruments.asking import PATIENCE_S

CASES = int(os.environ.get("TENUTO_FUZZ_CASES", "25"))
few = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=CASES < 1000,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# A model that is asked for with a deadline of its own may expire (504); nothing here is ever not ready (503).
EXPECTED = {200, 400, 403, 404, 405, 406, 408, 411, 413, 415, 422, 429, 431, 504}


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """A gateway on a loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> Bench:
        made = Bench()
        await made.start(PLAN)
        return made

    made = asyncio.run_coroutine_threadsafe(begin(), loop).result(PATIENCE_S)
    yield made
    asyncio.run_coroutine_threadsafe(made.close(), loop).result(PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def client(bench: Bench) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{bench.port}", timeout=PATIENCE_S) as made:
        yield made


def check(answer: httpx.Response) -> None:
    assert answer.status_code in EXPECTED, (answer.status_code, answer.text)
    if answer.status_code >= 400:
        assert answer.json()["error"]


# All that UTF-8 has. Hypothesis' own way to say so takes 2 s in a fresh clone.
letters = st.characters(exclude_categories=["Cs"])
absurd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(letters, max_size=20),
    st.just(10**400),
    st.just("9" * 5000),
    st.just(1e39),
    st.just(-1),
    st.just([]),
    st.just({}),
    st.just("\ud800"),
    st.just("ünïcödé"),
)
keys = st.text(letters, max_size=8)
anything = st.recursive(absurd, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A good request of which some parts were replaced by anything."""
    tensor = {**TENSOR}
    for key in draw(st.sets(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]), max_size=2)):
        tensor[key] = draw(anything)
    document: dict[str, Any] = {"inputs": [tensor] * draw(st.sampled_from([1, 1, 1, 0, 2]))}
    for key in draw(st.sets(st.sampled_from(["id", "parameters", "outputs", "inputs", "more"]), max_size=2)):
        document[key] = draw(anything)
    if draw(st.booleans()):
        names = ["slo_ms", "timeout", "priority", "binary_data_output", "sequence_id", "classification"]
        document["parameters"] = draw(st.dictionaries(st.sampled_from(names), absurd))
    return document


@few
@given(documents())
@example({"inputs": [{**TENSOR, "data": [1e39, 0]}]})
@example({"inputs": [TENSOR], "parameters": {"slo_ms": 10**400}})
@example({"inputs": [TENSOR], "parameters": {"slo_ms": 1e300}})
@example({"inputs": [TENSOR], "parameters": {"priority": 3}})
@example({"inputs": [{**TENSOR, "shape": [10**18, 2]}]})
@example({"inputs": [{**TENSOR, "data": [[[[[[1]]]]]]}]})
@example({"inputs": [TENSOR], "id": "\ud800"})
def test_documents(client: httpx.Client, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode("utf-8", "surrogatepass")
    check(client.post("/v2/models/m/infer", content=body))


@few
@given(st.binary(max_size=300), st.one_of(st.none(), st.integers(-5, 400), keys), st.booleans())
def test_bodies_and_binary_headers(client: httpx.Client, noise: bytes, length: Any, is_good: bool) -> None:
    head = json.dumps({"inputs": [{**TENSOR, "data": None, "parameters": {"binary_data_size": 8}}]}).encode()
    headers = {} if length is None else {"Inference-Header-Content-Length": str(length).encode("utf-8", "replace")}
    try:
        answer = client.post("/v2/models/m/infer", content=(head if is_good else b"") + noise, headers=headers)
    except (httpx.LocalProtocolError, UnicodeError):
        return  # the client itself refuses to send it
    check(answer)


header_values = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40)


headers = st.sampled_from(["X-SLO-Ms", "X-Request-Id", "X-Request-Start", "Content-Encoding", "Authorization"])


@few
@given(headers, header_values)
@example("X-SLO-Ms", "9" * 5000)
@example("X-SLO-Ms", "nan")
@example("X-SLO-Ms", "1e308")
@example("X-Request-Start", "t=" + "9" * 300)
def test_headers(client: httpx.Client, name: str, value: str) -> None:
    try:
        answer = client.post("/v2/models/m/infer", json={"inputs": [TENSOR]}, headers={name: value.encode("latin-1")})
    except httpx.LocalProtocolError:
        return
    check(answer)


@few
@given(st.binary(min_size=1, max_size=200))
@example(b"GET / HTTP/1.1\r\ncontent-length: " + b"9" * 400 + b"\r\n\r\n")
@example(b"POST /v2/models/m/infer HTTP/1.1\r\ncontent-length: 10\r\ncontent-length: 5\r\n\r\n0123456789")
@example(b"POST /v2/models/m/infer HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n")
@example(b"GET /v2/ HTTP/1.1\r\nhost: x\r\n\r\n")  # there is nothing behind the slash, and nowhere to be sent to
@example(b"\x16\x03\x01\x00\xa5\x01\x00\x00")  # the beginning of TLS
def test_bytes_that_are_no_request(bench: Bench, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", bench.port), timeout=PATIENCE_S) as connection:
        connection.sendall(noise + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    for line in answer.split(b"HTTP/1.1 ")[1:]:
        assert int(line[:3]) in EXPECTED, answer


def test_after_all_of_it_the_gateway_serves_and_holds_nothing(client: httpx.Client, bench: Bench) -> None:
    assert client.post("/v2/models/m/infer", json={"inputs": [TENSOR]}).status_code == 200
    assert bench.entry.server.status().unfinished_bytes == 0
    assert client.get("/status/queue").json() == {"m": 0, "n": 0}


@pytest.fixture(scope="module")
def operations(client: httpx.Client) -> list[Any]:
    """Everything that the OpenAPI document says can be asked."""
    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    return [found.ok() for found in schema.get_all_operations()]


@few
@given(st.data())
def test_requests_made_from_the_openapi_document(bench: Bench, operations: list[Any], data: st.DataObject) -> None:
    operation = data.draw(st.sampled_from(operations), label="operation")
    case = data.draw(operation.as_strategy(), label="case")
    answer = case.call(base_url=f"http://127.0.0.1:{bench.port}", timeout=PATIENCE_S)
    assert answer.status_code in EXPECTED, answer.text
