"""Merges the models of one gpu-let: trace, share, build, and compare the outputs with those of the originals.

After USHER (OSDI 2024, §3.4), whose published radius also joins models of equal graphs only. USHER shares equal
submatrices of weights as well; here operators are shared whose weights are equal as a whole. Imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import fx

from tenuto.errors import InvalidInputError, first_line
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.inputs import random_inputs
from tenuto.profiles.networks.merging.capture import CapturedModel, capture
from tenuto.profiles.networks.merging.merge_plan import MergePlan
from tenuto.profiles.networks.merging.merged_program import build_program
from tenuto.profiles.networks.merging.report import MergedCluster, MergedOperator, MergeReport
from tenuto.profiles.networks.network import size_mib

# limit: the largest error of an output, relative to its largest magnitude. Models whose merged outputs have a larger
# error are not merged.
TOLERANCE = 1e-5


class MergedModels:
    """The programs of a cluster, for any of its models together or one alone. All share one copy of the weights.

    After `settle` it can be pickled, so that other processes can run it.
    """

    def __init__(self, plan: MergePlan) -> None:
        """Keep the plan; each program is built when it is first needed."""
        self._plan: MergePlan | None = plan
        self._programs: dict[tuple[str, ...], fx.GraphModule] = {}
        self._outputs = {name: len(model.outputs) for name, model in plan.models.items()}
        self.names = tuple(plan.models)
        self.weights_mib = plan.store.size_mib  # weights of all models; common weights count once

    def program(self, present: Sequence[str]) -> fx.GraphModule:
        """Return the program of some of the models. It takes their inputs one after another, in the cluster's order,
        and returns all their outputs."""
        chosen = tuple(name for name in self.names if name in present)
        if chosen not in self._programs and self._plan is not None:
            self._programs[chosen] = build_program(self._plan, chosen)
        return self._programs[chosen]

    def settle(self, device: torch.device | str) -> None:
        """Build the program of every combination of models, drop the originals, and move the weights to a device.

        From then on only the merged weights are kept. There are 2**models - 1 programs.
        """
        for count in range(1, len(self.names) + 1):
            for present in combinations(self.names, count):
                self.program(present)
        self._plan = None
        moved: dict[int, torch.Tensor] = {}
        for program in self._programs.values():
            for name, tensor in list(program.named_buffers(remove_duplicate=False)):
                setattr(program, name, moved.setdefault(id(tensor), tensor.to(device)))
            for node in program.graph.nodes:  # operators that make a tensor make it there
                if "device" in node.kwargs:
                    node.update_kwarg("device", torch.device(device))
            program.recompile()

    def run(self, batches: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, tuple[torch.Tensor, ...]]:
        """Run batches of some of the models together, each of its own size, and return every model's outputs."""
        chosen = [name for name in self.names if name in batches]
        outputs = list(self.program(chosen)(*(tensor for name in chosen for tensor in batches[name])))
        by_model = {}
        for name in chosen:
            count = self._outputs[name]
            by_model[name], outputs = tuple(outputs[:count]), outputs[count:]
        return by_model


def merge_models(
    models: Mapping[str, tuple[torch.nn.Module, ModelSignature]],
) -> tuple[list[MergedModels], MergeReport]:
    """Merge models as far as possible.

    Args:
        models: modules in evaluation mode with their signatures, by name; they are not changed.

    Returns:
        The merged clusters and the report. It says why a model is in no cluster.

    Raises:
        InvalidInputError: fewer than two models.
    """
    if len(models) < 2:
        raise InvalidInputError("Merging needs at least two models. Name another one.")
    unmerged: dict[str, str] = {}
    by_graph: dict[object, list[CapturedModel]] = defaultdict(list)
    for name, (module, signature) in models.items():
        try:
            model = capture(name, module, _examples(module, signature, 3, 0))
        except InvalidInputError as error:
            unmerged[name] = error.problems[0].rule if error.problems else str(error)
        else:
            by_graph[model.graph()].append(model)
    merged, reports = [], []
    for cluster in by_graph.values():
        program, report, reasons = _merge_cluster(cluster, models)
        unmerged |= reasons
        if program is not None and report is not None:
            merged.append(program)
            reports.append(report)
    return merged, MergeReport(tuple(reports), dict(sorted(unmerged.items())))


