"""The dispatcher driven by a scenario file: the served side of what `tests.instruments.scenario` runs in virtual time.

`run_virtual_clock` runs it on a loop whose time jumps, over emulated gpu-lets inside the process; `run_scenario` on
whatever loop, clock and connections the caller has, real ones included.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.batching.rehearsal.replay import Replay
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.fleet import ConnectionFactory, GpuletConnection
from tenuto.deployments.dispatch.measured_times import WayMeter
from tenuto.deployments.dispatch.rehearsals import Computed
from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.messages import BatchRan, GpuletState, Message, RunBatch
from tenuto.deployments.wire.peer import ConnectionEvents, Endpoint, Finder
from tenuto.deployments.wire.tensors import Buffer
from tenuto.placement import Plan
from tests.instruments.asking import submit
from tests.instruments.fake_gpulet import state
from tests.instruments.scenario import RanBatch, Scenario
from tests.instruments.virtual_loop import VirtualLoop

__all__ = ["EmulatedConnection", "compute_here", "run_scenario", "run_virtual_clock"]

# A request's whole input is its position in the schedule, as one float32, so that a batch on the wire names its own.
_POSITION = struct.Struct("<f")
_LONGEST_WAIT_S = 30.0


class EmulatedConnection:
    """A gpu-let without process or socket: runs batches one after the other on the loop's timers.

    A batch may start `ctrl_ms` after it was sent and when the one before has ended; its answer takes no time. With
    `late_s` it ends so much later, and is measured.
    """

    shares_memory = is_near = True

    def __init__(
        self,
        gpulet_id: str,
        events: ConnectionEvents[GpuletState],
        plan: Plan,
        ctrl_ms: float,
        late_s: Callable[[], float] | None = None,
    ) -> None:
        self._late_s = late_s
        self.peer = gpulet_id
        gpulet = next(gpulet for gpulet in plan.gpulets if gpulet.id == gpulet_id)
        self.state = state(gpulet_id, {program.name: program.batch_size for program in gpulet.programs}, {})
        self._latency = {r.name: r.latency for r in gpulet.models if r.latency is not None}
        self._latency |= {program.name: program.latency for program in gpulet.programs if program.latency is not None}
        self._events = events
        self._ctrl_ms = ctrl_ms
        self._waiting: deque[tuple[RunBatch, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._up = False

    @property
    def is_up(self) -> bool:
        """Whether batches can be sent now."""
        return self._up

    def start(self) -> None:
        """Be there from the loop's next turn on."""
        asyncio.get_running_loop().call_soon(self._rise)

    def _rise(self) -> None:
        self._up = True
        self._events.peer_connected(self)

    async def stop(self) -> None:
        """Run nothing more."""
        self._up = False
        if self._timer is not None:
            self._timer.cancel()

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Take a batch."""
        del buffers
        now = asyncio.get_running_loop().time()
        assert isinstance(message, RunBatch)
        self._waiting.append((message, now + self._ctrl_ms / 1000.0))
        if len(self._waiting) == 1:
            self._begin()

    def _begin(self) -> None:
        if not self._waiting:
            return
        message, ready_at = self._waiting[0]
        loop = asyncio.get_running_loop()
        execution_ms = self._latency[message.program].at(message.size)
        start_at = max(loop.time(), ready_at)
        ran = BatchRan(
            message.number,
            start_at * 1000.0,
            execution_ms,
            (start_at - ready_at) * 1000.0,
            0.0,
            0.0,
            [(rows, []) for _, rows in message.members],
        )
        late_s = 0.0 if self._late_s is None else self._late_s()
        self._timer = loop.call_at(start_at + execution_ms / 1000.0 + late_s, self._end, ran)

    def _end(self, ran: BatchRan) -> None:
        if self._late_s is not None:
            ran.execution_ms = asyncio.get_running_loop().time() * 1000.0 - ran.started_at_ms
        self._waiting.popleft()
        self._begin()
        self._events.message_came(self, ran, memoryview(b""))


class _Recording:
    """A connection that writes down every batch that leaves; the rest is the connection's."""

    def __init__(self, connection: GpuletConnection, write: Callable[[str, RunBatch, Sequence[Buffer]], None]) -> None:
        self._connection = connection
        self._write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        if isinstance(message, RunBatch):
            self._write(self._connection.peer, message, buffers)
        self._connection.send(message, buffers)


