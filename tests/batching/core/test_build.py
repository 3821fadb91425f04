"""Set-ups from plans and workloads, and the two commands on files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto.batching.core.build import from_plan, latency_steps
from tenuto.cli import main
from tenuto.errors import InvalidInputError
from tenuto.placement import Plan
from tenuto.profiles import LatencyTable, LinearLatency

PLAN = {
    "schema": 1,
    "policy": {"name": "ffd"},
    "gpus": [{"id": "n0/0", "type": "v100"}],
    "gpulets": [
        {
            "id": "n0/0/a",
            "gpu": "n0/0",
            "share_pct": 40,
            "models": [{"name": "a", "batch_size": 4, "slowdown": 1.2, "latency": {"alpha_ms": 1.0, "beta_ms": 5.0}}],
        },
        {
            "id": "n0/0/b",
            "gpu": "n0/0",
            "share_pct": 60,
            "models": [
                {"name": "a", "batch_size": 8, "latency": {"alpha_ms": 0.5, "beta_ms": 3.0}},
                {"name": "b", "batch_size": 2, "latency": {"points": {1: 4.0, 2: 6.0}}},
            ],
        },
    ],
    "models": [
        {"name": "a", "rate_rps": 300, "slo_ms": 40},
        {"name": "b", "rate_rps": 50, "slo_ms": 30},
        {"name": "c", "rate_rps": 10, "slo_ms": 30},
    ],
    "unserved": ["c"],
}
WORKLOAD = """
models:
  - {name: r, latency: {alpha_ms: 1.053, beta_ms: 5.072}, rate_rps: 900, slo_ms: 25}
  - {name: i, latency: {alpha_ms: 5.09, beta_ms: 18.368}, rate_rps: 40, slo_ms: 70}
"""


def test_a_plan_gives_its_gpulets_in_order() -> None:
    system = from_plan(Plan.from_data(PLAN))
    assert [gpulet.id for gpulet in system.gpulets] == ["n0/0/a", "n0/0/b"]
    first, second = system.gpulets
    assert len(first.hosts[0].latency_ms) == 5
    assert first.hosts[0].planned_ms()[2] == pytest.approx(1.2 * 7.0)
    assert second.hosts[1].latency_ms == (0.0, 4.0, 6.0)
    assert all(2 not in gpulet.hosts for gpulet in system.gpulets)


def test_an_unserveable_plan_is_refused() -> None:
    data = json.loads(json.dumps(PLAN, default=str)) | {"models": [m | {"slo_ms": 3.6} for m in PLAN["models"]]}  # type: ignore[union-attr,attr-defined]
    data["gpulets"] = [PLAN["gpulets"][1]]  # type: ignore[index]
    with pytest.raises(InvalidInputError, match="unserveable"):
        from_plan(Plan.from_data(data))


def test_a_replica_without_latency_is_refused() -> None:
    bare = {"id": "n0/0/a", "gpu": "n0/0", "models": [{"name": "a", "batch_size": 4}]}
    with pytest.raises(InvalidInputError, match="carries no latency"):
        from_plan(Plan.from_data(PLAN | {"gpulets": [bare]}))


def test_latency_steps_end_at_the_slo_or_the_planned_batch() -> None:
    line = LinearLatency(alpha_ms=1.0, beta_ms=5.0)
    assert len(latency_steps(line, 10.0)) - 1 == 5
    assert len(latency_steps(line, 10.0, 3)) - 1 == 3
    table = LatencyTable(points={4: 8.0, 8: 12.0})
    assert latency_steps(table, 100.0) == (0.0, 8.0, 8.0, 8.0, 8.0, 9.0, 10.0, 11.0, 12.0)


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def test_simulate_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLAN))
    code, out, _ = run(["simulate", str(file), "--duration-s", "5", "--json"], capsys)
    data = json.loads(out)
    assert code == 0
    assert data["models"]["c"]["rejected"] == data["models"]["c"]["offered"] > 0
    assert data["models"]["a"]["attainment"] > 0.9
    code, _, err = run(["simulate", str(file), "--gpus", "v100:1"], capsys)
    assert code == 2
    assert "brings its own GPUs" in err


def test_simulate_a_workload_twice_gives_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(WORKLOAD)
    outputs = []
    for _ in range(2):
        code, out, _ = run(
            ["simulate", str(file), "--gpus", "v100:2", "--duration-s", "3", "--seed", "0", "--json"], capsys
        )
        assert code == 0
        outputs.append("\n".join(row for row in out.splitlines() if "wall_s" not in row))
    assert outputs[0] == outputs[1]
    code, out, _ = run(["simulate", str(file), "--gpus", "v100:2", "--duration-s", "3"], capsys)
    assert code == 0
    assert "goodput" in out


def test_goodput_of_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(WORKLOAD)
    code, out, err = run(["goodput", str(file), "--gpus", "v100:2", "--duration-s", "2", "--json"], capsys)
    data = json.loads(out)
    assert code == 0
    assert data["rate_scale"] > 0
    assert data["bracket_pct"] < 1.0
    assert "scale" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--duration-s", "0"], "--duration-s"),
        (["--duration-s", "nan"], "--duration-s"),
        (["--seed", "-1"], "--seed"),
        (["--rate-scale", "0"], "rate"),
        (["--rate-scale", "nan"], "rate"),
        (["--warmup-s", "99"], "--warmup-s"),
        (["--scheduler", "fifo"], "Use one of deferred"),
        (["--scheduler", "symphony", "--option", "gather=none"], "head-first, window"),
        (["--option", "x=1"], "Known options"),
        (["--network-ms", "a"], "--network-ms"),
    ],
)
def test_bad_arguments_say_what_to_change(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(WORKLOAD)
    code, _, err = run(["simulate", str(file), "--gpus", "v100:2", "--duration-s", "2", *arguments], capsys)
    assert code == 2
    assert says in err
    assert "Traceback" not in err


def test_a_plan_with_a_model_that_is_always_late_is_simulated_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = [m | ({"slo_ms": 3.5} if m["name"] == "b" else {}) for m in PLAN["models"]]  # type: ignore[union-attr,attr-defined]
    file = tmp_path / "plan.yaml"
    file.write_text(json.dumps(PLAN | {"models": late}))
    code, out, err = run(["simulate", str(file), "--duration-s", "2", "--json"], capsys)
    models = json.loads(out)["models"]
    assert (code, models["b"]["ok"]) == (0, 0)
    assert models["a"]["attainment"] == 1.0
    assert "models.b.slo_ms: 3.5: unserveable" in err
    code, _, err = run(["goodput", str(file), "--duration-s", "2"], capsys)
    assert code == 1
    assert "models.b.slo_ms" in err


def test_an_unserveable_slo_is_reported_not_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(WORKLOAD.replace("slo_ms: 70", "slo_ms: 20"))
    code, _, err = run(["simulate", str(file), "--gpus", "v100:2"], capsys)
    assert code == 2
    assert "unserveable" in err
