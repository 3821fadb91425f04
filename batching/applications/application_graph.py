"""The stages of an application by index, what each waits for, and how the deadline is shared along the paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter

from tenuto.placement.application import Application


@dataclass(frozen=True)
class GraphStage:
    """A stage of an application.

    `model` is the one that its requests ask. `before` and `later` are the stages that it waits for and that wait for
    it. `count` is the mean number of its requests. `budget_ms` is its planned part of the deadline. Of one that is
    streamed, the first token counts as its end.
    """

    label: str
    model: str
    before: tuple[int, ...]
    later: tuple[int, ...]
    count: float
    budget_ms: float
    allow_missing: bool = False
    is_streamed: bool = False


@dataclass(frozen=True)
class ApplicationGraph:
    """The stages of an application; an index of a stage is its place here, in the order of the workload."""

    name: str
    slo_ms: float
    stages: tuple[GraphStage, ...]

    @classmethod
    def of(cls, application: Application) -> ApplicationGraph:
        """Return the graph of an application."""
        index = {stage.label: place for place, stage in enumerate(application.stages)}
        stages = tuple(
            GraphStage(
                stage.label,
                application.model_name(stage),
                tuple(sorted({index[label] for label in stage.after})),
                tuple(place for place, other in enumerate(application.stages) if stage.label in other.after),
                stage.count,
                application.budget_ms(stage),
                stage.allow_missing,
                stage == application.streamed,
            )
            for stage in application.stages
        )
        return cls(application.name, application.slo_ms, stages)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All stages, each behind those that it waits for."""
        return tuple(TopologicalSorter({place: stage.before for place, stage in enumerate(self.stages)}).static_order())

    @cached_property
    def ahead(self) -> dict[int, set[int]]:
        """All stages that must be complete before each stage."""
        ahead: dict[int, set[int]] = {}
        for place in self.order:
            before = self.stages[place].before
            ahead[place] = {*before}.union(*(ahead[other] for other in before))
        return ahead

    def longest_behind(self, each: Sequence[float]) -> list[float]:
        """Return, for every stage, the largest sum over a path of the stages behind it, without its own value."""
        behind = [0.0] * len(self.stages)
        for place in reversed(self.order):
            behind[place] = max((each[later] + behind[later] for later in self.stages[place].later), default=0.0)
        return behind
