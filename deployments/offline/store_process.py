"""The process that has the store of batches: one Serve application on the head's node, which may die at any time.

It asks lines as a gateway would, by a service of its own in front of the same dispatchers. So neither the gateways nor
clients' keys stand between, and its work is not done in a gateway's process.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import uvicorn
from msgspec.structs import replace
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tenuto.batching.core.system import NetworkDelay
from tenuto.deployments.entry.http.exchange import PRIORITY_HEADER, SLO_HEADERS, Exchange, Head, HttpError, fail, refuse
from tenuto.deployments.entry.http.relay import TOKEN_HEADER
from tenuto.deployments.entry.protocols.oip_requests import OFFLINE
from tenuto.deployments.entry.service.dispatcher_client import DispatcherClient
from tenuto.deployments.entry.service.inference import InferenceService
from tenuto.deployments.entry.service.python_handle import ALONE
from tenuto.deployments.offline.batch_routes import make_batch_app
from tenuto.deployments.offline.batch_runner import BatchRunner, LineReply
from tenuto.deployments.offline.batch_store import BatchStore, RequestLine, StoreError
from tenuto.deployments.process.limits import REQUESTS_END_S
from tenuto.deployments.process.own_loop import OwnLoop, elsewhere
from tenuto.deployments.process.ray_address import own_address_for
from tenuto.deployments.security.keys import Caller
from tenuto.deployments.serve.discovery import find_dispatcher, find_gateway
from tenuto.deployments.serve.user_config import GatewayConfig, OfflineOptions, read_gateway_config
from tenuto.deployments.wire.arena import Arena
from tenuto.deployments.wire.encryption import Identity
from tenuto.deployments.wire.peer import Endpoint, Finder
from tenuto.deployments.wire.status import OfflineStatus
from tenuto.deployments.wire.tensors import Buffer
from tenuto.errors import EnvironmentFaultError
from tenuto.outcome import Outcome

logger = logging.getLogger("ray.serve")

_LOOPBACK = "127.0.0.1"
_ARENA_MIB = 256  # limit: of the memory for what stages of applications hand on
_LOCK_S = 0.5  # pace: of tries for a store that another process has
_PATIENCE_S = 3600.0  # limit: for the answer of a line; then it is asked once more
_ALONE = "If it is of another deployment, end that, or give this one another --offline-path."
_CAN_WAIT = {PRIORITY_HEADER: OFFLINE.encode()}
_HAS_SLO = {SLO_HEADERS[0]: b"30000"}  # where nothing is offline; the line is asked once more when that passes


class _LineBody(msgspec.Struct):
    """What the store reads of a line's body; the service reads and checks all of it."""

    parameters: Any = None

    @property
    def has_deadline(self) -> bool:
        """Whether the line states a deadline of its own."""
        given = self.parameters
        return isinstance(given, dict) and bool(given.get("slo_ms") or given.get("timeout"))


class _Refusal(msgspec.Struct):
    retry_after_s: float | None = None
    outcome: str = ""


class LineExchange(Exchange, eq=False):
    """A line on its way to its reply. With a deadline of its own (`has_deadline`) it is not asked again after it."""

    has_deadline: bool = False
    reply: asyncio.Future[LineReply] = msgspec.field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def respond(self, status: int, headers: bytes, payload: Sequence[Buffer]) -> None:
        del headers
        self.on_left = None
        if self.reply.done():
            return
        body, refusal = b"".join(payload), _Refusal()
        if status >= 400:
            refusal = msgspec.json.decode(body, type=_Refusal)
        is_over = self.has_deadline and refusal.outcome == Outcome.EXPIRED.word
        retry_s = None if is_over else refusal.retry_after_s
        self.reply.set_result(LineReply(status, body, retry_s, refusal.outcome == Outcome.FAILED.word))


