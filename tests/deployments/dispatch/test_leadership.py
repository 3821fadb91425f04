"""Who schedules for a sub-cluster, whichever lines between gateways, dispatchers and gpu-lets are cut: in any order of
events, and with each message on its way for any time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.dispatch.leadership import Leadership
from tenuto.deployments.wire.messages import GpuletState, Message, TakeCharge, Term
from tenuto.deployments.wire.tensors import Buffer
from tests.instruments.fake_gpulet import state

DISPATCHERS, GATEWAYS, GPULETS = "ABC", "gh", "12"


class Line:
    """A dispatcher's connection to a gpu-let: messages wait on both ways until the test lets them through."""

    def __init__(self, dispatcher: Dispatching, gpulet: Gpulet) -> None:
        self.dispatcher, self.gpulet = dispatcher, gpulet
        self.peer, self.is_up = gpulet.name, False
        self.shares_memory = self.is_near = True
        self.state: GpuletState | None = None
        self.claims: deque[TakeCharge] = deque()
        self.states: deque[GpuletState] = deque()

    def start(self) -> None:
        """Connect."""
        self.is_up = True
        self.states.append(self.gpulet.described())

    async def stop(self) -> None:
        """Not used."""

    def cut(self) -> None:
        """End on both sides."""
        self.is_up = False
        self.claims.clear()
        self.states.clear()
        self.gpulet.lost(self)

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Put a claim on its way."""
        assert isinstance(message, TakeCharge)
        assert not buffers
        self.claims.append(message)

    def pass_on(self) -> bool:
        """Let one message through; False where none waits."""
        if self.claims:
            self.gpulet.take(self, self.claims.popleft())
        elif self.states:
            self.state = self.states.popleft()
            self.dispatcher.leadership.heard(self)
        else:
            return False
        return True


class Gpulet:
    """Obeys the latest term, as `Channel` does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[Line] = []
        self.term = Term()
        self.holder: Line | None = None
        self.obeyed: list[str] = []

    def described(self) -> GpuletState:
        found = state(self.name, {}, {})
        found.terms = {"s": self.term}
        return found

    def _hold(self, term: Term) -> None:
        if term != self.term:
            self.term = term
            for line in self.lines:
                if line.is_up:
                    line.states.append(self.described())

    def take(self, line: Line, claim: TakeCharge) -> None:
        if claim.term.number >= self.term.number:
            if not self.obeyed or self.obeyed[-1] != line.dispatcher.name:
                self.obeyed.append(line.dispatcher.name)
            self.holder = line
            self._hold(claim.term)

    def lost(self, line: Line) -> None:
        if self.holder is line:
            self._hold(Term(self.term.number))


