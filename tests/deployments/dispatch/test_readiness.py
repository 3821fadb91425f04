"""Which gpu-lets are ready, under random orders of batches, errors of models, failures of processes, hangs, losses and
new plans. A model of what must be ready stands beside the dispatcher. In virtual time."""

from __future__ import annotations

import asyncio
import itertools
import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.in_flight import Request
from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.liveness import GIVEN_UP_S
from tenuto.deployments.wire.messages import BatchFailed, BatchRan, GpuletCloses, GpuletState, Message, RunBatch
from tenuto.deployments.wire.peer import ConnectionEvents
from tenuto.deployments.wire.tensors import Buffer, InputPart
from tenuto.outcome import Outcome, Rule
from tests.instruments.fake_gpulet import make_plan, state
from tests.instruments.virtual_loop import VirtualLoop

ALL_RESTED_S = 6.0  # no rest is longer
SLO_MS = 60_000.0
PLANS = [
    make_plan(("a", ("m", "n")), ("b", ("m",)), batch_size=4, slo_ms=SLO_MS),
    make_plan(("a", ("m", "n")), batch_size=4, slo_ms=SLO_MS),
    make_plan(("a", ("m", "n")), ("b", ("m",)), ("c", ("n",)), batch_size=4, slo_ms=SLO_MS),
]


class Process:
    """A gpu-let's process, played by a test. Its model raises an error where the input of a request is negative."""

    shares_memory = is_near = False
    events: ConnectionEvents[GpuletState]

    def __init__(self, name: str, programs: Sequence[str]) -> None:
        self.peer, self.programs = name, programs
        self.is_connected = False
        self.state: GpuletState | None = state(name, dict.fromkeys(programs, 64), {})
        self.is_up = self.is_closing = False
        self.batches: list[tuple[RunBatch, list[float], float]] = []  # with inputs, and when they came
        self.failed_at_s = -math.inf
        self.ran: list[int] = []  # sizes

    def start(self) -> None:
        asyncio.get_running_loop().call_soon(self.come)

    async def stop(self) -> None:
        self.is_up = False

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        if isinstance(message, RunBatch):
            values = [struct.unpack("<2f", tensor)[0] for tensor in buffers]
            self.batches.append((message, values, asyncio.get_running_loop().time()))

    def come(self) -> None:
        if not self.is_up:
            self.is_up, self.is_closing, self.failed_at_s = True, False, -math.inf
            self.events.peer_connected(self)

    def go(self) -> None:
        if self.is_up:
            self.is_up = False
            self.batches.clear()
            self.events.peer_lost(self, "the test ends it")

    def close(self) -> None:
        if self.is_up:
            self.is_closing = True
            self.events.message_came(self, GpuletCloses("the test says so"), memoryview(b""))

    def answer(self) -> None:
        """Run the oldest batch, if there is one."""
        if self.batches:
            batch, values, _ = self.batches.pop(0)
            self.ran.append(batch.size)
            if any(value < 0 for value in values):
                self._say(BatchFailed(batch.number, "running it failed"))
            else:
                rows: list[Any] = [(count, []) for _, count in batch.members]
                self._say(BatchRan(batch.number, 0.0, 1.0, 0.0, 0.0, 0.0, rows))

    def fail(self) -> None:
        """Say of the oldest batch that this process cannot run it, if there is one."""
        if self.batches:
            batch, _, _ = self.batches.pop(0)
            self.failed_at_s = asyncio.get_running_loop().time()
            self._say(BatchFailed(batch.number, "the device is busy", may_retry=True))

    def _say(self, message: Message) -> None:
        if self.is_up:
            self.events.message_came(self, message, memoryview(b""))

    def has_batch_of(self, age_s: float) -> bool:
        """Whether it holds a batch for so long."""
        now_s = asyncio.get_running_loop().time()
        return any(now_s - came_s > age_s for _, _, came_s in self.batches)