class OfflineWork:
    """The part of the process that runs on its own loop: the store, its runner, and the service that asks lines."""

    def __init__(self, options: OfflineOptions, find: Callable[[str], Finder]) -> None:
        """Prepare without a plan; must be called on the loop. `find`: returns what finds a dispatcher of a
        sub-cluster."""
        self._thread = ThreadPoolExecutor(1, "store")
        self.store = BatchStore(options)
        self.runner = BatchRunner(self.store, self._thread, self._ask_line)
        self._service = InferenceService(_refuse)
        self._service.host_names = None
        self._service.arena = Arena(_ARENA_MIB << 20)
        self._dispatchers = DispatcherClient(find, on_change=self._changed)
        self._runs_offline = False  # its scheduler does
        self._token = secrets.token_urlsafe(32)
        self._identity = Identity()
        self._servers: dict[tuple[str, bool], tuple[uvicorn.Server, Endpoint, asyncio.Task[None]]] = {}
        self._app = _WithToken(make_batch_app(self.store, self.runner), self._token)
        self.runs = asyncio.create_task(self._run(), name="work batches off")

    async def follow(self, config: GatewayConfig) -> None:
        """Follow a new plan, and new keys."""
        self._service.margin.configure(config.attainment, config.response_ms)
        self._service.max_body_bytes = config.max_body_mib << 20
        models = config.sub_clusters or {ALONE: tuple(spec.name for spec in config.plan.models)}
        self._runs_offline = config.build_scheduler(config.plan, NetworkDelay()).takes_offline
        # A line has no key to show, and only the name of the one that its batch belongs to.
        hashes = {entry.name: hashlib.sha256(entry.name.encode()).hexdigest() for entry in config.keys}
        self._service.callers.follow([entry.model_copy(update={"sha256": hashes[entry.name]}) for entry in config.keys])
        # Files and batches are answered at once: a dispatcher may have died with the process before this one.
        await self._dispatchers.apply(config.plan, models, dispatchers=config.dispatchers, wait_s=0)
        self._changed()

    def _changed(self) -> None:
        self._service.follow(self._dispatchers)

    async def _run(self) -> None:
        """Take the store as soon as it can be used and no other process has it, and work batches off."""
        while True:
            try:
                if await self.runner.on_disk(self.store.lock):
                    await self.runner.on_disk(self.store.open_database)
                    break
                problem, pause_s = f"another process has {self.store.folder}. {_ALONE}", _LOCK_S
            except (OSError, EnvironmentFaultError) as error:
                problem, pause_s = str(error), self.runner.full_s
            if problem != self.runner.problem:
                logger.error("%s", problem)
            self.runner.problems[self] = problem
            await asyncio.sleep(pause_s)
        self.runner.problems.pop(self, None)
        tempfile.tempdir = self.store.options.path  # uploads come to the disk that they stay on
        await self.runner.run()

    async def _ask_line(self, key: str, line: RequestLine) -> LineReply:
        """Ask a line for a key. It may be asked again if nobody answers in time."""
        body, callers = bytes(line.body), self._service.callers
        known = msgspec.json.decode(body, type=_LineBody)
        if callers and callers.find(key.encode()) is None:
            refused = HttpError(403, f"the key of '{key}' is not known here any more.")
            return LineReply(403, refused.payload(line.url.encode()))
        headers = {**(_CAN_WAIT if self._runs_offline else _HAS_SLO), b"x-api-key": key.encode()}
        head = Head(b"POST", line.url.encode(), headers, length=len(body))
        exchange = LineExchange(head, self._service.now_ms, body, has_deadline=known.has_deadline)
        try:
            if (problem := self._service.refusal(exchange)) is not None:
                raise problem
            self._service.handle(exchange)
        except Exception as error:
            refuse(exchange, error)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await exchange.reply
        except TimeoutError:
            return LineReply(504, b"", 1.0)
        finally:
            exchange.leave()

    async def listen(self, host: str, *, encrypted: bool) -> Endpoint:
        """Listen for gateways at an address of this machine, and return where. Beyond the machine it may be
        encrypted."""
        is_encrypted = encrypted and host != _LOOPBACK
        known = self._servers.get((host, is_encrypted))
        if known is None:
            made = socket.create_server((host, 0))
            config = uvicorn.Config(self._app, http="httptools", lifespan="off", log_config=None, access_log=False)
            config.load()
            config.ssl = self._identity.context if is_encrypted else None
            server = uvicorn.Server(config)
            certificate = self._identity.certificate if is_encrypted else ""
            endpoint = Endpoint((host, made.getsockname()[1]), self._token, certificate)
            serving = asyncio.create_task(server.serve(sockets=[made]), name="files and batches")
            known = self._servers[host, is_encrypted] = server, endpoint, serving
        return known[1]

    async def status(self) -> OfflineStatus:
        """Return what the store holds."""
        try:
            status = await self.runner.on_disk(self.store.status)
        except StoreError:
            status = OfflineStatus()
        return replace(status, problem=self.runner.problem)

    async def close(self) -> None:
        """End. Lines under way are asked again by the next process."""
        self.runs.cancel()
        for server, _, serving in self._servers.values():
            server.should_exit = True
            await asyncio.wait([serving], timeout=REQUESTS_END_S)
        await self._dispatchers.close()
        self._service.close()
        await self.runner.on_disk(self.store.close)
        self._thread.shutdown()


