"""A gpu-let: one Serve replica, one process, one share of one GPU, one or more resident models.

Batches arrive over its own socket (see `tenuto.deployments.transport`), run one after another on a worker thread,
and never
touch the event loop. The replica reports ready only after every planned batch size of every model was warmed up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.deployments.executors.base import Arrays, Executor
from tenuto.deployments.executors.choose import has_nvidia_devices, make_executor
from tenuto.deployments.executors.streamed import make_streaming
from tenuto.deployments.joint_batches import cut_inputs, pack_outputs
from tenuto.deployments.modes import mode_of
from tenuto.deployments.mps_sharing import SharedGpu, join_shared_gpu, turn_of
from tenuto.deployments.streamed_work import StreamedWork
from tenuto.deployments.transport import FrameProtocol, listen
from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.streamed import BatchTimes

__all__ = ["GpuletReplica", "build"]

logger = logging.getLogger("ray.serve")


_Reply = tuple[dict[str, Any], list[memoryview]]  # header and buffers


class _Work:
    """One batch between arrival and answer."""

    __slots__ = ("aborted", "body", "header", "protocol", "received_at")

    def __init__(self, protocol: FrameProtocol, header: dict[str, Any], body: memoryview, received_at: float) -> None:
        self.protocol = protocol
        self.header = header
        self.body = body
        self.received_at = received_at
        self.aborted = False


class GpuletReplica:
    """Serves the models of one gpu-let. Created by Serve; `reconfigure` changes models and batch sizes in place."""

    async def __init__(self, spec: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """Choose the executor and start listening.

        Args:
            spec: what only a restart can change: `gpulet`, `gpu` (id, type, uuid), `share_pct`, `memory_mib`,
                `executor`.

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
            self._streaming = make_streaming(self._executor) if spec.get("streaming") else None
        except BaseException:
            if self._shared is not None:
                self._shared.leave()  # the next gpu-let of this GPU need not wait for the end of this process
            raise
        self._models: dict[str, dict[str, Any]] = {}
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._protocols: set[FrameProtocol] = set()
        self._running: dict[tuple[int, int], _Work] = {}
        self._failure: str | None = None
        self._token = secrets.token_hex(16)
        # Loopback TCP also on the gateway's own node: for 9.6 MB of images it was five times faster than a Unix socket,
        # whose buffers are small (tests/benchmarks/bench_transport.py).
        local = await listen(("127.0.0.1", 0), self._token, self._on_frame, self._on_lost, self._on_connect)
        self._servers: list[asyncio.Server] = [local]
        self._address = ("127.0.0.1", int(local.sockets[0].getsockname()[1]))
        self._tcp: tuple[str, int] | None = None
        self._batches = 0
        self._recent: deque[dict[str, Any]] = deque(maxlen=1024)
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._work, name=f"gpulet {self._id}", daemon=True)
        self._thread.start()

    def _share_gpu(self) -> SharedGpu | None:
        return join_shared_gpu(self._spec, has_driver=has_nvidia_devices())

    # --- Serve's side -------------------------------------------------------------------------------------------

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Load, unload and warm up until the resident models are those of `user_config`; unchanged ones are not
        touched."""
        wanted = {entry["name"]: dict(entry) for entry in user_config["models"]}
        loads = any(self._models.get(name) != entry for name, entry in wanted.items())
        # The first load has its turn from joining on. Batches run while a later one waits.
        async with turn_of(self._shared if self._is_proved and loads else None):
            await self._bring(wanted)
        if self._shared is not None and not self._is_proved:
            await self._on_worker(self._shared.prove)  # on the thread that has the CUDA context
            self._is_proved = True
        for protocol in self._protocols:
            protocol.send({"description": self._description()})

    async def _bring(self, wanted: Mapping[str, dict[str, Any]]) -> None:
        for name in [name for name in self._models if name not in wanted]:
            await self._on_worker(lambda name=name: self._unload(name))
            del self._models[name]
        for name, entry in wanted.items():
            if self._models.get(name) == entry:
                continue
            started = time.monotonic()
            await self._on_worker(lambda entry=entry: self._load(entry))
            self._models[name] = entry
            logger.info(
                "gpu-let %s: %s is ready up to batch %d (%.1f s)",
                self._id,
                name,
                entry["batch_size"],
                time.monotonic() - started,
            )

    def _load(self, entry: Mapping[str, Any]) -> None:
        """Build or rebuild one model and warm up every batch size from 1 to the planned one; runs on the worker
        thread."""
        if entry["name"] in self._models:
            self._unload(entry["name"])
        options, largest = dict(entry.get("options", {})), int(entry["batch_size"])
        if "members" in entry:
            self._executor.load_merged(
                entry["name"],
                [{**member, "latency": entry.get("latency"), "slowdown": entry["slowdown"]}
                 for member in entry["members"]],
                range(1, largest + 1) if self._is_emulated else _warm_sizes(largest),
            )  # fmt: skip
            return
        if self._is_emulated:
            copies = {key: entry.get(key) for key in ("copy_in_ms", "copy_out_ms")}
            options = copies | options | {"latency": entry.get("latency"), "slowdown": entry.get("slowdown", 1.0)}
        self._executor.load(
            entry["name"],
            entry.get("source"),
            weights_path=entry.get("weights_path"),
            options=options,
            batch_sizes=range(1, largest + 1) if self._is_emulated else _warm_sizes(largest),
        )
        if self._streaming is not None:
            self._streaming.warm(entry["name"])

    def _unload(self, name: str) -> None:
        if self._streaming is not None:
            self._streaming.forget(name)
        self._executor.unload(name)

    @property
    def _is_emulated(self) -> bool:
        return self._executor.device.startswith("emulated")

    async def check_health(self) -> None:
        """Raise when this process can no longer run batches; Serve then replaces it."""
        if self._shared is not None and self._is_proved:
            try:  # also when this process is lost already: it may be the only one that sees the fault
                await self._loop.run_in_executor(None, self._shared.check)
            except EnvironmentFaultError as error:
                # A client of a faulted server has to go, even when the server recovers.
                self._failure = self._failure or str(error)
        if self._failure is not None:
            raise EnvironmentFaultError(self._failure)
        if not self._thread.is_alive():
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
            "emulated": self._is_emulated,
            "share_pct": self._spec.get("share_pct"),
            "memory_mib": self._executor.memory_mib(),
            "memory_cap_mib": self._spec.get("memory_mib") if self._executor.device.startswith("cuda") else None,
            "sm_count": self._executor.sm_count(),
            "mode": mode_of(
                self._models,
                is_shared=self._shared is not None,
                is_streaming=self._streaming is not None,
                is_emulated=self._is_emulated,
            ),
            "cuda_mps": None if self._shared is None else self._shared.status(),
            "models": {name: entry["batch_size"] for name, entry in self._models.items()},
            "merged": self._executor.merged(),
            "signatures": {
                member["name"]: self._executor.signature(member["name"])
                for entry in self._models.values()
                for member in entry.get("members", (entry,))
            },
        }

    async def statistics(self) -> dict[str, Any]:
        """Return batches run and seconds spent running them since the start."""
        return {"gpulet": self._id, "batches": self._batches, "busy_s": self._busy_s, "pid": os.getpid()}

    async def records(self) -> list[dict[str, Any]]:
        """Return the last batches, oldest first: requests by their clients' ids, start and end on this node's monotonic
        clock in s."""
        return list(self._recent)

    async def __del__(self) -> None:
        """Finish what runs, then release the device; Serve calls this once requests have drained."""
        self._queue.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, 10.0 if self._shared is None else 6.0)
        if self._shared is not None and self._thread.is_alive():
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
            work = self._running.get((id(protocol), header["abort"]))
            if work is not None:
                work.aborted = True
            return
        work = _Work(protocol, header, body, received_at)
        self._running[(id(protocol), header["id"])] = work
        self._queue.put(work)

    def _on_lost(self, protocol: FrameProtocol, _error: BaseException | None) -> None:
        """The gateway is gone: nobody waits for its batches, so those not begun are not run."""
        self._protocols.discard(protocol)
        for (owner, _), work in list(self._running.items()):
            if owner == id(protocol):
                work.aborted = True

    def _answer(self, work: _Work, header: dict[str, Any], buffers: Sequence[memoryview]) -> None:
        self._running.pop((id(work.protocol), work.header["id"]), None)
        work.protocol.send({"id": work.header["id"], "gpulet": self._id, **header}, buffers)

    # --- the device's side (worker thread) ----------------------------------------------------------------------

    def _on_worker(self, action: Any) -> asyncio.Future[None]:
        """Run something between two batches on the thread that owns the device."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._queue.put((action, future))
        return future

    def _work(self) -> None:
        if self._streaming is not None:
            StreamedWork[_Work](
                self._queue, self._streaming, as_batch=_streamed, take=self._take, done=self._streamed,
                failed=lambda work, error: self._send(work, self._failed(work, error)), otherwise=self._do,
                name=f"gpulet {self._id}",
            ).run()  # fmt: skip
            return
        while (item := self._queue.get()) is not None:
            self._do(item)

    def _do(self, item: Any) -> None:
        """Run one batch, or an action between two."""
        if isinstance(item, _Work):
            self._send(item, self._run(item))
            return
        action, future = item
        try:
            action()
        except BaseException as error:
            self._loop.call_soon_threadsafe(_settle, future, error)
        else:
            self._loop.call_soon_threadsafe(_settle, future, None)

    def _send(self, work: _Work, reply: _Reply) -> None:
        self._loop.call_soon_threadsafe(self._answer, work, *reply)

    def _refusal(self, work: _Work) -> _Reply | None:
        """Return the answer to a batch that is not to be run."""
        name = work.header["model"]
        if work.aborted:
            return {"error": "the batch was given up before it ran"}, []
        if name not in self._models:
            return {
                "error": f"'{name}' is not resident on gpu-let {self._id}; the plan has just changed, send it again"
            }, []
        return None

    def _failed(self, work: _Work, error: Exception) -> _Reply:
        name = work.header["model"]
        logger.error("gpu-let %s: a batch of %d for %s failed", self._id, work.header["n"], name, exc_info=error)
        self._note_fault(error)
        return {"error": f"running '{name}' failed: {type(error).__name__}: {error}"}, []

    def _run(self, work: _Work) -> _Reply:
        started_at = time.perf_counter()
        refusal = self._refusal(work)
        if refusal is not None:
            return refusal
        try:
            begun_s, execution_ms, answer, buffers = self._execute(work.header["model"], work, int(work.header["n"]))
        except Exception as error:
            return self._failed(work, error)
        return self._ran(work, begun_s, execution_ms, (started_at - work.received_at) * 1000.0, answer), buffers

    def _take(self, work: _Work) -> Arrays | None:
        """Return the inputs of a batch to be streamed; None when it was refused."""
        refusal = self._refusal(work)
        if refusal is not None:
            self._send(work, refusal)
            return None
        signature = self._executor.signature(work.header["model"])
        return cut_inputs(signature["inputs"], work.body, int(work.header["n"]))[0]

    def _streamed(self, work: _Work, outputs: Arrays, times: BatchTimes, queue_ms: float) -> None:
        """Answer a streamed batch. Its copies are part of its way, as they keep no other batch from executing."""
        described, buffers = pack_outputs(outputs, int(work.header["n"]))
        answer = {"outputs": described, "copy_in_ms": times.copy_in_ms, "copy_out_ms": times.copy_out_ms}
        self._send(work, (self._ran(work, times.begun_at_s, times.execution_ms, queue_ms, answer), buffers))

    def _ran(
        self, work: _Work, begun_s: float, execution_ms: float, queue_ms: float, answer: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Note a batch that ran and return the header of its answer."""
        name, size = work.header["model"], int(work.header["n"])
        requests = work.header.get("requests", [])
        self._recent.append(
            {"model": name, "batch_size": size, "requests": requests, "started_s": begun_s,
             "ended_s": begun_s + execution_ms / 1000.0}
        )  # fmt: skip
        logger.debug("gpu-let %s: %d of %s in %.3f ms: %s", self._id, size, name, execution_ms, requests)
        self._batches += 1
        self._busy_s += execution_ms / 1000.0
        return {
            **answer,
            "execution_ms": execution_ms,
            "started_ms": begun_s * 1000.0,
            "queue_ms": queue_ms,
            "emulated": self._is_emulated,
        }

    def _execute(self, name: str, work: _Work, size: int) -> tuple[float, float, dict[str, Any], list[memoryview]]:
        """Run a batch, a joint one of several models if its header says so; the gateway has checked shapes and types.

        Returns its start in s, its execution time in ms, and the outputs as part of the answer's header and buffers.
        """
        body = work.body
        if "members" not in work.header:
            inputs, _ = cut_inputs(self._executor.signature(name)["inputs"], body, size)
            begun_s = time.monotonic()
            outputs, execution_ms = self._executor.run(name, inputs, size)
            described, buffers = pack_outputs(outputs, size)
            return begun_s, execution_ms, {"outputs": described}, buffers
        sizes: dict[str, int] = dict(work.header["members"])
        joint = {}
        for member, rows in sizes.items():
            joint[member], body = cut_inputs(self._executor.signature(member)["inputs"], body, rows)
        begun_s = time.monotonic()
        answers, execution_ms = self._executor.run_merged(name, joint, sizes)
        packed = [(rows, *pack_outputs(answers[member], rows)) for member, rows in sizes.items()]
        parts = [(rows, described) for rows, described, _ in packed]
        return begun_s, execution_ms, {"outputs": [], "members": parts}, [b for _, _, mine in packed for b in mine]

    def _note_fault(self, error: Exception) -> None:
        """A CUDA fault is sticky: the context is lost and only a new process helps, so fail the next health check."""
        text = str(error)
        if "CUDA error" in text or "device-side assert" in text or "CUDA driver" in text:
            self._failure = f"the CUDA context of gpu-let {self._id} is lost: {text.splitlines()[0]}"


def _streamed(item: Any) -> _Work | None:
    """Return a batch that can be streamed: joint ones of merged models run by themselves."""
    return item if isinstance(item, _Work) and "members" not in item.header else None


def _warm_sizes(largest: int) -> list[int]:
    """Return the batch sizes to warm up: every one to 16, then every eighth, and always the largest."""
    return sorted({*range(1, min(16, largest) + 1), *range(24, largest, 8), largest})


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def build(args: dict[str, Any]) -> Any:
    """Return the Serve application of one gpu-let; named as `import_path` in the generated Serve config."""
    from ray import serve

    return serve.deployment(name="gpulet")(GpuletReplica).bind(args["spec"])
