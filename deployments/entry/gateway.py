"""The gateway: the Serve deployment that takes requests, with the dispatcher in the same process, or fed in bundles
where several gateways share it.

Serve deploys, configures, health-checks and restarts it. Requests come to a socket of its own, on an event loop of its
own (`tenuto.deployments.process.own_loop`). Serve's proxies lead nowhere. Its graceful shutdown (drain) is
`Entry.close`; `tenuto serve` begins it on SIGTERM (`tenuto.deployments.process.foreground`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.dispatcher_process import BundleServer
from tenuto.deployments.entry.http.body_memory import REACH
from tenuto.deployments.entry.http.file_descriptors import use_all_descriptors
from tenuto.deployments.entry.http.http1 import HttpConnection
from tenuto.deployments.entry.http.open_connections import Limits
from tenuto.deployments.entry.http.relay import StoreFinder
from tenuto.deployments.entry.http.server import HttpServer, Speaks
from tenuto.deployments.entry.service.controller_cache import AskController, nothing
from tenuto.deployments.entry.service.dispatcher_client import DispatcherClient
from tenuto.deployments.entry.service.dispatching import Dispatching
from tenuto.deployments.entry.service.gateway_metrics import GatewayMetrics
from tenuto.deployments.entry.service.inference import InferenceService
from tenuto.deployments.entry.service.management import ManagementService
from tenuto.deployments.entry.service.management_routes import make_app
from tenuto.deployments.entry.service.traces import Traces
from tenuto.deployments.operator.app import make_operator_app
from tenuto.deployments.process.limits import GENERATIONS_END_S, REQUESTS_END_S
from tenuto.deployments.process.niceness import run_at_normal_priority
from tenuto.deployments.process.own_loop import OwnLoop, elsewhere, spare_the_collector
from tenuto.deployments.process.ray_address import own_address_for
from tenuto.deployments.security.certificate import Certificate
from tenuto.deployments.serve.discovery import beside_gateways, find_dispatcher, find_gpulet, find_store
from tenuto.deployments.serve.user_config import GatewayConfig, Listen, TracesConfig, read_gateway_config
from tenuto.deployments.wire.arena import Arena
from tenuto.deployments.wire.peer import Endpoint, Finder
from tenuto.deployments.wire.status import DispatchingStatus, Served
from tenuto.errors import EnvironmentFaultError, InvalidInputError

logger = logging.getLogger("ray.serve")

_MOST_OPERATORS = 64  # limit: connections
_RENEWED_S = 60  # pace: between two looks whether files of certificates have changed
_TAKEN_S = 10.0  # limit: for a port that another gateway still has


class Entry:
    """The part of a gateway that runs on its own loop: sockets, service, dispatcher. Tests use it without Ray."""

    def __init__(
        self,
        find_gpulet: Any = find_gpulet,
        find_dispatcher: Any = find_dispatcher,
        ask_beside: AskController = nothing,
        find_store: Finder | None = None,
        *,
        unfinished_mib: int = 512,  # default
        taken_s: float = _TAKEN_S,
    ) -> None:
        """Prepare without a plan; must be called on the loop.

        Args:
            find_gpulet: returns the function that finds a gpu-let, by its id.
            find_dispatcher: likewise for the dispatcher of a sub-cluster.
            ask_beside: returns what Serve runs beside the gateways.
            find_store: finds the store of batches; None: there is none, whatever the settings say.
            unfinished_mib: most memory for the bodies of requests that are not answered.
            taken_s: how long it waits for a port that another gateway still has.
        """
        self._taken_s = taken_s
        self._find_gpulet = find_gpulet
        self._find_dispatcher = find_dispatcher
        self._store = None if find_store is None else StoreFinder(find_store)
        self._dispatching: Dispatching | None = None  # the client, or the dispatcher in this process
        self.bundles: BundleServer | None = None  # for Python handles, where this gateway schedules by itself
        self._config: GatewayConfig | None = None
        self._arena = Arena(unfinished_mib << 20, reach=REACH)
        self.service = InferenceService(lambda exchange, caller: self._management.answer(exchange, caller))
        self.service.arena = self._arena
        self.server = HttpServer(self.service, self._arena, Limits(unfinished_bytes=unfinished_mib << 20))
        self.metrics = GatewayMetrics(self.service, self.server, ask_beside)
        few = Limits(body_bytes=1 << 16, connections=_MOST_OPERATORS)
        operator_app = make_operator_app(self.metrics, self._operators_are_local)
        budget = self.server.budget
        self._management = ManagementService(budget, make_app(self.service))
        self._operators = HttpServer(ManagementService(budget, operator_app), self._arena, few)
        self._grpc: Speaks | None = None  # what serves a client of gRPC, once there was a port for it
        self._tasks: set[asyncio.Task[None]] = set()
        self._look: asyncio.Handle | None = None
        self._ticks = 0
        self._ticker = asyncio.get_running_loop().call_later(0.0, self._tick)

    # --- the plan -----------------------------------------------------------------------------------------------

    async def follow(self, config: GatewayConfig) -> None:
        """Follow a new plan and new settings without a restart; opens the socket with the first.

        Raises:
            EnvironmentFaultError: somebody else has the port.
        """
        service = self.service
        service.margin.configure(config.attainment, config.response_ms)
        service.max_body_bytes = self.server.limits.body_bytes = config.max_body_mib << 20
        self.server.limit_connections(config.max_connections)
        service.callers.follow(config.keys)
        self.server.places.has_keys = bool(config.keys)
        service.host_names = None if config.is_shared_with_clients else frozenset(map(str.lower, config.host_names))
        if self._config is None or config.traces != self._config.traces:
            self._trace(config.traces)
        before, self._config = self._config, config
        if self._store is not None and (before is None or before.encrypt != config.encrypt):
            self._store.forget()
        self.server.store = None if config.offline is None else self._store
        is_shared = config.is_shared_with_clients
        self._management.app = make_app(service, None if is_shared else self.metrics)
        old = self._dispatching
        if config.sub_clusters:
            client = (
                old
                if isinstance(old, DispatcherClient)
                else DispatcherClient(self._find_dispatcher, on_change=self._changed)
            )
            self._dispatching, self.bundles = client, None
            await client.apply(config.plan, config.sub_clusters, dispatchers=config.dispatchers)
        else:
            if self.bundles is None:
                dispatcher = Dispatcher(config.build_scheduler, self._find_gpulet, on_change=self._changed)
                self._dispatching, self.bundles = dispatcher, BundleServer(dispatcher)
            self.bundles.dispatcher.configure(config.build_scheduler, max_queued=config.max_queued)
            self.bundles.dispatcher.apply(config.plan, config.standby)
        self._look_again()
        if old is not None and old is not self._dispatching:
            await old.close()
        shared = bool(config.sub_clusters)
        await self._listen(self.server, config.listen, HttpConnection, is_shared=shared)
        await self._listen(self._operators, config.operators, HttpConnection, is_shared=shared)
        try:
            await self._listen_for_grpc(config.grpc, is_shared=shared)
        except EnvironmentFaultError as error:
            if old is None:
                raise
            logger.error("HTTP is served without gRPC: %s", error)

    async def _listen_for_grpc(self, setting: Listen | None, *, is_shared: bool) -> None:
        if setting is not None and self._grpc is None:
            try:
                from tenuto.deployments.entry.protocols.grpc_calls import GrpcServer
            except ImportError as error:
                raise EnvironmentFaultError(f"gRPC needs {error.name}: pip install 'tenuto[grpc]'") from error
            self._grpc = GrpcServer(self.service, self.service.models.takes_bytes).connection
        if self._grpc is not None:
            await self._listen(self.server, setting, self._grpc, is_shared=is_shared)

    def _operators_are_local(self) -> bool:
        return self._config is None or self._config.operators is None or self._config.operators.is_loopback

    def _trace(self, setting: TracesConfig | None) -> None:
        if self.service.traces is not None:  # on a thread, as it waits for the collector
            self._keep(asyncio.create_task(asyncio.to_thread(self.service.traces.close), name="end the traces"))
        self.service.traces = None if setting is None else Traces.otlp(setting.endpoint, setting.ratio)

    def _changed(self) -> None:
        """The plan has changed, or a gpu-let, or what a gpu-let holds. All changes of a turn of the loop are handled at
        once."""
        if self._look is None:
            self._look = asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        self._look = None
        if self._dispatching is not None:
            self.service.follow(self._dispatching)
        if self.bundles is not None:
            self.bundles.announce()

    async def _listen(self, server: HttpServer, setting: Listen | None, speaks: Speaks, *, is_shared: bool) -> None:
        for host, port in server.addresses(speaks):
            if setting is None or (host, port) != (setting.host, setting.port):
                server.stop_listening(host, port)
        if setting is None:
            return
        is_grpc, tls = speaks == self._grpc, None
        if setting.tls_cert and setting.tls_key:
            try:
                tls = Certificate(setting.tls_cert, setting.tls_key, ["h2" if is_grpc else "http/1.1"])
            except InvalidInputError as error:
                tls = server.certificate_at(setting.host, setting.port)
                if tls is None:
                    raise
                logger.error("the certificate before stays: %s", error)
        await self._when_free(
            setting,
            "--grpc-port" if is_grpc else "--port",
            lambda: server.listen(setting.host, setting.port, speaks, is_shared=is_shared, tls=tls),
        )

    async def _when_free(self, setting: Listen, option: str, listen: Callable[[], Awaitable[None]]) -> None:
        """Listen as soon as a gateway that is about to end has left the port.

        Raises:
            EnvironmentFaultError: another process keeps the port.
        """
        until = time.monotonic() + self._taken_s
        while True:
            try:
                await listen()
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise EnvironmentFaultError(
                        f"{setting.host}:{setting.port} cannot be listened on ({error.strerror}). Choose another port "
                        f"with {option}, or move Serve's own HTTP port away."
                    ) from error
                await asyncio.sleep(0.5)

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(1.0, self._tick)
        if self._config is not None:  # gpu-lets come and go, and need descriptors, too
            self.server.limit_connections(self._config.max_connections)
        self._keep(asyncio.create_task(self.metrics.meet(), name="meet the other gateways"))
        self._ticks += 1
        if self._ticks % _RENEWED_S == 0:  # on a thread, as a disk of another machine may hang
            self._keep(asyncio.create_task(asyncio.to_thread(self.server.renew_certificates), name="renew"))

    # --- what it tells, and its end -----------------------------------------------------------------------------

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def served(self) -> Served | None:
        """Return what `TenutoHandle` has to know; None before the first plan."""
        config = self._config
        if config is None:
            return None
        return Served(
            plan=config.plan.to_data(), sub_clusters=dict(config.sub_clusters), dispatchers=config.dispatchers
        )

    async def status(self) -> DispatchingStatus:
        """Return what the dispatchers report; nothing before the first plan."""
        return DispatchingStatus() if self._dispatching is None else await self._dispatching.status()

    async def endpoint(self, host: str) -> Endpoint:
        """Return where Python handles reach this gateway's own dispatcher."""
        if self.bundles is None or self._config is None:
            raise RuntimeError("this gateway has no dispatcher of its own; connect again")
        return await self.bundles.listen(host, encrypted=self._config.encrypt)

    async def close(self) -> None:
        """Answer the requests under way, fail those that wait, and disconnect."""
        self._ticker.cancel()
        self.metrics.close()
        await self._operators.drain(0.0)
        is_generating = self._dispatching is not None and self._dispatching.is_generating
        until_s = time.monotonic() + (GENERATIONS_END_S if is_generating else REQUESTS_END_S)
        await self.server.drain(until_s - time.monotonic())
        if self.bundles is not None:
            await self.bundles.close(until_s - time.monotonic())
        elif self._dispatching is not None:
            await self._dispatching.close()
        await asyncio.sleep(0)  # the last answers leave
        self.server.close()
        self._operators.close()
        if self.service.traces is not None:
            await asyncio.to_thread(self.service.traces.close)
        self.service.close()
        self._arena.close()


