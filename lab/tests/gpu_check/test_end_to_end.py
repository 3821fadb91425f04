"""A model served without Ray: a gpu-let's process, a dispatcher, and what is made of their answers."""

import asyncio
from pathlib import Path

import pytest

from tenuto.deployments.wire.answers import Answer
from tenuto.errors import EnvironmentFaultError
from tenuto.outcome import Outcome
from tenuto_lab.gpu_check import end_to_end
from tenuto_lab.gpu_check.page import report_page
from tenuto_lab.gpu_check.results import Results


def test_a_model_is_served_by_a_process_of_its_own() -> None:
    plan = end_to_end.plan_of_one("tests.instruments.own_models:scale", {"width": 8}, 4, {}, "cpu", streaming=False)
    found = asyncio.run(end_to_end.serve_closed_loop(plan, 0.5))
    assert found["device"] == "cpu"
    assert found["not_ok"] == 0
    assert 1 <= found["mean_batch"] <= 4
    assert 0 < found["rows_per_s"] <= found["rows_per_s_of_batches_alone"]


def test_what_comes_through_is_held_against_the_batches_alone() -> None:
    answers = [(0.1 * i, 0.1 * i + 0.05, Answer(Outcome.OK, batch_size=2, execution_ms=10.0)) for i in range(20)]
    late = (1.5, 1.9, Answer(Outcome.LATE))
    assert end_to_end.figures_of([*answers, late], 1.0, 2.0) == {
        "rows_per_s": 10.0,
        "rows_per_s_of_batches_alone": 200.0,
        "part_of_it": 0.05,
        "mean_batch": 2.0,
        "execution_ms": 10.0,
        "round_trip_ms": 50.0,
        "not_ok": 1,
    }
    with pytest.raises(EnvironmentFaultError, match="the model is gone"):
        end_to_end.figures_of([(1.0, 1.5, Answer(Outcome.FAILED, reason="the model is gone"))], 1.0, 2.0)


def test_the_page_shows_both_ways(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.write("inventory.json", {})
    way = {
        "rows_per_s": 900.0,
        "rows_per_s_of_batches_alone": 1000.0,
        "part_of_it": 0.9,
        "mean_batch": 8.0,
        "execution_ms": 8.0,
        "round_trip_ms": 20.0,
        "not_ok": 0,
    }
    results.write("served.json", {"model": "m", "batch_size": 8, "plain": way, "streamed": {"failed": "no GPU"}})
    page = report_page(results)
    assert "| plain | 900.0 | 1000.0 | 0.9 | 8.0 | 8.0 | 20.0 | 0 |" in page
    assert "| streamed | no GPU |" in page
