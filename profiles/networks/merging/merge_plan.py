"""Which values of a cluster's models are one value in a joint batch, and the weights of all.

Every value has a key that says how it is computed from the inputs and the weights. Values of different models with the
same key are one value of a joint batch, which has the models' batches one after another. An operator with weights has
the same key as another model's of the same depth and weights, even when their inputs differ: it runs on both. Imports
torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from tenuto.profiles.networks.merging.capture import CapturedModel, static_size

Key = Hashable

aten = torch.ops.aten
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


class WeightedOperator(NamedTuple):
    """The nodes of the input and the weight matrix of a linear operator or a convolution."""

    input: fx.Node
    weight: fx.Node


def weighted(model: CapturedModel, node: fx.Node) -> WeightedOperator | None:
    """Return a node as an operator with a weight matrix; None for other nodes, and if a weight is computed."""
    if node.target == aten.linear.default or node.target in _CONVOLUTIONS:
        given, weight = node.args[0], node.args[1]
    elif node.target == aten.addmm.default:
        given, weight = node.args[1], node.args[2]
    else:
        return None
    if node.kwargs or not isinstance(given, fx.Node) or not isinstance(weight, fx.Node):
        return None
    if given in model.weights or any(arg not in model.weights for arg in node.all_input_nodes if arg is not given):
        return None
    return WeightedOperator(given, weight)


def _joins(model: CapturedModel, node: fx.Node, given: fx.Node) -> bool:
    """Return whether batches of several models can run through a weighted operator: the batch is in a known dimension,
    and not in the features'."""
    before, after = model.facts[given], model.facts[node]
    features = 1 if node.target in _CONVOLUTIONS else given.meta["val"].dim() - 1
    return (
        before.batch is not None
        and before.joinable
        and after.joinable
        and before.batch == after.batch
        and before.batch[0] != features
    )


class WeightStore:
    """Tensors of a merged cluster by name. Invariant: no two of them are equal in type, shape and value."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._alike: dict[tuple[object, ...], list[str]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Keep a tensor under its name, unless an equal one is there already; return the name of the one that is
        kept."""
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
    """The keys of all values of a cluster's models, and their weights. Programs are built from it."""

    def __init__(self, models: Sequence[CapturedModel]) -> None:
        """Give every value its key, and put the weights into the store; equal weights are kept once."""
        self.models = {model.name: model for model in models}
        self.tags = {model.name: f"m{index}" for index, model in enumerate(models)}  # names fit for attributes
        self.store = WeightStore()
        self.keys: dict[fx.Node, Key] = {}
        self.members: dict[Key, dict[str, fx.Node]] = {}
        self.inputs: dict[fx.Node, fx.Node] = {}  # of operators with weights through which joint batches may run
        for model in models:
            self._add_keys(model)

    def shared_operators(self) -> list[dict[str, fx.Node]]:
        """Return the operators with weights that run once for several models, each by model."""
        shared = [nodes for nodes in self.members.values() if len(nodes) > 1]
        return [nodes for nodes in shared if next(iter(nodes.values())) in self.inputs]

    def _add_keys(self, model: CapturedModel) -> None:
        for index, node in enumerate(model.inputs):
            value = node.meta["val"]
            joinable = model.facts[node].joinable
            shape = tuple(s if isinstance(s, int) else "batch" for s in value.shape)
            self._assign(model, node, ("input", index, shape, value.dtype, None if joinable else model.name))
        needed = {arg for node in model.operators for arg in node.all_input_nodes}
        for node, weight in model.weights.items():
            if node in needed:
                self.keys[node] = ("weight", self.store.add(f"{self.tags[model.name]}_{node.name}", weight))
        ordinals: Counter[Key] = Counter()
        for node in model.operators:
            operator = weighted(model, node)
            if operator is None or not _joins(model, node, operator.input):
                owner = None if model.facts[node].joinable else model.name
                key: Key = ("call", str(node.target), self._static(node.args), self._static(node.kwargs), owner)
            else:
                self.inputs[node] = operator.input
                sizes = tuple(static_size(size) for size in operator.input.meta["val"].shape)
                arguments = tuple("input" if arg is operator.input else self._static(arg) for arg in node.args)
                alike = ("weighted", str(node.target), model.facts[node].depth, sizes, arguments)
                key = (*alike, ordinals[alike])  # a model may run the same weights twice
                ordinals[alike] += 1
            self._assign(model, node, key)

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
