"""Which weighted operators of a cluster's models run together, and with which part of their weights. Imports torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tenuto.profiles.networks.merging.capture import CapturedModel, static_size
from tenuto.profiles.networks.merging.similarity import Submatrix, match_operators, shared_submatrix

# USHER's published values (OSDI 2024, §3.4 and §4).
OMEGA = 0.4  # least similarity of operators: what they have in common over the mean of their weights
EQUAL_ABS_DIFF = 1e-7  # paper: §4; weights that differ by no more count as equal

aten = torch.ops.aten


@dataclass(frozen=True)
class WeightedOperator:
    """An operator with a weight matrix: nodes of its input, weight and bias, and properties that must match.

    `transposed`: the weight is stored with inputs first (`addmm`).
    """

    model: str
    node: fx.Node
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    settings: tuple[Any, ...] = ()
    transposed: bool = False

    @property
    def is_convolution(self) -> bool:
        """Whether features lie in dimension 1 rather than the last."""
        return self.node.target in _CONVOLUTIONS

    @property
    def is_grouped(self) -> bool:
        """Whether its rows see different inputs."""
        return self.is_convolution and self.settings[-1] != 1

    @property
    def features(self) -> int:
        """The dimension of its input and its result that carries features."""
        return 1 if self.is_convolution else self.input.meta["val"].dim() - 1

    @property
    def outline(self) -> tuple[Any, ...]:
        """Its input's shape without the features; for the batch, how the dimension depends on it."""
        shape = self.input.meta["val"].shape
        return tuple(s if isinstance(s, int) else static_size(s) for i, s in enumerate(shape) if i != self.features)


@dataclass(frozen=True)
class SharedOperator:
    """Operators of one kind and depth, one for each member model, and the submatrix of weights that they share."""

    members: dict[str, WeightedOperator]
    part: Submatrix
    similarity: float
    is_whole: bool  # weights and biases of all members are equal, and their inputs of one size

    def places(self, model: str) -> tuple[list[int], list[int]]:
        """Return the rows and columns of the submatrix in a member's weight."""
        down, right = self.part.shifts[list(self.members).index(model)]
        return [row + down for row in self.part.rows], [column + right for column in self.part.columns]


_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


def weighted(model: CapturedModel, node: fx.Node) -> WeightedOperator | None:
    """Return a node as an operator with a weight matrix; None for other nodes, and if the weight is computed."""
    args = node.args
    bias: Any = None
    settings: tuple[Any, ...] = ()
    transposed = False
    if node.target == aten.linear.default:
        given, weight = args[0], args[1]
        bias = args[2] if len(args) > 2 else None
    elif node.target in _CONVOLUTIONS:
        given, weight = args[0], args[1]
        bias = args[2] if len(args) > 2 else None
        values = [args[i] if len(args) > i else default for i, default in ((3, 1), (4, 0), (5, 1), (6, 1))]
        settings = tuple(tuple(v) if isinstance(v, (list, tuple)) else v for v in values)
    elif node.target == aten.addmm.default and not node.kwargs:
        bias, given, weight = args[0], args[1], args[2]
        transposed = True
        if bias not in model.weights or model.weights[bias].dim() != 1:
            return None
    else:
        return None
    if not isinstance(weight, fx.Node) or weight not in model.weights or node.kwargs:
        return None
    if bias is not None and (not isinstance(bias, fx.Node) or bias not in model.weights):
        return None
    if not isinstance(given, fx.Node) or given in model.weights:
        return None
    return WeightedOperator(model.name, node, given, weight, bias, settings, transposed)


def matrix(model: CapturedModel, operator: WeightedOperator) -> torch.Tensor:
    """Return an operator's weight with output features first."""
    weight = model.weights[operator.weight]
    return weight.t() if operator.transposed else weight


def _fits(model: CapturedModel, operator: WeightedOperator) -> bool:
    """Whether batches of several models can run through it: the batch is in a known dimension, and not in the
    features'."""
    given, made = model.facts[operator.input], model.facts[operator.node]
    return (
        given.batch is not None
        and given.joinable
        and made.joinable
        and given.batch == made.batch
        and given.batch[0] != operator.features
    )


def match_models(models: Sequence[CapturedModel]) -> list[SharedOperator]:
    """Return the shared operators of a cluster. The operators of every model are matched with those of the first.

    A model joins a group if the submatrix that all members share stays at least `OMEGA` of the mean of their weights.
    """
    operators = []
    tables = {model.name: _table(model) for model in models}
    anchor, others = models[0], models[1:]
    by_name = {model.name: model for model in models}
    for key, anchors in tables[anchor.name].items():
        joined: dict[int, list[tuple[float, WeightedOperator]]] = defaultdict(list)
        for other in others:
            candidates = tables[other.name].get(key, [])
            pairs = match_operators(
                [matrix(anchor, a) for a in anchors], [matrix(other, b) for b in candidates], OMEGA, EQUAL_ABS_DIFF
            )
            for i, j, alike in pairs:
                joined[i].append((alike, candidates[j]))
        for i, members in joined.items():
            shared = _group(by_name, anchors[i], members)
            if shared is not None:
                operators.append(shared)
    return operators


def _table(model: CapturedModel) -> dict[Any, list[WeightedOperator]]:
    """Return a model's weighted operators by kind, depth, and the properties that must be equal for a joint call.

    Inputs of different sizes can be padded, but the batch must be in the same dimension.
    """
    table: dict[Any, list[WeightedOperator]] = defaultdict(list)
    for node in model.operators:
        operator = weighted(model, node)
        if operator is not None and _fits(model, operator):
            weight = model.weights[operator.weight]
            places = tuple(isinstance(size, int) for size in operator.outline)
            table[node.target, model.facts[node].depth, operator.settings, places, weight.dtype].append(operator)
    return table


def _group(
    models: dict[str, CapturedModel], anchor: WeightedOperator, others: list[tuple[float, WeightedOperator]]
) -> SharedOperator | None:
    members, similarity = [anchor], 1.0
    shared: SharedOperator | None = None
    for alike, other in sorted(others, key=lambda pair: -pair[0]):
        together = [*members, other]
        weights = [matrix(models[m.model], m) for m in together]
        biases = [None if m.bias is None else models[m.model].weights[m.bias] for m in together]
        part = shared_submatrix(weights, EQUAL_ABS_DIFF, whole_rows=anchor.is_grouped)
        are_equal = (
            all(weight.shape == weights[0].shape for weight in weights)
            and part.parameters == weights[0].numel()
            and all(_same(bias, biases[0]) for bias in biases)
        )
        if part.parameters * len(weights) < OMEGA * sum(w.numel() for w in weights):
            continue
        if anchor.is_grouped and not are_equal:
            continue
        members, similarity = together, min(similarity, alike)
        is_whole = are_equal and len({m.outline for m in members}) == 1
        shared = SharedOperator({m.model: m for m in members}, part, similarity, is_whole)
    return shared


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and a.shape == b.shape and torch.equal(a, b))
