"""The dispatcher of a sub-cluster in a process of its own, fed in bundles by several gateways.

Its gateways' connections are to it what HTTP connections are to a gateway: one that closes cancels what it asked for.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

from tenuto.deployments.dispatch.correction import NetworkMeter
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.serve.finders import find_gpulet
from tenuto.deployments.serve.settings import ServingSettings
from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.bundles import AnswerRow, Bundler, RequestRow, pack_answers, unpack_requests
from tenuto.deployments.wire.link import Finder
from tenuto.deployments.wire.transport import FrameProtocol, listen
from tenuto.outcome import Outcome

__all__ = ["BundleServer", "DispatcherReplica", "build"]

logger = logging.getLogger("ray.serve")

_DRAIN_S = 8.0


class _Gateway:
    """One connection: what it asked for and was not answered, and what waits to be sent to it."""

    def __init__(self, protocol: FrameProtocol) -> None:
        self.protocol = protocol
        self.asked: dict[int, asyncio.Future[Answer]] = {}
        self.outbox: Bundler[AnswerRow] = Bundler(self._send)

    def _send(self, rows: list[AnswerRow]) -> None:
        self.protocol.send(*pack_answers(rows))

    def close(self) -> None:
        self.outbox.drop()
        for future in list(self.asked.values()):
            future.cancel()
        self.asked.clear()


class BundleServer:
    """Serves one dispatcher to gateways over sockets. `dispatcher` is set before `start`."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.token = secrets.token_hex(16)
        self._gateways: dict[int, _Gateway] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_announced = False
        self._addresses: dict[str, tuple[str, int]] = {}

    async def describe(self, node_id: str) -> dict[str, Any]:
        """Return how to reach this dispatcher from a node, and its state; another node gets a cluster address."""
        import ray

        is_near = not node_id or node_id == ray.get_runtime_context().get_node_id()
        host = "127.0.0.1" if is_near else ray.util.get_node_ip_address()
        if host not in self._addresses:
            self._addresses[host] = await self.start(host)
        return {"address": list(self._addresses[host]), "token": self.token, **self.state()}

    async def start(self, host: str = "127.0.0.1") -> tuple[str, int]:
        """Listen on a free port of an address, and return both."""
        server = await listen((host, 0), self.token, self._on_frame, self._on_lost, self._on_connect)
        self._servers.append(server)
        return host, int(server.sockets[0].getsockname()[1])

    def _on_connect(self, protocol: FrameProtocol) -> None:
        self._gateways[id(protocol)] = _Gateway(protocol)
        protocol.send({"description": self.state()})

    def _on_lost(self, protocol: FrameProtocol, _error: BaseException | None) -> None:
        """The gateway is gone, and its clients with it: their places are freed."""
        gateway = self._gateways.pop(id(protocol), None)
        if gateway is not None:
            if gateway.asked:
                logger.warning("a gateway is gone with %d requests under way; they are cancelled", len(gateway.asked))
            gateway.close()

    def _on_frame(self, protocol: FrameProtocol, header: dict[str, Any], body: memoryview) -> None:
        gateway = self._gateways[id(protocol)]
        if "report" in header:
            task = asyncio.create_task(self._report(protocol, header), name="report")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        received_at = time.monotonic()
        reserve_ms = float(header["reserve_ms"])
        for row in unpack_requests(header, body):
            if row.parts is not None:
                self._submit(gateway, row, reserve_ms, received_at)
            elif (future := gateway.asked.pop(row.number, None)) is not None:
                future.cancel()

    def _submit(self, gateway: _Gateway, row: RequestRow, reserve_ms: float, received_at: float) -> None:
        assert row.parts is not None
        try:
            future = self.dispatcher.submit(row.model, row.parts, row.allowed_ms, row.client_id, reserve_ms)
        except KeyError:
            reason = f"'{row.model}' was removed from the plan"
            gateway.outbox.add(AnswerRow(row.number, 0.0, Answer(Outcome.FAILED, reason=reason)))
            return
        gateway.asked[row.number] = future
        future.add_done_callback(functools.partial(self._answer, gateway, row.number, received_at))

    def _answer(self, gateway: _Gateway, number: int, received_at: float, future: asyncio.Future[Answer]) -> None:
        if future.cancelled() or gateway.asked.pop(number, None) is None:
            return
        answer = future.result()
        size = sum(tensor.data.nbytes for tensor in answer.outputs)
        gateway.outbox.add(AnswerRow(number, (time.monotonic() - received_at) * 1000.0, answer), size)

    async def _report(self, protocol: FrameProtocol, header: Mapping[str, Any]) -> None:
        data = await self.dispatcher.report(header["what"], **header["arguments"])
        if header["what"] == "status":
            data.pop("plan", None)  # the gateway has the whole one
        protocol.send({"report": header["report"], "data": data})

    def state(self) -> dict[str, Any]:
        """Return what gateways answer for without asking: readiness, signatures, gpu-lets."""
        dispatcher = self.dispatcher
        names = [spec.name for spec in dispatcher.plan.models] if dispatcher.plan is not None else []
        found = ((name, dispatcher.signature(name)) for name in names)
        return {
            "pid": os.getpid(),
            "device": "dispatcher",
            "ready": dispatcher.is_ready(),
            "ready_models": [name for name in names if dispatcher.is_ready(name)],
            "signatures": {name: signature for name, signature in found if signature is not None},
            "gpulets": dispatcher.gpulets(),
        }

    def announce(self) -> None:
        """Tell every gateway the state soon, once for all changes of this turn of the loop."""
        if not self._is_announced:
            self._is_announced = True
            asyncio.get_running_loop().call_soon(self._announce_now)

    def _announce_now(self) -> None:
        self._is_announced = False
        state = self.state()
        for gateway in self._gateways.values():
            gateway.protocol.send({"description": state})

    async def close(self, drain_s: float = _DRAIN_S) -> None:
        """Take no new gateways, let what is under way end within `drain_s`, answer the rest as failed, disconnect."""
        for server in self._servers:
            server.close()
        until = time.monotonic() + drain_s
        while any(gateway.asked for gateway in self._gateways.values()) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        await self.dispatcher.close()
        await asyncio.sleep(0)  # futures call back on the loop's next turn
        for gateway in list(self._gateways.values()):
            gateway.outbox.flush()
            gateway.protocol.close()


