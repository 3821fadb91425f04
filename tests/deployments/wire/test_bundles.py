"""What travels in bundles between gateways and dispatchers."""

import asyncio
import math

import pytest

from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.arena import Arena, MappedArenas
from tenuto.deployments.wire.bundles import AnsweredRequest, Bundler, Places, pack_answers, read_parts, unpack_answers
from tenuto.deployments.wire.messages import Answers, decode, encode
from tenuto.deployments.wire.tensors import InputPart, RowOutput
from tenuto.outcome import Outcome


def test_answers_survive_the_wire() -> None:
    """Batches, of one of which only some rows are this gateway's and of one they are not in order, and refusals."""
    outputs = [RowOutput("y", "float32", (2,), 8), RowOutput("z", "uint8", (), 1)]

    def ran(gpulet: str, rows: int) -> Executed:
        data = [memoryview(bytes(range(8 * rows))), memoryview(bytes(range(100, 100 + rows)))]
        return Executed(9, gpulet, True, 1.0, math.nan, 2.0, 3.0, rows, outputs, data)

    whole, parts, mixed, full = ran("a", 2), ran("b", 4), ran("d", 4), Refused(Outcome.REJECTED, "full", 0.5, "c")
    answers = [
        AnsweredRequest(1, whole, 0),
        AnsweredRequest(2, whole, 1),
        AnsweredRequest(3, full),
        AnsweredRequest(4, parts, 1),
        AnsweredRequest(5, parts, 3),
        AnsweredRequest(6, full),
        *(AnsweredRequest(7 + number, mixed, row) for number, row in enumerate((0, 2, 1, 3))),
    ]
    message, buffers = pack_answers(answers, 7.0)
    again = decode(encode(message))
    assert isinstance(again, Answers)
    assert again.sent_at_ms == 7.0
    assert len(again.executed) == 3
    found = {each.number: each for each in unpack_answers(again, memoryview(b"".join(buffers)), 10.0)}
    assert set(found) == {each.number for each in answers}
    for number, end, row in answers:
        got = found[number].end
        if isinstance(end, Refused):
            assert got == end
            continue
        assert isinstance(got, Executed)
        assert got.tensors(found[number].row) == end.tensors(row)
        assert (got.batch_size, got.gpulet, got.emulated, got.sent_ms) == (9, end.gpulet, True, 11.0)
        assert (got.gpulet_queue_ms, got.execution_ms) == (2.0, 3.0)
        assert math.isnan(got.started_ms)


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
