"""The core's time: the clock's, but no event of the core comes before a timer that was due earlier."""

from __future__ import annotations

import asyncio
import random

import pytest

from tenuto.deployments.dispatch.core_time import CoreTime
from tests.instruments.virtual_loop import VirtualLoop


def on_virtual_loop(scene) -> None:  # type: ignore[no-untyped-def]
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scene())


@pytest.mark.parametrize(("late_ms", "told_ms"), [(0.0, 10.0), (1.5, 10.0), (3.5, 13.5)])
def test_a_late_timer_is_told_the_moment_it_asked_for_if_requests_kept_time_for_that(
    late_ms: float, told_ms: float
) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        told: list[float] = []
        core = CoreTime(loop.time, told.append)
        core.patience_ms = 3.0
        loop.oversleep(lambda: late_ms / 1000.0)
        core.arm(10.0, 0.0)
        await asyncio.sleep(0.1)
        assert told == [pytest.approx(told_ms)]
        assert core.now_ms == pytest.approx(loop.time() * 1000.0)

    on_virtual_loop(scene)


def test_whatever_is_late_time_never_runs_backwards_nor_past_a_timer_that_is_due() -> None:
    async def scene() -> None:
        loop, rng = asyncio.get_running_loop(), random.Random(1)
        assert isinstance(loop, VirtualLoop)
        moments: list[float] = []
        due = [0.0]

        def look(now: float) -> None:
            moments.append(now)
            is_given_up = loop.time() * 1000.0 > due[0] + core.patience_ms
            assert now <= due[0] + 1e-6 or is_given_up

        def ring(now: float) -> None:
            look(now)
            due[0] = now + rng.uniform(0.1, 8.0)
            core.arm(due[0], now)

        core = CoreTime(loop.time, ring)
        loop.oversleep(lambda: rng.choice([0.0, 0.0003, 0.0015, 0.02]))
        ring(core.now_ms)
        for _ in range(500):
            await asyncio.sleep(rng.uniform(0.0, 0.004))
            look(core.now_ms)
        assert moments == sorted(moments)
        core.close()

    on_virtual_loop(scene)
