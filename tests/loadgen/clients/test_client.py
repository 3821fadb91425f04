"""A load client: what it asks when, with which deadline, and how its requests end; applications are asked as models."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tenuto.errors import InvalidInputError
from tenuto.loadgen.clients.client import Client, ClientReport
from tenuto.outcome import OUTCOMES
from tenuto.placement.application import Application
from tests.instruments.fan_out import FakeSender, Told, game, job_of, load_of, schedule_of, send, traffic, workload
from tests.instruments.virtual_loop import LoopTimer, VirtualLoop

ALONE = {"name": "alone", "rate_rps": 100, "slo_ms": 500, "latency": {"alpha_ms": 1, "beta_ms": 5}}


def outcomes(report: ClientReport) -> list[str]:
    return [OUTCOMES[code] for code in report.records.outcome]


def test_an_application_is_one_request_at_its_time() -> None:
    sender = FakeSender()
    report = send(workload(traffic(), models=[{**ALONE, "arrival": {"process": "uniform"}}]), sender)

    assert [model for model, _, _ in sender.sent].count("traffic") == 2
    assert {model for model, _, _ in sender.sent} == {"alone", "traffic"}
    assert set(outcomes(report)) == {"ok"}
    assert {slo for _, _, slo in sender.sent} == {None}


def test_with_another_slo_each_request_says_its_own() -> None:
    sender = FakeSender()
    send(workload(traffic(), models=[ALONE]), sender, send_slo=True)
    assert {(model, slo) for model, _, slo in sender.sent} == {("alone", 500.0), ("traffic", 120.0)}


@pytest.mark.parametrize(
    ("status", "outcome"), [(504, "expired"), (429, "rejected"), (503, "failed"), (500, "failed"), (0, "failed")]
)
def test_a_refusal_is_an_outcome_of_the_application(status: int, outcome: str) -> None:
    assert outcomes(send(workload(traffic()), FakeSender(lambda _m, _n: Told(status)), 0.05)) == [outcome]


def test_an_answer_after_the_deadline_is_late() -> None:
    report = send(workload(traffic(slo_ms=40.0)), FakeSender(lambda _m, _n: Told(after_s=0.06)), 0.05)
    assert outcomes(report) == ["late"]
    assert report.records.latency_ms[0] > 60.0


def test_stragglers_get_the_grace_period_and_then_count_as_failed() -> None:
    sender = FakeSender(lambda _model, count: Told(None if count == 1 else 200, 0.03))
    report = send(workload(traffic(slo_ms=4000.0)), sender, grace_s=0.25)

    assert outcomes(report) == ["ok", "failed"]
    assert report.errors == {"no answer within 0.25 s after the last request": 1}


def test_a_stop_waits_for_the_requests_under_way() -> None:
    work, sender = workload(traffic(slo_ms=4000.0)), FakeSender()

    async def run() -> ClientReport:
        client = Client(job_of(work, 5.0), sender, make_timer=LoopTimer)
        await client.prepare()
        task = asyncio.create_task(client.run(0.01))
        while not sender.sent:
            await asyncio.sleep(0.001)
        client.stop()
        return await task

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        report = runner.run(run())
    assert len(sender.sent) == 1
    assert outcomes(report).count("ok") == 1
    assert np.isnan(report.records.sent_ms).sum() == len(report.records) - 1


def test_the_hash_covers_what_follows_on_what(tmp_path: Any) -> None:
    first, again = (schedule_of(workload(traffic())) for _ in range(2))
    other = schedule_of(workload(traffic(stages=traffic()["stages"][:3])))

    assert first.hash == again.hash != other.hash
    assert np.array_equal(first.times_ms, other.times_ms)
    first.save(tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz", allow_pickle=False) as saved:
        kept = tuple(Application.model_validate_json(str(text)) for text in saved["applications"])
    assert kept == first.applications


def test_an_arrival_that_cannot_be_used_names_its_application() -> None:
    with pytest.raises(InvalidInputError, match=r"applications\.game\.arrival"):
        load_of(workload(game(arrival={"process": "gamma", "shape": 1, "cv": 1}), traffic()))
