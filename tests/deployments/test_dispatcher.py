import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.wire.answers import Answer
from tenuto.outcome import Outcome
from tenuto.placement import Plan

from .fakes import FakeGpulet, finder, make_plan

X = [np.array([1, 2], np.float32).tobytes()]

Start = Callable[..., Awaitable[Dispatcher]]


def _deferred(plan: Plan, network: NetworkDelay) -> Scheduler:
    return make_scheduler("symphony", from_plan(plan, network))


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    running: list[Dispatcher] = []
    alive: list[FakeGpulet] = []

    async def begin(plan: Plan, *gpulets: FakeGpulet, max_queued: int = 100) -> Dispatcher:
        dispatcher = Dispatcher(_deferred, finder({g.id: g for g in gpulets}), max_queued=max_queued)
        running.append(dispatcher)
        alive.extend(gpulets)
        for gpulet in gpulets:
            await gpulet.start()
        dispatcher.apply(plan)
        await _until(dispatcher.is_ready)
        return dispatcher

    yield begin
    for dispatcher in running:
        await dispatcher.close()
    for gpulet in alive:
        gpulet.die()


async def _until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not claim():
            await asyncio.sleep(0.001)


async def _answer(future: asyncio.Future[Answer]) -> Answer:
    return await asyncio.wait_for(future, 5)


