"""A sender that answers as told after as long as told, the load of applications for it, and gpulet's applications."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tenuto.batching.virtual.application_load import ApplicationLoad
from tenuto.documents import parse_document
from tenuto.loadgen.clients.client import Client, ClientJob, ClientReport, ModelTarget
from tenuto.loadgen.schedule import Schedule, make_client_schedule, make_load
from tenuto.loadgen.sender import Body, OnReply, Reply, Sender
from tenuto.placement import Workload
from tenuto.placement.workload import client_targets
from tests.instruments.virtual_loop import LoopTimer, VirtualLoop

FAST = {"alpha_ms": 1.0, "beta_ms": 4.0}
UNIFORM = {"process": "uniform"}


def traffic(**changes: Any) -> dict[str, Any]:
    """ssd, then three times `a` and once `b`, then `end`; deadlines at 60, 90, 90 and 120 of 120."""
    stages = [
        {"model": "ssd", "latency": FAST, "part": 2},
        {"model": "a", "after": ["ssd"], "latency": FAST, "count": 3},
        {"model": "b", "after": ["ssd"], "latency": FAST},
        {"model": "end", "after": ["a", "b"], "latency": FAST},
    ]
    return {"name": "traffic", "rate_rps": 20.0, "slo_ms": 120.0, "arrival": UNIFORM, "stages": stages, **changes}


def game(**changes: Any) -> dict[str, Any]:
    """Six digits and an object at once."""
    stages = [{"model": "lenet", "count": 6, "latency": FAST}, {"model": "resnet50", "latency": FAST}]
    return {"name": "game", "rate_rps": 20.0, "slo_ms": 400.0, "arrival": UNIFORM, "stages": stages, **changes}


def workload(*applications: dict[str, Any], **more: Any) -> Workload:
    return parse_document(Workload, {"applications": list(applications), **more}, origin="w.yaml")


@dataclass
class Told:
    """How to answer one request: status 0 is a lost connection, None no answer at all."""

    status: int | None = 200
    after_s: float = 0.002


@dataclass
class FakeSender:
    """Keeps what was sent, in order: model, token, time allowed; answers through the loop."""

    tell: Callable[[str, int], Told] = lambda _model, _count: Told()
    sent: list[tuple[str, int, float | None]] = field(default_factory=list)
    log: list[tuple[str, str, int]] = field(default_factory=list)  # sent or answered, model, token

    async def open(self, connections: int, on_reply: OnReply) -> None:
        self._on_reply = on_reply

    def prepare(self, model: str, body: Body, slo_ms: float | None = None) -> tuple[str, float | None]:
        return model, slo_ms

    def send(self, prepared: tuple[str, float | None], request_id: str, token: int) -> None:
        del request_id
        model, slo_ms = prepared
        told = self.tell(model, sum(1 for sent, _, _ in self.sent if sent == model))
        self.sent.append((model, token, slo_ms))
        self.log.append(("sent", model, token))
        if told.status is not None:
            asyncio.get_running_loop().call_later(told.after_s, self._answer, model, token, told.status)

    def _answer(self, model: str, token: int, status: int) -> None:
        self.log.append(("answered", model, token))
        self._on_reply(token, Reply(status, error="" if status == 200 else "as told"))

    def close(self) -> None:
        pass


def schedule_of(work: Workload, duration_s: float = 0.1, seed: int = 0) -> Schedule:
    return make_client_schedule(client_targets(work.models, work.applications), work.applications, duration_s, seed)


def load_of(work: Workload, duration_s: float = 0.1, seed: int = 0) -> ApplicationLoad:
    return make_load(work.models, schedule_of(work, duration_s, seed), seed)


def job_of(work: Workload, duration_s: float = 0.1, **settings: Any) -> ClientJob:
    asked, schedule = client_targets(work.models, work.applications), schedule_of(work, duration_s)
    stages = {app.name: tuple(stage.label for stage in app.stages) for app in work.applications}
    targets = tuple(ModelTarget(m.name, m.slo_ms, (Body(b""),), stages=stages.get(m.name, ())) for m in asked)
    given = {"grace_s": 0.5, "connections": 1, **settings}
    return ClientJob("", targets, schedule, np.arange(len(schedule)), **given)


def send(work: Workload, sender: Sender, duration_s: float = 0.1, **settings: Any) -> ClientReport:
    """Run one client over what a workload's clients ask, in virtual time."""

    async def run() -> ClientReport:
        client = Client(job_of(work, duration_s, **settings), sender, make_timer=LoopTimer)
        await client.prepare()
        return await client.run(0.01)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def published(stretch: float) -> Workload:
    """gpulet's *game* (six digits and an object, 95 ms) and *traffic* (an SSD, then two classifiers, 136 ms), with all
    times `stretch` times as long: 8 and 4 requests a second."""

    def stage(model: str, alpha_ms: float, beta_ms: float, **more: Any) -> dict[str, Any]:
        return {"model": model, "latency": {"alpha_ms": alpha_ms * stretch, "beta_ms": beta_ms * stretch}, **more}

    return workload(
        {
            "name": "game",
            "rate_rps": 8,
            "slo_ms": 95 * stretch,
            "stages": [stage("lenet", 0.1, 1.0, count=6), stage("resnet50", 2.0, 10.0)],
        },
        {
            "name": "traffic",
            "rate_rps": 4,
            "slo_ms": 136 * stretch,
            "stages": [
                stage("ssd", 3.0, 8.0, part=2),
                stage("googlenet", 1.0, 4.0, after=["ssd"]),
                stage("vgg16", 2.0, 6.0, after=["ssd"]),
            ],
        },
    )
