"""A gateway's side of dispatchers in other processes: one per sub-cluster, fed in bundles.

A dispatcher that dies fails what it held at once, with a time to retry after; requests are not sent twice, because
nobody knows which of them ran.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tenuto.deployments.dispatch.in_flight import Asker, Request
from tenuto.deployments.operator.merged_status import merge_reports
from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.arena import Held
from tenuto.deployments.wire.bundles import Bundler, Places, unpack_answers
from tenuto.deployments.wire.messages import Answers, AskReport, DispatcherState, Message, Report, RequestRow, Requests
from tenuto.deployments.wire.peer import Finder, Link, PeerLink
from tenuto.deployments.wire.tensors import InputPart, RowOutput
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import ModelSignature

__all__ = ["RemoteDispatchers"]

logger = logging.getLogger("ray.serve")

_REPORT_TIMEOUT_S = 5.0
_LAST_READS_S = 10.0  # after a dispatcher's death its gpu-lets may still read what they have begun

DispatcherLink = Link[DispatcherState]


@dataclass(slots=True, eq=False)
class _Peer:
    """One dispatcher: its link, what waits to be sent, what it has not answered.

    `left` holds the memory of requests whose client went away until the dispatcher says that nobody reads it.
    """

    name: str
    link: DispatcherLink
    outbox: Bundler[Request]
    waiting: dict[int, Request] = field(default_factory=dict)
    left: dict[int, Held | None] = field(default_factory=dict)
    leaving: list[int] = field(default_factory=list)
    unsent: set[int] = field(default_factory=set)
    reports: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    is_in_plan: bool = True


class RemoteDispatchers:
    """Invariant: a request is answered exactly once: by its answer, by its dispatcher's end, or by `close`; unless it
    was cancelled."""

    def __init__(
        self,
        find_dispatcher: Callable[[str], Finder],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare without a plan; `apply` gives one.

        Args:
            find_dispatcher: returns the function that finds the dispatcher of a sub-cluster by its name.
            clock: monotonic seconds.
            on_change: called when a dispatcher comes, goes or says anew what it holds, and after a new plan.
        """
        self._find = find_dispatcher
        self._clock = clock
        self._on_change = on_change
        self._numbers = itertools.count()
        self._plan: Plan | None = None
        self._peers: dict[str, _Peer] = {}
        self._by_link: dict[int, _Peer] = {}
        self._peer_of: dict[str, _Peer] = {}
        self._slo_ms: dict[str, float] = {}
        self._changed = asyncio.Event()

    @property
    def plan(self) -> Plan | None:
        """The plan that is being served."""
        return self._plan

    async def apply(self, plan: Plan, sub_clusters: Mapping[str, Sequence[str]], *, wait_s: float = 20.0) -> None:
        """Follow a plan, with the models of every sub-cluster; dispatchers of unchanged names stay connected.

        Returns when all are connected, or after `wait_s`.
        """
        old, self._peers = self._peers, {}
        self._plan = plan
        self._slo_ms = {spec.name: spec.slo_ms for spec in plan.models}
        for name in sub_clusters:
            self._peers[name] = old.pop(name) if name in old else self._connect(name)
        self._peer_of = {model: self._peers[name] for name, models in sub_clusters.items() for model in models}
        for peer in old.values():
            peer.is_in_plan = False
            self._fail(peer, "its sub-cluster was removed from the plan")
            await peer.link.stop()
            self._by_link.pop(id(peer.link), None)
        self._on_change()
        try:
            async with asyncio.timeout(wait_s):
                while not all(peer.link.is_up for peer in self._peers.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # not ready is what the gateway says until then

    def _connect(self, name: str) -> _Peer:
        link = PeerLink(DispatcherState, name, self._find(name), self, name="dispatcher")
        peer = _Peer(name, link, Bundler(lambda _items: None))
        peer.outbox = Bundler(functools.partial(self._send, peer))
        self._by_link[id(link)] = peer
        link.start()
        return peer

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
    ) -> Request:
        """Take one request; only the absence of its dispatcher refuses it here. See `Dispatcher.admit`."""
        peer = self._peer_of[model]
        arrived = self._clock() * 1000.0 if arrived_ms is None else arrived_ms
        deadline = arrived + (self._slo_ms[model] if slo_ms is None else slo_ms)
        request = Request(next(self._numbers), model, 0, arrived, deadline, reserve_ms, client_id, asker)
        if not peer.link.is_up:
            reason = f"the dispatcher of '{model}' is not there. Retry in a few seconds."
            asker.refused(request, Refused(Outcome.FAILED, reason, 1.0))
        return request

    def start(self, request: Request, parts: Sequence[InputPart], memory: Held | None = None) -> None:
        """Send an admitted request with the next bundle; its memory is held until nobody reads it any more."""
        peer = self._peer_of[request.name]
        request.parts, request.memory = parts, memory
        if memory is not None:
            memory.hold()
        peer.waiting[request.id] = request
        peer.unsent.add(request.id)
        is_mapped = peer.link.shares_memory
        peer.outbox.add(request, sum([0 if part.arena and is_mapped else part.nbytes for part in parts]))

    def cancel(self, request: Request) -> None:
        """Forget a request whose client went away, and tell its dispatcher."""
        peer = self._peer_of.get(request.name)
        if peer is None or peer.waiting.pop(request.id, None) is None:
            return
        if request.id in peer.unsent:
            if request.memory is not None:
                request.memory.release()
            return
        peer.left[request.id] = request.memory
        peer.leaving.append(request.id)
        peer.outbox.add(request)  # only its number is sent: it does not wait any more

    def _send(self, peer: _Peer, requests: list[Request]) -> None:
        places = Places(shares_memory=peer.link.shares_memory)
        leaving, peer.leaving = peer.leaving, []
        peer.unsent.clear()
        rows = [
            RequestRow(
                request.id, request.name, request.arrived_ms, request.deadline_ms, request.reserve_ms,
                request.client_id, [places.put(part) for part in request.parts],
            )
            for request in requests if request.id in peer.waiting
        ]  # fmt: skip
        peer.link.send(Requests(self._clock() * 1000.0, places.arenas, rows, leaving), places.buffers)

    # --- what dispatchers say (LinkEvents) ----------------------------------------------------------------------

    def link_up(self, link: DispatcherLink) -> None:
        """A dispatcher is connected."""
        self.state_changed(link)

    def state_changed(self, link: DispatcherLink) -> None:
        """A dispatcher said anew what it holds."""
        del link
        self._changed.set()
        self._on_change()

    def link_down(self, link: DispatcherLink, reason: str) -> None:
        """A dispatcher is gone, and what it held with it."""
        peer = self._by_link.get(id(link))
        if peer is not None and peer.is_in_plan:
            self._fail(peer, f"the dispatcher died; send the request again ({reason})")
            self._on_change()

    def _fail(self, peer: _Peer, reason: str) -> None:
        peer.outbox.drop()
        peer.unsent.clear()
        peer.leaving.clear()
        waiting, peer.waiting = peer.waiting, {}
        left, peer.left = peer.left, {}
        held = [slot for slot in (*(r.memory for r in waiting.values()), *left.values()) if slot is not None]
        asyncio.get_running_loop().call_later(_LAST_READS_S, _release, held)
        for request in waiting.values():
            request.asker.refused(request, Refused(Outcome.FAILED, reason, 1.0))
        reports, peer.reports = peer.reports, {}
        for report in reports.values():
            if not report.done():
                report.set_exception(TimeoutError(reason))

    def message_came(self, link: DispatcherLink, message: Message, body: memoryview) -> None:
        """Answers, or a report."""
        peer = self._by_link.get(id(link))
        if peer is None:
            return
        if isinstance(message, Report):
            report = peer.reports.pop(message.number, None)
            if report is not None and not report.done():
                report.set_result(orjson.loads(message.data))
        elif isinstance(message, Answers):
            self._take(peer, message, body)
        else:
            logger.warning("dispatcher %s sent a %s, which nobody asked for", peer.name, type(message).__name__)

    def _take(self, peer: _Peer, message: Answers, body: memoryview) -> None:
        now_ms = self._clock() * 1000.0
        for number, lasted_ms, answer in unpack_answers(message, body):
            request = peer.waiting.pop(number, None)
            if request is None:
                slot = peer.left.pop(number, None)
                if slot is not None:
                    slot.release()
                continue
            if request.memory is not None:
                request.memory.release()
            if answer.outcome is not Outcome.OK:
                refused = Refused(answer.outcome, answer.reason, answer.retry_after_s, answer.gpulet)
                request.asker.refused(request, refused)
                continue
            # A dispatcher on another machine counts from the bundle's arrival: what was before, and on the way, is ours
            # to add.
            arrived_ms = request.arrived_ms if peer.link.shares_memory else now_ms - lasted_ms
            executed = Executed(
                answer.batch_size, answer.gpulet, answer.emulated, arrived_ms + answer.batching_ms,
                arrived_ms + answer.start_ms, answer.gpulet_queue_ms, answer.execution_ms, 1,
                [RowOutput(t.name, t.dtype, t.shape, t.data.nbytes) for t in answer.outputs],
                [t.data for t in answer.outputs],
            )  # fmt: skip
            request.asker.executed(request, executed, 0)

    # --- state --------------------------------------------------------------------------------------------------

    def _state(self, peer: _Peer) -> DispatcherState | None:
        return peer.link.state if peer.link.is_up else None

    def is_ready(self, model: str | None = None) -> bool:
        """Whether every gpu-let is usable; with a model, whether at least one of its gpu-lets is."""
        if self._plan is None:
            return False
        if model is None:
            states = [self._state(peer) for peer in self._peers.values()]
            return all(state is not None and state.ready for state in states)
        peer = self._peer_of.get(model)
        state = None if peer is None else self._state(peer)
        return state is not None and model in state.ready_models

    def signature(self, model: str) -> ModelSignature | None:
        """Return a model's signature as a gpu-let reported it; None before."""
        peer = self._peer_of.get(model)
        state = None if peer is None else peer.link.state
        return None if state is None else state.signatures.get(model)

    def gpulets(self) -> list[dict[str, Any]]:
        """Return what every gpu-let reported to its dispatcher; those of an absent one are down."""
        found: list[dict[str, Any]] = []
        for peer in self._peers.values():
            for gpulet in peer.link.state.gpulets if peer.link.state is not None else ():
                found.append({**gpulet, "up": gpulet["up"] and peer.link.is_up})
        known = {gpulet["id"] for gpulet in found}
        plan = self._plan
        absent = [gpulet.id for gpulet in plan.gpulets if gpulet.id not in known] if plan is not None else []
        return found + [{"id": gpulet_id, "up": False} for gpulet_id in absent]

    async def report(self, what: str, *, id: str | None = None, limit: int = 100) -> Any:
        """Return the reports of all dispatchers as one; see `Dispatching`. Dispatchers that are away are left out."""
        futures = [self._ask(peer, what, id, limit) for peer in self._peers.values() if peer.link.is_up]
        async with asyncio.timeout(_REPORT_TIMEOUT_S):
            reports = await asyncio.gather(*futures)
        return merge_reports(what, reports, self._plan, self.gpulets())

    async def tell_gateways(self, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Tell the other gateways something of this one, and return what all of them said last, this one among them.

        They meet at the first dispatcher that is there; only this one is heard of where none is.

        Raises:
            TimeoutError: it does not answer.
        """
        peer = next((peer for _, peer in sorted(self._peers.items()) if peer.link.is_up), None)
        if peer is None:
            return [dict(said)]
        async with asyncio.timeout(_REPORT_TIMEOUT_S):
            all_said: list[dict[str, Any]] = await self._ask(peer, "gateways", said=orjson.dumps(said))
        return all_said

    def _ask(
        self, peer: _Peer, what: str, id: str | None = None, limit: int = 0, said: bytes = b""
    ) -> asyncio.Future[Any]:
        number = next(self._numbers)
        future = peer.reports[number] = asyncio.get_running_loop().create_future()
        peer.link.send(AskReport(number, what, id, limit, said))
        return future

    async def close(self) -> None:
        """Answer everything that waits as failed, and disconnect."""
        for peer in self._peers.values():
            self._fail(peer, "the server is shutting down; send the request again")
        await asyncio.gather(*(peer.link.stop() for peer in self._peers.values()))


def _release(held: Sequence[Held]) -> None:
    for slot in held:
        slot.release()
