"""An operator's commands on versions as edits of the workload: pure functions that refuse impossible ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tenuto.documents import parse_document
from tenuto.errors import one_of, refused
from tenuto.placement import Workload
from tenuto.placement.application import Application, Stage
from tenuto.placement.versions import by_model, inherited, shared_out, split_name, taking_the_rest, versioned
from tenuto.placement.workload import ModelSpec, OwnDemand

Edits = dict[str, ModelSpec | None]
Edited = tuple[int, Edits]  # edits, and the number of the desired deployment that they make


def with_version(
    workload: Workload, model: str, version: str, terms: Mapping[str, Any], entry: Mapping[str, Any]
) -> Edits:
    """Return the edits that add a version, or change its share of the requests. The versions of a model share out its
    declared rate.

    Args:
        workload: the declared models.
        model: whose version it is.
        version: its name.
        terms: `share_pct`, or `shadow` with or without a share.
        entry: its differences from the version that takes the rest; for an existing version, further changes.

    Raises:
        InvalidInputError: no such model, the version takes the rest, nothing defines it, it has neither a share nor a
            rate, shares exceed 100, or its tensors differ.
    """
    versions, rest = _versions(workload, model)
    name = versioned(model, version)
    if name == rest.name:
        cure = "Promote another one first: `tenuto model promote`."
        raise refused("version", version, f"takes the rest of '{model}'", cure)
    known = next((spec for spec in versions if spec.name == name), None)
    if known is None and not entry:
        cure = "Say what it has of its own: --entry '{weights_path: /models/2.safetensors}'."
        raise refused("version", version, f"is not in the workload, which has {_listed(versions)} of '{model}'", cure)
    has = known or rest
    data = {**has.model_dump(mode="json", exclude_defaults=True), "name": name, "rate_rps": has.rate_rps}
    if known is None:
        data = {**inherited(data, {**entry, **terms}), "name": name, "rate_rps": rest.rate_rps}
    spec = parse_document(ModelSpec, {**data, "share_pct": None, "shadow": False, **entry, **terms}, origin="model")
    if known is None and spec.share_pct == 0 and "rate_rps" not in entry:
        cure = f"Say how often {name} is asked by its number: --entry '{{rate_rps: 1}}' beside what it has of its own."
        raise refused("rate_rps", None, "is missing for a version without a share of the requests", cure)
    return _edits(workload, [*(other for other in workload.models if other.name != name), spec])


def promoted(workload: Workload, model: str, version: str) -> Edits:
    """Return the edits that let a version take the rest of the requests. The version that took it leaves.

    Raises:
        InvalidInputError: there is no such version, or it takes the rest already.
    """
    versions, rest = _versions(workload, model)
    spec = _known(versions, model, version)
    if spec is rest:
        raise refused("version", version, f"takes the rest of '{model}' already", "See `tenuto model list`.")
    terms = {"share_pct": None, "shadow": False, "weight": rest.weight, "priority": rest.priority}
    left = [other for other in workload.models if other not in (rest, spec)]
    return _edits(workload, [*left, spec.model_copy(update=terms)])


def without(workload: Workload, names: Collection[str]) -> Edits:
    """Return the edits that remove versions; the others of their model get their rates."""
    return _edits(workload, [spec for spec in workload.models if spec.name not in names])


def as_split(workload: Workload, declared: Workload, models: Sequence[ModelSpec]) -> Edits:
    """Return the edits that give models the versions and shares that they have among the models of another plan.

    Args:
        workload: the declared models. Those that the plan does not have stay as they are.
        declared: the workload when that plan was made; it has the entries of versions that are gone since.
        models: the plan's.
    """
    split = (
        by_model((*workload.models, *models)).keys() & {s.model for s in workload.models} & {s.model for s in models}
    )
    known = {spec.name: spec for spec in (*models, *declared.models, *workload.models)}
    others = [spec for spec in workload.models if spec.model not in split]
    shares = ((s.name, {"share_pct": s.share_pct, "shadow": s.shadow}) for s in models if s.model in split)
    return _edits(workload, [*others, *(known[name].model_copy(update=terms) for name, terms in shares)])


def to_take_back(workload: Workload, model: str, version: str) -> str:
    """Return the name of a version that may be taken back: one that does not take the rest.

    Raises:
        InvalidInputError: there is no such version, or it takes the rest.
    """
    versions, rest = _versions(workload, model)
    spec = _known(versions, model, version)
    if spec is rest:
        cure = "Promote another one first (`tenuto model promote`), or go back: `tenuto rollback`."
        raise refused("version", version, f"takes the rest of '{model}'", cure)
    return spec.name


def checked(models: Sequence[ModelSpec], applications: Sequence[Application] = ()) -> Workload:
    """Return a workload of these models and applications; raise `InvalidInputError` when it breaks a rule."""
    data = {"models": tuple(models), "applications": tuple(applications)}
    return parse_document(Workload, data, origin="workload")


def with_models(workload: Workload, models: Sequence[ModelSpec]) -> Workload:
    """Return the workload with other models, unchecked. Stages that asked a version which is not among them ask the one
    that takes the rest, by the names that they had."""
    names = {spec.name for spec in models}

    def followed(stage: Stage) -> Stage:
        if not stage.shared or stage.model in names:
            return stage
        rest = taking_the_rest(spec for spec in models if spec.model == split_name(stage.model)[0])
        return stage if rest is None else stage.model_copy(update={"model": rest.name, "name": stage.label})

    applications = (a.model_copy(update={"stages": tuple(map(followed, a.stages))}) for a in workload.applications)
    return workload.model_copy(update={"models": tuple(models), "applications": tuple(applications)})


def _edits(workload: Workload, models: Sequence[ModelSpec]) -> Edits:
    """Return how models differ from the declared ones, where versions share out their declared rates."""
    before = {spec.name: spec for spec in workload.models}
    after = checked(models, with_models(workload, models).applications).models
    # What a version without a share is declared to be asked by its number is no part of what its model is asked.
    declared = {name: 0.0 if spec.share_pct == 0.0 else spec.rate_rps for name, spec in before.items()}
    rates = shared_out(declared, workload.models, after)
    specs = {s.name: _with_rate(s, rates.get(s.name) or s.rate_rps, workload) for s in after}
    return {name: specs.get(name) for name in (*before, *specs) if specs.get(name) != before.get(name)}


def _with_rate(spec: ModelSpec, rate_rps: float, workload: Workload) -> ModelSpec:
    """Return a version with a rate. Where applications ask its model, clients ask as large a part of it by themselves
    as of all versions now, which are those of `workload`."""
    others = [each for each in workload.models if each.model == spec.model and not each.shadow]
    demands = [each.alone for each in others if each.alone is not None]
    if not demands or spec.shadow or spec.share_pct == 0.0:  # the latter is only asked by its URL
        return spec.model_copy(update={"rate_rps": rate_rps})
    part = sum(each.rate_rps for each in demands) / sum(each.rate_rps for each in others)
    alone = OwnDemand(rate_rps=part * rate_rps, slo_ms=demands[0].slo_ms)
    return spec.model_copy(update={"rate_rps": rate_rps, "alone": alone})


def _versions(workload: Workload, model: str) -> tuple[list[ModelSpec], ModelSpec]:
    versions = [spec for spec in workload.models if spec.model == model]
    rest = taking_the_rest(versions)
    if rest is None:
        cure = one_of(model, sorted({spec.model for spec in workload.models}))
        raise refused("model", model, "is not in the workload", cure)
    return versions, rest


def _known(versions: Sequence[ModelSpec], model: str, version: str) -> ModelSpec:
    for spec in versions:
        if spec.version == version:
            return spec
    raise refused("version", version, f"is no version of '{model}'", f"There is {_listed(versions)}.")


def _listed(versions: Sequence[ModelSpec]) -> str:
    return ", ".join(spec.version for spec in versions)
