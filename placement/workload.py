"""The workload: which models are served, at which rates, and how fast they must answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, field_validator, model_serializer, model_validator

from tenuto.documents import Fault, ProblemsBelow, StrictModel, dump_yaml, load_document, parse_document
from tenuto.errors import Problem, one_of, refused
from tenuto.placement.application import OFFLINE_MS, OFFLINE_RPS, Application
from tenuto.placement.arrivals.arrival import Arrival
from tenuto.placement.arrivals.arrival_processes import PROCESSES
from tenuto.placement.generates import Generates, Lengths, TokenSlo
from tenuto.placement.versions import FIRST, completed, split_name, split_problems
from tenuto.profiles import Generation, LatencyTable, LinearLatency, ModelProfile, Profiles
from tenuto.profiles.latency import LatencyField
from tenuto.profiles.networks.catalogue import CATALOGUE
from tenuto.profiles.size_classes import Sizes, class_of, find_classes

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
# A model, or one of its versions, which is a model of its own beside it: `resnet50:2`.
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9][A-Za-z0-9._-]*)?$", max_length=192)]
Positive = Annotated[float, Field(gt=0)]

# What counts when not everything can be served: all requests alike, the model that is served worst, or the requests in
# time by the weights of their models.
Objective = Literal["total", "each", "weighted"]

MpsUse = Literal["off", "auto", "required"]


MOST_MODELS = 10_000  # limit: models of a workload; no policy plans as many within a day
_DRAWN = 4000  # limit: requests that are drawn; a class with fewer than one in as many seldom runs
# Derived: three standard deviations of a thousand Poisson requests, so that a model does not exceed its rate by chance.
EXCESS = 1.1  # of the planned rate, beyond which a model exceeds it

# What may be lost at once: a GPU, a node with all its GPUs, a rack with all its nodes, or all of a cluster, which is a
# cell of a fleet.
Spread = Literal["gpu", "node", "rack", "cell"]


class OwnDemand(StrictModel):
    """What clients ask of a model by themselves, beside the applications that ask it. Without `slo_ms` its requests may
    take as long as those of the applications."""

    rate_rps: Annotated[float, Field(ge=0)]
    slo_ms: Positive | None = None


class ModelSpec(StrictModel):
    """One model of the workload, or one version of a model. `name` is unique and appears in URLs: `resnet50`, which is
    version 1, or `resnet50:2`.

    Of the requests that name no version, a version with `share_pct` is sent that many in a hundred, and a `shadow`
    copies of so many (all by default), the answers to which go nowhere. One version has neither, and takes the rest.

    Under overload, models of higher `priority` are served first. `weight` is the worth of one request in time under the
    objective `weighted`. `longest_hold_ms` limits how long a request waits for a larger batch while a gpu-let is idle;
    when it is None, the scheduler decides.

    `spread`: the model's replicas lie on as many GPUs, nodes or racks as possible. `survive`: the part of the planned
    rate, above 0 and at most 1, that must be left after the loss of any one of these. `only_on` and `keep_off` name
    nodes, racks or GPU ids where the model must or must not lie. `prefer` names a place where the model lies if that
    costs no GPU, no rate, and nothing that another model asks for.

    When nobody has asked the model for `idle_after_s`, a controller in mode `act` takes its replicas away until
    somebody asks again.

    A model that `generates` has an `slo` in place of `slo_ms`, which is then the time for an answer of mean length.

    A model that is `offline` has no SLO: its requests run in time that no other one loses. By default they may wait for
    a day, and the plan is made for next to none of them.

    When stages of applications ask the model, `rate_rps` has their requests as well, `slo_ms` is the least of its own
    and of their budgets, and `alone` is what clients ask of it by themselves.
    """

    name: ModelName
    share_pct: Annotated[float, Field(ge=0, le=100)] | None = None
    shadow: bool = False
    source: str | None = None  # torchvision/resnet50, transformers/bert, package.module:factory; default: the catalogue
    rate_rps: Positive
    slo_ms: Positive
    slo: TokenSlo | None = None
    generates: Generates | None = None
    sizes: dict[str, Lengths] = Field(default_factory=dict)  # of inputs that vary: how large requests are, by name
    arrival: Arrival = Arrival()
    profile: str | None = None  # the profile row, when it differs from the name
    latency: LatencyField | None = None  # inline profile: any GPU type, whole GPU
    weight: Positive = 1.0
    priority: int = 0
    offline: bool = False
    longest_hold_ms: Annotated[float, Field(ge=0)] | None = None
    spread: Spread | None = None
    survive: Annotated[float, Field(gt=0, le=1)] | None = None
    only_on: tuple[str, ...] = ()
    keep_off: tuple[str, ...] = ()
    prefer: str | None = None
    idle_after_s: Positive | None = None
    weights_path: str | None = None  # local safetensors or state dict; without it, weights are random with a fixed seed
    options: dict[str, Any] = Field(default_factory=dict)  # passed to the executor, such as dtype
    alone: OwnDemand | None = None  # derived; None: no application asks it

    @property
    def own_slo_ms(self) -> float:
        """The time for a request that belongs to no application."""
        return self.slo_ms if self.alone is None or self.alone.slo_ms is None else self.alone.slo_ms

    @property
    def model(self) -> str:
        """The name that clients know, which all versions have."""
        return split_name(self.name)[0]

    @property
    def version(self) -> str:
        """Which version of the model it is."""
        return split_name(self.name)[1]

    @property
    def is_tried(self) -> bool:
        """Whether it is a version beside the one that takes the rest."""
        return self.shadow or self.share_pct is not None

    @property
    def network(self) -> str:
        """Where the network comes from: its source, or its name in the catalogue."""
        return self.source or self.model

    @property
    def profile_row(self) -> str:
        """The row of the profile files that describes this model."""
        return self.profile or self.model

    @field_validator("name")
    @classmethod
    def _first_has_no_number(cls, value: str) -> str:
        model, version = split_name(value)
        if version == FIRST and value != model:
            raise Fault("version 1 has the name of its model", f"Write '{model}'.")
        return value

    @model_validator(mode="before")
    @classmethod
    def _answer_time(cls, data: Any) -> Any:
        """Derive `slo_ms` from `slo`, and what is not said of an offline model."""
        if isinstance(data, dict) and data.get("offline") is True:
            data = {"rate_rps": OFFLINE_RPS, **data}
            if "slo" not in data:
                most_ms = data.pop("slo_ms", OFFLINE_MS)
                both = {"ttft_ms": most_ms, "tpot_ms": most_ms}
                data |= {"slo_ms": most_ms} if data.get("generates") is None else {"slo": both}
        if not isinstance(data, dict) or not isinstance(data.get("slo"), dict | TokenSlo):
            return data
        if "slo_ms" in data:
            raise Fault("gives both 'slo' and 'slo_ms'", "Keep `slo`; `slo_ms` follows from it.")
        try:
            slo = TokenSlo.model_validate(data["slo"])
            lengths = Generates.model_validate(data.get("generates") or {}).output_tokens
        except ValidationError:
            return {**data, "slo_ms": 1.0}  # the fields' own validation reports it
        return {**data, "slo_ms": slo.answer_ms(1.0 if lengths is None else lengths.mean)}

    @model_serializer(mode="wrap")
    def _without_what_is_derived(self, handler: Any) -> Any:
        data = handler(self)
        if self.slo is not None:
            data.pop("slo_ms", None)
        return data

    @model_validator(mode="after")
    def _one_cost(self) -> ModelSpec:
        if self.profile is not None and self.latency is not None:
            raise Fault("gives both 'profile' and 'latency'", "keep one of them")
        if self.sizes and (self.generates is not None or self.latency is not None):
            other = "generates" if self.generates is not None else "has an inline latency"
            raise Fault(
                f"gives `sizes`, and {other}", "Leave `sizes` away, or give a profile that was measured by them."
            )
        return self

    @model_validator(mode="after")
    def _generates_under_its_slo(self) -> ModelSpec:
        if self.generates is None:
            if self.slo is not None:
                raise Fault("`slo` is for models that generate", "Give `generates`, or `slo_ms` in place of `slo`.")
            return self
        if self.slo is None:
            raise Fault("generates, and has no `slo`", "Give slo: {ttft_ms: …, tpot_ms: …} in place of slo_ms.")
        if self.latency is not None:
            raise Fault("generates, and has an inline latency", "Give a profile with `generation` instead.")
        lengths = (self.generates.prompt_tokens, self.generates.output_tokens)
        process = PROCESSES.get(self.arrival.process)
        if process is not None and process.tokens is None and None in lengths:
            raise Fault(
                "generates, and does not say how long prompts and outputs are",
                "Give `prompt_tokens` and `output_tokens` in `generates`, or a trace that has these columns.",
            )
        return self

    def with_slo_scaled(self, factor: float) -> ModelSpec:
        """Return the same model with its SLO multiplied by `factor`."""
        slo = None if self.slo is None else self.slo.scaled(factor)
        alone = self.alone
        if alone is not None and alone.slo_ms is not None:
            alone = alone.model_copy(update={"slo_ms": alone.slo_ms * factor})
        return self.model_copy(update={"slo_ms": self.slo_ms * factor, "slo": slo, "alone": alone})

    def with_rate_scaled(self, factor: float) -> ModelSpec:
        """Return the same model with its rates multiplied by `factor`."""
        alone = self.alone
        if alone is not None:
            alone = alone.model_copy(update={"rate_rps": alone.rate_rps * factor})
        return self.model_copy(update={"rate_rps": self.rate_rps * factor, "alone": alone})


class Workload(StrictModel):
    """The models that share the cluster, including the stages of applications. Invariant: names are unique."""

    models: Annotated[tuple[ModelSpec, ...], Field(max_length=MOST_MODELS)] = ()
    applications: tuple[Application, ...] = ()
    mps: MpsUse = "auto"  # CUDA MPS for gpu-lets that share a GPU
    merge: Literal["off", "auto", "all"] | tuple[tuple[str, ...], ...] = "off"  # models to run as one merged program
    objective: Objective = "weighted"
    spread: Spread | None = None  # the default for models without `spread`
    survive: Annotated[float, Field(gt=0, le=1)] | None = None  # the default for models without `survive`
    # Whether the copies of a batch overlap with the execution of the batch before; None: the cluster's GPUs decide
    # (`Cluster.streams`).
    streaming: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _add_what_is_not_said(cls, data: Any) -> Any:
        """Complete versions, and add the stages of applications as models, unless they are there already, as in a
        dumped workload."""
        if isinstance(data, dict) and isinstance(data.get("models"), list | tuple):
            data = {**data, "models": completed(data["models"])}
        if not isinstance(data, dict) or not isinstance(data.get("applications"), list | tuple):
            return data
        models = data.get("models") or ()
        if not isinstance(models, list | tuple):
            return data
        try:
            applications = [Application.model_validate(raw) for raw in data["applications"]]
        except ValidationError:  # the field's own validation reports it, and a model may lack what stages ask of it
            terms = {"rate_rps": 1.0, "slo_ms": 1.0}
            return {**data, "models": [{**terms, **m} if isinstance(m, dict) and "slo" not in m else m for m in models]}
        return {**data, **_with_stages(models, applications)}

    @model_validator(mode="after")
    def _for_all_models(self) -> Workload:
        for key in ("spread", "survive"):
            value = getattr(self, key)
            if value is not None:
                models = (s if getattr(s, key) else s.model_copy(update={key: value}) for s in self.models)
                object.__setattr__(self, "models", tuple(models))
        return self

    @model_validator(mode="after")
    def _shadows_go_last(self) -> Workload:
        others = [spec.priority for spec in self.models if not spec.shadow]
        if others and len(others) < len(self.models):
            last = min(others) - 1
            models = (s.model_copy(update={"priority": min(s.priority, last)}) if s.shadow else s for s in self.models)
            object.__setattr__(self, "models", tuple(models))
        return self

    @model_validator(mode="after")
    def _unique_names(self) -> Workload:
        seen: set[str] = set()
        problems = []
        for index, model in enumerate(self.models):
            if model.name in seen:
                problems.append(
                    Problem(
                        f"models.{index}.name",
                        model.name,
                        "name is used twice",
                        "Rename one of them; `profile:` lets both use the same measurements.",
                    )
                )
            seen.add(model.name)
        callers = [application.name for application in self.applications]
        for index, name in enumerate(callers):
            if name in callers[:index] or name in seen:
                problems.append(
                    Problem(f"applications.{index}.name", name, "name is used twice", "Rename one of them.")
                )
        problems += split_problems(self.models)
        problems += self._stage_problems()
        if problems:
            raise ProblemsBelow(problems)
        return self

    def _stage_problems(self) -> Iterator[Problem]:
        """Yield what is wrong with the models that stages ask."""
        specs = {spec.name: spec for spec in self.models}
        models = {spec.model for spec in self.models}
        for number, application in enumerate(self.applications):
            for index, stage in enumerate(application.stages):
                path, spec = f"applications.{number}.stages.{index}", specs.get(application.model_name(stage))
                if spec is None:
                    yield Problem(
                        f"{path}.model",
                        stage.model,
                        "no such model in the workload",
                        one_of(stage.model, sorted(specs)),
                    )
                elif stage.model not in specs and split_name(stage.model)[0] in models:
                    rule, cure = "the workload has no such version", one_of(stage.model, sorted(specs))
                    yield Problem(f"{path}.model", stage.model, rule, cure)
                elif stage.shared and stage.own_keys:
                    rule = f"repeats {', '.join(stage.own_keys)} of the workload's model '{stage.model}'"
                    cure = "Remove these keys, or give the stage a model of another name."
                    yield Problem(path, stage.model, rule, cure)
                elif stage.shared and spec.is_tried:
                    cure = "Ask the version that takes the rest."
                    yield Problem(f"{path}.model", stage.model, "is a version on trial, which may be taken back", cure)
                elif spec.offline and not application.offline:
                    cure = f"Write `offline: true` at '{application.name}', or remove it at the model."
                    yield Problem(f"{path}.model", stage.model, "is offline, and the application is not", cure)
                elif stage == application.streamed and spec.generates is None:
                    cure = "Remove `streams`, or end in a stage that generates."
                    yield Problem(
                        f"{path}.model", stage.model, "is the last stage of a stream, and does not generate", cure
                    )
                elif stage.parameters is not None and spec.generates is None:
                    cure = "Leave `parameters` out, or give `generates` and `slo`."
                    yield Problem(f"{path}.parameters", stage.model, "does not generate", cure)

    @field_validator("merge", mode="before")
    @classmethod
    def _by_name_or_groups(cls, value: Any) -> Any:
        if value in ("off", "auto", "all"):
            return value
        if value is False:
            return "off"
        groups = value if isinstance(value, list | tuple) else ()
        if not groups or not all(
            isinstance(group, list | tuple) and len(group) > 1 and all(isinstance(name, str) for name in group)
            for group in groups
        ):
            raise Fault(
                "must be 'off', 'auto', 'all' or a list of groups of two or more models", "Write for example [[a, b]]."
            )
        return value

    @model_validator(mode="after")
    def _groups_of_known_models(self) -> Workload:
        names, taken, problems = {model.name for model in self.models}, set[str](), []
        for index, group in enumerate(self.merge if isinstance(self.merge, tuple) else ()):
            for name in group:
                if name not in names:
                    rule, cure = "no such model in the workload", one_of(name, sorted(names))
                elif name in taken:
                    rule, cure = "is named twice in the groups", "Keep it in one of them."
                else:
                    taken.add(name)
                    continue
                problems.append(Problem(f"merge.{index}", name, rule, cure))
        if problems:
            raise ProblemsBelow(problems)
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and validate a workload file; raises `InvalidInputError` with every problem found."""
        return cls.of_document(load_document(path), str(path))

    @classmethod
    def of_document(cls, data: Any, origin: str) -> Self:
        """Validate what was read from a file of that name, as `load` does."""
        if isinstance(data, dict) and data.keys() & {"gpulets", "http_options"}:
            raise refused(origin, None, "is a plan and no workload", "Give the workload that it was made from.")
        return parse_document(cls, data, origin=origin)

    def __getitem__(self, name: str) -> ModelSpec:
        """Return the model of that name; KeyError if there is none."""
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)

    @property
    def rate_rps(self) -> float:
        """The offered rate of all models together."""
        return sum(model.rate_rps for model in self.models)

    def dump(self) -> str:
        """Return the workload as YAML. `Workload.load` of the text gives an equal workload."""
        return dump_yaml(self.model_dump(mode="json", exclude_defaults=True, exclude_none=True))

    def scaled(self, factor: float) -> Workload:
        """Return the same workload with every rate multiplied by `factor`."""
        models = tuple(model.with_rate_scaled(factor) for model in self.models)
        applications = tuple(a.model_copy(update={"rate_rps": a.rate_rps * factor}) for a in self.applications)
        return self.model_copy(update={"models": models, "applications": applications})

    def with_budgets(self, applications: Sequence[Application]) -> Workload:
        """Return the same workload with other budgets of some applications' stages, and the SLOs that follow from them
        for the models that these ask."""
        changed = {a.model_name(stage) for a in applications for stage in a.stages if a not in self.applications}
        budgets: dict[str, list[float]] = {}
        for application in applications:
            for stage in application.stages:
                budgets.setdefault(application.model_name(stage), []).append(application.budget_ms(stage))
        models = []
        for spec in self.models:
            if spec.name in changed and spec.slo is None:
                own_ms = math.inf if spec.alone is None else spec.alone.slo_ms or math.inf
                spec = spec.model_copy(update={"slo_ms": round(min(own_ms, *budgets[spec.name]), 6)})
            models.append(spec)
        return self.model_copy(update={"models": tuple(models), "applications": tuple(applications)})


