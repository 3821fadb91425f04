"""The scheduler of a plan on the clock of the event loop. It is told what happens and what batches really took, is
woken when it asks, and what it decides is carried out. It knows gpu-lets and models by their index only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tenuto.batching.core.scheduler import Dispatch, Refusal, Scheduler
from tenuto.batching.core.scheduler_status import SchedulerStatus
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.rehearsal.observer import Rehearsals, rehearsals_of
from tenuto.deployments.dispatch.core_time import LEAST_PATIENCE_MS, CoreTime
from tenuto.deployments.dispatch.in_flight import Batch, Request
from tenuto.deployments.dispatch.measured_times import LatencyRatios, WayMeter
from tenuto.deployments.dispatch.rehearsals import Compute, Computed, RehearsalRunner
from tenuto.deployments.dispatch.unplanned import UnplannedScheduler
from tenuto.deployments.wire.messages import BatchRan
from tenuto.deployments.wire.status import NetworkStatus
from tenuto.errors import refused
from tenuto.placement import Plan

# Builds the core for a plan; called again when the plan changes.
SchedulerFactory = Callable[[Plan, NetworkDelay], Scheduler]


class DrivenScheduler:
    """One scheduler at a time. After telling it something, call `carry_out`."""

    def __init__(
        self,
        clock: Callable[[], float],
        way: WayMeter,
        compute: Compute | None,
        on_refusals: Callable[[Sequence[Refusal]], None],
        on_dispatch: Callable[[Dispatch], None],
    ) -> None:
        """Begin without a plan.

        Args:
            clock: monotonic seconds.
            way: measures the delays to gpu-lets.
            compute: runs the replays of rehearsals; by default in another process.
            on_refusals: ends requests that the scheduler gives up.
            on_dispatch: sends a batch that it decides on.
        """
        self._clock, self.way = clock, way
        self.time = CoreTime(clock, self.wake)
        self._on_refusals, self._on_dispatch = on_refusals, on_dispatch
        self.scheduler: Scheduler = UnplannedScheduler()
        self.plan_number = 0
        self._ratios = LatencyRatios()
        self._rehearsals: Rehearsals | None = None  # of the scheduler
        self._runner = RehearsalRunner(compute)

    def follow(self, plan: Plan, build: SchedulerFactory) -> None:
        """Schedule this plan from now on. Requests and gpu-lets have to be told again.

        Raises:
            InvalidInputError: the scheduler aborts running batches, which gpu-lets cannot do.
        """
        self.way.follow(plan)
        scheduler = build(plan, self._budget())
        if scheduler.preempts:
            cure = "Serve with deferred, symphony or eager; simulate with this one."
            raise refused("scheduler", scheduler.name, "aborts running batches, which only virtual time can", cure)
        scheduler.update_network(self.way.told)
        scheduler.drain()
        self.scheduler, self._rehearsals = scheduler, rehearsals_of(scheduler)
        self.plan_number += 1
        self._ratios.restart()

    def tick(self) -> None:
        """Do the work of every second, which does not depend on arrivals: fading factors, delays."""
        for program, gpulet, factor in self._ratios.fade(self._clock()):
            self.scheduler.update_latency(program, gpulet, factor)
        self.scheduler.update_network(self._budget())

    def close(self) -> None:
        """Decide nothing more."""
        self.time.close()
        self._runner.close()

    def add(self, request: Request, now_ms: float) -> None:
        """Give the scheduler a request that it does not hold."""
        # The core subtracts its own budget for the way back. It is added here, as this request has its own reserve.
        deadline_ms = request.deadline_ms - request.reserve_ms + self.way.told.response_ms
        if request.offline:
            self.scheduler.add_offline(now_ms, request.model, request.id, deadline_ms, request.client)
            return
        rehearsals = self._rehearsals
        if rehearsals is not None and (replay := rehearsals.arrived(now_ms, request.model, deadline_ms)) is not None:
            due_in_ms = rehearsals.due_ms(now_ms, replay) - now_ms
            self._runner.begin(replay, due_in_ms, partial(self._rehearsed, rehearsals), rehearsals.failed)
        self.scheduler.add_request(now_ms, request.model, request.id, deadline_ms)

    # --- decisions ----------------------------------------------------------------------------------------------

    def carry_out(self, now_ms: float) -> None:
        """Carry out what the scheduler has decided, and set the timer for what it waits for."""
        scheduler = self.scheduler
        while scheduler.decisions:
            self._on_refusals(scheduler.drain_refusals())
            for decision in scheduler.drain():
                if isinstance(decision, Dispatch):
                    self._on_dispatch(decision)
        self.time.arm(scheduler.next_wake_ms, now_ms)

    def carry_out_refusals(self, now_ms: float) -> None:
        """The same, without its batches: they are sent when the request that was added has its tensors."""
        scheduler = self.scheduler
        if scheduler.decisions:
            self._on_refusals(scheduler.drain_refusals())
        self.time.arm(scheduler.next_wake_ms, now_ms)

    def wake(self, now_ms: float) -> None:
        """Wake the scheduler if it waits for this time, and carry out what it decides."""
        if self.scheduler.next_wake_ms <= now_ms:
            self.scheduler.wake(now_ms)
        self.carry_out(now_ms)

    def _rehearsed(self, rehearsals: Rehearsals, computed: Computed) -> None:
        now_ms = self.time.now_ms
        rehearsals.learn(computed.result, now_ms, computed.cpu_ms)
        self.carry_out(now_ms)

    # --- measured times -----------------------------------------------------------------------------------------

    def learn(self, batch: Batch, ran: BatchRan, gpulet: int, now_ms: float, *, shares_clock: bool) -> float:
        """Learn from a batch of the present plan: the delay to the gpu-let, and measured over planned latency. Return
        the latter in ms."""
        copies_ms = ran.copy_in_ms + ran.copy_out_ms
        if copies_ms:
            self.way.record_copies(copies_ms, batch.size)
        if math.isnan(ran.queue_ms):
            pass  # the batch came while another one ran, so nobody knows when it arrived
        elif shares_clock:  # the same machine
            self.way.record_way(ran.started_at_ms - ran.queue_ms - ran.copy_in_ms - batch.sent_ms)
        else:
            self.way.record_way((now_ms - batch.sent_ms - ran.execution_ms - ran.queue_ms - copies_ms) / 2.0)
        planned_ms = self.scheduler.system.gpulets[gpulet].hosts[batch.program].planned_batch_ms(batch.size)
        factor = self._ratios.record(batch.program, gpulet, ran.execution_ms / planned_ms, self._clock())
        if factor is not None:
            self.scheduler.update_latency(batch.program, gpulet, factor)
        return planned_ms

    def _budget(self) -> NetworkDelay:
        """Return the delays that the core must plan with from now on, and set the patience of its time."""
        delay = self.way.budget()
        self.time.patience_ms = max(LEAST_PATIENCE_MS, delay.response_ms)
        return delay

    # --- state --------------------------------------------------------------------------------------------------

    def slowdowns(self) -> Mapping[int, Mapping[str, float]]:
        """Return measured over planned latency of the programs that ran lately, by gpu-let."""
        programs = self.scheduler.system.programs
        return {
            gpulet: {programs[program].name: round(factor, 4) for program, factor in factors.items()}
            for gpulet, factors in self._ratios.measured(self._clock()).items()
        }

    def status(self) -> SchedulerStatus | None:
        """Return what the scheduler says of itself."""
        return self.scheduler.status() if self._rehearsals is None else self._rehearsals.status()

    def network(self) -> NetworkStatus:
        """Return the delays that it plans with."""
        delay = self.way.told
        return NetworkStatus(delay.ctrl_ms, delay.data_ms_per_request, delay.response_ms)
