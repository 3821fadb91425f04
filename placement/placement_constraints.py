"""Where a model may lie: what GPUs are lost together, by which names GPUs are meant, and what a model says of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tenuto.placement.cluster import Placed, node_of
from tenuto.placement.workload import ModelSpec

ANYWHERE = {"spread": None, "survive": None, "only_on": (), "keep_off": (), "prefer": None}
"""What a model says that may lie anywhere."""


def domain_of(gpu: Placed, kind: str) -> str:
    """Return what is lost together with a GPU: the physical GPU with all its MIG instances, its node, or its rack (a
    node without a rack is one itself)."""
    node = node_of(gpu.id)
    return {"gpu": gpu.device, "node": node, "rack": gpu.rack or node}[kind]


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
