"""Run joint batches of a group of models as one merged program, from numpy to numpy: what a gpu-let serves.

The counterpart of `tenuto.profiles.networks.torch_runner` for several models at once. Imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tenuto.errors import InvalidInputError, Problem
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature
from tenuto.profiles.networks.merging.merge import MergedModels, merge_models
from tenuto.profiles.networks.merging.report import MergedCluster
from tenuto.profiles.networks.run_options import RunOptions, unmergeable_options
from tenuto.profiles.networks.torch_runner import Arrays, blank_inputs

__all__ = ["MergedRunner", "check_run_options", "even_split"]

CURE = "Remove the group from `merge` of the plan (or the workload); the models are then served one by one."


class MergedRunner:
    """One group on one device. Every call is made by one thread at a time."""

    def __init__(
        self, merged: MergedModels, report: MergedCluster, signatures: Mapping[str, ModelSignature],
        device: str = "cpu", *, stream: Any = None,
    ) -> None:  # fmt: skip
        """Take a merged cluster as `merge_models` returns it; `settle` moves it to the device.

        Args:
            merged: on the CPU.
            report: on it.
            signatures: of its models.
            device: `cpu` or `cuda` (the first visible one).
            stream: CUDA stream to run on; default: a new one.
        """
        self.names = merged.names
        self.report = report
        self.signatures = {name: signatures[name] for name in merged.names}
        self._merged = merged
        self._device = torch.device("cuda:0" if device == "cuda" else "cpu")
        self._stream: Any = None
        if device == "cuda":
            self._stream = stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, models: Mapping[str, LoadedModel], device: str, *, stream: Any = None) -> MergedRunner:
        """Merge models on the CPU, check the outputs, and move what is left of the weights to the device.

        Args:
            models: two or more, as `build` returns them, on the CPU; they are not needed afterwards.
            device: see the constructor.
            stream: see the constructor.

        Raises:
            InvalidInputError: they do not merge into one program, or its outputs are not those of the models within
                the tolerance; the cure is to serve them one by one.
        """
        merged, report = _merge(models)
        runner = cls(merged, report, {name: loaded.signature for name, loaded in models.items()}, device, stream=stream)
        runner.settle()
        return runner

    def settle(self) -> None:
        """Move the weights to the device and let go of the originals; batches can be run before, on the CPU."""
        self._merged.settle(self._device)

    @property
    def facts(self) -> dict[str, float | int]:
        """What merging did, for the status: operators with weights and MiB before and after, and the largest error."""
        report = self.report
        return {
            "operators_before": report.operators_before,
            "operators_after": report.operators_after,
            "memory_before_mib": report.memory_before_mib,
            "memory_after_mib": report.memory_after_mib,
            "worst_error": report.worst_error,
        }

    def run(self, inputs: Mapping[str, Arrays], sizes: Mapping[str, int]) -> dict[str, Arrays]:
        """Run one joint batch and return the outputs of every member that has rows in it.

        Args:
            inputs: by member, one array per input with a leading batch dimension; may be read-only.
            sizes: rows by member; those with none may be left out.

        Raises:
            InvalidInputError: an integer is outside a model's range; found before anything ran.
        """
        present = [name for name in self.names if sizes.get(name)]
        arrays = {
            name: [_checked(spec, inputs[name][spec.name]) for spec in self.signatures[name].inputs] for name in present
        }
        with torch.inference_mode():
            answers = self._run_here(arrays) if self._stream is None else self._run_on_stream(arrays)
        return {name: _as_arrays(self.signatures[name], answers[name], sizes[name]) for name in present}

    def warm_up(self, batch_sizes: Sequence[int], runs: int) -> None:
        """Run joint batches of these sizes, evenly split, and a largest batch of every member alone."""
        names, largest = self.names, max(batch_sizes)
        splits = [even_split(names, size) for size in batch_sizes] + [{name: largest} for name in names]
        for split in splits:
            blank = {name: blank_inputs(self.signatures[name], rows) for name, rows in split.items()}
            for _ in range(runs):
                self.run(blank, split)

    def _run_here(self, arrays: Mapping[str, list[np.ndarray[Any, Any]]]) -> dict[str, tuple[torch.Tensor, ...]]:
        return self._merged.run({name: [torch.from_numpy(array) for array in mine] for name, mine in arrays.items()})

    def _run_on_stream(self, arrays: Mapping[str, list[np.ndarray[Any, Any]]]) -> dict[str, tuple[torch.Tensor, ...]]:
        """Copy through pinned memory on the runner's stream and wait for that stream alone."""
        pinned = {name: [torch.from_numpy(array).pin_memory() for array in mine] for name, mine in arrays.items()}
        with torch.cuda.stream(self._stream):
            given = {
                name: [tensor.to(self._device, non_blocking=True) for tensor in mine] for name, mine in pinned.items()
            }
            host = {}
            for name, tensors in self._merged.run(given).items():
                host[name] = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
                for target, tensor in zip(host[name], tensors, strict=True):
                    target.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return host


def even_split(names: Sequence[str], size: int) -> dict[str, int]:
    """Return the rows of every member in a joint batch that is split as evenly as it can be; none of a member: left
    out."""
    share, more = divmod(size, len(names))
    rows = {name: share + (place < more) for place, name in enumerate(names)}
    return {name: count for name, count in rows.items() if count}


def check_run_options(name: str, options: RunOptions) -> None:
    """Refuse options that a merged program does not know.

    Raises:
        InvalidInputError: another type than fp32, whose rounding exceeds the tolerance, or an option of how one module
            is run.
    """
    problems = [
        Problem(f"options of {name}", f"{key}: {value}", "is not possible for a model that is merged", CURE)
        for key, value in unmergeable_options(options.model_dump()).items()
    ]
    if problems:
        raise InvalidInputError(problems)


def _merge(models: Mapping[str, LoadedModel]) -> tuple[MergedModels, MergedCluster]:
    name = "+".join(models)
    found, report = merge_models({member: (loaded.module, loaded.signature) for member, loaded in models.items()})
    for merged, cluster in zip(found, report.clusters, strict=True):
        if set(merged.names) == set(models):
            return merged, cluster
    reasons = "; ".join(f"{member}: {reason}" for member, reason in report.unmerged.items())
    if not reasons:
        parts = " and ".join("+".join(cluster.models) for cluster in report.clusters)
        reasons = f"only {parts} merge with each other"
    raise InvalidInputError(Problem("merge", name, f"cannot run as one program ({reasons})", CURE))


def _checked(spec: TensorSignature, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array torch may wrap; refuse integers outside the model's range, which CUDA would answer with the loss
    of its context, and of every model in it."""
    if spec.below is not None and array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= spec.below:
            raise InvalidInputError(
                Problem(spec.name, low if low < 0 else high, f"values must be in [0, {spec.below})",
                        "Use the model's own tokenizer.")
            )  # fmt: skip
    return array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")


def _as_arrays(signature: ModelSignature, tensors: Sequence[torch.Tensor], rows: int) -> Arrays:
    outputs = {}
    for spec, tensor in zip(signature.outputs, tensors, strict=True):
        array = tensor.numpy()
        if array.shape != (rows, *spec.shape):
            raise InvalidInputError(
                Problem(f"output {spec.name}", list(array.shape), f"the signature says {[rows, *spec.shape]}",
                        "Correct the model's signature.")
            )  # fmt: skip
        outputs[spec.name] = np.ascontiguousarray(array, dtype=np.dtype(spec.dtype))
    return outputs
