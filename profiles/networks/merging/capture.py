"""One model as a torch.fx graph: functional ATen operators, with the depth of each and the dimension of its batch.

`torch.export` traces with a batch of unknown size, so every shape tells which dimension is the batch. Therefore batches
of two models can run through one operator. Imports torch.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tenuto.errors import first_line, refused

aten = torch.ops.aten
# Operators that mix values along their dimension. They are harmless unless that dimension is the batch.
_ALONG = frozenset(
    (
        "softmax",
        "_softmax",
        "log_softmax",
        "_log_softmax",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "sort",
        "argsort",
        "flip",
        "roll",
        "topk",
        "cat",
        "index_select",
        "gather",
        "scatter",
        "index_add",
        "slice",
        "split",
        "chunk",
        "split_with_sizes",
    )
)
# format: of ATen: where the input stands among the arguments of an operator with a weight; the weight follows it.
_INPUT_OF_WEIGHTED: dict[Any, int] = {
    aten.linear.default: 0,
    aten.conv1d.default: 0,
    aten.conv2d.default: 0,
    aten.conv3d.default: 0,
    aten.addmm.default: 1,
}
_RESHAPES = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten"))


@dataclass(frozen=True)
class NodeFacts:
    """Facts about a value of the graph.

    `depth`: operators on the longest way from an input or a weight. `batch`: the dimension that has the batch, and the
    rows in it per request; None if no dimension does. `from_input`: the value depends on the model's input. `position`:
    the value is row numbers made from the batch's size, which must be made again for a joint batch. `joinable`: batches
    of several models may run through this operator together.
    """

    depth: int
    batch: tuple[int, int] | None = None
    from_input: bool = False
    position: bool = False
    joinable: bool = True


@dataclass
class CapturedModel:
    """A traced model. `weights` holds parameters, buffers and constants by node, `names` what the model calls them."""

    name: str
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    operators: tuple[fx.Node, ...]  # live ones, in order
    weights: dict[fx.Node, torch.Tensor]
    names: dict[fx.Node, str]
    facts: dict[fx.Node, NodeFacts] = field(default_factory=dict)

    def graph(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return each operator's kind and which operators it takes values of: the same for networks of one code."""
        index = {node: i for i, node in enumerate(self.operators)}
        return tuple(
            (str(node.target), tuple(index[arg] for arg in node.all_input_nodes if arg in index)) for node in index
        )

    def weighted_input(self, node: fx.Node) -> fx.Node | None:
        """Return the input of a linear operator or a convolution through which batches of several models can run; None
        for other nodes, and where the weight is computed."""
        place = _INPUT_OF_WEIGHTED.get(node.target)
        given = None if place is None else node.args[place]
        if place is None or not isinstance(given, fx.Node) or node.kwargs or node.args[place + 1] not in self.weights:
            return None
        has_own_values = any(arg not in self.weights for arg in node.all_input_nodes if arg is not given)
        fits = self.facts[node].joinable and self.facts[node].batch == self.facts[given].batch is not None
        return given if fits and not has_own_values else None


def capture(name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> CapturedModel:
    """Trace a model.

    Args:
        name: the name of the model.
        module: a module in evaluation mode.
        inputs: a batch of at least two rows; dimension 0 of each input is the batch.

    Raises:
        InvalidInputError: the network cannot be traced for batches of any size, for example because its control flow
        depends on values.
    """
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            dynamic = tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs)
            program = torch.export.export(module, inputs, dynamic_shapes=(dynamic,) if _variadic(module) else dynamic)
            program = program.run_decompositions({})
    except Exception as error:  # export raises many kinds, which all mean the same here
        raise refused(
            f"model {name}",
            type(module).__name__,
            f"cannot be traced ({first_line(error)[:200]})",
            "Leave it out of the merge; it is served as it is.",
        ) from error
    return _captured(name, program)


def _variadic(module: torch.nn.Module) -> bool:
    import inspect

    return any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(module.forward).parameters.values())


def _captured(name: str, program: Any) -> CapturedModel:
    graph, signature = program.graph, program.graph_signature
    _plain_batch_norms(graph)
    placed = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    weights, names, inputs = {}, {}, []
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        if node.name in placed:
            target = placed[node.name]
            tensor = program.state_dict[target] if target in program.state_dict else program.constants[target]
            weights[node], names[node] = tensor.detach(), target
        else:
            inputs.append(node)
    outputs = tuple(next(node for node in graph.nodes if node.op == "output").args[0])
    made = CapturedModel(name, tuple(inputs), outputs, _live(graph, outputs), weights, names)
    symbols = {s for node in inputs for s in getattr(node.meta["val"].shape[0], "node", _NO_SYMBOL).expr.free_symbols}
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function") and "val" in node.meta:
            made.facts[node] = _facts(node, made, symbols)
    return made


