"""`tenuto partition`: split the models of a workload into sub-clusters, each with its own dispatcher and GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import click

from tenuto.cli.common import (
    ClusterArguments,
    NumberRange,
    cluster_arguments,
    json_option,
    notice,
    printed_as_json,
    say,
)
from tenuto.cli.tables import number, print_table
from tenuto.deployments.serve.sub_clusters import read_partition
from tenuto.errors import Problem, one_of, raise_if_any, refused
from tenuto.placement import Cluster, Workload
from tenuto.placement.costs import MOST_BATCH, context_mib_of, costs_of
from tenuto.placement.policies.symphony.partition import (
    Partition,
    PartitionLimits,
    PartitionModel,
    gpus_by_need,
    partition,
)
from tenuto.placement.policies.symphony.staggering import StaggeredModel
from tenuto.profiles import Profiles


@click.command("partition", short_help="Split models into sub-clusters with a dispatcher each.")
@click.argument("source", metavar="WORKLOAD")
@cluster_arguments
@click.option("--subclusters", type=click.IntRange(1), required=True, metavar="K", help="Number of sub-clusters.")
@click.option(
    "--current",
    "current_file",
    metavar="FILE",
    help="Present partition: output of `tenuto partition --json`, or a mapping of model to sub-cluster.",
)
@click.option(
    "--time-limit-s",
    type=NumberRange(0),
    default=math.inf,
    help="Time limit of the solver; with one, two runs may differ.",
)
@click.option("--max-rate-rps", type=NumberRange(0), help="A sub-cluster gets at most this many requests per second.")
@click.option("--max-models", type=click.IntRange(1), help="A sub-cluster gets at most this many models.")
@click.option(
    "--max-moved-mib",
    type=NumberRange(0),
    help="Change --current by at most this much memory, loaded and unloaded together.",
)
@click.option(
    "--memory-weight",
    type=NumberRange(0),
    default=PartitionLimits().memory_weight,
    help="How much even memory counts compared to even rates.",
)
@json_option
def command(
    source: str,
    where: ClusterArguments,
    subclusters: int,
    current_file: str | None,
    time_limit_s: float,
    max_rate_rps: float | None,
    max_models: int | None,
    max_moved_mib: float | None,
    memory_weight: float,
) -> None:
    """Split the models of WORKLOAD into K sub-clusters of even rate and memory (Symphony, appendix A), and the GPUs
    by what these need.

    Every GPU of a sub-cluster holds all of its models, so that their memory must fit into one GPU. A model that no GPU
    can serve is named with the reason, and the others are split.

    Example: tenuto partition workload.yaml --gpus v100:16 --subclusters 2
    """
    workload = Workload.load(source)
    if not workload.models:
        raise refused(f"{source}: models", [], "the workload has no models", "Add at least one.")
    cluster = where.cluster()
    if len(cluster.gpu_types) != 1:
        raise refused(
            "--gpus",
            ",".join(cluster.gpu_types),
            "a partition is made for GPUs of one type",
            "Partition the models of each type by themselves.",
        )
    profiles = where.profiles(cluster.gpu_types)
    kind = cluster.gpu_types[0]
    context_mib = context_mib_of(kind, profiles)
    models, impossible = _models(workload, cluster, profiles, context_mib, max(1, subclusters), max_rate_rps)
    limits = PartitionLimits(
        cluster.one_of_each[kind].memory_mib - context_mib, max_rate_rps, max_models, max_moved_mib, memory_weight
    )
    current = None if current_file is None else read_partition(current_file)
    raise_if_any(partition_problems(models, subclusters, limits, current or {}, time_limit_s))
    found = partition(models, subclusters, limits=limits, current=current, time_limit_s=time_limit_s)
    if not found.proven:
        notice(
            f"time limit reached: nothing better than {found.lower_bound:.4f} can exist; found {found.objective:.4f}"
        )
    data = _described(found, len(cluster.gpus)) | {"unserved": {p.value: p.rule for p in impossible}}
    if not printed_as_json(data):
        _print(data, found, impossible)


def _models(
    workload: Workload,
    cluster: Cluster,
    profiles: Profiles,
    context_mib: float,
    subclusters: int,
    max_rate_rps: float | None,
) -> tuple[list[PartitionModel], list[Problem]]:
    """Return what each model needs at the staggered batch of its sub-cluster's share of the GPUs, and why models can be
    in none.

    Raises:
        InvalidInputError: models without a profile, or none that can be in a sub-cluster.
    """
    kind, each = cluster.gpu_types[0], max(1, len(cluster.gpus) // subclusters)
    found: list[PartitionModel] = []
    problems: list[Problem] = []
    impossible: list[Problem] = []
    for index, (spec, by_type) in enumerate(
        zip(workload.models, costs_of(workload, cluster, profiles).values(), strict=True)
    ):
        if kind not in by_type:
            cure = one_of(spec.profile_row, sorted(profiles.for_type(kind)))
            rule = f"no profile of '{spec.profile_row}' on GPU type '{kind}'"
            problems.append(Problem(f"models.{index}.profile", spec.profile_row, rule, cure))
            continue
        staggered = StaggeredModel(by_type[kind], MOST_BATCH, context_mib)
        if staggered.why_not:
            cure = "raise its SLO" if staggered.is_late else "use GPUs with more memory"
            impossible.append(Problem(f"models.{index}", spec.name, staggered.why_not, f"Leave it out, or {cure}."))
        elif max_rate_rps is not None and spec.rate_rps > max_rate_rps:
            rule = f"its {spec.rate_rps:g} r/s alone are above the {max_rate_rps:g} of a sub-cluster"
            cure = "Raise the limit, or list the model twice with half the rate each."
            impossible.append(Problem(f"models.{index}", spec.name, rule, cure))
        else:
            found.append(staggered.entry(each))
    raise_if_any(problems if found else [*problems, *impossible])
    return found, impossible


def _imbalance(assignment: Mapping[str, int], rates_rps: Mapping[str, float]) -> float:
    """Return (most - least) / mean of the sub-clusters' rates."""
    sums: dict[int, float] = {}
    for name, place in assignment.items():
        sums[place] = sums.get(place, 0.0) + rates_rps.get(name, 0.0)
    mean = sum(sums.values()) / len(sums) if sums else 0.0
    return (max(sums.values()) - min(sums.values())) / mean if mean else 0.0


