"""How long requests to models take at least, and how long the stages of applications took lately.

The runs feed it themselves. A driver only says which system serves the models: at its start, and with every new plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tenuto.batching.applications.application_graph import ApplicationGraph
from tenuto.batching.core.system import INF, System


class StageTimes:
    """What runs of applications know of the models that they ask; one object for all runs of a process.

    `least_ms` is by model: what a request takes from when it is sent to its answer if it runs at once, alone, on the
    fastest gpu-let; of a model that generates, one token behind a prompt of one. A model without an entry takes no time
    at least.
    """

    def __init__(self, least_ms: Mapping[str, float] | None = None) -> None:
        self._least_ms = dict(least_ms or {})
        self._graphs: dict[int, GraphTimes] = {}  # by the identity of the graph, which each of them holds

    def of(self, graph: ApplicationGraph) -> GraphTimes:
        """Return what is known of the stages of a graph; the same object until the next plan."""
        if id(graph) not in self._graphs:
            self._graphs[id(graph)] = GraphTimes(graph, self)
        return self._graphs[id(graph)]

    def follow(self, system: System) -> None:
        """Take the planned latencies of this system's models from now on."""
        fixed_ms = system.network.alone_ms
        self._least_ms, self._graphs = {}, {}
        for hosts in system.distinct_hosts():
            for program, host in hosts.items():
                for model in system.programs[program].members:
                    name, alone_ms = system.models[model].name, host.planned_batch_ms(1) + fixed_ms
                    self._least_ms[name] = min(alone_ms, self._least_ms.get(name, INF))
        for planned in system.generating:
            name, alone_ms = system.models[planned.model].name, planned.cost.ms(1)
            self._least_ms[name] = min(alone_ms, self._least_ms.get(name, INF))

    def least_ms(self, model: str) -> float:
        """Return what a request to a model takes at least."""
        return self._least_ms.get(model, 0.0)


class GraphTimes:
    """How long the stages of one application take, by stage.

    `least_ms` is what a request needs at least; `needs_ms` is the same, but 0 where a stage may be missing, and
    `needs_behind_ms` what the stages behind it need. How long those took lately at the longest begins with what is
    planned, and after each loss is at least that.

    A longer time fades within about an SLO: what a deadline led to is known so much later, when the request has ended.
    """

    def __init__(self, graph: ApplicationGraph, times: StageTimes) -> None:
        self._graph = graph
        self.least_ms = [times.least_ms(stage.model) for stage in graph.stages]
        self.needs_ms = [
            0.0 if stage.allow_missing else ms for stage, ms in zip(graph.stages, self.least_ms, strict=True)
        ]
        self.needs_behind_ms = graph.longest_behind(self.needs_ms)
        self._planned_behind_ms = graph.longest_behind([stage.budget_ms for stage in graph.stages])
        self._lately_behind_ms = self._planned_behind_ms.copy()
        self._noted_ms = INF  # when the last request was answered

    def behind_ms(self, stage: int, left_ms: float) -> float:
        """Return how much of the time that is left the stages behind one that begins now keep: their part by planned
        budgets, or as long as they took lately where that is less, and at least what they need."""
        planned_ms = self._planned_behind_ms[stage]
        part_ms = left_ms * planned_ms / (self._graph.stages[stage].budget_ms + planned_ms)
        return max(self.needs_behind_ms[stage], min(self._lately_behind_ms[stage], planned_ms, part_ms))

    def note_answer(self, due_ms: Sequence[float], ended_ms: Sequence[float]) -> None:
        """Take note of when the stages of a request of the application were due, and when each had ended."""
        ends_ms = list(ended_ms)  # of each stage with all that come behind it
        now = max(ended_ms)
        faded = 1.0 - math.exp(-max(0.0, now - self._noted_ms) / self._graph.slo_ms)
        self._noted_ms = now
        for stage in reversed(self._graph.order):
            behind_ms = 0.0
            for later in self._graph.stages[stage].later:
                behind_ms = max(behind_ms, ends_ms[later] - due_ms[later])
                ends_ms[stage] = max(ends_ms[stage], ends_ms[later])
            lately_ms = self._lately_behind_ms[stage]
            self._lately_behind_ms[stage] = max(behind_ms, lately_ms + faded * (behind_ms - lately_ms))

    def note_loss_behind(self, stage: int) -> None:
        """Take note of a request of the application that was lost behind a stage."""
        self._lately_behind_ms[stage] = max(self._lately_behind_ms[stage], self._planned_behind_ms[stage])
