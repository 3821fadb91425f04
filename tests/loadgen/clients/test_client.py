"""Applications as load clients send them: what is sent when, with which deadline, and how the whole of it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tenuto.errors import InvalidInputError
from tenuto.loadgen.application_figures import application_figures
from tenuto.loadgen.application_load import Joins
from tenuto.loadgen.clients.client import Client, ClientReport
from tenuto.outcome import Outcome
from tenuto.placement import Workload
from tenuto.placement.application import Application
from tests.instruments.fan_out import (
    FakeSender,
    Told,
    game,
    job_of,
    load_of,
    names_of,
    rows_of,
    send,
    traffic,
    workload,
)
from tests.instruments.virtual_loop import LoopTimer, VirtualLoop


def figures(report: ClientReport, work: Workload, duration_s: float = 0.1) -> dict[str, Any]:
    found = application_figures(
        report.records, names_of(work), work.applications, warmup_ms=0.0, duration_ms=1000.0 * duration_s
    )
    return found[work.applications[0].name]


def test_a_request_of_game_sends_six_digits_and_an_object_at_once() -> None:
    work, sender = workload(game()), FakeSender()
    report = send(work, sender)

    assert [model for model, _, _ in sender.sent] == [*["game.lenet"] * 6, "game.resnet50"] * 2
    assert [kind for kind, _, _ in sender.log[:7]] == ["sent"] * 7  # none waits for an answer
    records = report.records
    assert records.call.tolist() == [0] * 7 + [1] * 7
    assert np.all(records.scheduled_ms == records.call_at_ms)
    row = figures(report, work)
    assert (row["offered"], row["ok"], row["stage_requests"]) == (2, 2, 7)
    assert row["goodput_rps"] == pytest.approx(20.0)


def test_later_stages_are_sent_when_the_last_answer_before_them_is_there() -> None:
    # The second of the three `a` is the slowest of all, so `end` waits for it.
    work = workload(traffic(slo_ms=4000.0))
    sender = FakeSender(lambda model, count: Told(after_s=0.03 if (model, count) == ("traffic.a", 1) else 0.002))
    report = send(work, sender, 0.05)

    assert [m.split(".")[1] for m, _, _ in sender.sent] == ["ssd", "a", "a", "a", "b", "end"]
    log = [(kind, model.split(".")[1]) for kind, model, _ in sender.log]
    assert log[:3] == [("sent", "ssd"), ("answered", "ssd"), ("sent", "a")]
    assert log[-3:] == [("answered", "a"), ("sent", "end"), ("answered", "end")]
    ssd, a, end = (rows_of(report, work, f"traffic.{stage}") for stage in ("ssd", "a", "end"))
    assert np.all(a.scheduled_ms == ssd.answered_ms)
    assert end.scheduled_ms[0] == a.answered_ms.max()
    assert np.all(report.records.lateness_ms >= 0.0)
    assert report.records.is_planned.sum() == 1
    latency = end.answered_ms[0] - ssd.scheduled_ms[0]
    assert figures(report, work, 0.05)["p50_ms"] == pytest.approx(latency)


def test_every_request_carries_what_is_left_of_the_split() -> None:
    work, sender = workload(traffic()), FakeSender(lambda _model, _count: Told(after_s=0.01))
    report = send(work, sender, 0.05)
    records = report.records
    sent_ms = dict(zip(records.request.tolist(), (records.sent_ms - records.call_at_ms).tolist(), strict=True))
    by = {"ssd": 60.0, "a": 90.0, "b": 90.0, "end": 120.0}

    assert len(sender.sent) == 6
    for model, token, slo_ms in sender.sent:
        assert slo_ms == pytest.approx(by[model.split(".")[1]] - sent_ms[token])
    assert set(sender.prepared.values()) == {None}


def test_what_an_earlier_stage_leaves_over_goes_to_the_later_ones() -> None:
    # `a` takes 400 ms, more than its own 300, but ssd left nearly 600 over.
    work = workload(traffic(slo_ms=1200.0))
    sender = FakeSender(lambda model, _count: Told(after_s=0.4 if model == "traffic.a" else 0.001))
    report = send(work, sender, 0.05)

    assert set(rows_of(report, work, "traffic.a").outcome) == {Outcome.OK}
    assert figures(report, work, 0.05)["ok"] == 1


@pytest.mark.parametrize(
    ("status", "outcome"), [(504, "expired"), (429, "rejected"), (503, "failed"), (500, "failed"), (0, "failed")]
)
def test_a_stage_without_an_answer_ends_the_request_with_its_outcome(status: int, outcome: str) -> None:
    work = workload(traffic(slo_ms=4000.0))
    sender = FakeSender(lambda model, count: Told(status if (model, count) == ("traffic.a", 1) else 200))
    report = send(work, sender, 0.05)

    assert [m.split(".")[1] for m, _, _ in sender.sent] == ["ssd", "a", "a", "a", "b"]
    row = figures(report, work, 0.05)
    assert (row["offered"], row[outcome], row["ok"], row["attainment"]) == (1, 1, 0, 0.0)
    assert len(rows_of(report, work, "traffic.end")) == 0  # never due: counted nowhere but in its application
    assert row["p50_ms"] is None


def test_a_branch_beside_a_failed_one_is_not_continued() -> None:
    stages = [{"model": "x"}, {"model": "y"}, {"model": "z", "after": ["y"]}]
    work = workload({"name": "two", "rate_rps": 20, "slo_ms": 900, "arrival": {"process": "uniform"}, "stages": stages})
    sender = FakeSender(lambda model, _count: Told(503) if model == "two.x" else Told(after_s=0.02))
    report = send(work, sender, 0.05)

    assert [model for model, _, _ in sender.sent] == ["two.x", "two.y"]
    assert figures(report, work, 0.05)["failed"] == 1


def test_an_answer_after_the_deadline_is_late_and_what_follows_goes_on() -> None:
    work = workload(traffic(slo_ms=40.0))
    sender = FakeSender(lambda model, _count: Told(after_s=0.06 if model == "traffic.end" else 0.0))
    report = send(work, sender, 0.05)

    assert rows_of(report, work, "traffic.end").outcome.tolist() == [Outcome.LATE]
    row = figures(report, work, 0.05)
    assert (row["late"], row["ok"]) == (1, 0)
    assert row["p50_ms"] > 60.0


def test_a_stage_due_after_its_deadline_is_sent_with_nothing_left() -> None:
    work = workload(traffic(slo_ms=40.0))
    sender = FakeSender(lambda model, _count: Told(504 if model == "traffic.a" else 200, after_s=0.035))
    send(work, sender, 0.05)

    assert all(slo is not None and slo <= 0.0 for model, _, slo in sender.sent if model in ("traffic.a", "traffic.b"))


def test_stragglers_get_the_grace_period_through_all_stages_and_then_count_as_failed() -> None:
    work = workload(traffic(slo_ms=4000.0))
    sender = FakeSender(lambda model, count: Told(None if (model, count) == ("traffic.end", 1) else 200, 0.03))
    report = send(work, sender, 0.1, grace_s=0.25)

    row = figures(report, work)
    assert (row["offered"], row["ok"], row["failed"]) == (2, 1, 1)
    assert report.errors == {"no answer within 0.25 s after the last request": 1}


def test_a_stop_lets_requests_under_way_go_through_their_stages() -> None:
    work, sender = workload(traffic(slo_ms=4000.0)), FakeSender()

    async def run() -> ClientReport:
        client = Client(job_of(work, load_of(work, 5.0)), sender, make_timer=LoopTimer)
        await client.prepare()
        task = asyncio.create_task(client.run(0.01))
        while not sender.sent:
            await asyncio.sleep(0.001)
        client.stop()
        return await task

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        report = runner.run(run())
    assert [m.split(".")[1] for m, _, _ in sender.sent] == ["ssd", "a", "a", "a", "b", "end"]
    assert np.isnan(report.records.sent_ms).sum() == len(report.records) - 6


def test_models_of_their_own_beside_keep_their_slo_and_count() -> None:
    alone = {"name": "alone", "rate_rps": 100, "slo_ms": 500, "latency": {"alpha_ms": 1, "beta_ms": 5}}
    work, sender = workload(traffic(slo_ms=4000.0), models=[{**alone, "arrival": {"process": "uniform"}}]), FakeSender()
    report = send(work, sender, send_slo=True)

    mine = rows_of(report, work, "alone")
    assert len(mine) == 10
    assert np.all(mine.call == -1)
    assert {slo for model, _, slo in sender.sent if model == "alone"} == {None}
    assert sender.prepared["alone"] == 500.0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_for_several_clients_keep_requests_of_applications_whole(count: int) -> None:
    alone = {"name": "alone", "rate_rps": 100, "slo_ms": 500, "latency": {"alpha_ms": 1, "beta_ms": 5}}
    load = load_of(workload(traffic(), game(), models=[alone]), 1.0)
    parts = [load.part(place, count) for place in range(count)]

    assert np.array_equal(np.sort(np.concatenate([part.number for part in parts])), load.number)
    for part in parts:
        assert np.all(np.diff(part.times_ms[: part.planned]) >= 0.0)
        assert np.isnan(part.times_ms[part.planned :]).all()
        assert set(part.owner[part.owner >= 0]) == set(part.calls)
        for call, (app, at_ms) in part.calls.items():
            rows = part.owner == call
            assert rows.sum() == sum(stage.count for stage in load.applications[app].stages)
            assert set(part.call_at_ms[rows]) == {at_ms}
    assert max(len(part.number) for part in parts) < 1.3 * len(load.number) / count


def test_the_hash_covers_what_follows_on_what(tmp_path: Any) -> None:
    first, again = (load_of(workload(traffic())).schedule for _ in range(2))
    other = load_of(workload(traffic(stages=traffic()["stages"][:3]))).schedule

    assert first.hash == again.hash != other.hash
    assert np.array_equal(first.times_ms, other.times_ms)
    first.save(tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz", allow_pickle=False) as saved:
        kept = tuple(Application.model_validate_json(str(text)) for text in saved["applications"])
    assert kept == first.applications


def test_what_is_given_up_once_is_lost_once_and_only_after_the_warm_up() -> None:
    load = load_of(workload(game()), 0.5)
    at = [at_ms for _, at_ms in load.calls.values()]
    joins = Joins(load, counted_from_ms=at[1])
    joins.given_up([0, 1])  # the first call came before
    joins.given_up(np.flatnonzero(load.owner == 2).tolist())

    assert list(joins.lost().values()) == [1]
    assert joins.answered(np.flatnonzero(load.owner == 2).tolist()) == []


def test_an_arrival_that_cannot_be_used_names_its_application() -> None:
    with pytest.raises(InvalidInputError, match=r"applications\.game\.arrival"):
        load_of(workload(game(arrival={"process": "gamma", "shape": 1, "cv": 1}), traffic()))