def partition_problems(
    models: Sequence[PartitionModel],
    subclusters: int,
    limits: PartitionLimits,
    current: Mapping[str, int],
    time_limit_s: float,
) -> list[Problem]:
    """Return what a partition cannot be made of."""
    found = []
    if not 1 <= subclusters <= len(models):
        rule = f"must be from 1 to the number of models ({len(models)})"
        found.append(Problem("--subclusters", subclusters, rule, "Give fewer sub-clusters or more models."))
    for model in models:
        for key, least in (("need_gpus", 1e-12), ("rate_rps", 1e-12), ("static_mib", 0.0), ("dynamic_mib", 0.0)):
            value = getattr(model, key)
            if not (math.isfinite(value) and value >= least):
                found.append(Problem(f"{model.name}.{key}", value, "must be a finite positive number", "Correct it."))
        held_mib = model.static_mib + model.dynamic_mib
        if limits.memory_mib is not None and held_mib > limits.memory_mib:
            rule, cure = f"more than the {limits.memory_mib:g} MiB of a GPU", "Use a GPU type with more memory."
            found.append(Problem(f"{model.name}.memory_mib", held_mib, rule, cure))
        if limits.max_rate_rps is not None and model.rate_rps > limits.max_rate_rps:
            rule = f"alone above the {limits.max_rate_rps:g} r/s one sub-cluster may have"
            cure = "Raise the limit, or list the model twice with half the rate each."
            found.append(Problem(f"{model.name}.rate_rps", model.rate_rps, rule, cure))
    names = {model.name for model in models}
    for name, k in current.items():
        if name in names and not 0 <= k < subclusters:
            rule = f"there are sub-clusters 0 to {subclusters - 1}"
            cure = "Leave the model out of the current partition, or use more sub-clusters."
            found.append(Problem(f"current.{name}", k, rule, cure))
    for key in ("memory_mib", "max_rate_rps", "max_models"):
        value = getattr(limits, key)
        if value is not None and not value > 0:
            found.append(Problem(key, value, "must be positive", "Leave it out for no limit."))
    if limits.max_change_mib is not None and not limits.max_change_mib >= 0:
        found.append(Problem("max_change_mib", limits.max_change_mib, "must be at least 0", "0 moves nothing."))
    if not (math.isfinite(limits.memory_weight) and limits.memory_weight >= 0):
        found.append(Problem("memory_weight", limits.memory_weight, "must be at least 0", "Leave it at 1."))
    if not time_limit_s >= 0:
        found.append(Problem("--time-limit-s", time_limit_s, "must be a number of seconds, at least 0", "Try 10."))
    return found


