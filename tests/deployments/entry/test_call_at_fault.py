"""What is wrong with one call of gRPC ends this call alone: others on its connection, which may be those of other
clients behind a proxy, are answered, before and after it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import pytest

pytest.importorskip("grpc")
pytest.importorskip("h2")
pytest.importorskip("hpack")
pytest.importorskip("tritonclient.grpc.aio")
messages = pytest.importorskip("tenuto.deployments.entry.protocols.grpc_messages")

from tests.instruments.http2_client import INFER, WINDOW_UPDATE, Http2Client, message  # noqa: E402
from tests.instruments.live import PATIENCE_S  # noqa: E402
from tests.instruments.served_grpc import Served, served  # noqa: E402

__all__ = ["served"]  # the fixture

STREAM = "inference.GRPCInferenceService/ModelStreamInfer"
Fault = Callable[[Http2Client], int]


def asked() -> bytes:
    made = messages.InferRequest(model_name="m", raw_input_contents=[bytes(8)])
    made.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    return message(made.SerializeToString())


def whole(*metadata: tuple[str, str]) -> Fault:
    """A call with such metadata."""

    def send(client: Http2Client) -> int:
        stream = client.begin(INFER, *metadata)
        client.data(stream, asked(), is_last=True)
        return stream

    return send


def begun(*then: Callable[[Http2Client, int], object], path: str = INFER) -> Fault:
    """A call that goes on in this way."""

    def send(client: Http2Client) -> int:
        stream = client.begin(path)
        for each in then:
            each(client, stream)
        return stream

    return send


def widened(by: int) -> Callable[[Http2Client, int], object]:
    return lambda client, stream: client.frame(WINDOW_UPDATE, 0, stream, struct.pack(">L", by))


FAULTS: dict[str, Fault] = {
    "metadata of 20 KiB": whole(("more", "x" * 20_000)),
    "metadata of 40 KiB, in many fields": whole(*((f"more-{n}", "x" * 100) for n in range(300))),
    "metadata of 60 KiB": whole(*((f"more-{n}", "x" * 6000) for n in range(10))),
    "metadata of 20 KiB, amid which it is whole": lambda client: client.begin(
        INFER, ("more", "x" * 20_000), is_whole=True
    ),
    "trailers of 20 KiB": begun(lambda client, stream: client.trailers(stream, [("more", "x" * 20_000)])),
    "a name in capitals": whole(("More", "x")),
    "a field of HTTP/1.1": whole(("connection", "close")),
    "trailers with a path": begun(lambda client, stream: client.trailers(stream, [(":path", "/")])),
    "a window that is too large": begun(widened((1 << 31) - 1)),
    "data behind its end": begun(
        lambda client, stream: client.data(stream, asked(), is_last=True),
        lambda client, stream: client.data(stream, b"more"),
    ),
}
# What the library takes for a fault of the connection, as RFC 9113 (5.4) lets it.
ENDS_ALL: dict[str, Fault] = {
    "trailers that are not the end": begun(
        lambda client, stream: client.trailers(stream, [("more", "x")], is_last=False)
    ),
    "a length that is short": whole(("content-length", "3")),
    "a length that is long": whole(("content-length", "3000")),
    "a length that is none": whole(("content-length", "x")),
    "more than its window": begun(
        *[lambda client, stream: client.data(stream, asked())] * 20,  # more than are taken before there are answers
        lambda client, stream: client.data(stream, bytes(3 << 20)),
        path=STREAM,
    ),
    "a window that does not grow": begun(widened(0)),
}


async def test_only_the_call_at_fault_ends(served: Served) -> None:
    client = await Http2Client.connect(served.grpc_port)
    wrong = {}
    async with asyncio.timeout(PATIENCE_S):
        for name, fault in FAULTS.items():
            served.gpulet.hold = True
            before = whole(("before", name))(client)
            stream = fault(client)
            after = whole(("after", name), ("more-7", "x" * 100))(client)  # fields that the table has by now
            ends = {"at fault": await client.hear(stream)}
            served.gpulet.hold = False
            served.gpulet.release()
            ends |= {"before": await client.hear(before), "after": await client.hear(after)}
            at_fault = ends.pop("at fault")
            if at_fault in ("0", "lost") or at_fault.startswith("goaway") or set(ends.values()) != {"0"}:
                wrong[name] = at_fault, ends
            if client.is_lost:
                client = await Http2Client.connect(served.grpc_port)
    client.leave()
    assert wrong == {}


async def test_a_header_block_without_end_is_not_kept(served: Served) -> None:
    """Then nobody can say what the fields of later calls mean."""
    client = await Http2Client.connect(served.grpc_port)
    stream = client.begin(INFER, *((f"more-{n}", "x" * 10_000) for n in range(200)))
    async with asyncio.timeout(PATIENCE_S):
        assert (await client.hear(stream)).startswith(("goaway", "lost"))
    client.leave()


@pytest.mark.parametrize("name", ENDS_ALL)
async def test_what_breaks_the_protocol_of_a_call_ends_the_connection(served: Served, name: str) -> None:
    client = await Http2Client.connect(served.grpc_port)
    async with asyncio.timeout(PATIENCE_S):
        assert (await client.hear(ENDS_ALL[name](client))).startswith("goaway")
    client.leave()