class _Renamed:
    """Tells the owner of a recorded connection of that connection, and not of the one inside."""

    def __init__(self, events: ConnectionEvents[GpuletState]) -> None:
        self._events = events
        self.connection: Any = None

    def peer_connected(self, _connection: GpuletConnection) -> None:
        self._events.peer_connected(self.connection)

    def peer_lost(self, _connection: GpuletConnection, reason: str) -> None:
        self._events.peer_lost(self.connection, reason)

    def state_changed(self, _connection: GpuletConnection) -> None:
        self._events.state_changed(self.connection)

    def message_came(self, _connection: GpuletConnection, message: Message, body: memoryview) -> None:
        self._events.message_came(self.connection, message, body)


async def compute_here(job: Replay) -> Computed:
    """Rehearse on the spot: on a virtual loop nothing may wait for another process, and nothing be measured."""
    return Computed(job.run(), None)


async def run_scenario(
    scenario: Scenario,
    make_connection: ConnectionFactory,
    *,
    find_gpulet: Callable[[str], Finder],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[RanBatch], list[Answer]]:
    """Run a scenario through a dispatcher on the running loop.

    Args:
        scenario: what to run.
        make_connection: makes the connections to the gpu-lets of `scenario.plan()`.
        find_gpulet: what the connections find their gpu-lets with.
        clock: the dispatcher's clock, in seconds; must pass as the loop's time does.

    Returns:
        The batches in order of dispatch, with the time they were handed to the connection, and every request's answer.

    Raises:
        InvalidInputError: unknown scheduler or option, or an SLO that no batch can meet.
        TimeoutError: a gpu-let did not connect, or a request was never answered.
    """
    batches: list[RanBatch] = []
    origin = 0.0

    def write(gpulet_id: str, message: RunBatch, buffers: Sequence[Buffer]) -> None:
        requests = tuple(int(_POSITION.unpack(buffer)[0]) for buffer in buffers)
        if len(message.members) > 1 or message.members[0][0] != message.program:
            requests = tuple(sorted(requests))  # one model's after the other's on the wire
        batches.append(RanBatch((clock() - origin) * 1000.0, gpulet_id, message.program, requests))

    def recording(gpulet_id: str, find: Finder, events: ConnectionEvents[GpuletState]) -> GpuletConnection:
        renamed = _Renamed(events)
        renamed.connection = _Recording(make_connection(gpulet_id, find, renamed), write)
        found: GpuletConnection = renamed.connection
        return found

    def build_scheduler(plan: Plan, network: NetworkDelay) -> Scheduler:
        return make_scheduler(scenario.scheduler.name, from_plan(plan, network), scenario.scheduler.options)

    dispatcher = Dispatcher(
        build_scheduler,
        find_gpulet,
        way=WayMeter(scenario.network.ctrl_ms, scenario.network.response_ms),
        clock=clock,
        make_connection=recording,
        compute=compute_here,
    )
    loop = asyncio.get_running_loop()
    dispatcher.apply(scenario.plan())
    async with asyncio.timeout(_LONGEST_WAIT_S):
        while not dispatcher.is_ready():
            await asyncio.sleep(0)  # not a timer: on a virtual loop waiting must take no time
    answers: list[asyncio.Future[Answer]] = []
    schedule = scenario.schedule()
    origin, start = clock(), loop.time()
    moments: dict[float, list[int]] = {}
    for position, (at_ms, _) in enumerate(schedule):
        moments.setdefault(at_ms, []).append(position)
    done = asyncio.Event()

    def arrive(positions: list[int]) -> None:
        for position in positions:
            part = _POSITION.pack(position)
            reserve_ms = scenario.network.response_ms
            answers.append(submit(dispatcher, schedule[position][1], [part], reserve_ms=reserve_ms))
        if len(answers) == len(schedule):
            done.set()

    for at_ms, positions in moments.items():
        loop.call_at(start + at_ms / 1000.0, arrive, positions)
    try:
        await done.wait()
        async with asyncio.timeout(_LONGEST_WAIT_S):
            return batches, list(await asyncio.gather(*answers))
    finally:
        await dispatcher.close()


def run_virtual_clock(scenario: Scenario) -> tuple[list[RanBatch], list[Answer]]:
    """Run a scenario through a dispatcher on a clock that jumps; see `run_scenario` for what is returned and raised."""
    plan = scenario.plan()

    def make_connection(gpulet_id: str, _find: Finder, events: ConnectionEvents[GpuletState]) -> GpuletConnection:
        return EmulatedConnection(gpulet_id, events, plan, scenario.network.ctrl_ms)

    async def nobody() -> Endpoint:
        raise LookupError("an emulated connection finds nothing")

    def find(_gpulet_id: str) -> Finder:
        return nobody

    async def run() -> tuple[list[RanBatch], list[Answer]]:
        clock = asyncio.get_running_loop().time
        return await run_scenario(scenario, make_connection, find_gpulet=find, clock=clock)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())