def _with_stages(models: Sequence[Any], applications: list[Application]) -> dict[str, Any]:
    """Return the entries of a workload's models with those that applications add, and what applications ask of the
    others. The stages of the applications say which models they share."""
    names = {_name_of(entry) for entry in models}
    asking: dict[str, list[tuple[float, float]]] = {}  # by model: rate and budget of each stage
    added = []
    for place, application in enumerate(applications):
        stages = tuple(
            stage
            if stage.shared or stage.model not in names or f"{application.name}.{stage.label}" in names
            else stage.model_copy(update={"shared": True})
            for stage in application.stages
        )
        applications[place] = application = application.model_copy(update={"stages": stages})
        for stage in stages:
            name, rate_rps, budget_ms = (
                application.model_name(stage),
                application.rate_rps * stage.count,
                application.budget_ms(stage),
            )
            if stage.shared and not application.offline:
                asking.setdefault(name, []).append((rate_rps, budget_ms))
            elif not stage.shared and name not in names:
                is_inline = stage.latency is not None
                slo = {"slo_ms": budget_ms} if stage.slo is None else {"slo": stage.slo}
                added.append(
                    {
                        "name": name,
                        "source": stage.source or (None if is_inline and stage.model not in CATALOGUE else stage.model),
                        "rate_rps": rate_rps,
                        **slo,
                        "generates": stage.generates,
                        "arrival": application.arrival,
                        "offline": application.offline,
                        "profile": None if is_inline else stage.profile or stage.model,
                        **{key: getattr(stage, key) for key in ("latency", "sizes", "weights_path", "options")},
                    }
                )
    # Stages ask a model as clients do that name no version: each version on trial gets its share.
    by_model = {split_name(name)[0]: demands for name, demands in asking.items()}
    tried: dict[str, float] = {}
    for entry in models:
        model = split_name(_name_of(entry) or "")[0]
        tried[model] = tried.get(model, 0.0) + (_share_of(entry) or 0.0)
    shared = []
    for entry in models:
        name = _name_of(entry) or ""
        model = split_name(name)[0]
        part = max(0.0, 1.0 - tried[model]) if name in asking else _share_of(entry, copies=True) or 0.0
        demands = [(part * rate_rps, budget_ms) for rate_rps, budget_ms in by_model.get(model, ()) if part]
        shared.append(_with_demands(entry, demands))
    return {"models": [*shared, *added], "applications": applications}


