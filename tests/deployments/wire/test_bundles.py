"""What travels in bundles between gateways and dispatchers."""

import asyncio
import math

import pytest

from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.arena import Arena, MappedArenas
from tenuto.deployments.wire.bundles import (
    AnsweredRequest,
    Bundler,
    Places,
    pack_answers,
    read_parts,
    unpack_answers,
)
from tenuto.deployments.wire.tensors import InputPart, OutputTensor
from tenuto.outcome import Outcome


def test_answers_survive_the_wire() -> None:
    output = OutputTensor("y", "float32", (2,), memoryview(bytes(8)))
    answers = [
        AnsweredRequest(1, 5.0, Answer(Outcome.OK, [output], 4, "g", 1.0, 2.0, 3.0, True, start_ms=2.5)),
        AnsweredRequest(2, 0.0, Answer(Outcome.REJECTED, retry_after_s=0.5, reason="full")),
    ]
    message, buffers = pack_answers(answers)
    first, second = unpack_answers(message, memoryview(b"".join(buffers)))
    assert first == answers[0]
    assert (second.answer.outcome, second.answer.reason, second.answer.retry_after_s) == (Outcome.REJECTED, "full", 0.5)
    assert math.isnan(second.answer.start_ms)


@pytest.mark.parametrize("shares_memory", [True, False])
def test_tensors_are_named_by_place_where_the_receiver_can_map_it_and_copied_elsewhere(shares_memory: bool) -> None:
    arena = Arena(1 << 20)
    slot = arena.take(6)
    assert slot is not None
    slot.data[:] = b"shared"
    sent = [InputPart(b"abc"), InputPart(slot.data, "uint8", slot.arena, slot.offset), InputPart(b"", "float16")]
    places = Places(shares_memory=shares_memory)
    placed = [places.put(part) for part in sent]
    body = memoryview(b"".join(places.buffers) + b"rest")
    parts, rest = read_parts(placed, places.arenas, body, MappedArenas())
    assert [(bytes(part.data), part.dtype) for part in parts] == [(b"abc", ""), (b"shared", "uint8"), (b"", "float16")]
    assert bytes(rest) == b"rest"
    assert len(body) == 7 + (0 if shares_memory else 6)
    arena.close()


async def test_what_comes_in_one_turn_of_the_loop_leaves_in_one_bundle() -> None:
    sent: list[list[int]] = []
    bundler: Bundler[int] = Bundler(sent.append)
    for number in range(5):
        bundler.add(number)
    assert sent == []
    await asyncio.sleep(0)
    bundler.add(5)
    bundler.add(6, 1 << 30)
    assert sent == [[0, 1, 2, 3, 4], [5, 6]]  # a large one does not wait
    bundler.add(7)
    bundler.drop()
    await asyncio.sleep(0)
    assert len(sent) == 2
