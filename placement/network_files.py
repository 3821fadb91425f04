"""What speaks against networks before they are built: what their files say, where these are on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tenuto.errors import EnvironmentFaultError, InvalidInputError, Problem
from tenuto.placement.application_signature import ApplicationSignature, stage_signature
from tenuto.placement.cluster import Cluster
from tenuto.placement.workload import ModelSpec, Workload, profile_by_size
from tenuto.profiles import Profiles
from tenuto.profiles.networks.catalogue import (
    GenerationLimits,
    ModelSignature,
    SizeRange,
    is_exported,
    lookup,
    stated_signature,
    with_pixels,
)
from tenuto.profiles.networks.model_options import ModelOptions, with_most_sizes

_REFUSED_PART = 0.001  # limit: of the requests that a plan counts as served, refused for their sizes


def network_problems(
    workload: Workload, cluster: Cluster, profiles: Profiles, places: Mapping[str, str]
) -> tuple[list[Problem], list[str]]:
    """Return what speaks against models whose files are on this machine: all that a gpu-let would refuse before it
    builds them, sizes that they do not take, and tensors that do not fit along the graphs of applications. Lines of the
    second list name the files that were not read.

    Args:
        workload: all models and applications.
        cluster: its GPU types say which profiles count.
        profiles: say at which sizes models were measured.
        places: the models in question, by name, with the words for each in problems. The others are only read where an
            application asks them beside one of these.
    """
    from tenuto.profiles.networks.models import describe

    problems, unread, described = list[Problem](), dict[str, str](), dict[str, ModelSignature | None]()
    names = {app.name: [app.model_name(stage) for stage in app.stages] for app in workload.applications}
    applications = [app for app in workload.applications if not places.keys().isdisjoint(names[app.name])]
    beside = {name for app in applications for name in names[app.name]}
    for spec in workload.models:
        source, where = spec.source, places.get(spec.name)
        if where is None and spec.name not in beside:
            continue
        if source is None or spec.generates is not None or not (is_exported(source) or Path(source).is_dir()):
            if where is not None and _states_tensors(spec.options):
                try:
                    stated_signature(spec.options, "options")
                except InvalidInputError as error:
                    problems += [replace(problem, path=f"{where}: {problem.path}") for problem in error.problems]
            continue
        if not Path(source).exists():
            unread[source] = "is not on this machine"
            continue
        measured = _measured_sizes(spec, cluster, profiles)
        options = ModelOptions.parse(spec.options, f"{where}.options").build
        most = {name: max(sizes) for name, sizes in measured.items()} if is_exported(source) else {}
        try:
            signature = describe(source, weights_path=spec.weights_path, options=with_most_sizes(options, most))
        except InvalidInputError as error:
            problems += [replace(problem, path=f"{where}: {problem.path}") for problem in error.problems if where]
        except EnvironmentFaultError as error:
            unread[source] = str(error)
        else:
            described[spec.name] = signature
            if where is not None and signature is not None and measured:
                problems += _size_problems(f"{where}.sizes", spec, measured, signature.sizes)
    for app in applications:
        models = [
            described[name] if name in described else _stated_signature(workload[name]) for name in names[app.name]
        ]
        known = [stage_signature(s, model) for s, model in zip(app.stages, models, strict=True) if model is not None]
        if len(known) == len(models):
            try:
                ApplicationSignature.of(app, known)
            except InvalidInputError as error:
                problems += error.problems
    return problems, [f"{source} was not compared with the plan: {why}" for source, why in unread.items()]


def _states_tensors(options: Mapping[str, Any]) -> bool:
    """Whether options have what looks like tensors, and no arguments of these names of a factory of one's own."""
    given = options.get("inputs"), options.get("outputs")
    return all(isinstance(each, list) and all(isinstance(tensor, dict) for tensor in each) for each in given)


def _stated_signature(spec: ModelSpec) -> ModelSignature | None:
    """Return the tensors that the options of a model state, or the catalogue where no option changes them; None where
    only building the network tells. Of one that generates the limits do not matter here."""
    if spec.generates is not None:
        return ModelSignature("tensor", (), (), generates=GenerationLimits(1, 1, ""))
    if "inputs" in spec.options and "outputs" in spec.options:
        with contextlib.suppress(InvalidInputError):  # it is said of the model
            return stated_signature(spec.options, spec.name)
        return None
    if spec.options or spec.weights_path or spec.sizes:
        return None
    with contextlib.suppress(InvalidInputError):
        return with_pixels(lookup(spec.network).signature, preferred=False)
    return None


def _measured_sizes(spec: ModelSpec, cluster: Cluster, profiles: Profiles) -> dict[str, set[int]]:
    """Return the sizes at which a model was measured on types of the cluster, by name, where the workload says which
    come."""
    measured: dict[str, set[int]] = {}
    for kind in cluster.gpu_types if spec.sizes else ():
        with contextlib.suppress(InvalidInputError):  # `check_inputs` says what is missing
            profile = profile_by_size(spec, kind, profiles)
            for place, name in enumerate(profile.size_names):
                measured.setdefault(name, set()).update(sizes[place] for sizes in profile.measured_sizes)
    return measured


def _size_problems(
    where: str, spec: ModelSpec, measured: Mapping[str, set[int]], taken: Mapping[str, SizeRange]
) -> Iterator[Problem]:
    """Yield what speaks against the sizes of requests that the plan would count as served."""
    if taken.keys() != spec.sizes.keys():
        cure = f"Name them as the network does, also in the profile: {', '.join(taken) or 'it has none'}."
        yield Problem(where, ", ".join(spec.sizes), "are not the sizes of the network", cure)
        return
    for name, allowed in taken.items():
        lengths = spec.sizes[name]
        most = max(measured[name])
        too_large = lengths.part_up_to(most) - lengths.part_up_to(min(allowed.most, most))
        part = too_large + lengths.part_up_to(allowed.least - 1)
        if part > _REFUSED_PART:
            rule = f"{100 * part:.2g} % of the requests are outside of the network's {allowed.least} to {allowed.most}"
            cure = "Correct which sizes come, or `sizes` in the model's options."
            yield Problem(f"{where}.{name}", None, rule, cure)
