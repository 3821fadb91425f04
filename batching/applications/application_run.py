"""One request of an application under way: which stages are due, by when their requests must be answered, and when
the request is given up.
"""

from __future__ import annotations

import math

from tenuto.batching.applications.application_graph import ApplicationGraph
from tenuto.batching.applications.stage_times import StageTimes
from tenuto.batching.core.system import TIME_TOLERANCE_MS


class ApplicationRun:
    """Invariant: a stage is due when all stages that it waits for are complete; its driver then says by `expand` how
    many requests it makes. It is complete when each of them was answered, or lost where the stage allows that.

    A driver calls `begin`, and for every stage that becomes due: `cannot_end`, `expand`, and for each request, which
    must be answered by `deadline_ms`, `answered` or `lost`. Times are ms on the driver's clock. When the run ends
    otherwise than by `lost` or its last answer, the driver calls `give_up`.

    `due_ms` is when each stage was due, and `stage_ms` how long it took from then; NaN if it was not, or is not
    complete.
    """

    def __init__(self, graph: ApplicationGraph, arrived_ms: float, deadline_ms: float, times: StageTimes) -> None:
        """`deadline_ms`: when the answer of the application must be there."""
        self.graph, self.arrived_ms, self._deadline_ms, self._times = graph, arrived_ms, deadline_ms, times
        self._waits = [len(stage.before) for stage in graph.stages]  # stages before each that are not complete
        self._left = [0] * len(graph.stages)  # requests of each stage without an answer, once it is expanded
        self._open = len(graph.stages)  # stages that are not complete
        self._due: list[int] = []
        self.due_ms = [math.nan] * len(graph.stages)
        self.stage_ms = [math.nan] * len(graph.stages)
        self.is_over = False

    @property
    def is_complete(self) -> bool:
        """Whether all stages are complete."""
        return not self._open

    def begin(self, now: float) -> list[int]:
        """Return the stages that are due at the start."""
        for stage, waits in enumerate(self._waits):
            if not waits:
                self._become_due(stage, now)
        return self.due()

    def expand(self, stage: int, count: int, now: float) -> list[int]:
        """Take note that a due stage makes `count` requests. With 0 it is complete; returns the stages that are due
        then."""
        self._left[stage] = count
        if not count:
            self._complete(stage, now)
        return self.due()

    def answered(self, stage: int, now: float) -> list[int]:
        """Take note that a request of a stage was answered; returns the stages that are due then."""
        if not self.is_over:
            self._end_request(stage, now)
        return self.due()

    def lost(self, stage: int, now: float) -> bool:
        """Take note that a request of a stage gets no answer. Returns whether the run ends without an answer; if not,
        `due` has the stages that are due then, and the run may be complete."""
        if not self.is_over and self.graph.stages[stage].allow_missing:
            self._end_request(stage, now)
            return False
        self.give_up(now)
        return True

    def give_up(self, now: float) -> None:  # noqa: ARG002
        """End the run without an answer. Whoever drives it withdraws the requests that have none."""
        self.is_over = True

    def due(self) -> list[int]:
        """Return the stages that have become due since the last call of any method that returns them."""
        due, self._due = self._due, []
        return due

    def deadline_ms(self, stage: int, now: float) -> float:
        """Return when a request of a stage that is sent now must be answered.

        Of the time that is left, the stage has its part on the longest path from here. Stages weigh by their planned
        budgets, which are those of models that wait for no other, and by how long others keep them from their gpu-lets.
        A stage has at least what its model needs, and leaves what the stages behind it need.
        """
        left_ms = self._deadline_ms - now
        shares = [each.budget_ms + self._times.blocked_ms(each.model) for each in self.graph.stages]
        part = shares[stage] / (shares[stage] + self.graph.longest_behind(shares)[stage])
        own_ms, behind_ms = self._times.least_ms(self.graph.stages[stage].model), self._needs(stage)[1]
        return now + max(own_ms, min(left_ms * part, left_ms - behind_ms))

    def cannot_end(self, stage: int, now: float) -> bool:
        """Whether the application's answer would be late even if this stage and all behind it ran at once."""
        return now + sum(self._needs(stage)) > self._deadline_ms + TIME_TOLERANCE_MS

    def _needs(self, stage: int) -> tuple[float, float]:
        """Return what a stage needs at least, and the stages behind it. A stage that may be missing needs nothing."""
        each = [0.0 if each.allow_missing else self._times.least_ms(each.model) for each in self.graph.stages]
        return each[stage], self.graph.longest_behind(each)[stage]

    def _end_request(self, stage: int, now: float) -> None:
        self._left[stage] -= 1
        if not self._left[stage]:
            self._complete(stage, now)

    def _complete(self, stage: int, now: float) -> None:
        self.stage_ms[stage] = now - self.due_ms[stage]
        self._open -= 1
        self.is_over = not self._open
        for later in self.graph.stages[stage].later:
            self._waits[later] -= 1
            if not self._waits[later]:
                self._become_due(later, now)

    def _become_due(self, stage: int, now: float) -> None:
        self.due_ms[stage] = now
        self._due.append(stage)
