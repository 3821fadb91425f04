"""The emulated GPU: occupies its worker thread for the latency of the plan and answers zeros, labelled as emulated.

It needs neither torch nor a GPU, so that the whole stack above it, Ray and HTTP included, runs anywhere. What the
neighbours on the same emulated GPU cost is the slowdown the plan expects of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tenuto.deployments.executors.base import Arrays
from tenuto.errors import InvalidInputError
from tenuto.profiles import Latency, LatencyTable, LinearLatency
from tenuto.profiles.catalogue import lookup

__all__ = ["EmulatedExecutor"]


class EmulatedExecutor:
    """Runs batches by waiting. `device` begins with `emulated`, which every answer and report repeats."""

    def __init__(self, gpu_type: str) -> None:
        self.device = f"emulated {gpu_type}"
        self._tables: dict[str, list[float]] = {}
        self._signatures: dict[str, dict[str, Any]] = {}

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
            InvalidInputError: the plan carries no latency for this replica.
        """
        del weights_path
        raw = options.get("latency")
        if raw is None:
            raise InvalidInputError(
                f"'{replica_name}' has no latency in the plan. Make the plan again with `tenuto plan`."
            )
        latency: Latency = LatencyTable.model_validate(raw) if "points" in raw else LinearLatency.model_validate(raw)
        slowdown = float(options.get("slowdown", 1.0))
        self._tables[replica_name] = [0.0] + [latency.at(size) * slowdown for size in batch_sizes]
        self._signatures[replica_name] = _signature(replica_name, source, options)

    def unload(self, replica_name: str) -> None:
        """Forget a model; one that is not loaded is ignored."""
        self._tables.pop(replica_name, None)
        self._signatures.pop(replica_name, None)

    def signature(self, replica_name: str) -> dict[str, Any]:
        """Return the signature of the model that is emulated."""
        return self._signatures[replica_name]

    def run(self, replica_name: str, inputs: Arrays, batch_size: int) -> tuple[Arrays, float]:
        """Wait l(batch_size) ms and return zeros and the time that passed in ms."""
        del inputs
        started = time.perf_counter()
        end = started + self._tables[replica_name][batch_size] / 1000.0
        while (rest := end - time.perf_counter()) > 0:
            time.sleep(rest)
        outputs = self._signatures[replica_name]["outputs"]
        arrays = {t["name"]: np.zeros((batch_size, *t["shape"]), dtype=t["dtype"]) for t in outputs}
        return arrays, (time.perf_counter() - started) * 1000.0

    def memory_mib(self) -> float | None:
        """Return None: an emulated GPU has no memory of its own."""
        return None

    def close(self) -> None:
        """Nothing to release."""
        self._tables.clear()
        self._signatures.clear()


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