class Gateway:
    """The Serve deployment. `reconfigure` gives it a plan; without one every model is unknown and nothing is ready."""

    def __init__(self) -> None:
        run_at_normal_priority()
        use_all_descriptors()
        spare_the_collector()  # while nobody asks yet
        self._loop = OwnLoop("gateway")
        self._entry: Entry | None = None

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Follow a new plan without a restart.

        Raises:
            InvalidInputError: unknown keys or unusable values; nothing was changed.
            EnvironmentFaultError: somebody else has the port.
        """
        config = read_gateway_config(user_config)
        await self._loop.run(self._follow(config, asyncio.get_running_loop()))
        spare_the_collector()

    async def _follow(self, config: GatewayConfig, rays: asyncio.AbstractEventLoop) -> None:
        if self._entry is None:

            def gpulet(gpulet_id: str) -> Finder:
                return elsewhere(find_gpulet(gpulet_id), rays)

            def dispatcher(sub_cluster: str) -> Finder:
                return elsewhere(find_dispatcher(sub_cluster), rays)

            beside, store = elsewhere(beside_gateways, rays), elsewhere(find_store(), rays)
            self._entry = Entry(gpulet, dispatcher, beside, store, unfinished_mib=config.max_unfinished_mib)
        await self._entry.follow(config)

    async def check_health(self) -> None:
        """Raise if requests cannot be answered here any more; Serve then replaces this process."""
        await self._loop.answers("the gateway")

    async def entry(self) -> Served | None:
        """Return what `TenutoHandle` has to know; None before the first plan."""
        return None if self._entry is None else self._entry.served()

    async def status(self) -> DispatchingStatus:
        """Return what the dispatchers report; nothing before the first plan."""
        return DispatchingStatus() if self._entry is None else await self._loop.run(self._entry.status())

    async def endpoint(self, node_id: str = "") -> Endpoint:
        """Return where a Python handle on a node reaches this gateway's own dispatcher."""
        if self._entry is None:
            raise RuntimeError("no plan is applied yet")
        return await self._loop.run(self._entry.endpoint(own_address_for(node_id)))

    async def __del__(self) -> None:
        """Answer the requests that wait, and disconnect; Serve calls this after draining."""
        if self._entry is not None:
            await self._loop.run(self._entry.close())
        await self._loop.close()


def build(args: dict[str, Any]) -> Any:
    """Return the entry's Serve application; named as `import_path` in the generated Serve config."""
    from ray import serve

    del args
    return serve.deployment(name="gateway")(Gateway).bind()
