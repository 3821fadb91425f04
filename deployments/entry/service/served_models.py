"""The models and applications of the present plan, as requests ask for them: which one a name means, and whether it can
be asked now."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tenuto.batching.applications.stage_times import StageTimes
from tenuto.batching.core.build import from_plan
from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.service.dispatching import Dispatching
from tenuto.deployments.entry.service.planned_application import PlannedApplication
from tenuto.deployments.entry.service.planned_model import ModelInterface, PlannedModel
from tenuto.deployments.entry.service.traffic_split import ShadowCopies, Shadows, Split, traffic_splits
from tenuto.deployments.entry.service.waking_models import WakingModels
from tenuto.deployments.security.keys import Callers
from tenuto.placement import Plan
from tenuto.placement.application import Application
from tenuto.placement.versions import split_name, versioned
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.model_options import HookOptions, ModelOptions


class ServedModels:
    """Invariant: what is here is of one plan. `splits`: how the requests of models that have versions are split.
    `waking`: those that are idle. `copies`: sends shadows what they get copies of."""

    def __init__(self, callers: Callers, *, reads_bodies: bool = True) -> None:
        """Begin without a plan.

        Args:
            callers: the names of models are not told where clients need keys.
            reads_bodies: whether bodies are read here, which needs the models' hooks, and their tokenizers at once.
        """
        self._callers, self._reads_bodies = callers, reads_bodies
        self._plan: Plan | None = None
        self._models: dict[str, PlannedModel] = {}  # with what is asked of applications, by their names
        self._stage_times = StageTimes()
        self.applications: dict[str, PlannedApplication] = {}
        self.splits: dict[str, Split] = {}
        self.waking, self.copies = WakingModels(), ShadowCopies()

    def __getitem__(self, name: str) -> PlannedModel:
        """Return a model by its name in the plan."""
        return self._models[name]

    def follow(self, dispatching: Dispatching) -> None:
        """Take the present plan of a scheduling side, and what gpu-lets hold."""
        plan = dispatching.plan
        if plan is not None and plan is not self._plan and plan.applications:
            self._stage_times.follow(from_plan(plan, check_slos=False))
        self._plan = plan
        known, self._models = self._models, {}
        if plan is not None:
            for spec in plan.models:
                model = self._models[spec.name] = known.get(spec.name) or PlannedModel(spec.name)
                signature, is_ready = dispatching.signature(spec.name), dispatching.is_ready(spec.name)
                hooks = HookOptions()
                if self._reads_bodies:
                    hooks = ModelOptions.parse(spec.options, f"options of {spec.name}").hooks
                model.follow(spec.own_slo_ms, _alone_ms(plan, spec.name), signature, hooks, is_ready=is_ready)
                if self._reads_bodies:
                    model.follow_texts(spec)
        models = self._models
        self.splits = {} if plan is None else traffic_splits(plan.models, lambda n: models[n].is_ready, self._signature)
        self._follow_applications(() if plan is None else plan.applications)
        for name in known.keys() - self._models.keys():
            known[name].close()
        self.waking.follow(plan, models)

    def _follow_applications(self, applications: Sequence[Application]) -> None:
        """Take the applications of a plan. Requests under way go on with what they began with."""
        known, self.applications = self.applications, {}
        for application in applications:
            planned = known.get(application.name)
            if planned is None or planned.application != application:
                how = self.choose_version, self._shadows_of, self.copies
                planned = PlannedApplication(application, self._stage_times, *how)
            planned.follow(lambda name: self._models.get(self.name(split_name(name)[0])) or PlannedModel(name))
            self.applications[application.name] = planned
            self._models[application.name] = planned.model
        for name, planned in known.items():
            if self.applications.get(name) is not planned:
                planned.retire()

    def choose_version(self, model: str) -> PlannedModel:
        """Return a version of the model of a stage for one request: as of requests that name none."""
        split = self._split_of(model)
        name = model if split is None else split.choose(random.random())
        chosen = self._models.get(name) or PlannedModel(name)
        if not self._reads_bodies and self._plan is not None and name in self._models:
            chosen.follow_texts(self._plan.model(name))
        return chosen

    def _shadows_of(self, model: str) -> Shadows:
        """Return the versions of the model of a stage that get copies of its requests."""
        split = self._split_of(model)
        return () if split is None else split.shadows

    def _split_of(self, model: str) -> Split | None:
        return self.splits.get(split_name(model)[0]) if self.splits else None

    def _signature(self, name: str) -> ModelSignature | None:
        """Return the tensors of a model of the plan, as a gpu-let reported them last; None before any did."""
        interface = self._models[name].interface
        return None if interface is None else interface.signature

    def interface(self, name: str, version: str = "") -> ModelInterface:
        """Return a model that can be asked now: the named version, or without a name the one that takes the rest, of
        those that are ready.

        Raises:
            HttpError: 404 for a model or a version the plan does not know, 503 for one that is unserved or whose
                gpu-lets are starting.
        """
        return self.ready_interface(self.find_model(name, version))

    def takes_bytes(self, name: str, version: str) -> bool:
        """Return whether a model, or a version of it, is known to have inputs of bytes."""
        model = self._models.get(self.name(name, version))
        return model is not None and model.interface is not None and model.interface.signature.takes_bytes

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model of the plan."""
        return [model.version for model in self._models.values() if model.model == name]

    def openai_models(self) -> list[str]:
        """Return the models that can be asked by OpenAI's interface now: those that generate, and those that make
        embeddings or scores of texts."""
        ready = [(each.model, each.interface) for each in self._models.values() if each.is_ready]
        return list(dict.fromkeys(name for name, interface in ready if interface and interface.is_openai))

    def name(self, model: str, version: str = "") -> str:
        """Return the plan's name for a client's name."""
        if version or ":" in model:  # the latter is no client's name
            return versioned(model, version or "?")
        split = self.splits.get(model)
        return model if split is None else split.rest

    def find_model(self, name: str, version: str = "") -> PlannedModel:
        """Return a model of the plan, or a version of it; raises `HttpError` 404 if it is unknown."""
        model = self._models.get(self.name(name, version))
        if model is None:
            if self._plan is None:
                raise no_plan()
            versions = self.versions(name)
            if versions:
                raise HttpError(
                    404,
                    f"Request for unknown model: '{name}' has no version '{version}'. Versions here: "
                    f"{', '.join(versions)}.",
                )
            # The names of other models may be secrets of other clients.
            names = dict.fromkeys(model.model for model in self._models.values())
            known = "" if self._callers else f" Models here: {', '.join(names) or '(none)'}."
            raise HttpError(404, f"Request for unknown model: '{name}' is not found.{known}")  # in Triton's words
        return model

    def ready_interface(self, model: PlannedModel) -> ModelInterface:
        """Return the tensors of a model that can be asked now; raises `HttpError` 503 with why it cannot."""
        if model.is_ready and model.interface is not None:
            return model.interface
        plan, application = self._plan, self.applications.get(model.name)
        names = [model.name] if application is None else [stage.model for stage in application.graph.stages]
        self.waking.check(model, names)
        for name in names:
            if plan is not None and name in plan.unserved:
                why = plan.unserved_reasons.get(name, "no reason given")
                raise HttpError(
                    503, f"the plan leaves '{name}' unserved: {why}. Plan again with more GPUs or another policy."
                )
        if application is not None:
            raise HttpError(503, application.problem, retry_after_s=application.retry_after_s)
        raise HttpError(503, f"no gpu-let of '{model.name}' is ready. Retry in a few seconds.", retry_after_s=2)

    def close(self) -> None:
        """End the hooks and functions."""
        for model in self._models.values():
            model.close()
        for application in self.applications.values():
            application.close()


def no_plan() -> HttpError:
    """Return the refusal of whatever is asked before the first plan."""
    return HttpError(503, "no plan is applied yet. Wait a moment and retry.", retry_after_s=1)


def _alone_ms(plan: Plan, model: str) -> float:
    """Return what a batch of one request takes on the fastest gpu-let of a model; 0 where nothing hosts it."""
    alone_ms = [
        program.latency.at(1) * program.slowdown
        for gpulet in plan.gpulets
        for program in gpulet.programs
        if model in program.models and program.latency is not None
    ]
    return min(alone_ms, default=0.0)
