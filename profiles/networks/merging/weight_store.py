"""The tensors of a merged cluster, equal ones held once. Imports torch."""

from __future__ import annotations

import torch

__all__ = ["WeightStore"]


class WeightStore:
    """Tensors by name. Invariant: no two tensors added with `add` are equal in shape, type and every bit of value."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._alike: dict[tuple[object, ...], list[str]] = {}
        self.device = torch.device("cpu")

    def put(self, name: str, tensor: torch.Tensor) -> str:
        """Hold a tensor under a name of its own and return the name."""
        plain = "".join(c if c.isalnum() else "_" for c in name)
        while plain in self.tensors:
            plain += "_"
        self.tensors[plain] = tensor
        self.device = tensor.device
        return plain

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Hold a tensor, or find the equal one that is held already; return its name."""
        mark = (tuple(tensor.shape), tensor.dtype, tensor.double().sum().item())
        for known in self._alike.setdefault(mark, []):
            if torch.equal(self.tensors[known], tensor):
                return known
        plain = self.put(name, tensor)
        self._alike[mark].append(plain)
        return plain

    @property
    def size_mib(self) -> float:
        """All tensors, in MiB."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values()) / 2**20
