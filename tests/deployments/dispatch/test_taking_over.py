"""Two dispatchers and two gpu-lets on a wire whose messages are late, or lost and sent again, by a seeded schedule: a
gateway gives one dispatcher up that lives on, and asks the other one. In virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.in_flight import Request
from tenuto.deployments.dispatch.leadership import Leadership
from tenuto.deployments.wire.messages import BatchFailed, BatchRan, GpuletState, Message, RunBatch, TakeCharge, Term
from tenuto.deployments.wire.peer import ConnectionEvents
from tenuto.deployments.wire.tensors import Buffer, InputPart
from tests.instruments.fake_gpulet import make_plan, state
from tests.instruments.seeds import seeds
from tests.instruments.virtual_loop import VirtualLoop

GPULETS, DISPATCHERS = "ab", "xy"
PLAN = make_plan(*((name, ("m",)) for name in GPULETS), batch_size=4)
LATE_S, AGAIN_S, LOST = 0.05, 0.4, 0.1  # a message takes at most so long; so much longer where it is lost, as 10 % are
RUN_S = 0.05
NOTICE_S = 1.5  # within it a dispatcher knows that its gateway has gone
GAP_S = 0.01


class Gpulet:
    """Runs one batch after the other, and obeys the latest term, as `Channel` does."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.wires = name, list[Wire]()
        self._world = world
        self._term, self._holder = Term(), None
        self._waiting: deque[tuple[Wire, RunBatch, list[str]]] = deque()
        self._runs = False

    def state(self) -> GpuletState:
        return msgspec.structs.replace(state(self.name, {"m": 4}, {}), terms={"s": self._term})

    def take(self, wire: Wire, message: Message, requests: list[str]) -> None:
        if isinstance(message, TakeCharge):
            if message.term.number >= self._term.number and (wire, message.term) != (self._holder, self._term):
                self._holder, self._term = wire, message.term
                for each in self.wires:
                    each.answer(self.state())
        elif isinstance(message, RunBatch):
            self._waiting.append((wire, message, requests))
            self._go_on()

    def _go_on(self) -> None:
        if self._runs or not self._waiting:
            return
        wire, batch, requests = self._waiting.popleft()
        if wire is not self._holder:
            wire.answer(BatchFailed(batch.number, "given up", may_retry=True))
            self._go_on()
            return
        self._runs = True
        self._world.log += [("begun", number, batch.number, wire) for number in requests]
        asyncio.get_running_loop().call_later(RUN_S, self._ran, wire, batch)

    def _ran(self, wire: Wire, batch: RunBatch) -> None:
        self._runs = False
        rows: list[Any] = [(batch.size, [])]
        wire.answer(BatchRan(batch.number, 0.0, 1000.0 * RUN_S, 0.0, 0.0, 0.0, rows))
        self._go_on()


class Wire:
    """A dispatcher's connection to a gpu-let: messages arrive in the order in which they were sent."""

    shares_memory = is_near = False
    is_up = False
    state: GpuletState | None = None

    def __init__(
        self, gpulet: Gpulet, world: World, events: ConnectionEvents[GpuletState], *, is_broken: bool = False
    ) -> None:
        self.peer = gpulet.name
        self._is_broken = is_broken
        self._gpulet, self._world, self._events = gpulet, world, events
        self._there, self._back = [0.0], [0.0]  # when the last one arrives
        gpulet.wires.append(self)

    def start(self) -> None:
        if not self._is_broken:
            self.answer(self._gpulet.state())

    async def stop(self) -> None:
        self.is_up = False

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        requests = [bytes(tensor).decode() for tensor in buffers]  # each request's is its number
        if isinstance(message, RunBatch):
            self._world.log += [("given", number, message.number, self) for number in requests]
        self._arrive(self._there, self._gpulet.take, self, message, requests)

    def answer(self, message: Message) -> None:
        self._arrive(self._back, self._come, message)

    def _arrive(self, last: list[float], act: Callable[..., None], *args: object) -> None:
        if self._is_broken:
            return
        chance, loop = self._world.chance, asyncio.get_running_loop()
        takes_s = chance.uniform(0.0, LATE_S) + AGAIN_S * (chance.random() < LOST)
        last[0] = max(last[0] + 1e-6, loop.time() + takes_s)
        loop.call_at(last[0], act, *args)

    def _come(self, message: Message) -> None:
        if not isinstance(message, GpuletState):
            self._events.message_came(self, message, memoryview(b""))
            return
        self.state = message
        was_up, self.is_up = self.is_up, True
        (self._events.state_changed if was_up else self._events.peer_connected)(self)


