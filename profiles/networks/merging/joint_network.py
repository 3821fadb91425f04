"""Several models as one program, which a `ProgramRunner` runs in the same way as a lone model. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tenuto.errors import Problem, raise_if_any, refused
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature
from tenuto.profiles.networks.merging.merge import MergedModels, merge_models
from tenuto.profiles.networks.merging.report import MergeReport
from tenuto.profiles.networks.model_options import PLAIN, RunOptions, unmergeable_options
from tenuto.profiles.networks.network import LoneModel, Tensors, set_backends

CURE = "Remove the group from `merge` of the plan (or the workload); the models are then served one by one."


class MergedNetwork:
    """The program of several models. It takes joint batches of any of them, and runs merged and single graphs in turn.

    Single graphs are on their device already; `settle` moves merged ones there.
    """

    def __init__(
        self,
        clusters: Sequence[MergedModels],
        signatures: Mapping[str, ModelSignature],
        batch_sizes: Sequence[int] = (),
        *,
        alone: Sequence[LoneModel] = (),
        report: MergeReport | None = None,
    ) -> None:
        """Take the merged clusters, the signatures of all models in order, the sizes of planned joint batches, the
        models that run by themselves, and the report of merging."""
        self.signatures = signatures
        self.report = report
        self._clusters, self._alone = tuple(clusters), tuple(alone)
        self._parts: tuple[MergedModels | LoneModel, ...] = (*clusters, *alone)
        self._sizes = tuple(sorted(batch_sizes))
        self._on_cuda = False

    def settle(self, device: torch.device) -> None:
        """Move the weights to the device and drop the originals."""
        for cluster in self._clusters:
            cluster.settle(device)
        self._on_cuda = device.type == "cuda"

    def __call__(self, batches: Tensors) -> dict[str, tuple[torch.Tensor, ...]]:
        """Compute the outputs of the models that have a batch; only their operators run."""
        if self._on_cuda:
            set_backends(PLAIN.chosen(None))  # because its outputs were checked in fp32
        outputs: dict[str, tuple[torch.Tensor, ...]] = {}
        for part in self._parts:
            mine = {name: batches[name] for name in part.signatures if name in batches}
            if mine:
                outputs |= part(mine)
        return outputs

    def padded(self, rows: int) -> int:
        """Return `rows`, as joint batches are not padded: they have too many splits to prepare."""
        return rows

    def warm_up_rows(self) -> Sequence[Mapping[str, int]]:
        """Return joint batches of the planned sizes, evenly split, and a largest batch of every model alone."""
        names = tuple(self.signatures)
        return [even_split(names, size) for size in self._sizes] + [{name: self.largest_batch} for name in names]

    @property
    def notes(self) -> Sequence[str]:
        """Return why models run by themselves, and what to do if all of them do."""
        unmerged = {} if self.report is None else self.report.unmerged
        cure = "" if self.way != "single graphs" else f". {CURE}"
        return [f"{name} runs by itself: {reason}{cure}" for name, reason in unmerged.items()]

    @property
    def way(self) -> str:
        """Return `merged`, `merged in part`, or, if no two models merge, `single graphs`."""
        return "merged" if not self._alone else "merged in part" if self._clusters else "single graphs"

    @property
    def largest_batch(self) -> int:
        """The largest planned joint batch. All its rows may be of one model."""
        return max(self._sizes, default=1)

    @property
    def weights_mib(self) -> float:
        """The weights of all models; common weights count once."""
        return sum(part.weights_mib for part in self._parts)

    def facts(self) -> dict[str, float | int]:
        """Return figures of merging: operators with weights and MiB, before and after, and the largest error. Empty if
        nothing is merged."""
        clusters = () if self.report is None else self.report.clusters
        if not clusters:
            return {}
        return {
            "operators_before": sum(cluster.operators_before for cluster in clusters),
            "operators_after": sum(cluster.operators_after for cluster in clusters),
            "memory_before_mib": sum(cluster.memory_before_mib for cluster in clusters),
            "memory_after_mib": sum(cluster.memory_after_mib for cluster in clusters),
            "worst_error": max(cluster.worst_error for cluster in clusters),
        }


def even_split(names: Sequence[str], size: int) -> dict[str, int]:
    """Return the rows of every member in a joint batch that is split as evenly as possible. Members without rows are
    left out."""
    share, more = divmod(size, len(names))
    rows = {name: share + (place < more) for place, name in enumerate(names)}
    return {name: count for name, count in rows.items() if count}


def check_run_options(name: str, options: RunOptions) -> None:
    """Refuse options that are not possible in a merged program.

    Raises:
        InvalidInputError: the type is not fp32, so that rounding exceeds the tolerance, or an option is for a single
            module.
    """
    problems = [
        Problem(f"options of {name}", f"{key}: {value}", "is not possible for a model that is merged", CURE)
        for key, value in unmergeable_options(options.model_dump(exclude_unset=True)).items()
    ]
    raise_if_any(problems)


def load_joint_network(
    models: Mapping[str, LoadedModel],
    options: Mapping[str, RunOptions],
    batch_sizes: Sequence[int],
    device: torch.device,
) -> MergedNetwork:
    """Merge models, which `build` returned, as far as possible on the CPU, check the outputs, and return their network
    on a device. Models that do not merge run as single graphs.

    Raises:
        InvalidInputError: an option that a merged program refuses, or a model with tensors of bytes.
    """
    for name, run in options.items():
        check_run_options(name, run)
        if models[name].signature.has_bytes:
            raise refused("model", name, "has tensors of bytes, so that it merges with no other", CURE)
    clusters, report = merge_models(models)
    inside = {name for cluster in clusters for name in cluster.signatures}
    plain = PLAIN.chosen(None)
    alone = [LoneModel(name, loaded, device, plain) for name, loaded in models.items() if name not in inside]
    signatures = {name: loaded.signature for name, loaded in models.items()}
    for model in alone:
        signatures |= model.signatures
    network = MergedNetwork(clusters, signatures, batch_sizes, alone=alone, report=report)
    network.settle(device)
    return network
