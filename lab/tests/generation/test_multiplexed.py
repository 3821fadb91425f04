"""Language models that share GPUs in virtual time: what jobs take alone and beside each other, and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenuto_lab.generation.multiplexed import Model, Request, Unit, run
from tenuto_lab.generation.step_times import Curve, StepTimes

TIMES = StepTimes(
    prefill=Curve(((32, 10.0, 0.0), (1032, 110.0, 100.0))),
    decode=Curve(((1, 10.0, 2.0), (101, 20.0, 12.0)), (0.001, 0.0)),
)


def model(name: str = "a", prefill: float = 100.0, decode: float = 100.0, **more: float) -> Model:
    return Model(name, TIMES, 1.0, prefill, decode, **more)  # type: ignore[arg-type]


def request(name: str = "a", at_ms: float = 0.0, prompt: int = 32, output: int = 4) -> Request:
    return Request(name, at_ms, prompt, output)


def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    lone = request(at_ms=5.0)
    assert run(Unit((model(),), 1000.0), [lone]) == 3
    assert lone.first_ms == pytest.approx(15.0)
    steps = sum(TIMES.decode_ms(1, 33 + i, 100.0) for i in range(3))
    assert lone.end_ms == pytest.approx(15.0 + steps)


def test_host_time_passes_before_each_job() -> None:
    lone = request()
    run(Unit((model(host_ms=3.0, host_ms_per_sequence=1.0),), 1000.0), [lone])
    assert lone.first_ms == pytest.approx(14.0)
    assert lone.end_ms == pytest.approx(14.0 + 12.0 + sum(TIMES.decode_ms(1, 33 + i, 100.0) for i in range(3)))


def test_two_models_that_read_share_the_bandwidth() -> None:
    pair = [request("a", output=40), request("b", output=40)]
    run(Unit((model("a", 50, 50), model("b", 50, 50)), 1000.0), pair)
    alone = [request("a", output=40)]
    run(Unit((model("a", 50, 50),), 1000.0), alone)
    reading = 2 * sum(TIMES.decode_ms(1, 33 + i, 100.0) for i in range(39))
    ended = max(r.end_ms or 0.0 for r in pair)
    assert ended >= reading  # together they read no faster than the memory allows
    assert (alone[0].end_ms or 0.0) < ended < 2 * (alone[0].end_ms or 0.0)  # and yet faster than in turns


def test_one_at_a_time_is_in_turns() -> None:
    unit = Unit((model("a"), model("b")), 1000.0, alone=True)
    pair = [request("a", output=20), request("b", output=20)]
    run(unit, pair)
    lone = [request("a", output=20)]
    run(unit, lone)
    assert max(r.end_ms or 0.0 for r in pair) == pytest.approx(2 * (lone[0].end_ms or 0.0))


def test_memory_that_runs_out_puts_sequences_back_and_all_end() -> None:
    many = [request(at_ms=i, prompt=30, output=60) for i in range(12)]
    tight = Unit((model(),), 300.0)
    run(tight, many)
    assert all(r.end_ms is not None and r.made <= r.output_tokens for r in many)
    roomy = [replace(r, first_ms=None, end_ms=None, made=0) for r in many]
    run(Unit((model(),), 3000.0), roomy)
    assert max(r.end_ms or 0.0 for r in roomy) < max(r.end_ms or 0.0 for r in many)


def test_a_refused_request_takes_nothing() -> None:
    pair = [request(), request(at_ms=1.0)]
    run(Unit((model(),), 1000.0), pair, admit=lambda asked, now_ms: asked is pair[0])
    assert pair[0].end_ms is not None
    assert pair[1].first_ms is None
    assert pair[1].end_ms is None
