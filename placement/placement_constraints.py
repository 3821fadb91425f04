"""Where a model may lie: what GPUs are lost together, by which names GPUs are meant, and what a model says of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from tenuto.errors import Problem, refused
from tenuto.placement.cluster import Cluster, Gpu, Placed, node_of
from tenuto.placement.workload import ModelSpec, Workload

ANYWHERE = {"spread": None, "survive": None, "only_on": (), "keep_off": (), "prefer": None}
"""What a model says that may lie anywhere."""


def domain_of(gpu: Placed, kind: str) -> str:
    """Return what is lost together with a GPU: the physical GPU with all its MIG instances, its node, or its rack (a
    node without a rack is one itself). A cluster is one cell."""
    node = node_of(gpu.id)
    return {"gpu": gpu.device, "node": node, "rack": gpu.rack or node, "cell": ""}[kind]


def is_at(gpu: Placed, places: Collection[str]) -> bool:
    """Return whether a GPU or instance, its physical GPU, its node or its rack is among some names."""
    return not {gpu.id, gpu.device, node_of(gpu.id), gpu.rack}.isdisjoint(places)


def names_of(gpus: Iterable[Placed]) -> set[str]:
    """Return the names by which GPUs can be meant: their ids, their nodes and their racks."""
    return {name for gpu in gpus for name in (gpu.id, gpu.device, node_of(gpu.id), gpu.rack) if name is not None}


def may_lie(spec: ModelSpec, gpu: Placed) -> bool:
    """Return whether a model may be on a GPU, by its `only_on` and `keep_off`."""
    return not is_at(gpu, spec.keep_off) and (not spec.only_on or is_at(gpu, spec.only_on))


def prefers(spec: ModelSpec, gpu: Placed) -> bool:
    """Return whether a GPU is where a model would rather be, by its `prefer`."""
    return spec.prefer is not None and is_at(gpu, (spec.prefer,))


def asks(spec: ModelSpec) -> bool:
    """Return whether a model says where its replicas are to lie."""
    return bool(spec.spread or spec.survive or spec.only_on or spec.keep_off)


def without(cluster: Cluster, places: Sequence[str]) -> Cluster:
    """Return what is left of a cluster without some nodes, racks or GPUs.

    Raises:
        InvalidInputError: it has no such place, or nothing is left.
    """
    known = sorted(names_of(cluster.gpus))
    for name in places:
        if name not in known:
            raise refused("node", name, "no such place in the cluster", f"Name one of {', '.join(known[:12])}.")
    gone = tuple(gpu.id for gpu in cluster.gpus if is_at(gpu, places))
    if len(gone) == len(cluster.gpus):
        raise refused(
            "node",
            ", ".join(places),
            "no GPU would be left",
            "Leave one (`tenuto undrain`, where it is drained), or add a node first.",
        )
    return cluster.model_copy(update={"left_out": (*(cluster.left_out or ()), *gone)}) if gone else cluster


def bearable(workload: Workload, gpus: Sequence[Gpu]) -> Workload:
    """Return the part of a workload that the GPUs that are left can obey.

    Left out are places that are gone, `survive` of models that nothing could survive any more, and models that may lie
    on none of these GPUs.
    """
    known = names_of(gpus)
    models = []
    for spec in workload.models:
        allowed = [gpu for gpu in gpus if may_lie(spec, gpu)]
        only_on, keep_off = (tuple(name for name in names if name in known) for names in (spec.only_on, spec.keep_off))
        is_alone = len({domain_of(gpu, spec.spread or "gpu") for gpu in allowed}) < 2
        if allowed:
            prefer = spec.prefer if any(prefers(spec, gpu) for gpu in allowed) else None
            survive = None if is_alone else spec.survive
            update = {"only_on": only_on, "keep_off": keep_off, "survive": survive, "prefer": prefer}
            models.append(spec.model_copy(update=update))
    return workload.model_copy(update={"models": tuple(models)})


def place_problems(workload: Workload, cluster: Cluster) -> Iterator[Problem]:
    """Yield what no plan can obey: unknown places, models that may lie nowhere, and losses that nothing can survive."""
    aside = {name for gpu in cluster.left_out or () for name in (gpu, node_of(gpu))}
    known = names_of(cluster.gpus)
    cure = f"Name nodes, racks or GPU ids: {', '.join(sorted(known)[:12])}."
    for index, spec in enumerate(workload.models):
        at, constraints = f"models.{index}", {"only_on": spec.only_on, "keep_off": spec.keep_off}
        for key, names in constraints.items():
            unknown = [name for name in names if name not in known]
            if unknown:
                yield Problem(f"{at}.{key}", unknown[0], "no such place in the cluster", cure)
        allowed = [gpu for gpu in cluster.gpus if may_lie(spec, gpu)]
        kind = spec.spread or "gpu"
        if cluster.elastic and (kind != "gpu" or spec.only_on or spec.keep_off):
            constraints = ({"spread": (kind,)} if kind != "gpu" else {}) | constraints
            key, value = next((key, value) for key, value in constraints.items() if value)
            rule = "an elastic cluster does not say on which node a GPU will be"
            shown = kind if key == "spread" else value
            yield Problem(f"{at}.{key}", shown, rule, "Plan on a fixed cluster, or use spread: gpu.")
        elif not allowed:
            key = "keep_off" if spec.keep_off else "only_on"
            if known.issuperset((*spec.only_on, *spec.keep_off)):
                yield Problem(f"{at}.{key}", constraints[key], "leaves the model no GPU", "Allow it another one.")
        elif cluster.elastic:
            continue
        elif spec.prefer is not None and spec.prefer not in known | aside:
            yield Problem(f"{at}.prefer", spec.prefer, "no such place in the cluster", cure)
        elif spec.prefer in known and not any(prefers(spec, gpu) for gpu in allowed):
            rule = "is where the model must not lie, by its only_on and keep_off"
            yield Problem(f"{at}.prefer", spec.prefer, rule, "Leave one of them out.")
        elif spec.survive is not None and len({domain_of(gpu, kind) for gpu in allowed}) < 2:
            rule = f"the model may use one {kind} only, and nothing survives its loss"
            yield Problem(f"{at}.survive", spec.survive, rule, f"Give the cluster a second {kind}.")
