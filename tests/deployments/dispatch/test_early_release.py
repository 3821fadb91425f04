"""When a core is told that a streaming gpu-let is free, on a loop whose time jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.alarm import alarm
from tenuto.deployments.dispatch.early_release import EarlyRelease
from tenuto.deployments.dispatch.in_flight import Batch
from tests.instruments.systems import everywhere_linear
from tests.instruments.virtual_loop import VirtualLoop


def core(scheduler: str, ctrl_ms: float = 0.0) -> Scheduler:
    return make_scheduler(scheduler, everywhere_linear([("a", 1.0, 5.0, 50.0, None)], 1, NetworkDelay(ctrl_ms=ctrl_ms)))


PLAIN = core("eager")
AHEAD = core("symphony", ctrl_ms=1.0)


class Bench:
    def __init__(self, lead_ms: float = 2.0) -> None:
        self.freed: list[tuple[int, float]] = []
        self.lead_ms = lead_ms
        self.early = EarlyRelease(
            self.now_ms,
            lambda _gpulet, batch: self.freed.append((batch.number, round(self.now_ms(), 6))),
            lambda on_ring: alarm(on_ring, asyncio.get_running_loop().time),
        )
        self.follow(PLAIN)

    def follow(self, core: Scheduler | None) -> None:
        self.early.follow(core, largest_batch=4)
        self.budget = self.early.budget(NetworkDelay(self.lead_ms - 1.2, 0.3, 5.0))

    def now_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1000.0

    def send(self, number: int, start_ms: float, finish_ms: float, gpulet: int = 0) -> Batch:
        batch = Batch(number, 0, "m", [("m", 0)], [], 0, self.now_ms(), self.now_ms(), start_ms, finish_ms)
        self.early.sent(gpulet, batch)
        return batch

    def answered(self, batch: Batch, execution_ms: float) -> bool:
        return self.early.answered(0, batch, execution_ms)


async def until(ms: float) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(ms / 1000.0 - loop.time())


def on_virtual_loop(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scene())


def test_the_core_is_told_a_lead_before_the_end_and_once() -> None:
    async def scene() -> None:
        bench = Bench()
        batch = bench.send(1, 2.0, 12.0)
        await until(11)
        assert bench.freed == [(1, 10.0)]
        assert bench.answered(batch, 10.0) is True
        assert bench.answered(batch, 10.0) is False
        await until(50)
        assert bench.freed == [(1, 10.0)]

    on_virtual_loop(scene)


def test_a_batch_that_ends_sooner_is_not_told_early() -> None:
    async def scene() -> None:
        bench = Bench()
        batch = bench.send(1, 2.0, 12.0)
        await until(8)
        assert bench.answered(batch, 6.0) is False
        await until(50)
        assert bench.freed == []

    on_virtual_loop(scene)


def test_never_more_than_one_batch_waits_behind_the_one_that_executes() -> None:
    async def scene() -> None:
        bench = Bench()
        first = bench.send(1, 2.0, 12.0)
        await until(10)
        second = bench.send(2, 12.0, 22.0)
        await until(40)  # the first takes far longer than expected
        assert bench.freed == [(1, 10.0)]
        assert bench.answered(first, 38.0) is True
        await until(41)
        assert bench.freed == [(1, 10.0)]  # 28 ms longer than expected: the end of the second is anyone's guess
        assert bench.answered(second, 10.0) is False

    on_virtual_loop(scene)


def test_the_batch_behind_is_expected_to_begin_when_the_one_before_has_ended() -> None:
    async def scene() -> None:
        bench = Bench()
        first = bench.send(1, 2.0, 12.0)
        await until(10)
        bench.send(2, 12.0, 22.0)
        await until(12.5)
        assert bench.answered(first, 10.0) is True
        await until(30)
        assert bench.freed == [(1, 10.0), (2, 20.5)]

    on_virtual_loop(scene)


def test_every_core_budgets_the_copies_of_the_largest_batch() -> None:
    bench = Bench()
    assert bench.budget == NetworkDelay(2.0, 0.0, 5.0)
    bench.follow(AHEAD)
    assert bench.budget == NetworkDelay(2.0, 0.0, 5.0)
    bench.follow(None)
    assert bench.budget == NetworkDelay(0.8, 0.3, 5.0)


def test_overruns_shorten_the_lead_so_that_promises_hold() -> None:
    async def scene() -> None:
        bench = Bench()
        for number in range(4):
            at = bench.now_ms()
            batch = bench.send(number, at, at + 1.0)
            await until(at + 2.0)
            bench.answered(batch, 2.5)  # 1.5 ms longer than expected
        assert bench.early.overrun_ms == 1.5
        bench.freed.clear()
        at = bench.now_ms()
        batch = bench.send(9, at, at + 10.0)
        await until(at + 10)
        (told,) = bench.freed
        assert told[1] == pytest.approx(at + 9.5)
        # What the core promises the next batch: to start a lead after its dispatch, when even a late end has passed.
        assert told[1] + bench.lead_ms == pytest.approx(at + 10.0 + 1.5)
        bench.answered(batch, 10.0)

    on_virtual_loop(scene)


@pytest.mark.parametrize("core", [AHEAD, core("shepherd"), None])  # fmt: skip
def test_cores_that_send_ahead_or_preempt_are_left_alone(core: Scheduler | None) -> None:
    async def scene() -> None:
        bench = Bench()
        bench.follow(core)
        batch = bench.send(1, 0.0, 10.0)
        await until(20)
        assert bench.freed == []
        assert bench.answered(batch, 10.0) is False

    on_virtual_loop(scene)


def test_what_is_lost_or_of_an_older_plan_is_not_told() -> None:
    async def scene() -> None:
        bench = Bench()
        lost = bench.send(1, 0.0, 10.0)
        bench.early.lost(0)
        bench.send(2, 0.0, 10.0, gpulet=1)
        bench.follow(PLAIN)
        bench.early.lost(7)
        await until(20)
        assert bench.freed == []
        assert bench.answered(lost, 1.0) is False

    on_virtual_loop(scene)