class _WithToken:
    """Lets only gateways in: they know the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = dict(scope["headers"]).get(TOKEN_HEADER.encode(), b"")
        is_ours = hmac.compare_digest(shown, self._token)
        app = self._app if is_ours else JSONResponse({"error": "only gateways may ask here."}, 403)
        await app(scope, receive, send)


def _refuse(exchange: Exchange, _caller: Caller | None) -> None:
    fail(exchange, HttpError(404, "this is no route of a batch."))


class OfflineReplica:
    """The Serve deployment around the store. `reconfigure` gives it the gateways' settings."""

    def __init__(self) -> None:
        self._loop = OwnLoop("offline")
        self._work: OfflineWork | None = None
        self._encrypts = False

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Follow a new plan without a restart.

        Raises:
            InvalidInputError: unknown keys or unusable values; nothing was changed.
        """
        config = read_gateway_config(user_config)
        await self._loop.run(self._follow(config, asyncio.get_running_loop()))

    async def _follow(self, config: GatewayConfig, rays: asyncio.AbstractEventLoop) -> None:
        assert config.offline is not None
        self._encrypts = config.encrypt
        if self._work is not None and self._work.store.options != config.offline:
            await self._work.close()
            self._work = None
        if self._work is None:

            def find(sub_cluster: str) -> Finder:
                return elsewhere(find_gateway() if sub_cluster == ALONE else find_dispatcher(sub_cluster), rays)

            self._work = OfflineWork(config.offline, find)
        await self._work.follow(config)

    async def check_health(self) -> None:
        """Raise when batches are not worked off any more; Serve then replaces this process."""
        await self._loop.answers("the store of batches")
        work = self._work
        if work is not None and work.runs.done():
            raise EnvironmentFaultError(f"the store of batches has ended: {work.runs.exception()}")

    async def endpoint(self, node_id: str = "") -> Endpoint:
        """Return where the store listens for the gateways of a node."""
        if self._work is None:
            raise RuntimeError("no plan is applied yet")
        host = own_address_for(node_id) or _LOOPBACK
        return await self._loop.run(self._work.listen(host, encrypted=self._encrypts))

    async def status(self) -> OfflineStatus:
        """Return what the store holds."""
        return OfflineStatus() if self._work is None else await self._loop.run(self._work.status())

    async def __del__(self) -> None:
        """End; Serve calls this when it stops the process."""
        if self._work is not None:
            await self._loop.run(self._work.close())
        await self._loop.close()


def build(args: dict[str, Any]) -> Any:
    """Return the store's Serve application; named as `import_path` in the generated Serve config."""
    from ray import serve

    del args
    return serve.deployment(name="offline")(OfflineReplica).bind()
