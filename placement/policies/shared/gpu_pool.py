"""The GPUs a policy may open, in order: those of a fixed cluster, or as many as needed of an elastic one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.plan import Gpulet, PlannedGpu, Replica

__all__ = ["GpuPool", "gpulet_id", "planned_gpus"]


class GpuPool:
    """Hands out GPUs one by one. On an elastic cluster it never runs dry: further GPUs of a type continue the numbering
    of the first node that has the type, after the node's last GPU.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.elastic = cluster.elastic
        self._free = list(cluster.gpus)
        self._types = {gpu.type: gpu for gpu in reversed(cluster.gpus)}
        self._next_index = {node.name: sum(group.count for group in node.gpus) for node in cluster.nodes}

    @property
    def types(self) -> dict[str, Gpu]:
        """One GPU of every type, for its memory and price."""
        return dict(self._types)

    def free(self, gpu_type: str | None = None) -> tuple[Gpu, ...]:
        """Return the GPUs of the cluster that are not handed out yet, in file order."""
        return tuple(gpu for gpu in self._free if gpu_type is None or gpu.type == gpu_type)

    def has(self, gpu_type: str) -> bool:
        """Say whether `take` of this type will succeed."""
        return bool(self.free(gpu_type)) or (self.elastic and gpu_type in self._types)

    def take(self, gpu_type: str) -> Gpu | None:
        """Hand out the next GPU of a type, or None when a fixed cluster has no more."""
        for position, gpu in enumerate(self._free):
            if gpu.type == gpu_type:
                return self._free.pop(position)
        if not self.elastic or gpu_type not in self._types:
            return None
        model = self._types[gpu_type]
        node = model.id.rsplit("/", 1)[0]
        index = self._next_index[node]
        self._next_index[node] = index + 1
        return model.model_copy(update={"id": f"{node}/{index}", "uuid": None})


def gpulet_id(gpu_id: str, index: int) -> str:
    """Return the id of the index-th gpu-let of a GPU: a, b, …, z, aa, ab, …"""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return f"{gpu_id}/{letters}"


def planned_gpus(cluster: Cluster, used: Iterable[Gpu]) -> tuple[PlannedGpu, ...]:
    """Return the plan's GPUs: all of a fixed cluster (idle ones are part of the answer), the used ones if elastic."""
    gpus: Sequence[Gpu] = list(used) if cluster.elastic else cluster.gpus
    unique = {gpu.id: PlannedGpu(id=gpu.id, type=gpu.type, uuid=gpu.uuid) for gpu in gpus}
    return tuple(unique.values())


def one_model_gpulets(gpu_id: str, replicas: Iterable[tuple[float | None, Replica]]) -> tuple[Gpulet, ...]:
    """Return one gpu-let per (share in percent, replica) of a GPU."""
    return tuple(
        Gpulet(id=gpulet_id(gpu_id, index), gpu=gpu_id, share_pct=share, models=(replica,))
        for index, (share, replica) in enumerate(replicas)
    )
