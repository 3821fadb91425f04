"""Several models merged into one program: what a `ProgramRunner` runs as it runs a lone model. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tenuto.errors import InvalidInputError, Problem, refused
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature
from tenuto.profiles.networks.merging.merge import MergedModels, merge_models
from tenuto.profiles.networks.merging.report import MergedCluster
from tenuto.profiles.networks.model_options import PLAIN, RunOptions, unmergeable_options
from tenuto.profiles.networks.network import Tensors, set_backends

CURE = "Remove the group from `merge` of the plan (or the workload); the models are then served one by one."


class MergedNetwork:
    """The program of a cluster of models, run on joint batches of any of them. Made on the CPU, where it can be run
    beside the originals; `settle` moves it to its device."""

    def __init__(
        self,
        merged: MergedModels,
        report: MergedCluster,
        signatures: Mapping[str, ModelSignature],
        batch_sizes: Sequence[int] = (),
    ) -> None:
        """Take a merged cluster as `merge_models` returns it, its report, the signatures of its models, and the planned
        joint batches."""
        self.signatures = {name: signatures[name] for name in merged.names}
        self.report = report
        self._merged = merged
        self._sizes = tuple(sorted(batch_sizes))
        self._on_cuda = False

    @classmethod
    def of(cls, models: Mapping[str, LoadedModel], batch_sizes: Sequence[int] = ()) -> MergedNetwork:
        """Merge models and check the outputs; the originals are not needed once it is settled.

        Args:
            models: two or more, as `build` returns them, on the CPU.
            batch_sizes: the planned joint batches.

        Raises:
            InvalidInputError: they do not merge into one program, or its outputs are not those of the models within
                the tolerance; the cure is to serve them one by one.
        """
        found, report = merge_models({member: (loaded.module, loaded.signature) for member, loaded in models.items()})
        for merged, cluster in zip(found, report.clusters, strict=True):
            if set(merged.names) == set(models):
                return cls(merged, cluster, {name: loaded.signature for name, loaded in models.items()}, batch_sizes)
        reasons = "; ".join(f"{member}: {reason}" for member, reason in report.unmerged.items())
        if not reasons:
            parts = " and ".join("+".join(cluster.models) for cluster in report.clusters)
            reasons = f"only {parts} merge with each other"
        raise refused("merge", "+".join(models), f"cannot run as one program ({reasons})", CURE)

    def settle(self, device: torch.device) -> None:
        """Move the weights to the device and let go of the originals."""
        self._merged.settle(device)
        self._on_cuda = device.type == "cuda"

    def __call__(self, batches: Tensors) -> dict[str, tuple[torch.Tensor, ...]]:
        """Compute the outputs of the models that have a batch; only their operators run."""
        if self._on_cuda:
            set_backends(PLAIN.chosen(None))  # its outputs were compared in fp32
        return self._merged.run(batches)

    def padded(self, rows: int) -> int:
        """Return the rows as they are: a joint batch has too many splits to prepare a few sizes."""
        return rows

    def warm_up_rows(self) -> Sequence[Mapping[str, int]]:
        """Return joint batches of the planned sizes, evenly split, and a largest batch of every model alone."""
        names = tuple(self.signatures)
        return [even_split(names, size) for size in self._sizes] + [{name: self.largest_batch} for name in names]

    @property
    def notes(self) -> Sequence[str]:
        """Return nothing: it is run in one way only."""
        return ()

    @property
    def way(self) -> str:
        """Return `merged`."""
        return "merged"

    @property
    def largest_batch(self) -> int:
        """The largest planned joint batch: all of it may be one model's."""
        return max(self._sizes, default=1)

    @property
    def weights_mib(self) -> float:
        """The weights of all models, those in common once."""
        return self._merged.weights_mib

    def facts(self) -> dict[str, float | int]:
        """Return what merging did: operators with weights and MiB before and after, and the largest error."""
        report = self.report
        return {
            "operators_before": report.operators_before,
            "operators_after": report.operators_after,
            "memory_before_mib": report.memory_before_mib,
            "memory_after_mib": report.memory_after_mib,
            "worst_error": report.worst_error,
        }


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
        for key, value in unmergeable_options(options.model_dump(exclude_unset=True)).items()
    ]
    if problems:
        raise InvalidInputError(problems)
