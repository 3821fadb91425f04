"""A gateway's side of dispatchers in other processes, to which it sends requests in bundles. In each sub-cluster one
dispatcher schedules; another waits, connected to the same gpu-lets.

When the first dies or falls silent, the gateway asks the second at once for the requests that the first held, once
each. From then on the gpu-lets begin nothing for the first one. A request that had begun by then may run twice, and is
answered once. Without a second dispatcher, the requests fail at once, with a time after which to retry.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, Unpack

import msgspec
from msgspec.structs import replace

from tenuto.deployments.dispatch.in_flight import (
    Asker,
    GenerationTerms,
    OpenGeneration,
    Request,
    RequestTerms,
    TokenAsker,
)
from tenuto.deployments.operator.combined_status import combine_dispatchers
from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.arena import Held
from tenuto.deployments.wire.bundles import Bundler, Places, clock_ahead_ms, unpack_answers
from tenuto.deployments.wire.messages import (
    Answers,
    AskEnded,
    AskStatus,
    AskWaiting,
    DispatcherState,
    Generated,
    Message,
    RequestRow,
    Requests,
    StopGenerating,
    TellGateway,
    Told,
)
from tenuto.deployments.wire.peer import Connection, Endpoint, Finder, PeerConnection
from tenuto.deployments.wire.status import DispatchingStatus, EndedRequest, GatewayReport, GpuletStatus
from tenuto.deployments.wire.tensors import InputPart
from tenuto.outcome import Outcome, Rule
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.generating import Sampling

logger = logging.getLogger("ray.serve")

_REPORT_TIMEOUT_S = 5.0  # limit: for the answers of all dispatchers to one question
_MOST_ASKED = 8  # limit: times for another dispatcher than one that is connected, before a pause
_DIED = "the dispatcher died; send the request again"
_LATE = Refused(Outcome.EXPIRED, "its deadline passed before its dispatcher's death was noticed", 1.0, rule=Rule.LOST)
_LAST_READS_S = 10.0  # limit: after a dispatcher's death its gpu-lets may still read what they have begun

DispatcherConnection = Connection[DispatcherState]
FoundT = TypeVar("FoundT")


@dataclass(slots=True, eq=False)
class _Peer:
    """One dispatcher: its connection, the requests that wait to be sent, and those that it has not answered.

    `token` is the one with which it was found last. `left` holds the memory of requests whose client went away, until
    the dispatcher says that nobody reads it.
    """

    group: _SubCluster
    connection: DispatcherConnection
    outbox: Bundler[Request]
    token: str = ""
    waiting: dict[int, Request] = field(default_factory=dict)
    left: dict[int, Held | None] = field(default_factory=dict)
    leaving: list[int] = field(default_factory=list)
    unsent: set[int] = field(default_factory=set)
    reports: dict[int, asyncio.Future[bytes]] = field(default_factory=dict)
    generating: dict[int, OpenGeneration] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _SubCluster:
    """The dispatchers of one sub-cluster. `moved` are the requests of a dispatcher that died, for which another one was
    asked."""

    name: str
    peers: list[_Peer] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)
    is_in_plan: bool = True

    def scheduling(self) -> _Peer | None:
        """Return the dispatcher that schedules, which is the same for every gateway that reaches it."""
        found, senior = None, (True, math.inf, 0)
        for peer in self.peers:
            state = peer.connection.state
            if state is not None and peer.connection.is_up and state.seniority() < senior:
                found, senior = peer, state.seniority()
        return found

    def connected(self) -> int:
        """Return how many of its dispatchers are connected."""
        return sum(peer.connection.is_up and peer.connection.state is not None for peer in self.peers)

    def known(self) -> DispatcherState | None:
        """Return what the dispatcher that schedules says; without one, what it said last."""
        peer = self.scheduling() or next((peer for peer in self.peers if peer.connection.state is not None), None)
        return None if peer is None else peer.connection.state


class DispatcherClient:
    """Invariant: a request is answered exactly once: by its answer, by its dispatcher's end, or by `close`; unless it
    was cancelled."""

    def __init__(
        self,
        find_dispatcher: Callable[[str], Finder],
        *,
        on_change: Callable[[], None] = lambda: None,
        is_watched: bool = True,
    ) -> None:
        """Prepare without a plan; `apply` gives one.

        Args:
            find_dispatcher: returns the function that finds a dispatcher of a sub-cluster by its name, any of them.
            on_change: called when a dispatcher comes, goes or says anew what it holds, and after a new plan.
            is_watched: whether dispatchers may give this process up when its loop stands still for a second or two.
        """
        self._is_watched = is_watched
        self._name = secrets.token_hex(8)
        self._find = find_dispatcher
        self._dispatchers = 1  # of every sub-cluster; all but one wait
        self._on_change = on_change
        self.changes = 0  # how often `on_change` was called
        self._numbers = itertools.count()
        self._plan: Plan | None = None
        self._groups: dict[str, _SubCluster] = {}
        self._by_connection: dict[int, _Peer] = {}
        self._group_of: dict[str, _SubCluster] = {}
        self._slo_ms: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def plan(self) -> Plan | None:
        """The plan that is being served."""
        return self._plan

    # Limit: for the dispatchers to connect.
    async def apply(
        self, plan: Plan, sub_clusters: Mapping[str, Sequence[str]], *, dispatchers: int = 1, wait_s: float = 20.0
    ) -> None:
        """Follow a plan, with the models of every sub-cluster; dispatchers of unchanged names stay connected.

        Returns when all are connected, or after `wait_s`. In a new sub-cluster the dispatchers that wait count, too: a
        gateway that knew only the younger one would let it schedule the gpu-lets that the older one schedules for
        others.

        Args:
            plan: what is served.
            sub_clusters: names of sub-clusters and of their models.
            dispatchers: number in every sub-cluster; all but one wait. When there are more, those whose connection
                is down are forgotten.
            wait_s: seconds.
        """
        old, self._groups = self._groups, {}
        new = sub_clusters.keys() - old.keys()
        self._plan, self._dispatchers = plan, dispatchers
        self._slo_ms = {spec.name: spec.own_slo_ms for spec in plan.models}
        for name in sub_clusters:
            group = self._groups[name] = old.pop(name) if name in old else _SubCluster(name)
            while len(group.peers) < dispatchers:
                self._connect(group)
        self._group_of = {model: self._groups[name] for name, models in sub_clusters.items() for model in models}
        for group in old.values():
            group.is_in_plan = False
            for peer in group.peers:
                for generation in list(peer.generating.values()):
                    other = self._group_of[generation.name].scheduling() if generation.name in self._group_of else None
                    if other is not None:
                        self.leave(generation)
                        self._ask(other, generation)
                self._fail(peer, "its sub-cluster was removed from the plan")
                await peer.connection.stop()
                self._by_connection.pop(id(peer.connection), None)
        for group in self._groups.values():
            away = [peer for peer in group.peers if not peer.connection.is_up]
            for peer in away[: max(0, len(group.peers) - dispatchers)]:
                await self._let_go(peer)
        self._note_change()
        try:
            async with asyncio.timeout(wait_s):
                while not all(
                    group.scheduling() and (name not in new or group.connected() == self._dispatchers)
                    for name, group in self._groups.items()
                ):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # until then the gateway says that it is not ready

    def _connect(self, group: _SubCluster) -> None:
        """Keep one more dispatcher of a sub-cluster connected."""
        find_any = self._find(group.name)

        async def find() -> Endpoint:
            for _ in range(_MOST_ASKED):
                found = await find_any()
                if found.token not in {other.token for other in group.peers if other is not peer}:
                    peer.token = found.token
                    return found
            raise LookupError("no other dispatcher is there")

        connection = PeerConnection(
            DispatcherState, group.name, find, self, name="dispatcher", is_watched=self._is_watched, gateway=self._name
        )
        peer = _Peer(group, connection, Bundler(lambda _items: None))
        peer.outbox = Bundler(functools.partial(self._send, peer))
        group.peers.append(peer)
        self._by_connection[id(connection)] = peer
        connection.start()

    async def _let_go(self, peer: _Peer) -> None:
        """Stop looking for a dispatcher that is not needed any more."""
        if peer in peer.group.peers:
            peer.group.peers.remove(peer)
            del self._by_connection[id(peer.connection)]
            await peer.connection.stop()

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
        """Take one request; it is refused here only when its dispatcher is absent. See `Dispatcher.admit`."""
        group = self._group_of[model]
        arrived = time.monotonic() * 1000.0 if arrived_ms is None else arrived_ms
        deadline = arrived + (self._slo_ms[model] if slo_ms is None else slo_ms)
        request = Request(next(self._numbers), model, 0, arrived, deadline, asker, **terms)
        if request.samples is not None and request.samples.first < 0:
            request.samples.first = request.id
        if group.scheduling() is None:
            reason = f"the dispatcher of '{model}' is not there. Retry in a few seconds."
            asker.refused(request, Refused(Outcome.FAILED, reason, 1.0))
        return request

    def start(self, request: Request, parts: Sequence[InputPart], memory: Held | None = None) -> None:
        """Send an admitted request with the next bundle; its memory is held until nobody reads it any more."""
        request.parts, request.memory = parts, memory
        peer = self._group_of[request.name].scheduling()
        if peer is None:  # it died since the request was admitted
            request.asker.refused(request, Refused(Outcome.FAILED, _DIED, 1.0, rule=Rule.LOST))
            return
        if memory is not None:
            memory.hold()
        self._put(peer, request)

    def generate(
        self,
        model: str,
        asker: TokenAsker,
        prompt: list[int],
        sampling: Sampling,
        *,
        arrived_ms: float | None = None,
        ttft_ms: float = math.inf,
        tpot_ms: float = math.inf,
        **terms: Unpack[GenerationTerms],
    ) -> OpenGeneration:
        """Generate after a prompt; see `Dispatcher.generate`."""
        arrived = time.monotonic() * 1000.0 if arrived_ms is None else arrived_ms
        bounds = arrived, arrived + ttft_ms, tpot_ms
        generation = OpenGeneration(next(self._numbers), model, *bounds, prompt, sampling, asker, **terms)
        peer = self._group_of[model].scheduling()
        if peer is None:
            reason = f"the dispatcher of '{model}' is not there. Retry in a few seconds."
            asker.refused(generation, Refused(Outcome.FAILED, reason, 1.0))
        else:
            self._ask(peer, generation)
        return generation

    def _ask(self, peer: _Peer, generation: OpenGeneration) -> None:
        peer.generating[generation.number] = generation
        peer.connection.send(generation.message(time.monotonic() * 1000.0))

    def leave(self, generation: OpenGeneration, *, is_answered: bool = False) -> None:
        """Forget a generation whose client went away, or that has all its tokens."""
        for peer in self._by_connection.values():
            if peer.generating.pop(generation.number, None) is not None:
                peer.connection.send(StopGenerating([generation.number], is_answered))

    @property
    def is_generating(self) -> bool:
        """Whether a generation is open."""
        return any(peer.generating for peer in self._by_connection.values())

    def _wrote(self, peer: _Peer, generated: Generated) -> None:
        """Pass on the tokens of generations, and their ends."""
        now_ms = time.monotonic() * 1000.0
        for number, scores in generated.scores:
            generation = peer.generating.get(number)
            if generation is not None:
                generation.asker.scored(scores)
        for number, token in generated.tokens:
            generation = peer.generating.get(number)
            if generation is not None:
                generation.add_token(token, now_ms)
        for ended in generated.ended:
            generation = peer.generating.pop(ended.number, None)
            if generation is not None:
                generation.gpulet = ended.gpulet
                if not generation.tokens:
                    generation.note_time(now_ms)
                generation.tell_end(ended)

    def _put(self, peer: _Peer, request: Request) -> None:
        peer.waiting[request.id] = request
        peer.unsent.add(request.id)
        is_mapped = peer.connection.shares_memory
        peer.outbox.add(request, sum([0 if part.arena and is_mapped else part.nbytes for part in request.parts]))

    def cancel(self, request: Request) -> None:
        """Forget a request whose client went away, and tell its dispatcher."""
        # Its model may have another sub-cluster by now.
        peer = next((p for p in self._by_connection.values() if request.id in p.waiting), None)
        if peer is None:
            return
        del peer.waiting[request.id]
        peer.group.moved.discard(request.id)
        if request.id in peer.unsent:
            if request.memory is not None:
                request.memory.release()
            return
        peer.left[request.id] = request.memory
        peer.leaving.append(request.id)
        peer.outbox.add(request)  # only its number is sent: it does not wait any more

    def _send(self, peer: _Peer, requests: list[Request]) -> None:
        places = Places(shares_memory=peer.connection.shares_memory)
        leaving, peer.leaving = peer.leaving, []
        peer.unsent.clear()
        rows = [
            RequestRow(
                request.id,
                request.name,
                request.arrived_ms,
                request.deadline_ms,
                request.reserve_ms,
                request.client_id,
                [places.put(part) for part in request.parts],
                request.yields,
                *_together(request),
                request.sizes,
                request.offline,
                request.client,
            )
            for request in requests
            if request.id in peer.waiting
        ]
        peer.connection.send(Requests(time.monotonic() * 1000.0, places.arenas, rows, leaving), places.buffers)

    # --- what dispatchers say (ConnectionEvents) ----------------------------------------------------------------------

    def peer_connected(self, connection: DispatcherConnection) -> None:
        """A dispatcher is connected."""
        self.state_changed(connection)

    def state_changed(self, connection: DispatcherConnection) -> None:
        """A dispatcher said anew what it holds."""
        del connection
        self._changed.set()
        self._note_change()

    def peer_lost(self, connection: DispatcherConnection, reason: str) -> None:
        """A dispatcher is gone, with the requests that it held."""
        peer = self._by_connection.get(id(connection))
        if peer is None or not peer.group.is_in_plan:
            return
        other = peer.group.scheduling()
        if other is not None:
            self._move(peer, other)
        self._fail(peer, f"{_DIED} ({reason})")
        if len(peer.group.peers) > self._dispatchers:
            task = asyncio.create_task(self._let_go(peer), name="let a dispatcher go")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._note_change()

    def _note_change(self) -> None:
        self.changes += 1
        self._on_change()

    def _move(self, peer: _Peer, other: _Peer) -> None:
        """Ask another dispatcher for the requests of one that is gone, except those that were moved once before."""
        now_ms, moved = time.monotonic() * 1000.0, peer.group.moved
        again = [r for r in peer.waiting.values() if r.id not in moved and r.deadline_ms > now_ms]
        late = []
        for request in again:
            del peer.waiting[request.id]
            moved.add(request.id)
            if request.memory is not None:
                # The gpu-lets of the dead dispatcher may still read it when those of the other one have answered.
                request.memory.hold()
                late.append(request.memory)
            self._put(other, request)
        asyncio.get_running_loop().call_later(_LAST_READS_S, _release, late)
        for generation in [each for each in peer.generating.values() if not each.was_retried]:
            del peer.generating[generation.number]
            generation.was_retried = True
            self._ask(other, generation)
        if again:
            logger.warning(
                "%d requests of the dispatcher of %s that died are asked of another", len(again), peer.group.name
            )

    def _fail(self, peer: _Peer, reason: str) -> None:
        peer.outbox.drop()
        peer.unsent.clear()
        peer.leaving.clear()
        waiting, peer.waiting = peer.waiting, {}
        left, peer.left = peer.left, {}
        held = [slot for slot in (*(r.memory for r in waiting.values()), *left.values()) if slot is not None]
        asyncio.get_running_loop().call_later(_LAST_READS_S, _release, held)
        peer.group.moved -= waiting.keys()
        now_ms, failed = time.monotonic() * 1000.0, Refused(Outcome.FAILED, reason, 1.0, rule=Rule.LOST)
        for request in waiting.values():
            request.asker.refused(request, failed if request.deadline_ms > now_ms else _LATE)
        generating, peer.generating = peer.generating, {}
        for generation in generating.values():
            generation.asker.refused(generation, failed)
        reports, peer.reports = peer.reports, {}
        for report in reports.values():
            if not report.done():
                report.set_exception(TimeoutError(reason))

    def message_came(self, connection: DispatcherConnection, message: Message, body: memoryview) -> None:
        """Answers, or a report."""
        peer = self._by_connection.get(id(connection))
        if peer is None:
            return
        if isinstance(message, Told):
            report = peer.reports.pop(message.number, None)
            if report is not None and not report.done():
                report.set_result(bytes(message.found))  # it lies in memory that is received into again
        elif isinstance(message, Answers):
            self._take(peer, message, body)
        elif isinstance(message, Generated):
            self._wrote(peer, message)
        else:
            logger.warning("dispatcher %s sent a %s, which nobody asked for", peer.group.name, type(message).__name__)

    def _take(self, peer: _Peer, message: Answers, body: memoryview) -> None:
        now_ms = time.monotonic() * 1000.0
        ahead_ms = clock_ahead_ms(message.sent_at_ms, now_ms, shares_memory=peer.connection.shares_memory)
        moved = peer.group.moved
        for number, end, row in unpack_answers(message, body, ahead_ms):
            request = peer.waiting.pop(number, None)
            if request is None:
                slot = peer.left.pop(number, None)
                if slot is not None:
                    slot.release()
                continue
            if moved:
                moved.discard(number)
            if request.memory is not None:
                request.memory.release()
            if request.samples is not None:
                request.samples.end_one()
            if isinstance(end, Executed):
                request.asker.executed(request, end, row)
            else:
                request.asker.refused(request, end)

    # --- state --------------------------------------------------------------------------------------------------

    def is_ready(self, model: str | None = None) -> bool:
        """Whether every gpu-let is usable; with a model, whether at least one of its gpu-lets is."""
        if self._plan is None:
            return False
        groups = self._groups.values() if model is None else [self._group_of[model]] if model in self._group_of else []
        states = [peer.connection.state for group in groups if (peer := group.scheduling()) is not None]
        if model is None:
            return len(states) == len(self._groups) and all(state is not None and state.ready for state in states)
        return any(state is not None and model in state.ready_models for state in states)

    def signature(self, model: str) -> ModelSignature | None:
        """Return a model's signature as a gpu-let reported it; None before."""
        group = self._group_of.get(model)
        state = None if group is None else group.known()
        return None if state is None else state.signatures.get(model)

    def gpulets(self) -> list[GpuletStatus]:
        """Return what every gpu-let reported to its dispatcher; those of an absent one are down."""
        found: dict[str, GpuletStatus] = {}  # two dispatchers know one whose models change their sub-cluster
        for group in self._groups.values():
            state, is_there = group.known(), group.scheduling() is not None
            for gpulet in state.gpulets if state is not None else ():
                if gpulet.id not in found or not found[gpulet.id].up:
                    found[gpulet.id] = replace(gpulet, up=gpulet.up and is_there)
        for planned in self._plan.gpulets if self._plan is not None else ():
            if planned.id not in found:
                found[planned.id] = GpuletStatus(
                    id=planned.id, gpu=planned.gpu, also_on=planned.also_on, share_pct=planned.share_pct
                )
        return list(found.values())

    def connected(self) -> dict[str, int]:
        """Return how many dispatchers of every sub-cluster are connected. With one alone, its death fails requests."""
        return {name: group.connected() for name, group in self._groups.items()}

    def _scheduling(self) -> list[_Peer]:
        return [peer for group in self._groups.values() if (peer := group.scheduling()) is not None]

    async def status(self) -> DispatchingStatus:
        """Return the status of all dispatchers that schedule as one."""
        reports = await self._all(self._scheduling(), AskStatus, DispatchingStatus)
        return combine_dispatchers(reports, self._plan, self.gpulets())

    async def waiting(self) -> dict[str, int]:
        """Return how many requests of every model wait for a batch."""
        reports = await self._all(self._scheduling(), AskWaiting, dict[str, int])
        return {name: length for report in reports for name, length in report.items()}

    async def ended(self, id: str | None, limit: int) -> list[EndedRequest]:
        """Return the last requests that ended, newest first; with an id, those of it."""
        reports = await self._all(self._scheduling(), lambda number: AskEnded(number, id, limit), list[EndedRequest])
        return sorted((ended for report in reports for ended in report), key=lambda ended: -ended.received_at_s)

    async def meet(self, told: GatewayReport) -> list[GatewayReport]:
        """Tell the other gateways something of this one, and return what all of them told last, this one among them.

        They meet at the first dispatcher that is connected. Without one, only this gateway is returned.

        Raises:
            TimeoutError: it does not answer.
        """
        here = [peer for _, group in sorted(self._groups.items()) if (peer := group.scheduling()) is not None]
        reports = await self._all(here[:1], lambda number: TellGateway(number, told), list[GatewayReport])
        return reports[0] if reports else [told]

    async def _all(self, peers: Sequence[_Peer], ask: Callable[[int], Message], kind: type[FoundT]) -> list[FoundT]:
        """Ask dispatchers, and return what they report; raises `TimeoutError` if one does not answer."""
        futures = []
        for peer in peers:
            number = next(self._numbers)
            future = peer.reports[number] = asyncio.get_running_loop().create_future()
            future.add_done_callback(functools.partial(_forget_report, peer, number))
            peer.connection.send(ask(number))
            futures.append(future)
        async with asyncio.timeout(_REPORT_TIMEOUT_S):
            return [msgspec.msgpack.decode(report, type=kind) for report in await asyncio.gather(*futures)]

    async def close(self) -> None:
        """Fail all requests that wait, and disconnect."""
        peers = [peer for group in self._groups.values() for peer in group.peers]
        for group in self._groups.values():
            group.is_in_plan = False
        for peer in peers:
            self._fail(peer, "the server is shutting down; send the request again")
        await asyncio.gather(*(peer.connection.stop() for peer in peers))


def _forget_report(peer: _Peer, number: int, _report: object) -> None:
    """Forget a question that is answered, or that nobody waits for any more."""
    peer.reports.pop(number, None)


def _release(held: Sequence[Held]) -> None:
    for slot in held:
        slot.release()


def _together(request: Request) -> tuple[int, int]:
    """Return the number of the first sample of a client's request, and how many of its samples are not answered."""
    return (-1, 1) if request.samples is None else (request.samples.first, request.samples.left)
