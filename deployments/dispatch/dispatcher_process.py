"""The dispatcher of a sub-cluster in a process of its own. Several gateways send it requests in bundles.

When a gateway's connection closes, the requests of that gateway are cancelled, as a closed HTTP connection cancels its
request. The dispatcher takes charge of the gpu-lets when the first requests come, if it may (`leadership`). When
another dispatcher takes charge, because some gateway could not reach this one, this one disconnects all its gateways.
These then send their requests to the other dispatcher.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import Raw
from msgspec.msgpack import encode as pack
from msgspec.structs import replace

from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.in_flight import OpenGeneration, Request, Samples
from tenuto.deployments.dispatch.leadership import Leadership
from tenuto.deployments.process.limits import GENERATIONS_END_S, REQUESTS_END_S
from tenuto.deployments.process.niceness import run_at_normal_priority
from tenuto.deployments.process.own_loop import OwnLoop, elsewhere, spare_the_collector
from tenuto.deployments.process.ray_address import own_address_for
from tenuto.deployments.serve.discovery import find_gpulet, own_application
from tenuto.deployments.serve.user_config import DispatcherConfig, read_dispatcher_config
from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.arena import Held, MappedArenas, machine_id
from tenuto.deployments.wire.bundles import AnsweredRequest, Bundler, clock_ahead_ms, pack_answers, read_parts
from tenuto.deployments.wire.encryption import Identity
from tenuto.deployments.wire.frames import Address, FrameProtocol, listen
from tenuto.deployments.wire.liveness import GIVEN_UP_S
from tenuto.deployments.wire.messages import (
    AskEnded,
    AskStatus,
    AskWaiting,
    DispatcherState,
    EndedSequence,
    Generate,
    Generated,
    Hello,
    Message,
    RequestRow,
    Requests,
    StopGenerating,
    TellGateway,
    Told,
)
from tenuto.deployments.wire.peer import Endpoint, Finder
from tenuto.deployments.wire.status import GatewayReport
from tenuto.outcome import Outcome
from tenuto.profiles.networks.generating import Ending, TokenScores

logger = logging.getLogger("ray.serve")

_LEFT = "its client went away"
_NOT_IN_CHARGE = Refused(
    Outcome.FAILED,
    "another dispatcher schedules, which this gateway cannot reach; ask another gateway, or again in a few seconds",
    1.0,
)


class _Asked(Held):
    """A request of a gateway. It also counts who reads the gateway's shared memory, as a `Slot` does for our own
    memory: when the client went away, the gateway is answered once no gpu-let reads that memory any more."""

    __slots__ = ("_gateway", "_number", "request")

    def __init__(self, gateway: _Gateway, number: int) -> None:
        super().__init__()
        self._gateway = gateway
        self._number = number
        self.request: Request | None = None

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        """Send the answer with the next bundle."""
        del request
        self._send(AnsweredRequest(self._number, executed, row), sum([output.row_bytes for output in executed.outputs]))

    def refused(self, request: Request, refused: Refused) -> None:
        """Send the refusal with the next bundle."""
        del request
        self.fail(refused)

    def fail(self, refused: Refused) -> None:
        """Send a refusal, also of a request that was never given to the dispatcher."""
        self._send(AnsweredRequest(self._number, refused))

    def _send(self, answered: AnsweredRequest, size_bytes: int = 0) -> None:
        self.request = None
        if self._gateway.asked.pop(self._number, None) is not None:
            self._gateway.outbox.add(answered, size_bytes)

    def _give_back(self) -> None:
        if self._gateway.asked.pop(self._number, None) is not None:
            self._gateway.outbox.add(AnsweredRequest(self._number, Refused(Outcome.FAILED, _LEFT)))


class _AskedTokens:
    """A generation of a gateway, whose tokens leave with the others of the same turn of the loop."""

    __slots__ = ("_gateway", "_number", "generation")

    def __init__(self, gateway: _Gateway, number: int) -> None:
        self._gateway = gateway
        self._number = number
        self.generation: OpenGeneration | None = None

    def scored(self, scores: list[TokenScores]) -> None:
        """Send scores with the next bundle."""
        self._gateway.written.add(_Scored(self._number, scores))

    def wrote(self, token: int) -> None:
        """Send a token with the next bundle."""
        self._gateway.written.add((self._number, token))

    def ended(self, finish: Ending) -> None:
        """Send the end with the next bundle."""
        gpulet = "" if self.generation is None else self.generation.gpulet
        self._end(EndedSequence(self._number, finish.value, gpulet=gpulet))

    def refused(self, generation: OpenGeneration, refused: Refused) -> None:
        """Send the refusal with the next bundle."""
        del generation
        self.fail(refused)

    def fail(self, refused: Refused) -> None:
        """Send a refusal, also of a generation that was never given to the dispatcher."""
        self._end(EndedSequence.failed(self._number, refused))

    def _end(self, ended: EndedSequence) -> None:
        if self._gateway.generating.pop(self._number, None) is not None:
            self._gateway.written.add(ended)


class _Scored(NamedTuple):
    """Scores of a generation, by its number, among tokens and ends."""

    number: int
    scores: list[TokenScores]


class _Gateway:
    """One connection of a gateway: its requests that are not answered yet, and the answers that wait to be sent."""

    def __init__(self, protocol: FrameProtocol, hello: Hello) -> None:
        self.protocol = protocol
        self.name = hello.gateway
        self.shares_memory = hello.machine == machine_id()
        self.asked: dict[int, _Asked] = {}
        self._samples = Samples(0)  # of the latest request that has several
        self.told: GatewayReport | None = None
        self.outbox: Bundler[AnsweredRequest] = Bundler(self._send)
        self.generating: dict[int, _AskedTokens] = {}
        self.written: Bundler[tuple[int, int] | EndedSequence | _Scored] = Bundler(self._send_written)

    def _send(self, answered: list[AnsweredRequest]) -> None:
        self.protocol.send(*pack_answers(answered, time.monotonic() * 1000.0))

    def samples(self, row: RequestRow) -> Samples | None:
        """Return the request that a row is a sample of, if that has several. Their rows follow each other."""
        if row.first < 0:
            return None
        if row.first != self._samples.first:
            self._samples = Samples(row.left, row.first)
        return self._samples

    def _send_written(self, written: list[tuple[int, int] | EndedSequence | _Scored]) -> None:
        tokens, ended, scores = list[tuple[int, int]](), list[EndedSequence](), list[tuple[int, list[TokenScores]]]()
        for each in written:
            if isinstance(each, EndedSequence):
                ended.append(each)
            elif isinstance(each, _Scored):
                scores.append(each)
            else:
                tokens.append(each)
        self.protocol.send(Generated(tokens, ended, scores=scores))


class BundleServer:
    """Lets gateways use one dispatcher over sockets, on the dispatcher's event loop."""

    def __init__(self, dispatcher: Dispatcher, leadership: Leadership | None = None) -> None:
        self.dispatcher = dispatcher
        self._leadership = leadership or Leadership()
        self.token = secrets.token_hex(16)
        self.started_at_s = time.time()
        self._identity = Identity()
        self._arenas = MappedArenas()
        self._gateways: dict[int, _Gateway] = {}
        self._lately: list[str] = []  # names of gateways that left a moment ago
        self._servers: dict[tuple[str, bool], asyncio.Server] = {}
        self._endpoints: dict[tuple[str, bool], Endpoint] = {}
        self._listening = asyncio.Lock()  # two equal calls at once get one server
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_announced = False

    async def listen(self, host: str = "", *, encrypted: bool = False) -> Endpoint:
        """Listen, and return where. Without a host, only this machine can connect. With a host, it is a free port of
        that address, with TLS if `encrypted`."""
        encrypted = encrypted and bool(host)
        async with self._listening:
            known = self._endpoints.get((host, encrypted))
            if known is not None:
                return known
            address: Address = (host, 0) if host else f"\0tenuto-{os.getpid()}-{id(self):x}"
            server = self._servers[host, encrypted] = await listen(
                address, self._accept, self._identity if encrypted else None
            )
            if host:
                address = host, server.sockets[0].getsockname()[1]
            made = Endpoint(address, self.token, self._identity.certificate if encrypted else "")
            self._endpoints[host, encrypted] = made
            return made

    def _accept(self) -> FrameProtocol:
        return FrameProtocol(self._on_message, self._on_lost, expect_token=self.token, on_hello=self._on_hello)

    def _on_hello(self, protocol: FrameProtocol, hello: Hello) -> None:
        self._gateways[id(protocol)] = _Gateway(protocol, hello)
        self._count_gateways()
        if hello.is_watched:
            protocol.watch()
        state = self.state()
        protocol.limit_bodies(state.most_asked_bytes())
        protocol.send(state)

    def _on_lost(self, protocol: FrameProtocol, _error: BaseException | None) -> None:
        """Cancel the requests of a gateway that is gone: its clients are gone too."""
        gateway = self._gateways.pop(id(protocol), None)
        if gateway is None:
            return
        if gateway.asked:
            logger.warning("a gateway is gone with %d requests under way; they are cancelled", len(gateway.asked))
        gateway.outbox.drop()
        gateway.written.drop()
        generating, gateway.generating = gateway.generating, {}
        for tokens in generating.values():
            if tokens.generation is not None:
                self.dispatcher.leave(tokens.generation)
        asked, gateway.asked = gateway.asked, {}
        for question in asked.values():
            if question.request is not None:
                self.dispatcher.cancel(question.request)
        self._lately.append(gateway.name)
        asyncio.get_running_loop().call_later(GIVEN_UP_S, self._forget_gateway)
        self._count_gateways()

    def _forget_gateway(self) -> None:
        self._lately.pop(0)
        self._count_gateways()

    def _count_gateways(self) -> None:
        self._leadership.reached_by((gateway.name for gateway in self._gateways.values()), self._lately)
        if not self._gateways:
            self.started_at_s = time.time()  # gateways ask the oldest dispatcher, so without gateways this one is young
        self.announce()

    def step_back(self) -> None:
        """Disconnect all gateways, as another dispatcher is in charge."""
        for gateway in list(self._gateways.values()):
            gateway.protocol.abort()

    def _on_message(self, protocol: FrameProtocol, message: Message, body: memoryview) -> None:
        gateway = self._gateways[id(protocol)]
        if isinstance(message, Requests):
            self._take(gateway, message, body)
        elif isinstance(message, Generate):
            self._generate(gateway, message)
        elif isinstance(message, StopGenerating):
            for number in message.numbers:
                tokens = gateway.generating.pop(number, None)
                if tokens is not None and tokens.generation is not None:
                    self.dispatcher.leave(tokens.generation, is_answered=message.is_answered)
        elif isinstance(message, TellGateway):
            self.dispatcher.accounts.ended.add_records(message.told.ended)
            gateway.told = replace(message.told, ended=[])
            reports = [other.told for other in self._gateways.values() if other.told is not None]
            protocol.send(Told(message.number, Raw(pack(reports))))
        elif isinstance(message, AskStatus | AskWaiting | AskEnded):
            task = asyncio.create_task(self._report(protocol, message), name="report")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            logger.warning("a gateway sent a %s, which nobody asked for", type(message).__name__)

    def _take(self, gateway: _Gateway, bundle: Requests, body: memoryview) -> None:
        is_in_charge = self._leadership.claim()
        now_ms = time.monotonic() * 1000.0
        ahead_ms = clock_ahead_ms(bundle.sent_at_ms, now_ms, shares_memory=gateway.shares_memory)
        for row in bundle.rows:
            asked = gateway.asked[row.number] = _Asked(gateway, row.number)
            if not is_in_charge:
                asked.fail(_NOT_IN_CHARGE)
                continue
            # Also a row that cannot be read leaves the others their parts of the body.
            inline, body = body, body[sum([place.length for place in row.places if place.arena < 0]) :]
            try:
                parts, _ = read_parts(row.places, bundle.arenas, inline, self._arenas)
                request = self._admit(asked, row, ahead_ms, gateway.samples(row))
            except (OSError, ValueError, LookupError) as error:
                why = f"'{row.model}' was removed from the plan" if isinstance(error, KeyError) else str(error)
                asked.fail(Refused(Outcome.FAILED, why))
                continue
            if row.number in gateway.asked:
                asked.request = request
                # Holding `asked` holds the gateway's memory, as holding a slot holds our own.
                self.dispatcher.start(request, parts, asked if bundle.arenas else None)
        for number in bundle.left:
            left = gateway.asked.get(number)
            if left is not None and left.request is not None:
                self.dispatcher.cancel(left.request)
                left.release()

    def _generate(self, gateway: _Gateway, message: Generate) -> None:
        tokens = gateway.generating[message.number] = _AskedTokens(gateway, message.number)
        if not self._leadership.claim():
            tokens.fail(_NOT_IN_CHARGE)
            return
        try:
            tokens.generation = self.dispatcher.generate(
                message.model,
                tokens,
                message.prompt,
                message.sampling,
                ttft_ms=message.first_in_ms,
                tpot_ms=message.tpot_ms,
                client_id=message.client_id,
                made=message.made,
                offline=message.offline,
                client=message.client,
            )
        except KeyError:
            tokens.fail(Refused(Outcome.FAILED, f"'{message.model}' was removed from the plan"))

    def _admit(self, asked: _Asked, row: RequestRow, ahead_ms: float, samples: Samples | None) -> Request:
        return self.dispatcher.admit(
            row.model,
            asked,
            arrived_ms=row.arrived_at_ms + ahead_ms,
            slo_ms=row.deadline_at_ms - row.arrived_at_ms,
            client_id=row.client_id,
            reserve_ms=row.reserve_ms,
            yields=row.yields,
            samples=samples,
            sizes=row.sizes,
            offline=row.offline,
            client=row.client,
        )

    async def _report(self, protocol: FrameProtocol, asked: AskStatus | AskWaiting | AskEnded) -> None:
        report: object
        if isinstance(asked, AskStatus):
            report = replace(await self.dispatcher.status(), plan=None)
        elif isinstance(asked, AskWaiting):
            report = await self.dispatcher.waiting()
        else:
            report = await self.dispatcher.ended(asked.id, asked.limit)
        protocol.send(Told(asked.number, Raw(pack(report))))

    def state(self) -> DispatcherState:
        """Return what gateways must know to answer questions about readiness and signatures by themselves."""
        dispatcher, is_eligible = self.dispatcher, self._leadership.can_be_had()
        names = [spec.name for spec in dispatcher.plan.models] if dispatcher.plan is not None else []
        signatures = ((name, dispatcher.signature(name)) for name in names)
        return DispatcherState(
            pid=os.getpid(),
            machine=machine_id(),
            started_at_s=self.started_at_s,
            ready=is_eligible and dispatcher.is_ready(),
            ready_models=[name for name in names if is_eligible and dispatcher.is_ready(name)],
            signatures={name: signature for name, signature in signatures if signature is not None},
            gpulets=dispatcher.gpulets(),
            is_eligible=is_eligible,
        )

    def announce(self) -> None:
        """Send every gateway the state soon, once for all changes of this turn of the loop."""
        if not self._is_announced:
            self._is_announced = True
            asyncio.get_running_loop().call_soon(self._announce_now)

    def _announce_now(self) -> None:
        self._is_announced = False
        state = self.state()
        for gateway in self._gateways.values():
            gateway.protocol.limit_bodies(state.most_asked_bytes())
            gateway.protocol.send(state)

    async def close(self, drain_s: float | None = None) -> None:
        """Take no new gateways, let open requests end within `drain_s`, answer the rest as failed, and disconnect."""
        for server in self._servers.values():
            server.close()
        if drain_s is None:
            drain_s = GENERATIONS_END_S if self.dispatcher.is_generating else REQUESTS_END_S
        until = time.monotonic() + drain_s
        while (
            any(gateway.asked or gateway.generating for gateway in self._gateways.values()) and time.monotonic() < until
        ):
            await asyncio.sleep(0.02)
        await self.dispatcher.close()
        for gateway in list(self._gateways.values()):
            gateway.outbox.flush()
            gateway.written.flush()
            gateway.protocol.close()