def _share_of(entry: Any, *, copies: bool = False) -> float | None:
    """Return the part of its model's requests that a version on trial is sent, or with `copies` is sent copies of; None
    for others, and for what the schema refuses."""
    raw = entry.model_dump() if isinstance(entry, ModelSpec) else entry if isinstance(entry, dict) else {}
    is_copied = raw.get("shadow") is True
    share = raw.get("share_pct") if copies or not is_copied else None
    share = 100.0 if share is None and copies else share
    return share / 100.0 if isinstance(share, int | float) and 0.0 <= share <= 100.0 else None


def _name_of(entry: Any) -> str | None:
    """Return the name of a model or of its entry in a file; None for what the schema refuses."""
    name = entry.name if isinstance(entry, ModelSpec) else entry.get("name") if isinstance(entry, dict) else None
    return name if isinstance(name, str) else None


def _with_demands(entry: Any, demands: Sequence[tuple[float, float]]) -> Any:
    """Return the entry of a model with the rates and budgets of the stages that ask it, unless it has them already, as
    in a dumped workload."""
    raw = entry.model_dump(exclude_defaults=True) if isinstance(entry, ModelSpec) else entry
    if not demands or raw.get("alone") is not None:
        return entry
    try:
        alone = OwnDemand.model_validate({"rate_rps": raw.get("rate_rps", 0.0), "slo_ms": raw.get("slo_ms")})
    except ValidationError:
        return entry  # the fields' own validation reports it
    raw = {**raw, "rate_rps": alone.rate_rps + sum(rate_rps for rate_rps, _ in demands), "alone": alone}
    if not isinstance(raw.get("slo"), dict):  # the SLO of tokens is the model's own
        raw["slo_ms"] = min(alone.slo_ms or math.inf, *(budget_ms for _, budget_ms in demands))
    return raw