class World:
    """A gateway that asks, and everybody behind it; `broken`: a dispatcher and a gpu-let that it does not reach."""

    def __init__(self, seed: int, broken: str = "") -> None:
        self.chance = random.Random(seed)
        self.log: list[tuple[str, str, int, Wire]] = []  # of a request: given to a gpu-let in a batch, begun there
        self.ends: Counter[str] = Counter()
        self._asked: dict[str, dict[str, Request]] = {name: {} for name in DISPATCHERS}
        self._is_asked = DISPATCHERS[0]
        gpulets = {name: Gpulet(name, self) for name in GPULETS}
        self._moved: list[Request] = []  # asked of the dispatcher that was given up, until it knows that
        self._leaderships = {name: Leadership("s", partial(self._let_go, name)) for name in DISPATCHERS}
        self._dispatchers = {
            name: Dispatcher(
                lambda plan, network: make_scheduler("eager", from_plan(plan, network), {}),
                lambda _: None,  # type: ignore[arg-type, return-value]
                clock=asyncio.get_running_loop().time,
                make_connection=lambda gpulet, _, events, name=name: Wire(  # type: ignore[misc]
                    gpulets[gpulet], self, events, is_broken=name + gpulet == broken
                ),
                leadership=leadership,
            )
            for name, leadership in self._leaderships.items()
        }
        for name, leadership in self._leaderships.items():
            leadership.reached_by("g")
            self._dispatchers[name].apply(PLAN)

    def ask(self, number: str) -> None:
        """Ask a request of the dispatcher that schedules."""
        name = self._is_asked
        assert self._leaderships[name].claim()
        request = self._dispatchers[name].admit("m", self, client_id=number)
        self._asked[name][number] = request
        self._dispatchers[name].start(request, [InputPart(number.encode())])

    def executed(self, request: Request, executed: object, row: int) -> None:
        """An answer; what the gateway has asked of another one since does not wait for it."""
        del executed, row
        if self._asked[self._is_asked].get(request.client_id) is request:
            del self._asked[self._is_asked][request.client_id]
            self.ends[request.client_id] += 1

    def refused(self, request: Request, refused: object) -> None:
        """Only what was asked of another one since may be refused."""
        assert self._asked[self._is_asked].get(request.client_id) is not request, refused

    async def give_up(self) -> None:
        """Ask the other dispatcher from now on, also what this one has not answered; it lives, and notices later."""
        left, self._is_asked = self._is_asked, next(name for name in DISPATCHERS if name != self._is_asked)
        moved = self._asked[left]
        for number in moved:
            self.ask(number)
        self._moved = list(moved.values())
        await asyncio.sleep(self.chance.uniform(0.0, NOTICE_S))
        self._let_go(left)

    def _let_go(self, left: str) -> None:
        """A dispatcher knows that its gateway has gone, or that another one is in charge: it lets its gateways go. The
        one that is asked now would be found again at once."""
        if left == self._is_asked:
            return
        moved, self._moved = self._moved, []
        for request in moved:
            self._dispatchers[left].cancel(request)
        self._leaderships[left].reached_by("")

    async def close(self) -> None:
        for dispatcher in self._dispatchers.values():
            await dispatcher.close()


async def play(seed: int, broken: str = "") -> World:
    world = World(seed, broken)
    await asyncio.sleep(1.0)
    numbers = map(str, itertools.count())
    # One that took charge just now and reaches fewer than the other one is a third loss: its term may come later.
    leaves_at = world.chance.randrange(50, 90) if broken else world.chance.randrange(20, 60)
    leaving = None
    for turn in range(100):
        world.ask(next(numbers))
        await asyncio.sleep(GAP_S)
        if turn == leaves_at:
            leaving = asyncio.create_task(world.give_up())
    assert leaving is not None
    await leaving
    await asyncio.sleep(10.0)
    await world.close()
    assert world.ends == Counter(dict.fromkeys(map(str, range(100)), 1))
    return world


def begun(seed: int, broken: str = "") -> dict[str, list[tuple[int, str]]]:
    """Return of each request, in the order in which its runs began, which of all that were given each is, and where."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        world = runner.run(play(seed, broken))
    given: dict[tuple[str, int, Wire], int] = {}
    found: dict[str, list[tuple[int, str]]] = {}
    for what, request, batch, wire in world.log:
        if what == "given":
            given[request, batch, wire] = len(given)
        else:
            found.setdefault(request, []).append((given[request, batch, wire], wire.peer))
    assert len(found) == 100
    return found


@pytest.mark.parametrize("seed", seeds(24, 60))
def test_nobody_begins_what_another_gpulet_was_given_since(seed: int) -> None:
    """A request that had begun when its dispatcher was given up may run a second time, and only in that order."""
    for request, runs in begun(seed).items():
        assert runs == sorted(runs), f"{request} began for a dispatcher that had been given up, after another run"
        assert len(runs) <= 2


def test_but_a_gpulet_that_the_next_dispatcher_does_not_reach() -> None:
    """Two lines are broken at once, the gateway's and one between the dispatcher that it asks now and a gpu-let: this
    one alone may begin what it was sent before, and then a request runs twice at most."""
    late = 0
    for seed in range(60):
        for request, runs in begun(seed, "yb").items():
            assert len(runs) <= 2, request
            late += runs != sorted(runs)
            there = [run for run in runs if run[1] == "a"]
            assert there == sorted(there), f"{request} began late where that can be known"
    assert late  # else the manual warns for nothing
