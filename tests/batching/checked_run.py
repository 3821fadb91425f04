"""A slow driver for generated scenarios that checks the contract of a scheduler at every step."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from operator import le

from tenuto.batching.core.scheduler import Dispatch, Drop, Preempt, Scheduler
from tenuto.batching.core.system import TIME_TOLERANCE_MS
from tenuto.batching.rehearsal.observer import rehearsals_of
from tenuto.batching.rehearsal.replay import Replay

SLACK = 10 * TIME_TOLERANCE_MS


@dataclass(frozen=True)
class Event:
    """Something from outside: kind is add, cancel, lost, back or slower; `index` a model or gpu-let, `ref` a
    request."""

    at: float
    kind: str
    index: int = 0
    ref: int = 0
    slo_ms: float = 0.0


@dataclass
class Outcomes:
    served: dict[int, float] = field(default_factory=dict)  # request: when its answer is with the client
    dropped: dict[int, float] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)  # were on a gpu-let that was lost
    batches: list[tuple[int, int, int, float, float]] = field(
        default_factory=list
    )  # gpu-let, program, size, start, finish
    preempted: int = 0


class CheckedRun:
    """Runs events through a scheduler on gpu-lets with exact latencies, asserting the contract as it goes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.core = scheduler
        self.system = scheduler.system
        self.now = 0.0
        self.deadline: dict[int, float] = {}
        self.model: dict[int, int] = {}
        self.queued: set[int] = set()
        self.out = Outcomes()
        count = len(self.system.gpulets)
        self.busy: list[list[tuple[Dispatch, float, float]]] = [[] for _ in range(count)]
        self.lost = [False] * count
        self.done: list[tuple[float, int, int]] = []
        self.sequence = 0
        self.rehearsals = rehearsals_of(scheduler)
        self.replays: list[tuple[float, Replay]] = []  # when its result is due

    def run(self, events: list[Event]) -> Outcomes:
        for event in events:
            self._until(event.at)
            self._advance_to(event.at)
            self._apply(event)
            self._carry_out()
        self._until(math.inf)
        assert not any(self.busy)
        return self.out

    def _advance_to(self, time: float) -> None:
        assert time >= self.now, "time runs backwards"
        self.now = time

    def _until(self, limit: float) -> None:
        steps = 0
        while True:
            steps += 1
            assert steps < 100_000, "the scheduler spins"
            wake = self.core.next_wake_ms
            due = self.replays[0][0] if self.replays else math.inf
            if (
                self.rehearsals
                and self.replays
                and due <= min(limit, wake)
                and not (self.done and self.done[0][0] <= due)
            ):
                self._advance_to(due)
                self.rehearsals.learn(self.replays.pop()[1].run(), due)
            elif self.done and self.done[0][0] <= limit and self.done[0][0] <= wake:
                at, _, gpulet = heapq.heappop(self.done)
                if self.lost[gpulet] or not self.busy[gpulet] or self.busy[gpulet][0][2] != at:
                    continue
                self._advance_to(at)
                self.busy[gpulet].pop(0)
                self.core.batch_done(at, gpulet)
            elif wake < limit:
                self._advance_to(max(wake, self.now))
                self.core.wake(self.now)
            else:
                return
            self._carry_out()

    def _apply(self, event: Event) -> None:
        if event.kind == "add":
            self.deadline[event.ref] = event.at + event.slo_ms
            self.model[event.ref] = event.index
            self.queued.add(event.ref)
            if self.rehearsals:
                replay = self.rehearsals.arrived(event.at, event.index, event.at + event.slo_ms)
                if replay is not None:
                    assert not self.replays, "two rehearsals are out"
                    self.replays.append((self.rehearsals.due_ms(event.at, replay), replay))
            self.core.add_request(event.at, event.index, event.ref, event.at + event.slo_ms)
        elif event.kind == "cancel":
            if event.ref in self.model:
                was_queued = event.ref in self.queued
                assert self.core.cancel(event.at, self.model[event.ref], event.ref) == was_queued
                if was_queued:
                    self.queued.discard(event.ref)
                    self.out.cancelled.add(event.ref)
        elif event.kind == "lost" and not self.lost[event.index]:
            self.lost[event.index] = True
            for dispatch, _, _ in self.busy[event.index]:
                for request in dispatch.request_ids:
                    self.out.served.pop(request)
                    self.out.failed.add(request)
            self.busy[event.index].clear()
            self.core.gpulet_lost(event.at, event.index)
        elif event.kind == "slower":  # planned with more than it takes: never a broken promise
            self.core.update_latency(event.ref % len(self.system.programs), event.index, 1.0 + event.slo_ms)
        elif event.kind == "back" and self.lost[event.index]:
            self.lost[event.index] = False
            self.core.gpulet_back(event.at, event.index)

    def _carry_out(self) -> None:
        for decision in self.core.drain():
            if isinstance(decision, Drop):
                for request in decision.request_ids:
                    self._leave_queue(request, decision.program)
                    self.out.dropped[request] = self.now
            elif isinstance(decision, Dispatch):
                self._dispatch(decision)
            else:
                self._preempt(decision)

    def _leave_queue(self, request: int, program: int) -> None:
        assert request in self.queued, f"request {request} left the queue twice, or was never in it"
        own = self.system.program_of[self.model[request]]
        if program != own:  # a size class in a batch that is padded to a larger one
            assert program in self.system.joint_classes[own].values()
            assert all(map(le, self.sizes_of(own), self.sizes_of(program))), "padded to less than its size"
        self.queued.discard(request)

    def sizes_of(self, program: int) -> tuple[int, ...]:
        return self.system.models[self.system.programs[program].members[0]].sizes

    def _dispatch(self, decision: Dispatch) -> None:
        gpulet, program, ids = decision.gpulet, decision.program, decision.request_ids
        network = self.system.network
        assert not self.lost[gpulet], "dispatched to a lost gpu-let"
        host = self.system.gpulets[gpulet].hosts[program]
        assert 1 <= len(ids) < len(host.latency_ms), "empty batch, or larger than the gpu-let may run"
        ahead = network.ctrl_ms > 0 or network.data_ms_per_request > 0
        assert len(self.busy[gpulet]) <= (1 if ahead else 0), "a gpu-let runs two batches at once"
        free = self.busy[gpulet][-1][2] if self.busy[gpulet] else self.now
        start = max(free, self.now + network.ctrl_ms + network.data_ms_per_request * len(ids))
        finish = start + host.planned_ms()[len(ids)]
        for request in ids:
            self._leave_queue(request, program)
            answered = finish + network.response_ms
            assert answered <= self.deadline[request] + SLACK, "executed although its deadline could not be met"
            self.out.served[request] = answered
        self.busy[gpulet].append((decision, start, finish))
        self.out.batches.append((gpulet, program, len(ids), start, finish))
        self.sequence += 1
        heapq.heappush(self.done, (finish, self.sequence, gpulet))

    def _preempt(self, decision: Preempt) -> None:
        dispatch, _, _ = self.busy[decision.gpulet].pop(0)
        for request in dispatch.request_ids:
            self.out.served.pop(request)
            self.queued.add(request)
        self.out.preempted += 1