def _merge_cluster(
    captured: Sequence[CapturedModel], models: Mapping[str, tuple[torch.nn.Module, ModelSignature]]
) -> tuple[MergedModels | None, MergedCluster | None, dict[str, str]]:
    if len(captured) == 1:
        return None, None, {captured[0].name: "no other model has the same graph of operators"}
    joined = {name for members in MergePlan(captured).shared for name in members}
    together = [model for model in captured if model.name in joined]
    reasons = {
        model.name: "no operator has the weights of one at the same depth of another model"
        for model in captured
        if model.name not in joined
    }
    if not together:
        return None, None, reasons
    plan = MergePlan(together)
    shared = [_described(members, plan.models) for members in plan.shared]
    total = sum(len(members) for members in plan.weighted.values())
    try:
        made = MergedModels(plan)
        worst = _worst_error(made, models)
    except (RuntimeError, IndexError, KeyError, ValueError, TypeError) as error:
        reason = f"the merged program does not run ({first_line(error)[:200]})"
        return None, None, reasons | {model.name: reason for model in together}
    if not worst <= TOLERANCE:
        reason = f"merged outputs err by {worst:.1e}, more than {TOLERANCE:.0e} of the largest magnitude"
        return None, None, reasons | {model.name: reason for model in together}
    report = MergedCluster(
        models=made.names,
        operators=tuple(shared),
        operators_before=total,
        operators_after=total - sum(len(each.names) - 1 for each in shared),
        memory_before_mib=sum(size_mib(models[model.name][0]) for model in together),
        memory_after_mib=made.weights_mib,
        worst_error=worst,
    )
    return made, report, reasons


def _described(members: Mapping[str, fx.Node], models: Mapping[str, CapturedModel]) -> MergedOperator:
    """Describe an operator with weights that several models share; its largest tensor is the weight."""
    weights = {
        name: max(
            (arg for arg in node.all_input_nodes if arg in models[name].weights),
            key=lambda arg: arg.meta["val"].numel(),
        )
        for name, node in members.items()
    }
    name, node = next(iter(members.items()))
    return MergedOperator(
        kind=str(node.target).split(".")[1],
        depth=models[name].facts[node].depth,
        names={name: models[name].names[weight] for name, weight in weights.items()},
        parameters=models[name].weights[weights[name]].numel(),
    )


def _worst_error(made: MergedModels, models: Mapping[str, tuple[torch.nn.Module, ModelSignature]]) -> float:
    """Return the largest error of an output, relative to the output's largest magnitude. It is over joint batches of
    equal and unequal sizes, and over every model alone. It is infinite if only the merged output is not a number."""
    count = len(made.names)
    trials = [
        dict.fromkeys(made.names, 2),
        # Format: batch sizes of a check, from 1 to 3.
        {name: 1 + (2 * index) % 3 for index, name in enumerate(made.names)},
        *({name: 1 + index % 2} for index, name in enumerate(made.names)),
    ]
    if count > 2:
        trials.append({made.names[0]: 1, made.names[-1]: 2})
    worst = 0.0
    with torch.inference_mode():
        for seed, sizes in enumerate(trials):
            batches = {name: _examples(*models[name], size, seed) for name, size in sizes.items()}
            results = made.run(batches)
            for name, inputs in batches.items():
                plain: Any = models[name][0](*inputs)
                for mine, right in zip(results[name], plain if isinstance(plain, tuple) else (plain,), strict=True):
                    if mine.shape != right.shape:
                        return float("inf")
                    scale = float(right.abs().max())
                    error = float((mine.double() - right.double()).abs().max()) / (scale or 1.0)
                    worst = max(worst, error if error == error else float("inf"))
    return worst


def _examples(module: torch.nn.Module, signature: ModelSignature, size: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return random inputs that the model accepts, on the device and in the type of its weights."""
    weight = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    arrays = random_inputs(signature, size, seed)
    tensors = [torch.from_numpy(arrays[spec.name]) for spec in signature.inputs]
    return tuple(t.to(weight.device, weight.dtype if t.is_floating_point() else t.dtype) for t in tensors)
