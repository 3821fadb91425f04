"""The asyncio driver of the scheduler core: requests in, batches out to gpu-lets, answers back.

It lives in the gateway's process, so that a request crosses no process boundary alone; only whole batches travel. The
core decides, this module carries out: it owns the clock and the timer. `tenuto.deployments.dispatch.open_requests`
owns the requests with their tensors, `tenuto.deployments.dispatch.fleet` the links, and
`tenuto.deployments.dispatch.feedback` tells the core what batches really took.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from tenuto.batching.core.scheduler import Dispatch, Drop, Preempt, Reject, Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.deployments.dispatch.accounts import Accounts
from tenuto.deployments.dispatch.batch_frames import pack_batch, split_reply
from tenuto.deployments.dispatch.core_time import TIMER_SLACK_MS, CoreTime
from tenuto.deployments.dispatch.correction import NetworkMeter
from tenuto.deployments.dispatch.feedback import Feedback
from tenuto.deployments.dispatch.fleet import Fleet, LinkFactory
from tenuto.deployments.dispatch.in_flight import Batch, Request
from tenuto.deployments.dispatch.open_requests import OpenRequests
from tenuto.deployments.dispatch.status import dispatcher_status
from tenuto.deployments.entry.served import ServedModel
from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.link import Finder, GpuletLink
from tenuto.outcome import Outcome
from tenuto.placement import Plan

__all__ = ["Dispatcher", "SchedulerFactory"]

# Builds the core for a plan; called again when the plan changes.
SchedulerFactory = Callable[[Plan, NetworkDelay], Scheduler]

_TOO_LATE = "the deadline could not be met; it was not executed. Lower the rate, raise the SLO or add GPUs"
_NO_ANSWER = "the gpu-let that executed this batch died; send the request again"


class Dispatcher:
    """Runs one scheduler over the gpu-lets of a plan. All methods must be called on one event loop."""

    def __init__(
        self,
        build_scheduler: SchedulerFactory,
        find_gpulet: Callable[[str], Finder],
        *,
        max_queued: int = 10_000,
        network: NetworkMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
        timer_slack_ms: float = TIMER_SLACK_MS,
        make_link: LinkFactory = GpuletLink,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare without a plan; `apply` gives one.

        Args:
            build_scheduler: makes the scheduler core of a plan.
            find_gpulet: returns the function that finds a gpu-let by its id.
            max_queued: requests of one model that may wait; more are rejected with a time to retry after.
            network: measures the delays; by default one that reserves 3 ms for the way back to the client.
            clock: monotonic seconds.
            timer_slack_ms: how much earlier than asked the core is woken, for timers that come late.
            make_link: makes the links to gpu-lets.
            on_change: called when a gpu-let comes, goes or changes what it holds, and after a new plan.
        """
        self._build_scheduler = build_scheduler
        self._on_change = on_change
        self._max_queued = max_queued
        self._clock = clock
        self._time = CoreTime(clock, timer_slack_ms, self._on_timer)
        self.accounts = Accounts()
        self._requests = OpenRequests(self.accounts, self._on_left)
        self._sequences = itertools.count()
        self._fleet = Fleet(find_gpulet, self, make_link)
        self._plan: Plan | None = None
        self._scheduler: Scheduler | None = None
        self._first_sequence = 0  # of the present plan
        self._model_index: dict[str, int] = {}  # in the core
        self._slo_ms: dict[str, float] = {}
        self.network = network or NetworkMeter(3.0)
        self._feedback = Feedback(self.network, lambda: self._time.now_ms, self._free_early)
        self._ticker: asyncio.TimerHandle | None = None

    def configure(self, build_scheduler: SchedulerFactory, *, max_queued: int, response_ms: float) -> None:
        """Take new settings; they hold from the next `apply`."""
        self._build_scheduler = build_scheduler
        self._max_queued = max_queued
        self.network.client_ms = response_ms

    # --- the plan -----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan that is being served."""
        return self._plan

    def apply(self, plan: Plan) -> None:
        """Serve `plan` from now on. Waiting requests move over; batches that run are answered; unchanged links stay."""
        now = self._time.now_ms
        self._plan = plan
        self._first_sequence = next(self._sequences)
        scheduler = self._build_scheduler(plan, self.network.tell())
        scheduler.drain()
        self._slo_ms = {spec.name: spec.slo_ms for spec in plan.models}
        self._model_index = {spec.name: index for index, spec in enumerate(plan.models)}
        self._scheduler = scheduler
        self._feedback.follow(scheduler, plan)
        self._fleet.adopt(plan)
        self.accounts.advice.follow(plan, self._clock())
        if self._ticker is None:
            self._tick()
        for index in range(len(plan.gpulets)):
            scheduler.gpulet_lost(now, index)
            self._offer(index, now)
        for request in self._requests:
            request.model = self._model_index.get(request.name, -1)
            if request.dispatched_ms == 0.0:
                self._enqueue(request, now)
        self._carry_out(now)
        self._on_change()

    def _tick(self) -> None:
        """Once a second, whether or not anything arrives."""
        self.accounts.advice.tick(self._clock())
        self._ticker = asyncio.get_running_loop().call_later(1.0, self._tick)

    def _offer(self, index: int, now: float) -> None:
        """Let the core use a gpu-let once it is connected, holds what the plan says, and is idle."""
        assert self._scheduler is not None
        if self._fleet.offer(index):
            self._scheduler.gpulet_back(now, index)
            self._on_change()

    def _enqueue(self, request: Request, now: float) -> None:
        """Give a request to the core; one whose model the plan no longer has fails."""
        assert self._scheduler is not None
        if request.model < 0:
            self._finish(request, Answer(Outcome.FAILED, reason=f"'{request.name}' was removed from the plan"))
        else:
            self._scheduler.add_request(now, request.model, request.id, request.deadline_ms - request.reserve_ms)

    async def close(self) -> None:
        """Answer everything that waits as failed, and disconnect."""
        self._time.disarm()
        self._feedback.stop()
        if self._ticker is not None:
            self._ticker.cancel()
        for request in self._requests:
            self._finish(request, Answer(Outcome.FAILED, reason="the server is shutting down; send the request again"))
        await self._fleet.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(
        self,
        model: str,
        parts: Sequence[bytes | memoryview],
        slo_ms: float | None = None,
        client_id: str = "",
        reserve_ms: float = 0.0,
    ) -> asyncio.Future[Answer]:
        """Queue one request and return the future of its answer; cancelling the future frees its place.

        Args:
            model: a model of the plan.
            parts: one raw buffer per input, in the order of the signature, for one sample.
            slo_ms: time allowed from now; the model's SLO by default. Zero or less is answered `expired` at once.
            client_id: what the client calls it; travels to the gpu-let's log.
            reserve_ms: what the way back through another process may take.

        Raises:
            KeyError: the plan has no such model.
        """
        index = self._model_index[model]
        scheduler = self._scheduler
        assert scheduler is not None
        now = self._time.now_ms
        allowed = self._slo_ms[model] if slo_ms is None else slo_ms
        request = self._requests.open(
            model, index, parts, now_ms=now, allowed_ms=allowed, client_id=client_id, reserve_ms=reserve_ms
        )
        if scheduler.queued(scheduler.system.program_of[index]) >= self._max_queued:
            wait_s = max(0.1, allowed / 1000.0)
            reason = f"{self._max_queued} requests of '{model}' are waiting; retry in {wait_s:g} s"
            self._requests.finish(request, Answer(Outcome.REJECTED, retry_after_s=wait_s, reason=reason), now)
            return request.future
        self._enqueue(request, now)
        self._carry_out(now)
        return request.future

    def _on_left(self, request: Request) -> None:
        """Take a request whose client went away out of its queue; one that already runs cannot be taken back."""
        if request.dispatched_ms == 0.0 and self._scheduler is not None:
            now = self._time.now_ms
            self._scheduler.cancel(now, request.model, request.id)
            self._carry_out(now)

    # --- decisions ----------------------------------------------------------------------------------------------

    def _carry_out(self, now: float) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        while scheduler.decisions:
            for decision in scheduler.drain():
                if isinstance(decision, Dispatch):
                    self._dispatch(decision, now)
                elif isinstance(decision, Drop):
                    self._drop(decision)
                elif isinstance(decision, Reject):
                    self._reject(decision)
                elif isinstance(decision, Preempt):
                    self._preempt(decision)
        self._time.arm(scheduler.next_wake_ms, now)

    def _on_timer(self) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        now = self._time.reach(scheduler.next_wake_ms)
        if scheduler.next_wake_ms <= now:
            scheduler.wake(now)
        self._carry_out(now)

    def _dispatch(self, decision: Dispatch, now: float) -> None:
        requests = self._requests.of(decision.request_ids)
        for request in requests:
            request.dispatched_ms = now
        assert self._scheduler is not None
        program = self._scheduler.system.programs[decision.program]
        batch = Batch(
            next(self._sequences), program.name, decision.program, decision.gpulet, requests, now, self._time.clock_ms
        )
        link = self._fleet.add(batch)
        if not requests:
            # Every client left between decision and dispatch; keep the core's account of the gpu-let straight.
            asyncio.get_running_loop().call_soon(self._empty_batch_done, batch)
            return
        header, buffers = pack_batch(batch, is_joint=len(program.members) > 1)
        self.accounts.batch_sent(batch)
        link.send(header, buffers)
        self._feedback.sent(batch, decision.start_ms, decision.finish_ms)

    def _empty_batch_done(self, batch: Batch) -> None:
        if self._fleet.take(batch.gpulet, batch.sequence) is not None and batch.gpulet >= 0:
            self._done(batch, self._time.now_ms)

    def _drop(self, decision: Drop) -> None:
        for request in self._requests.of(decision.request_ids):
            waited_ms = self._time.now_ms - request.received_ms
            self._finish(request, Answer(Outcome.EXPIRED, batching_ms=waited_ms, reason=_TOO_LATE))

    def _reject(self, decision: Reject) -> None:
        for request in self._requests.of(decision.request_ids):
            wait_s = decision.retry_after_ms / 1000.0
            reason = f"'{request.name}' exceeds the rate it is planned for; retry in {wait_s:g} s"
            self._finish(request, Answer(Outcome.REJECTED, retry_after_s=wait_s, reason=reason))

    def _preempt(self, decision: Preempt) -> None:
        """The core has the requests back in its queue; the gpu-let's answer for that batch will be ignored."""
        batch = self._fleet.abort(decision.gpulet)
        for request in batch.requests if batch is not None else ():
            request.dispatched_ms = 0.0

    # --- answers (LinkEvents) -----------------------------------------------------------------------------------

    def link_up(self, index: int) -> None:
        self.described(index)

    def described(self, index: int) -> None:
        if index >= 0 and self._scheduler is not None:
            self._fleet.described()
            now = self._time.now_ms
            self._offer(index, now)
            self._carry_out(now)
            self._on_change()

    def link_down(self, index: int, reason: str) -> None:
        if index < 0 or self._scheduler is None:
            return
        now = self._time.now_ms
        lost = self._fleet.lose(index)
        self._feedback.lost(index)
        self._scheduler.gpulet_lost(now, index)
        for batch in lost:
            for request in batch.requests:
                self._retry_or_fail(request, now, reason)
        self._carry_out(now)
        self._on_change()

    def _retry_or_fail(self, request: Request, now: float, reason: str) -> None:
        """Queue a request of a lost batch once more; the core drops it at once if its deadline no longer allows."""
        if request not in self._requests:
            return
        if request.retried or request.deadline_ms <= now:
            self._finish(request, Answer(Outcome.FAILED, reason=f"{_NO_ANSWER} ({reason})"))
            return
        request.retried = True
        request.dispatched_ms = 0.0
        self._enqueue(request, now)

    def batch_answered(self, index: int, header: dict[str, Any], body: memoryview) -> None:
        batch = self._fleet.take(index, header["id"])
        if batch is None:
            return  # preempted
        now = self._time.now_ms
        if index >= 0:
            is_of_this_plan = not self._is_from_old_plan(batch)
            if not self._feedback.answered(batch, header, now, is_of_this_plan=is_of_this_plan):
                self._done(batch, now)
            # The gpu-let is idle: the next batch leaves before this one's answers are taken apart.
            if self._scheduler is not None and self._scheduler.next_wake_ms <= now:
                self._scheduler.wake(now)
            self._carry_out(now)
        self._answer_requests(batch, header, body, now)

    def _done(self, batch: Batch, now: float) -> None:
        """Tell the core; one still busy with a batch of an older plan is handed to the core once it is idle."""
        assert self._scheduler is not None
        if self._is_from_old_plan(batch):
            self._offer(batch.gpulet, now)
        else:
            self._scheduler.batch_done(now, batch.gpulet)

    def _free_early(self, batch: Batch) -> None:
        """A streaming gpu-let ends a batch shortly: let the core send the next one."""
        now = self._time.now_ms
        self._done(batch, now)
        self._carry_out(now)

    def _is_from_old_plan(self, batch: Batch) -> bool:
        return batch.sequence < self._first_sequence

    def _answer_requests(self, batch: Batch, header: dict[str, Any], body: memoryview, now: float) -> None:
        if "error" not in header:
            self.accounts.batch_executed(batch, header["gpulet"], float(header["execution_ms"]))
        for request, answer in split_reply(batch, header, body, now):
            if request in self._requests:
                self._requests.finish(request, answer, now)

    def _finish(self, request: Request, answer: Answer) -> None:
        """Answer a request that no batch answers."""
        self._requests.finish(request, answer, self._time.now_ms)

    # --- state --------------------------------------------------------------------------------------------------

    def is_ready(self, model: str | None = None) -> bool:
        """Whether every gpu-let is connected and holds its models; with a model, whether at least one of its
        gpu-lets does."""
        return self._fleet.is_ready(model)

    def served(self, model: str) -> ServedModel | None:
        """Return a model's signature as reported by the first gpu-let of it that ever connected; None before."""
        return self._fleet.served(model)

    def status(self) -> dict[str, Any]:
        """Return plain data: the plan, the gpu-lets as they are, counts and measured against planned latencies."""
        return dispatcher_status(
            self._plan,
            counters=self.accounts.counters,
            queued=self.queue_lengths(),
            gpulets=self.gpulets(),
            delay=self.network.delay(),
            advice=self.accounts.advice.to_data(self._clock()),
        )

    def record_answer(self, answer_ms: float) -> None:
        """Take the time from an answer's arrival to its response handed to the socket."""
        self.network.record_answer(answer_ms)

    async def report(self, what: str, **arguments: Any) -> Any:
        """Return plain data for operators: `status`, `queue` or `requests`; see `Front`."""
        if what == "status":
            return self.status()
        if what == "queue":
            return self.queue_lengths()
        return self.accounts.ended.to_data(arguments.get("id"), int(arguments.get("limit", 100)))

    def signature(self, model: str) -> dict[str, Any] | None:
        """Return the plain data of a model's signature; None before one of its gpu-lets ever connected."""
        return self._fleet.signature(model)

    def queue_lengths(self) -> dict[str, int]:
        """Return how many requests of every model wait for a batch."""
        waiting = self._requests.waiting()
        return {name: waiting[name] for name in self._model_index}

    def gpulets(self) -> list[dict[str, Any]]:
        """Return what every gpu-let reported when it connected, and whether it is up."""
        return self._fleet.descriptions()