def staged_models(applications: Iterable[Application]) -> set[str]:
    """Return the models that stages ask, but for those that offline applications share with others."""
    return {a.model_name(stage) for a in applications for stage in a.stages if not (a.offline and stage.shared)}


def own_demands(models: Iterable[ModelSpec], applications: Iterable[Application]) -> list[ModelSpec]:
    """Return the models that clients ask by themselves, with the rate and the SLO of these requests."""
    staged = staged_models(applications)
    alone = []
    for spec in models:
        if spec.alone is None:
            alone += [] if spec.name in staged else [spec]
        elif spec.alone.rate_rps:
            alone.append(spec.model_copy(update={"rate_rps": spec.alone.rate_rps, "slo_ms": spec.own_slo_ms}))
    return alone


def offline_names(models: Iterable[ModelSpec], applications: Iterable[Application]) -> list[str]:
    """Return the models and applications that are offline."""
    return [spec.name for spec in models if spec.offline] + [app.name for app in applications if app.offline]


def client_targets(models: Sequence[ModelSpec], applications: Sequence[Application]) -> list[ModelSpec]:
    """Return the models that clients ask by themselves, and behind them the applications, which clients ask as they ask
    models. Those that stream have an `slo`, whose TTFT is theirs."""
    by_name = {spec.name: spec for spec in models}
    targets = own_demands(models, applications)
    for app in applications:
        first = [by_name[app.model_name(stage)] for stage in app.stages if not stage.after]
        sizes = {name: lengths for spec in first for name, lengths in spec.sizes.items()}
        spec = ModelSpec(
            name=app.name,
            rate_rps=app.rate_rps,
            slo_ms=app.slo_ms,
            arrival=app.arrival,
            sizes=sizes,
            offline=app.offline,
        )
        writes = None if app.streamed is None else by_name[app.model_name(app.streamed)].slo
        if writes is not None:
            slo = TokenSlo(ttft_ms=app.slo_ms, tpot_ms=writes.tpot_ms)
            spec = spec.model_copy(update={"slo": slo})
        targets.append(spec)
    return targets


