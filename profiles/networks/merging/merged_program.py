"""Builds one torch.fx program for any of a cluster's models together. Shared operators run once, all others apart.

Every value has a key that says how it is computed from the inputs and the weights. Values of different models with the
same key are one value of a joint batch, which has the models' batches one after another. When the models' computations
part, the joint batch is split (a view); when they meet again, it is joined (a copy). Imports torch.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tenuto.profiles.networks.merging.capture import CapturedModel, static_size
from tenuto.profiles.networks.merging.matching import SharedOperator, WeightedOperator, matrix

aten = torch.ops.aten
Key = Hashable


class WeightStore:
    """Tensors of a merged cluster by name. Invariant: no two tensors from `add` are equal in type, shape and value."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._alike: dict[tuple[object, ...], list[str]] = {}
        self.device = torch.device("cpu")

    def put(self, name: str, tensor: torch.Tensor) -> str:
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
        plain = self.put(name, tensor)
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
        self.store.put(name, weight[rows][:, columns].contiguous())
        for member in group.members.values():
            own = matrix(self.models[member.model], member)
            rows, columns = group.places(member.model)
            other_rows, other_columns = _others(rows, own.shape[0]), _others(columns, own.shape[1])
            if other_columns:
                self.store.put(f"{name}_columns_{self.tags[member.model]}", own[rows][:, other_columns].contiguous())
            if other_rows:
                self.store.put(f"{name}_rows_{self.tags[member.model]}", own[other_rows].contiguous())
            if member.bias is not None:
                bias = self.models[member.model].weights[member.bias]
                self.store.put(f"{name}_bias_{self.tags[member.model]}", torch.cat([bias[rows], bias[other_rows]]))

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


def _others(some: Sequence[int], count: int) -> list[int]:
    taken = set(some)
    return [index for index in range(count) if index not in taken]


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
            left = _others(columns, count[member][1])
            bias = f"{name}_bias_{self.plan.tags[member]}" if item.bias is not None else None
            if left:
                rest = self.apply(
                    item, self.take(own[member], left, features), f"{name}_columns_{self.plan.tags[member]}", None
                )
                upper = self.call(aten.add.Tensor, upper, rest)
            whole = upper
            below = _others(rows, count[member][0])
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


def matrix_shape(item: WeightedOperator) -> tuple[int, int]:
    """Return an operator's output and input features."""
    shape = item.weight.meta["val"].shape
    return (int(shape[1]), int(shape[0])) if item.transposed else (int(shape[0]), int(shape[1]))