class Asking:
    """Asks for one request, and writes down how it ends."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.ends: list[tuple[Outcome, Rule]] = []

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        del request, executed, row
        self.ends.append((Outcome.OK, Rule.NONE))

    def refused(self, request: Request, refused: Refused) -> None:
        del request
        self.ends.append((refused.outcome, refused.rule))


class World:
    def __init__(self) -> None:
        self.processes = {"a": Process("a", "mn"), "b": Process("b", "m"), "c": Process("c", "n")}
        self.left: list[Process] = []  # of earlier plans
        self.announced: dict[str, bool] = {}
        self.asked: list[Asking] = []
        self.dispatcher = Dispatcher(
            lambda plan, network: make_scheduler("deferred", from_plan(plan, network)),
            lambda _: None,  # type: ignore[arg-type, return-value]  # no process needs to be found
            clock=asyncio.get_running_loop().time,
            make_connection=self._connect,
            compute=lambda *_: None,  # type: ignore[arg-type, return-value]
            on_change=self._announce,
        )
        self.plan = PLANS[0]
        self.apply(0)

    def _connect(self, name: str, _find: Any, events: ConnectionEvents[GpuletState]) -> Process:
        if self.processes[name].is_connected:  # the process before answers its batches, and ends
            self.left.append(self.processes[name])
            self.processes[name] = Process(name, list(self.processes[name].programs))
        process = self.processes[name]
        process.events, process.is_connected = events, True
        return process

    def _announce(self) -> None:
        self.announced = {name: self.dispatcher.is_ready(name) for name in "mn"}

    def apply(self, number: int) -> None:
        self.plan = PLANS[number]
        self.dispatcher.apply(self.plan)

    def ask(self, model: str, value: float) -> None:
        asking = Asking(value)
        self.asked.append(asking)
        request = self.dispatcher.admit(model, asking)
        if not asking.ends:
            self.dispatcher.start(request, [InputPart(struct.pack("<2f", value, 0.0))])

    def check(self) -> None:
        """Compare what is ready with what must be, and with what was announced last."""
        dispatcher = self.dispatcher
        assert self.announced == {name: dispatcher.is_ready(name) for name in "mn"}
        now_s = asyncio.get_running_loop().time()
        sure, possible = Counter[str](), Counter[str]()
        for gpulet in self.plan.gpulets:
            process = self.processes[gpulet.id]
            rested = now_s - process.failed_at_s > ALL_RESTED_S
            for model in (replica.name for replica in gpulet.models):
                if process.is_up and not process.is_closing:
                    possible[model] += not process.has_batch_of(GIVEN_UP_S + 1.0)
                    sure[model] += rested and not process.has_batch_of(GIVEN_UP_S - 0.1)
        for model in "mn":
            assert dispatcher.is_ready(model) <= (possible[model] > 0)
            assert dispatcher.is_ready(model) >= (sure[model] > 0)
        assert all(len(each.ends) <= 1 for each in self.asked)

    async def recover(self) -> None:
        """End whatever is wrong, and answer all batches."""
        for process in self.processes.values():
            if process.is_closing:
                process.go()
            if any(gpulet.id == process.peer for gpulet in self.plan.gpulets):
                process.come()
        for _ in range(60):
            for process in (*self.left, *self.processes.values()):
                while process.batches:
                    process.answer()
            await asyncio.sleep(0.2)


async def play(steps: Sequence[tuple[Any, ...]]) -> None:
    world = World()
    await asyncio.sleep(0.01)
    for what, *arguments in steps:
        if what == "wait":
            await asyncio.sleep(arguments[0])
        elif what == "ask":
            world.ask(*arguments)
        elif what == "apply":
            world.apply(arguments[0])
        elif any(gpulet.id == arguments[0] for gpulet in world.plan.gpulets):
            getattr(world.processes[arguments[0]], what)()
        await asyncio.sleep(0.001)
        world.check()
    await world.recover()
    world.check()
    assert world.dispatcher.is_ready()
    late = [Asking(1.0) for _ in "mn"]
    for model in "mn":
        world.ask(model, 1.0)
    await world.recover()
    assert all(each.ends == [(Outcome.OK, Rule.NONE)] for each in world.asked[-len(late) :])
    for each in world.asked:
        assert len(each.ends) == 1, "every request has one end"
        assert (each.ends[0][1] is Rule.RAISED) <= (each.value < 0), "no good request is called a bad one"
        assert (each.ends[0][0] is Outcome.OK) <= (each.value >= 0)
    await world.dispatcher.close()


GPULETS = st.sampled_from("abc")
WAITS = st.tuples(st.just("wait"), st.sampled_from([0.05, 0.3, GIVEN_UP_S + 1.0, ALL_RESTED_S]))
ASKS = st.tuples(st.just("ask"), st.sampled_from("mn"), st.sampled_from([1.0, 1.0, -1.0]))
BAD = st.tuples(st.just("ask"), st.sampled_from("mn"), st.just(-1.0))
ANSWER = st.just(("answer", "a"))
# Each is a short story of several steps; stories follow one another.
STORIES = st.one_of(
    st.tuples(ASKS),
    st.tuples(ASKS, ASKS, ASKS, st.tuples(st.just("answer"), GPULETS)),
    st.tuples(ASKS, st.tuples(st.just("fail"), st.just("a")), WAITS),
    st.tuples(BAD, BAD, ASKS, ASKS, BAD, ANSWER, ANSWER, st.sampled_from([("go", "a"), ("fail", "a"), ("apply", 2)])),
    st.tuples(ASKS, st.tuples(st.just("fail"), GPULETS), st.tuples(st.sampled_from(["go", "come", "close"]), GPULETS)),
    st.tuples(ASKS, WAITS, st.tuples(st.just("answer"), st.just("a"))),
    st.tuples(WAITS, st.tuples(st.sampled_from(["go", "come", "close", "answer"]), GPULETS)),
    st.tuples(st.tuples(st.just("apply"), st.integers(0, len(PLANS) - 1))),
)


@given(st.lists(STORIES, min_size=6, max_size=16))
def test_a_gpulet_is_ready_when_nothing_is_wrong_with_its_process_and_every_change_is_announced(
    stories: list[tuple[tuple[Any, ...], ...]],
) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play(list(itertools.chain(*stories))))


async def _raise_amid(values: Sequence[float], slo_ms: float = SLO_MS) -> tuple[World, Process]:
    """Ask for one batch with these inputs, while the gpu-let runs each batch for 50 ms."""
    world = World()
    plan = make_plan(("a", ("m", "n")), batch_size=len(values), slo_ms=slo_ms)
    world.plan = plan
    world.dispatcher.apply(plan)
    await asyncio.sleep(0.01)
    for value in values:
        world.ask("m", value)
    process = world.processes["a"]
    for _ in range(200):
        await asyncio.sleep(0.05)
        process.answer()
        world.check()
    await world.dispatcher.close()
    return world, process


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 32])
def test_one_bad_request_costs_the_good_ones_of_its_batch_nothing(size: int) -> None:
    for bad in range(size):
        values = [-1.0 if index == bad else 1.0 for index in range(size)]
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            world, process = runner.run(_raise_amid(values))
        ends = [each.ends for each in world.asked]
        assert ends.pop(bad) == [(Outcome.FAILED, Rule.RAISED)]
        assert ends == [[(Outcome.OK, Rule.NONE)]] * (size - 1)
        assert len(process.ran) <= 1 + 2 * (size - 1).bit_length()


def test_a_model_that_always_raises_is_run_again_a_bounded_number_of_times() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        world, process = runner.run(_raise_amid([-1.0] * 64))
    assert {tuple(each.ends) for each in world.asked} == {((Outcome.FAILED, Rule.RAISED),)}
    assert len(process.ran) == 1 + 4 * 6


def test_requests_whose_deadline_leaves_no_time_to_run_again_expire_at_once() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        world, process = runner.run(_raise_amid([-1.0, 1.0, 1.0, 1.0], slo_ms=40.0))
    assert {tuple(each.ends) for each in world.asked} == {((Outcome.EXPIRED, Rule.CUT),)}
    assert process.ran == [4]
