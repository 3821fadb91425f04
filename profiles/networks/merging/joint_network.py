"""Several models as one program, which a `ProgramRunner` runs in the same way as a lone model. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tenuto.errors import Problem, raise_if_any, refused
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature
from tenuto.profiles.networks.merging.merge import MergedModels, merge_models
from tenuto.profiles.networks.merging.report import MergeReport
from tenuto.profiles.networks.model_options import PLAIN, RunOptions, unmergeable_options
from tenuto.profiles.networks.network import LoneModel, Tensors, set_backends

CURE = "Remove the group from `merge` of the plan (or the workload); the models are then served one by one."


@dataclass(frozen=True)
class Merged:
    """The result of merging models: programs of clusters, the report, and the signatures of all models."""

    clusters: tuple[MergedModels, ...]
    report: MergeReport
    signatures: Mapping[str, ModelSignature]

    @classmethod
    def of(cls, models: Mapping[str, LoadedModel]) -> Merged:
        """Merge two or more models, which `build` returned, as far as possible on the CPU, and check the outputs.

        Raises:
            InvalidInputError: no two of the models merge within the tolerance; the cure is to serve them one by one.
        """
        merged, report = merge_models({member: (loaded.module, loaded.signature) for member, loaded in models.items()})
        if not merged:
            reasons = "; ".join(f"{member}: {reason}" for member, reason in report.unmerged.items())
            raise refused("merge", "+".join(models), f"cannot run as one program ({reasons})", CURE)
        return cls(tuple(merged), report, {name: loaded.signature for name, loaded in models.items()})


class MergedNetwork:
    """The program of several models. It takes joint batches of any of them, and runs merged and single graphs in turn.

    Single graphs are on their device already; `settle` moves merged ones there.
    """

    def __init__(
        self,
        parts: Sequence[MergedModels | LoneModel],
        signatures: Mapping[str, ModelSignature],
        batch_sizes: Sequence[int] = (),
        report: MergeReport | None = None,
    ) -> None:
        """Take the graphs, each of a cluster of models or of one model; the signatures of all models in order; the
        sizes of planned joint batches; and the report of merging."""
        self.signatures = signatures
        self.report = report
        self._parts = [(_names(part), part) for part in parts]
        self._sizes = tuple(sorted(batch_sizes))
        self._on_cuda = False

    def settle(self, device: torch.device) -> None:
        """Move the weights to the device and drop the originals."""
        for _, part in self._parts:
            if isinstance(part, MergedModels):
                part.settle(device)
        self._on_cuda = device.type == "cuda"

    def __call__(self, batches: Tensors) -> dict[str, tuple[torch.Tensor, ...]]:
        """Compute the outputs of the models that have a batch; only their operators run."""
        if self._on_cuda:
            set_backends(PLAIN.chosen(None))  # because its outputs were checked in fp32
        outputs: dict[str, tuple[torch.Tensor, ...]] = {}
        for names, part in self._parts:
            mine = {name: batches[name] for name in names if name in batches}
            if mine:
                outputs |= part.run(mine) if isinstance(part, MergedModels) else part(mine)
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
        """Return why some models run by themselves although others are merged."""
        unmerged = {} if self.report is None else self.report.unmerged
        return [f"{name} runs by itself: {reason}" for name, reason in unmerged.items()]

    @property
    def way(self) -> str:
        """Return `merged`, `merged in part`, or, as long as nothing is merged, `single graphs`."""
        lone = [part for _, part in self._parts if isinstance(part, LoneModel)]
        return "merged" if not lone else "single graphs" if len(lone) == len(self.signatures) else "merged in part"

    @property
    def largest_batch(self) -> int:
        """The largest planned joint batch. All its rows may be of one model."""
        return max(self._sizes, default=1)

    @property
    def weights_mib(self) -> float:
        """The weights of all models; common weights count once."""
        return sum(part.weights_mib for _, part in self._parts)

    def facts(self) -> dict[str, float | int]:
        """Return figures of merging: operators with weights and MiB, before and after, and the largest error. Empty
        while nothing is merged."""
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


def _names(part: MergedModels | LoneModel) -> tuple[str, ...]:
    return part.names if isinstance(part, MergedModels) else tuple(part.signatures)


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


def write_joint_network(members: Mapping[str, Callable[[], LoadedModel]], file: str) -> None:
    """Merge models, each of which is built by a function, on the CPU; write the result for `load_joint_network`.

    Raises:
        InvalidInputError: no two of the models merge, or one cannot be built.
    """
    merged = Merged.of({name: _built_to_merge(name, build) for name, build in members.items()})
    for cluster in merged.clusters:
        cluster.settle("cpu")
    torch.save(merged, file)


def load_joint_network(
    members: Mapping[str, Callable[[], LoadedModel]],
    options: Mapping[str, RunOptions],
    batch_sizes: Sequence[int],
    device: torch.device,
    file: str | None,
) -> MergedNetwork:
    """Return the network of several models on a device: merged as the file of `write_joint_network` says, the others,
    or without a file all, as single graphs.

    Raises:
        InvalidInputError: an option that a merged program refuses, or a model that cannot be built.
    """
    for name, run in options.items():
        check_run_options(name, run)
    # A process of ours wrote this file from the members of the plan, so it is as trusted as their sources.
    merged: Merged | None = None if file is None else torch.load(file, weights_only=False)
    clusters = () if merged is None else merged.clusters
    inside = {name for cluster in clusters for name in cluster.names}
    alone = [
        LoneModel(name, _built_to_merge(name, build), device, PLAIN.chosen(None))
        for name, build in members.items()
        if name not in inside
    ]
    signatures = {name: signature for each in alone for name, signature in each.signatures.items()}
    signatures |= {} if merged is None else merged.signatures
    ordered = {name: signatures[name] for name in members}
    network = MergedNetwork([*clusters, *alone], ordered, batch_sizes, None if merged is None else merged.report)
    network.settle(device)
    return network


def _built_to_merge(name: str, build: Callable[[], LoadedModel]) -> LoadedModel:
    """Return a model that is to run as one with others; raises `InvalidInputError` for one that cannot."""
    loaded = build()
    if loaded.signature.has_bytes:
        raise refused("model", name, "has tensors of bytes, so that it merges with no other", CURE)
    if not loaded.signature.is_plain:
        raise refused("model", name, "has no fixed shapes with a batch in front, so that it merges with no other", CURE)
    return loaded
