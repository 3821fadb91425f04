"""Programs of several models: one queue in the core, while requests keep their model and their deadline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import SCHEDULERS, make_scheduler
from tenuto.batching.virtual.criterion import Goal, Trial
from tenuto.batching.virtual.highest_rate import SearchLimits, find_highest_rate
from tenuto.batching.virtual.simulator import simulate
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tests.instruments.systems import try_arrivals


def plan(merge: list[Any] | None = None, slos: dict[str, float] | None = None, **more: Any) -> Plan:
    slos = slos or {"a": 40.0, "b": 60.0, "c": 50.0}
    replicas = [{"name": n, "batch_size": 4, "latency": {"alpha_ms": 1, "beta_ms": 3}} for n in slos]
    return Plan.from_data(
        {
            "policy": {"name": "hand"},
            "gpus": [{"id": "g", "type": "v100"}],
            "gpulets": [{"id": "g/a", "gpu": "g", "models": replicas, "merge": merge or []}],
            "models": [{"name": n, "source": "resnet50", "rate_rps": 50, "slo_ms": s} for n, s in slos.items()],
            **more,
        }
    )


def test_a_merged_program_has_its_models_as_members_and_stands_where_the_first_of_them_does() -> None:
    system = from_plan(plan([["a", "b"]]))
    assert [model.name for model in system.models] == ["a", "b", "c"]
    assert [(program.name, program.members) for program in system.programs] == [("a+b", (0, 1)), ("c", (2,))]
    assert (system.program_of, system.hosted, system.served) == ((0, 0, 1), {0, 1}, {0, 1, 2})
    assert sorted(system.gpulets[0].hosts) == [0, 1]
    # The worst split: one of either; one batch of each, 3 + 3 + n; from six on two batches of one and one of the other.
    assert system.gpulets[0].hosts[0].latency_ms == (0.0, 4.0, 8.0, 9.0, 10.0, 11.0, 15.0, 16.0, 17.0)
    assert (system.offered[0].slo_ms, system.offered[0].rate_rps) == (40.0, 100.0)


def test_a_lone_model_is_a_program_of_one() -> None:
    system = from_plan(plan())
    assert system.program_of == (0, 1, 2)
    assert [(program.name, program.members) for program in system.programs] == [("a", (0,)), ("b", (1,)), ("c", (2,))]
    assert system.offered == system.models


def test_slowdown_and_given_latency_of_a_group() -> None:
    group = {"models": ["a", "b"], "latency": {"points": {1: 3.0, 6: 8.0}}}
    system = from_plan(plan([group]))
    assert system.gpulets[0].hosts[0].latency_ms == pytest.approx((0.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0))


def test_a_group_that_can_never_answer_in_time_is_refused_by_its_name() -> None:
    group = {"models": ["a", "b"], "latency": {"alpha_ms": 1, "beta_ms": 45}}
    with pytest.raises(InvalidInputError, match=r"a\+b"):
        from_plan(plan([group]))


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_requests_of_both_members_run_in_one_batch_and_count_as_their_own(name: str) -> None:
    group = {"models": ["a", "b"], "latency": {"points": {1: 4.0, 8: 8.0}}}
    scheduler = make_scheduler(name, from_plan(plan([group])), {})
    times = np.arange(400, dtype=np.float64) * 2.0
    models = np.tile(np.array([0, 1], dtype=np.int32), 200)
    result = simulate(scheduler, times, models, warmup_s=0.0)
    summary = result.summary()
    assert list(summary["models"]) == ["a", "b", "c"]
    assert summary["models"]["a"]["offered"] == summary["models"]["b"]["offered"] == 200
    assert summary["models"]["a"]["ok"] + summary["models"]["b"]["ok"] > 390
    batches = [ids for ids in result.batches.requests if len(ids) > 1]
    assert batches
    assert any(len({int(models[i]) for i in ids}) == 2 for ids in batches)


def test_every_request_keeps_its_own_deadline() -> None:
    """The strict model's requests go first: a joint batch is formed in the order of deadlines, not of arrivals."""
    merged = plan([["a", "b"]], {"a": 30.0, "b": 500.0})
    scheduler = make_scheduler("symphony", from_plan(merged))
    times = np.array([0.0, 0.1, 0.2, 0.3, 10.0])
    models = np.array([1, 1, 1, 1, 0], dtype=np.int32)
    result = simulate(scheduler, times, models, warmup_s=0.0)
    late = result.answered_ms - result.arrival_ms
    assert (late[4:] <= 30.0 + 1e-6).all()
    assert (late[:4] <= 500.0).all()
    assert set(result.batches.requests[0]) == set(range(5))  # those that can wait ride along


def test_drops_of_a_group_are_counted_for_the_model_they_belong_to() -> None:
    merged = plan([["a", "b"]], {"a": 12.0, "b": 12.0})
    seen: list[list[int]] = []
    scheduler = make_scheduler("symphony", from_plan(merged))
    times = np.repeat(np.arange(3000, dtype=np.float64), 8) * 4.0
    models = np.tile(np.array([0] * 7 + [1], dtype=np.int32), 3000)
    result = simulate(scheduler, times, models, warmup_s=0.0, stop=lambda dropped: bool(seen.append(list(dropped))))
    expired = result.counts()[:, Outcome.EXPIRED]
    assert len(seen[-1]) == 2
    # All but those of the first 12 ms, which count as the warm-up's, and what waited at the last call.
    assert [round(float(part), 1) for part in seen[-1] / expired] == [1.0, 1.0]
    assert expired[0] > 5 * expired[1]


def test_goodput_of_a_merged_plan_judges_its_members() -> None:
    merged = plan([{"models": ["a", "b"], "latency": {"points": {1: 4.0, 8: 8.0}}}], {"a": 40.0, "b": 40.0})

    def schedule(scale: float) -> Any:
        count = int(400 * scale)
        times = np.sort(np.linspace(0.0, 4000.0, count, endpoint=False))
        return times, np.tile(np.array([0, 1], dtype=np.int32), count)[:count]

    def best(of: Plan) -> float:
        def attempt(scale: float) -> Trial:
            scheduler = make_scheduler("deferred", from_plan(of), {})
            return try_arrivals(scheduler, *schedule(scale), Goal(), duration_s=4.0)

        return find_highest_rate(attempt, SearchLimits(tolerance=0.1)).rate_scale

    assert best(merged) > best(plan(slos={"a": 40.0, "b": 40.0}))