def members_of(found: Partition, subcluster: int) -> list[PartitionModel]:
    """Return the models of one sub-cluster."""
    return [model for model in found.models if found.assignment[model.name] == subcluster]


def gpus_of(found: Partition, total: int) -> list[int]:
    """Share out GPUs by what sub-clusters need; one without models gets none.

    Raises:
        InvalidInputError: there are fewer GPUs than sub-clusters.
    """
    needs = [sum(model.need_gpus for model in members_of(found, k)) for k in range(found.subclusters)]
    used = [k for k in range(found.subclusters) if members_of(found, k)]
    if total < len(used):
        rule = f"{len(used)} sub-clusters need at least one GPU each"
        raise refused("--gpus", total, rule, "Use fewer sub-clusters.")
    counts = [0] * found.subclusters
    for k, count in zip(used, gpus_by_need([needs[k] for k in used], total), strict=True):
        counts[k] = count
    return counts


def _described(found: Partition, total_gpus: int) -> dict[str, Any]:
    """Return a partition as JSON data. A later run can take the file as --current."""
    groups = [members_of(found, k) for k in range(found.subclusters)]
    return {
        "subclusters": [
            {
                "index": k,
                "gpus": gpus,
                "models": [m.name for m in members],
                "rate_rps": sum(m.rate_rps for m in members),
                "need_gpus": sum(m.need_gpus for m in members),
                "memory_mib": sum(m.static_mib for m in members) + max((m.dynamic_mib for m in members), default=0),
                "static_mib": sum(m.static_mib for m in members),
            }
            for k, (members, gpus) in enumerate(zip(groups, gpus_of(found, total_gpus), strict=True))
        ],
        "assignment": dict(found.assignment),
        "objective": found.objective,
        "imbalance": _imbalance(found.assignment, {m.name: m.rate_rps for m in found.models}),
        "memory_imbalance": _imbalance(found.assignment, {m.name: m.static_mib for m in found.models}),
        "lower_bound": found.lower_bound,
        "moved": list(found.moved),
        "moved_mib": sum(m.static_mib for m in found.models if m.name in set(found.moved)),
        "changed_mib": found.changed_mib,
        "proven": found.proven,
    }


def _print(data: dict[str, Any], found: Partition, impossible: Sequence[Problem]) -> None:
    print_table(
        ("sub-cluster", "GPUs", "need", "rps", "MiB per GPU", "models"),
        (
            (
                str(row["index"]),
                str(row["gpus"]),
                number(row["need_gpus"], 2),
                number(row["rate_rps"]),
                number(row["memory_mib"], 0),
                ", ".join(row["models"]),
            )
            for row in data["subclusters"]
        ),
        left=("models",),
    )
    for problem in impossible:
        say(f"unserved: {problem.value}: {problem.rule}. {problem.cure}")
    moved = "moves nothing"
    if found.moved:
        moved = f"moves {', '.join(found.moved)} ({found.changed_mib:,.0f} MiB loaded and unloaded)"
    proof = "optimal" if found.proven else f"at most {found.objective - found.lower_bound:.4f} above the optimum"
    say(
        f"rates {100 * data['imbalance']:.2f} % and memory {100 * data['memory_imbalance']:.2f} % of an average "
        f"sub-cluster apart, {moved}; {proof}"
    )
