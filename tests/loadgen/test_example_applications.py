"""The applications of examples/applications: each is planned, and in time when simulated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.explaining import explain
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import shipped_for
from tests.instruments.generating import ByForm

FOLDER = Path(__file__).parents[2] / "examples" / "applications"
NAMES = ("game", "traffic", "video", "social")


def planned(name: str) -> Plan:
    work = Workload.load(FOLDER / f"{name}.yaml")
    return solve(load_policy("symphony"), work, Cluster.parse("v100:1"), Profiles(()))


@pytest.mark.parametrize("name", NAMES)
def test_each_is_in_time_on_one_gpu(name: str) -> None:
    plan = planned(name)
    assert not plan.unserved
    run = Simulation.of_plan(plan, duration_s=60.0, seed=1).run()
    document, _ = run.describe(plan, options={}, command=())
    assert document["verdict"]["result"] == "PASS"
    for row in document["applications"].values():
        assert all(stage["p90_ms"] > 0.0 for stage in row["stages"].values())


def test_a_caption_is_written_in_time_beside_what_clients_ask_of_its_model() -> None:
    work, cluster = Workload.load(FOLDER / "caption.yaml"), Cluster.parse("a100-80gb:1")
    plan = solve(ByForm(), work, cluster, Profiles(shipped_for(cluster.gpu_types)))
    assert not plan.unserved
    assert (plan.model("llama").rate_rps, [app.name for app in plan.applications]) == (5.0, ["caption"])
    budgets = {stage.label: plan.applications[0].budget_ms(stage) for stage in plan.applications[0].stages}
    assert sum(budgets.values()) == pytest.approx(3000.0)
    assert budgets["sentence"] >= plan.model("llama").slo_ms
    document, _ = Simulation.of_plan(plan, duration_s=60.0, seed=1).run().describe(plan, options={}, command=())
    assert document["verdict"]["result"] == "PASS"
    assert document["models"]["llama"]["tokens_per_s"] > 0.0
    detector, sentence, _ = explain(plan, cluster.gpus, Profiles(shipped_for(cluster.gpu_types))).stages
    assert (sentence.saves, sentence.gpus > detector.gpus > 0.0) == (None, True)
    assert document["applications"]["caption"]["stages"]["sentence"]["p90_ms"] > 400.0


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield __import__("graphs")
    sys.modules.pop("graphs")


def frames(count: int) -> list[np.ndarray[Any, Any]]:
    dice = np.random.default_rng(0)
    return [dice.standard_normal((3, 320, 320)).astype(np.float32) for _ in range(count)]


def test_emulated_detections_are_drawn_from_the_frame(graphs: Any) -> None:
    nothing = {"scores": np.zeros(300), "boxes": np.zeros((300, 4)), "labels": np.zeros(300, np.int64)}
    stages = {"detector": [nothing]}
    counts = [len(graphs.vehicles({"frame": frame}, stages)) for frame in frames(40)]
    assert counts == [len(graphs.vehicles({"frame": frame}, stages)) for frame in frames(40)]
    assert 2.0 < np.mean(counts) < 4.0
    cuts = graphs.persons({"frame": frames(1)[0]}, stages)
    assert {cut["image"].shape for cut in cuts} <= {(3, 224, 224)}


def test_what_is_found_is_cut_out(graphs: Any) -> None:
    frame = np.zeros((3, 320, 320), np.float32)
    frame[:, 100:200, 50:150] = 1.0
    found = {
        "scores": np.array([0.9, 0.8, 0.1]),
        "boxes": np.array([[50, 100, 150, 200], [0, 0, 10, 10], [0, 0, 20, 20]], np.float32),
        "labels": np.array([1, 3, 1]),
    }
    (person,) = graphs.persons({"frame": frame}, {"detector": [found]})
    assert (person["image"] == 1.0).all()
    answer = graphs.seen({"frame": frame}, {"detector": [found], "persons": [{"logits": np.eye(1000)[7]}]})
    assert (answer["count"].tolist(), answer["classes"].tolist()) == ([1], [7])


def test_a_prompt_says_what_was_found_and_its_text_is_read(graphs: Any) -> None:
    found = {
        "scores": np.array([0.9, 0.8, 0.7]),
        "boxes": np.array([[0, 0, 10, 10]] * 3, np.float32),
        "labels": np.array([1, 1, 8]),
    }
    asked = graphs.question({"frame": np.zeros((3, 320, 320), np.float32)}, {"detector": [found]})
    assert "2 persons and 1 vehicles" in asked["text_input"]
    made = graphs.words({}, {"sentence": [{"text_output": np.array([b"two people wait"], object)}]})
    assert (made["input_ids"].shape, int(made["attention_mask"].sum())) == ((128,), 5)


def test_a_text_is_translated_only_if_it_is_foreign(graphs: Any) -> None:
    request = {"text": np.arange(128), "mask": np.ones(128, np.int64)}
    for logits, count in (([0.0, 1.0], 1), ([1.0, 0.5], 0)):
        assert len(graphs.foreign(request, {"language": [{"logits": np.array(logits)}]})) == count
