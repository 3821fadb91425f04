"""Models and applications that are offline in virtual time: their answers are counted, and none is judged by an SLO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenuto.batching.virtual.criterion import Goal
from tenuto.deployments.control.settings import ControlSettings
from tenuto.errors import InvalidInputError
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.controlled import ControlledSimulation, controlled_summary
from tenuto.loadgen.run import load_run
from tenuto.loadgen.run_files import write_run_files
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, ModelSpec, Workload, solve
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.profiles import Profiles
from tests.instruments.fake_server import Answer, fake_server, signature
from tests.instruments.live import PATIENCE_S

LINE = {"alpha_ms": 1.0, "beta_ms": 5.0}
ONLINE = {"name": "day", "rate_rps": 50.0, "slo_ms": 100.0, "latency": LINE}
OFFLINE = {"name": "night", "rate_rps": 40.0, "offline": True, "latency": LINE}


NIGHTLY = {
    "name": "nightly",
    "offline": True,
    "rate_rps": 20.0,
    "stages": [
        {"model": "crop", "latency": LINE},
        {"model": "day", "after": ["crop"], "map": "graphs:crops", "count": 1.5, "most": 8},
        {"model": "join", "after": ["day"], "map": "graphs:join", "most": 1, "latency": LINE},
    ],
}


def simulation(models: list[dict[str, Any]], *applications: dict[str, Any], **how: Any) -> Simulation:
    workload = Workload.model_validate({"models": models, "applications": applications})
    return Simulation.of_workload(workload, Cluster.parse("v100:1"), Profiles([]), duration_s=20.0, **how)


@pytest.mark.parametrize("models", [[ONLINE, OFFLINE], [OFFLINE, ONLINE]])
def test_an_offline_model_is_counted_by_its_answers_and_gpu_time_alone(
    models: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone, both = simulation([ONLINE]).run(), simulation(models).run()
    summary, figures = both.summary(), both.summary()["offline"]
    assert [*summary["models"]] == ["day"]
    assert summary["requests"] == alone.summary()["requests"]
    assert figures["waiting"]["night"] <= 5
    assert 700 < figures["requests"]["night"] < 820
    assert 0.05 < figures["part_of_gpu_time"] < figures["part_of_idle"] < 1.0
    document, records = both.describe(None, options={}, command=["tenuto"])
    assert (document["offline"], [*document["models"]], [*document["slos_ms"]]) == (figures, ["day"], ["day"])
    assert len(records) == len(alone.records())
    write_run_files(tmp_path, document, records, both.schedule)
    assert load_run(tmp_path).by_name()["day"].request.size == summary["requests"]


def test_a_controller_changes_the_plan_and_no_offline_request_is_lost_by_it() -> None:
    rising = {"process": "steps", "options": {"factors": [1.0, 4.0]}}
    models = [OFFLINE, {**ONLINE, "rate_rps": 60.0, "arrival": rising}]
    nightly = {**NIGHTLY, "rate_rps": 2.0}
    workload = Workload.model_validate({"models": models, "applications": [nightly]})
    plan = solve(Symphony(), workload, Cluster.parse("v100:1"), Profiles([]))
    settings = ControlSettings.model_validate({"mode": "act", "policy": {"name": "ffd"}, "change": {"start_s": 3.0}})
    how: dict[str, Any] = {"duration_s": 80.0, "seed": 3}
    run = ControlledSimulation(workload, plan, Cluster.parse("v100:3").gpus, Profiles([]), settings, **how).run()
    summary = controlled_summary(run, 80.0, 0.0, workload.applications)
    figures = summary["offline"]
    assert len(run.plans) > 1
    assert [*summary["models"]] == ["day"]
    assert summary["models"]["day"]["offered"] == summary["requests"]
    assert [*figures["requests"]] == ["night", "nightly"]
    assert max(figures["waiting"].values()) <= 5
    assert 120 < figures["requests"]["nightly"] < 200
    assert 3000 < figures["requests"]["night"] < 3400
    assert 0.05 < figures["part_of_gpu_time"] < figures["part_of_idle"] < 1.0


def test_a_bench_counts_the_answers_of_an_offline_model_and_judges_it_by_no_slo() -> None:
    specs = [ModelSpec.model_validate({**each, "rate_rps": 150.0}) for each in (OFFLINE, ONLINE)]
    models = {"day": signature(2, 3), "night": signature(2, 3)}

    def answer(_number: int, path: str, *_: Any) -> Answer:
        return Answer(delay_s=1.0) if "night" in path else Answer()

    with fake_server(models, answer=answer) as server:
        options = BenchOptions(server.url, duration_s=1.5, clients=0, grace_s=PATIENCE_S, warmup_s=0.0)
        result = run_bench(specs, options)
    assert [*result.summary["models"]] == ["day"]
    assert set(result.records.model) == {0}
    assert result.summary["requests"] == len(result.records) == (result.schedule.model_index == 1).sum()
    figures = result.summary["offline"]
    sent = int((result.schedule.model_index == 0).sum())
    assert 0 < figures["requests"]["night"] < sent
    assert figures["requests"]["night"] + figures["waiting"]["night"] == sent
    assert figures["part_of_gpu_time"] is None  # the endpoint does not say
    assert "night" not in str(result.verdict.reasons)


def test_an_offline_application_is_counted_as_an_offline_model_is() -> None:
    """Its stages follow each other, and share a model whose own requests are judged as before."""
    alone, both = simulation([ONLINE]).run(), simulation([ONLINE], NIGHTLY).run()
    summary, figures = both.summary(), both.summary()["offline"]
    assert ([*summary["models"]], "applications" in summary) == (["day"], False)
    assert summary["requests"] == alone.summary()["requests"]
    assert 350 < figures["requests"]["nightly"] < 410
    assert figures["waiting"]["nightly"] <= 5
    ran = [0, 0, 0]
    for program, offline in zip(both.result.batches.program, both.result.batches.offline, strict=True):
        ran[program] += offline
    assert both.result.offline is not None
    assert ran[1] == ran[2] == both.result.offline.ended["nightly"]  # with those of the warm-up
    assert 1.4 * ran[1] < ran[0] < 1.6 * ran[1]
    document, _ = both.describe(None, options={}, command=["tenuto"])
    assert (document["offline"], [*document["models"]], [*document["slos_ms"]]) == (figures, ["day"], ["day"])
    other = {**NIGHTLY, "name": "news", "offline": False, "slo_ms": 500.0}
    trial = simulation([ONLINE], NIGHTLY, other)
    assert [*trial.run().summary()["applications"]] == ["news"]
    assert trial.try_rate(1.0, Goal()).is_in_time


def test_more_offline_requests_than_can_run_wait_and_fail_no_trial() -> None:
    crowded = simulation([ONLINE, {**OFFLINE, "rate_rps": 3000.0}])
    figures = crowded.run().summary()["offline"]
    assert figures["waiting"]["night"] > 10_000
    assert crowded.try_rate(1.0, Goal()).is_in_time


def test_a_workload_of_offline_models_alone_runs() -> None:
    summary = simulation([OFFLINE]).run().summary()
    assert (summary["requests"], summary["attainment"], summary["models"]) == (0, None, {})
    assert summary["offline"]["requests"]["night"] > 700


def test_a_model_whose_requests_last_longer_than_others_can_wait_is_named_with_them() -> None:
    slow = {**OFFLINE, "rate_rps": 0.001, "latency": {"alpha_ms": 1.0, "beta_ms": 93.5}}
    made = simulation([ONLINE, slow])
    (line,) = made.system.without_gap(["night"])
    assert "night takes 94.5 ms, and day can wait 94 ms" in line
    assert not simulation([ONLINE, OFFLINE]).system.without_gap(["night", "day"])
    figures = made.with_offline({"night": 5.0}).run().summary()
    assert [*figures["models"]] == ["day"]
    assert (figures["offline"]["requests"]["night"], figures["offline"]["waiting"]["night"]) == (0, 5)


def test_a_scheduler_that_runs_no_offline_work_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="night waits for that"):
        simulation([ONLINE, OFFLINE], scheduler_name="eager").run()
    with pytest.raises(InvalidInputError, match="nightly"):
        simulation([ONLINE], NIGHTLY, scheduler_name="eager").run()
