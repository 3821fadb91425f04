"""Applications: one request that fans out over several models and joins again, with one deadline for the whole.

Each stage becomes a model of the workload, named `application.stage`. The model has the rate of the stage's requests
and the stage's own part of the deadline. Policies therefore plan applications without knowing of them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from tenuto.documents import Fault, StrictModel, repeated
from tenuto.errors import one_of
from tenuto.placement.arrivals.arrival import Arrival
from tenuto.profiles.latency import LatencyField

_NAME = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=60)]


class Stage(StrictModel):
    """A step of an application: `count` requests to one model, sent when every stage in `after` is complete.

    `model` names the network and its row of the profile files. `part` weighs this stage when the deadline is split.
    """

    model: str
    name: _NAME | None = None  # default: the name of the model
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    after: tuple[str, ...] = ()
    part: Annotated[float, Field(gt=0)] = 1.0
    source: str | None = None  # default: the built-in network of the model's name
    latency: LatencyField | None = None  # inline profile

    @property
    def label(self) -> str:
        """The stage's name."""
        return self.name if self.name is not None else self.model


class Application(StrictModel):
    """Requests that are answered when all stages are complete. The stages form a graph without cycles."""

    name: _NAME
    rate_rps: Annotated[float, Field(gt=0)]
    slo_ms: Annotated[float, Field(gt=0)]
    arrival: Arrival = Arrival()
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]

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
        done: set[str] = set()
        while len(done) < len(labels):
            ready = {s.label for s in self.stages if s.label not in done and done.issuperset(s.after)}
            if not ready:
                rest = ", ".join(label for label in labels if label not in done)
                raise Fault(f"stages wait for each other in a circle: {rest}", "Remove one `after`.")
            done |= ready
        return self

    def model_name(self, stage: Stage) -> str:
        """Return the name of the model that a stage becomes in the workload."""
        return f"{self.name}.{stage.label}"

    def _before(self, stage: Stage) -> float:
        """Return the largest sum of parts on a path to this stage, without the part of the stage."""
        earlier = [other for other in self.stages if other.label in stage.after]
        return max((self._before(other) + other.part for other in earlier), default=0.0)

    def _behind(self, stage: Stage) -> float:
        """Return the largest sum of parts on a path from this stage to the end, without the part of the stage."""
        later = [other for other in self.stages if stage.label in other.after]
        return max((self._behind(other) + other.part for other in later), default=0.0)

    def budget_ms(self, stage: Stage) -> float:
        """Return the stage's own part of the deadline, in proportion to `part` on its longest path through the
        graph."""
        return self.slo_ms * stage.part / (self._before(stage) + stage.part + self._behind(stage))

    def complete_by_ms(self, stage: Stage) -> float:
        """Return when the stage must be complete, counted from the arrival of the application's request.

        When earlier stages take less than their budgets, this stage has the time that is left over as well.
        """
        before = self._before(stage) + stage.part
        return self.slo_ms * before / (before + self._behind(stage))
