"""The dispatcher driven by a scenario file: the served side of what `tests.instruments.scenario` runs in virtual time.

`run_virtual_clock` runs it on a loop whose time jumps, over emulated gpu-lets inside the process; `run_scenario` on
whatever loop, clock and links the caller has, real ones included.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.core_time import TIMER_SLACK_MS
from tenuto.deployments.dispatch.correction import NetworkMeter
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.fleet import LinkFactory
from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.link import Finder, Link, LinkEvents
from tenuto.placement import Plan
from tests.instruments.scenario import RanBatch, Scenario
from tests.instruments.virtual_loop import VirtualLoop

__all__ = ["EmulatedLink", "run_scenario", "run_virtual_clock"]

# A request's whole input is its position in the schedule, as one float32, so that a batch on the wire names its own.
_POSITION = struct.Struct("<f")
_LONGEST_WAIT_S = 30.0


class EmulatedLink:
    """A gpu-let without process or socket: runs batches one after the other on the loop's timers.

    A batch may start `ctrl_ms` after it was sent and when the one before has ended; its answer takes no time.
    """

    def __init__(self, index: int, gpulet_id: str, events: LinkEvents, plan: Plan, ctrl_ms: float) -> None:
        self.index = index
        self.gpulet_id = gpulet_id
        gpulet = next(gpulet for gpulet in plan.gpulets if gpulet.id == gpulet_id)
        self.description: dict[str, Any] = {"models": {program.name: program.batch_size for program in gpulet.programs}}
        self._latency = {r.name: r.latency for r in gpulet.models if r.latency is not None}
        self._latency |= {program.name: program.latency for program in gpulet.programs if program.latency is not None}
        self._events = events
        self._ctrl_ms = ctrl_ms
        self._waiting: deque[tuple[dict[str, Any], float]] = deque()
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
        self._events.link_up(self.index)

    async def stop(self) -> None:
        """Run nothing more."""
        self._up = False
        if self._timer is not None:
            self._timer.cancel()

    def send(self, header: dict[str, Any], buffers: Sequence[bytes | memoryview]) -> None:
        """Take a batch, or throw the running one away."""
        del buffers
        now = asyncio.get_running_loop().time()
        if "abort" in header:
            if self._waiting and self._waiting[0][0]["id"] == header["abort"]:
                self._waiting.popleft()
                if self._timer is not None:
                    self._timer.cancel()
                self._begin()
            return
        self._waiting.append((header, now + self._ctrl_ms / 1000.0))
        if len(self._waiting) == 1:
            self._begin()

    def _begin(self) -> None:
        if not self._waiting:
            return
        header, ready_at = self._waiting[0]
        loop = asyncio.get_running_loop()
        queue_s = max(0.0, loop.time() - ready_at)
        execution_ms = self._latency[header["model"]].at(header["n"])
        start_at = max(loop.time(), ready_at)
        self._timer = loop.call_at(start_at + execution_ms / 1000.0, self._end, header, queue_s, execution_ms)

    def _end(self, header: dict[str, Any], queue_s: float, execution_ms: float) -> None:
        self._waiting.popleft()
        self._begin()
        answer = {
            "id": header["id"],
            "gpulet": self.gpulet_id,
            "members": [(rows, []) for _, rows in header.get("members") or [("", header["n"])]],
            "execution_ms": execution_ms,
            "queue_ms": queue_s * 1000.0,
            "emulated": True,
        }
        self._events.batch_answered(self.index, answer, memoryview(b""))


class _Recording:
    """A link that writes down every batch that leaves; the rest is the link's."""

    def __init__(self, link: Link, write: Callable[[str, dict[str, Any], Sequence[bytes | memoryview]], None]) -> None:
        self._link = link
        self._write = write

    @property
    def index(self) -> int:
        return self._link.index

    @index.setter
    def index(self, index: int) -> None:
        self._link.index = index

    @property
    def gpulet_id(self) -> str:
        return self._link.gpulet_id

    @property
    def description(self) -> dict[str, Any]:
        return self._link.description

    @property
    def is_up(self) -> bool:
        return self._link.is_up

    def start(self) -> None:
        self._link.start()

    async def stop(self) -> None:
        await self._link.stop()

    def send(self, header: dict[str, Any], buffers: Sequence[bytes | memoryview]) -> None:
        if "n" in header:
            self._write(self._link.gpulet_id, header, buffers)
        self._link.send(header, buffers)


async def run_scenario(
    scenario: Scenario,
    make_link: LinkFactory,
    *,
    find_gpulet: Callable[[str], Finder],
    clock: Callable[[], float] = time.monotonic,
    timer_slack_ms: float = TIMER_SLACK_MS,
) -> tuple[list[RanBatch], list[Answer]]:
    """Run a scenario through a dispatcher on the running loop.

    Args:
        scenario: what to run.
        make_link: makes the links to the gpu-lets of `scenario.plan()`.
        find_gpulet: what the links find their gpu-lets with.
        clock: the dispatcher's clock, in seconds; must pass as the loop's time does.
        timer_slack_ms: how much earlier than asked the dispatcher is woken; 0 on a loop whose timers are exact.

    Returns:
        The batches in order of dispatch, with the time they were handed to the link, and every request's answer.

    Raises:
        InvalidInputError: unknown scheduler or option, or an SLO that no batch can meet.
        TimeoutError: a gpu-let did not connect, or a request was never answered.
    """
    batches: list[RanBatch] = []
    origin = 0.0

    def write(gpulet_id: str, header: dict[str, Any], buffers: Sequence[bytes | memoryview]) -> None:
        requests = tuple(int(_POSITION.unpack(buffer)[0]) for buffer in buffers)
        if "members" in header:  # one model's after the other's on the wire
            requests = tuple(sorted(requests))
        batches.append(RanBatch((clock() - origin) * 1000.0, gpulet_id, header["model"], requests))

    def recording(index: int, gpulet_id: str, find: Finder, events: LinkEvents) -> Link:
        return _Recording(make_link(index, gpulet_id, find, events), write)

    def build_scheduler(plan: Plan, network: NetworkDelay) -> Scheduler:
        return make_scheduler(scenario.scheduler.name, from_plan(plan, network), scenario.scheduler.options)

    dispatcher = Dispatcher(
        build_scheduler,
        find_gpulet,
        network=NetworkMeter(scenario.network.response_ms, scenario.network.ctrl_ms),
        clock=clock,
        timer_slack_ms=timer_slack_ms,
        make_link=recording,
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
            answers.append(dispatcher.submit(schedule[position][1], [_POSITION.pack(position)]))
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

    def make_link(index: int, gpulet_id: str, _find: Finder, events: LinkEvents) -> Link:
        return EmulatedLink(index, gpulet_id, events, plan, scenario.network.ctrl_ms)

    async def nobody() -> dict[str, Any]:
        raise LookupError("an emulated link finds nothing")

    def find(_gpulet_id: str) -> Callable[[], Awaitable[dict[str, Any]]]:
        return nobody

    async def run() -> tuple[list[RanBatch], list[Answer]]:
        clock = asyncio.get_running_loop().time
        return await run_scenario(scenario, make_link, find_gpulet=find, clock=clock, timer_slack_ms=0.0)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())
