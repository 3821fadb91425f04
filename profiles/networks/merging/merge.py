"""Merges the models of one gpu-let: trace, cluster, build, and compare the outputs with those of the originals.

USHER (OSDI 2024), §3.4. There, models cluster by graph edit distance within a radius of 1e-7, which only joins equal
graphs; here graphs are compared. There, an operator may also share a submatrix of its weights; here all of its weights
or none. Imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import fx

from tenuto.errors import InvalidInputError, first_line
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature
from tenuto.profiles.networks.inputs import random_inputs
from tenuto.profiles.networks.merging.capture import CapturedModel, capture
from tenuto.profiles.networks.merging.merge_plan import MergePlan, weighted
from tenuto.profiles.networks.merging.merged_program import build_program
from tenuto.profiles.networks.merging.report import MergedCluster, MergedOperator, MergeReport
from tenuto.profiles.networks.network import size_mib

# limit: the largest error of an output, relative to its largest magnitude. Models whose merged outputs have a larger
# error are not merged.
TOLERANCE = 1e-5


class MergedModels:
    """The programs of a cluster, for any of its models together or one alone. All share one copy of the weights."""

    def __init__(self, plan: MergePlan, signatures: Mapping[str, ModelSignature]) -> None:
        """Keep the plan, and the signature of each of its models; each program is built when it is first needed."""
        self._plan: MergePlan | None = plan
        self._programs: dict[tuple[str, ...], fx.GraphModule] = {}
        self._outputs = {name: len(model.outputs) for name, model in plan.models.items()}
        self.signatures = signatures
        self.weights_mib = plan.store.size_mib  # weights of all models; common weights count once

    def program(self, present: Sequence[str]) -> fx.GraphModule:
        """Return the program of some of the models. It takes their inputs one after another, in the cluster's order,
        and returns all their outputs."""
        chosen = tuple(name for name in self.signatures if name in present)
        if chosen not in self._programs and self._plan is not None:
            self._programs[chosen] = build_program(self._plan, chosen)
        return self._programs[chosen]

    def settle(self, device: torch.device | str) -> None:
        """Build the program of every combination of models, drop the originals, and move the weights to a device.

        From then on only the merged weights are kept. There are 2**models - 1 programs.
        """
        for count in range(1, len(self.signatures) + 1):
            for present in combinations(self.signatures, count):
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

    def __call__(self, batches: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, tuple[torch.Tensor, ...]]:
        """Run batches of some of the models together, each of its own size, and return every model's outputs."""
        chosen = [name for name in self.signatures if name in batches]
        outputs = list(self.program(chosen)(*(tensor for name in chosen for tensor in batches[name])))
        by_model = {}
        for name in chosen:
            count = self._outputs[name]
            by_model[name], outputs = tuple(outputs[:count]), outputs[count:]
        return by_model


def merge_models(models: Mapping[str, LoadedModel]) -> tuple[list[MergedModels], MergeReport]:
    """Merge models as far as possible.

    Args:
        models: by name; their modules are in evaluation mode, and are not changed.

    Returns:
        The merged clusters and the report. It says why a model is in no cluster.

    Raises:
        InvalidInputError: fewer than two models.
    """
    if len(models) < 2:
        raise InvalidInputError("Merging needs at least two models. Name another one.")
    unmerged: dict[str, str] = {}
    alike: defaultdict[Any, list[CapturedModel]] = defaultdict(list)
    for name, loaded in models.items():
        try:
            captured = capture(name, loaded.module, _examples(loaded, 3, 0))
        except InvalidInputError as error:
            unmerged[name] = error.problems[0].rule if error.problems else str(error)
        else:
            alike[captured.graph()].append(captured)
    merged, reports = [], []
    for cluster in alike.values():
        joined = {name for nodes in MergePlan(cluster).shared_operators() for name in nodes}
        rule = "no other model has an equal operator graph"
        if len(cluster) > 1:
            rule = "no operator has the same weights as the operator at the same place of another model"
        unmerged |= {model.name: rule for model in cluster if model.name not in joined}
        together = [model for model in cluster if model.name in joined]
        if together:
            made, report, reason = _merge_cluster(together, models)
            if made is not None and report is not None:
                merged.append(made)
                reports.append(report)
            else:
                unmerged |= {model.name: reason for model in together}
    return merged, MergeReport(tuple(reports), dict(sorted(unmerged.items())))


