"""`tenuto partition`: what it prints, takes back and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tenuto.errors import InvalidInputError, raise_if_any
from tenuto.placement.policies.symphony.partition import PartitionLimits, PartitionModel, partition
from tenuto_lab.verbs.partition import command, gpus_of, members_of, partition_problems

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


def test_it_says_what_would_help_each_model_that_fits_nowhere(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("nodes:\n  - {name: n0, gpus: [{type: v100, count: 1, memory_mib: 700}]}\n")
    for slo_ms, cluster, cure in (
        (3, ("--gpus", "v100:1"), "Leave it out, or raise its SLO."),
        (300, ("--cluster", str(tmp_path / "c.yaml")), "Leave it out, or use GPUs with more memory."),
    ):
        (tmp_path / "w.yaml").write_text(f"models:\n  - {{name: vgg19, rate_rps: 50, slo_ms: {slo_ms}}}\n")
        with pytest.raises(InvalidInputError, match=cure):
            CliRunner().invoke(
                command, [str(tmp_path / "w.yaml"), *cluster, "--subclusters", "1"], catch_exceptions=False
            )


def test_one_impossible_model_does_not_keep_the_others_from_being_parted(tmp_path: Path) -> None:
    entries = "  - {name: vgg19, rate_rps: 50, slo_ms: 3}\n  - {name: gpt2, rate_rps: 900, slo_ms: 300}\n"
    (tmp_path / "w.yaml").write_text("models:\n  - {name: bert, rate_rps: 50, slo_ms: 300}\n" + entries)
    arguments = [str(tmp_path / "w.yaml"), "--gpus", "v100:2", "--subclusters", "1", "--max-rate-rps", "500"]
    ran = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert "unserved: vgg19: SLO below batch 1: one request takes" in ran.stdout
    assert "unserved: gpt2: its 900 r/s alone are above the 500 of a sub-cluster" in ran.stdout
    data = json.loads(CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert (data["assignment"], list(data["unserved"])) == ({"bert": 0}, ["vgg19", "gpt2"])


def model(name: str, rate_rps: float = 100.0, need: float = 1.0, memory: float = 100.0) -> PartitionModel:
    return PartitionModel(name, need, rate_rps, memory)


def test_a_sub_cluster_gets_the_gpus_it_keeps_busy() -> None:
    found = partition([model("a", need=9.0), model("b", need=0.5)], 2)
    assert gpus_of(found, 10)[found.assignment["a"]] == 9
    assert [len(members_of(found, k)) for k in range(2)] == [1, 1]
    with pytest.raises(InvalidInputError):
        gpus_of(found, 1)


@pytest.mark.parametrize(
    ("models", "count", "limits"),
    [
        ([], 1, PartitionLimits()),
        ([model("a")], 2, PartitionLimits()),
        ([model("a", need=0.0)], 1, PartitionLimits()),
        ([model("a")], 0, PartitionLimits()),
        ([model("a", float("nan"))], 1, PartitionLimits()),
        ([model("a", memory=9e9)], 1, PartitionLimits(memory_mib=10.0)),
        ([model("a", 900.0)], 1, PartitionLimits(max_rate_rps=10.0)),
        ([model("a"), model("b"), model("c")], 2, PartitionLimits(max_models=1)),
    ],
)
def test_wrong_numbers_and_impossible_limits_are_refused(
    models: list[PartitionModel], count: int, limits: PartitionLimits
) -> None:
    def partitioned() -> None:
        raise_if_any(partition_problems(models, count, limits, {}, 1.0))
        partition(models, count, limits=limits)

    with pytest.raises(InvalidInputError):
        partitioned()
