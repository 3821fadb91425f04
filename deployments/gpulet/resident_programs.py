"""The programs that are resident on a gpu-let: loaded and warmed up as its entries in the plan say, or released."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.gpulet.executors.streamed import StreamingExecutor
from tenuto.deployments.serve.user_config import ProgramEntry
from tenuto.deployments.wire.status import GpuletMode
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.model_options import captured_sizes

logger = logging.getLogger("ray.serve")


class ResidentPrograms:
    """Invariant: a new program is resident only once it is loaded and warmed up.

    It is changed on the event loop and asked there and on the worker thread.
    """

    def __init__(self, gpulet_id: str, executor: Executor, streaming: StreamingExecutor | None) -> None:
        """Start with none; `streaming` is what runs them where the gpu-let streams."""
        self._id = gpulet_id
        self._executor = executor
        self._streaming = streaming
        self._entries: dict[str, ProgramEntry] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def is_emulated(self) -> bool:
        """Whether nothing really runs."""
        return self._executor.device.startswith("emulated")

    def loads(self, wanted: Sequence[ProgramEntry]) -> bool:
        """Whether `bring` would load anything."""
        return any(self._entries.get(entry.name) != entry for entry in wanted)

    async def bring(
        self, wanted: Sequence[ProgramEntry], on_worker: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> None:
        """Unload and load until exactly the wanted programs are resident; unchanged ones are not touched.

        Args:
            wanted: their entries.
            on_worker: runs something on the worker thread, and raises what it raised.
        """
        names = {entry.name for entry in wanted}
        for name in [name for name in self._entries if name not in names]:
            await on_worker(functools.partial(self._executor.unload, name))
            del self._entries[name]
        for entry in wanted:
            if self._entries.get(entry.name) == entry:
                continue
            started = time.monotonic()
            await on_worker(functools.partial(self._load, entry))
            self._entries[entry.name] = entry
            took_s = time.monotonic() - started
            logger.info(
                "gpu-let %s: %s is ready up to batch %d (%.1f s)", self._id, entry.name, entry.batch_size, took_s
            )

    def _load(self, entry: ProgramEntry) -> None:
        """Build or rebuild one program and warm up the batch sizes from 1 to the planned one."""
        if entry.name in self._entries:
            self._executor.unload(entry.name)
        largest = entry.batch_size
        self._executor.load(entry, range(1, largest + 1) if self.is_emulated else captured_sizes(largest))

    def largest_batches(self) -> dict[str, int]:
        """Return the planned batch size of every program."""
        return {name: entry.batch_size for name, entry in self._entries.items()}

    def planned_s(self, name: str) -> float:
        """Return what the largest batch of a program is planned to take, in s; 0 where the plan does not say."""
        entry = self._entries.get(name)
        if entry is None or entry.latency is None:
            return 0.0
        return entry.latency.at(entry.batch_size) * entry.slowdown / 1000.0

    def signatures(self) -> dict[str, ModelSignature]:
        """Return the signature of every model."""
        members = [member.name for entry in self._entries.values() for member in entry.members]
        return {name: self._executor.signature(name) for name in members}

    def mode(self, *, is_shared: bool) -> GpuletMode:
        """Return how they run; `is_shared`: as a client of CUDA MPS."""
        return GpuletMode(is_shared, self._streaming is not None, self._executor.ways())