def _merge_cluster(
    together: Sequence[CapturedModel], models: Mapping[str, LoadedModel]
) -> tuple[MergedModels | None, MergedCluster | None, str]:
    """Return the merged models and their report, or the reason why they cannot run as one."""
    plan = MergePlan(together)
    try:
        made = MergedModels(plan, {model.name: models[model.name].signature for model in together})
        worst = _worst_error(made, models)
    except (RuntimeError, IndexError, KeyError, ValueError, TypeError) as error:
        return None, None, f"the merged program does not run ({first_line(error)[:200]})"
    if not worst <= TOLERANCE:
        reason = f"merged outputs err by {worst:.1e}, more than {TOLERANCE:.0e} of the largest magnitude"
        return None, None, reason
    shared = plan.shared_operators()
    before = sum(weighted(model, node) is not None for model in together for node in model.operators)
    report = MergedCluster(
        models=tuple(made.signatures),
        operators=tuple(_described(nodes, plan) for nodes in shared),
        operators_before=before,
        operators_after=before - sum(len(nodes) - 1 for nodes in shared),
        memory_before_mib=sum(size_mib(models[model.name].module) for model in together),
        memory_after_mib=made.weights_mib,
        worst_error=worst,
    )
    return made, report, ""


def _described(nodes: Mapping[str, fx.Node], plan: MergePlan) -> MergedOperator:
    names, parameters = {}, 0
    for name, node in nodes.items():
        model = plan.models[name]
        operator = weighted(model, node)
        assert operator is not None
        names[name], parameters = model.names[operator.weight], model.weights[operator.weight].numel()
    return MergedOperator(str(node.target).split(".")[1], model.facts[node].depth, names, parameters)


def _worst_error(made: MergedModels, models: Mapping[str, LoadedModel]) -> float:
    """Return the largest error of an output, relative to the output's largest magnitude. It is over joint batches of
    equal and unequal sizes, and over every model alone. It is infinite if only the merged output is not a number."""
    names = list(made.signatures)
    trials = [
        dict.fromkeys(names, 2),
        # Format: batch sizes of a check, from 1 to 3.
        {name: 1 + (2 * index) % 3 for index, name in enumerate(names)},
        *({name: 1 + index % 2} for index, name in enumerate(names)),
    ]
    if len(names) > 2:
        trials.append({names[0]: 1, names[-1]: 2})
    worst = 0.0
    with torch.inference_mode():
        for seed, sizes in enumerate(trials):
            batches = {name: _examples(models[name], size, seed) for name, size in sizes.items()}
            merged = made(batches)
            for name, inputs in batches.items():
                plain: Any = models[name].module(*inputs)
                for mine, right in zip(merged[name], plain if isinstance(plain, tuple) else (plain,), strict=True):
                    if mine.shape != right.shape:
                        return float("inf")
                    scale = float(right.abs().max())
                    error = float((mine.double() - right.double()).abs().max()) / (scale or 1.0)
                    worst = max(worst, error if error == error else float("inf"))
    return worst


def _examples(loaded: LoadedModel, size: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return random inputs that the model accepts, on the device and in the type of its weights."""
    weight = next((p for p in loaded.module.parameters() if p.is_floating_point()), torch.empty(0))
    arrays = random_inputs(loaded.signature, size, seed)
    tensors = [torch.from_numpy(arrays[spec.name]) for spec in loaded.signature.inputs]
    return tuple(t.to(weight.device, weight.dtype if t.is_floating_point() else t.dtype) for t in tensors)
