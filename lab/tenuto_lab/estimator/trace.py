"""Lists the operators that a network executes, with their work and sizes, without running it and without its weights.

The network is built and called on fake tensors (shapes without data), so a model of any size is traced in little
memory. Every tensor operator that PyTorch dispatches is one entry. Views launch nothing, and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from tenuto.errors import InvalidInputError, first_line, refused
from tenuto.profiles.networks.catalogue import is_exported, is_factory, lookup

# Operators that launch nothing: they give another view of the same memory.
_VIEWS = frozenset(
    {
        "view",
        "reshape",
        "_unsafe_view",
        "expand",
        "slice",
        "select",
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "split",
        "split_with_sizes",
        "chunk",
        "alias",
        "detach",
        "as_strided",
        "unbind",
        "unfold",
        "lift_fresh",
        "narrow",
        "_reshape_alias",
        "diagonal",
        "view_as",
        "empty",
        "empty_like",
        "dropout",
        "_local_scalar_dense",
    }
)
_CONVOLUTIONS = ("convolution", "_convolution")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")


@dataclass(frozen=True)
class Operator:
    """One operator at one batch size. Sizes are in bytes; `inputs` are indices of operators whose results it reads."""

    name: str
    kind: str  # conv1, conv3, conv, depthwise, matmul, attention, norm, elementwise
    flops: float
    read_bytes: float  # activations read
    written_bytes: float
    weight_bytes: float
    inputs: tuple[int, ...] = ()

    @property
    def moved_bytes(self) -> float:
        """All bytes that cross the memory bus when nothing is cached."""
        return self.read_bytes + self.written_bytes + self.weight_bytes


@dataclass(frozen=True)
class Trace:
    """The operators of a network at one batch size, in execution order.

    `peak_bytes` is the largest sum of activations alive at once, each freed after its last reader ran.
    """

    batch_size: int
    operators: tuple[Operator, ...]
    weight_bytes: float
    input_bytes: float
    peak_bytes: float

    def at_batch(self, other: Trace, batch_size: int) -> Trace:
        """Return the trace at another batch size, on the line through this one and `other`.

        FLOPs and activations of inference grow linearly with the batch, weights do not; two traces fix both.

        Raises:
            InvalidInputError: the operators of this network change with the batch size.
        """
        if [a.name for a in self.operators] != [b.name for b in other.operators] or other.batch_size == self.batch_size:
            raise InvalidInputError("the operators of this network depend on the batch size. Measure it instead.")
        factor = (batch_size - self.batch_size) / (other.batch_size - self.batch_size)

        def between(low: float, high: float) -> float:
            return max(0.0, low + (high - low) * factor)

        operators = tuple(
            replace(
                a,
                flops=between(a.flops, b.flops),
                read_bytes=between(a.read_bytes, b.read_bytes),
                written_bytes=between(a.written_bytes, b.written_bytes),
                weight_bytes=between(a.weight_bytes, b.weight_bytes),
            )
            for a, b in zip(self.operators, other.operators, strict=True)
        )
        return Trace(
            batch_size,
            operators,
            self.weight_bytes,
            between(self.input_bytes, other.input_bytes),
            between(self.peak_bytes, other.peak_bytes),
        )


def trace_model(source: str, batch_sizes: Sequence[int], options: Mapping[str, Any] | None = None) -> tuple[Trace, ...]:
    """Return one trace per batch size, in the order given.

    Raises:
        InvalidInputError: unknown model, or a network whose control flow depends on values.
    """
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    from tenuto.profiles.networks.models import build

    if is_exported(source):
        cure = "Name a network of the catalogue, a folder or a factory; or measure it with `tenuto profile`."
        raise refused("model", source, "is an exported file, which cannot be traced without its data", cure)
    with FakeTensorMode(allow_non_fake_inputs=True):
        loaded = build(source, options=_without_initialisation(source, options or {}))
        weights = {id(t): t.numel() * t.element_size() for t in (*loaded.module.parameters(), *loaded.module.buffers())}
        traces = []
        for size in batch_sizes:
            inputs = [
                torch.zeros((size, *t.fixed_shape), dtype=getattr(torch, t.dtype)) for t in loaded.signature.inputs
            ]
            recorder = operator_recorder(weights)
            try:
                with torch.no_grad(), recorder:
                    loaded.module(*inputs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise refused(
                    "model",
                    source,
                    f"its control flow depends on values ({error})",
                    "Measure it with `tenuto profile`; it cannot be estimated without running.",
                ) from error
            except Exception as error:  # the network's own code
                rule = f"raised {type(error).__name__} while it was traced ({first_line(error)})"
                raise refused("model", source, rule, "Correct it; TENUTO_DEBUG=1 shows where it failed.") from error
            if not recorder.operators:
                raise refused("model", source, "runs no operator that takes time", "Name a network that computes.")
            input_bytes = sum(t.numel() * t.element_size() for t in inputs)
            traces.append(
                Trace(
                    size,
                    tuple(recorder.operators),
                    float(sum(weights.values())),
                    float(input_bytes),
                    float(input_bytes + recorder.peak_bytes()),
                )
            )
    return tuple(traces)


def _without_initialisation(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Do not draw weights if the network has a switch for that; fake tensors have no values to draw."""
    if is_factory(source) or Path(source).is_dir() or "init_weights" not in lookup(source).config:
        return dict(options)
    return {**options, "config": {**options.get("config", {}), "init_weights": False}}


