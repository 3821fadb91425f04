"""Plans that people edited: nonsense is refused when they are read, with its place and a cure; what policies make and
what is unusual on purpose is read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.documents import dump_yaml
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.plan import PlannedGpu
from tenuto.placement.planner.gpu_matching import gpus_of
from tenuto.profiles import Profiles

POINTS = {"points": {1: 5.0, 32: 20.0}}
PLAN: dict[str, Any] = {
    "schema": 1,
    "policy": {"name": "hand"},
    "gpus": [{"id": "n0/0", "type": "v100"}],
    "gpulets": [
        {
            "id": f"n0/0/{name}",
            "gpu": "n0/0",
            "share_pct": 50,
            "memory_mib": 8000,
            "models": [{"name": name, "batch_size": 32, "rate_rps": 10, "latency": POINTS}],
        }
        for name in "ab"
    ],
    "models": [{"name": name, "rate_rps": 10, "slo_ms": 100, "latency": POINTS} for name in "ab"],
}
STEPS = {"prefill_ms": [[1, 1]], "decode_ms": [[1, 1]]}


def edited(gpulet: dict[str, Any] | None = None, replica: dict[str, Any] | None = None, **gpu: Any) -> dict[str, Any]:
    plan = copy.deepcopy(PLAN)
    plan["gpulets"][0] |= gpulet or {}
    plan["gpulets"][0]["models"][0] |= replica or {}
    plan["gpus"][0] |= gpu
    return plan


@pytest.mark.parametrize(
    ("plan", "path", "value", "rule"),
    [
        (edited({"share_pct": 60}), "gpus.n0/0", 110.0, "shares sum to more than 100 %"),
        (edited({"memory_mib": 1e9}), "gpus.n0/0", "1000008000 MiB", "more memory than the GPU has (16384 MiB)"),
        (edited({"memory_mib": 8000}, memory_mib=15000), "gpus.n0/0", "16000 MiB", "(15000 MiB)"),
        *(
            (edited(replica={key: -5}), f"gpulets.0.models.0.{key}", -5, "greater than or equal to 0")
            for key in ("rate_rps", "latency_ms", "memory_mib", "weights_mib")
        ),
        (edited(replica={"batch_size": 33}), "gpulets.0.models.0.batch_size", 33, "largest batch of its latency (32)"),
        (edited(replica={"steps": STEPS, "kv_tokens": 5}), "gpulets.0.models.0.steps", "a", "does not generate"),
    ],
)
def test_nonsense_is_refused_with_its_place_and_a_cure(
    plan: dict[str, Any], path: str, value: object, rule: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Plan.from_data(plan, origin="p.yaml")
    (found,) = caught.value.problems
    assert (found.path, found.value) == (f"p.yaml: {path}", value)
    assert rule in found.rule
    assert found.cure


@pytest.mark.parametrize(
    "plan",
    [
        edited(),
        edited({"share_pct": 60}) | {"overcommits": True},
        edited({"share_pct": None}),
        edited({"memory_mib": 30000}, memory_mib=40000),
        edited({"memory_mib": 1e9}, type="zx81"),
        edited(replica={"rate_rps": 0, "latency": {"alpha_ms": 1, "beta_ms": 1}, "batch_size": 1000}),
    ],
)
def test_what_is_possible_is_read_and_written_as_it_was(plan: dict[str, Any]) -> None:
    read = Plan.from_data(plan)
    assert Plan.from_data(read.to_data()) == read


@pytest.mark.parametrize("kind", ["v100", "zx81"])
def test_a_plan_for_gpus_of_another_size_says_so_and_can_be_operated(kind: str) -> None:
    group = {"type": kind, "memory_mib": 40000}
    cluster = Cluster.model_validate({"nodes": [{"name": "n0", "gpus": [group]}]})
    workload = Workload.model_validate({"models": PLAN["models"]})
    made = solve(load_policy("symphony"), workload, cluster, Profiles([]))
    read = Plan.from_data(made.to_data())
    assert [gpu.memory_mib for gpu in gpus_of(read)] == [40000]
    assert [PlannedGpu.of(gpu) for gpu in gpus_of(read)] == list(read.gpus)


@pytest.mark.parametrize(
    ("verb", "plan", "code", "said"),
    [
        ("explain", edited(type="zx81"), 2, "gpus.n0/0.type: 'zx81': is no known type, and its memory is not given"),
        ("deploy", edited(type="zx81"), 2, "gpus.n0/0.type: 'zx81': is no known type"),
        ("explain", edited(replica={"batch_size": 10**6}), 2, "gpulets.0.models.0.batch_size: 1000000: above"),
        ("explain", edited(type="zx81", memory_mib=20000) | {"policy": {"name": "symphony"}}, 0, ""),
        ("simulate", PLAN, 0, ""),
        ("simulate", PLAN | {"gpulets": []}, 1, ""),
        ("simulate", PLAN | {"gpulets": [], "models": []}, 0, ""),
    ],
)
def test_verbs_end_with_the_code_for_it(
    verb: str, plan: dict[str, Any], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.yaml").write_text(dump_yaml(plan))
    with pytest.raises(SystemExit) as stop:
        main([verb, str(tmp_path / "p.yaml"), *(("--duration-s", "2") if verb == "simulate" else ())])
    told = capsys.readouterr().err
    assert stop.value.code == code, told
    assert said in told
