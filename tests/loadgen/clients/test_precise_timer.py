"""The timer never wakes early, whatever the event loop, and works without a timer descriptor too."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from tenuto.loadgen.clients.precise_timer import PreciseTimer


async def waits(timer: PreciseTimer) -> None:
    for step_s in (0.0, 1e-7, 0.0004, 0.0011, 0.003, -1.0):
        at = time.monotonic() + step_s
        await timer.wait_until(at)
        assert time.monotonic() >= at


async def test_never_early() -> None:
    timer = PreciseTimer()
    await waits(timer)
    timer.close()
    timer.close()


def test_never_early_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def job() -> None:
        timer = PreciseTimer()
        await waits(timer)
        timer.close()

    uvloop.run(job())


async def test_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "other")
    await waits(PreciseTimer())


async def test_cancelled_waits_leave_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    timer = PreciseTimer()
    task = asyncio.create_task(timer.wait_until(time.monotonic() + 60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await waits(timer)
    timer.close()
    assert len(os.listdir("/proc/self/fd")) == before
