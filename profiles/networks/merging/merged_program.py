"""Builds one torch.fx program for any of a cluster's models together. Shared operators run once, all others apart.

The plan says which values are one value of a joint batch (see `merge_plan`). When the models' computations part, the
joint batch is split (a view); when they meet again, it is joined (a copy). Imports torch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tenuto.profiles.networks.merging.capture import CapturedModel, static_size
from tenuto.profiles.networks.merging.matching import SharedOperator, WeightedOperator
from tenuto.profiles.networks.merging.merge_plan import Key, MergePlan, matrix_shape, others

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
        self.tensors = dict(plan.store.tensors)

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
        module = fx.GraphModule({name: t for name, t in self.tensors.items() if name in used}, self.graph)
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
        node = self.plan.members[key][members[0]]
        group = self.plan.shared_of.get(node)
        if group is None:
            return self.plain(node, members)
        if group.is_whole:
            chosen = group.members[members[0]]
            joint = self.inputs(group, members)
            return self.call(
                node.target, *(joint if arg is chosen.input else self.argument(arg, members) for arg in node.args)
            )
        if self.plan.joins(group):
            parts = self.parted(group, members)
            return parts[0] if len(members) == 1 else self.join(parts, self.plan.models[members[0]].facts[node].batch)
        together = tuple(name for name in self.present if name in group.members)
        for name, part in zip(together, self.parted(group, together), strict=True):
            self.values[self.plan.keys[group.members[name].node], (name,)] = part
        return self.values[key, members]

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

    def inputs(self, group: SharedOperator, members: tuple[str, ...]) -> Any:
        """Return the joint input of a group; its members' inputs may be one value or several."""
        nodes = [group.members[name].input for name in members]
        keys = {self.plan.keys[node] for node in nodes}
        if len(keys) == 1:
            return self.get(keys.pop(), members, nodes[0])
        parts = [self.get(self.plan.keys[n], (name,), n) for n, name in zip(nodes, members, strict=True)]
        return self.join(parts, self.plan.models[members[0]].facts[nodes[0]].batch)

    def parted(self, group: SharedOperator, members: tuple[str, ...]) -> list[Any]:
        """Run the shared submatrix on the joint batch, and the rest of each model on its own batch; then order the
        rows.

        Inputs of different sizes are padded with zeros for the joint batch (USHER, section 2.4). This does not change
        the part of the result that is kept.
        """
        first = group.members[members[0]]
        name = self.plan.name_of(group)
        batch = self.plan.models[first.model].facts[first.node].batch
        features = first.features
        own = {m: self.get(self.plan.keys[group.members[m].input], (m,), group.members[m].input) for m in members}
        count = {m: matrix_shape(group.members[m]) for m in members}
        places = {m: group.places(m) for m in members}
        columns = places[members[0]][1]
        outlines = {group.members[m].outline for m in members}
        same = len({(count[m][1], *places[m][1]) for m in members}) == 1 and len(outlines) == 1
        if same:
            joint = self.inputs(group, members) if len(members) > 1 else own[members[0]]
            seen = joint if len(columns) == count[members[0]][1] else self.take(joint, columns, features)
        else:
            narrow = {
                m: own[m] if len(columns) == count[m][1] else self.take(own[m], places[m][1], features) for m in members
            }
            seen = self.join([self.padded(narrow[m], group.members[m], outlines) for m in members], batch)
        top = self.apply(first, seen, name, None)
        results = []
        tops = [top] if len(members) == 1 else self.parts_of(top, group, members)
        for member, upper in zip(members, tops, strict=True):
            item = group.members[member]
            rows, columns = places[member]
            left = others(columns, count[member][1])
            bias = f"{name}_bias_{self.plan.tags[member]}" if item.bias is not None else None
            if left:
                rest = self.apply(
                    item, self.take(own[member], left, features), f"{name}_columns_{self.plan.tags[member]}", None
                )
                upper = self.call(aten.add.Tensor, upper, rest)
            whole = upper
            below = others(rows, count[member][0])
            if below:
                lower = self.apply(item, own[member], f"{name}_rows_{self.plan.tags[member]}", None)
                whole = self.call(aten.cat.default, [upper, lower], features)
            if bias is not None:
                shape = [1, -1] + [1] * (item.node.meta["val"].dim() - 2) if item.is_convolution else [-1]
                whole = self.call(aten.add.Tensor, whole, self.call(aten.reshape.default, self.weight(bias), shape))
            order = sorted(range(count[member][0]), key=[*rows, *below].__getitem__)
            results.append(self.take(whole, order, features))
        return results

    def padded(self, value: Any, item: WeightedOperator, outlines: Iterable[tuple[Any, ...]]) -> Any:
        """Return an operator's input, padded with zeros to the largest of the outlines."""
        largest = [max(sizes) if isinstance(sizes[0], int) else None for sizes in zip(*outlines, strict=True)]
        more = [0 if size is None else size - mine for size, mine in zip(largest, item.outline, strict=True)]
        more.insert(item.features, 0)
        if not any(more):
            return value
        return self.call(aten.constant_pad_nd.default, value, [n for extra in reversed(more) for n in (0, extra)])

    def parts_of(self, joint: Any, group: SharedOperator, members: tuple[str, ...]) -> list[Any]:
        """Return each member's part of a joint result, without the padding."""
        items = [group.members[name] for name in members]
        batches = [self.plan.models[item.model].facts[item.node].batch or (0, 1) for item in items]
        parts = self.split(joint, members, batches[0][0], [factor for _, factor in batches])
        shapes = [item.node.meta["val"].shape for item in items]
        for dim, sizes in enumerate(zip(*shapes, strict=True)):
            if dim not in (batches[0][0], items[0].features) and len(set(sizes)) > 1:
                parts = [self.call(aten.slice.Tensor, p, dim, 0, size) for p, size in zip(parts, sizes, strict=True)]
        return parts

    def take(self, value: Any, indices: list[int], dim: int) -> Any:
        """Return features by index; as a slice if they lie side by side."""
        if indices == list(range(indices[0], indices[-1] + 1)):
            return self.call(aten.slice.Tensor, value, dim, indices[0], indices[-1] + 1)
        name = f"order_{len(self.tensors)}"
        for known, tensor in self.tensors.items():
            if known.startswith("order_") and tensor.tolist() == indices:
                name = known
        if name not in self.tensors:
            self.tensors[name] = torch.tensor(indices, device=self.plan.store.device)
        return self.call(aten.index_select.default, value, dim, self.weight(name))

    def apply(self, item: WeightedOperator, given: Any, weight: str, bias: Any) -> Any:
        if item.is_convolution:
            settings = [list(s) if isinstance(s, tuple) else [s] for s in item.settings[:3]]
            return self.call(item.node.target, given, self.weight(weight), bias, *settings, item.settings[3])
        return self.call(aten.linear.default, given, self.weight(weight), bias)
