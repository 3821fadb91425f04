"""The router of Elvinger's thesis: it builds batches of a target size for one replica after the other, and sends a
batch when it is full or after a fixed wait.

Source: P. Elvinger, ETH Zurich master thesis 2024, chapter 4. The wait is 100 ms there, and requests are spread over
the replicas in turn, in proportion to their batch sizes. The router knows no deadlines: it gives no request up, and
batches queue at the worker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tenuto.batching.core.scheduler import Dispatch, Drop, Scheduler, SchedulerOptions
from tenuto.batching.core.system import INF, NetworkDelay, System


@dataclass(frozen=True)
class ThesisRouterOptions(SchedulerOptions):
    """The router's constants.

    wait_ms: how long the first request of a batch waits for the batch to fill.
    batch_size: the target size for every replica; 0: the planned batch size of each.
    spread: `in-turn` builds a whole batch for one replica, then one for the next; `interleaved` deals single requests,
    so that the batches of all replicas fill at once. Either way, a replica's part of the requests is in proportion to
    its batch size.
    """

    wait_ms: float = field(default=100.0, metadata={"minimum": 0})
    batch_size: int = field(default=0, metadata={"minimum": 0})
    spread: str = field(default="in-turn", metadata={"choices": ("in-turn", "interleaved")})


class _Lane:
    """The batch being built for one replica. `version` tells a timer whether its batch is still the one being built."""

    __slots__ = ("credit", "gpulet", "ids", "program", "size", "table", "version")

    def __init__(self, gpulet: int, program: int, size: int, table: list[float]) -> None:
        self.gpulet = gpulet
        self.program = program
        self.size = size
        self.table = table  # planned execution time by batch size, ms
        self.ids: list[int] = []
        self.version = 0
        self.credit = 0


class ThesisRouterScheduler(Scheduler):
    """Each replica has a lane, which requests of its program fill. A lane is sent as a batch when it is full, or
    `wait_ms` after its first request.

    A batch is dispatched at once and queues at the worker behind earlier batches, so that it travels while they run.
    When no replica is left, requests are given up as they come.
    """

    name = "thesis-router"
    summary = "fixed wait and target size, round robin over replicas, no deadlines: the router of Elvinger's thesis"
    options_type = ThesisRouterOptions

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        super().__init__(system, options)
        self._chosen = options if isinstance(options, ThesisRouterOptions) else ThesisRouterOptions()
        self._network = system.network
        self._lanes: list[list[_Lane]] = [[] for _ in system.programs]
        self._gone: set[int] = set()  # gpu-lets that are lost
        for gpulet, spec in enumerate(system.gpulets):
            for program, host in spec.hosts.items():
                largest = len(host.latency_ms) - 1
                size = min(self._chosen.batch_size or largest, largest)
                self._lanes[program].append(_Lane(gpulet, program, size, host.planned_ms()))
        self._turn = [0] * len(system.programs)
        self._timers: list[tuple[float, int, int, _Lane]] = []
        self._counter = 0
        self._sent: list[deque[float]] = [deque() for _ in system.gpulets]  # estimated ends of batches in flight

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        if deadline_ms < now_ms:
            self.decisions.append(Drop(self.system.program_of[model], [request_id]))
            return
        self._add(now_ms, self.system.program_of[model], request_id)

    def _add(self, now: float, program: int, request_id: int) -> None:
        lane = self._lane_for(program)
        if lane is None:
            self.decisions.append(Drop(program, [request_id]))
            return
        lane.ids.append(request_id)
        if len(lane.ids) >= lane.size:
            self._release(now, lane)
        elif len(lane.ids) == 1:
            self._counter += 1
            heappush(self._timers, (now + self._chosen.wait_ms, self._counter, lane.version, lane))
            self.next_wake_ms = min(self.next_wake_ms, now + self._chosen.wait_ms)

    def _lane_for(self, program: int) -> _Lane | None:
        """Return the lane that takes the next request; None when no replica is left."""
        lanes = (
            [lane for lane in self._lanes[program] if lane.gpulet not in self._gone]
            if self._gone
            else (self._lanes[program])
        )
        if not lanes:
            return None
        if len(lanes) == 1:
            return lanes[0]
        if self._chosen.spread == "in-turn":
            return lanes[self._turn[program] % len(lanes)]
        # Smooth weighted round robin: per request each lane earns its size, and the lane with the most credit takes the
        # request and pays the sum of all sizes.
        for lane in lanes:
            lane.credit += lane.size
        chosen = max(lanes, key=lambda lane: lane.credit)
        chosen.credit -= sum(lane.size for lane in lanes)
        return chosen

    def _release(self, now: float, lane: _Lane) -> None:
        ids, lane.ids = lane.ids, []
        lane.version += 1
        self._turn[lane.program] += 1
        size = len(ids)
        under_way = self._sent[lane.gpulet]
        arrived = now + self._network.ctrl_ms + self._network.data_ms_per_request * size
        start = max(arrived, under_way[-1]) if under_way else arrived
        under_way.append(start + lane.table[size])
        self.decisions.append(Dispatch(lane.gpulet, lane.program, ids, start, under_way[-1]))

    def wake(self, now_ms: float) -> None:
        while self._timers and self._timers[0][0] <= now_ms:
            _, _, version, lane = heappop(self._timers)
            if lane.version == version and lane.ids:
                self._release(now_ms, lane)
        self.next_wake_ms = self._timers[0][0] if self._timers else INF

    def batch_done(self, now_ms: float, gpulet: int) -> None:  # noqa: ARG002
        if self._sent[gpulet]:
            self._sent[gpulet].popleft()

    def cancel(self, now_ms: float, model: int, request_id: int) -> bool:  # noqa: ARG002
        for lane in self._lanes[self.system.program_of[model]]:
            if request_id in lane.ids:
                lane.ids.remove(request_id)
                if not lane.ids:
                    lane.version += 1  # so that the next request starts a new wait
                return True
        return False

    def gpulet_lost(self, now_ms: float, gpulet: int) -> None:
        self._gone.add(gpulet)
        self._sent[gpulet].clear()
        for lanes in self._lanes:
            for lane in lanes:
                if lane.gpulet == gpulet and lane.ids:
                    ids, lane.ids = lane.ids, []
                    lane.version += 1
                    for request_id in ids:
                        self._add(now_ms, lane.program, request_id)

    def gpulet_back(self, now_ms: float, gpulet: int) -> None:  # noqa: ARG002
        self._gone.discard(gpulet)

    def queued(self, program: int) -> int:
        return sum(len(lane.ids) for lane in self._lanes[program])

    def update_network(self, network: NetworkDelay) -> None:
        self._network = network