class OperatorTimer(Protocol):
    """Times operators where they really run; every `begin` is followed by `end`, in order of execution."""

    def begin(self) -> None:
        """Mark the start of an operator."""

    def end(self, *, recorded: bool) -> None:
        """Mark its end; an operator that is not recorded launches nothing and does not count."""


def operator_recorder(weights: Mapping[int, int], timer: OperatorTimer | None = None) -> Any:
    """Return a dispatch mode that records operators; a function, so that torch is imported only when tracing."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.operators: list[Operator] = []
            self._makers: dict[int, int] = {}  # storage of a result: index of the operator that wrote it
            self._kept: list[Any] = []  # results stay alive, so that no storage address is used twice
            self._lives: dict[int, list[int]] = {}  # storage of a result: first writer, last user, bytes

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if timer is not None:
                timer.begin()
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            outputs = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            self._kept += outputs
            recorded = bool(outputs) and name not in _VIEWS
            if timer is not None:
                timer.end(recorded=recorded)
            if recorded:
                tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                self._record(name, args, tensors, outputs)
            return result

        def peak_bytes(self) -> int:
            changes = [0] * (len(self.operators) + 1)
            for first, last, size in self._lives.values():
                changes[first] += size
                changes[last + 1] -= size
            return max(accumulate(changes), default=0)

        def _record(self, name: str, args: Any, tensors: list[Any], outputs: list[Any]) -> None:
            sources, read, weight, index = set(), 0, 0, len(self.operators)
            for tensor in tensors:
                base = tensor._base if tensor._base is not None else tensor
                size = tensor.numel() * tensor.element_size()
                if id(tensor) in weights or id(base) in weights:
                    weight += size
                    continue
                read += size
                maker = self._makers.get(_storage(tensor))
                if maker is not None:
                    sources.add(maker)
                    self._lives[_storage(tensor)][1] = index
            written = sum(t.numel() * t.element_size() for t in outputs)
            kind, flops = _work(name, args, outputs)
            if name == "embedding":
                weight = written  # reads the rows it looks up, not the table
            for tensor in outputs:
                self._makers[_storage(tensor)] = index
                self._lives.setdefault(_storage(tensor), [index, index, tensor.untyped_storage().nbytes()])[1] = index
            self.operators.append(
                Operator(name, kind, flops, float(read), float(written), float(weight), tuple(sorted(sources)))
            )

    return Recorder()


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _convolution_kind(args: Any) -> str:
    """Return the kind of kernel that a convolution library chooses: depthwise, product (1x1), Winograd (dense 3x3),
    other."""
    weight, stride, groups = args[1], args[3], args[8]
    if weight.shape[1] == 1 and weight.shape[0] > 1:
        return "depthwise"
    if groups == 1 and all(size == 1 for size in weight.shape[2:]):
        return "conv1"
    return "conv3" if groups == 1 and tuple(weight.shape[2:]) == (3, 3) and set(stride) == {1} else "conv"


def _work(name: str, args: Any, outputs: list[Any]) -> tuple[str, float]:
    """Return kind and floating-point operations (a multiply-add counts as two)."""
    elements = float(outputs[0].numel())
    if name in _CONVOLUTIONS:
        return _convolution_kind(args), elements * 2.0 * math.prod(args[1].shape[1:])
    if name in _PRODUCTS:
        left = args[1] if name in ("addmm", "baddbmm") else args[0]
        return "matmul", 2.0 * elements * left.shape[-1]
    if "scaled_dot_product" in name:
        query, key = args[0], args[1]
        batch_heads = math.prod(query.shape[:-2])
        return "attention", 4.0 * batch_heads * query.shape[-2] * key.shape[-2] * query.shape[-1]
    if "norm" in name or "softmax" in name:
        return "norm", 8.0 * elements
    return "elementwise", elements
