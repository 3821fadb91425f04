"""The emulated GPU: occupies its worker thread for the latency of the plan and answers zeros, labelled as emulated.

It needs neither torch nor a GPU, so that the whole stack above it, Ray and HTTP included, runs anywhere. What the
neighbours on the same emulated GPU cost is the slowdown the plan expects of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tenuto.deployments.gpulet.executors.base import Arrays
from tenuto.errors import InvalidInputError, Problem
from tenuto.profiles import Latency, LatencyTable, LinearLatency
from tenuto.profiles.networks.catalogue import lookup

__all__ = ["EmulatedExecutor"]


class EmulatedExecutor:
    """Runs batches by waiting. `device` begins with `emulated`, which every answer and report repeats."""

    def __init__(self, gpu_type: str) -> None:
        self.device = f"emulated {gpu_type}"
        self._tables: dict[str, list[float]] = {}
        self._signatures: dict[str, dict[str, Any]] = {}
        self._copies: dict[str, tuple[float, float]] = {}  # in and out, ms of one request
        self._members: dict[str, tuple[str, ...]] = {}  # of groups that are emulated as one program

    def load(
        self,
        replica_name: str,
        source: str | None,
        *,
        weights_path: str | None,
        options: Mapping[str, Any],
        batch_sizes: Sequence[int],
    ) -> None:
        """Take the latency from `options` and the signature from there or from the catalogue; nothing is built.

        Raises:
            InvalidInputError: the plan carries no latency for this replica, or copies that take longer than a batch.
        """
        del weights_path
        raw = options.get("latency")
        if raw is None:
            raise InvalidInputError(
                f"'{replica_name}' has no latency in the plan. Make the plan again with `tenuto plan`."
            )
        latency: Latency = LatencyTable.model_validate(raw) if "points" in raw else LinearLatency.model_validate(raw)
        slowdown = float(options.get("slowdown", 1.0))
        table = [0.0] + [latency.at(size) * slowdown for size in batch_sizes]
        self._copies[replica_name] = _copies(replica_name, options, table)
        self._tables[replica_name] = table
        self._signatures[replica_name] = _signature(replica_name, source, options)

    def unload(self, replica_name: str) -> None:
        """Forget a model; one that is not loaded is ignored."""
        self._tables.pop(replica_name, None)
        self._copies.pop(replica_name, None)
        for name in self._members.pop(replica_name, (replica_name,)):
            self._signatures.pop(name, None)

    def signature(self, replica_name: str) -> dict[str, Any]:
        """Return the signature of the model that is emulated."""
        return self._signatures[replica_name]

    def run(self, replica_name: str, inputs: Arrays, batch_size: int) -> tuple[Arrays, float]:
        """Wait l(batch_size) ms and return zeros and the time that passed in ms."""
        del inputs
        started = time.perf_counter()
        self._wait(started, self._tables[replica_name][batch_size])
        arrays = self.zeros(replica_name, batch_size)
        return arrays, (time.perf_counter() - started) * 1000.0

    def load_merged(self, name: str, members: Sequence[Mapping[str, Any]], batch_sizes: Sequence[int]) -> None:
        """Take the group's latency and the members' signatures."""
        options = {"latency": members[0].get("latency"), "slowdown": members[0].get("slowdown", 1.0)}
        self.load(name, None, weights_path=None, options=options, batch_sizes=batch_sizes)
        del self._signatures[name]
        for member in members:
            own = _signature(member["name"], member.get("source"), member.get("options", {}))
            self._signatures[member["name"]] = own
        self._members[name] = tuple(member["name"] for member in members)

    def run_merged(
        self, name: str, inputs: Mapping[str, Arrays], sizes: Mapping[str, int]
    ) -> tuple[dict[str, Arrays], float]:
        """Wait l(joint batch) ms and return zeros for every member that has rows, and the time that passed in ms."""
        del inputs
        started = time.perf_counter()
        self._wait(started, self._tables[name][sum(sizes.values())])
        arrays = {member: self.zeros(member, rows) for member, rows in sizes.items() if rows}
        return arrays, (time.perf_counter() - started) * 1000.0

    def merged(self) -> dict[str, Any]:
        """Return the groups; nothing is really merged."""
        return {name: {} for name in self._members}

    @staticmethod
    def _wait(started: float, latency_ms: float) -> None:
        end = started + latency_ms / 1000.0
        while (rest := end - time.perf_counter()) > 0:
            time.sleep(rest)

    def latency_ms(self, replica_name: str, batch_size: int) -> float:
        """Return what a batch takes in all, copies and neighbours included."""
        return self._tables[replica_name][batch_size]

    def copies_ms(self, replica_name: str, batch_size: int) -> tuple[float, float]:
        """Return what of it the copies in and out take."""
        copy_in_ms, copy_out_ms = self._copies[replica_name]
        return copy_in_ms * batch_size, copy_out_ms * batch_size

    def sm_count(self) -> int | None:
        """Return None: nothing has multiprocessors here."""
        return None

    def zeros(self, model: str, rows: int) -> Arrays:
        """Return the outputs of a batch."""
        outputs = self._signatures[model]["outputs"]
        return {t["name"]: np.zeros((rows, *t["shape"]), dtype=t["dtype"]) for t in outputs}

    def memory_mib(self) -> float | None:
        """Return None: an emulated GPU has no memory of its own."""
        return None

    def close(self) -> None:
        """Nothing to release."""
        self._tables.clear()
        self._signatures.clear()
        self._members.clear()


def _copies(name: str, options: Mapping[str, Any], table: Sequence[float]) -> tuple[float, float]:
    """Return `copy_in_ms` and `copy_out_ms` of one request; 0 where they are not given.

    Raises:
        InvalidInputError: not numbers of at least 0, or nothing of some batch's latency is left to execute.
    """
    found = []
    for key in ("copy_in_ms", "copy_out_ms"):
        raw = options.get(key)
        value = 0.0 if raw is None else raw
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
            raise InvalidInputError(
                Problem(f"options of {name}: {key}", raw, "must be ms of one request, at least 0", "Give 0 for none.")
            )
        found.append(float(value))
    for size, latency_ms in enumerate(table[1:], start=1):
        if sum(found) * size >= latency_ms:
            raise InvalidInputError(
                Problem(
                    f"options of {name}: copy_in_ms + copy_out_ms", sum(found),
                    f"a batch of {size} takes {latency_ms:g} ms in all, copies included", "Give smaller ones.",
                )
            )  # fmt: skip
    return found[0], found[1]


# The signature of a model known by its latency alone: one number in, one number out.
_PLAIN = {
    "inputs": [{"name": "INPUT0", "dtype": "float32", "shape": [1]}],
    "outputs": [{"name": "OUTPUT0", "dtype": "float32", "shape": [1]}],
}


def _signature(name: str, source: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `inputs`/`outputs` given in the workload's options, else the catalogue's, else one number in and out."""
    if "inputs" in options and "outputs" in options:
        return {"inputs": options["inputs"], "outputs": options["outputs"]}
    try:
        return lookup(source or name).signature.to_data()
    except InvalidInputError:
        return dict(_PLAIN)
