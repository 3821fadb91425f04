"""Set-ups from plans and workloads, and the two commands on files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto.batching.core.build import everywhere, from_plan, latency_steps
from tenuto.cli import main
from tenuto.documents import parse_document
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload
from tenuto.profiles import LatencyTable, LinearLatency, Profiles

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


def test_a_stages_requests_are_worth_what_is_lost_with_them() -> None:
    fast = {"alpha_ms": 1.0, "beta_ms": 4.0}
    stages = [
        {"model": "detect", "latency": fast},
        {"model": "read", "after": ["detect"], "latency": fast, "count": 2},
        {"model": "shared", "after": ["read"]},
    ]
    shared = {"name": "shared", "latency": fast, "rate_rps": 40, "slo_ms": 60}
    application = {"name": "ocr", "rate_rps": 10, "slo_ms": 180, "stages": stages}
    work = parse_document(Workload, {"models": [shared], "applications": [application]}, origin="w.yaml")
    models = everywhere(work, Cluster.parse("v100:1"), Profiles(())).models
    weights = {model.name: model.weight for model in models}
    # Of four equal requests, one is done after `detect`, three after `read`, which share the worth, and all at the end.
    assert weights == pytest.approx({"ocr.detect": 0.25, "ocr.read": 0.375, "shared": 1.0})
    # They are held for as long as one takes alone.
    holds_ms = {model.name: model.longest_hold_ms for model in models}
    assert holds_ms == {"ocr.detect": 5.0, "ocr.read": 5.0, "shared": 5.0}

    first = {**application, "stages": [{**stages[2], "after": []}, {**stages[0], "after": ["shared"]}]}
    work = parse_document(Workload, {"models": [shared], "applications": [first]}, origin="w.yaml")
    system = everywhere(work, Cluster.parse("v100:1"), Profiles(()))
    assert system.models[0].rate_rps == 50.0
    assert 0.8 < system.models[0].weight < 1.0  # clients ask it by themselves 40 of 50 times


def test_a_stage_is_worth_half_of_what_runs_beside_it_too() -> None:
    big, little = {"alpha_ms": 9.0, "beta_ms": 0.0}, {"alpha_ms": 0.5, "beta_ms": 0.0}
    stages = [
        {"model": "digits", "latency": little, "count": 6},
        {"model": "object", "latency": big},
        {"model": "last", "after": ["digits", "object"], "latency": big},
    ]
    application = {"name": "game", "rate_rps": 1, "slo_ms": 200, "stages": stages}
    work = parse_document(Workload, {"applications": [application]}, origin="w.yaml")
    weights = {model.name: model.weight for model in everywhere(work, Cluster.parse("v100:1"), Profiles(())).models}
    parts = {"game.digits": (3.0 + 4.5) / 6, "game.object": 9.0 + 1.5, "game.last": 21.0}  # of 21 ms
    assert weights == pytest.approx({name: ms / 21.0 for name, ms in parts.items()})


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


SIZED = {
    "gpulets": [
        {
            "id": f"n0/0/{place}",
            "gpu": "n0/0",
            "share_pct": 50,
            "models": [
                {
                    "name": "a",
                    "batch_size": 2,
                    "latency": {"points": {1: 3.0, 2: 5.0}},
                    "by_size": [
                        {"sizes": {"tokens": n}, "latency": {"points": {1: n / 8, most: n / 4}}} for n, most in classes
                    ],
                },
                {"name": "b", "batch_size": 2, "latency": {"points": {1: 4.0, 2: 6.0}}},
            ],
        }
        for place, classes in (("a", [(16, 8), (64, 2)]), ("b", [(32, 4)]))
    ],
    "models": [
        {"name": "a", "rate_rps": 300, "slo_ms": 40, "sizes": {"tokens": {"quantiles": {0: 1, 50: 16.5, 100: 80}}}},
        {"name": "b", "rate_rps": 50, "slo_ms": 30},
    ],
    "unserved": [],
}


def test_a_model_whose_requests_vary_has_a_scheduled_program_for_each_size() -> None:
    plan = Plan.from_data(PLAN | SIZED)
    assert Plan.from_data(plan.to_data()) == plan
    assert "by_size" not in plan.to_data()["gpulets"][0]["models"][1]
    system = from_plan(plan)
    assert [(model.name, model.sizes) for model in system.models] == [
        ("a", (16,)),
        ("a", (32,)),
        ("a", (64,)),
        ("b", ()),
    ]
    assert [program.name for program in system.programs] == ["a", "a", "a", "b"]
    assert [model.name for model in system.reported] == ["a", "b"]
    assert system.classes_of == ((0, 1, 2), (3,))
    rates = [model.rate_rps for model in system.models]
    assert rates[0] == pytest.approx(150.0)
    assert sum(rate or 0.0 for rate in rates[:3]) == pytest.approx(300.0 * (0.5 + 0.5 * (64.5 - 16.5) / (80 - 16.5)))
    first, second = (gpulet.hosts for gpulet in system.gpulets)
    # A batch of 32 tokens runs padded to 64 where 32 was not measured, and not at all where nothing covers it.
    assert first[1] == first[2]
    assert (len(first[0].latency_ms), first[2].latency_ms, sorted(second)) == (9, (0.0, 8.0, 16.0), [0, 1, 3])
    assert [system.place_of(0, (tokens,)) for tokens in (1, 17, 64, 65)] == [0, 1, 2, -1]
    assert system.joint_classes[0] == {1: 1, 2: 2}
    assert system.place_of(1, ()) == 3
    firm = Plan.from_data(json.loads(json.dumps(plan.to_data()).replace('"by_size"', '"pads": false, "by_size"')))
    assert firm.to_data()["gpulets"][0]["models"][0]["pads"] is False
    assert from_plan(firm).joint_classes == {}


@pytest.mark.parametrize("rate_rps", [100, 200, 300])
def test_models_that_cannot_be_padded_are_promised_what_virtual_time_gives_them(
    rate_rps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [
        {"batch_size": b, "sizes": {"tokens": n}, "latency_ms": 4.0 + 0.02 * n * b}
        for n in (4, 16, 64, 128, 256)
        for b in (1, 2, 4, 8, 16)
    ]
    models = {"a": {"points": points, "pads": False}}
    (tmp_path / "p.yaml").write_text(
        json.dumps({"name": "p", "gpu_type": "v100", "source": "made up", "models": models})
    )
    sizes = "{tokens: {lognormal: {median: 40, sigma: 0.8, most: 256}}}"
    (tmp_path / "w.yaml").write_text(f"models: [{{name: a, rate_rps: {rate_rps}, slo_ms: 40, sizes: {sizes}}}]")
    files = ["--policy", "symphony", "--gpus", "v100:1", "--profiles", str(tmp_path / "p.yaml")]
    code, out, _ = run(["plan", str(tmp_path / "w.yaml"), *files, "-o", str(tmp_path / "plan.yaml"), "--json"], capsys)
    promised_rps = json.loads(out)["expected"]["goodput_rps"]
    code, out, _ = run(["simulate", str(tmp_path / "plan.yaml"), "--duration-s", "30", "--json"], capsys)
    assert (code, json.loads(out)["goodput_rps"]) == (0, pytest.approx(promised_rps, rel=0.12))


def test_a_workload_with_sizes_is_simulated_and_reported_by_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [
        {"batch_size": b, "sizes": {"tokens": n}, "latency_ms": 1.0 + 0.05 * n * b} for n in (16, 64) for b in (1, 4)
    ]
    profile = {"name": "p", "gpu_type": "v100", "source": "made up", "models": {"a": {"points": points}}}
    (tmp_path / "p.yaml").write_text(json.dumps(profile))
    sizes = "{tokens: {lognormal: {median: 20, sigma: 0.8}}}"
    (tmp_path / "w.yaml").write_text(f"models: [{{name: a, rate_rps: 100, slo_ms: 40, sizes: {sizes}}}]")
    files = ["--gpus", "v100:1", "--profiles", str(tmp_path / "p.yaml")]
    short = ("--option", "requests=500")  # what is judged does not depend on how long plans are tried
    code, out, _ = run(["plan", str(tmp_path / "w.yaml"), *files, *short, "-o", str(tmp_path / "plan.yaml")], capsys)
    assert code == 0
    said = "a: the mean latency over 7 sizes (5 of them interpolated between measured ones), up to tokens 64; 7.16 % of"
    assert f"{said} the requests are larger" in out
    code, out, _ = run(["explain", str(tmp_path / "plan.yaml"), *files[2:]], capsys)
    assert (code, "  assumes a: the mean latency over 7 sizes" in out) == (0, True)
    for what in (["simulate", str(tmp_path / "plan.yaml")], ["simulate", str(tmp_path / "w.yaml"), *files]):
        code, out, _ = run([*what, "--duration-s", "20", "--json"], capsys)
        counts = json.loads(out)["models"]["a"]
        assert (code, counts["failed"], counts["offered"] > 1500) == (0, 0, True)
        assert counts["rejected"] == pytest.approx(0.0716 * counts["offered"], rel=0.2)
        assert counts["ok"] > 0.99 * (counts["offered"] - counts["rejected"])
