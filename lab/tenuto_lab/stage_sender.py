"""The sender for applications that no server runs: it asks the models of the stages one after the other, as a client
would have to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto.batching.applications.application_graph import ApplicationGraph
from tenuto.loadgen.sender import Body, OnReply, Reply, Sender
from tenuto.placement.application import Application, Stage


@dataclass
class _Walk:
    """A request of an application under way. `left` counts the answers that each stage still waits for."""

    application: Application
    request_id: str
    token: int
    begun_at: float
    left: list[int]
    due_at: list[float] = field(default_factory=list)
    stage_ms: dict[str, float] = field(default_factory=dict)


class StageSender:
    """Wraps the sender that carries the requests of stages. Requests to models pass through it."""

    def __init__(
        self,
        sender: Sender,
        applications: Sequence[Application],
        bodies: Mapping[str, Sequence[Body]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bodies`: of each model that is a stage."""
        self._sender, self._bodies, self._now_s = sender, bodies, now_s
        self._applications = {application.name: application for application in applications}
        self._open: dict[int, tuple[int, _Walk | None]] = {}  # token of the client, or stage of a walk
        self._sent = 0
        self._on_reply: OnReply = lambda _token, _reply: None

    async def open(self, connections: int, on_reply: OnReply) -> None:
        """Get ready."""
        self._on_reply = on_reply
        await self._sender.open(connections, self._answered)

    def prepare(self, model: str, body: Body, slo_ms: float | None = None) -> Any:
        """Return a request in the form `send` takes."""
        if model not in self._applications:
            return self._sender.prepare(model, body, slo_ms)
        application = self._applications[model]
        return application if slo_ms is None else application.model_copy(update={"slo_ms": slo_ms})

    def send(self, prepared: Any, request_id: str, token: int) -> None:
        """Send now and return."""
        if not isinstance(prepared, Application):
            self._send(prepared, request_id, token, None)
            return
        stages = prepared.stages
        walk = _Walk(prepared, request_id, token, self._now_s(), [_usual_requests(stage) for stage in stages])
        walk.due_at = [math.nan] * len(stages)
        for index, stage in enumerate(stages):
            if not stage.after:
                self._begin(walk, index)

    def _send(self, prepared: Any, request_id: str, place: int, walk: _Walk | None) -> None:
        self._sent += 1
        self._open[self._sent] = place, walk
        self._sender.send(prepared, request_id, self._sent)

    def _begin(self, walk: _Walk, index: int) -> None:
        stage = walk.application.stages[index]
        model = walk.application.model_name(stage)
        walk.due_at[index] = self._now_s()
        budgets = [walk.application.budget_ms(each) for each in walk.application.stages]
        behind_ms = ApplicationGraph.of(walk.application).longest_behind(budgets)[index]
        left_ms = walk.application.slo_ms - behind_ms - (self._now_s() - walk.begun_at) * 1000.0
        for number in range(_usual_requests(stage)):
            bodies = self._bodies[model]
            prepared = self._sender.prepare(model, bodies[(walk.token + number) % len(bodies)], left_ms)
            self._send(prepared, f"{walk.request_id}.{index}.{number}", index, walk)

    def _answered(self, sent: int, reply: Reply) -> None:
        place, walk = self._open.pop(sent)
        if walk is None:
            self._on_reply(place, reply)
            return
        if not walk.left:  # it ended with another request of it
            return
        stages = walk.application.stages
        if reply.status != 200:
            walk.left = []
            text = f"{stages[place].label}: {reply.error}"
            self._on_reply(walk.token, Reply(reply.status, error=text, stage_ms=walk.stage_ms))
            return
        walk.left[place] -= 1
        if walk.left[place]:
            return
        walk.stage_ms[stages[place].label] = (self._now_s() - walk.due_at[place]) * 1000.0
        complete = {stage.label for stage, left in zip(stages, walk.left, strict=True) if not left}
        if len(complete) == len(stages):
            self._on_reply(walk.token, Reply(200, stage_ms=walk.stage_ms))
        for index, stage in enumerate(stages):
            if stages[place].label in stage.after and complete.issuperset(stage.after):
                self._begin(walk, index)

    def close(self) -> None:
        """Close all connections."""
        self._sender.close()


def _usual_requests(stage: Stage) -> int:
    """Return the mean number of requests of a stage as a whole number, at least 1."""
    return max(1, round(stage.count))
