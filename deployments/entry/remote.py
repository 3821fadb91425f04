"""A gateway's side of dispatchers in other processes: one per sub-cluster, fed in bundles.

A dispatcher that dies fails what it held at once, with a time to retry after; requests are not sent twice, because
nobody knows which of them ran.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto.deployments.dispatch.correction import NetworkMeter
from tenuto.deployments.entry.served import ServedModel
from tenuto.deployments.operator.merged_status import merge_reports
from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.bundles import Bundler, RequestRow, pack_requests, unpack_answers
from tenuto.deployments.wire.link import Finder, GpuletLink
from tenuto.outcome import Outcome
from tenuto.placement import Plan

__all__ = ["RemoteDispatchers"]

_REPORT_TIMEOUT_S = 5.0
_HOP_MS = 2.0  # from a bundle's sending to its answers' arrival, beside what the dispatcher needed, until measured


@dataclass(slots=True)
class _Waiting:
    """A request between its arrival and its answer."""

    model: str
    allowed_ms: float
    received_at: float
    future: asyncio.Future[Answer]
    parts: Sequence[bytes | memoryview]
    client_id: str
    sent_at: float = 0.0


@dataclass(slots=True)
class _Peer:
    """One dispatcher: its link, what waits to be sent, what it has not answered."""

    link: GpuletLink
    outbox: Bundler[tuple[int, _Waiting | None]]
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    reports: dict[int, asyncio.Future[Any]] = field(default_factory=dict)


class RemoteDispatchers:
    """Invariant: a request's future is resolved exactly once: by its answer, by its dispatcher's end, or by `close`."""

    def __init__(
        self,
        find_dispatcher: Callable[[str], Finder],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare without a plan; `apply` gives one.

        Args:
            find_dispatcher: returns the function that finds the dispatcher of a sub-cluster by its name.
            clock: monotonic seconds.
        """
        self._find = find_dispatcher
        self._clock = clock
        self._numbers = itertools.count()
        self._plan: Plan | None = None
        self._names: list[str] = []
        self._peers: list[_Peer] = []
        self._peer_of: dict[str, int] = {}
        self._slo_ms: dict[str, float] = {}
        self._served: dict[str, ServedModel] = {}
        self._hop = NetworkMeter(0.0, _HOP_MS)
        self._reserve_ms = _HOP_MS
        self._changed = asyncio.Event()

    @property
    def plan(self) -> Plan | None:
        """The plan that is being served."""
        return self._plan

    async def apply(self, plan: Plan, sub_clusters: Mapping[str, Sequence[str]], *, wait_s: float = 20.0) -> None:
        """Follow a plan, with the models of every sub-cluster; dispatchers of unchanged names stay connected.

        Returns when all are connected, or after `wait_s`.
        """
        old = dict(zip(self._names, self._peers, strict=True))
        self._plan = plan
        self._slo_ms = {spec.name: spec.slo_ms for spec in plan.models}
        self._peer_of = {model: index for index, models in enumerate(sub_clusters.values()) for model in models}
        self._names, self._peers = list(sub_clusters), []
        self._served.clear()
        for index, name in enumerate(self._names):
            peer = old.pop(name, None)
            if peer is None:
                link = GpuletLink(index, name, self._find(name), self, "dispatcher")
                peer = _Peer(link, Bundler(lambda _items: None))
                peer.outbox = Bundler(functools.partial(self._send, peer))
                link.start()
            peer.link.index = index
            self._peers.append(peer)
        for peer in old.values():
            peer.link.index = -1
            self._fail(peer, "its sub-cluster was removed from the plan")
            await peer.link.stop()
        try:
            async with asyncio.timeout(wait_s):
                while not all(peer.link.is_up for peer in self._peers):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # not ready is what the gateway says until then

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(
        self, model: str, parts: Sequence[bytes | memoryview], slo_ms: float | None = None, client_id: str = ""
    ) -> asyncio.Future[Answer]:
        """Send one request with the next bundle; see `Dispatcher.submit`. Raises KeyError for an unknown model."""
        peer = self._peers[self._peer_of[model]]
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if not peer.link.is_up:
            reason = f"the dispatcher of '{model}' is not there. Retry in a few seconds."
            future.set_result(Answer(Outcome.FAILED, retry_after_s=1.0, reason=reason))
            return future
        allowed_ms = self._slo_ms[model] if slo_ms is None else slo_ms
        number = next(self._numbers)
        request = _Waiting(model, allowed_ms, self._clock(), future, parts, client_id)
        peer.waiting[number] = request
        future.add_done_callback(functools.partial(self._on_settled, peer, number))
        peer.outbox.add((number, request), sum(memoryview(part).nbytes for part in parts))
        return future

    def _on_settled(self, peer: _Peer, number: int, future: asyncio.Future[Answer]) -> None:
        if future.cancelled() and peer.waiting.pop(number, None) is not None:
            peer.outbox.add((number, None))

    def _send(self, peer: _Peer, items: list[tuple[int, _Waiting | None]]) -> None:
        now = self._clock()
        rows = []
        for number, request in items:
            if request is None:
                rows.append(RequestRow(number, "", 0.0, "", None))
                continue
            request.sent_at = now
            left_ms = request.allowed_ms - (now - request.received_at) * 1000.0
            rows.append(RequestRow(number, request.model, left_ms, request.client_id, request.parts))
            request.parts = ()
        header, buffers = pack_requests(rows, self._reserve_ms)
        peer.link.send(header, buffers)

    # --- what dispatchers say (LinkEvents) ----------------------------------------------------------------------

    def link_up(self, index: int) -> None:
        self.described(index)

    def described(self, index: int) -> None:
        del index
        self._served.clear()
        self._changed.set()

    def link_down(self, index: int, reason: str) -> None:
        if index >= 0:
            self._fail(self._peers[index], f"the dispatcher died; send the request again ({reason})")

    def _fail(self, peer: _Peer, reason: str) -> None:
        peer.outbox.drop()
        waiting, peer.waiting = peer.waiting, {}
        for request in waiting.values():
            if not request.future.done():
                request.future.set_result(Answer(Outcome.FAILED, retry_after_s=1.0, reason=reason))
        reports, peer.reports = peer.reports, {}
        for report in reports.values():
            if not report.done():
                report.set_exception(TimeoutError(reason))

    def batch_answered(self, index: int, header: dict[str, Any], body: memoryview) -> None:
        if index < 0:
            return
        peer = self._peers[index]
        if "report" in header:
            report = peer.reports.pop(header["report"], None)
            if report is not None and not report.done():
                report.set_result(header["data"])
            return
        now = self._clock()
        for number, lasted_ms, answer in unpack_answers(header, body):
            request = peer.waiting.pop(number, None)
            if request is None:
                continue  # cancelled meanwhile
            self._hop.record((now - request.sent_at) * 1000.0 - lasted_ms, 1)
            # The gateway counts from the arrival of the request, the dispatcher from that of the bundle.
            held_ms = (request.sent_at - request.received_at) * 1000.0
            answer.batching_ms += held_ms
            answer.start_ms += held_ms
            if not request.future.done():
                request.future.set_result(answer)
        delay = self._hop.news()
        if delay is not None:
            self._reserve_ms = delay.ctrl_ms + delay.response_ms

    # --- state --------------------------------------------------------------------------------------------------

    def _state(self, index: int) -> Mapping[str, Any]:
        peer = self._peers[index]
        return peer.link.description if peer.link.is_up else {}

    def is_ready(self, model: str | None = None) -> bool:
        """Whether every gpu-let is usable; with a model, whether at least one of its gpu-lets is."""
        if self._plan is None:
            return False
        if model is None:
            return all(self._state(index).get("ready", False) for index in range(len(self._peers)))
        index = self._peer_of.get(model)
        return index is not None and model in self._state(index).get("ready_models", ())

    def served(self, model: str) -> ServedModel | None:
        """Return a model's signature as a gpu-let reported it; None before."""
        found = self._served.get(model)
        if found is None and model in self._peer_of:
            raw = self._peers[self._peer_of[model]].link.description.get("signatures", {}).get(model)
            if raw is not None:
                found = self._served[model] = ServedModel.from_data(raw)
        return found

    def gpulets(self) -> list[dict[str, Any]]:
        """Return what every gpu-let reported to its dispatcher; those of an absent one are down."""
        found: list[dict[str, Any]] = []
        for peer in self._peers:
            for gpulet in peer.link.description.get("gpulets", []):
                found.append({**gpulet, "up": gpulet["up"] and peer.link.is_up})
        known = {gpulet["id"] for gpulet in found}
        plan = self._plan
        absent = [gpulet.id for gpulet in plan.gpulets if gpulet.id not in known] if plan is not None else []
        return found + [{"id": gpulet_id, "up": False} for gpulet_id in absent]

    def record_answer(self, answer_ms: float) -> None:
        """Take the time from an answer's arrival to its response handed to the socket."""
        self._hop.record_answer(answer_ms)

    async def report(self, what: str, **arguments: Any) -> Any:
        """Return the reports of all dispatchers as one; see `Front`. Dispatchers that are away are left out."""
        futures = []
        for peer in self._peers:
            if peer.link.is_up:
                number = next(self._numbers)
                future = peer.reports[number] = asyncio.get_running_loop().create_future()
                peer.link.send({"report": number, "what": what, "arguments": arguments}, ())
                futures.append(future)
        async with asyncio.timeout(_REPORT_TIMEOUT_S):
            reports = await asyncio.gather(*futures)
        return merge_reports(what, reports, self._plan, self.gpulets())

    async def close(self) -> None:
        """Answer everything that waits as failed, and disconnect."""
        for peer in self._peers:
            self._fail(peer, "the server is shutting down; send the request again")
        await asyncio.gather(*(peer.link.stop() for peer in self._peers))
