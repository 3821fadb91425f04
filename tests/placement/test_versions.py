"""Versions in workload and plan files: what is completed, what is refused, and what goes on with them as ever."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tenuto.deployments.serve.sub_clusters import cut_plan
from tenuto.documents import parse_document
from tenuto.errors import InvalidInputError
from tenuto.loadgen.bench import asked_of
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.policy import load_policy
from tenuto.placement.slo_rules import load_workload
from tenuto.placement.versions import shared_out
from tenuto.profiles import Profiles

LATENCY = {"alpha_ms": 1.0, "beta_ms": 4.0}
M = {"name": "m", "rate_rps": 100, "slo_ms": 50, "latency": LATENCY, "weight": 2.0}
CANARY = {"name": "m:2", "share_pct": 5, "weights_path": "/two"}
SHADOW = {"name": "m:3", "shadow": True, "share_pct": 50}


def workload(*models: dict[str, Any]) -> Workload:
    return parse_document(Workload, {"models": list(models)}, origin="w")


def test_a_version_says_only_what_differs_and_rates_are_shared_out() -> None:
    made = workload(M, CANARY, SHADOW)
    assert {spec.name: spec.rate_rps for spec in made.models} == {"m": 95.0, "m:2": 5.0, "m:3": 50.0}
    canary, shadow = made["m:2"], made["m:3"]
    assert (canary.model, canary.version, canary.weight, canary.slo_ms) == ("m", "2", 2.0, 50.0)
    assert (canary.network, canary.profile_row) == ("m", "m")
    assert shadow.priority < min(made["m"].priority, canary.priority)
    assert shadow.weight < 0.01
    assert Workload.of_document(made.model_dump(mode="json", exclude_defaults=True), "dumped") == made
    own = workload(M, {**CANARY, "latency": {"alpha_ms": 2.0, "beta_ms": 1.0}, "source": "a.b:c"})["m:2"]
    assert (own.latency.at(1) if own.latency else 0.0, own.source) == (3.0, "a.b:c")


def test_versions_of_a_model_that_generates_inherit_too() -> None:
    generates = {"prompt_tokens": 150, "output_tokens": 50}
    writer = {"name": "m", "profile": "w", "rate_rps": 2, "slo": {"ttft_ms": 1000, "tpot_ms": 60}}
    made = workload({**writer, "generates": generates}, {"name": "m:2", "share_pct": 20, "profile": "other"})
    first, second = made.models
    assert (second.slo, second.generates, second.profile_row) == (first.slo, first.generates, "other")
    assert (first.rate_rps, second.rate_rps) == (1.6, 0.4)


def test_an_slo_by_rule_holds_for_versions_too(tmp_path: Path) -> None:
    file = tmp_path / "workload.yaml"
    file.write_text(
        "models:\n"
        "  - {name: m, rate_rps: 100, slo: 2 x l(1), latency: {alpha_ms: 1, beta_ms: 4}}\n"
        "  - {name: 'm:2', share_pct: 5}\n"
        "  - {name: 'm:3', share_pct: 5, slo: 3 x l(1), latency: {alpha_ms: 1, beta_ms: 4}}\n"
    )
    made = load_workload(file, Cluster.parse("v100:1"), Profiles([]))
    assert {s.name: (s.slo_ms, s.rate_rps) for s in made.models} == {"m": (10, 90), "m:2": (10, 5), "m:3": (15, 5)}


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([M, {**CANARY, "share_pct": 101}], "share_pct: 101.*Give a smaller number"),
        ([M, {**CANARY, "share_pct": 60}, {**CANARY, "name": "m:4", "share_pct": 40}], "leave nothing to m.*promote"),
        ([{**M, "share_pct": 5}], "is of the only version there is. Remove it, or add another"),
        ([{**M, "shadow": True}], "shadow: True: is of the only version"),
        ([M, {**M, "name": "m:2"}], "2 versions of 'm' take the rest, not one .m, m:2.*Give share_pct or shadow"),
        ([{**M, "share_pct": 1}, {**M, "name": "m:2", "share_pct": 1}], "0 versions of 'm' take the rest"),
        ([M, {**M, "name": "m:1"}], "version 1 has the name of its model. Write 'm'"),
        ([M, {"name": "m:2", "share_pct": 0}], "rate_rps: field required"),
        (
            [{**M, "name": "alexnet"}, {"name": "alexnet:2", "share_pct": 5, "source": "transformers/bert"}],
            "alexnet:2': has inputs input_ids.*Versions answer the same clients",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(models: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        workload(*models)


def planned() -> Plan:
    return solve(load_policy("ffd", {}), workload(M, CANARY, SHADOW), Cluster.parse("v100:1"), Profiles([]))


def test_a_plan_has_versions_as_models_of_their_own_and_is_simulated_benched_and_cut() -> None:
    plan = planned()
    assert Plan.from_data(plan.to_data()) == plan
    assert {r.name for gpulet in plan.gpulets for r in gpulet.models} == {"m", "m:2", "m:3"}
    assert [spec.name for spec in asked_of(plan)[0]] == ["m", "m:2"]
    result = Simulation.of_plan(plan, duration_s=20.0, seed=3).run()
    offered = {name: figures["offered"] for name, figures in result.summary()["models"].items()}
    assert offered["m"] > 10 * offered["m:2"]
    parts = cut_plan(plan, {"m": 0, "m:2": 0, "m:3": 0})
    assert [spec.name for spec in next(iter(parts.values())).models] == ["m", "m:2", "m:3"]
    broken = plan.to_data()
    broken["models"] = [entry for entry in broken["models"] if entry["name"] != "m"]
    with pytest.raises(InvalidInputError, match="0 versions of 'm' take the rest"):
        Plan.from_data(broken)


def test_versions_may_lie_apart() -> None:
    models = workload({**M, "rate_rps": 400, "slo_ms": 150}, {**CANARY, "share_pct": 20}, {**M, "name": "x"}).models
    fair = Workload(models=models, objective="each")
    plan = solve(
        load_policy("tenuto", {"starts": "none", "requests": "200"}), fair, Cluster.parse("v100:4"), Profiles([])
    )
    assert not plan.unserved


@pytest.mark.parametrize("seed", range(30))
def test_what_is_shared_out_is_all_there_was(seed: int) -> None:
    draw = random.Random(seed)

    def split() -> tuple[Any, ...]:
        shares = [draw.choice([0, 5, 20, 30]) for _ in range(draw.randint(0, 2))]
        versions = [{**CANARY, "name": f"m:{n + 2}", "share_pct": part, "rate_rps": 1} for n, part in enumerate(shares)]
        return workload(M, *versions, {**M, "name": "x"}).models

    before, after = split(), split()
    rates = {spec.name: draw.uniform(1.0, 100.0) for spec in before}
    found = shared_out(rates, before, after)
    assert found["x"] == rates["x"]
    asked_by_name = {s.name for s in (*before, *after) if s.share_pct == 0.0}
    if not asked_by_name:
        total = sum(rate for name, rate in rates.items() if name != "x")
        assert sum(rate for name, rate in found.items() if name != "x") == pytest.approx(total)
