import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.eager import EagerScheduler
from tenuto.batching.core.scheduler import Drop, Reject, Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.in_flight import Request
from tenuto.deployments.entry.service.dispatching import ask
from tenuto.deployments.wire.answers import Executed, Loop, Refused
from tenuto.deployments.wire.arena import Arena
from tenuto.deployments.wire.tensors import InputPart
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome, Rule
from tenuto.placement import Plan
from tests.instruments.asking import X, answer, outputs, submit, until
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan
from tests.instruments.live import PATIENCE_S
from tests.instruments.seeds import seeds

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
        await until(dispatcher.is_ready)
        return dispatcher

    yield begin
    for dispatcher in running:
        await dispatcher.close()
    for gpulet in alive:
        gpulet.die()


async def test_a_request_is_answered_with_its_own_outputs(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",)), batch_size=2), gpulet)
    futures = [submit(dispatcher, "m", [np.array([i, 0], np.float32).tobytes()]) for i in range(4)]
    answers = [await answer(f) for f in futures]
    assert [a.outcome for a in answers] == [Outcome.OK] * 4
    assert [np.frombuffer(a.outputs[0].data, np.float32)[0] for a in answers] == [0, 2, 4, 6]
    assert [a.batch_size for a in answers] == [2] * 4
    assert answers[0].execution_ms == 1.0
    assert gpulet.sizes == [2, 2]
    assert (dispatcher.accounts.counters["m"].ok, dispatcher.accounts.counters["m"].batches) == (4, 2)


async def test_a_deadline_in_the_past_expires_without_execution(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    for slo_ms in (0.0, -5.0, 1.0):
        found = await answer(submit(dispatcher, "m", X, slo_ms))
        assert found.outcome is Outcome.EXPIRED
        assert "not executed" in found.reason
    assert gpulet.sizes == []
    assert dispatcher.accounts.counters["m"].expired == 3


async def test_a_full_queue_rejects_with_a_time_to_retry(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    dispatcher = await start(make_plan(("a", ("m",))), gpulet, max_queued=2)
    futures = [submit(dispatcher, "m", X)]
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    futures += [submit(dispatcher, "m", X) for _ in range(3)]
    last = await answer(futures[-1])
    assert last.outcome is Outcome.REJECTED
    assert last.retry_after_s is not None
    gpulet.hold = False
    gpulet.release()
    assert [(await answer(f)).outcome for f in futures[:3]] == [Outcome.OK] * 3


async def test_a_client_that_goes_away_frees_its_place(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    running = submit(dispatcher, "m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    waiting = [submit(dispatcher, "m", X) for _ in range(3)]
    waiting[0].cancel()
    waiting[2].cancel()
    await asyncio.sleep(0)
    gpulet.hold = False
    gpulet.release()
    assert (await answer(running)).outcome is Outcome.OK
    assert (await answer(waiting[1])).outcome is Outcome.OK
    assert gpulet.sizes == [1, 1]
    assert dispatcher.accounts.counters["m"].cancelled == 2


async def test_a_dead_gpulets_batch_is_retried_elsewhere(start: Start) -> None:
    first, second = FakeGpulet("a", ("m",), hold=True), FakeGpulet("b", ("m",))
    dispatcher = await start(make_plan(("a", ("m",)), ("b", ("m",))), first, second)
    future = submit(dispatcher, "m", X)
    await asyncio.wait_for(first.arrived.wait(), PATIENCE_S)
    first.die()
    found = await answer(future)
    assert (found.outcome, found.gpulet) == (Outcome.OK, "b")


async def test_a_batch_is_retried_once_only_and_the_error_names_the_gpulet(start: Start) -> None:
    first, second = FakeGpulet("a", ("m",), hold=True), FakeGpulet("b", ("m",), hold=True)
    dispatcher = await start(make_plan(("a", ("m",)), ("b", ("m",))), first, second)
    future = submit(dispatcher, "m", X)
    await asyncio.wait_for(first.arrived.wait(), PATIENCE_S)
    first.die()
    await asyncio.wait_for(second.arrived.wait(), PATIENCE_S)
    second.die()
    found = await answer(future)
    assert found.outcome is Outcome.FAILED
    assert "gpu-let b" in found.reason


async def test_a_restarted_gpulet_rejoins_by_itself(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    assert (await answer(submit(dispatcher, "m", X))).outcome is Outcome.OK
    gpulet.die()
    await until(lambda: not dispatcher.is_ready("m"))
    await gpulet.start()
    await until(lambda: dispatcher.is_ready("m"))
    assert (await answer(submit(dispatcher, "m", X))).outcome is Outcome.OK
    assert dispatcher.gpulets()[0].pid == 2


async def test_others_keep_serving_while_one_is_dead(start: Start) -> None:
    first, second = FakeGpulet("a", ("m",)), FakeGpulet("b", ("n",))
    dispatcher = await start(make_plan(("a", ("m",)), ("b", ("n",))), first, second)
    assert (await answer(submit(dispatcher, "m", X))).outcome is Outcome.OK
    first.die()
    await until(lambda: not dispatcher.is_ready("m"))
    assert (await answer(submit(dispatcher, "n", X))).outcome is Outcome.OK


async def test_a_gpulet_on_standby_is_used_the_moment_a_plan_has_it(start: Start) -> None:
    first, idle = FakeGpulet("a", ("m",)), FakeGpulet("b", ("m",))
    dispatcher = await start(make_plan(("a", ("m",))), first, idle)
    dispatcher.apply(make_plan(("a", ("m",))), standby=["b"])
    events = dispatcher.accounts.events
    await until(lambda: ("gpu-let connected", "b") in {(event.what, event.why) for event in events})
    assert (await answer(submit(dispatcher, "m", X))).gpulet == "a"
    dispatcher.apply(make_plan(("b", ("m",))))
    assert dispatcher.is_ready()
    assert (await answer(submit(dispatcher, "m", X))).gpulet == "b"


async def test_an_error_of_the_model_fails_its_batch_alone(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    gpulet.error = "running 'm' failed: ValueError: no"
    found = await answer(submit(dispatcher, "m", X))
    assert (found.outcome, found.reason) == (Outcome.FAILED, "running 'm' failed: ValueError: no")
    gpulet.error = None
    assert (await answer(submit(dispatcher, "m", X))).outcome is Outcome.OK


async def test_a_new_plan_keeps_connections_and_waiting_requests(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m", "n"), hold=True)
    dispatcher = await start(make_plan(("a", ("m", "n"))), gpulet)
    running = submit(dispatcher, "m", X)
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    kept, gone = submit(dispatcher, "n", X), submit(dispatcher, "m", X)
    dispatcher.apply(make_plan(("a", ("n",)), models=("n",)))
    assert dispatcher.is_ready("n")  # busy with a batch of the plan before is not away
    assert (await answer(gone)).outcome is Outcome.FAILED
    gpulet.hold = False
    gpulet.release()
    assert (await answer(running)).outcome is Outcome.OK
    assert (await answer(kept)).outcome is Outcome.OK
    assert gpulet.incarnation == 1
    with pytest.raises(KeyError):
        submit(dispatcher, "m", X)


async def test_closing_answers_what_waits(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    future = submit(dispatcher, "m", X)
    await dispatcher.close()
    assert (await answer(future)).outcome is Outcome.FAILED


async def test_a_model_added_in_place_is_served_once_it_is_loaded(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    assert (await answer(submit(dispatcher, "m", X))).outcome is Outcome.OK
    dispatcher.apply(make_plan(("a", ("m", "n"))))
    assert not dispatcher.is_ready()
    waiting = submit(dispatcher, "n", X)
    gpulet.load("m", "n")
    assert (await answer(waiting)).outcome is Outcome.OK
    assert dispatcher.is_ready("n")
    assert dispatcher.signature("n") is not None


async def test_the_clients_id_reaches_the_log_of_ended_requests(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",)), batch_size=2), gpulet)
    futures = [submit(dispatcher, "m", X, client_id=name) for name in ("first", "second")]
    futures.append(submit(dispatcher, "m", X, -1.0, "third"))
    for future in futures:
        await answer(future)
    assert {e.id: e.outcome for e in dispatcher.accounts.ended.newest()} == {
        "first": "ok",
        "second": "ok",
        "third": "expired",
    }
    (found,) = dispatcher.accounts.ended.newest("second")
    assert found.dispatched_ms is not None
    assert found.start_ms is not None
    assert found.end_ms is not None
    assert 0 <= found.dispatched_ms <= found.start_ms + 2.5
    assert found.start_ms < found.end_ms <= found.answered_ms + 0.2
    (dropped,) = dispatcher.accounts.ended.newest("third")
    assert (dropped.start_ms, dropped.gpulet) == (None, None)
    assert dispatcher.accounts.ended.newest("nobody") == []


async def test_a_start_on_another_machines_clock_is_unknown(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), machine="another")
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    assert math.isnan((await answer(submit(dispatcher, "m", X))).start_ms)


async def test_a_batch_that_came_while_another_ran_says_nothing_of_the_way(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    gpulet.queue_ms = math.nan
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    before = dispatcher.way.delay()
    answers = [await answer(submit(dispatcher, "m", X)) for _ in range(40)]
    assert dispatcher.way.delay() == before
    assert all(one.gpulet_queue_ms >= 0.0 for one in answers)


async def test_a_gpulet_that_closes_gets_no_more_batches_and_its_own_are_run_elsewhere(start: Start) -> None:
    first, second = FakeGpulet("a", ("m",), hold=True), FakeGpulet("b", ("m",))
    dispatcher = await start(make_plan(("a", ("m",)), ("b", ("m",)), slo_ms=60_000.0), first, second)
    under_way = submit(dispatcher, "m", X)
    await asyncio.wait_for(first.arrived.wait(), PATIENCE_S)
    first.error, first.may_retry = "the CUDA context is lost", True
    first.close_down()
    first.release()
    found = await answer(under_way)
    assert (found.outcome, found.gpulet) == (Outcome.OK, "b")
    first.hold, first.error = False, None
    answers = [await answer(submit(dispatcher, "m", X)) for _ in range(3)]
    assert {one.gpulet for one in answers} == {"b"}
    assert not dispatcher.is_ready()


async def test_a_gpulet_that_fails_at_once_draws_no_traffic(start: Start) -> None:
    broken, sound = FakeGpulet("a", ("m",)), FakeGpulet("b", ("m",))
    dispatcher = await start(make_plan(("a", ("m",)), ("b", ("m",))), broken, sound)
    broken.error, broken.may_retry = "RuntimeError: no", True
    answers = [await answer(submit(dispatcher, "m", X)) for _ in range(20)]
    assert {(one.outcome, one.gpulet) for one in answers} == {(Outcome.OK, "b")}
    assert len(broken.sizes) == 1  # and then it rests
    broken.error = None
    await until(dispatcher.is_ready)  # it is tried again
    both = [submit(dispatcher, "m", X) for _ in range(2)]
    assert {(await answer(one)).gpulet for one in both} == {"a", "b"}


class Turning(EagerScheduler):
    """Gives up each request, or turns it away with a time of its own."""

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        del now_ms, deadline_ms
        program = self.system.program_of[model]
        self.decisions.append(
            Reject(program, [request_id], 0.15 + request_id) if request_id < 2 else Drop(program, [request_id])
        )


async def test_what_is_refused_says_by_which_rule_and_whether_the_margin_was_in_its_way() -> None:
    gpulet = FakeGpulet("a", ("m",))
    await gpulet.start()
    dispatcher = Dispatcher(lambda plan, network: Turning(from_plan(plan, network)), finder({"a": gpulet}))
    dispatcher.apply(make_plan(("a", ("m",))))
    await until(dispatcher.is_ready)
    ends = [await answer(submit(dispatcher, "m", X, 60_000.0)) for _ in range(3)]
    hopeless = await answer(submit(dispatcher, "m", X, 0.5))
    # What is turned away for one reason says the same: clients count by reason; when to come back stands beside it.
    assert {end.reason for end in ends[:2]} == {"'m' exceeds the rate it is planned for. Send less, or plan for more"}
    assert [end.retry_after_s for end in ends[:2]] == [0.00015, 0.00115]
    assert (ends[2].retry_after_s, hopeless.retry_after_s) == (1.0, None)  # no empty gpu-let could answer the last one
    told = [(row.outcome, row.rule, row.loop) for row in await dispatcher.ended(None, 10)]
    assert told == [
        ("expired", Rule.TOO_LATE, None),
        ("expired", Rule.CUT, Loop.MARGIN),
        ("rejected", Rule.BEYOND_PLAN, Loop.LOSSES),
        ("rejected", Rule.BEYOND_PLAN, Loop.LOSSES),
    ]
    await dispatcher.close()
    gpulet.die()


async def test_a_scheduler_that_aborts_batches_is_refused() -> None:
    class Aborting(EagerScheduler):
        preempts = True

    dispatcher = Dispatcher(lambda plan, network: Aborting(from_plan(plan, network)), finder({}))
    with pytest.raises(InvalidInputError, match="only virtual time"):
        dispatcher.apply(make_plan(("a", ("m",))))
    await dispatcher.close()


class Noting:
    """Asks, and writes down what it is refused."""

    def __init__(self) -> None:
        self.refusals: list[Outcome] = []

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        raise AssertionError("nothing was to be executed")

    def refused(self, request: Request, refused: Refused) -> None:
        self.refusals.append(refused.outcome)


async def test_a_request_that_is_turned_away_needs_no_tensors(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",))
    dispatcher = await start(make_plan(("a", ("m",))), gpulet)
    asker = Noting()
    for slo_ms in (-1.0, 60_000.0):
        request = dispatcher.admit("m", asker, slo_ms=slo_ms)
    assert asker.refusals == [Outcome.EXPIRED]
    dispatcher.cancel(request)  # its body could not be read
    assert await dispatcher.waiting() == {"m": 0}
    assert gpulet.sizes == []


@pytest.mark.parametrize("seed", seeds(3, 5))
async def test_a_lower_priority_only_fills_batches_up_and_none_takes_anothers_place(start: Start, seed: int) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    dispatcher = await start(make_plan(("a", ("m",)), batch_size=3, slo_ms=60_000.0), gpulet)
    ranks, asker, turned_away = random.Random(seed), Noting(), 0
    for _ in range(30):
        (waiting,) = (await dispatcher.waiting()).values()
        yields = ranks.random() < 0.5
        request = dispatcher.admit("m", asker, yields=yields)
        turned_away += yields and waiting >= 3
        assert asker.refusals == [Outcome.REJECTED] * turned_away
        if ranks.random() < 0.4:
            dispatcher.cancel(request)
    assert 0 < turned_away < 30
    assert {row.rule for row in await dispatcher.ended(None, 30)} == {Rule.YIELDED}


async def test_shared_memory_is_held_while_a_batch_may_read_it(start: Start) -> None:
    near, far = FakeGpulet("a", ("m",), hold=True), FakeGpulet("b", ("n",), machine="another")
    dispatcher = await start(make_plan(("a", ("m",)), ("b", ("n",)), slo_ms=60_000.0), near, far)
    arena = Arena(1 << 20)
    slot = arena.take(8)
    assert slot is not None
    slot.data[:] = X[0]
    part = InputPart(slot.data, "", slot.arena, slot.offset)
    asked = ask(dispatcher, "m", [part], memory=slot)
    await asyncio.wait_for(near.arrived.wait(), PATIENCE_S)
    assert near.bodies == [0]  # where the bytes lie is all that was sent
    slot.release()
    asked.cancel()
    await asyncio.sleep(0)
    assert arena.used_bytes > 0  # the gpu-let still reads it
    near.release()
    await until(lambda: arena.used_bytes == 0)
    copied = await answer(ask(dispatcher, "n", [InputPart(X[0], "", "1:1:1", 0)]))
    assert (outputs(copied), far.bodies) == ({"y": [2.0, 4.0]}, [8])  # to another machine the bytes themselves go
    arena.close()
