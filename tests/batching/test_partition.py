"""Sub-clusters: balance against enumeration, limits, disruption, and the command."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from tenuto.cli.partition import command
from tenuto.errors import InvalidInputError
from tenuto.placement.policies.symphony.partition import Limits, PartitionModel, partition


def model(name: str, need: float, rate: float = 100.0, memory: float = 100.0) -> PartitionModel:
    return PartitionModel(name, need, rate, memory)


def best_by_enumeration(models: list[PartitionModel], count: int, memory_mib: float) -> float:
    mean_need = sum(m.need_gpus for m in models) / count
    mean_rate = sum(m.rate_rps for m in models) / count
    best = float("inf")
    for choice in itertools.product(range(count), repeat=len(models)):
        groups = [[m for m, k in zip(models, choice, strict=True) if k == g] for g in range(count)]
        if any(not g or sum(m.memory_mib for m in g) > memory_mib for g in groups):
            continue
        needs = [sum(m.need_gpus for m in g) for g in groups]
        rates = [sum(m.rate_rps for m in g) for g in groups]
        best = min(best, (max(needs) - min(needs)) / mean_need + (max(rates) - min(rates)) / mean_rate)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_no_partition_is_better_than_the_one_found(seed: int) -> None:
    rng = random.Random(seed)
    models = [model(f"m{i}", rng.uniform(0.1, 3.0), rng.uniform(10, 500), rng.uniform(50, 400)) for i in range(7)]
    found = partition(models, 3, limits=Limits(memory_mib=900.0), time_limit_s=30)
    assert found.proven
    assert found.objective == pytest.approx(best_by_enumeration(models, 3, 900.0), abs=1e-5)
    assert found.lower_bound <= found.objective + 1e-9


def test_equal_models_are_split_evenly() -> None:
    found = partition([model(f"m{i}", 1.0) for i in range(6)], 3)
    assert [len(found.members(k)) for k in range(3)] == [2, 2, 2]
    assert found.imbalance == 0.0
    assert found.gpus(9) == [3, 3, 3]


def test_limits_hold() -> None:
    models = [model(f"m{i}", 1.0, rate=100.0 * (i + 1), memory=100.0) for i in range(6)]
    found = partition(models, 3, limits=Limits(memory_mib=250.0, max_rate_rps=750.0, max_models=2))
    for k in range(3):
        assert sum(m.memory_mib for m in found.members(k)) <= 250.0
        assert sum(m.rate_rps for m in found.members(k)) <= 750.0
        assert len(found.members(k)) <= 2


def test_what_is_placed_stays_unless_moving_pays() -> None:
    models = [model("a", 1.0), model("b", 1.0), model("c", 1.01), model("d", 1.0)]
    current = {"a": 0, "b": 0, "c": 1, "d": 1}
    assert partition(models, 2, current=current).moved == ()
    lopsided = {"a": 0, "b": 0, "c": 0, "d": 1}
    assert len(partition(models, 2, current=lopsided).moved) == 1
    assert partition(models, 2, current=lopsided, limits=Limits(max_moved_mib=0.0)).moved == ()
    assert partition(models, 2, current=lopsided, limits=Limits(disruption_weight=100.0), time_limit_s=1.0).moved == ()


def test_a_new_model_costs_nothing_to_place_and_names_are_kept() -> None:
    found = partition([model("a", 1.0), model("b", 2.0), model("new", 1.0)], 2, current={"a": 1, "b": 0})
    assert dict(found.assignment) == {"a": 1, "b": 0, "new": 1}
    assert found.moved == ()


def test_gpus_follow_need_with_at_least_one_each() -> None:
    found = partition([model("a", 9.0, 1.0), model("b", 0.5, 1.0)], 2)
    shares = found.gpus(10)
    assert sum(shares) == 10
    assert min(shares) >= 1
    assert shares[found.assignment["a"]] > shares[found.assignment["b"]]
    with pytest.raises(InvalidInputError):
        found.gpus(1)


@pytest.mark.parametrize(
    ("models", "count", "limits"),
    [
        ([], 1, Limits()),
        ([model("a", 1.0)], 2, Limits()),
        ([model("a", 0.0)], 1, Limits()),
        ([model("a", 1.0)], 0, Limits()),
        ([model("a", float("nan"))], 1, Limits()),
        ([model("a", 1.0, memory=9e9)], 1, Limits(memory_mib=10.0)),
        ([model("a", 1.0, 900.0)], 1, Limits(max_rate_rps=10.0)),
        ([model("a", 1.0), model("b", 1.0), model("c", 1.0)], 2, Limits(max_models=1)),
    ],
)
def test_wrong_numbers_and_impossible_limits_are_refused(
    models: list[PartitionModel], count: int, limits: Limits
) -> None:
    with pytest.raises(InvalidInputError):
        partition(models, count, limits=limits)


WORKLOAD = """models:
- {name: a, rate_rps: 900, slo_ms: 50, latency: {alpha_ms: 1, beta_ms: 5}}
- {name: b, rate_rps: 600, slo_ms: 50, latency: {alpha_ms: 1, beta_ms: 5}}
- {name: c, rate_rps: 300, slo_ms: 50, latency: {alpha_ms: 1, beta_ms: 5}}
"""


def test_the_command_prints_json_that_it_takes_back(tmp_path: Path) -> None:
    workload = tmp_path / "w.yaml"
    workload.write_text(WORKLOAD)
    arguments = [str(workload), "--gpus", "v100:8", "--subclusters", "2", "--json"]
    first = CliRunner().invoke(command, arguments, catch_exceptions=False)
    data = json.loads(first.stdout)
    assert data["proven"]
    assert {frozenset(row["models"]) for row in data["subclusters"]} == {frozenset("a"), frozenset("bc")}
    assert sum(row["gpus"] for row in data["subclusters"]) == 8
    (tmp_path / "now.json").write_text(first.stdout)
    again = CliRunner().invoke(command, [*arguments, "--current", str(tmp_path / "now.json")], catch_exceptions=False)
    assert json.loads(again.stdout)["assignment"] == data["assignment"]
    table = CliRunner().invoke(command, arguments[:-1], catch_exceptions=False)
    assert "sub-cluster" in table.stdout


def test_the_command_refuses_a_current_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    (tmp_path / "now.yaml").write_text("- a\n")
    arguments = [
        str(tmp_path / "w.yaml"),
        "--gpus",
        "v100:8",
        "--subclusters",
        "2",
        "--current",
        str(tmp_path / "now.yaml"),
    ]
    with pytest.raises(InvalidInputError, match="sub-clusters from 0"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)
