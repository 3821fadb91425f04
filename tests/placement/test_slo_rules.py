"""SLOs by rule: numbers from the profile of the fastest type, and a clear error for everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Workload
from tenuto.placement.slo_rules import load_workload
from tenuto.profiles import Profile, Profiles
from tests.placement.published import thesis

V100 = Cluster.parse("v100:1")


def loaded(
    folder: Path, *models: dict[str, Any], cluster: Cluster = V100, profiles: Profiles | None = None
) -> Workload:
    file = folder / "w.yaml"
    file.write_text(yaml.safe_dump({"models": [{"rate_rps": 10, **model} for model in models]}))
    return load_workload(file, cluster, profiles or thesis())


def problems(folder: Path, *models: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidInputError) as caught:
        loaded(folder, *models)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(("rule", "slo_ms"), [("2 x l(1)", 12), ("1.5 x l(10)", 22.5), ("0.5 x l(3)", 4)])
def test_a_rule_is_so_many_times_what_the_batch_takes(tmp_path: Path, rule: str, slo_ms: float) -> None:
    line = {"name": "a", "latency": {"alpha_ms": 1, "beta_ms": 5}}
    workload = loaded(tmp_path, {**line, "slo": rule}, {"name": "b", "latency": line["latency"], "slo_ms": 7})
    assert [spec.slo_ms for spec in workload.models] == [slo_ms, 7]
    assert loaded(tmp_path, *yaml.safe_load(workload.dump())["models"]) == workload


def test_the_fastest_type_of_the_cluster_counts(tmp_path: Path) -> None:
    def profile(kind: str, ms: float) -> Profile:
        row = {"points": [{"batch_size": 1, "latency_ms": ms}]}
        return Profile.model_validate(
            {"schema": 1, "name": kind, "gpu_type": kind, "source": "made up", "models": {"a": row}}
        )

    both = Profiles([profile("v100", 8.0), profile("t4", 20.0)])
    for gpus, slo_ms in (("v100:1", 16), ("t4:1", 40), ("t4:3,v100:1", 16)):
        workload = loaded(tmp_path, {"name": "a", "slo": "2 x l(1)"}, cluster=Cluster.parse(gpus), profiles=both)
        assert workload["a"].slo_ms == slo_ms


@pytest.mark.parametrize("rule", ["2 l(1)", "x l(1)", "2 x l(0)", "0 x l(1)", "-1 x l(1)", "2 x l(1) + 3", 5, None, []])
def test_what_is_no_rule_is_refused_with_an_example(tmp_path: Path, rule: Any) -> None:
    [told] = problems(tmp_path, {"name": "resnet50", "slo": rule})
    assert "models.0.slo" in told
    assert "slo: 2 x l(1)" in told


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    told = problems(
        tmp_path,
        {"name": "resnet50", "slo": "2 x l(100000)"},
        {"name": "nothing", "slo": "2 x l(1)"},
        {"name": "bert", "slo": "2 x l(1)", "slo_ms": 3},
        {"name": "vgg19", "slo": "2 x l(1)", "rate_rps": -1},
    )
    for index, words in enumerate(("was not measured", "nothing", "slo", "rate_rps")):
        assert any(words in line for line in told), (index, told)