def lacking(models: Iterable[ModelSpec], edits: Mapping[str, ModelSpec | None]) -> list[str]:
    """Return the models whose edited entries are not among those of a plan, or that are although they are removed
    (None). Rates do not count: whoever plans may plan for others."""
    planned = {spec.name: spec for spec in models}

    def is_lacking(spec: ModelSpec | None, entry: ModelSpec | None) -> bool:
        if spec is None or entry is None:
            return entry is not spec
        if spec.alone is not None and entry.alone is not None:
            entry = entry.model_copy(update={"alone": entry.alone.model_copy(update={"rate_rps": spec.alone.rate_rps})})
        return spec.model_copy(update={"rate_rps": entry.rate_rps}) != entry

    return [name for name, spec in edits.items() if is_lacking(spec, planned.get(name))]


def generation_of(spec: ModelSpec, gpu_type: str, profiles: Profiles) -> Generation:
    """Return what it costs to generate with a workload's model on a GPU type.

    Raises:
        InvalidInputError: there is no such profile, or it does not say that.
    """
    generation = profile_of(spec, gpu_type, profiles).generation
    if generation is None:
        rule = f"its profile on {gpu_type} has no `generation`, the cost of steps"
        cure = "Make one with `tenuto profile --generates`, or leave `generates` away."
        raise refused(f"models.{spec.name}.generates", spec.profile_row, rule, cure)
    return generation


