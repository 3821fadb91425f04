"""Comparisons: refusal, pairing, intervals, and "no difference" for a gap inside the spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.cli import main
from tenuto.errors import InvalidInputError
from tenuto.loadgen.records import Records, unsent
from tenuto.loadgen.run_files import write_run_files
from tenuto.loadgen.verdict import summarise
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, solve
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.profiles import Profiles
from tenuto_lab.comparison import Side, compare, load_side
from tests.instruments.fan_out import traffic, workload

MODEL = {"attainment": 1.0, "p50_ms": 10.0, "p90_ms": 12.0, "p99_ms": 15.0, "mean_batch": 4.0}


def document(goodput: float, schedule: str, **more: Any) -> dict[str, Any]:
    return {
        "models": {"m": MODEL},
        "goodput_rps": goodput,
        "attainment": 1.0,
        "schedule_hash": schedule,
        "verdict": {"result": "PASS", "reasons": [], "conditions": {}},
        "options": {},
        "window_ms": [0, 1000],
        "slos_ms": {"m": 20.0},
        **more,
    }


def side(name: str, *documents: dict[str, Any]) -> Side:
    return Side(name, tuple(Path(f"{name}/{i}") for i in range(len(documents))), documents)


def goodput_of(first: Side, second: Side, **settings: Any) -> Any:
    return compare(first, second, **settings).differences[0]


def test_repeats_of_one_schedule_use_welch() -> None:
    first = side("a", *(document(g, "x") for g in (100.0, 102.0, 98.0)))
    far = side("b", *(document(g, "x") for g in (120.0, 121.0, 119.0)))
    near = side("c", *(document(g, "x") for g in (101.0, 103.0, 99.0)))
    found = goodput_of(first, far)
    assert found.difference == pytest.approx(20.0)
    assert found.conclusion == "higher"
    # Welch: variances 4/3 and 1/3, 2.94 degrees of freedom, t = 3.219.
    assert found.half_width == pytest.approx(3.219 * (5 / 3) ** 0.5, rel=0.01)
    assert goodput_of(far, first).conclusion == "lower"
    assert goodput_of(first, near).conclusion == "no difference"
    assert "Welch" in compare(first, far).method


def test_repeats_with_a_seed_each_are_paired() -> None:
    first = side("a", *(document(g, h) for g, h in ((100.0, "x"), (200.0, "y"), (300.0, "z"))))
    second = side("b", *(document(g, h) for g, h in ((302.1, "z"), (102.0, "x"), (201.9, "y"))))
    found = goodput_of(first, second)
    assert found.conclusion == "higher"
    assert found.half_width == pytest.approx(4.303 * 0.1 / 3**0.5, rel=0.01)
    assert "paired" in compare(first, second).method


def test_different_schedules_are_refused_unless_told() -> None:
    first, second = side("a", document(100.0, "x")), side("b", document(150.0, "y"))
    with pytest.raises(InvalidInputError, match="--different-schedules"):
        compare(first, second)
    found = compare(first, second, different_schedules=True)
    assert found.differences[0].conclusion == "unknown"
    assert "schedules differ" in found.warnings[0]


def test_a_reader_is_warned() -> None:
    bad = {"verdict": {"result": "INVALID", "reasons": [], "conditions": {}}}
    first = side("a", *(document(100.0, "x", slos_ms={"m": 1}, emulated=True) for _ in range(2)))
    second = side(
        "b", *(document(100.0, "x", slos_ms={"m": 2}, emulated=False, kind="simulation", **bad) for _ in range(2))
    )
    text = " ".join(compare(first, second).warnings)
    for part in ("INVALID", "SLOs differ", "emulated", "simulated"):
        assert part in text


def test_no_model_in_common() -> None:
    other = document(1.0, "x")
    other["models"] = {"n": MODEL}
    with pytest.raises(InvalidInputError, match="no model in common"):
        compare(side("a", document(1.0, "x")), side("b", other))


def test_a_figure_that_one_side_lacks_is_unknown() -> None:
    lacking = document(1.0, "x")
    lacking["models"] = {"m": {**MODEL, "p99_ms": None}}
    found = compare(side("a", document(1.0, "x"), document(1.0, "x")), side("b", lacking, lacking))
    assert {d.metric: d.conclusion for d in found.differences}["p99_ms"] == "unknown"


def records(latency_ms: np.ndarray[Any, Any], slo_ms: float = 50.0) -> Records:
    total = len(latency_ms)
    rows = unsent(np.linspace(0.0, 9999.0, total), np.zeros(total, np.int32))
    rows.sent_ms = rows.scheduled_ms
    rows.answered_ms = rows.scheduled_ms + latency_ms
    rows.status = np.full(total, 200, np.int32)
    rows.outcome = np.where(latency_ms <= slo_ms, Outcome.OK, Outcome.LATE).astype(np.int8)
    rows.batch_size = np.full(total, 4, np.int32)
    return rows


def write_run(folder: Path, latency_ms: np.ndarray[Any, Any]) -> Side:
    folder.mkdir()
    rows = records(latency_ms)
    summary = summarise(rows, ["m"], warmup_ms=0.0, duration_ms=10_000.0)
    head = {
        "verdict": {"result": "PASS", "reasons": [], "conditions": {}},
        "options": {"duration_s": 10},
        "slos_ms": {"m": 50.0},
        "schedule_hash": "x",
    }
    write_run_files(folder, {**head, **summary, "plan": None}, rows, None)
    return load_side(folder)


def test_single_runs_are_compared_part_by_part(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    base = write_run(tmp_path / "a", generator.normal(40, 8, 2000))
    same = write_run(tmp_path / "b", generator.normal(40, 8, 2000))
    worse = write_run(tmp_path / "c", generator.normal(45, 8, 2000))
    assert goodput_of(base, same).conclusion == "no difference"
    found = compare(base, worse)
    conclusions = {(d.model, d.metric): d.conclusion for d in found.differences}
    assert conclusions[(None, "goodput_rps")] == "lower"
    assert conclusions[("m", "p50_ms")] == "higher"
    assert conclusions[("m", "p99_ms")] == "unknown"  # a part is too short for it
    assert conclusions[("m", "mean_batch")] == "no difference"
    assert "within one run" in found.method


def test_a_folder_of_runs_counts_as_repeats(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for name in ("1", "2"):
        write_run(tmp_path / "all" / name, np.full(200, 10.0))
    assert len(load_side(tmp_path / "all").folders) == 2
    with pytest.raises(InvalidInputError, match="holds no run"):
        load_side(tmp_path / "absent")


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    code = caught.value.code
    return code if isinstance(code, int) else 0


def test_applications_are_compared_beside_models(tmp_path: Path) -> None:
    work = workload(traffic(arrival={"process": "poisson"}))
    plan = solve(Symphony(), work, Cluster.parse("v100:1"), Profiles([]))
    (tmp_path / "plan.yaml").write_text(plan.dump())
    asked = ("simulate", str(tmp_path / "plan.yaml"), "--duration-s", "30", "--scheduler", "eager")
    for name, network in (("near", "0,0,0"), ("far", "0,0,20")):
        assert run(*asked, "--network-ms", network, "-o", str(tmp_path / name)) in (0, 1)
    sides = [load_side(tmp_path / name) for name in ("near", "far")]
    mine = {d.metric: d for d in compare(*sides).differences if d.model == "traffic"}

    near, far = (side.documents[0]["applications"]["traffic"]["p50_ms"] for side in sides)
    assert set(mine) == {"attainment", "p50_ms", "p90_ms", "p99_ms"}
    assert mine["p50_ms"].difference == pytest.approx(far - near)
    assert mine["p50_ms"].half_width is not None
    assert mine["p50_ms"].conclusion == "higher"


def test_the_verb_refuses_different_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = tmp_path / "w.yaml"
    asked.write_text("models: [{name: m, rate_rps: 50, slo_ms: 100, latency: {alpha_ms: 1, beta_ms: 5}}]")
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        simulate = ("simulate", str(asked), "--gpus", "v100:1", "--duration-s", "5", "--seed", seed)
        assert run(*simulate, "-o", str(tmp_path / name)) == 0
    capsys.readouterr()
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert run("compare", a, b) == 0
    assert "no difference" in capsys.readouterr().out
    assert run("compare", a, c) == 2
    assert "different schedules" in capsys.readouterr().err
    assert run("compare", a, c, "--different-schedules", "--json") == 0
    found = json.loads(capsys.readouterr().out)["comparisons"][0]
    assert found["warnings"] == ["the schedules differ; part of any difference is theirs"]
    assert run("compare", a) == 2
