"""Which values of a cluster's models are one value in a joint batch, and the weights of all.

Every value has a key that says how it is computed from the inputs and the weights. Values of different models with the
same key are one value of a joint batch, which has the models' batches one after another. Imports torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from tenuto.profiles.networks.merging.capture import CapturedModel, static_size
from tenuto.profiles.networks.merging.matching import SharedOperator, WeightedOperator, matrix

Key = Hashable


class WeightStore:
    """Tensors of a merged cluster by name. Invariant: no two tensors from `add` are equal in type, shape and value."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._alike: dict[tuple[object, ...], list[str]] = {}
        self.device = torch.device("cpu")

    def hold(self, name: str, tensor: torch.Tensor) -> str:
        """Keep a tensor under a new name and return the name."""
        plain = "".join(c if c.isalnum() else "_" for c in name)
        while plain in self.tensors:
            plain += "_"
        self.tensors[plain] = tensor
        self.device = tensor.device
        return plain

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Keep a tensor, or find an equal one that is there already; return its name."""
        mark = (tuple(tensor.shape), tensor.dtype, tensor.double().sum().item())
        for known in self._alike.setdefault(mark, []):
            if torch.equal(self.tensors[known], tensor):
                return known
        plain = self.hold(name, tensor)
        self._alike[mark].append(plain)
        return plain

    @property
    def size_mib(self) -> float:
        """All tensors, in MiB."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values()) / 2**20


class MergePlan:
    """The keys of all values of a cluster's models, and their weights. Programs are built from it."""

    def __init__(self, models: Sequence[CapturedModel], shared: Sequence[SharedOperator]) -> None:
        """Give every value its key, and put the weights into the store; equal weights are kept once."""
        self.models = {model.name: model for model in models}
        self.tags = {model.name: f"m{index}" for index, model in enumerate(models)}  # names fit for attributes
        self.store = WeightStore()
        self.shared_of = {member.node: group for group in shared for member in group.members.values()}
        self.keys: dict[fx.Node, Key] = {}
        self.members: dict[Key, dict[str, fx.Node]] = {}
        for group in shared:
            self._store_group(group)
        for model in models:
            self._key_all(model)

    def _store_group(self, group: SharedOperator) -> None:
        """Cut a group's weights into the shared submatrix and the rest of every member. Whole weights are not cut."""
        first = next(iter(group.members.values()))
        name = self.name_of(group)
        if group.is_whole:
            for member in group.members.values():
                weights = self.models[member.model].weights
                weights[member.weight] = self.models[first.model].weights[first.weight]
            return
        rows, columns = group.places(first.model)
        weight = matrix(self.models[first.model], first)
        self.store.hold(name, weight[rows][:, columns].contiguous())
        for member in group.members.values():
            own = matrix(self.models[member.model], member)
            rows, columns = group.places(member.model)
            other_rows, other_columns = others(rows, own.shape[0]), others(columns, own.shape[1])
            if other_columns:
                self.store.hold(f"{name}_columns_{self.tags[member.model]}", own[rows][:, other_columns].contiguous())
            if other_rows:
                self.store.hold(f"{name}_rows_{self.tags[member.model]}", own[other_rows].contiguous())
            if member.bias is not None:
                bias = self.models[member.model].weights[member.bias]
                self.store.hold(f"{name}_bias_{self.tags[member.model]}", torch.cat([bias[rows], bias[other_rows]]))

    def name_of(self, group: SharedOperator) -> str:
        """Return the name of a group's shared weights."""
        first = next(iter(group.members.values()))
        return f"shared_{self.tags[first.model]}_{first.node.name}"

    def _key_all(self, model: CapturedModel) -> None:
        for index, node in enumerate(model.inputs):
            value = node.meta["val"]
            joinable = model.facts[node].joinable
            shape = tuple(s if isinstance(s, int) else "batch" for s in value.shape)
            self._assign(model, node, ("input", index, shape, value.dtype, None if joinable else model.name))
        needed = {arg for node in model.operators if not self._is_cut(node) for arg in node.all_input_nodes}
        needed |= {self.shared_of[node].members[model.name].input for node in model.operators if self._is_cut(node)}
        for node, weight in model.weights.items():
            if node in needed:
                self.keys[node] = ("weight", self.store.add(f"{self.tags[model.name]}_{node.name}", weight))
        for node in model.operators:
            self._assign(model, node, self._key(model, node))

    def _is_cut(self, node: fx.Node) -> bool:
        group = self.shared_of.get(node)
        return group is not None and not group.is_whole

    def _assign(self, model: CapturedModel, node: fx.Node, key: Key) -> None:
        self.keys[node] = key
        self.members.setdefault(key, {}).setdefault(model.name, node)

    def _key(self, model: CapturedModel, node: fx.Node) -> Key:
        facts = model.facts[node]
        group = self.shared_of.get(node)
        if group is not None:
            first = next(iter(group.members.values()))
            if self.joins(group):
                return ("shared", first.model, first.node.name)
            return ("part", model.name, node.name)
        owner = None if facts.joinable else model.name
        return ("call", str(node.target), self._static(node.args), self._static(node.kwargs), owner)

    @staticmethod
    def joins(group: SharedOperator) -> bool:
        """Return whether the inputs and results of all members have the same size, so that the results are one
        value."""
        return len({(matrix_shape(member)[0], member.outline) for member in group.members.values()}) == 1

    def _static(self, argument: Any) -> Key:
        """Return an argument in a form that can be compared; for a size, that is how it depends on the batch."""
        if isinstance(argument, fx.Node):
            value = argument.meta["val"]
            if isinstance(value, torch.SymInt):
                size = static_size(value)
                return ("size", size) if size is not None and 0 in size else ("own size", argument)
            return self.keys[argument]
        if isinstance(argument, (list, tuple)):
            return tuple(self._static(item) for item in argument)
        if isinstance(argument, dict):
            return tuple((name, self._static(item)) for name, item in sorted(argument.items()))
        if isinstance(argument, slice):
            return ("slice", self._static([argument.start, argument.stop, argument.step]))
        return (type(argument).__name__, str(argument) if isinstance(argument, float) else argument)


def others(some: Sequence[int], count: int) -> list[int]:
    """Return the indices below `count` that are not among some."""
    taken = set(some)
    return [index for index in range(count) if index not in taken]


def matrix_shape(item: WeightedOperator) -> tuple[int, int]:
    """Return an operator's output and input features."""
    shape = item.weight.meta["val"].shape
    return (int(shape[1]), int(shape[0])) if item.transposed else (int(shape[0]), int(shape[1]))