def profile_of(spec: ModelSpec, gpu_type: str, profiles: Profiles) -> ModelProfile:
    """Return the profile of a workload's model on a GPU type: its inline latency, or else its row of the profile files.
    Of a model whose requests vary in size it has the mean over the sizes that come, or the largest size where the
    workload says none. Where they cannot be padded, each shape of a batch runs by itself.

    Raises:
        InvalidInputError: neither exists (the message lists the known rows), or the sizes that come are not measured.
    """
    profile = profile_by_size(spec, gpu_type, profiles)
    if not profile.size_names:
        return profile
    parts = size_parts(spec, profile.size_names, profile.size_classes)
    if profile.pads:
        return profile.mean_over(parts)
    largest = tuple(max(sizes) for sizes in zip(*profile.measured_sizes, strict=True))
    (chance,) = equal_shapes(spec, [largest], profile.size_names)
    return profile.mean_over(parts, chance)


def profile_by_size(spec: ModelSpec, gpu_type: str, profiles: Profiles) -> ModelProfile:
    """Return the same profile with the points of all sizes, if it was measured by size and the workload says which
    come; else with those of the largest size, to which all requests are padded. Raises as `profile_of`."""
    if isinstance(spec.latency, LinearLatency):
        return ModelProfile(line=spec.latency)
    if isinstance(spec.latency, LatencyTable):
        points = [{"batch_size": size, "latency_ms": latency} for size, latency in spec.latency.points.items()]
        return ModelProfile.model_validate({"points": points})
    profile = profiles.get(spec.profile_row, gpu_type)
    if profile.size_names and not spec.sizes:
        return profile.by_class[profile.size_classes[-1]]
    if spec.sizes.keys() != {*profile.size_names}:
        known = ", ".join(profile.size_names)
        rule = f"its profile on {gpu_type} was measured {f'by {known}' if known else 'for one size of requests only'}"
        cure = f"Give {', '.join(f'{name}: …' for name in profile.size_names)} in `sizes`." if known else ""
        given = ", ".join(spec.sizes) or None
        cure = cure or f"Leave `sizes` away, or measure it with `tenuto profile --sizes {given}=…`."
        raise refused(f"models.{spec.name}.sizes", given, rule, cure)
    return profile


