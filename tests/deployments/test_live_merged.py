"""Merged models on a real local Ray: a plan asks for them, and HTTP clients see two models as before."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.placement import Plan
from tests.instruments.live import PATIENCE_S, bring_up, until

from . import residual_networks
from .residual_networks import CLASSES, SIDE

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

PORT = unused_port()


def make_plan(*, merged: bool, tuned: str = "tuned") -> Plan:
    sources = {"base": "base", "tuned": tuned}
    replica = {"batch_size": 4, "latency": {"alpha_ms": 4.0, "beta_ms": 20.0}}
    return Plan.from_data(
        {
            "policy": {"name": "hand"},
            "gpus": [{"id": "n0/0", "type": "cpu"}],
            "gpulets": [
                {
                    "id": "n0/0/a",
                    "gpu": "n0/0",
                    "models": [{"name": name, **replica} for name in sources],
                    "merge": [["base", "tuned"]] if merged else [],
                }
            ],
            "models": [
                {
                    "name": name,
                    "source": f"tests.deployments.residual_networks:{factory}",
                    "rate_rps": 20,
                    "slo_ms": 60_000,  # the first batches take seconds where other programs run
                }
                for name, factory in sources.items()
            ],
        }
    )


@pytest.fixture(scope="module")
def url(launcher: Launcher) -> str:
    bring_up(launcher, Deployment(plan=make_plan(merged=True), port=PORT).config())
    return launcher.base_url


def ask(url: str, model: str, images: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    tensor = {"name": "image", "shape": list(images.shape), "datatype": "FP32", "data": images.ravel().tolist()}
    request = urllib.request.Request(f"{url}/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer = json.load(response)
    return np.array(answer["outputs"][0]["data"]).reshape(-1, CLASSES), answer["parameters"]


def expected(model: str, images: np.ndarray) -> np.ndarray:
    import torch

    with torch.inference_mode():
        module = getattr(residual_networks, model)().module
        return np.asarray(module(torch.from_numpy(images)).numpy())


def check_answers(url: str) -> list[int]:
    """Ask both models at once, several times, and return the batch sizes."""
    generator = np.random.default_rng(0)
    asked = [
        (model, generator.standard_normal((rows, 3, SIDE, SIDE), dtype=np.float32))
        for rows in (1, 2, 5)  # in all six full batches, of which none waits for more
        for model in ("base", "tuned")
        for _ in range(3)
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: ask(url, *each), asked))
    for (model, images), (logits, _) in zip(asked, answers, strict=True):
        right = expected(model, images)
        assert np.abs(logits - right).max() <= 1e-5 * np.abs(right).max()
    return [parameters["batch_size"] for _, parameters in answers]


def how_it_runs(url: str) -> str:
    (gpulet,) = get_json(f"{url}/status")["gpulets"]
    return str(gpulet["mode"]["programs"]["base+tuned"])


def test_merged_models_answer_as_the_models_by_themselves(url: str) -> None:
    assert max(check_answers(url)) > 4  # rows of both, beyond what either was planned for, whether merged by now or not
    until(lambda: how_it_runs(url) == "merged")
    assert max(check_answers(url)) > 4
    status = get_json(f"{url}/status")
    (gpulet,) = status["gpulets"]
    assert gpulet["models"] == {"base+tuned": 8}
    facts = gpulet["merged"]["base+tuned"]
    assert facts["memory_after_mib"] < facts["memory_before_mib"]
    assert facts["worst_error"] <= 1e-5
    assert list(status["models"]) == ["base", "tuned"]
    assert all(status["models"][name]["inferences"] == 48 for name in ("base", "tuned"))
    metadata = get_json(f"{url}/v2/models/tuned")
    assert metadata["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, CLASSES]}]
    assert get_json(f"{url}/v2/models/base/ready")["ready"] is True


def test_the_same_plan_is_simulated_with_one_queue() -> None:
    scheduler = make_scheduler("deferred", from_plan(make_plan(merged=True)), {})
    times = np.arange(200, dtype=np.float64) * 25.0
    result = simulate(scheduler, times, np.tile(np.array([0, 1], dtype=np.int32), 100), warmup_s=0.0)
    assert {name: row["ok"] for name, row in result.summary()["models"].items()} == {"base": 100, "tuned": 100}


def test_merging_is_undone_and_done_again_in_place(launcher: Launcher, url: str) -> None:
    (before,) = get_json(f"{url}/status")["gpulets"]
    bring_up(launcher, Deployment(plan=make_plan(merged=False), port=PORT).config())
    check_answers(url)
    (apart,) = get_json(f"{url}/status")["gpulets"]
    assert apart["models"] == {"base": 4, "tuned": 4}
    assert apart["merged"] == {}
    bring_up(launcher, Deployment(plan=make_plan(merged=True), port=PORT).config())
    check_answers(url)
    (again,) = get_json(f"{url}/status")["gpulets"]
    assert again["models"] == {"base+tuned": 8}
    assert before["pid"] == apart["pid"] == again["pid"]


def test_models_that_do_not_merge_are_served_by_themselves_and_the_status_says_so(launcher: Launcher, url: str) -> None:
    bring_up(launcher, Deployment(plan=make_plan(merged=True, tuned="stranger"), port=PORT).config())
    images = np.random.default_rng(1).standard_normal((2, 3, SIDE, SIDE), dtype=np.float32)
    assert np.allclose(ask(url, "tuned", images)[0], expected("stranger", images), atol=1e-5)
    assert how_it_runs(url) == "single graphs"
    assert get_json(f"{url}/status")["gpulets"][0]["merged"] == {}
