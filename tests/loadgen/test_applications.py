"""Applications: how the deadline is split, what follows when in virtual time, and how the whole is judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.build import everywhere
from tenuto.batching.virtual.application_load import ApplicationLoad
from tenuto.batching.virtual.criterion import Goal
from tenuto.batching.virtual.result import SimulationResult
from tenuto.documents import parse_document
from tenuto.errors import InvalidInputError
from tenuto.loadgen.simulated import SimulatedRun, Simulation
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.profiles import Profiles

FAST = {"alpha_ms": 1.0, "beta_ms": 4.0}


def traffic(**changes: Any) -> dict[str, Any]:
    stages = [
        {"model": "ssd", "latency": FAST, "part": 2},
        {"model": "a", "after": ["ssd"], "latency": FAST, "count": 3},
        {"model": "b", "after": ["ssd"], "latency": FAST},
        {"model": "end", "after": ["a", "b"], "latency": FAST},
    ]
    return {"name": "traffic", "rate_rps": 20.0, "slo_ms": 120.0, "stages": stages, **changes}


def workload(*applications: dict[str, Any], **more: Any) -> Workload:
    return parse_document(Workload, {"applications": list(applications), **more}, origin="w.yaml")


def simulated(work: Workload, gpus: int = 2, scheduler: str = "eager") -> SimulatedRun:
    how: dict[str, Any] = {"scheduler_name": scheduler, "duration_s": 20.0, "warmup_s": 0.0, "seed": 1}
    return Simulation.of_workload(work, Cluster.parse(f"v100:{gpus}"), Profiles(()), **how).run()


def run(work: Workload, gpus: int = 2, scheduler: str = "eager") -> tuple[ApplicationLoad, SimulationResult]:
    found = simulated(work, gpus, scheduler)
    assert found.load is not None
    return found.load, found.result


def test_stages_become_models_with_their_rate_and_part_of_the_deadline() -> None:
    work = workload(traffic())

    assert [(m.name, m.rate_rps, m.slo_ms) for m in work.models] == [
        ("traffic.ssd", 20.0, 60.0),
        ("traffic.a", 60.0, 30.0),
        ("traffic.b", 20.0, 30.0),
        ("traffic.end", 20.0, 30.0),
    ]


def test_a_workload_without_a_plan_has_the_planners_split() -> None:
    stages = [{**stage, "part": None} for stage in traffic()["stages"]]
    work, gpus = workload(traffic(stages=stages)), Cluster.parse("v100:2")
    (given,) = Simulation.of_workload(work, gpus, Profiles(())).applications
    (split,) = solve(Symphony(), work, gpus, Profiles(())).applications
    assert given == split != work.applications[0]


def test_a_dumped_workload_and_a_plan_come_back_equal() -> None:
    work = workload(traffic(), models=[{"name": "alone", "rate_rps": 5, "slo_ms": 50, "latency": FAST}])
    assert parse_document(Workload, work.model_dump(mode="json", exclude_none=True), origin="w") == work
    assert len(work.models) == 5

    plan = solve(Symphony(), work, Cluster.parse("v100:4"), Profiles(()))
    assert plan.applications == work.applications
    assert Plan.from_data(plan.to_data()) == plan
    assert work.scaled(2.0).applications[0].rate_rps == 40.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": []}, "stages"),
        ({"stages": [{"model": "a"}, {"model": "a"}]}, "named twice: a"),
        ({"stages": [{"model": "a", "after": ["x"]}]}, "'x', which is no stage"),
        ({"stages": [{"model": "a", "after": ["b"]}, {"model": "b", "after": ["a"]}]}, "in a circle: a, b"),
        ({"stages": [{"model": "a", "after": ["a"]}]}, "in a circle: a"),
        ({"stages": [{"model": "a", "count": 0}]}, "count"),
        ({"slo_ms": -1}, "slo_ms"),
        ({"arrival": {"process": "poisson", "speed": 3}}, "speed"),
    ],
)
def test_what_is_no_application_is_refused_with_its_place(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words) as caught:
        workload(traffic(**change))
    assert "applications.0" in str(caught.value)


def test_names_are_used_once() -> None:
    with pytest.raises(InvalidInputError, match="'traffic': name is used twice"):
        workload(traffic(), traffic())


def test_a_deadline_no_batch_can_meet_names_the_stage() -> None:
    with pytest.raises(InvalidInputError, match=r"traffic\.a"):
        everywhere(workload(traffic(slo_ms=16.0)), Cluster.parse("v100:1"), Profiles(()))


def test_later_stages_arrive_when_all_before_them_are_answered() -> None:
    load, result = run(workload(traffic()))
    calls = len(load.calls)
    assert len(result.arrival_ms) == 6 * calls

    for call in range(calls):
        rows = np.flatnonzero(load.owner == call)
        by_stage = [rows[load.stage[rows] == stage] for stage in range(4)]
        ends = [result.finish_ms[stage].max() for stage in by_stage]
        assert np.all(result.arrival_ms[by_stage[1]] == ends[0])
        assert np.all(result.arrival_ms[by_stage[2]] == ends[0])
        assert np.all(result.arrival_ms[by_stage[3]] == max(ends[1], ends[2]))


def test_a_call_is_ok_only_when_all_of_it_is() -> None:
    work = workload(traffic(rate_rps=120.0))
    found = simulated(work, gpus=1, scheduler="deferred")
    result, load = found.result, found.load
    assert load is not None
    figures = found.summary()["applications"]["traffic"]
    ended = dict.fromkeys(range(len(load.calls)), 0.0)
    for row, finish in enumerate(result.finish_ms.tolist()):
        call = int(load.owner[row])
        ended[call] = max(ended[call], float("inf") if np.isnan(finish) else finish)
    ok = sum(ended[i] - at <= 120.0 + 1e-6 for i, (_, at) in load.calls.items())

    assert figures["offered"] == len(load.calls)
    assert 0 < figures["ok"] == ok < figures["offered"]
    assert figures["goodput_rps"] == pytest.approx(ok / 20.0)


def test_stages_that_never_arrive_are_counted_nowhere() -> None:
    _, result = run(workload(traffic(rate_rps=400.0)), gpus=1)
    counts = result.counts()

    assert counts[3].sum() < counts[0].sum()
    assert counts.sum() == np.isfinite(result.arrival_ms).sum()


def test_models_of_their_own_run_beside_and_the_seed_decides_everything() -> None:
    work = workload(traffic(), models=[{"name": "alone", "rate_rps": 50, "slo_ms": 50, "latency": FAST}])
    first, second = run(work), run(work)

    assert np.array_equal(first[1].finish_ms, second[1].finish_ms, equal_nan=True)
    assert (first[0].owner < 0).sum() == first[1].counts()[0].sum() > 900


def test_what_stages_lose_of_a_shared_model_is_no_loss_of_its_clients() -> None:
    """Of twenty requests at once, of 5 ms each, ten are lost after 50 ms, which the application allows."""
    fast = {"alpha_ms": 1.0, "beta_ms": 4.0}
    one = {"name": "one", "rate_rps": 42.0, "slo_ms": 900.0, "latency": fast, "alone": {"rate_rps": 2.0}}
    stage = {"model": "one", "shared": True, "count": 20, "allow_missing": True}
    uniform = {"process": "uniform"}
    app = {"name": "app", "rate_rps": 2.0, "slo_ms": 60.0, "arrival": uniform, "stages": [stage]}
    planned = Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "v", "type": "v100"}],
            "gpulets": [
                {
                    "id": "v",
                    "gpu": "v",
                    "models": [{"name": "one", "batch_size": 1, "latency": fast, "latency_ms": 5.0}],
                }
            ],
            "models": [{**one, "arrival": uniform}],
            "applications": [app],
        }
    )
    simulation = Simulation.of_plan(planned, duration_s=30.0, warmup_s=1.0)
    run = simulation.run()
    row = run.summary()["models"]["one"]
    assert (row["attainment"], row["offered"]) == (1.0, 58)
    lost = run.result.outcome[run.load.owner >= 0] == Outcome.EXPIRED
    assert lost.mean() > 0.2
    trial = simulation.try_rate(1.0, Goal())
    assert (trial.is_in_time, trial.stopped_early, trial.worst_attainment) == (True, False, 1.0)
