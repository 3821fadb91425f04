"""How deadlines of applications are split: within the deadline on every path, by what it saves, for all who ask."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tenuto.documents import parse_document
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.costs import costs_of
from tenuto.placement.deadline_split import (
    batch_choices,
    candidate_splits,
    least_budgets,
    shortened_splits,
    split_deadlines,
)
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.profiles import Profiles

FAST, SLOW = {"alpha_ms": 1.0, "beta_ms": 4.0}, {"alpha_ms": 1.0, "beta_ms": 20.0}
V100 = Cluster.parse("v100:1", elastic=True)


def workload(*applications: dict[str, Any], models: tuple[dict[str, Any], ...] = ()) -> Workload:
    return parse_document(Workload, {"models": list(models), "applications": list(applications)}, origin="w")


def application(*stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"name": "app", "rate_rps": 400.0, "slo_ms": 200.0, "stages": list(stages), **changes}


def split(work: Workload, cluster: Cluster = V100) -> Workload:
    return split_deadlines(work, cluster, Profiles(()))


def longest_ms(work: Workload) -> float:
    (app,) = work.applications
    ends: dict[str, float] = {}
    for stage in app.stages:  # in order, here
        ends[stage.label] = app.budget_ms(stage) + max((ends[label] for label in stage.after), default=0.0)
    return max(ends.values())


DIAMOND = application(
    {"model": "a", "latency": SLOW},
    {"model": "b", "after": ["a"], "latency": FAST, "count": 3},
    {"model": "c", "after": ["a"], "latency": SLOW},
    {"model": "d", "after": ["b", "c"], "latency": FAST},
)


def test_the_stage_that_gains_most_by_larger_batches_has_the_most_time() -> None:
    work = split(workload(DIAMOND))
    a, b, c, d = (model.slo_ms for model in work.models)
    assert a > d
    assert c > d
    assert b == pytest.approx(c)
    assert longest_ms(work) == pytest.approx(200.0)
    assert [stage.budget_ms for stage in work.applications[0].stages] == pytest.approx([a, b, c, d], abs=1e-5)


def test_what_a_user_or_an_earlier_plan_has_split_stays() -> None:
    stages = [{**stage, "part": 1.0} for stage in DIAMOND["stages"]]
    given = workload({**DIAMOND, "stages": stages})
    assert split(given) is given
    planned = split(workload(DIAMOND))
    assert split(planned) is planned
    data = planned.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    assert parse_document(Workload, data, origin="w") == planned


def test_a_shared_model_has_one_budget_within_its_own_slo() -> None:
    read = {"name": "read", "latency": SLOW, "rate_rps": 50.0, "slo_ms": 60.0}
    stages = ({"model": "a", "latency": SLOW}, {"model": "read", "after": ["a"]})
    work = split(workload(application(*stages), application(*stages, name="two", slo_ms=120.0), models=(read,)))
    budgets = [app.budget_ms(app.stages[1]) for app in work.applications]
    assert work["read"].slo_ms == pytest.approx(min(60.0, *budgets), abs=1e-5)
    assert work["read"].own_slo_ms == 60.0
    assert work["app.a"].slo_ms > 2 * work["two.a"].slo_ms


def test_a_deadline_that_no_batch_keeps_is_split_by_what_one_request_takes() -> None:
    work = split(
        workload(
            application({"model": "a", "latency": SLOW}, {"model": "b", "after": ["a"], "latency": FAST}, slo_ms=8.0)
        )
    )
    assert work["app.a"].slo_ms / work["app.b"].slo_ms == pytest.approx(21.0 / 5.0, rel=0.5)
    assert longest_ms(work) == pytest.approx(8.0)


def test_stages_that_generate_or_that_nobody_measured_do_not_break_it() -> None:
    text = {
        "name": "text",
        "generates": {"prompt_tokens": 10, "output_tokens": 5},
        "slo": {"ttft_ms": 50.0, "tpot_ms": 5.0},
        "rate_rps": 1.0,
        "latency": None,
        "profile": "unknown",
    }
    stages = ({"model": "a", "latency": SLOW}, {"model": "text", "after": ["a"]})
    unknown = workload(application(*stages), models=(text,))
    assert split(unknown) is unknown
    merged = workload(application(*DIAMOND["stages"])).model_copy(update={"merge": (("app.a", "app.c"),)})
    assert split(merged).models == split(workload(DIAMOND)).models


def test_a_plan_has_the_split_and_serves_no_less_than_the_even_one() -> None:
    work = workload(DIAMOND)
    plan = solve(Symphony(), work, V100, Profiles(()))
    assert Plan.from_data(plan.to_data()) == plan
    assert [plan.applications[0].budget_ms(s) for s in plan.applications[0].stages] == pytest.approx(
        [model.slo_ms for model in plan.models], abs=1e-5
    )
    even = workload({**DIAMOND, "stages": [{**stage, "part": 1.0} for stage in DIAMOND["stages"]]})
    assert plan.expected.price <= solve(Symphony(), even, V100, Profiles(())).expected.price
    assert 1 < len(list(candidate_splits(work, V100, Profiles(())))) <= 3


def test_splits_in_which_one_stage_has_less_leave_the_others_more() -> None:
    work = workload(DIAMOND)
    base = split(work)
    shorter = list(shortened_splits(work, base))
    assert len(shorter) == 4  # not of `b` and `c`, as each waits for the other
    for each, name in zip(shorter, ("app.a", "app.d") * 2, strict=True):
        assert each[name].slo_ms < 0.9 * base[name].slo_ms
        assert all(each[m.name].slo_ms > m.slo_ms for m in base.models if m.name != name)
        assert longest_ms(each) == pytest.approx(200.0)
    assert list(shortened_splits(base, base)) == []


@pytest.mark.parametrize("seed", range(6))
def test_the_program_finds_what_trying_all_batches_finds(seed: int) -> None:
    draws = np.random.default_rng(seed)
    stages = [
        {
            "model": f"m{place}",
            "after": [f"m{before}" for before in range(place) if draws.random() < 0.5],
            "latency": {"alpha_ms": float(draws.uniform(0.2, 2)), "beta_ms": float(draws.uniform(1, 15))},
        }
        for place in range(4)
    ]
    work = workload(application(*stages, rate_rps=float(draws.uniform(50, 400)), slo_ms=float(draws.uniform(80, 250))))
    (app,), costs = work.applications, costs_of(work, V100, Profiles(()))
    choices = {m.name: batch_choices(costs[m.name], m.rate_rps, V100.prices)[::6] for m in work.models}

    def is_in_time(needs_ms: tuple[float, ...]) -> bool:
        ends: dict[str, float] = {}
        for stage, ms in zip(app.stages, needs_ms, strict=True):
            ends[stage.label] = ms + max((ends[label] for label in stage.after), default=0.0)
        return max(ends.values()) <= app.slo_ms + 1e-6

    best = min(
        (
            sum(choice.cost for choice in picked)
            for picked in itertools.product(*choices.values())
            if is_in_time(tuple(choice.needs_ms for choice in picked))
        ),
        default=None,
    )
    least = least_budgets(work.applications, choices, lambda _cost: 0.0)
    if best is None:
        assert least is None
        return
    assert least is not None
    cost, budgets = least
    assert cost == pytest.approx(best, rel=2e-3)
    assert is_in_time(tuple(budgets[m.name] for m in work.models))