def size_parts(spec: ModelSpec, names: Sequence[str], classes: Sequence[Sizes]) -> tuple[float, ...]:
    """Return the part of a model's requests in each size class; they sum to less than 1 where requests are larger.

    The sizes of a request, in the order of `names`, are independent of each other. So each class has the parts of the
    boxes between measured sizes that it covers, and no smaller class does.
    """
    axes = [sorted({sizes[axis] for sizes in classes}) for axis in range(len(names))]
    parts = [0.0] * len(classes)
    below = [[0.0, *map(spec.sizes[name].part_up_to, axis)] for name, axis in zip(names, axes, strict=True)]
    for box in product(*(range(len(axis)) for axis in axes)):
        place = class_of(classes, tuple(axis[at] for axis, at in zip(axes, box, strict=True)))
        if place is not None:
            parts[place] += math.prod(up[at + 1] - up[at] for up, at in zip(below, box, strict=True))
    return tuple(parts)


def equal_shapes(spec: ModelSpec, classes: Sequence[Sizes], names: Sequence[str] | None = None) -> tuple[float, ...]:
    """Return for each size class the chance that two of its requests have one shape, of requests that are drawn. The
    sizes of a class are in the order of `names`; default: the workload's."""
    generator = np.random.default_rng(0)
    drawn = np.column_stack([spec.sizes[name].draw(_DRAWN, generator) for name in names or spec.sizes])
    places, chances = find_classes(classes, drawn), []
    for place in range(len(classes)):
        _, counts = np.unique(drawn[places == place], axis=0, return_counts=True)
        pairs = counts.sum() * (counts.sum() - 1)
        chances.append(float((counts * (counts - 1)).sum() / pairs) if pairs else 0.0)
    return tuple(chances)


def draw_sizes(
    models: Sequence[ModelSpec], index: NDArray[Any], draws: Callable[[int, str], np.random.Generator]
) -> NDArray[np.int64]:
    """Return the sizes of requests, a row each, in the order of the workload; the rest of a row is 0.

    Args:
        models: of which some have `sizes`.
        index: the place of each request's model.
        draws: the source of randomness for one size of the model at a place.
    """
    sizes = np.zeros((len(index), max(len(spec.sizes) for spec in models)), dtype=np.int64)
    for place, spec in enumerate(models):
        mine = np.flatnonzero(index == place)
        for column, (name, lengths) in enumerate(spec.sizes.items()):
            sizes[mine, column] = lengths.draw(len(mine), draws(place, name))
    return sizes
