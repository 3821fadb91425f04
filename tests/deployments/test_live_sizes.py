"""A network whose inputs vary in size, from a foreign file to goodput: workload, profile, plan, serve, bench."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.build import size_classes_of
from tenuto.cli import main
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.executor_choice import ExecutorChoice
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.run_files import describe
from tenuto.loadgen.senders.payloads import SizedBodies
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Plan
from tests.instruments.live import LONG_MS, bring_up, post

onnx = pytest.importorskip("onnx", reason="onnx is not installed, so no file can be made")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed, so no file can be run")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

MOST = 48
SIZES = (8, 16, MOST)
WORKLOAD: dict[str, Any] = {
    "models": [
        {
            "name": "sums",
            "rate_rps": 60,
            "slo_ms": LONG_MS,
            "source": "net.onnx",
            "sizes": {"tokens": {"lognormal": {"median": 10, "sigma": 0.8, "most": MOST}}},
            "options": {"sizes": {"tokens": {"most": MOST}}, "pad": {"x": 0.0}},
        }
    ]
}


def verb(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert ended.value.code == 0


def write_network(path: str) -> None:
    """Each row's sums up to each of its places; no place depends on what is padded behind it."""
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (make.make_tensor_value_info(name, kind, ["batch", "tokens"]) for name in "xy")
    axis = onnx.numpy_helper.from_array(np.int64(1), "axis")
    graph = make.make_graph([make.make_node("CumSum", ["x", "axis"], ["y"])], "net", [x], [y], initializer=[axis])
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=9), path)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, worker_server: Callable[[str], list[str]]) -> Plan:
    """What the verbs make of the file and the workload."""
    folder = tmp_path_factory.mktemp("sizes")
    with pytest.MonkeyPatch.context() as patch:
        profiler = "tenuto.profiles.measuring"
        patch.setattr(f"{profiler}.measure.WORKER", worker_server(f"{profiler}.profile_worker"))
        patch.chdir(folder)
        write_network("net.onnx")
        WORKLOAD["models"][0]["source"] = str(folder / "net.onnx")
        Path("workload.yaml").write_text(json.dumps(WORKLOAD), encoding="utf-8")
        sizes = f"tokens={','.join(map(str, SIZES))}"
        measured = ("--batch-sizes", "1,4", "--sizes", sizes, "--budget-s", "0.2", "--device", "cpu")
        verb("profile", "net.onnx", "--name", "sums", "--option", "pad={x: 0}", *measured, "-o", "cpu.yaml")
        quick = ("--option", "requests=500")
        verb("plan", "workload.yaml", "--gpus", "cpu:1", "--profiles", "cpu.yaml", *quick, "-o", "plan.yaml")
        return Plan.load("plan.yaml")


@pytest.mark.parametrize("executor", ["torch", pytest.param("emulated", marks=pytest.mark.night)])
def test_from_a_file_to_goodput(launcher: Launcher, plan: Plan, executor: ExecutorChoice) -> None:
    deployment = Deployment(plan=plan, port=unused_port(), executor=executor, scheduler="deferred")
    bring_up(launcher, deployment.config())
    url = launcher.base_url
    options = BenchOptions(url, duration_s=2.0, seed=4, warmup_s=0.0, clients=0)
    result = run_bench(plan.models, options)
    assert result.errors == []
    document = describe(result, options, plan, command=[])
    assert document["emulated"] is (executor == "emulated")

    simulated, records = (
        Simulation.of_plan(plan, duration_s=2.0, warmup_s=0.0, seed=4).run().describe(plan, options={}, command=[])
    )
    assert np.array_equal(result.records.sizes, records.sizes)
    assert len(set(records.sizes[:, 0])) > 10
    rows, virtual = (each["models"]["sums"]["by_size"] for each in (document, simulated))
    classes = size_classes_of(plan)["sums"]  # which of the measured sizes are: those that are not close in cost
    assert [(row["sizes"]["tokens"],) for row in rows] == [*classes]
    assert classes[-1] == (MOST,)
    assert [row["offered"] for row in rows] == [row["offered"] for row in virtual]
    assert document["models"]["sums"]["ok"] == document["requests"] == len(records) == simulated["models"]["sums"]["ok"]
    if executor == "torch":
        check_answers(url, [int(tokens) for tokens in records.sizes[:, 0]])


def check_answers(url: str, tokens: list[int]) -> None:
    """Ask for requests of these sizes at once, and compare each answer with a direct sum."""
    metadata = get_json(f"{url}/v2/models/sums")
    assert metadata["sizes"] == {"tokens": {"least": 1, "most": MOST, "multiple": 1}}
    bodies = SizedBodies(metadata, {"tokens": MOST}, np.random.default_rng(0), binary=False)
    asked = [bodies.body(number, size).data for number, size in enumerate(tokens)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: post(f"{url}/v2/models/sums/infer", body), asked))
    for body, size, (status, answer) in zip(asked, tokens, answers, strict=True):
        assert status == 200, answer
        (y,) = answer["outputs"]
        assert y["shape"] == [1, size]
        given = np.array(json.loads(body)["inputs"][0]["data"], np.float32)
        np.testing.assert_allclose(y["data"], np.cumsum(given), rtol=1e-4, atol=1e-5)