class Dispatching:
    """A dispatcher: its charge, and the gateways that reach it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gateways: set[str] = set()
        self.lately: set[str] = set()
        self.since = 0  # of two the one asked first that waits for longer
        self.leadership = Leadership("s", self.step_back)

    def step_back(self) -> None:
        self.since = World.next_turn()

    def reach(self, gateway: str, *, is_there: bool) -> None:
        (self.gateways.add if is_there else self.gateways.discard)(gateway)
        (self.lately.discard if is_there else self.lately.add)(gateway)
        self.leadership.reached_by(self.gateways, self.lately)

    def forget(self) -> None:
        self.lately.clear()
        self.leadership.reached_by(self.gateways)


class World:
    """All of them; gateways ask the oldest dispatcher that they reach."""

    _turns = 0

    @classmethod
    def next_turn(cls) -> int:
        cls._turns += 1
        return cls._turns

    def __init__(self) -> None:
        self.dispatchers = {name: Dispatching(name) for name in DISPATCHERS}
        self.gpulets = [Gpulet(name) for name in GPULETS]
        self.lines = []
        for dispatcher in self.dispatchers.values():
            for gpulet in self.gpulets:
                line = Line(dispatcher, gpulet)
                gpulet.lines.append(line)
                self.lines.append(line)
                line.start()

    def ask(self, gateway: str) -> bool:
        """Ask as a gateway does; return whether somebody schedules."""
        there = [each for each in self.dispatchers.values() if gateway in each.gateways]
        return (
            bool(there)
            and min(there, key=lambda each: (not each.leadership.can_be_had(), each.since)).leadership.claim()
        )

    def settle(self) -> None:
        """Let everything through that is on its way."""
        while any(line.pass_on() for line in self.lines):
            pass


REACH = st.sets(st.tuples(st.sampled_from(GATEWAYS), st.sampled_from(DISPATCHERS)))
EVENT = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(GATEWAYS)),
    st.tuples(st.just("pass"), st.integers(0, len(DISPATCHERS) * len(GPULETS) - 1)),
    st.tuples(st.just("cut"), st.integers(0, len(DISPATCHERS) * len(GPULETS) - 1)),
    st.tuples(st.just("join"), st.integers(0, len(DISPATCHERS) * len(GPULETS) - 1)),
    st.tuples(st.just("reach"), st.tuples(st.sampled_from(GATEWAYS), st.sampled_from(DISPATCHERS))),
    st.tuples(st.just("lose"), st.tuples(st.sampled_from(GATEWAYS), st.sampled_from(DISPATCHERS))),
)


def _do(world: World, event: tuple[str, object]) -> None:
    match event:
        case "ask", str(gateway):
            world.ask(gateway)
        case "pass", int(index):
            world.lines[index].pass_on()
        case "cut", int(index) if world.lines[index].is_up:
            world.lines[index].cut()
        case "join", int(index) if not world.lines[index].is_up:
            world.lines[index].start()
        case ("reach" | "lose") as what, (str(gateway), str(name)):
            world.dispatchers[name].reach(gateway, is_there=what == "reach")


@given(REACH, st.lists(EVENT, max_size=60), REACH)
def test_whatever_is_cut_nobody_takes_turns(
    before: set[tuple[str, str]], events: list[tuple[str, object]], after: set[tuple[str, str]]
) -> None:
    """Once lines stay as they are, however unlucky, the gpu-lets go over at most once to each dispatcher; all of them
    obey the same one then, somebody who is asked schedules, and everybody who reaches that one is served."""
    world = World()
    for gateway, name in before:
        world.dispatchers[name].reach(gateway, is_there=True)
    for event in events:
        _do(world, event)
    for gateway in GATEWAYS:
        for name in DISPATCHERS:
            world.dispatchers[name].reach(gateway, is_there=(gateway, name) in after)
    for line in world.lines:
        if not line.is_up:
            line.start()
    for dispatcher in world.dispatchers.values():
        dispatcher.forget()
    world.settle()
    for gpulet in world.gpulets:
        gpulet.obeyed.clear()
    for _ in range(10):
        for gateway in GATEWAYS:
            world.ask(gateway)
            world.settle()
    assert all(len(gpulet.obeyed) <= len(DISPATCHERS) for gpulet in world.gpulets)
    if after:
        served = {gateway for gateway in GATEWAYS if world.ask(gateway)}
        assert served
        holders = {gpulet.holder.dispatcher.name for gpulet in world.gpulets if gpulet.holder is not None}
        assert len(holders) == 1
        assert {gateway for gateway in GATEWAYS if (gateway, *holders) in after} <= served


def test_a_dispatcher_that_goes_with_its_gateway_is_followed_before_the_gpulets_have_noticed() -> None:
    """A machine is lost: the gateways of the others ask at once, and are not refused."""
    world = World()
    for name in "AB":
        for gateway in "gh":
            world.dispatchers[name].reach(gateway, is_there=True)
    world.settle()
    assert world.ask("g")
    world.settle()
    world.dispatchers["B"].reach("h", is_there=False)  # it was on the machine of A
    assert world.dispatchers["B"].leadership.claim()
