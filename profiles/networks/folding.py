"""Fold batch normalisation into the convolutions before it: the same function with fewer kernels. Imports torch."""

from __future__ import annotations

import copy
import operator

import torch
from torch import fx
from torch.nn.utils.fusion import fuse_conv_bn_eval

_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_TOLERANCE = 1e-3  # limit: part of an output's largest magnitude; fp32 rounding in a deep network stays below it


def fold_batch_norms(module: torch.nn.Module, examples: tuple[torch.Tensor, ...]) -> tuple[torch.nn.Module, int]:
    """Return a copy without the batch normalisations that directly follow a convolution, and how many those were.

    Folding is an optimisation and never required. So the network comes back unchanged, with 0, if it cannot be traced,
    if it has none, or if its outputs would change by more than rounding.

    Args:
        module: a module in evaluation mode, fp32, on the CPU.
        examples: inputs that it accepts; the copy is compared with it on them.
    """
    if not any(isinstance(part, _NORMS) for part in module.modules()):
        return module, 0
    try:
        traced = fx.symbolic_trace(copy.deepcopy(module))
    except Exception:  # the forward pass does something that cannot be traced
        return module, 0
    count = _fold(traced)
    if count == 0 or not _agrees(module, traced, examples):
        return module, 0
    return traced, count


def _fold(traced: fx.GraphModule) -> int:
    parts = dict(traced.named_modules())
    count = 0
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(parts[str(node.target)], _NORMS):
            continue
        before = node.args[0]
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
            continue
        convolution = parts[str(before.target)]
        calls = sum(other.op == "call_module" and other.target == before.target for other in traced.graph.nodes)
        if not isinstance(convolution, _CONVOLUTIONS) or calls > 1:
            continue
        parent, _, name = str(before.target).rpartition(".")
        owner = operator.attrgetter(parent)(traced) if parent else traced
        setattr(owner, name, fuse_conv_bn_eval(convolution, parts[str(node.target)]))
        node.replace_all_uses_with(before)
        traced.graph.erase_node(node)
        count += 1
    traced.delete_all_unused_submodules()
    traced.recompile()
    return count


def _agrees(module: torch.nn.Module, traced: torch.nn.Module, examples: tuple[torch.Tensor, ...]) -> bool:
    with torch.inference_mode():
        expected, folded = module(*examples), traced(*examples)
    for right, mine in zip(_as_tuple(expected), _as_tuple(folded), strict=True):
        if not float((right - mine).abs().max()) <= _TOLERANCE * float(right.abs().max()):
            return False
    return True


def _as_tuple(answer: object) -> tuple[torch.Tensor, ...]:
    return answer if isinstance(answer, tuple) else (answer,)
