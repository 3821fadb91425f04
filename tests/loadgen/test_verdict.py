"""Figures and verdicts from hand-made records, against the definitions of docs/reference/metrics.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.batching.virtual.result import P99_SAMPLES
from tenuto.loadgen.clients.client import outcome_of
from tenuto.loadgen.records import Records, merge, unsent
from tenuto.loadgen.verdict import judge, summarise
from tenuto.outcome import Outcome


def answered(scheduled_ms: Any, latency_ms: Any, slo_ms: float = 100.0, late_ms: float = 0.0) -> Records:
    at = np.asarray(scheduled_ms, dtype=float)
    rows = unsent(at, np.zeros(len(at), np.int32))
    rows.sent_ms = at + late_ms
    rows.answered_ms = at + np.asarray(latency_ms, dtype=float)
    rows.status = np.full(len(at), 200, np.int32)
    rows.outcome = np.where(rows.latency_ms <= slo_ms, Outcome.OK, Outcome.LATE).astype(np.int8)
    return rows


def summary_of(records: Records, warmup_ms: float = 0.0, duration_ms: float = 1000.0) -> dict[str, Any]:
    return summarise(records, ["m"], warmup_ms=warmup_ms, duration_ms=duration_ms)


@pytest.mark.parametrize(
    ("status", "latency_ms", "outcome"),
    [
        (200, 100.0, "OK"),
        (200, 100.001, "LATE"),
        (504, 1.0, "EXPIRED"),
        (429, 1.0, "REJECTED"),
        (503, 1.0, "FAILED"),
        (400, 1.0, "FAILED"),
        (0, 1.0, "FAILED"),
    ],
)
def test_outcome_by_status_and_latency(status: int, latency_ms: float, outcome: str) -> None:
    assert outcome_of(status, latency_ms, 100.0) is Outcome[outcome]


def test_attainment_divides_by_offered() -> None:
    rows = merge([answered([0, 1, 2], [50, 50, 150]), unsent(np.array([3.0]), np.zeros(1, np.int32))])
    model = summary_of(rows)["models"]["m"]
    assert (model["offered"], model["ok"], model["late"], model["failed"]) == (4, 2, 1, 1)
    assert model["attainment"] == 0.5


def test_the_warm_up_is_left_out_by_scheduled_time() -> None:
    found = summary_of(answered([0, 99, 100, 999, 1000], [10] * 5), warmup_ms=100.0)
    assert found["requests"] == 2
    assert found["goodput_rps"] == pytest.approx(2 / 0.9)


@pytest.mark.parametrize(("samples", "known"), [(P99_SAMPLES - 1, False), (P99_SAMPLES, True)])
def test_p99_needs_enough_samples(samples: int, known: bool) -> None:
    model = summary_of(answered(np.linspace(0, 999, samples), np.arange(samples)))["models"]["m"]
    assert (model["p99_ms"] is not None) is known
    assert model["p50_ms"] == pytest.approx((samples - 1) / 2)


def test_the_mean_batch_is_over_batches() -> None:
    rows = answered([0, 1, 2, 3, 4], [10] * 5)
    rows.batch_size = np.array([4, 4, 4, 4, 1], np.int32)
    rows.execution_ms = np.full(5, 20.0)
    rows.gpulet = np.array(["g"] * 5, dtype=object)
    found = summary_of(rows)
    assert found["models"]["m"]["mean_batch"] == pytest.approx(2.5)
    assert found["gpulets"]["g"] == {"utilisation": pytest.approx(0.04), "batches": 2, "mean_batch": pytest.approx(2.5)}


def test_the_split_adds_up_to_the_latency() -> None:
    rows = answered([0.0], [50.0])
    rows.batching_ms, rows.gpulet_queue_ms, rows.execution_ms = np.array([10.0]), np.array([5.0]), np.array([30.0])
    assert rows.front_door_ms.tolist() == [5.0]


def verdict_of(rows: Records, slo_ms: float = 100.0, **settings: Any) -> Any:
    return judge(rows, summary_of(rows), [slo_ms], **settings)


def test_pass_needs_99_percent_of_every_model() -> None:
    at = np.linspace(0, 999, 100)
    assert verdict_of(answered(at, [50] * 99 + [150])).result == "PASS"
    found = verdict_of(answered(at, [50] * 98 + [150] * 2))
    assert found.result == "FAIL"
    assert found.reasons == ("m: 98.00 % in time, 99 % wanted",)


def test_one_bad_model_fails_the_run() -> None:
    good = answered(np.linspace(0, 999, 1000), [50] * 1000)
    bad = answered(np.linspace(0, 999, 10), [150] * 10)
    bad.model = np.ones(10, np.int32)
    rows = merge([good, bad])
    found = judge(rows, summarise(rows, ["a", "b"], warmup_ms=0, duration_ms=1000), [100.0, 100.0])
    assert found.result == "FAIL"
    assert found.reasons == ("b: 0.00 % in time, 99 % wanted",)


@pytest.mark.parametrize(
    ("slo_ms", "late_ms", "result"), [(1000, 49, "PASS"), (1000, 51, "INVALID"), (20, 4, "PASS"), (20, 6, "INVALID")]
)
def test_a_late_generator_makes_the_run_invalid(slo_ms: float, late_ms: float, result: str) -> None:
    rows = answered(np.linspace(0, 999, 100), [10] * 100, late_ms=late_ms)
    found = verdict_of(rows, slo_ms)
    assert found.result == result
    assert found.conditions["lateness_p99_ms"] == pytest.approx(late_ms)


def test_requests_that_were_not_sent_make_the_run_invalid() -> None:
    rows = merge([answered([0, 1], [10, 10]), unsent(np.array([2.0]), np.zeros(1, np.int32))])
    found = verdict_of(rows)
    assert found.result == "INVALID"
    assert "1 of 3 requests were not sent" in found.reasons[0]


def test_nothing_scheduled_and_nothing_sent() -> None:
    nothing = unsent(np.empty(0), np.empty(0, np.int32))
    assert verdict_of(nothing).result == "INVALID"
    assert summary_of(nothing)["attainment"] is None
    found = verdict_of(unsent(np.array([1.0]), np.zeros(1, np.int32)))
    assert found.result == "INVALID"
    assert found.conditions["lateness_p99_ms"] is None


def test_rows_of_several_clients_are_joined_in_order() -> None:
    odd, even = answered([1.0, 3.0], [1, 1]), answered([0.0, 2.0], [1, 1])
    odd.request, even.request = np.array([1, 3]), np.array([0, 2])
    assert merge([odd, even]).request.tolist() == [0, 1, 2, 3]
    assert len(merge([])) == 0
