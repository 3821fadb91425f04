"""The models that are resident on a gpu-let: loaded and warmed up as its entries in the plan say, or released.

An entry is a model's, or that of a group whose members run as one merged program; see `joint_batches.group_entries`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.gpulet.executors.streamed import StreamingExecutor
from tenuto.deployments.gpulet.modes import mode_of

__all__ = ["ResidentModels"]

logger = logging.getLogger("ray.serve")

Entry = Mapping[str, Any]


class ResidentModels:
    """Invariant: a new model is resident only once it is loaded and warmed up.

    It is changed on the event loop and asked there and on the worker thread.
    """

    def __init__(self, gpulet_id: str, executor: Executor, streaming: StreamingExecutor | None) -> None:
        """Start with none; `streaming` is what runs them where the gpu-let streams."""
        self._id = gpulet_id
        self._executor = executor
        self._streaming = streaming
        self._entries: dict[str, Entry] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def is_emulated(self) -> bool:
        """Whether nothing really runs."""
        return self._executor.device.startswith("emulated")

    def loads(self, wanted: Mapping[str, Entry]) -> bool:
        """Whether `bring` would load anything."""
        return any(self._entries.get(name) != entry for name, entry in wanted.items())

    async def bring(
        self, wanted: Mapping[str, Entry], on_worker: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> None:
        """Unload and load until exactly the wanted entries are resident; unchanged ones are not touched.

        Args:
            wanted: the entries by name.
            on_worker: runs something on the worker thread, and raises what it raised.
        """
        for name in [name for name in self._entries if name not in wanted]:
            await on_worker(functools.partial(self._unload, name))
            del self._entries[name]
        for name, entry in wanted.items():
            if self._entries.get(name) == entry:
                continue
            started = time.monotonic()
            await on_worker(functools.partial(self._load, entry))
            self._entries[name] = entry
            logger.info(
                "gpu-let %s: %s is ready up to batch %d (%.1f s)",
                self._id,
                name,
                entry["batch_size"],
                time.monotonic() - started,
            )

    def _load(self, entry: Entry) -> None:
        """Build or rebuild one model and warm up the batch sizes from 1 to the planned one."""
        name = entry["name"]
        if name in self._entries:
            self._unload(name)
        largest = int(entry["batch_size"])
        sizes = range(1, largest + 1) if self.is_emulated else _warm_sizes(largest)
        if "members" in entry:
            of_the_group = {"latency": entry.get("latency"), "slowdown": entry["slowdown"]}
            self._executor.load_merged(name, [{**member, **of_the_group} for member in entry["members"]], sizes)
            return
        options = dict(entry.get("options", {}))
        if self.is_emulated:
            copies = {key: entry.get(key) for key in ("copy_in_ms", "copy_out_ms")}
            options = copies | options | {"latency": entry.get("latency"), "slowdown": entry.get("slowdown", 1.0)}
        self._executor.load(
            name, entry.get("source"), weights_path=entry.get("weights_path"), options=options, batch_sizes=sizes
        )
        if self._streaming is not None:
            self._streaming.warm(name)

    def _unload(self, name: str) -> None:
        if self._streaming is not None:
            self._streaming.forget(name)
        self._executor.unload(name)

    def to_data(self) -> dict[str, Any]:
        """Return plain data for the description: largest batches, facts about merged groups, signatures."""
        return {
            "models": {name: entry["batch_size"] for name, entry in self._entries.items()},
            "merged": self._executor.merged(),
            "signatures": {
                member["name"]: self._executor.signature(member["name"])
                for entry in self._entries.values()
                for member in entry.get("members", (entry,))
            },
        }

    def mode(self, *, is_shared: bool) -> dict[str, Any]:
        """Return how they run, see `mode_of`; `is_shared` as there."""
        return mode_of(
            self._entries,
            is_shared=is_shared,
            is_streaming=self._streaming is not None,
            is_emulated=self.is_emulated,
        )


def _warm_sizes(largest: int) -> list[int]:
    """Return the batch sizes to warm up: every one to 16, then every eighth, and always the largest."""
    return sorted({*range(1, min(16, largest) + 1), *range(24, largest, 8), largest})
