"""The batches that run on gpu-lets: sent, answered, run again in halves where a model raised an error, retried where a
gpu-let is lost, and given up where one hangs.

An error that a model raises is the fault of a request or of the model. It says nothing of the gpu-let, which stays
ready. A gpu-let becomes unready when it says so itself, when it is lost, or when it hangs. When its process dies or
crashes, what it held is tried once more elsewhere (retry).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from tenuto.batching.core.scheduler import Dispatch
from tenuto.batching.core.system import INF
from tenuto.deployments.dispatch.counters import Counters
from tenuto.deployments.dispatch.driven_scheduler import DrivenScheduler
from tenuto.deployments.dispatch.fleet import AttachedGpulet, ConnectionFactory, Fleet, GpuletConnection
from tenuto.deployments.dispatch.generations import Generations
from tenuto.deployments.dispatch.in_flight import Batch, Request, Rerun, pack_batch, split_reply
from tenuto.deployments.dispatch.leadership import Leadership
from tenuto.deployments.dispatch.open_requests import OpenRequests
from tenuto.deployments.dispatch.readiness import READINESS, GpuletEvent, Readiness
from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.liveness import GIVEN_UP_S
from tenuto.deployments.wire.messages import BatchFailed, BatchRan, Generated, GpuletCloses, Message
from tenuto.deployments.wire.peer import Finder
from tenuto.outcome import Outcome, Rule
from tenuto.placement import Plan

logger = logging.getLogger("ray.serve")

_NOT_BACK = "its batch did not come back by its deadline; the gpu-let that executes it may hang"
_LEAST_OVERDUE_MS = 20.0  # limit: a loop may stand still this long; no answer is given up sooner after its deadline
_NO_ANSWER = "the gpu-let that executed this batch died; send the request again"
_NO_TIME_AGAIN = "another request of its batch failed, and its deadline leaves no time to run it again"


class SentBatches:
    """Tells the scheduler which gpu-lets it may use, and when a batch has ended."""

    def __init__(
        self,
        core: DrivenScheduler,
        requests: OpenRequests,
        accounts: Counters,
        leadership: Leadership,
        find_gpulet: Callable[[str], Finder],
        make_connection: ConnectionFactory,
        on_change: Callable[[], None],
    ) -> None:
        """Begin without gpu-lets.

        Args:
            core: decides on batches.
            requests: that batches are made of.
            accounts: counts what is sent.
            leadership: says when batches may be sent.
            find_gpulet: returns the function that finds a gpu-let by its id.
            make_connection: makes the connections to gpu-lets.
            on_change: called when a gpu-let comes, goes or changes what it holds.
        """
        self._core, self._requests, self._accounts, self._leadership = core, requests, accounts, leadership
        self._on_change = on_change
        self._numbers = itertools.count()
        self.fleet = Fleet(find_gpulet, self, make_connection)
        self.generations = Generations(self.fleet, accounts, leadership, core.time)
        self._overdue: asyncio.TimerHandle | None = None  # rings when a running batch may be overdue

    def adopt(self, plan: Plan, standby: Sequence[str], now: float) -> None:
        """Connect to the gpu-lets of a plan that the scheduler follows."""
        self.fleet.adopt(plan, standby)
        for index in range(len(plan.gpulets)):
            self._core.scheduler.gpulet_lost(now, index)
            self._offer(self.fleet[index], now)

    async def close(self) -> None:
        """End generations, and disconnect."""
        if self._overdue is not None:
            self._overdue.cancel()
        self.generations.close()
        for gpulet in self.fleet.attached():
            gpulet.end_rest()
        await self.fleet.close()

    # --- to gpu-lets ------------------------------------------------------------------------------------------------

    def send(self, decision: Dispatch, requests: list[Request]) -> None:
        """Send a batch."""
        core = self._core
        program = core.scheduler.system.programs[decision.program]
        if len(program.members) > 1 or (requests and requests[0].sizes):
            requests.sort(key=lambda request: (request.name, request.sizes))  # equal shapes are answered together
        gpulet = self.fleet[decision.gpulet]
        times = core.time.clock_ms, decision.start_ms, decision.finish_ms
        batch = Batch(next(self._numbers), decision.program, program.name, requests, core.plan_number, *times)
        if requests:
            self._begin(gpulet, batch)
        else:
            # Every client left between the decision and now. The core still expects the end of this batch.
            gpulet.running[batch.number] = batch
            asyncio.get_running_loop().call_soon(self._empty_batch_done, gpulet, batch)

    def _begin(self, gpulet: AttachedGpulet, batch: Batch) -> None:
        """Send a batch with requests, and look after it until it is answered."""
        gpulet.running[batch.number] = batch
        batch.mark_sent()
        self._core.way.reserve([request.reserve_ms for request in batch.requests])
        state = gpulet.connection.state
        self._accounts.batch_sent(batch, None if state is None else state.signatures.get(batch.name))
        self._leadership.once_obeyed(partial(self._send, gpulet, batch))
        ends_in_s = (batch.finish_ms - self._core.time.clock_ms) / 1000.0
        hangs_at_s = asyncio.get_running_loop().time() + ends_in_s + GIVEN_UP_S
        if self._overdue is None or self._overdue.when() > hangs_at_s:
            self._look_for_overdue()

    def _send(self, gpulet: AttachedGpulet, batch: Batch) -> None:
        """Send a batch, unless its gpu-let is gone and its requests were given to others."""
        if batch.number in gpulet.running:
            gpulet.connection.send(*pack_batch(batch, shares_memory=gpulet.connection.shares_memory))

    def _empty_batch_done(self, gpulet: AttachedGpulet, batch: Batch) -> None:
        if self.fleet.pop_batch(gpulet, batch.number) is not None:
            now = self._core.time.now_ms
            self._done(gpulet, batch, now)
            self._core.carry_out(now)

    def _offer(self, gpulet: AttachedGpulet, now: float) -> None:
        """Let the core use a gpu-let once it is connected, holds what the plan says, and is idle."""
        if self.fleet.offer(gpulet):
            assert gpulet.index is not None
            self._core.scheduler.gpulet_back(now, gpulet.index)

    def _offer_now(self, gpulet: AttachedGpulet) -> None:
        now = self._core.time.now_ms
        self._offer(gpulet, now)
        self._core.carry_out(now)

    def _withhold(self, gpulet: AttachedGpulet, now: float) -> None:
        """Stop the core from using a gpu-let until it is offered again."""
        gpulet.is_used = False
        if gpulet.index is not None:
            self._core.scheduler.gpulet_lost(now, gpulet.index)

    # --- overdue ----------------------------------------------------------------------------------------------------

    def _look_for_overdue(self) -> None:
        """Refuse requests whose batch may never come back. A request counts as such when its deadline has passed by as
        long as its batch was to take. So a batch that is only a little late is still answered."""
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        now, next_ms = self._core.time.clock_ms, INF
        hanging = []
        for gpulet in list(self.fleet.attached()):
            for batch in list(gpulet.running.values()):
                lost_ms = batch.finish_ms + 1000.0 * GIVEN_UP_S
                if lost_ms > now:
                    next_ms = min(next_ms, lost_ms)
                elif gpulet.readiness in READINESS.transitions[GpuletEvent.OVERDUE]:
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
        for request in batch.unanswered:
            overdue_ms = request.deadline_ms + grace_ms
            if overdue_ms > now:
                next_ms = min(next_ms, overdue_ms)
            else:
                self._requests.refuse(request, Refused(Outcome.EXPIRED, _NOT_BACK, 1.0, gpulet.id, Rule.LOST))
        return next_ms

    def _count_out(self, hanging: Sequence[AttachedGpulet]) -> None:
        """Tell the core that gpu-lets which hang are lost, until they answer."""
        now = self._core.time.now_ms
        for gpulet in dict.fromkeys(hanging):
            self._accounts.happened("gpu-let hangs", f"{gpulet.id}: a batch should have ended {GIVEN_UP_S:g} s ago")
            gpulet.take_event(GpuletEvent.OVERDUE)
            self._withhold(gpulet, now)
        self._core.carry_out(now)
        self._on_change()

    # --- events of gpu-lets (ConnectionEvents) ------------------------------------------------------------------------

    def peer_connected(self, connection: GpuletConnection) -> None:
        """Take note that a gpu-let is connected."""
        gpulet = self.fleet.behind(connection)
        gpulet.failures = 0
        gpulet.take_event(GpuletEvent.CONNECTED)
        self._accounts.happened("gpu-let connected", gpulet.id)
        self.state_changed(connection)

    def state_changed(self, connection: GpuletConnection) -> None:
        """Take note that a gpu-let sent its state, which says what it holds."""
        self._leadership.heard(connection)
        self._offer_now(self.fleet.behind(connection))
        self._on_change()

    def peer_lost(self, connection: GpuletConnection, reason: str) -> None:
        """Take note that a gpu-let is gone, and retry the requests of its batches."""
        gpulet = self.fleet.behind(connection)
        now = self._core.time.now_ms
        gpulet.lost += 1
        self._accounts.happened("gpu-let lost", f"{gpulet.id}: {reason}")
        lost = gpulet.lose()
        self._withhold(gpulet, now)
        for batch in lost:
            self._retry_or_fail(batch.unanswered, now, f"{_NO_ANSWER} ({reason})", Rule.LOST)
        self.generations.lost(gpulet, reason)
        self._leadership.lost(connection)
        self._core.carry_out(now)
        self._on_change()

    def message_came(self, connection: GpuletConnection, message: Message, body: memoryview) -> None:
        """Take a message of a gpu-let: the answer to a batch, or that it closes."""
        gpulet = self.fleet.behind(connection)
        if isinstance(message, BatchRan):
            self._batch_ran(gpulet, message, body)
        elif isinstance(message, BatchFailed):
            self._batch_failed(gpulet, message)
        elif isinstance(message, Generated):
            self.generations.came(gpulet, message)
        elif isinstance(message, GpuletCloses):
            self._closes(gpulet, message)
        else:
            logger.warning("gpu-let %s sent a %s, which nobody asked for", gpulet.id, type(message).__name__)

    def _batch_ran(self, gpulet: AttachedGpulet, ran: BatchRan, body: memoryview) -> None:
        if (batch := self._answered(gpulet, ran.number)) is None:
            return
        core = self._core
        now = core.time.now_ms
        gpulet.failures = 0
        gpulet.batches += 1
        gpulet.busy_ms += ran.execution_ms
        shares_clock = gpulet.connection.shares_memory
        if gpulet.index is not None and batch.plan_number == core.plan_number:
            gpulet.predicted_ms += core.learn(batch, ran, gpulet.index, now, shares_clock=shares_clock)
        self._done(gpulet, batch, now)
        # The gpu-let is idle, so the next batch is sent before the answers of this one are taken apart.
        core.wake(now)
        if batch.online_part < 1.0:
            offline = Counter(request.name for request in batch.requests if request.offline)
            self._accounts.offline_ran(offline, len(batch.requests), ran.execution_ms)
        state = gpulet.connection.state
        for requests, executed in split_reply(
            batch,
            ran,
            body,
            gpulet=gpulet.id,
            emulated=state is not None and state.emulated,
            shares_clock=shares_clock,
            way_ms=core.way.told.ctrl_ms,
        ):
            self._requests.executed(requests, executed)

    def _answered(self, gpulet: AttachedGpulet, number: int) -> Batch | None:
        """Return the batch that a gpu-let answers; None for one that was given up. A gpu-let that has answered all its
        batches does not hang."""
        batch = self.fleet.pop_batch(gpulet, number)
        if gpulet.readiness is Readiness.HANGING and not gpulet.running:
            gpulet.take_event(GpuletEvent.ANSWERED)
            self._on_change()
        return batch

    def _done(self, gpulet: AttachedGpulet, batch: Batch, now: float) -> None:
        """Tell the core that a batch ended, or run the next part of one that is run again. A gpu-let that ran a batch
        of an older plan is offered to the core now."""
        if batch.rerun is not None and self._run_next_part(gpulet, batch, batch.rerun, now):
            return
        if not gpulet.is_used:
            self._offer(gpulet, now)
        elif gpulet.index is not None and batch.plan_number == self._core.plan_number:
            self._core.scheduler.batch_done(now, gpulet.index)

    def _batch_failed(self, gpulet: AttachedGpulet, failed: BatchFailed) -> None:
        """Run a batch again in halves when its model raised an error: requests that fail alone are at fault. When the
        gpu-let says that it cannot run batches, let it rest and queue the requests once more."""
        if (batch := self._answered(gpulet, failed.number)) is None:
            return
        now = self._core.time.now_ms
        if failed.may_retry:
            self._let_rest(gpulet, now)
            self._retry_or_fail(batch.unanswered, now, failed.reason)
        else:
            if batch.size > 1:
                batch.rerun = batch.rerun or Rerun.of_batch(batch.size, failed.reason)
                half = (batch.size + 1) // 2
                batch.rerun.parts += [batch.requests[half:], batch.requests[:half]]
            else:
                self._fail(batch.requests, gpulet, failed.reason)
            self._done(gpulet, batch, now)
        self._core.carry_out(now)

    def _run_next_part(self, gpulet: AttachedGpulet, batch: Batch, rerun: Rerun, now: float) -> bool:
        """Send the next part of a batch that is run again to its gpu-let, which the core still counts as busy. Return
        False when nothing is left to run. A request that cannot be in time any more is refused."""
        core = self._core
        while rerun.parts:
            part = [request for request in rerun.parts.pop() if self._requests.is_open(request)]
            if gpulet.index is None or not gpulet.is_used or batch.plan_number != core.plan_number:
                self._retry_or_fail(part, now, rerun.reason)
                continue
            if not rerun.runs_left:
                self._fail(part, gpulet, rerun.reason)
                continue
            took_ms = core.scheduler.system.gpulets[gpulet.index].hosts[batch.program].planned_batch_ms(len(part))
            timely = []
            for request in part:
                if request.deadline_ms - request.reserve_ms >= now + took_ms:
                    timely.append(request)
                else:
                    self._requests.refuse(request, Refused(Outcome.EXPIRED, _NO_TIME_AGAIN, 1.0, gpulet.id, Rule.CUT))
            if timely:
                rerun.runs_left -= 1
                times = core.time.clock_ms, now, now + took_ms
                again = next(self._numbers), batch.program, batch.name, timely, batch.plan_number, *times, rerun
                self._begin(gpulet, Batch(*again))
                return True
        return False

    def _fail(self, requests: Sequence[Request], gpulet: AttachedGpulet, reason: str) -> None:
        for request in requests:
            self._requests.refuse(request, Refused(Outcome.FAILED, reason, None, gpulet.id, Rule.RAISED))

    def _let_rest(self, gpulet: AttachedGpulet, now: float) -> None:
        """Use a gpu-let no more for a moment. One that cannot run batches would be idle at once and draw the
        traffic."""
        self._withhold(gpulet, now)
        gpulet.fail(partial(self._rested, gpulet))
        self._accounts.happened("gpu-let rests", f"{gpulet.id}: it could not run a batch")
        self._on_change()

    def _rested(self, gpulet: AttachedGpulet) -> None:
        gpulet.take_event(GpuletEvent.RESTED)
        self._offer_now(gpulet)
        self._on_change()

    def _closes(self, gpulet: AttachedGpulet, message: GpuletCloses) -> None:
        """Send no more batches to a gpu-let that closes. It still answers the batches that it has begun; generations
        go on elsewhere."""
        logger.warning("gpu-let %s closes: %s", gpulet.id, message.reason)
        gpulet.take_event(GpuletEvent.CLOSES)
        self._accounts.happened("gpu-let closes", f"{gpulet.id}: {message.reason}")
        now = self._core.time.now_ms
        if gpulet.is_used:
            self._withhold(gpulet, now)
            self._core.carry_out(now)
        self.generations.leaves(gpulet)
        self._on_change()

    def _retry_or_fail(self, requests: Sequence[Request], now: float, reason: str, rule: Rule = Rule.NONE) -> None:
        """Queue requests of a lost batch once more. The core drops those whose deadline cannot be met any more."""
        for request in requests:
            if not self._requests.is_open(request):
                continue
            if request.was_retried or request.deadline_ms <= now:
                self._requests.refuse(request, Refused(Outcome.FAILED, reason, 1.0, rule=rule))
            elif request.name not in self._requests.models:
                self._requests.refuse_removed(request)
            else:
                request.was_retried = True
                request.is_waiting = True
                self._core.add(request, now)
