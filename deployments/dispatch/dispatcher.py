"""The driver of the scheduler core: requests in, batches out to gpu-lets, answers back.

It lives in the gateway's process, or in a process of its own for a sub-cluster, so that only whole batches and bundles
cross process boundaries. The core decides and this module carries out: it owns the clock, the timer and the open
requests. A request costs no task and no future: everything happens in callbacks of one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tenuto.batching.core.scheduler import Dispatch, Drop, Refusal, Scheduler
from tenuto.batching.core.system import INF, NetworkDelay, System
from tenuto.batching.rehearsal.observer import Rehearsals, rehearsals_of
from tenuto.deployments.dispatch.accounts import Accounts, ModelCounters
from tenuto.deployments.dispatch.charge import Charge
from tenuto.deployments.dispatch.core_time import LEAST_PATIENCE_MS, CoreTime
from tenuto.deployments.dispatch.fleet import (
    AttachedGpulet,
    ConnectionFactory,
    Fleet,
    GpuletConnection,
    gpulet_connection,
)
from tenuto.deployments.dispatch.generations import Generations
from tenuto.deployments.dispatch.in_flight import (
    Asker,
    Batch,
    OpenGeneration,
    Request,
    TokenAsker,
    pack_batch,
    split_reply,
)
from tenuto.deployments.dispatch.measured_times import LatencyRatios, WayMeter
from tenuto.deployments.dispatch.rehearsals import Compute, Computed, RehearsalRunner
from tenuto.deployments.dispatch.unplanned import UnplannedScheduler
from tenuto.deployments.wire.answers import Executed, Loop, Refused, Rule
from tenuto.deployments.wire.arena import Held
from tenuto.deployments.wire.liveness import GIVEN_UP_S
from tenuto.deployments.wire.messages import BatchFailed, BatchRan, Generated, GpuletCloses, Message
from tenuto.deployments.wire.peer import Finder
from tenuto.deployments.wire.status import DispatchingStatus, EndedRequest, GatewayReport, GpuletStatus, NetworkStatus
from tenuto.deployments.wire.tensors import InputPart
from tenuto.errors import refused
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.generating import Sampling

logger = logging.getLogger("ray.serve")

# Builds the core for a plan; called again when the plan changes.
SchedulerFactory = Callable[[Plan, NetworkDelay], Scheduler]

_TOO_LATE = "the deadline could not be met; it was not executed. Lower the rate, raise the SLO or add GPUs"
_NOT_BACK = "its batch did not come back by its deadline; the gpu-let that executes it may hang"
_LEAST_OVERDUE_MS = 20.0  # limit: a loop may stand still this long; no answer is given up sooner after its deadline
_NO_ANSWER = "the gpu-let that executed this batch died; send the request again"


@dataclass(slots=True)
class _Asked:
    """A model that can be asked for: its index and its program's index in the core, its SLO, the planned latency of a
    request alone, and its largest planned batch."""

    index: int
    program: int
    slo_ms: float
    alone_ms: float
    batch_size: int
    counters: ModelCounters


class Dispatcher:
    """Runs one scheduler over the gpu-lets of a plan. All methods must be called on one event loop."""

    def __init__(
        self,
        build_scheduler: SchedulerFactory,
        find_gpulet: Callable[[str], Finder],
        *,
        max_queued: int = 10_000,
        way: WayMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_connection: ConnectionFactory = gpulet_connection,
        compute: Compute | None = None,
        on_change: Callable[[], None] = lambda: None,
        charge: Charge | None = None,
    ) -> None:
        """Prepare without a plan; `apply` gives one.

        Args:
            build_scheduler: makes the scheduler core of a plan.
            find_gpulet: returns the function that finds a gpu-let by its id.
            max_queued: requests of one program that may wait; more are rejected with a time to retry after.
            way: measures the delays to gpu-lets.
            clock: monotonic seconds.
            make_connection: makes the connections to gpu-lets.
            compute: runs the replays of rehearsals; by default in another process.
            on_change: called when a gpu-let comes, goes or changes what it holds, and after a new plan.
            charge: says whether this dispatcher is in charge of the gpu-lets; by default it always is.
        """
        self._build_scheduler = build_scheduler
        self._on_change = on_change
        self._max_queued = max_queued
        self._clock = clock
        self._time = CoreTime(clock, self._on_timer)
        self.accounts = Accounts()
        self._ids = itertools.count()
        self._open: dict[int, Request] = {}
        self._numbers = itertools.count()
        self._fleet = Fleet(find_gpulet, self, make_connection)
        self._charge = charge or Charge()
        self._generations = Generations(self.accounts, self._charge, lambda: self._time.clock_ms)
        self._plan: Plan | None = None
        self._plan_data: dict[str, Any] | None = None
        self._scheduler: Scheduler = UnplannedScheduler()
        self._generation = 0
        self._asked: dict[str, _Asked] = {}
        self.way = way or WayMeter()
        self._latency_ratios = LatencyRatios()
        self._rehearsals: Rehearsals | None = None  # of the scheduler
        self._runner = RehearsalRunner(compute)
        self._ticker: asyncio.TimerHandle | None = None
        self._overdue: asyncio.TimerHandle | None = None  # rings when a running batch may be overdue

    def configure(self, build_scheduler: SchedulerFactory, *, max_queued: int) -> None:
        """Set what the next `apply` will use."""
        self._build_scheduler = build_scheduler
        self._max_queued = max_queued

    # --- the plan -----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan that is being served."""
        return self._plan

    def apply(self, plan: Plan, standby: Sequence[str] = ()) -> None:
        """Serve `plan` from now on. Waiting requests move to its scheduler, running batches are still answered, and
        gpu-lets that are in both plans keep their connections.

        The gpu-lets with the ids in `standby` are connected but not used, so that a later plan can use them at once.

        Raises:
            InvalidInputError: the scheduler aborts running batches, which gpu-lets cannot do.
        """
        now = self._time.now_ms
        self.way.follow(plan)
        scheduler = self._build_scheduler(plan, self._budget())
        if scheduler.preempts:
            cure = "Serve with deferred, symphony or eager; simulate with this one."
            raise refused("scheduler", scheduler.name, "aborts running batches, which only virtual time can", cure)
        scheduler.update_network(self.way.told)
        scheduler.drain()
        self._plan = plan
        self._plan_data = plan.to_data()
        self._generation += 1
        self.accounts.events.add(
            "plan applied", f"{len(plan.models)} models on {len(plan.gpulets)} gpu-lets, policy {plan.policy.name}"
        )
        self._scheduler, self._rehearsals = scheduler, rehearsals_of(scheduler)
        alone_ms = _alone_ms(scheduler.system)
        self._asked = {}
        sizes: dict[str, int] = {}
        for planned in (program for gpulet in plan.gpulets for program in gpulet.programs):
            sizes |= {name: max(planned.batch_size, sizes.get(name, 1)) for name in planned.models}
        for index, (spec, program) in enumerate(zip(plan.models, scheduler.system.program_of, strict=True)):
            counters = self.accounts.counters[spec.name]
            counters.follow(spec)
            self._asked[spec.name] = _Asked(
                index, program, spec.slo_ms, alone_ms[index], sizes.get(spec.name, 1), counters
            )
        self._latency_ratios.restart()
        self._fleet.adopt(plan, standby)
        self._generations.follow(lambda: self._fleet, self._asked)
        self.accounts.advice.follow(plan, self._clock())
        if self._ticker is None:
            self._tick()
        for index in range(len(plan.gpulets)):
            scheduler.gpulet_lost(now, index)
            self._offer(self._fleet[index], now)
        for request in list(self._open.values()):
            if request.name in self._asked:
                request.model = self._asked[request.name].index
                if request.is_waiting:
                    self._enqueue(request, now)
            elif request.is_waiting:
                self._refuse(request, _removed(request.name))
        self._carry_out(now)
        self._on_change()

    def _tick(self) -> None:
        """Do the work of every second: advice, fading factors, delays. It does not depend on arrivals."""
        now_s = self._clock()
        self.accounts.advice.tick(now_s)
        for program, gpulet, factor in self._latency_ratios.fade(now_s):
            self._scheduler.update_latency(program, gpulet, factor)
        self._scheduler.update_network(self._budget())
        self._ticker = asyncio.get_running_loop().call_later(1.0, self._tick)

    def _offer(self, gpulet: AttachedGpulet, now: float) -> None:
        """Let the core use a gpu-let once it is connected, holds what the plan says, and is idle."""
        if self._fleet.offer(gpulet):
            assert gpulet.index is not None
            self._scheduler.gpulet_back(now, gpulet.index)
            self._on_change()

    def _offer_now(self, gpulet: AttachedGpulet) -> None:
        now = self._time.now_ms
        self._offer(gpulet, now)
        self._carry_out(now)

    def _withhold(self, gpulet: AttachedGpulet, now: float) -> None:
        """Stop the core from using a gpu-let until it is offered again."""
        gpulet.is_used = False
        if gpulet.index is not None:
            self._scheduler.gpulet_lost(now, gpulet.index)

    async def close(self) -> None:
        """Answer every open request as failed, and disconnect."""
        self._time.close()
        self._runner.close()
        for timer in (self._ticker, self._overdue):
            if timer is not None:
                timer.cancel()
        for request in list(self._open.values()):
            self._refuse(request, Refused(Outcome.FAILED, "the server is shutting down; send the request again"))
        self._generations.close()
        await self._fleet.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def admit(
        self,
        model: str,
        asker: Asker,
        *,
        arrived_ms: float | None = None,
        slo_ms: float | None = None,
        client_id: str = "",
        reserve_ms: float = 0.0,
        yields: bool = False,
    ) -> Request:
        """Give the core a request whose tensors are not read yet. When `asker.refused` is called before this returns,
        the tensors need not be read. Otherwise `start` or `cancel` must follow at once.

        Args:
            model: a model of the plan.
            asker: is told how the request ended.
            arrived_ms: when the request came, on the monotonic clock; default now.
            slo_ms: time allowed from then; the model's SLO by default. With zero or less the request expires at once.
            client_id: the client's id of the request; it travels to the gpu-let's log.
            reserve_ms: time kept of the deadline for the way back to the client.
            yields: the request may only fill up batches: when a full batch of its model waits, it is turned away.

        Raises:
            KeyError: the plan has no such model.
        """
        asked = self._asked[model]
        now = self._time.now_ms
        arrived = now if arrived_ms is None else arrived_ms
        deadline = arrived + (asked.slo_ms if slo_ms is None else slo_ms)
        request = Request(
            next(self._ids), model, asked.index, arrived, deadline, reserve_ms, client_id, asker, yields=yields
        )
        asked.counters.submitted += 1
        self._open[request.id] = request
        scheduler = self._scheduler
        waiting = scheduler.queued(asked.program)
        if waiting >= self._max_queued:
            self._reject(request, Rule.FULL, f"{self._max_queued} requests of '{model}' are waiting")
            return request
        if yields and waiting >= asked.batch_size:
            self._reject(request, Rule.YIELDED, f"it has a lower priority, and a full batch of '{model}' waits")
            return request
        if deadline - reserve_ms < now + asked.alone_ms:
            self._expire(request, Rule.TOO_LATE)
            return request
        self._enqueue(request, now)
        if scheduler.decisions:
            self._carry_out_refusals(scheduler.drain_refusals())
        self._time.arm(scheduler.next_wake_ms, now)
        return request

    def start(self, request: Request, parts: Sequence[InputPart], memory: Held | None = None) -> None:
        """Give an admitted request its tensors, one per input in the order of the signature, for one sample.

        `memory` is the shared memory in which they lie, if any. It is held for as long as gpu-lets may read it.
        """
        request.parts = parts
        request.memory = memory
        if self._scheduler.decisions:
            self._carry_out(self._time.now_ms)

    def cancel(self, request: Request) -> None:
        """Forget a request whose client went away. When it already runs, it runs on, but its answer goes nowhere."""
        if self._open.pop(request.id, None) is None:
            return
        self.accounts.counters[request.name].cancelled += 1
        now = self._time.now_ms
        if request.is_waiting:
            self._scheduler.cancel(now, request.model, request.id)
        self._carry_out(now)

    def generate(
        self,
        model: str,
        asker: TokenAsker,
        prompt: list[int],
        sampling: Sampling,
        *,
        arrived_ms: float | None = None,
        ttft_ms: float = INF,
        tpot_ms: float = INF,
        client_id: str = "",
    ) -> OpenGeneration:
        """Generate after a prompt; `asker` is told of each token.

        Args:
            model: a model of the plan that generates.
            asker: is told what comes.
            prompt: its tokens.
            sampling: how further ones are chosen.
            arrived_ms: when the request came, on the monotonic clock; default now.
            ttft_ms: time allowed from then to the first token.
            tpot_ms: mean time allowed for each further one.
            client_id: the client's id of the request.

        Raises:
            KeyError: the plan has no such model.
        """
        _ = self._asked[model]
        arrived = self._time.clock_ms if arrived_ms is None else arrived_ms
        return self._generations.begin(
            model, asker, prompt, sampling, arrived_ms=arrived, ttft_ms=ttft_ms, tpot_ms=tpot_ms, client_id=client_id
        )

    def leave(self, generation: OpenGeneration, *, is_answered: bool = False) -> None:
        """Forget a generation whose client went away, or that has brought all that was wanted."""
        self._generations.leave(generation, is_answered=is_answered)

    def _enqueue(self, request: Request, now: float) -> None:
        """Give the core a request that it does not hold."""
        # The core subtracts its own budget for the way back. It is added here, as this request has its own reserve.
        deadline_ms = request.deadline_ms - request.reserve_ms + self.way.told.response_ms
        rehearsals = self._rehearsals
        if rehearsals is not None and (replay := rehearsals.arrived(now, request.model, deadline_ms)) is not None:
            self._runner.begin(replay, rehearsals.due_ms(now, replay) - now, partial(self._rehearsed, rehearsals))
        self._scheduler.add_request(now, request.model, request.id, deadline_ms)

    def _reject(self, request: Request, rule: Rule, reason: str) -> None:
        """Refuse a request because too many others of its model wait."""
        wait_s = max(0.1, self._asked[request.name].slo_ms / 1000.0)
        self._refuse(request, Refused(Outcome.REJECTED, f"{reason}; retry in {wait_s:g} s", wait_s, rule=rule))

    def _refuse(self, request: Request, refused: Refused) -> None:
        """End an open request with a refusal; does nothing for a request that is no longer open."""
        if self._open.pop(request.id, None) is not None:
            self.accounts.refused(request, refused, self._time.clock_ms)
            request.asker.refused(request, refused)

    # --- decisions ----------------------------------------------------------------------------------------------

    def _carry_out_refusals(self, refusals: Sequence[Refusal]) -> None:
        for refusal in refusals:
            for number in refusal.request_ids:
                request = self._open.get(number)
                if request is None:
                    continue
                if isinstance(refusal, Drop):
                    self._expire(request, Rule.CUT)
                else:
                    reason = f"'{request.name}' exceeds the rate it is planned for. Send less, or plan for more"
                    wait_s = refusal.retry_after_ms / 1000.0
                    self._refuse(request, Refused(Outcome.REJECTED, reason, wait_s, rule=Rule.BEYOND_PLAN))

    def _carry_out(self, now: float) -> None:
        scheduler = self._scheduler
        while scheduler.decisions:
            self._carry_out_refusals(scheduler.drain_refusals())
            for decision in scheduler.drain():
                if isinstance(decision, Dispatch):
                    self._dispatch(decision, now)
        self._time.arm(scheduler.next_wake_ms, now)

    def _on_timer(self, now: float) -> None:
        scheduler = self._scheduler
        if scheduler.next_wake_ms <= now:
            scheduler.wake(now)
        self._carry_out(now)

    def _dispatch(self, decision: Dispatch, now: float) -> None:
        opened = self._open
        requests = [request for number in decision.request_ids if (request := opened.get(number)) is not None]
        program = self._scheduler.system.programs[decision.program]
        if len(program.members) == 1:
            members = [(program.name, len(requests))]
        else:
            requests.sort(key=lambda request: request.name)
            members = list(Counter(request.name for request in requests).items())
        gpulet = self._fleet[decision.gpulet]
        batch = Batch(
            next(self._numbers),
            decision.program,
            program.name,
            members,
            requests,
            self._generation,
            now,
            self._time.clock_ms,
            decision.start_ms,
            decision.finish_ms,
        )
        gpulet.running[batch.number] = batch
        if not requests:
            # Every client left between the decision and now. The core still expects the end of this batch.
            asyncio.get_running_loop().call_soon(self._empty_batch_done, gpulet, batch)
            return
        batch.take()
        self.way.reserve([request.reserve_ms for request in requests])
        self.accounts.batch_sent(batch)
        self._charge.once_obeyed(partial(self._send, gpulet, batch))
        if self._overdue is None:
            self._look_for_overdue()

    def _send(self, gpulet: AttachedGpulet, batch: Batch) -> None:
        """Send a batch, unless its gpu-let is gone and its requests were given to others."""
        if batch.number in gpulet.running:
            gpulet.connection.send(*pack_batch(batch, shares_memory=gpulet.connection.shares_memory))

    def _empty_batch_done(self, gpulet: AttachedGpulet, batch: Batch) -> None:
        if self._fleet.take(gpulet, batch.number) is not None:
            now = self._time.now_ms
            self._done(gpulet, batch, now)
            self._carry_out(now)

    def _look_for_overdue(self) -> None:
        """Refuse requests whose batch may never come back. A request counts as such when its deadline has passed by as
        long as its batch was to take. So a batch that is only a little late is still answered."""
        now, next_ms = self._time.clock_ms, INF
        hanging = []
        for gpulet in self._fleet.attached():
            for batch in gpulet.running.values():
                lost_ms = batch.finish_ms + 1000.0 * GIVEN_UP_S
                if lost_ms > now:
                    next_ms = min(next_ms, lost_ms)
                elif gpulet.is_used:
                    hanging.append(gpulet)
                next_ms = min(next_ms, self._answer_overdue(gpulet, batch, now))
        wait_ms = max(_LEAST_OVERDUE_MS, next_ms - now)
        loop = asyncio.get_running_loop()
        self._overdue = None if next_ms == INF else loop.call_later(wait_ms / 1000.0, self._look_for_overdue)
        if hanging:
            self._count_out(hanging)

    def _answer_overdue(self, gpulet: AttachedGpulet, batch: Batch, now: float) -> float:
        """Refuse the overdue requests of a batch; return when the next of its requests will be overdue."""
        grace_ms = max(_LEAST_OVERDUE_MS, batch.finish_ms - batch.start_ms)
        next_ms = INF
        for request in batch.requests:
            overdue_ms = request.deadline_ms + grace_ms
            if overdue_ms > now:
                next_ms = min(next_ms, overdue_ms)
            else:
                self._refuse(request, Refused(Outcome.EXPIRED, _NOT_BACK, 1.0, gpulet.id))
        return next_ms

    def _count_out(self, hanging: Sequence[AttachedGpulet]) -> None:
        """Tell the core that gpu-lets which hang are lost, until they answer."""
        now = self._time.now_ms
        for gpulet in dict.fromkeys(hanging):
            self.accounts.events.add("gpu-let hangs", f"{gpulet.id}: a batch should have ended {GIVEN_UP_S:g} s ago")
            self._withhold(gpulet, now)
        self._carry_out(now)

    def _expire(self, request: Request, rule: Rule) -> None:
        """Refuse a request whose deadline cannot be met. When it could be met but for the reserve, name the margin."""
        asked = self._asked.get(request.name)
        alone_ms = asked.alone_ms if asked is not None else 0.0
        loop = Loop.MARGIN if self._time.clock_ms + alone_ms <= request.deadline_ms else Loop.NONE
        self._refuse(request, Refused(Outcome.EXPIRED, _TOO_LATE, 1.0, rule=rule, loop=loop))

    def _rehearsed(self, rehearsals: Rehearsals, computed: Computed) -> None:
        now = self._time.now_ms
        rehearsals.learn(computed.result, now, computed.cpu_ms)
        self._carry_out(now)

    # --- events of gpu-lets (ConnectionEvents) ------------------------------------------------------------------------

    def peer_connected(self, connection: GpuletConnection) -> None:
        """Take note that a gpu-let is connected."""
        gpulet = self._fleet.behind(connection)
        gpulet.failures = 0
        self.accounts.events.add("gpu-let connected", gpulet.id)
        self.state_changed(connection)

    def state_changed(self, connection: GpuletConnection) -> None:
        """Take note that a gpu-let sent its state, which says what it holds."""
        self._charge.heard(connection)
        self._offer_now(self._fleet.behind(connection))
        self._on_change()

    def peer_lost(self, connection: GpuletConnection, reason: str) -> None:
        """Take note that a gpu-let is gone, and retry the requests of its batches."""
        gpulet = self._fleet.behind(connection)
        now = self._time.now_ms
        gpulet.lost += 1
        self.accounts.events.add("gpu-let lost", f"{gpulet.id}: {reason}")
        lost = gpulet.lose()
        self._withhold(gpulet, now)
        self._generations.lost(gpulet, reason)
        for batch in lost:
            self._retry_or_fail(batch, now, f"{_NO_ANSWER} ({reason})")
        self._charge.lost(connection)
        self._carry_out(now)
        self._on_change()

    def message_came(self, connection: GpuletConnection, message: Message, body: memoryview) -> None:
        """Take a message of a gpu-let: the answer to a batch, or that it closes."""
        gpulet = self._fleet.behind(connection)
        if isinstance(message, BatchRan):
            self._batch_ran(gpulet, message, body)
        elif isinstance(message, BatchFailed):
            self._batch_failed(gpulet, message)
        elif isinstance(message, Generated):
            self._generations.came(gpulet, message)
        elif isinstance(message, GpuletCloses):
            self._closes(gpulet, message)
        else:
            logger.warning("gpu-let %s sent a %s, which nobody asked for", gpulet.id, type(message).__name__)

    def _batch_ran(self, gpulet: AttachedGpulet, ran: BatchRan, body: memoryview) -> None:
        batch = self._fleet.take(gpulet, ran.number)
        if batch is None:
            return  # the batch of a gpu-let that was given up
        now = self._time.now_ms
        gpulet.failures = 0
        gpulet.batches += 1
        gpulet.busy_ms += ran.execution_ms
        if gpulet.index is not None:
            if batch.generation == self._generation:
                self._learn(gpulet, batch, ran, now)
            self._done(gpulet, batch, now)
            # The gpu-let is idle, so the next batch is sent before the answers of this one are taken apart.
            if self._scheduler.next_wake_ms <= now:
                self._scheduler.wake(now)
            self._carry_out(now)
        self.accounts.advice.executed(gpulet.id, ran.execution_ms)
        state = gpulet.connection.state
        for requests, executed in split_reply(
            batch,
            ran,
            body,
            gpulet=gpulet.id,
            emulated=state is not None and state.emulated,
            shares_clock=gpulet.connection.shares_memory,
            way_ms=self.way.told.ctrl_ms,
        ):
            self._answer(requests, executed)

    def _answer(self, requests: list[Request], executed: Executed) -> None:
        """Answer the requests of one model in a batch. Requests whose client went away meanwhile are not counted."""
        opened = self._open
        rows = [(request, row) for row, request in enumerate(requests) if opened.pop(request.id, None) is not None]
        if not rows:
            return
        self.accounts.executed([request for request, _ in rows], executed, self._time.clock_ms)
        for request, row in rows:
            request.asker.executed(request, executed, row)

    def _learn(self, gpulet: AttachedGpulet, batch: Batch, ran: BatchRan, now: float) -> None:
        """Learn from a batch of the present plan: the delay to the gpu-let, and measured over planned latency."""
        assert gpulet.index is not None
        copies_ms = ran.copy_in_ms + ran.copy_out_ms
        if copies_ms:
            self.way.record_copies(copies_ms, batch.size)
        if math.isnan(ran.queue_ms):
            pass  # the batch came while another one ran, so nobody knows when it arrived
        elif gpulet.connection.shares_memory:  # the same machine, so the same clock
            self.way.record_way(ran.started_at_ms - ran.queue_ms - ran.copy_in_ms - batch.sent_ms)
        else:
            self.way.record_way((now - batch.sent_ms - ran.execution_ms - ran.queue_ms - copies_ms) / 2.0)
        host = self._scheduler.system.gpulets[gpulet.index].hosts[batch.program]
        planned = host.planned_batch_ms(batch.size)
        gpulet.predicted_ms += planned
        factor = self._latency_ratios.record(batch.program, gpulet.index, ran.execution_ms / planned, self._clock())
        if factor is not None:
            self._scheduler.update_latency(batch.program, gpulet.index, factor)

    def _budget(self) -> NetworkDelay:
        """Return the delays that the core must plan with from now on, and set the patience of its time."""
        told = self.way.budget()
        self._time.patience_ms = max(LEAST_PATIENCE_MS, told.response_ms)
        return told

    def _done(self, gpulet: AttachedGpulet, batch: Batch, now: float) -> None:
        """Tell the core that a batch ended. A gpu-let that ran a batch of an older plan is offered to the core now."""
        if not gpulet.is_used:
            self._offer(gpulet, now)
        elif gpulet.index is not None and batch.generation == self._generation:
            self._scheduler.batch_done(now, gpulet.index)

    def _batch_failed(self, gpulet: AttachedGpulet, failed: BatchFailed) -> None:
        """Retry the requests if the gpu-let says that they may be retried, and let the gpu-let rest for a moment. A
        gpu-let that fails batches at once would be idle at once and draw all the traffic."""
        batch = self._fleet.take(gpulet, failed.number)
        if batch is None:
            return
        now = self._time.now_ms
        if gpulet.index is not None:
            if gpulet.is_used and batch.generation == self._generation:
                self._scheduler.batch_done(now, gpulet.index)
            self._let_rest(gpulet, now)
        if failed.may_retry:
            self._retry_or_fail(batch, now, failed.reason)
        else:
            for request in batch.requests:
                self._refuse(request, Refused(Outcome.FAILED, failed.reason, gpulet=gpulet.id))
        self._carry_out(now)

    def _let_rest(self, gpulet: AttachedGpulet, now: float) -> None:
        if gpulet.is_used and not gpulet.running:
            self._withhold(gpulet, now)
        gpulet.is_resting = True
        self.accounts.events.add("gpu-let rests", f"{gpulet.id}: a batch failed there")
        self._on_change()
        asyncio.get_running_loop().call_later(gpulet.rest_s(), self._rested, gpulet)

    def _rested(self, gpulet: AttachedGpulet) -> None:
        gpulet.is_resting = False
        self._offer_now(gpulet)

    def _closes(self, gpulet: AttachedGpulet, message: GpuletCloses) -> None:
        """Send no more batches to a gpu-let that closes. It still answers the batches that it has begun."""
        logger.warning("gpu-let %s closes: %s", gpulet.id, message.reason)
        gpulet.is_closing = True
        self.accounts.events.add("gpu-let closes", f"{gpulet.id}: {message.reason}")
        now = self._time.now_ms
        if gpulet.is_used:
            self._withhold(gpulet, now)
            self._carry_out(now)
        self._on_change()

    def _retry_or_fail(self, batch: Batch, now: float, reason: str) -> None:
        """Queue the requests of a lost batch once more. The core drops those whose deadline cannot be met any more."""
        for request in batch.requests:
            if request.id not in self._open:
                continue
            if request.was_retried or request.deadline_ms <= now:
                self._refuse(request, Refused(Outcome.FAILED, reason))
            elif request.name not in self._asked:
                self._refuse(request, _removed(request.name))
            else:
                request.was_retried = True
                request.is_waiting = True
                self._enqueue(request, now)

    # --- state --------------------------------------------------------------------------------------------------

    def is_ready(self, model: str | None = None) -> bool:
        """Whether every gpu-let is connected and holds its models; with a model, whether at least one of its
        gpu-lets does."""
        return self._fleet.is_ready(model)

    def signature(self, model: str) -> ModelSignature | None:
        """Return a model's signature as its first connected gpu-let reported it; None before one connected."""
        return self._fleet.signature(model)

    async def status(self) -> DispatchingStatus:
        """Return the plan, the state of the gpu-lets, the counts, and measured beside planned latencies."""
        plan, accounts, told_ms = self._plan, self.accounts, self.way.told
        if plan is None:
            return DispatchingStatus(events=accounts.events.newest())
        waiting = await self.waiting()
        told = self._scheduler.status() if self._rehearsals is None else self._rehearsals.told()
        return DispatchingStatus(
            plan=self._plan_data,
            policy=plan.policy.name,
            gpulets=self.gpulets(),
            models={
                spec.name: accounts.counters[spec.name].status(
                    spec, plan.expected.models.get(spec.name), waiting[spec.name]
                )
                for spec in plan.models
            },
            network=NetworkStatus(told_ms.ctrl_ms, told_ms.data_ms_per_request, told_ms.response_ms),
            autoscale=accounts.advice.status(self._clock()),
            scheduler=told,
            schedulers=[] if told is None else [told],
            events=accounts.events.newest(),
        )

    async def waiting(self) -> dict[str, int]:
        """Return how many requests of every model wait for a batch."""
        waiting = Counter(request.name for request in self._open.values() if request.is_waiting)
        return {name: waiting[name] for name in self._asked}

    async def ended(self, id: str | None, limit: int) -> list[EndedRequest]:
        """Return the last requests that ended, newest first; with an id, only those with this id."""
        return self.accounts.ended.newest(id, limit)

    async def meet(self, told: GatewayReport) -> list[GatewayReport]:
        """Return the gateway's own report: a gateway that schedules by itself is the only one."""
        return [told]

    def connected(self) -> dict[str, int]:
        """Return nothing: there are no sub-clusters."""
        return {}

    def gpulets(self) -> list[GpuletStatus]:
        """Return for every gpu-let what it reported when it connected, whether it is up, and measured over planned
        latency of its programs."""
        programs = self._scheduler.system.programs
        measured = self._latency_ratios.measured(self._clock())
        return self._fleet.descriptions(
            {
                gpulet: {programs[program].name: round(factor, 4) for program, factor in factors.items()}
                for gpulet, factors in measured.items()
            }
        )


def _removed(model: str) -> Refused:
    return Refused(Outcome.FAILED, f"'{model}' was removed from the plan")


def _alone_ms(system: System) -> list[float]:
    """Return the planned latency of a batch of one on the fastest gpu-let, by model; 0 for models that none hosts."""
    fastest: dict[int, float] = {}
    for hosts in system.distinct_hosts():
        for program, host in hosts.items():
            fastest[program] = min(fastest.get(program, INF), host.planned_batch_ms(1))
    return [fastest.get(program, 0.0) for program in system.program_of]
