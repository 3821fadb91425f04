"""Applications that a client runs itself: what is sent when, with which deadline, and how the whole of it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tenuto.loadgen.clients.client import ClientReport
from tenuto.loadgen.sender import Body
from tenuto.outcome import OUTCOMES
from tenuto.placement import Workload
from tenuto_lab.stage_sender import StageSender
from tests.instruments.fan_out import FakeSender, Told, game, send, traffic, workload


def walk(work: Workload, sender: FakeSender, duration_s: float = 0.05, **settings: Any) -> ClientReport:
    bodies = {spec.name: (Body(b""),) for spec in work.models}
    now_s = lambda: asyncio.get_running_loop().time()  # noqa: E731
    return send(work, StageSender(sender, work.applications, bodies, now_s), duration_s, **settings)


def stages_of(sender: FakeSender) -> list[str]:
    return [model.split(".")[1] for model, _, _ in sender.sent]


def outcomes(report: ClientReport) -> list[str]:
    return [OUTCOMES[code] for code in report.records.outcome]


def test_a_request_of_game_sends_six_digits_and_an_object_at_once() -> None:
    sender = FakeSender()
    report = walk(workload(game()), sender, 0.1)

    assert [model for model, _, _ in sender.sent] == [*["game.lenet"] * 6, "game.resnet50"] * 2
    assert [kind for kind, _, _ in sender.log[:7]] == ["sent"] * 7  # none waits for an answer
    assert outcomes(report) == ["ok", "ok"]
    assert report.records.stage_ms == pytest.approx(2.0, rel=0.01)


def test_later_stages_are_sent_when_the_last_answer_before_them_is_there() -> None:
    # The second of the three `a` is the slowest of all, so `end` waits for it.
    sender = FakeSender(lambda model, count: Told(after_s=0.03 if (model, count) == ("traffic.a", 1) else 0.002))
    report = walk(workload(traffic(slo_ms=4000.0)), sender)

    assert stages_of(sender) == ["ssd", "a", "a", "a", "b", "end"]
    log = [(kind, model.split(".")[1]) for kind, model, _ in sender.log]
    assert log[:3] == [("sent", "ssd"), ("answered", "ssd"), ("sent", "a")]
    assert log[-3:] == [("answered", "a"), ("sent", "end"), ("answered", "end")]
    assert report.records.stage_ms[0] == pytest.approx([2.0, 30.0, 2.0, 2.0], rel=0.01)
    assert report.records.latency_ms[0] == pytest.approx(34.0, rel=0.01)


def test_every_request_carries_what_is_left_of_the_split() -> None:
    sender = FakeSender(lambda _model, _count: Told(after_s=0.01))
    walk(workload(traffic()), sender)
    left_ms = {"ssd": 60.0, "a": 90.0 - 10.0, "b": 90.0 - 10.0, "end": 120.0 - 20.0}

    assert len(sender.sent) == 6
    for model, _token, slo_ms in sender.sent:
        assert slo_ms == pytest.approx(left_ms[model.split(".")[1]], abs=0.1)


@pytest.mark.parametrize(
    ("status", "outcome"), [(504, "expired"), (429, "rejected"), (503, "failed"), (500, "failed"), (0, "failed")]
)
def test_a_stage_without_an_answer_ends_the_request_with_its_outcome(status: int, outcome: str) -> None:
    sender = FakeSender(lambda model, count: Told(status if (model, count) == ("traffic.a", 1) else 200))
    report = walk(workload(traffic(slo_ms=4000.0)), sender)

    assert stages_of(sender) == ["ssd", "a", "a", "a", "b"]
    assert outcomes(report) == [outcome]
    assert report.errors == {"a: as told": 1}


def test_a_branch_beside_a_failed_one_is_not_continued() -> None:
    stages = [{"model": "x"}, {"model": "y"}, {"model": "z", "after": ["y"]}]
    work = workload({"name": "two", "rate_rps": 20, "slo_ms": 900, "arrival": {"process": "uniform"}, "stages": stages})
    sender = FakeSender(lambda model, _count: Told(503) if model == "two.x" else Told(after_s=0.02))

    assert outcomes(walk(work, sender)) == ["failed"]
    assert [model for model, _, _ in sender.sent] == ["two.x", "two.y"]


def test_a_stage_due_after_its_deadline_is_sent_with_nothing_left() -> None:
    sender = FakeSender(lambda model, _count: Told(504 if model == "traffic.a" else 200, after_s=0.035))
    walk(workload(traffic(slo_ms=40.0)), sender)

    assert all(slo is not None and slo <= 0.0 for model, _, slo in sender.sent if model in ("traffic.a", "traffic.b"))


def test_requests_to_models_pass_through() -> None:
    alone = {"name": "alone", "rate_rps": 100, "slo_ms": 500, "latency": {"alpha_ms": 1, "beta_ms": 5}}
    work = workload(traffic(slo_ms=4000.0), models=[{**alone, "arrival": {"process": "uniform"}}])
    sender = FakeSender()
    report = walk(work, sender, 0.1, send_slo=True)

    assert outcomes(report).count("ok") == len(report.records) == 12
    assert [slo for model, _, slo in sender.sent if model == "alone"] == [500.0] * 10
