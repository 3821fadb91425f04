"""An alarm rings for what it was set for last, whatever the event loop, and on a system without timer descriptors."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from tenuto.deployments.dispatch.alarm import alarm


async def rings_for_the_last_time_it_was_set() -> None:
    rang = asyncio.Event()
    made = alarm(rang.set)
    for at_s in (60.0, 1e-6, 0.003):
        made.set(time.monotonic() + at_s)
    due = time.monotonic() + 0.004
    made.set(due)
    await rang.wait()
    assert time.monotonic() > due - 0.002  # a loop's own timers may be early
    rang.clear()
    made.set(0.0)  # long ago
    await rang.wait()
    rang.clear()
    made.set(time.monotonic())
    made.clear()
    await asyncio.sleep(0.005)
    assert not rang.is_set()
    made.close()
    made.close()


async def test_on_asyncio() -> None:
    before = len(os.listdir("/proc/self/fd"))
    await rings_for_the_last_time_it_was_set()
    assert len(os.listdir("/proc/self/fd")) == before


def test_on_uvloop() -> None:
    pytest.importorskip("uvloop").run(rings_for_the_last_time_it_was_set())


async def test_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "other")
    await rings_for_the_last_time_it_was_set()
