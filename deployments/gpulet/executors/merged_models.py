"""Merged programs of a `TorchExecutor`: built from the entries of their members, run on joint batches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tenuto.deployments.gpulet.executors.base import Arrays
from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.networks.torch_runner import split_options

if TYPE_CHECKING:
    from tenuto.profiles.networks.merging.runner import MergedRunner

__all__ = ["MergedModels"]


class MergedModels:
    """The merged programs of one process, by the name of their group."""

    def __init__(self, kind: str, stream: Any = None) -> None:
        """Take the kind of device, `cpu` or `cuda`, and the CUDA stream that the executor's other models run on."""
        self._kind = kind
        self._stream = stream
        self._runners: dict[str, MergedRunner] = {}

    def load(self, name: str, members: Sequence[Mapping[str, Any]], batch_sizes: Sequence[int]) -> None:
        """Build the members one by one, merge them and warm up joint batches.

        Raises:
            InvalidInputError: unknown models or options, or models that do not merge within the tolerance.
            EnvironmentFaultError: not enough memory on the device.
        """
        import torch

        from tenuto.profiles.networks.merging.runner import MergedRunner, check_run_options
        from tenuto.profiles.networks.models import build

        self.unload(name)
        loaded, warmup_runs = {}, 1
        for member in members:
            run_options, build_options = split_options(member.get("options", {}), f"options of {member['name']}")
            check_run_options(member["name"], run_options)
            warmup_runs = max(warmup_runs, run_options.warmup_runs)
            source = member.get("source") or member["name"]
            loaded[member["name"]] = build(source, weights_path=member.get("weights_path"), options=build_options)
        try:
            runner = MergedRunner.of(loaded, self._kind, stream=self._stream)
            loaded.clear()
            runner.warm_up(batch_sizes, warmup_runs)
        except torch.OutOfMemoryError as error:
            raise EnvironmentFaultError(
                f"the merged program of '{name}' does not fit into the device's memory at a joint batch of "
                f"{max(batch_sizes)}. Plan smaller batches, fewer models on this GPU, or a larger memory cap."
            ) from error
        self._runners[name] = runner

    def unload(self, name: str) -> bool:
        """Release a group; return whether it was there."""
        return self._runners.pop(name, None) is not None

    def clear(self) -> None:
        """Release all of them."""
        self._runners.clear()

    def signature(self, member: str) -> dict[str, Any]:
        """Return a member's signature as plain data; KeyError for a model that is in no group."""
        for runner in self._runners.values():
            if member in runner.signatures:
                return runner.signatures[member].to_data()
        raise KeyError(member)

    def run(self, name: str, inputs: Mapping[str, Arrays], sizes: Mapping[str, int]) -> tuple[dict[str, Arrays], float]:
        """Run a joint batch; return every present member's outputs and the time in ms, from numpy to numpy."""
        started = time.perf_counter()
        outputs = self._runners[name].run(inputs, sizes)
        return outputs, (time.perf_counter() - started) * 1000.0

    def facts(self) -> dict[str, dict[str, float | int]]:
        """Return what merging did, by group."""
        return {name: runner.facts for name, runner in self._runners.items()}
