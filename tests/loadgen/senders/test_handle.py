"""Load through the Python handle: the bodies of HTTP become tensors once, outcomes become HTTP's statuses."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import numpy as np
import pytest

from tenuto.deployments.entry.service.planned_model import ModelInterface
from tenuto.deployments.entry.service.python_handle import TenutoHandle
from tenuto.deployments.wire.answers import Answer
from tenuto.errors import EnvironmentFaultError, UnavailableError
from tenuto.loadgen.sender import Body, Reply
from tenuto.loadgen.senders.handle_sender import HandleSender
from tenuto.loadgen.senders.http_sender import HttpSender
from tenuto.loadgen.senders.make_sender import make_sender
from tenuto.outcome import Outcome
from tests.instruments.fake_gpulet import SIGNATURE

VALUES = np.array([[1.0, 2.0]], np.float32)


class FakeHandle:
    """Answers each request with the next of the given answers; None: never."""

    def __init__(self, *answers: Answer | None) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, bytes, float | None, str]] = []
        self.is_closed = False

    def interface(self, model: str, version: str | None = None) -> ModelInterface:
        assert version is None
        if model != "m":
            raise UnavailableError(f"no gpu-let of '{model}' is ready")
        return ModelInterface.of(SIGNATURE)

    def submit(
        self,
        model: str,
        parts: list[Any],
        slo_ms: float | None,
        request_id: str,
        version: str | None,
        sizes: tuple[int, ...],
    ) -> asyncio.Future[Answer]:
        assert version is None
        assert sizes == ()
        self.asked.append((model, b"".join(bytes(part) for part in parts), slo_ms, request_id))
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        answer = self.answers.pop(0)
        if answer is not None:
            future.set_result(answer)
        return future

    async def close(self) -> None:
        self.is_closed = True


def binary() -> Body:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": VALUES.nbytes}}
    head = json.dumps({"inputs": [tensor]}).encode()
    return Body(head + VALUES.tobytes(), len(head))


async def test_outcomes_times_and_ids_are_those_of_http() -> None:
    answers = [Answer(Outcome.OK, [], 4, "g/a", 2.0, 1.0, 5.0)]
    answers += [Answer(outcome, reason="no luck") for outcome in (Outcome.EXPIRED, Outcome.REJECTED, Outcome.FAILED)]
    handle = FakeHandle(*answers, None)
    sender = HandleSender(cast(TenutoHandle, handle))
    replies: dict[int, Reply] = {}
    await sender.open(1, replies.__setitem__)
    prepared = sender.prepare("m", binary(), 70.0)
    for token in range(5):
        sender.send(prepared, f"run-{token}", token)
    await asyncio.sleep(0)

    assert [replies[token].status for token in range(4)] == [200, 504, 429, 503]
    assert replies[0] == Reply(200, 2.0, 1.0, 5.0, 4, "g/a", "")
    assert replies[1].error == "expired: no luck"
    assert handle.asked[3] == ("m", VALUES.tobytes(), 70.0, "run-3")
    sender.close()
    await asyncio.sleep(0)
    assert handle.is_closed
    assert 4 not in replies


async def test_json_bodies_carry_the_same_values() -> None:
    handle = FakeHandle(None)
    sender = HandleSender(cast(TenutoHandle, handle))
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [[1, 2]]}]}).encode()
    sender.send(sender.prepare("m", Body(body)), "r", 0)

    assert handle.asked == [("m", VALUES.tobytes(), None, "r")]


@pytest.mark.parametrize(("model", "body"), [("away", b"{}"), ("m", b"{}"), ("m", b"no json")])
def test_what_cannot_be_asked_is_said_before_the_run(model: str, body: bytes) -> None:
    with pytest.raises(EnvironmentFaultError, match=f"'{model}' cannot be asked over the handle"):
        HandleSender(cast(TenutoHandle, FakeHandle())).prepare(model, Body(body))


def test_the_way_chooses_the_sender() -> None:
    assert isinstance(make_sender("http", "http://127.0.0.1:1"), HttpSender)
    assert isinstance(make_sender("handle", ""), HandleSender)