def _plain_batch_norms(graph: fx.Graph) -> None:
    """Replace batch normalisation by the operator with one result that the model called."""
    for node in list(graph.nodes):
        if node.target == aten._native_batch_norm_legit_no_training.default:
            with graph.inserting_before(node):
                made = graph.call_function(aten.batch_norm.default, (*node.args[:5], False, *node.args[5:], True))
            made.meta["val"] = node.meta["val"][0]
            for user in list(node.users):
                user.replace_all_uses_with(made)


class _NoSymbol:
    class expr:
        free_symbols: frozenset[Any] = frozenset()


_NO_SYMBOL = _NoSymbol


def _live(graph: fx.Graph, outputs: tuple[Any, ...]) -> tuple[fx.Node, ...]:
    live, stack = set(), [node for node in outputs if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack += node.all_input_nodes
    return tuple(node for node in graph.nodes if node in live and node.op == "call_function")


def static_size(value: Any) -> tuple[int, int] | None:
    """Return a size as (factor, constant), for factor x batch + constant; None if it has no such form.

    All inputs have the same batch.
    """
    if isinstance(value, int):
        return (0, value)
    import sympy  # type: ignore[import-untyped]

    expression = value.node.expr
    if not isinstance(expression, sympy.Basic):
        return None
    batch = sympy.Symbol("batch", positive=True, integer=True)
    expression = expression.subs(dict.fromkeys(expression.free_symbols, batch))
    polynomial = sympy.Poly(expression, batch) if expression.is_polynomial(batch) else None
    if polynomial is None or polynomial.degree() > 1:
        return None
    factor, constant = polynomial.coeff_monomial(batch), polynomial.coeff_monomial(1)
    return (int(factor), int(constant)) if factor.is_Integer and constant.is_Integer else None


def _batch_of(value: Any) -> tuple[tuple[int, int] | None, bool]:
    """Return the dimension and factor of the batch, and whether the shape is understood."""
    if isinstance(value, (list, tuple)):
        batches = [_batch_of(item) for item in value if isinstance(item, torch.Tensor)]
        if not batches or any(item != batches[0] for item in batches):
            return None, False
        return batches[0]
    if not isinstance(value, torch.Tensor):
        return None, True
    sizes = [static_size(size) for size in value.shape]
    carrying = [(dim, size) for dim, size in enumerate(sizes) if size is None or size[0]]
    if not carrying:
        return None, True
    dim, size = carrying[0]
    if len(carrying) > 1 or size is None or size[1]:
        return None, False
    return (dim, size[0]), True


def _facts(node: fx.Node, model: CapturedModel, symbols: set[Any]) -> NodeFacts:
    if node in model.weights:
        return NodeFacts(0)
    batch, understood = _batch_of(node.meta["val"])
    if node.op == "placeholder":
        return NodeFacts(0, batch, from_input=True, joinable=understood and bool(symbols))
    args = [model.facts[arg] for arg in node.all_input_nodes]
    depth = 1 + max((fact.depth for fact in args), default=0)
    if isinstance(node.meta["val"], torch.SymInt):
        return NodeFacts(depth)
    carrying = [fact for fact in args if fact.batch is not None]
    from_input = any(fact.from_input for fact in args)
    position = batch is not None and (
        all(fact.position for fact in carrying) if carrying else "arange" in str(node.target)
    )
    if from_input and not position and batch is None:
        return NodeFacts(depth, None, from_input=True, joinable=False)  # the batch was mixed or one row taken
    joinable = understood and all(fact.joinable for fact in args) and not _mixes(node, carrying)
    if batch is not None and batch[1] != 1 and any(fact.batch != (0, 1) and fact.batch != batch for fact in carrying):
        joinable = False  # the batch may lie inside the merged dimension
    name = str(node.target).split(".")[1] if "." in str(node.target) else ""
    if batch is not None and name in _RESHAPES and any(fact.batch and fact.batch[0] != batch[0] for fact in carrying):
        joinable = False
    return NodeFacts(depth, batch, from_input=from_input, position=position, joinable=joinable)


def _mixes(node: fx.Node, carrying: list[NodeFacts]) -> bool:
    """Return whether an operator acts along the batch, and does more than take all of it."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name.partition("::")[2] not in _ALONG or not carrying:
        return False
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    dims = given.get("dim", given.get("dims", defaults.get("dim", 0)))
    source = next((arg.meta["val"] for arg in node.all_input_nodes if isinstance(arg.meta["val"], torch.Tensor)), None)
    if source is None or carrying[0].batch is None:
        return True
    along = {int(dim) % max(1, source.dim()) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
    if carrying[0].batch[0] not in along:
        return False
    whole = schema.name == "aten::slice" and given.get("start") in (None, 0) and given.get("step", 1) == 1
    return not (whole and (given.get("end") is None or given["end"] == 2**63 - 1))
