"""Builds one torch.fx program for any of a cluster's models together. Shared operators run once, all others apart.

The plan says which values are one value of a joint batch (see `merge_plan`). When the models' computations part, the
joint batch is split (a view); when they meet again, it is joined (a copy). Imports torch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tenuto.profiles.networks.merging.capture import CapturedModel, static_size
from tenuto.profiles.networks.merging.merge_plan import Key, MergePlan

aten = torch.ops.aten


def build_program(plan: MergePlan, present: Sequence[str]) -> fx.GraphModule:
    """Return a module that takes the inputs of the `present` models, one model after another, and returns all their
    outputs in the same order."""
    return _Builder(plan, tuple(present)).build()


class _Builder:
    """Emits every value once for the models that compute it together."""

    def __init__(self, plan: MergePlan, present: tuple[str, ...]) -> None:
        self.plan = plan
        self.present = present
        self.graph = fx.Graph()
        self.values: dict[tuple[Key, tuple[str, ...]], Any] = {}
        self.weights: dict[str, fx.Node] = {}
        self.sizes: dict[tuple[str, ...], Any] = {}

    def build(self) -> fx.GraphModule:
        models = [self.plan.models[name] for name in self.present]
        for model in models:
            for node in model.inputs:
                made = self.graph.placeholder(f"{self.plan.tags[model.name]}_{node.name}")
                self.values[self.plan.keys[node], (model.name,)] = made
            given = self.values[self.plan.keys[model.inputs[0]], (model.name,)]
            self.sizes[(model.name,)] = self.call(aten.sym_size.int, given, 0)
        nodes = sorted(
            (
                (model.facts[node].depth, index, node, model)
                for model in models
                for index, node in enumerate(model.operators)
            ),
            key=lambda item: item[:2],
        )
        done: set[Key] = set()
        for _, _, node, model in nodes:
            key = self.plan.keys[node]
            if isinstance(node.meta["val"], torch.SymInt) or key in done:
                continue
            done.add(key)
            if any(known == key for known, _ in self.values):
                continue
            facts = model.facts[node]
            if facts.batch is None and not facts.from_input:
                self.values[key, ()] = self.plain(node, ())
            elif not facts.position:
                members = tuple(name for name in self.present if name in self.plan.members[key])
                self.values[key, members] = self.emit(key, members)
        outputs = [self.get(self.plan.keys[node], (m.name,), node) for m in models for node in m.outputs]
        self.graph.output(tuple(outputs))
        self.graph.eliminate_dead_code()
        used = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        module = fx.GraphModule({name: t for name, t in self.plan.store.tensors.items() if name in used}, self.graph)
        module.eval()
        return module

    # --- values -------------------------------------------------------------------------------------------------

    def get(self, key: Key, members: tuple[str, ...], node: fx.Node) -> Any:
        """Return a value for the joint batch of `members`, made from values that exist already."""
        if (key, members) in self.values:
            return self.values[key, members]
        if (key, ()) in self.values:
            return self.values[key, ()]
        model = self.model_of(key, members)
        facts = model.facts[node]
        if facts.position:
            made = self.plain(self.plan.members[key][members[0]], members)
        elif len(members) == 1:
            made = self.cut(key, members[0], node)
        else:
            made = self.join([self.get(key, (name,), node) for name in members], facts.batch)
        self.values[key, members] = made
        return made

    def model_of(self, key: Key, members: tuple[str, ...]) -> CapturedModel:
        return self.plan.models[next(name for name in members if name in self.plan.members[key])]

    def cut(self, key: Key, name: str, node: fx.Node) -> Any:
        """Split a joint value into its models' parts and return one."""
        whole = next(m for k, m in self.values if k == key and name in m and len(m) > 1)
        facts = self.plan.models[name].facts[node]
        dim, factor = facts.batch or (0, 1)
        source, factors = self.values[key, whole], [factor] * len(whole)
        if isinstance(node.meta["val"], (list, tuple)):
            pieces = [
                self.split(self.call(operator.getitem, source, i), whole, dim, factors)
                for i in range(len(node.meta["val"]))
            ]
            parts: list[Any] = [[piece[i] for piece in pieces] for i in range(len(whole))]
        else:
            parts = self.split(source, whole, dim, factors)
        for member, part in zip(whole, parts, strict=True):
            self.values.setdefault((key, (member,)), part)
        return self.values[key, (name,)]

    def split(self, source: Any, members: tuple[str, ...], dim: int, factors: Sequence[int]) -> list[Any]:
        sizes = [self.size((member,), factor) for member, factor in zip(members, factors, strict=True)]
        made = self.call(aten.split_with_sizes.default, source, sizes, dim)
        return [self.call(operator.getitem, made, index) for index in range(len(members))]

    def join(self, parts: list[Any], batch: tuple[int, int] | None) -> Any:
        dim = (batch or (0, 1))[0]
        if isinstance(parts[0], list):
            return [self.join(list(items), batch) for items in zip(*parts, strict=True)]
        return self.call(aten.cat.default, parts, dim)

    def size(self, members: tuple[str, ...], factor: int = 1) -> Any:
        """Return the rows of a joint batch, times a factor."""
        if members not in self.sizes:
            total = self.sizes[(members[0],)]
            for name in members[1:]:
                total = self.call(operator.add, total, self.sizes[(name,)])
            self.sizes[members] = total
        return self.sizes[members] if factor == 1 else self.call(operator.mul, self.sizes[members], factor)

    def weight(self, name: str) -> fx.Node:
        if name not in self.weights:
            self.weights[name] = self.graph.get_attr(name)
        return self.weights[name]

    def call(self, target: Any, *args: Any) -> Any:
        if target is operator.getitem and isinstance(args[0], list):
            return args[0][args[1]]
        return self.graph.call_function(target, args)

    # --- operators ----------------------------------------------------------------------------------------------

    def emit(self, key: Key, members: tuple[str, ...]) -> Any:
        nodes = self.plan.members[key]
        node = nodes[members[0]]
        if key not in self.plan.weighted:
            return self.plain(node, members)
        inputs = {name: self.plan.models[name].weighted_input(nodes[name]) for name in members}
        joint = self.inputs({name: given for name, given in inputs.items() if given is not None})
        return self.call(
            node.target, *(joint if arg is inputs[members[0]] else self.argument(arg, members) for arg in node.args)
        )

    def plain(self, node: fx.Node, members: tuple[str, ...]) -> Any:
        """Emit an operator unchanged, on the joint batch of `members`."""
        args = self.argument(node.args, members)
        if node.target is operator.getitem:
            return self.call(operator.getitem, *args)
        target: Any = aten.reshape.default if node.target == aten.view.default else node.target
        return self.graph.call_function(target, args, self.argument(dict(node.kwargs), members))

    def argument(self, argument: Any, members: tuple[str, ...]) -> Any:
        if isinstance(argument, fx.Node):
            value = argument.meta["val"]
            if isinstance(value, torch.SymInt):
                return self.whole_number(argument, members)
            key = self.plan.keys[argument]
            if isinstance(key, tuple) and key[0] == "weight":
                return self.weight(key[1])
            return self.get(key, members, argument)
        if isinstance(argument, (list, tuple)):
            return type(argument)(self.argument(item, members) for item in argument)
        if isinstance(argument, dict):
            return {name: self.argument(item, members) for name, item in argument.items()}
        return argument

    def whole_number(self, node: fx.Node, members: tuple[str, ...]) -> Any:
        size = static_size(node.meta["val"])
        if size is not None and 0 in size:
            return self.size(members, size[0]) if size[0] else size[1]
        args = self.argument(node.args, members)
        return self.call(node.target, *args)

    def inputs(self, nodes: Mapping[str, fx.Node]) -> Any:
        """Return the joint input of an operator; its members' inputs may be one value or several."""
        members = tuple(nodes)
        first = nodes[members[0]]
        keys = {self.plan.keys[node] for node in nodes.values()}
        if len(keys) == 1:
            return self.get(keys.pop(), members, first)
        parts = [self.get(self.plan.keys[node], (name,), node) for name, node in nodes.items()]
        return self.join(parts, self.plan.models[members[0]].facts[first].batch)