async def test_a_request_is_answered_with_its_own_outputs(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",)), batch_size=2), gpulet)
    futures = [dispatcher.submit("m", [np.array([i, 0], np.float32).tobytes()]) for i in range(4)]
    answers = [await _answer(f) for f in futures]
    assert [a.outcome for a in answers] == [Outcome.OK] * 4
    assert [np.frombuffer(a.outputs[0].data, np.float32)[0] for a in answers] == [0, 2, 4, 6]
    assert [a.batch_size for a in answers] == [2] * 4
    assert answers[0].execution_ms == 1.0
    assert gpulet.batches == [2, 2]
    assert (dispatcher.accounts.counters["m"].ok, dispatcher.accounts.counters["m"].batches) == (4, 2)


async def test_a_deadline_in_the_past_expires_without_execution(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    for slo_ms in (0.0, -5.0, 1.0):
        answer = await _answer(dispatcher.submit("m", X, slo_ms))
        assert answer.outcome is Outcome.EXPIRED
        assert "not executed" in answer.reason
    assert gpulet.batches == []
    assert dispatcher.accounts.counters["m"].expired == 3


async def test_a_full_queue_rejects_with_a_time_to_retry(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    dispatcher = await start(make_plan(("a", ("m",))), gpulet, max_queued=2)
    futures = [dispatcher.submit("m", X)]
    await asyncio.wait_for(gpulet.arrived.wait(), 5)
    futures += [dispatcher.submit("m", X) for _ in range(3)]
    last = await _answer(futures[-1])
    assert last.outcome is Outcome.REJECTED
    assert last.retry_after_s is not None
    gpulet.hold = False
    gpulet.release()
    assert [(await _answer(f)).outcome for f in futures[:3]] == [Outcome.OK] * 3


async def test_a_client_that_goes_away_frees_its_place(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    running = dispatcher.submit("m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), 5)
    waiting = [dispatcher.submit("m", X) for _ in range(3)]
    waiting[0].cancel()
    waiting[2].cancel()
    await asyncio.sleep(0)
    gpulet.hold = False
    gpulet.release()
    assert (await _answer(running)).outcome is Outcome.OK
    assert (await _answer(waiting[1])).outcome is Outcome.OK
    assert gpulet.batches == [1, 1]
    assert dispatcher.accounts.counters["m"].cancelled == 2


async def test_a_dead_gpulets_batch_is_retried_elsewhere(start: Start) -> None:
    first, second = FakeGpulet("a", ("m",), hold=True), FakeGpulet("b", ("m",))
    dispatcher = await start(make_plan(("a", ("m",)), ("b", ("m",))), first, second)
    future = dispatcher.submit("m", X)
    await asyncio.wait_for(first.arrived.wait(), 5)
    first.die()
    answer = await _answer(future)
    assert (answer.outcome, answer.gpulet) == (Outcome.OK, "b")


async def test_a_batch_is_retried_once_only_and_the_error_names_the_gpulet(start: Start) -> None:
    first, second = FakeGpulet("a", ("m",), hold=True), FakeGpulet("b", ("m",), hold=True)
    dispatcher = await start(make_plan(("a", ("m",)), ("b", ("m",))), first, second)
    future = dispatcher.submit("m", X)
    await asyncio.wait_for(first.arrived.wait(), 5)
    first.die()
    await asyncio.wait_for(second.arrived.wait(), 5)
    second.die()
    answer = await _answer(future)
    assert answer.outcome is Outcome.FAILED
    assert "gpu-let b" in answer.reason


async def test_a_restarted_gpulet_rejoins_by_itself(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    assert (await _answer(dispatcher.submit("m", X))).outcome is Outcome.OK
    gpulet.die()
    await _until(lambda: not dispatcher.is_ready("m"))
    await gpulet.start()
    await _until(lambda: dispatcher.is_ready("m"))
    assert (await _answer(dispatcher.submit("m", X))).outcome is Outcome.OK
    assert dispatcher.gpulets()[0]["pid"] == 2


async def test_others_keep_serving_while_one_is_dead(start: Start) -> None:
    first, second = FakeGpulet("a", ("m",)), FakeGpulet("b", ("n",))
    dispatcher = await start(make_plan(("a", ("m",)), ("b", ("n",))), first, second)
    assert (await _answer(dispatcher.submit("m", X))).outcome is Outcome.OK
    first.die()
    await _until(lambda: not dispatcher.is_ready("m"))
    assert (await _answer(dispatcher.submit("n", X))).outcome is Outcome.OK


async def test_an_error_of_the_model_fails_its_batch_alone(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    gpulet.error = "running 'm' failed: ValueError: no"
    answer = await _answer(dispatcher.submit("m", X))
    assert (answer.outcome, answer.reason) == (Outcome.FAILED, "running 'm' failed: ValueError: no")
    gpulet.error = None
    assert (await _answer(dispatcher.submit("m", X))).outcome is Outcome.OK


async def test_a_new_plan_keeps_connections_and_waiting_requests(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m", "n"), hold=True)
    dispatcher = await start(make_plan(("a", ("m", "n"))), gpulet)
    running = dispatcher.submit("m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), 5)
    kept, gone = dispatcher.submit("n", X), dispatcher.submit("m", X)
    dispatcher.apply(make_plan(("a", ("n",)), models=("n",)))
    assert (await _answer(gone)).outcome is Outcome.FAILED
    gpulet.hold = False
    gpulet.release()
    assert (await _answer(running)).outcome is Outcome.OK
    assert (await _answer(kept)).outcome is Outcome.OK
    assert gpulet.incarnation == 1
    with pytest.raises(KeyError):
        dispatcher.submit("m", X)


async def test_closing_answers_what_waits(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    future = dispatcher.submit("m", X)
    await dispatcher.close()
    assert (await _answer(future)).outcome is Outcome.FAILED


async def test_a_model_added_in_place_is_served_once_it_is_loaded(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    assert (await _answer(dispatcher.submit("m", X))).outcome is Outcome.OK
    dispatcher.apply(make_plan(("a", ("m", "n"))))
    assert not dispatcher.is_ready()
    waiting = dispatcher.submit("n", X)
    gpulet.load("m", "n")
    assert (await _answer(waiting)).outcome is Outcome.OK
    assert dispatcher.is_ready("n")
    assert dispatcher.served("n") is not None


async def test_the_clients_id_reaches_the_gpulet_and_the_log_of_ended_requests(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",)), batch_size=2), gpulet)
    futures = [dispatcher.submit("m", X, client_id=name) for name in ("first", "second")]
    futures.append(dispatcher.submit("m", X, -1.0, "third"))
    for future in futures:
        await _answer(future)
    assert [header["requests"] for header in gpulet.headers] == [["first", "second"]]
    assert {e["id"]: e["outcome"] for e in dispatcher.accounts.ended.to_data()} == {
        "first": "ok",
        "second": "ok",
        "third": "expired",
    }
    (found,) = dispatcher.accounts.ended.to_data("second")
    assert 0 <= found["dispatched_ms"] <= found["start_ms"] + 2.5
    assert found["start_ms"] < found["end_ms"] <= found["answered_ms"] + 0.2
    (dropped,) = dispatcher.accounts.ended.to_data("third")
    assert (dropped["start_ms"], dropped["gpulet"]) == (None, None)
    assert dispatcher.accounts.ended.to_data("nobody") == []


async def test_a_start_on_another_clock_is_unknown(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    gpulet.clock_ahead_s = -1000.0
    assert math.isnan((await _answer(dispatcher.submit("m", X))).start_ms)
