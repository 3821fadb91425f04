"""The GPUs a policy may open, in order: those of a fixed cluster, or as many as needed of an elastic one."""

from __future__ import annotations

import math
from collections import Counter, deque

from tenuto.placement.cluster import Cluster, Gpu, node_of


class GpuPool:
    """Hands out GPUs one by one. On an elastic cluster there are always more; they continue the numbering of the first
    node with the type."""

    def __init__(self, cluster: Cluster, *, managed_only: bool = False) -> None:
        """`managed_only`: only GPUs that plans may cut (`mig: managed`)."""
        self.elastic = cluster.elastic
        self.prices = cluster.prices
        self._free: dict[str, deque[Gpu]] = {}
        for gpu in cluster.gpus:
            if gpu.mig == "managed" or not managed_only:
                self._free.setdefault(gpu.type, deque()).append(gpu)
        self.types = {kind: gpus[0] for kind, gpus in self._free.items()}
        self._named = {*(cluster.left_out or ()), *(gpu.id for gpu in cluster.gpus)}
        self._next_index: Counter[str] = Counter()

    def left(self, gpu_type: str) -> float:
        """Return how many more GPUs of a type can be taken; inf on an elastic cluster."""
        if self.elastic and gpu_type in self.types:
            return math.inf
        return len(self._free.get(gpu_type, ()))

    def next_gpu(self, gpu_type: str) -> Gpu | None:
        """Hand out the next GPU of a type, or None when a fixed cluster has no more."""
        if self._free.get(gpu_type):
            return self._free[gpu_type].popleft()
        if not self.elastic or gpu_type not in self.types:
            return None
        return self._bought(gpu_type)

    def named_gpu(self, gpu_id: str, gpu_type: str) -> Gpu | None:
        """Hand out a GPU that another plan named, or None when there is no such GPU. On an elastic cluster a plan may
        have given the id of a GPU to one of another type; nobody else gets that id then."""
        named = next((gpu for free in self._free.values() for gpu in free if gpu.id == gpu_id), None)
        if named is not None and (self.elastic or named.type == gpu_type):
            self._free[named.type].remove(named)
            if named.type == gpu_type:
                return named
        if not self.elastic or gpu_type not in self.types:
            return None
        self._named.add(gpu_id)
        return self.types[gpu_type].model_copy(update={"id": gpu_id, "uuid": None})

    def _bought(self, gpu_type: str) -> Gpu:
        model = self.types[gpu_type]
        node = node_of(model.id)
        while True:
            index = self._next_index[node]
            self._next_index[node] = index + 1
            if f"{node}/{index}" not in self._named:
                return model.model_copy(update={"id": f"{node}/{index}", "uuid": None})
