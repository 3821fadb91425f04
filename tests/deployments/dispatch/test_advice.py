import logging

import pytest

from tenuto.batching.core.autoscale import AutoscaleOptions
from tenuto.deployments.dispatch.advice import LiveAdvice
from tests.instruments.fake_gpulet import make_plan

OPTIONS = AutoscaleOptions(window_s=10.0, settle_windows=1)
PLAN = make_plan(*((f"g{n}", ("m",)) for n in range(2)))  # two gpu-lets of one GPU


def run(advice: LiveAdvice, seconds: range, *, good: int, bad: int, busy_ms: float) -> None:
    for second in seconds:
        advice.ended(good=good, bad=bad)
        for gpulet in ("g0", "g1"):
            advice.executed(gpulet, busy_ms)
        advice.tick(second + 1.0)


def test_no_advice_before_a_window_has_passed() -> None:
    advice = LiveAdvice(OPTIONS)
    advice.follow(PLAN, 0.0)
    run(advice, range(9), good=1, bad=0, busy_ms=0.0)
    assert advice.status(9.0) is None


def test_lost_requests_ask_for_gpus_and_the_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    advice = LiveAdvice(OPTIONS)
    advice.follow(PLAN, 0.0)
    run(advice, range(30), good=50, bad=50, busy_ms=500.0)
    told = advice.status(30.0)
    assert told is not None
    assert (told.gpus, told.delta_gpus, told.bad_rate, told.requests) == (1, 1, 0.5, 1000)
    assert told.idle_fraction == pytest.approx(0.0)  # two gpu-lets busy half the time each: at most the whole GPU
    assert (told.window_s, told.unchanged_s) == (10.0, 20.0)
    assert [r.getMessage() for r in caplog.records] == [f"autoscale advice: {told}"]
    assert str(told).startswith("add 1 to 1 GPUs (50.0% of 1000 requests bad")


def test_a_plan_with_other_gpus_starts_over() -> None:
    advice = LiveAdvice(OPTIONS)
    advice.follow(PLAN, 0.0)
    run(advice, range(10), good=1, bad=1, busy_ms=0.0)
    one = PLAN.to_data()
    one["gpus"].append({"id": "h", "type": "v100"})
    one["gpulets"][1]["gpu"] = "h"
    advice.follow(type(PLAN).from_data(one), 12.0)
    assert advice.status(12.0) is None
    run(advice, range(12, 22), good=1, bad=0, busy_ms=100.0)
    told = advice.status(22.0)
    assert told is not None
    assert (told.gpus, told.delta_gpus) == (2, -1)
    assert str(told).startswith("release 1 of 2 GPUs")