class DispatcherReplica:
    """The Serve deployment around a `BundleServer`. `reconfigure` gives it the plan of its sub-cluster."""

    def __init__(self) -> None:
        run_at_normal_priority()
        spare_the_collector()  # now, while no requests come
        self._loop = OwnLoop("dispatcher")
        self._server: BundleServer | None = None
        self._encrypts = False

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Follow a new plan without a restart.

        Raises:
            InvalidInputError: unknown keys or unusable values; nothing was changed.
        """
        config = read_dispatcher_config(user_config)
        rays = asyncio.get_running_loop()
        await self._loop.run(self._follow(config, rays))
        spare_the_collector()

    async def _follow(self, config: DispatcherConfig, rays: asyncio.AbstractEventLoop) -> None:
        self._encrypts = config.encrypt
        if self._server is None:

            def find(gpulet_id: str) -> Finder:
                return elsewhere(find_gpulet(gpulet_id), rays)

            leadership = Leadership(own_application(), lambda: server.step_back())
            dispatcher = Dispatcher(
                config.build_scheduler,
                find,
                max_queued=config.max_queued,
                on_change=lambda: server.announce(),
                leadership=leadership,
            )
            server = self._server = BundleServer(dispatcher, leadership)
        else:
            self._server.dispatcher.configure(config.build_scheduler, max_queued=config.max_queued)
        self._server.dispatcher.apply(config.plan, config.standby)

    async def endpoint(self, node_id: str = "") -> Endpoint:
        """Return where this dispatcher listens for a node. For another node it is an address of the cluster's
        network."""
        if self._server is None:
            raise RuntimeError("no plan is applied yet")
        return await self._loop.run(self._server.listen(own_address_for(node_id), encrypted=self._encrypts))

    async def check_health(self) -> None:
        """Raise when no requests can be scheduled here any more; Serve then replaces this process."""
        await self._loop.answers("the dispatcher")

    async def __del__(self) -> None:
        """Let open requests end, then disconnect. Serve calls this when it stops the process."""
        if self._server is not None:
            await self._loop.run(self._server.close())
        await self._loop.close()


def build(args: dict[str, Any]) -> Any:
    """Return the Serve application of one dispatcher; named as `import_path` in the generated Serve config."""
    from ray import serve

    del args
    return serve.deployment(name="dispatcher")(DispatcherReplica).bind()
