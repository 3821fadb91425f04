"""One request of an application under way: which stages are due, by when their requests must be answered, and when
the request is given up, because a stage lost a request that it may not lose (`allow_missing`).
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

    def __init__(
        self,
        graph: ApplicationGraph,
        arrived_ms: float,
        deadline_ms: float,
        times: StageTimes,
        *,
        is_offline: bool = False,
    ) -> None:
        """`deadline_ms`: when the answer of the application must be there. One that `is_offline` says nothing of how
        long stages take for others."""
        self._is_offline = is_offline
        self.graph, self.arrived_ms, self._deadline_ms, self._known = graph, arrived_ms, deadline_ms, times.of(graph)
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
        if not self.is_over and not self._is_offline:
            for place in self.graph.ahead[stage]:
                self._known.note_loss_behind(place)
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

        The stages behind it keep their parts of the time that is left, or less where they took less lately
        (`GraphTimes.behind_ms`). A stage has at least what its model needs.
        """
        left_ms = self._deadline_ms - now
        return now + max(self._known.least_ms[stage], left_ms - self._known.behind_ms(stage, left_ms))

    def latest_end_ms(self, stage: int) -> float:
        """Return when a stage must be complete so that those behind it can end in time if they run at once."""
        return self._deadline_ms - self._known.needs_behind_ms[stage]

    def cannot_end(self, stage: int, now: float) -> bool:
        """Whether the application's answer would be late even if this stage and all behind it ran at once."""
        needs_ms = self._known.needs_ms[stage] + self._known.needs_behind_ms[stage]
        return now + needs_ms > self._deadline_ms + TIME_TOLERANCE_MS

    def _end_request(self, stage: int, now: float) -> None:
        self._left[stage] -= 1
        if not self._left[stage]:
            self._complete(stage, now)

    def _complete(self, stage: int, now: float) -> None:
        self.stage_ms[stage] = now - self.due_ms[stage]
        self._open -= 1
        self.is_over = not self._open
        if self.is_over and not self._is_offline:
            self._known.note_answer(self.due_ms, [a + b for a, b in zip(self.due_ms, self.stage_ms, strict=True)])
        for later in self.graph.stages[stage].later:
            self._waits[later] -= 1
            if not self._waits[later]:
                self._become_due(later, now)

    def _become_due(self, stage: int, now: float) -> None:
        self.due_ms[stage] = now
        self._due.append(stage)
