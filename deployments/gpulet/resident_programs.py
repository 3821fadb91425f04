"""The resident programs of a gpu-let: they are loaded, warmed up (cold start) and released as the plan says."""

from __future__ import annotations

import asyncio
import functools
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence

from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.gpulet.executors.streamed import StreamingExecutor
from tenuto.deployments.gpulet.preparing_process import prepare_elsewhere
from tenuto.deployments.serve.user_config import GeneratesEntry, ProgramEntry
from tenuto.deployments.wire.status import GpuletMode
from tenuto.errors import EnvironmentFaultError, InvalidInputError, refused
from tenuto.profiles import LatencyTable
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.hooks import try_hooks
from tenuto.profiles.networks.inputs import Arrays, as_blocks
from tenuto.profiles.networks.model_options import ModelOptions, captured_sizes
from tenuto.profiles.networks.programs import Member

OnWorker = Callable[[Callable[[], None]], Awaitable[None]]

logger = logging.getLogger("ray.serve")


class ResidentPrograms:
    """Invariant: a new program is resident only once it is loaded and warmed up.

    Only the event loop changes this object; the worker thread also reads it.
    """

    def __init__(self, gpulet_id: str, executor: Executor, streaming: StreamingExecutor | None) -> None:
        """Start without programs. `streaming`: runs programs if the gpu-let streams."""
        self._id = gpulet_id
        self._executor = executor
        self._streaming = streaming
        self._entries: dict[str, ProgramEntry] = {}
        self._preparing: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def is_emulated(self) -> bool:
        """Whether the GPU is only emulated."""
        return self._executor.device.startswith("emulated")

    def loads(self, planned: Sequence[ProgramEntry]) -> bool:
        """Whether `bring` would load anything."""
        return any(self._entries.get(entry.name) != entry for entry in planned)

    async def bring(
        self, planned: Sequence[ProgramEntry], on_worker: OnWorker, changed: Callable[[], None] = lambda: None
    ) -> None:
        """Unload and load until exactly the wanted programs are resident; unchanged ones are not touched.

        A program of several models first runs their single graphs, until the prepared network takes their place.

        Args:
            planned: the entries of the planned programs.
            on_worker: runs a function on the worker thread, and raises what the function raised.
            changed: called when the prepared network has replaced the single graphs.
        """
        names = {entry.name for entry in planned}
        for name in [name for name in self._entries if name not in names]:
            await self._stop_preparing(name)
            await on_worker(functools.partial(self._executor.unload, name))
            del self._entries[name]
        for entry in planned:
            known = self._entries.get(entry.name)
            if known == entry:
                continue
            if known is not None and known.generates is not None and known.loads_as(entry):
                self._entries[entry.name] = entry
                await on_worker(functools.partial(self._executor.retime, entry))
                continue  # its open sequences go on
            started = time.monotonic()
            await self._stop_preparing(entry.name)
            is_joint = len(entry.members) > 1 and not self.is_emulated
            try:
                await on_worker(functools.partial(self._load, entry))
            except EnvironmentFaultError:
                if not is_joint:
                    raise
                # The plan may have counted the memory of the prepared network only.
                logger.warning("gpu-let %s: the graphs of %s do not fit side by side", self._id, entry.name)
                await self._load_prepared(entry, on_worker)
            else:
                if is_joint:
                    self._preparing[entry.name] = asyncio.create_task(self._switch(entry, on_worker, changed))
            self._entries[entry.name] = entry
            took_s = time.monotonic() - started
            logger.info(
                "gpu-let %s: %s is ready up to batch %d (%.1f s)", self._id, entry.name, entry.batch_size, took_s
            )

    async def close(self) -> None:
        """Stop all preparing that is under way."""
        for name in list(self._preparing):
            await self._stop_preparing(name)

    async def _stop_preparing(self, name: str) -> None:
        task = self._preparing.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _load_prepared(self, entry: ProgramEntry, on_worker: OnWorker) -> None:
        with tempfile.TemporaryDirectory(prefix="tenuto-") as folder:
            file = f"{folder}/network"
            await prepare_elsewhere([Member(m.name, m.source, m.weights_path, m.options) for m in entry.members], file)
            await on_worker(functools.partial(self._load, entry, file))

    async def _switch(self, entry: ProgramEntry, on_worker: OnWorker, changed: Callable[[], None]) -> None:
        """Replace the single graphs of a program by the prepared network, between two batches, or log why not."""
        started = time.monotonic()
        try:
            await self._load_prepared(entry, on_worker)
        except Exception as error:
            logger.error("gpu-let %s: %s goes on with single graphs: %s", self._id, entry.name, error)
            if entry.name not in self._executor.ways():
                await on_worker(functools.partial(self._load, entry))
        else:
            logger.info("gpu-let %s: %s is one program (%.1f s)", self._id, entry.name, time.monotonic() - started)
        changed()

    def _load(self, entry: ProgramEntry, prepared_file: str | None = None) -> None:
        """Build or rebuild one program and warm up the batch sizes from 1 to the planned one."""
        if entry.name in self._entries:
            self._executor.unload(entry.name)
        if entry.generates is not None:
            if self._streaming is not None:
                raise refused(
                    "streaming", True, f"'{entry.name}' generates, and its steps cannot overlap", "Plan without it."
                )
            self._executor.load(entry, ())
            return
        largest = entry.batch_size
        sizes = range(1, largest + 1) if self.is_emulated else captured_sizes(largest)
        self._executor.load(entry, sizes, prepared_file)
        try:
            self._try_hooks(entry)
        except InvalidInputError:
            self._executor.unload(entry.name)
            raise

    def _try_hooks(self, entry: ProgramEntry) -> None:
        """Refuse hooks that cannot work before any request needs them; raises `InvalidInputError`."""
        for member in entry.members:
            name, hooks = member.name, ModelOptions.parse(member.options, f"options of {member.name}").hooks.hooks
            if hooks is not None:

                def run(inputs: Arrays, name: str = name) -> Arrays:
                    return self._executor.run(entry.name, {name: as_blocks(inputs)}, {name: 1})[0][name][0]

                try_hooks(hooks, self._executor.signature(name), run)

    def largest_batches(self) -> dict[str, int]:
        """Return the planned batch size of every program."""
        return {name: entry.batch_size for name, entry in self._entries.items()}

    def generating(self, name: str) -> GeneratesEntry | None:
        """Return how a program generates; None for one that does not, or is not resident."""
        entry = self._entries.get(name)
        return None if entry is None else entry.generates

    def planned_s(self, name: str) -> float:
        """Return the planned latency of the largest batch or step of a program in s; 0 when the plan has none."""
        entry = self._entries.get(name)
        if entry is not None and entry.generates is not None:
            return entry.generates.longest_step_ms * entry.slowdown / 1000.0
        if entry is None or entry.latency is None:
            return 0.0
        if not entry.by_size:
            return entry.latency.at(entry.batch_size) * entry.slowdown / 1000.0
        tables = [each.latency for each in entry.by_size]
        longest_ms = max(t.at(t.largest if isinstance(t, LatencyTable) else entry.batch_size) for t in tables)
        return longest_ms * entry.slowdown / 1000.0

    def signatures(self) -> dict[str, ModelSignature]:
        """Return the signature of every model."""
        members = [member.name for entry in self._entries.values() for member in entry.members]
        return {name: self._executor.signature(name) for name in members}

    def mode(self, *, is_shared: bool) -> GpuletMode:
        """Return how the programs run. `is_shared`: the process is a client of CUDA MPS."""
        return GpuletMode(is_shared, self._streaming is not None, self._executor.ways())
