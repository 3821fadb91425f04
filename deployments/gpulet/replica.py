"""A gpu-let: one Serve replica, one process, one share of one GPU, one or more resident models.

This is what Serve and the gateways talk to. Batches arrive over its own socket (see
`tenuto.deployments.wire.transport`), run on its worker thread (`tenuto.deployments.gpulet.worker`), and never touch
the event loop. The replica reports ready only once all its models are warmed up
(`tenuto.deployments.gpulet.resident_programs`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.gpulet.executors.choose import has_nvidia_devices, make_executor
from tenuto.deployments.gpulet.executors.streamed import make_streaming
from tenuto.deployments.gpulet.mps_sharing import SharedGpu, join_shared_gpu, turn_of
from tenuto.deployments.gpulet.resident_programs import ResidentPrograms
from tenuto.deployments.gpulet.worker import ArrivedBatch, WorkerThread
from tenuto.deployments.serve.user_config import GpuletConfig
from tenuto.deployments.wire.transport import FrameProtocol, listen
from tenuto.documents import parse_document
from tenuto.errors import EnvironmentFaultError

__all__ = ["GpuletReplica", "build"]


class GpuletReplica:
    """Serves the models of one gpu-let. Created by Serve; `reconfigure` changes models and batch sizes in place."""

    async def __init__(self, spec: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """Choose the executor and start listening.

        Args:
            spec: what only a restart can change: `gpulet`, `gpu` (id, type, uuid), `share_pct`, `memory_mib`,
                `executor`, `mps`, `cuda_mps`, `streaming`.

        Raises:
            EnvironmentFaultError: the machine cannot give what the plan asks for.
        """
        self._spec = dict(spec)
        self._id = str(spec["gpulet"])
        self._loop = asyncio.get_running_loop()
        # Before the executor: CUDA looks for its daemon once, when it starts.
        self._shared = await self._loop.run_in_executor(None, self._share_gpu)
        self._is_proved = False
        try:
            self._executor: Executor = make_executor(spec)
            streaming = make_streaming(self._executor) if spec.get("streaming") else None
        except BaseException:
            if self._shared is not None:
                self._shared.leave()  # the next gpu-let of this GPU need not wait for the end of this process
            raise
        self._programs = ResidentPrograms(self._id, self._executor, streaming)
        self._failure: str | None = None  # of the GPU's CUDA MPS
        self._protocols: set[FrameProtocol] = set()
        self._running: dict[tuple[int, int], ArrivedBatch] = {}
        self._token = secrets.token_hex(16)
        # Loopback TCP also on the gateway's own node: for 9.6 MB of images it was five times faster than a Unix socket,
        # whose buffers are small (tests/benchmarks/bench_transport.py).
        local = await listen(("127.0.0.1", 0), self._token, self._on_frame, self._on_lost, self._on_connect)
        self._servers: list[asyncio.Server] = [local]
        self._address = ("127.0.0.1", int(local.sockets[0].getsockname()[1]))
        self._tcp: tuple[str, int] | None = None
        self._worker = WorkerThread(self._id, self._executor, streaming, self._programs, self._answer)

    def _share_gpu(self) -> SharedGpu | None:
        return join_shared_gpu(self._spec, has_driver=has_nvidia_devices())

    # --- Serve's side -------------------------------------------------------------------------------------------

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Load, unload and warm up until the resident programs are those of `user_config`; unchanged ones are not
        touched.

        Raises:
            InvalidInputError: unknown keys or unusable values; nothing was changed.
        """
        wanted = parse_document(GpuletConfig, user_config, origin=f"user_config of gpu-let {self._id}").programs
        # The first load has its turn from joining on. Batches run while a later one waits.
        async with turn_of(self._shared if self._is_proved and self._programs.loads(wanted) else None):
            await self._programs.bring(wanted, self._worker.perform)
        if self._shared is not None and not self._is_proved:
            await self._worker.perform(self._shared.prove)  # on the thread that has the CUDA context
            self._is_proved = True
        for protocol in self._protocols:
            protocol.send({"description": self._description()})

    async def check_health(self) -> None:
        """Raise when this process can no longer run batches; Serve then replaces it."""
        if self._shared is not None and self._is_proved:
            try:  # also when this process is lost already: it may be the only one that sees the fault
                await self._loop.run_in_executor(None, self._shared.check)
            except EnvironmentFaultError as error:
                # A client of a faulted server has to go, even when the server recovers.
                self._failure = self._failure or str(error)
        failure = self._worker.fault or self._failure
        if failure is not None:
            raise EnvironmentFaultError(failure)
        if not self._worker.is_alive:
            raise EnvironmentFaultError(f"the worker thread of gpu-let {self._id} has ended")

    async def describe(self, node_id: str = "") -> dict[str, Any]:
        """Return how to reach this gpu-let from a node, and what it really got.

        A caller on another node gets a TCP address on this node's cluster interface, guarded by the same token.
        """
        import ray

        context = ray.get_runtime_context()
        address: Any = list(self._address)
        if node_id and node_id != context.get_node_id():
            if self._tcp is None:
                host = ray.util.get_node_ip_address()
                server = await listen((host, 0), self._token, self._on_frame, self._on_lost, self._on_connect)
                self._servers.append(server)
                self._tcp = (host, server.sockets[0].getsockname()[1])
            address = list(self._tcp)
        return {"address": address, "token": self._token, "node_id": context.get_node_id(), **self._description()}

    def _description(self) -> dict[str, Any]:
        """Return what this gpu-let is and holds now; sent again to every gateway when the models change."""
        return {
            "gpulet": self._id,
            "gpu": self._spec["gpu"]["id"],
            "pid": os.getpid(),
            "device": self._executor.device,
            "emulated": self._programs.is_emulated,
            "share_pct": self._spec.get("share_pct"),
            "memory_mib": self._executor.memory_mib(),
            "memory_cap_mib": self._spec.get("memory_mib") if self._executor.device.startswith("cuda") else None,
            "sm_count": self._executor.sm_count(),
            "mode": self._programs.mode(is_shared=self._shared is not None),
            "cuda_mps": None if self._shared is None else self._shared.status(),
            **self._programs.to_data(),
        }

    async def statistics(self) -> dict[str, Any]:
        """Return batches run and seconds spent running them since the start."""
        return {"gpulet": self._id, **self._worker.totals(), "pid": os.getpid()}

    async def records(self) -> list[dict[str, Any]]:
        """Return the last batches, oldest first: requests by their clients' ids, start and end on this node's monotonic
        clock in s."""
        return self._worker.records()

    async def __del__(self) -> None:
        """Finish what runs, then release the device; Serve calls this once requests have drained."""
        await self._worker.stop(10.0 if self._shared is None else 6.0)
        if self._shared is not None and self._worker.is_alive:
            # Serve kills this process in a moment, and a client killed at work harms its neighbours.
            await asyncio.get_running_loop().run_in_executor(None, self._shared.terminate)
        for server in self._servers:
            server.close()
        self._executor.close()
        if self._shared is not None:
            self._shared.leave()

    # --- the socket's side (event loop) -------------------------------------------------------------------------

    def _on_connect(self, protocol: FrameProtocol) -> None:
        """Bring a new gateway up to date: the models may have changed since it asked where to connect."""
        self._protocols.add(protocol)
        protocol.send({"description": self._description()})

    def _on_frame(self, protocol: FrameProtocol, header: dict[str, Any], body: memoryview) -> None:
        received_at = time.perf_counter()
        if "abort" in header:
            running = self._running.get((id(protocol), header["abort"]))
            if running is not None:
                running.aborted = True
            return
        batch = ArrivedBatch(protocol, header, body, received_at)
        self._running[(id(protocol), header["id"])] = batch
        self._worker.put(batch)

    def _on_lost(self, protocol: FrameProtocol, _error: BaseException | None) -> None:
        """The gateway is gone: nobody waits for its batches, so those not begun are not run."""
        self._protocols.discard(protocol)
        for (owner, _), batch in self._running.items():
            if owner == id(protocol):
                batch.aborted = True

    def _answer(self, batch: ArrivedBatch, header: dict[str, Any], buffers: Sequence[memoryview]) -> None:
        self._running.pop((id(batch.protocol), batch.header["id"]), None)
        batch.protocol.send({"id": batch.header["id"], "gpulet": self._id, **header}, buffers)


def build(args: dict[str, Any]) -> Any:
    """Return the Serve application of one gpu-let; named as `import_path` in the generated Serve config."""
    from ray import serve

    return serve.deployment(name="gpulet")(GpuletReplica).bind(args["spec"])
