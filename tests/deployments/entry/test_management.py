"""What an application answers for our own socket."""

from collections.abc import MutableMapping, Sequence
from typing import Any

from tenuto.deployments.entry.http.exchange import Exchange, Head
from tenuto.deployments.entry.service.management import answer_with
from tenuto.deployments.wire.tensors import Buffer


async def test_an_application_answers_a_request_of_our_own_socket() -> None:
    answers: list[tuple[int, bytes, bytes]] = []

    class Kept(Exchange, eq=False):
        def respond(self, status: int, headers: bytes, payload: Sequence[Buffer]) -> None:
            answers.append((status, headers, b"".join(payload)))

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        message = await receive()
        body = message["body"] + scope["path"].encode() + scope["query_string"]
        headers = [(b"x-a", b"1"), (b"Content-Length", b"%d" % len(body)), (b"x-b", b"2")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    await answer_with(app, Kept(Head(b"POST", b"/a%20b?c", {}), 0.0, b"body of "))
    assert answers == [(201, b"x-a: 1\r\nx-b: 2\r\n", b"body of /a bc")]
