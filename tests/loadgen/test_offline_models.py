"""Models that are offline in virtual time: their answers are counted, and nothing of theirs is judged by an SLO."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.batching.virtual.criterion import Goal
from tenuto.errors import InvalidInputError
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, Workload
from tenuto.profiles import Profiles

LINE = {"alpha_ms": 1.0, "beta_ms": 5.0}
ONLINE = {"name": "day", "rate_rps": 50.0, "slo_ms": 100.0, "latency": LINE}
OFFLINE = {"name": "night", "rate_rps": 40.0, "offline": True, "latency": LINE}


def simulation(models: list[dict[str, Any]], **how: Any) -> Simulation:
    workload = Workload.model_validate({"models": models})
    return Simulation.of_workload(workload, Cluster.parse("v100:1"), Profiles([]), duration_s=20.0, **how)


def test_an_offline_model_is_counted_by_its_answers_and_gpu_time_alone() -> None:
    alone, both = simulation([ONLINE]).run(), simulation([ONLINE, OFFLINE]).run()
    summary, figures = both.summary(), both.summary()["offline"]
    assert [*summary["models"]] == ["day"]
    assert summary["requests"] == alone.summary()["requests"]
    assert figures["waiting"]["night"] <= 5
    assert 700 < figures["requests"]["night"] < 820
    assert 0.05 < figures["part_of_gpu_time"] < figures["part_of_idle"] < 1.0
    document, records = both.describe(None, options={}, command=["tenuto"])
    assert (document["offline"], [*document["models"]], [*document["slos_ms"]]) == (figures, ["day"], ["day"])
    assert len(records) == len(alone.records())


def test_more_offline_requests_than_can_run_wait_and_fail_no_trial() -> None:
    crowded = simulation([ONLINE, {**OFFLINE, "rate_rps": 3000.0}])
    figures = crowded.run().summary()["offline"]
    assert figures["waiting"]["night"] > 10_000
    assert crowded.try_rate(1.0, Goal()).is_in_time


def test_a_workload_of_offline_models_alone_runs() -> None:
    summary = simulation([OFFLINE]).run().summary()
    assert (summary["requests"], summary["attainment"], summary["models"]) == (0, None, {})
    assert summary["offline"]["requests"]["night"] > 700


def test_a_scheduler_that_runs_no_offline_work_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="night waits for that"):
        simulation([ONLINE, OFFLINE], scheduler_name="eager").run()
