"""Which values of a cluster's models are one value in a joint batch, and the weights of all.

Every value has a key that says how it is computed from the inputs and the weights. Values of different models with the
same key are one value of a joint batch, which has the models' batches one after another. Imports torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from tenuto.profiles.networks.merging.capture import CapturedModel, static_size

Key = Hashable


class WeightStore:
    """Tensors of a merged cluster by name. Invariant: no two of them are equal in type, shape and value."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._alike: dict[tuple[object, ...], list[str]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Keep a tensor, or find an equal one that is there already; return its name."""
        mark = (tuple(tensor.shape), tensor.dtype, tensor.double().sum().item())
        for known in self._alike.setdefault(mark, []):
            if torch.equal(self.tensors[known], tensor):
                return known
        self.tensors[name] = tensor
        self._alike[mark].append(name)
        return name

    @property
    def size_mib(self) -> float:
        """All tensors, in MiB."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values()) / 2**20


class MergePlan:
    """The keys of all values of a cluster's models, and their weights. Programs are built from it.

    An operator with a weight (`CapturedModel.weighted_input`) has a key of its kind, depth, weights and settings and of
    its input's size: its models' batches run through it together, whatever was computed before. Any other operator
    runs together where all that it takes is the same.
    """

    def __init__(self, models: Sequence[CapturedModel]) -> None:
        """Give every value its key, and put the weights into the store; equal weights are kept once."""
        self.models = {model.name: model for model in models}
        self.tags = {model.name: f"m{index}" for index, model in enumerate(models)}  # names fit for attributes
        self.store = WeightStore()
        self.keys: dict[fx.Node, Key] = {}
        self.members: dict[Key, dict[str, fx.Node]] = {}
        self.weighted: dict[Key, dict[str, fx.Node]] = {}
        for model in models:
            self._key_all(model)

    @property
    def shared(self) -> Iterator[dict[str, fx.Node]]:
        """The operators with weights that several models run together: the node in each of these models."""
        return (members for members in self.weighted.values() if len(members) > 1)

    def _key_all(self, model: CapturedModel) -> None:
        for index, node in enumerate(model.inputs):
            value = node.meta["val"]
            joinable = model.facts[node].joinable
            shape = tuple(s if isinstance(s, int) else "batch" for s in value.shape)
            self._assign(model, node, ("input", index, shape, value.dtype, None if joinable else model.name))
        needed = {arg for node in model.operators for arg in node.all_input_nodes}
        for node, weight in model.weights.items():
            if node in needed:
                self.keys[node] = ("weight", self.store.add(f"{self.tags[model.name]}_{node.name}", weight))
        for node in model.operators:
            key = self._weighted_key(model, node)
            if key is not None and model.name not in self.members.get(key, ()):
                self._assign(model, node, key)
                self.weighted[key] = self.members[key]
            else:
                owner = None if model.facts[node].joinable else model.name
                args, named = self._static(node.args), self._static(node.kwargs)
                self._assign(model, node, ("call", str(node.target), args, named, owner))

    def _weighted_key(self, model: CapturedModel, node: fx.Node) -> Key | None:
        given = model.weighted_input(node)
        if given is None:
            return None
        sizes = tuple(static_size(size) for size in given.meta["val"].shape)
        args = tuple(None if arg is given else self._static(arg) for arg in node.args)
        return ("operator", str(node.target), model.facts[node].depth, sizes, args)

    def _assign(self, model: CapturedModel, node: fx.Node, key: Key) -> None:
        self.keys[node] = key
        self.members.setdefault(key, {}).setdefault(model.name, node)

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