class DispatcherReplica:
    """The Serve deployment around a `BundleServer`. `reconfigure` gives it the plan of its sub-cluster."""

    def __init__(self) -> None:
        self._server: BundleServer | None = None

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Follow a new plan without a restart."""
        settings = ServingSettings.from_user_config(user_config)
        if self._server is None:
            dispatcher = Dispatcher(
                settings.build_scheduler,
                self._finder,
                max_queued=settings.max_queued,
                network=NetworkMeter(settings.response_ms),
                on_change=self._on_change,
            )
            self._server = BundleServer(dispatcher)
        else:
            self._server.dispatcher.configure(
                settings.build_scheduler, max_queued=settings.max_queued, response_ms=settings.response_ms
            )
        self._server.dispatcher.apply(settings.plan)

    def _finder(self, gpulet_id: str) -> Finder:
        return find_gpulet(gpulet_id)

    def _on_change(self) -> None:
        if self._server is not None:
            self._server.announce()

    async def describe(self, node_id: str = "") -> dict[str, Any]:
        """Return how to reach this dispatcher from a node, and its state."""
        if self._server is None:
            raise RuntimeError("no plan is applied yet")
        return await self._server.describe(node_id)

    async def __del__(self) -> None:
        """Let what is under way end, then disconnect; Serve calls this at the end."""
        if self._server is not None:
            await self._server.close()


def build(args: dict[str, Any]) -> Any:
    """Return the Serve application of one dispatcher; named as `import_path` in the generated Serve config."""
    from ray import serve

    del args
    return serve.deployment(name="dispatcher")(DispatcherReplica).bind()
