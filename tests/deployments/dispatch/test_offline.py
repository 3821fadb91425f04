"""Offline requests at the dispatcher: they wait, are counted apart, and only a full queue refuses them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.entry.service.dispatching import ask
from tenuto.deployments.wire.status import OfflineCounts
from tenuto.deployments.wire.tensors import InputPart
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tests.instruments.asking import X, answer, outputs, submit, until
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan

PARTS = [InputPart(part) for part in X]


def _deferred(plan: Plan, network: NetworkDelay) -> Scheduler:
    return make_scheduler("deferred", from_plan(plan, network))


def _eager(plan: Plan, network: NetworkDelay) -> Scheduler:
    return make_scheduler("eager", from_plan(plan, network))


@pytest.fixture
async def gpulet() -> AsyncIterator[FakeGpulet]:
    gpulet = FakeGpulet("a", ("m",))
    await gpulet.start()
    yield gpulet
    gpulet.die()


@pytest.fixture
async def dispatcher(gpulet: FakeGpulet) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(_deferred, finder({"a": gpulet}), max_queued=3)
    dispatcher.apply(make_plan(("a", ("m",)), slo_ms=60_000.0))
    await until(dispatcher.is_ready)
    yield dispatcher
    await dispatcher.close()


async def offline_counts(dispatcher: Dispatcher) -> OfflineCounts:
    counts = (await dispatcher.status()).models["m"].offline
    assert counts is not None
    return counts


async def test_one_is_answered_and_counted_in_no_other_figure(dispatcher: Dispatcher) -> None:
    assert (await dispatcher.status()).models["m"].offline is None
    found = await answer(ask(dispatcher, "m", PARTS, slo_ms=math.inf, offline=True))
    assert (found.outcome, outputs(found)) == (Outcome.OK, {"y": [2.0, 4.0]})
    counts = (await dispatcher.status()).models["m"]
    assert (counts.submitted, counts.ok, counts.inferences, counts.batches) == (0, 0, 0, 0)
    assert (await offline_counts(dispatcher)).by_outcome["ok"] == 1


async def test_a_full_queue_refuses_one_with_a_time_to_come_back(dispatcher: Dispatcher, gpulet: FakeGpulet) -> None:
    gpulet.hold = True
    waiting = [ask(dispatcher, "m", PARTS, slo_ms=math.inf, offline=True)]
    await until(lambda: len(gpulet.messages) == 1)
    waiting += [ask(dispatcher, "m", PARTS, slo_ms=math.inf, offline=True) for _ in range(9)]
    await until(lambda: any(future.done() for future in waiting))
    refused = await answer(next(future for future in waiting if future.done()))
    assert (refused.outcome, refused.retry_after_s) == (Outcome.REJECTED, 10.0)
    beside = submit(dispatcher, "m", X)  # of others none is turned away for that
    gpulet.hold = False
    gpulet.release()
    found = [await answer(future) for future in (*waiting, beside)]
    assert found[-1].outcome is Outcome.OK
    counts = await offline_counts(dispatcher)
    assert counts.submitted == 10
    assert counts.rejected + counts.ok == 10
    assert counts.queued == 0


async def test_a_client_that_leaves_frees_its_place(dispatcher: Dispatcher, gpulet: FakeGpulet) -> None:
    gpulet.die()
    await until(lambda: not dispatcher.is_ready())
    future = ask(dispatcher, "m", PARTS, slo_ms=math.inf, offline=True)
    assert (await offline_counts(dispatcher)).queued == 1
    assert await dispatcher.waiting() == {"m": 0}
    future.cancel()
    await asyncio.sleep(0)  # the loop tells of it in its next turn
    counts = await offline_counts(dispatcher)
    assert (counts.queued, counts.cancelled) == (0, 1)


async def test_one_goes_on_elsewhere_when_its_gpulet_dies(dispatcher: Dispatcher, gpulet: FakeGpulet) -> None:
    gpulet.hold = True
    future = ask(dispatcher, "m", PARTS, slo_ms=math.inf, offline=True)
    await until(lambda: len(gpulet.messages) == 1)
    gpulet.die()
    gpulet.hold = False
    await gpulet.start()
    assert (await answer(future)).outcome is Outcome.OK


async def test_a_scheduler_that_runs_none_says_so(gpulet: FakeGpulet) -> None:
    dispatcher = Dispatcher(_eager, finder({"a": gpulet}))
    dispatcher.apply(make_plan(("a", ("m",)), slo_ms=60_000.0))
    await until(dispatcher.is_ready)
    refused = await answer(ask(dispatcher, "m", PARTS, slo_ms=math.inf, offline=True))
    assert refused.outcome is Outcome.FAILED
    assert "Serve with 'deferred'" in refused.reason
    await dispatcher.close()
