"""Applications: one request that is answered by a graph of models, under one deadline for the whole.

A stage asks a model of the workload, which it shares with all that ask it, or a network of its own. A network of its
own becomes a model of the workload, named `application.stage`, with the rate of the stage's requests and the stage's
budget as its SLO. Policies therefore plan applications without knowing of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from tenuto.documents import Fault, ProblemsBelow, StrictModel, repeated
from tenuto.errors import Problem, one_of
from tenuto.placement.arrivals.arrival import Arrival
from tenuto.placement.generates import Generates, GenerationParameters, Lengths, TokenSlo
from tenuto.profiles.latency import LatencyField
from tenuto.profiles.networks.catalogue import is_factory

_NAME = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=60)]
_LABEL = r"^[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9][A-Za-z0-9._-]*)?$"

OFFLINE_MS = 86_400_000.0  # default: a day, for which an offline request may wait
OFFLINE_RPS = 1e-3  # default: so little that an offline model gets a place, and next to no share
MOST_STAGES = 100  # limit: of an application; the largest graph of the papers has nine
MOST_REQUESTS = 1000  # limit: requests that one stage makes for one request of the application
_MOST_TIMES = 16  # derived: of the mean; more than 16 times it come in less than 1e-16 of Poisson counts of mean 5


class Stage(StrictModel):
    """A step of an application: `count` requests to one model, sent when every stage in `after` is complete.

    `model` names a model of the workload, or else a network and its row of the profile files. The stage then has a
    model of its own, with `source`, `options`, `weights_path`, `profile`, `latency` and `sizes` as any model has them.

    `inputs` says which input of the application (`image`) or which output of an earlier stage (`detect.boxes`) each
    input of the model is. Instead, the function `map` makes the stage's requests, `count` in the mean. A stage with
    neither takes the application's inputs that have the names of its model's inputs. With `allow_missing`, the
    application goes on when requests of this stage are lost.

    A model that generates takes a prompt as `text_input` or as `input_ids`, and `parameters` say how its text goes on.

    When a stage has a `part`, the deadline is split in proportion to the parts; else the planner splits it.
    """

    model: str
    name: Annotated[str, Field(pattern=_LABEL, max_length=60)] | None = None  # default: the name of the model
    after: tuple[str, ...] = ()  # with the stages whose outputs it takes
    count: Annotated[float, Field(gt=0, le=MOST_REQUESTS)] = 1  # requests, with `map` in the mean
    most: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] | None = None  # requests that `map` may make
    inputs: dict[str, str] = Field(default_factory=dict)
    map: str | None = None  # package.module:function
    allow_missing: bool = False
    part: Annotated[float, Field(gt=0)] | None = None
    source: str | None = None  # default: the built-in network of the model's name
    profile: str | None = None  # default: the row of the model's name
    latency: LatencyField | None = None  # inline profile
    sizes: dict[str, Lengths] = Field(default_factory=dict)
    weights_path: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    generates: Generates | None = None
    slo: TokenSlo | None = None
    parameters: GenerationParameters | None = None  # of what is generated
    shared: bool = False  # derived: `model` is a model of the workload
    budget_ms: Annotated[float, Field(gt=0)] | None = None  # derived: of the application's SLO, as the planner split it

    @property
    def label(self) -> str:
        """The stage's name."""
        return self.name if self.name is not None else self.model

    @property
    def most_requests(self) -> int:
        """The most requests that the stage makes for one request of the application; without `map` exactly so many."""
        if self.map is None:
            return int(self.count)
        return self.most or min(MOST_REQUESTS, math.ceil(_MOST_TIMES * self.count))

    def draw_counts(self, size: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Return how many requests the stage makes for each of so many requests of the application. Functions make
        Poisson numbers of requests, unless they make `count` at most."""
        if self.most_requests > self.count:
            return np.minimum(generator.poisson(self.count, size), self.most_requests)
        return np.full(size, int(self.count), dtype=np.int64)

    @property
    def own_keys(self) -> list[str]:
        """The keys given that say what a model is, which a shared model says itself."""
        keys = ("source", "profile", "latency", "sizes", "weights_path", "options", "generates", "slo")
        return [key for key in keys if getattr(self, key)]

    @field_validator("map")
    @classmethod
    def _is_function(cls, value: str | None) -> str | None:
        return value if value is None else _named_function(value)

    @model_validator(mode="after")
    def _is_consistent(self) -> Stage:
        if not re.fullmatch(_LABEL, self.label):
            raise Fault(f"'{self.label}' is no name of a stage", "Give it a `name` of letters, digits, '_' and '-'.")
        if self.latency is not None and (self.profile is not None or self.sizes):
            other = "profile" if self.profile is not None else "sizes"
            raise Fault(f"gives both 'latency' and '{other}'", "Keep one of them.")
        if self.map is None:
            if self.count != int(self.count):
                raise Fault(f"{self.count:g} requests without `map`", "Give a whole number, or a function as `map`.")
            if self.most is not None:
                raise Fault("gives `most` without `map`", "Remove it: `count` says how many requests there are.")
            return self
        if self.inputs:
            raise Fault("gives both `inputs` and `map`", "Keep one: `map` makes all inputs.")
        if self.count > self.most_requests:
            raise Fault(f"`count` {self.count:g} exceeds `most` {self.most}", "Raise `most`, or lower `count`.")
        return self


class Application(StrictModel):
    """Requests that are answered when all stages are complete. The stages form a graph without cycles.

    The answer has the `outputs` by name, each an output of a stage (`detect.boxes`), or what a function makes. By
    default it has all outputs of the only last stage; with several last stages they are named `stage.output`.

    One that `streams` has a last stage that generates. Its answer is due by its first token, in `slo_ms`; further
    tokens have the time that the stage's model allows them.

    One that is `offline` has no SLO: each of its stages waits for time that no other request loses. Nothing is planned
    for what it asks of models of the workload.
    """

    name: _NAME
    rate_rps: Annotated[float, Field(gt=0)]
    slo_ms: Annotated[float, Field(gt=0)]
    arrival: Arrival = Arrival()
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=MOST_STAGES)]
    outputs: str | dict[str, str] | None = None  # package.module:function, or by name
    streams: bool = False
    offline: bool = False

    @model_validator(mode="before")
    @classmethod
    def _offline_may_say_less(cls, data: Any) -> Any:
        is_offline = isinstance(data, dict) and data.get("offline") is True
        return {"rate_rps": OFFLINE_RPS, "slo_ms": OFFLINE_MS, **data} if is_offline else data

    @field_validator("outputs", mode="before")
    @classmethod
    def _are_outputs(cls, value: Any) -> Any:
        if isinstance(value, str):
            return _named_function(value)
        is_named = isinstance(value, dict) and value and all(isinstance(x, str) for pair in value.items() for x in pair)
        if value is not None and not is_named:
            cure = "Write for example {boxes: detect.boxes}, or package.module:function."
            raise Fault("is neither a mapping of names to outputs of stages nor a function", cure)
        return value

    @model_validator(mode="after")
    def _is_graph(self) -> Application:
        labels = [stage.label for stage in self.stages]
        twice = repeated(labels)
        if twice:
            raise Fault(f"stages named twice: {', '.join(twice)}", "Give them names of their own, or a count.")
        for stage in self.stages:
            unknown = [label for label in stage.after if label not in labels]
            if unknown:
                raise Fault(
                    f"stage '{stage.label}' comes after '{unknown[0]}', which is no stage", one_of(unknown[0], labels)
                )
        problems = [*self._reference_problems()]
        if problems:
            raise ProblemsBelow(problems)
        # A stage whose output is taken is complete before.
        stages = tuple(
            stage.model_copy(update={"after": tuple(dict.fromkeys([*stage.after, *self._taken_from(stage)]))})
            for stage in self.stages
        )
        object.__setattr__(self, "stages", stages)
        done = {stage.label for stage in in_order(self.stages)}
        circle = ", ".join(label for label in labels if label not in done)
        if circle:
            raise Fault(f"stages wait for each other in a circle: {circle}", "Remove one `after`, or an input.")
        if isinstance(self.outputs, dict):
            waited_for = {label for stage in self.stages for label in stage.after}
            answering = {self.source_of(reference)[0] for reference in self.outputs.values()}
            unused = [label for label in labels if label not in waited_for | answering]
            if unused:
                cure = "Name one of its outputs in `outputs`, let a stage come after it, or remove it."
                raise Fault(f"nothing uses stage '{unused[0]}'", cure)
        if self.streams and (self.streamed is None or isinstance(self.outputs, str)):
            rule = "`streams`, and does not end in one text: it has a function as `outputs`, or not one last request"
            raise Fault(rule, "End it in one stage that generates, with `most: 1` beside its `map`.")
        if self.offline and any(stage.part is not None for stage in self.stages):
            raise Fault("is `offline`, and a stage has a `part` of its SLO", "Remove `part`, or `offline`.")
        return self

    def _reference_problems(self) -> Iterator[Problem]:
        for index, stage in enumerate(self.stages):
            for name, reference in stage.inputs.items():
                yield from self._problems_of(f"stages.{index}.inputs.{name}", reference, is_output=False)
        for name, reference in self.outputs.items() if isinstance(self.outputs, dict) else ():
            yield from self._problems_of(f"outputs.{name}", reference, is_output=True)

    def _problems_of(self, path: str, reference: str, *, is_output: bool) -> Iterator[Problem]:
        label, tensor = self.source_of(reference)
        if label is None and (is_output or "." in reference or not reference):
            stages = ", ".join(f"{stage.label}.…" for stage in self.stages)
            cure = f"Write one of {stages}{'' if is_output else ', or an input of the application without a dot'}."
            yield Problem(path, reference, "names no output of a stage", cure)
        elif label is not None and not tensor:
            yield Problem(path, reference, "names no output", f"Write {label}.OUTPUT.")
        elif label is not None and not is_output and self.stage(label).most_requests > 1:
            cure = "Make its requests one (`map` with `most: 1`), or take them together with a function as `map`."
            yield Problem(path, reference, f"'{label}' makes up to {self.stage(label).most_requests} requests", cure)

    def _taken_from(self, stage: Stage) -> list[str]:
        return [label for label, _ in map(self.source_of, stage.inputs.values()) if label is not None]

    def source_of(self, reference: str) -> tuple[str | None, str]:
        """Return the stage and the output that `stage.output` names; None and the name for an input of the
        application."""
        labels = (stage.label for stage in self.stages if reference.startswith(f"{stage.label}."))
        label = max(labels, key=len, default=None)
        return label, reference if label is None else reference[len(label) + 1 :]

    def stage(self, label: str) -> Stage:
        """Return the stage of that name; KeyError if there is none."""
        for stage in self.stages:
            if stage.label == label:
                return stage
        raise KeyError(label)

    def model_name(self, stage: Stage) -> str:
        """Return the name of the workload's model that a stage asks: a shared one, or the stage's own."""
        return stage.model if stage.shared else f"{self.name}.{stage.label}"

    @property
    def last_stages(self) -> tuple[Stage, ...]:
        """The stages that no other comes after."""
        waited_for = {label for stage in self.stages for label in stage.after}
        return tuple(stage for stage in self.stages if stage.label not in waited_for)

    @property
    def streamed(self) -> Stage | None:
        """The stage whose text is streamed: the only last one, of one request; None if there is none."""
        last = self.last_stages
        return last[0] if self.streams and len(last) == 1 and last[0].most_requests == 1 else None

    # --- the split of the deadline ------------------------------------------------------------------------------------

    @property
    def _weights(self) -> dict[str, float]:
        return {stage.label: stage.budget_ms or stage.part or 1.0 for stage in self.stages}

    def budget_ms(self, stage: Stage) -> float:
        """Return the stage's own part of the deadline. Along the longest path through the stage, the deadline is split
        in proportion to what the planner chose, or to `part`."""
        before, behind = self._reaches(self._weights)
        own = self._weights[stage.label]
        return self.slo_ms * own / (before[stage.label] + behind[stage.label] - own)

    def without_budgets(self) -> Application:
        """Return the application as it was before the planner split its deadline."""
        stages = tuple(stage.model_copy(update={"budget_ms": None}) for stage in self.stages)
        return self.model_copy(update={"stages": stages})

    def with_slo_scaled(self, factor: float) -> Application:
        """Return the application with its SLO multiplied."""
        return self.model_copy(update={"slo_ms": self.slo_ms * factor})

    def _reaches(self, weights: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the largest sum of weights on a path from the begin to each stage, and from it to the end, with its
        own."""
        before: dict[str, float] = {}
        order = in_order(self.stages)
        for stage in order:
            before[stage.label] = weights[stage.label] + max((before[label] for label in stage.after), default=0.0)
        behind = dict(weights)
        for stage in reversed(order):
            for label in stage.after:
                behind[label] = max(behind[label], weights[label] + behind[stage.label])
        return before, behind


def online(applications: Iterable[Application]) -> tuple[Application, ...]:
    """Return those that are not offline, which plans are made for and judged by."""
    return tuple(application for application in applications if not application.offline)


def in_order(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages so that each comes behind those that it waits for. Stages of a circle, and those behind them,
    are left out."""
    ordered: list[Stage] = []
    done = set[str]()
    while ready := [stage for stage in stages if stage.label not in done and done.issuperset(stage.after)]:
        ordered += ready
        done.update(stage.label for stage in ready)
    return ordered


def _named_function(value: str) -> str:
    if not is_factory(value):
        raise Fault("names no function", "Write package.module:function.")
    return value
