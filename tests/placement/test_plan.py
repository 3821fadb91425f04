"""The plan: schema, references, round trip, and reading it back from a Serve config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tenuto.errors import InvalidInputError
from tenuto.placement import Plan, solve
from tenuto.placement.shown.table import compare_rows, rows_of, totals_of, why_unserved
from tenuto_lab.baselines.usher.usher import WaoUsher
from tests.placement.published import LANGUAGE_MIX, equal_rates, thesis, v100s

PLAN: dict[str, Any] = {
    "schema": 1,
    "policy": {"name": "p", "options": {}},
    "gpus": [{"id": "n0/0", "type": "v100"}],
    "gpulets": [{"id": "n0/0/a", "gpu": "n0/0", "share_pct": 40, "models": [{"name": "m", "batch_size": 4}]}],
    "unserved": ["x"],
    "unserved_reasons": {"x": "too large"},
    "models": [{"name": "m", "rate_rps": 10, "slo_ms": 100}, {"name": "x", "rate_rps": 5, "slo_ms": 100}],
}


def test_another_schema_version_says_which_version_reads_it() -> None:
    with pytest.raises(InvalidInputError) as caught:
        Plan.from_data({**PLAN, "schema": 2}, origin="plan.yaml")
    (problem,) = caught.value.problems
    assert "schema 2 is not supported" in problem.rule
    assert "version of Tenuto that wrote it" in problem.cure


def test_unknown_keys_and_broken_references_are_told() -> None:
    with pytest.raises(InvalidInputError, match="unknown key"):
        Plan.from_data({**PLAN, "gpulet": []})
    broken = {
        **PLAN,
        "gpulets": [
            PLAN["gpulets"][0],
            {**PLAN["gpulets"][0], "gpu": "n9/9", "models": [{"name": "m", "batch_size": 1}] * 2},
        ],
    }
    with pytest.raises(InvalidInputError) as caught:
        Plan.from_data(broken)
    assert len(caught.value.problems) == 3
    with pytest.raises(InvalidInputError, match=r"share_pct.*less than or equal to 100"):
        Plan.from_data({**PLAN, "gpulets": [{**PLAN["gpulets"][0], "share_pct": 140}]})


def test_a_plan_is_found_inside_a_serve_config(tmp_path: Path) -> None:
    config = {
        "applications": [
            {"name": "other", "deployments": [{"name": "x"}]},
            {"name": "entry", "deployments": [{"name": "gateway", "user_config": {"plan": PLAN}}]},
        ]
    }
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(config))
    assert Plan.load(path) == Plan.from_data(PLAN)
    with pytest.raises(InvalidInputError, match="carries no Tenuto plan"):
        Plan.from_data({"applications": [{"name": "other", "deployments": []}]})


def test_a_solved_plan_survives_a_round_trip_through_yaml(tmp_path: Path) -> None:
    plan = solve(WaoUsher(), equal_rates([*LANGUAGE_MIX, "xlnet"], 200, 300), v100s(3), thesis())
    path = tmp_path / "plan.yaml"
    path.write_text(plan.dump())
    assert Plan.load(path) == plan
    assert Plan.load(path).dump() == plan.dump()


def test_plans_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Plan.from_data(PLAN).mps = "off"  # type: ignore[misc]


def test_looking_things_up() -> None:
    plan = Plan.from_data(PLAN)
    assert plan.model("m").rate_rps == 10
    assert plan.hosts_of("m") == plan.on_gpu("n0/0") == plan.gpulets
    assert plan.hosts_of("x") == ()
    with pytest.raises(KeyError):
        plan.model("nobody")


def test_rows_totals_and_reasons() -> None:
    plan = solve(WaoUsher(), equal_rates([*LANGUAGE_MIX, "xlnet"], 200, 300), v100s(3), thesis())
    rows = rows_of(plan)
    assert {(r.gpulet, r.model) for r in rows} == {(g.id, r.name) for g in plan.gpulets for r in g.models}
    assert all(r.latency_ms and r.rate_rps and r.memory_mib and r.slo_ms == 300 for r in rows)
    totals = totals_of(plan)
    assert (totals.models, totals.gpus, totals.offered_rps) == (5, 3, 1000)
    assert totals.served == 5 - len(plan.unserved)
    assert [name for name, _ in why_unserved(plan)] == list(plan.unserved)
    assert all(reason for _, reason in why_unserved(plan))


def test_comparing_plans_model_by_model() -> None:
    plan = solve(WaoUsher(), equal_rates(LANGUAGE_MIX, 300, 300), v100s(3), thesis())
    table = dict(compare_rows({"one": plan, "two": Plan.from_data(PLAN)}))
    assert table["bert"] == {"one": f"3×b4@31.83%: {plan.expected.models['bert'].goodput_rps:,.6g} rps", "two": "-"}
    assert table["m"]["two"] == "1×b4@40%"
