"""Requests in, batches out to gpu-lets, answers back. Admission control: what cannot be in time is refused.

It lives in the gateway's process, or in a process of its own for a sub-cluster, so that only whole batches and bundles
cross process boundaries. `OpenRequests` has the requests, `DrivenScheduler` the clock and the core, which decides, and
`SentBatches` the gpu-lets. A request costs no task and no future: everything happens in callbacks of one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from msgspec.structs import replace

from tenuto.batching.core.scheduler import Dispatch
from tenuto.batching.core.system import INF
from tenuto.deployments.dispatch.counters import Counters
from tenuto.deployments.dispatch.driven_scheduler import DrivenScheduler, SchedulerFactory
from tenuto.deployments.dispatch.fleet import ConnectionFactory, gpulet_connection
from tenuto.deployments.dispatch.in_flight import (
    Asker,
    GenerationTerms,
    OpenGeneration,
    Request,
    RequestTerms,
    TokenAsker,
)
from tenuto.deployments.dispatch.leadership import Leadership
from tenuto.deployments.dispatch.measured_times import WayMeter
from tenuto.deployments.dispatch.open_requests import OpenRequests
from tenuto.deployments.dispatch.rehearsals import Compute
from tenuto.deployments.dispatch.sent_batches import SentBatches
from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.arena import Held
from tenuto.deployments.wire.peer import Finder
from tenuto.deployments.wire.status import DispatchingStatus, EndedRequest, GatewayReport, GpuletStatus
from tenuto.deployments.wire.tensors import InputPart
from tenuto.outcome import Outcome, Rule
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.generating import Sampling


class Dispatcher:
    """Runs one scheduler over the gpu-lets of a plan. All methods must be called on one event loop."""

    def __init__(
        self,
        build_scheduler: SchedulerFactory,
        find_gpulet: Callable[[str], Finder],
        *,
        max_queued: int = 10_000,  # limit: requests that wait
        way: WayMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_connection: ConnectionFactory = gpulet_connection,
        compute: Compute | None = None,
        on_change: Callable[[], None] = lambda: None,
        leadership: Leadership | None = None,
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
            leadership: says whether this dispatcher is in charge of the gpu-lets; by default it always is.
        """
        self._build_scheduler = build_scheduler
        self._on_change = on_change
        self._max_queued = max_queued
        self._ids = itertools.count()
        self.way = way or WayMeter()
        self.accounts = Counters()
        self._requests = OpenRequests(self.accounts, lambda: self._core.time.clock_ms, self.signature)
        self._core = DrivenScheduler(clock, self.way, compute, self._requests.give_up, self._send)
        self._batches = SentBatches(
            self._core,
            self._requests,
            self.accounts,
            leadership or Leadership(),
            find_gpulet,
            make_connection,
            on_change,
        )
        self._plan: Plan | None = None
        self._plan_data: dict[str, Any] | None = None
        self._ticker: asyncio.TimerHandle | None = None

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
        now = self._core.time.now_ms
        self._core.follow(plan, self._build_scheduler)
        self._plan, self._plan_data = plan, plan.to_data()
        self.accounts.happened(
            "plan applied", f"{len(plan.models)} models on {len(plan.gpulets)} gpu-lets, policy {plan.policy.name}"
        )
        self._requests.follow(plan, self._core.scheduler.system)
        self._batches.adopt(plan, standby, now)
        if self._ticker is None:
            self._tick()
        for request in self._requests.waiting():
            self._add(request, now)
        self._core.carry_out(now)
        self._on_change()

    def _tick(self) -> None:
        self._core.tick()
        self._ticker = asyncio.get_running_loop().call_later(1.0, self._tick)

    async def close(self) -> None:
        """Answer every open request as failed, and disconnect."""
        self._core.close()
        if self._ticker is not None:
            self._ticker.cancel()
        self._requests.close()
        await self._batches.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def admit(
        self,
        model: str,
        asker: Asker,
        *,
        arrived_ms: float | None = None,
        slo_ms: float | None = None,
        **terms: Unpack[RequestTerms],
    ) -> Request:
        """Give the core a request whose tensors are not read yet. When `asker.refused` is called before this returns,
        the tensors need not be read. Otherwise `start` or `cancel` must follow at once.

        This is the admission control: a request is refused at once when the queue is full, or when its deadline cannot
        be met even by a batch of its own that starts now.

        Args:
            model: a model of the plan.
            asker: is told how the request ended.
            arrived_ms: when the request came, on the monotonic clock; default now.
            slo_ms: time allowed from then; the model's SLO by default. With zero or less the request expires at once.
            terms: a request that `yields` may only fill up batches: when a full batch of its model waits, it is turned
                away. One that is `offline` waits for time that costs no other one its deadline; only a full queue
                refuses it.

        Raises:
            KeyError: the plan has no such model.
        """
        core, requests = self._core, self._requests
        now = core.time.now_ms
        request = Request(next(self._ids), model, 0, now if arrived_ms is None else arrived_ms, 0.0, asker, **terms)
        size_class = requests.find(model, request.sizes) if request.sizes else requests.models[model]
        served = requests.models[model] if size_class is None else size_class
        request.model = served.index
        request.deadline_ms = request.arrived_ms + (served.slo_ms if slo_ms is None else slo_ms)
        self.accounts.submitted(request)
        requests.add(request)
        if size_class is None:
            requests.refuse_larger(request)
            return request
        queued = core.scheduler.queued_offline if request.offline else core.scheduler.queued
        waiting = queued(served.program)
        if waiting >= self._max_queued:
            requests.reject(request, Rule.FULL, f"{self._max_queued} requests of '{model}' are waiting")
        elif request.offline:
            self._add(request, now)
            core.carry_out_refusals(now)
        elif request.yields and waiting >= served.batch_size:
            why = f"it has a lower priority, and a full batch of '{model}' waits"
            requests.reject(request, Rule.YIELDED, why)
        elif request.deadline_ms - request.reserve_ms < now + served.alone_ms:
            requests.expire(request, Rule.TOO_LATE)
        else:
            core.add(request, now)
            core.carry_out_refusals(now)
        return request

    def _add(self, request: Request, now: float) -> None:
        """Give the core a request, unless the core knows no offline work and the request is some."""
        if request.offline and not self._core.scheduler.takes_offline:
            reason = f"the scheduler '{self._core.scheduler.name}' runs no offline work. Serve with 'deferred'."
            self._requests.refuse(request, Refused(Outcome.FAILED, reason))
        else:
            self._core.add(request, now)

    def start(self, request: Request, parts: Sequence[InputPart], memory: Held | None = None) -> None:
        """Give an admitted request its tensors, one per input in the order of the signature, for one sample.

        `memory` is the shared memory in which they lie, if any. It is held for as long as gpu-lets may read it.
        """
        request.parts = parts
        request.memory = memory
        if self._core.scheduler.decisions:
            self._core.carry_out(self._core.time.now_ms)

    def cancel(self, request: Request) -> None:
        """Forget a request whose client went away. When it already runs, it runs on, but its answer goes nowhere."""
        if not self._requests.cancel(request):
            return
        now = self._core.time.now_ms
        if request.is_waiting:
            self._core.scheduler.cancel(now, request.model, request.id)
        self._core.carry_out(now)

    def _send(self, decision: Dispatch) -> None:
        self._batches.send(decision, self._requests.those(decision.request_ids))

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
        made: Sequence[int] = (),
        **terms: Unpack[GenerationTerms],
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
            made: tokens that `asker` was told of by a dispatcher that is gone; it is told of those behind them.
            terms: what is `offline` costs no other generation its bounds; only a full queue refuses it. The clients
                whose generations wait offline take turns.

        Raises:
            KeyError: the plan has no such model.
        """
        _ = self._requests.models[model]
        arrived = self._core.time.clock_ms if arrived_ms is None else arrived_ms
        bounds, before = (arrived, arrived + ttft_ms, tpot_ms), (list(made), len(made))
        generation = OpenGeneration(-1, model, *bounds, prompt, sampling, asker, *before, **terms)
        self._batches.generations.begin(generation, self._max_queued)
        return generation

    def leave(self, generation: OpenGeneration, *, is_answered: bool = False) -> None:
        """Forget a generation whose client went away, or that has brought all that was wanted."""
        self._batches.generations.leave(generation, is_answered=is_answered)

    @property
    def is_generating(self) -> bool:
        """Whether a generation is open."""
        return self._batches.generations.is_open

    # --- state --------------------------------------------------------------------------------------------------

    def is_ready(self, model: str | None = None) -> bool:
        """Whether every gpu-let is connected and holds its models; with a model, whether at least one of its
        gpu-lets does."""
        return self._batches.fleet.is_ready(model)

    def signature(self, model: str) -> ModelSignature | None:
        """Return a model's signature as its first connected gpu-let reported it; None before one connected."""
        return self._batches.fleet.signature(model)

    async def status(self) -> DispatchingStatus:
        """Return the plan, the state of the gpu-lets, the counts, and measured beside planned latencies."""
        plan, accounts = self._plan, self.accounts
        if plan is None:
            return DispatchingStatus(events=list(accounts.events))
        scheduler = self._core.status()
        return DispatchingStatus(
            plan=self._plan_data,
            policy=plan.policy.name,
            gpulets=self.gpulets(),
            models=accounts.status(plan, self._requests.count_waiting(), self._waiting_offline()),
            network=self._core.network(),
            scheduler=scheduler,
            schedulers=[] if scheduler is None else [scheduler],
            events=list(accounts.events),
        )

    def _waiting_offline(self) -> dict[str, int]:
        """Return how many offline requests of every model wait for a batch, or are generated with at its gpu-lets."""
        batched, generations = self._requests.count_waiting(offline=True), self._batches.generations
        return {name: count + generations.count_offline(name) for name, count in batched.items()}

    async def waiting(self) -> dict[str, int]:
        """Return how many requests of every model wait for a batch."""
        return self._requests.count_waiting()

    async def ended(self, id: str | None, limit: int) -> list[EndedRequest]:
        """Return the last requests that ended, newest first; with an id, only those with this id."""
        return self.accounts.ended.newest(id, limit)

    async def meet(self, report: GatewayReport) -> list[GatewayReport]:
        """Take what a gateway reports, and return it without the requests that are in the log now: a gateway that
        schedules by itself is the only one."""
        self.accounts.ended.add_records(report.ended)
        return [replace(report, ended=[])]

    def connected(self) -> dict[str, int]:
        """Return nothing: there are no sub-clusters."""
        return {}

    def gpulets(self) -> list[GpuletStatus]:
        """Return for every gpu-let what it reported when it connected, whether it is up, and measured over planned
        latency of its programs."""
        return self._batches.fleet.descriptions(self._core.slowdowns())
