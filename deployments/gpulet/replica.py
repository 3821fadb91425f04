"""A gpu-let: one Serve replica, one process, one share of one GPU, one or more resident programs.

Serve talks to this class. Batches come over the gpu-let's own sockets (`tenuto.deployments.gpulet.channel`), run on its
worker thread (`tenuto.deployments.gpulet.worker`), and never touch the event loop. The replica reports ready only once
all its models are warmed up (`tenuto.deployments.gpulet.resident_programs`).
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tenuto.deployments.gpulet.channel import Channel
from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.gpulet.executors.choose import has_nvidia_devices, make_executor
from tenuto.deployments.gpulet.executors.streamed import make_streaming
from tenuto.deployments.gpulet.mps_sharing import SharedGpu, bound, join_shared_gpu, turn_of
from tenuto.deployments.gpulet.resident_programs import ResidentPrograms
from tenuto.deployments.gpulet.worker import WorkerThread
from tenuto.deployments.process.limits import GENERATIONS_END_S
from tenuto.deployments.process.niceness import run_at_normal_priority
from tenuto.deployments.process.own_loop import spare_the_collector
from tenuto.deployments.process.ray_address import own_address_for
from tenuto.deployments.process.ray_nodes import draining_nodes
from tenuto.deployments.serve.user_config import HANGS_TIMES, GpuletConfig, GpuletSpec, read_gpulet_config
from tenuto.deployments.wire.arena import machine_id
from tenuto.deployments.wire.messages import GpuletCloses, GpuletState
from tenuto.deployments.wire.peer import Endpoint
from tenuto.documents import parse_document
from tenuto.errors import EnvironmentFaultError

_LOOK_S = 1.0  # pace: time between two looks for a batch that hangs; `hangs_s` allows for it
_ANSWER_S = 2.0  # limit: for Ray's answer while this process ends, for which Serve gives it ten seconds
_LAST_BATCHES_S = 1.0  # limit: for the last batches and their answers before the node ends
_LAST_WORDS_S = 0.2  # pace: time between the notice that the device is lost and the end of the process


class LocalReplica:
    """Serves the models of one gpu-let in any process with an event loop. `reconfigure` changes models and batch sizes
    without a restart."""

    _has_started = False

    @classmethod
    async def start(cls, spec: GpuletSpec | None, config: GpuletConfig) -> LocalReplica:
        """Construct and configure a replica, as Serve does."""
        assert spec is not None
        replica = cls.__new__(cls)
        await replica.__init__(spec.model_dump(mode="json"))  # type: ignore[misc]
        try:
            await replica.reconfigure(config.to_data())
        except BaseException:
            await replica.close()
            raise
        return replica

    async def __init__(self, spec: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """Choose the executor and start listening.

        Args:
            spec: the settings that only a restart can change; see `GpuletSpec`.

        Raises:
            InvalidInputError: unknown keys or unusable values.
            EnvironmentFaultError: the machine cannot give what the plan asks for.
        """
        self._spec = parse_document(GpuletSpec, dict(spec), origin="args.spec")
        self._id = self._spec.gpulet
        self._loop = asyncio.get_running_loop()
        run_at_normal_priority()
        # Before the executor: CUDA looks for its daemon once, when it starts.
        self._shared = await self._loop.run_in_executor(None, self._share_gpu)
        self._is_proved = False
        try:
            self.executor: Executor = make_executor(self._spec)
            streaming = make_streaming(self.executor) if self._spec.streaming else None
        except BaseException:
            if self._shared is not None:
                self._shared.leave()  # so that the next gpu-let of this GPU need not wait until this process ends
            raise
        self._programs = ResidentPrograms(self._id, self.executor, streaming)
        self._failure: str | None = None  # why the GPU's CUDA MPS failed
        self._token = secrets.token_hex(16)
        self._worker = WorkerThread(self._id, self.executor, streaming, self._programs, self._on_fault)
        self._channel = Channel(self._id, self._token, self._worker.put, self._worker.watch)
        self._channel.announce(self._state())
        self._near = self._channel.listen()
        self._encrypts = False
        self._hangs_s = math.inf
        self._look = self._loop.call_later(_LOOK_S, self._look_for_a_hang)
        self._has_started = True

    def _share_gpu(self) -> SharedGpu | None:
        has_driver = has_nvidia_devices()
        self._spec = bound(self._spec, has_driver=has_driver)
        return join_shared_gpu(self._spec, has_driver=has_driver)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Load, unload and warm up until the resident programs are those of `user_config`; unchanged ones are not
        touched.

        Raises:
            InvalidInputError: unknown keys or unusable values; nothing was changed.
        """
        config = read_gpulet_config(user_config, self._id)
        programs, self._encrypts, self._hangs_s = config.programs, config.encrypt, config.hangs_s
        # The first load holds its turn since `join`. A later load waits for its turn while batches run.
        async with turn_of(self._shared if self._is_proved and self._programs.loads(programs) else None):
            await self._programs.bring(programs, self._worker.perform, self._announce)
        if self._shared is not None and not self._is_proved:
            await self._worker.perform(self._shared.prove)  # on the thread that has the CUDA context
            self._is_proved = True
        self._announce()

    async def check_health(self) -> None:
        """Raise when this process can no longer run batches; Serve then replaces it."""
        if self._shared is not None and self._is_proved:
            try:  # also when this process has failed already, as it may be the only one that sees a fault of the GPU
                await self._loop.run_in_executor(None, self._shared.check)
            except EnvironmentFaultError as error:
                # The failure is kept: a client of a faulted server has to end, even when the server recovers.
                self._failure = self._failure or str(error)
        failure = self._worker.fault or self._failure
        if failure is not None:
            raise EnvironmentFaultError(failure)
        if not self._worker.is_alive:
            raise EnvironmentFaultError(f"the worker thread of gpu-let {self._id} has ended")

    async def endpoint(self, node_id: str = "") -> Endpoint:
        """Return where this gpu-let listens for a node. For another node it is an address of the cluster's network."""
        host = own_address_for(node_id)
        return self._channel.listen(host, encrypted=self._encrypts) if host else self._near

    def _announce(self) -> None:
        spare_the_collector()
        self._channel.announce(self._state())

    def _state(self) -> GpuletState:
        """Return the present state of this gpu-let."""
        return GpuletState(
            gpulet=self._id,
            gpu=self._spec.gpu.id,
            pid=os.getpid(),
            machine=machine_id(),
            device=self.executor.device,
            emulated=self._programs.is_emulated,
            share_pct=self._spec.share_pct,
            memory_mib=self.executor.memory_mib(),
            memory_cap_mib=self._spec.memory_mib if self.executor.device.startswith("cuda") else None,
            sm_count=self.executor.sm_count(),
            mode=self._programs.mode(is_shared=self._shared is not None),
            cuda_mps=None if self._shared is None else self._shared.status(),
            programs=self._programs.largest_batches(),
            merged=self.executor.facts(),
            signatures=self._programs.signatures(),
            node_id=_node_id(),
        )

    def _look_for_a_hang(self) -> None:
        """End this process when a batch never comes back; once a second."""
        self._look = self._loop.call_later(_LOOK_S, self._look_for_a_hang)
        longest = self._worker.longest()
        if longest is None or self._worker.fault is not None:
            return
        since_s, program = longest
        limit_s = max(self._hangs_s, HANGS_TIMES * self._programs.planned_s(program))
        if time.monotonic() - since_s > limit_s:
            self._worker.fault = f"a batch of '{program}' has not come back for {limit_s:.0f} s: it hangs"
            self._on_fault(self._worker.fault)

    def _on_fault(self, reason: str) -> None:
        """Tell the dispatchers that no batch can run here any more, and end the process. Serve then replaces it. The
        worker calls this."""
        self._channel.tell(GpuletCloses(reason))
        self._loop.call_soon_threadsafe(self._loop.call_later, _LAST_WORDS_S, self._leave)

    def _leave(self) -> None:
        if self._shared is not None:
            self._shared.leave()
        self.end_process(1)

    # Only a new process helps when a CUDA context is lost, and an orderly end of this one might hang.
    end_process: Callable[[int], None] = staticmethod(os._exit)

    async def outlast_notice(self) -> None:
        """Serve on while dispatchers use this gpu-let and its node has notice of its end: Serve ends processes there as
        early as the slowest of them may need, and nobody else may serve these models yet."""
        batches_s = max(map(self._programs.planned_s, self._programs.largest_batches()), default=0.0)
        try:
            ends_s = await asyncio.wait_for(self._loop.run_in_executor(None, node_ends_s), _ANSWER_S)
        except Exception:  # Ray has several kinds of errors, and may hang; the device has to be left in time
            return
        until_s = ends_s - batches_s - _LAST_BATCHES_S
        while self._channel.is_used and (left_s := until_s - time.time()) > 0.0:
            await asyncio.sleep(min(left_s, _LOOK_S))

    async def close(self) -> None:
        """Finish the batches that run, then release the device."""
        if not self._has_started:
            return
        await self._programs.close()
        self._channel.tell(GpuletCloses("it is shutting down"))
        # Limit: within what Serve gives a process to end.
        # A server that ends lets its gateways say so to their clients first.
        await self._worker.stop(10.0 if self._shared is None else 6.0, GENERATIONS_END_S + 1.0)
        self._look.cancel()
        if self._shared is not None and self._worker.is_alive:
            # Serve will soon kill this process, and a client that is killed at work harms its neighbours.
            await asyncio.get_running_loop().run_in_executor(None, self._shared.terminate)
        self._channel.close()
        self.executor.close()
        if self._shared is not None:
            self._shared.leave()


class GpuletReplica(LocalReplica):
    """A replica that Serve creates and ends."""

    async def __del__(self) -> None:
        """Close the replica. Serve calls this when requests have drained, and also when `__init__` failed."""
        if self._has_started:
            await self.outlast_notice()
        await self.close()


def _node_id() -> str:
    """Return Ray's id of this node; "" when Ray did not start this process."""
    if "ray" not in sys.modules:
        return ""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def node_ends_s() -> float:
    """Return when this node ends, in seconds since the epoch; 0 when Ray knows of no end."""
    return draining_nodes().get(_node_id(), 0.0)


def build(args: dict[str, Any]) -> Any:
    """Return the Serve application of one gpu-let; named as `import_path` in the generated Serve config."""
    from ray import serve

    spec = parse_document(GpuletSpec, args.get("spec"), origin="args.spec")
    return serve.deployment(name="gpulet")(GpuletReplica).bind(spec.model_dump())
