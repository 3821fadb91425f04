import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.deployments.serve.user_config import MemberEntry, ProgramEntry
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.placement.program import SizedLatency
from tenuto.profiles.latency import LatencyTable
from tenuto.profiles.networks.catalogue import SizeRange
from tenuto.profiles.networks.inputs import blank_inputs
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.network import LoneModel
from tests.deployments.programs import load, run
from tests.instruments.small_networks import SMALL

OWN = "tests.instruments.own_models"


@pytest.fixture
def executor() -> Iterator[TorchExecutor]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = TorchExecutor("cpu", cores=1)
    yield made
    made.close()
    torch.set_num_threads(before)


def load_small(executor: Executor, name: str, **more: Any) -> None:
    load(executor, name, options={**SMALL[name], **more}, batch_sizes=range(1, 5))


def images(rows: int) -> dict[str, Any]:
    return {"image": np.random.default_rng(0).standard_normal((rows, 3, 32, 32), dtype=np.float32)}


def test_results_equal_a_plain_forward_pass_for_every_batch_size(executor: TorchExecutor) -> None:
    load_small(executor, "mobilenet_v2")
    plain = build("mobilenet_v2", options=SMALL["mobilenet_v2"])
    inputs = images(4)
    with torch.no_grad():
        expected = torch.cat([plain.module(torch.from_numpy(row[None])) for row in inputs["image"]]).numpy()
    for size in range(1, 5):
        outputs, execution_ms = run(executor, "mobilenet_v2", {"image": inputs["image"][:size]}, size)
        assert outputs["logits"].shape == (size, 1000)
        assert outputs["logits"].dtype == np.float32
        np.testing.assert_allclose(outputs["logits"], expected[:size], rtol=1e-4, atol=2e-4 * np.abs(expected).max())
        assert execution_ms > 0


def test_a_request_gets_the_same_answer_whoever_shares_its_batch(executor: TorchExecutor) -> None:
    load_small(executor, "bert")
    generator = np.random.default_rng(1)
    mine = generator.integers(0, 1000, (1, 8))
    mask = np.ones((1, 8), np.int64)
    alone, _ = run(executor, "bert", {"input_ids": mine, "attention_mask": mask}, 1)
    for _ in range(3):
        others = generator.integers(0, 1000, (3, 8))
        other_masks = (generator.random((3, 8)) < 0.7).astype(np.int64)
        inputs = {"input_ids": np.concatenate([others, mine]), "attention_mask": np.concatenate([other_masks, mask])}
        together, _ = run(executor, "bert", inputs, 4)
        np.testing.assert_allclose(together["logits"][3:], alone["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("part", "is_told"), [(None, False), (1.0, False), (1.004, False), (0.5, True), (2.0, True)])
def test_weights_of_another_size_than_were_profiled_are_noted(
    executor: TorchExecutor, caplog: pytest.LogCaptureFixture, part: float | None, is_told: bool
) -> None:
    load_small(executor, "mobilenet_v2")
    built_mib = executor.program("mobilenet_v2").network.weights_mib
    serve = logging.getLogger("ray.serve")
    serve.addHandler(caplog.handler)  # it hands nothing on where Ray has set it up
    try:
        caplog.clear()
        profiled = None if part is None else part * built_mib
        load(executor, "mobilenet_v2", options=SMALL["mobilenet_v2"], weights_mib=profiled)
    finally:
        serve.removeHandler(caplog.handler)
    assert any("another network was measured" in record.getMessage() for record in caplog.records) == is_told
    assert run(executor, "mobilenet_v2", images(1), 1)[1] > 0.0


@pytest.mark.parametrize(("profiled_mib", "is_told"), [(0.0, False), (0.004, False), (0.1, True), (2e4, True)])
def test_sizes_that_a_profile_rounds_away_are_no_others_and_those_that_are_shown_differ(
    executor: TorchExecutor, caplog: pytest.LogCaptureFixture, profiled_mib: float, is_told: bool
) -> None:
    serve = logging.getLogger("ray.serve")
    serve.addHandler(caplog.handler)
    try:
        load(executor, "m", f"{OWN}:scale", weights_mib=profiled_mib)  # of some bytes
    finally:
        serve.removeHandler(caplog.handler)
    told = [record.getMessage() for record in caplog.records if "another network was measured" in record.getMessage()]
    assert bool(told) == is_told
    for text in told:
        built, profiled = re.findall(r"([\d.,e-]+) MiB", text)
        assert built != profiled


def test_read_only_buffers_are_taken_without_a_warning(executor: TorchExecutor) -> None:
    load_small(executor, "mobilenet_v2")
    source = images(2)["image"]
    frozen = np.frombuffer(source.tobytes(), np.float32).reshape(source.shape)
    assert not frozen.flags.writeable
    from_frozen, _ = run(executor, "mobilenet_v2", {"image": frozen}, 2)
    from_own, _ = run(executor, "mobilenet_v2", {"image": source}, 2)
    np.testing.assert_array_equal(from_frozen["logits"], from_own["logits"])


def test_several_models_are_resident_and_one_can_leave(executor: TorchExecutor) -> None:
    load_small(executor, "mobilenet_v2")
    load_small(executor, "bert")
    executor.unload("mobilenet_v2")
    executor.unload("never loaded")
    with pytest.raises(KeyError):
        run(executor, "mobilenet_v2", images(1), 1)
    assert executor.signature("bert").inputs[0].below == 1000
    assert executor.memory_mib() is None
    assert executor.device == "cpu"


def test_loading_again_replaces_the_model(executor: TorchExecutor) -> None:
    for factor in (2.0, 3.0):
        options = {"factor": factor}
        load(executor, "m", f"{OWN}:scale", options)
        outputs, _ = run(executor, "m", {"x": np.ones((1, 4), np.float32)}, 1)
        assert outputs["y"].tolist() == [[factor] * 4]
        assert outputs["total"].shape == (1,)


def test_identifiers_outside_the_vocabulary_are_refused_before_they_run(executor: TorchExecutor) -> None:
    load_small(executor, "gpt2")
    for wrong in (1000, -1):
        inputs = {"input_ids": np.full((1, 8), wrong), "attention_mask": np.ones((1, 8), np.int64)}
        with pytest.raises(InvalidInputError, match=r"input_ids: -?1.*\[0, 1000\)"):
            run(executor, "gpt2", inputs, 1)


def test_padding_happens_only_when_asked_for_and_changes_no_result(executor: TorchExecutor) -> None:
    sizes: list[int] = []
    plain = images(3)
    load(executor, "mobilenet_v2", options=SMALL["mobilenet_v2"], batch_sizes=[1, 4])
    expected, _ = run(executor, "mobilenet_v2", plain, 3)
    options = {**SMALL["mobilenet_v2"], "pad_batches": True}
    load(executor, "mobilenet_v2", options=options, batch_sizes=[1, 4])
    network = executor.program("mobilenet_v2").network
    assert isinstance(network, LoneModel)
    network.module.register_forward_pre_hook(lambda _m, args: sizes.append(len(args[0])))
    padded, _ = run(executor, "mobilenet_v2", plain, 3)
    assert sizes == [4]
    assert padded["logits"].shape == (3, 1000)
    np.testing.assert_allclose(padded["logits"], expected["logits"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("options", "tolerance"), [({"dtype": "bf16"}, 0.5), ({"channels_last": True}, 1e-3)])
def test_numeric_options_stay_within_their_tolerance(
    executor: TorchExecutor, options: dict[str, Any], tolerance: float
) -> None:
    load_small(executor, "mobilenet_v2")
    exact, _ = run(executor, "mobilenet_v2", images(2), 2)
    load_small(executor, "mobilenet_v2", **options)
    near, _ = run(executor, "mobilenet_v2", images(2), 2)
    assert near["logits"].dtype == np.float32
    np.testing.assert_allclose(near["logits"], exact["logits"], rtol=0, atol=tolerance * np.abs(exact["logits"]).max())


def test_a_share_of_the_cpu_is_a_number_of_threads() -> None:
    before = torch.get_num_threads()
    half = TorchExecutor("cpu", share_pct=50, cores=2)
    load(half, "m", f"{OWN}:scale")
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("resnet51", {}, "not in the catalogue"),
        ("mobilenet_v2", {"dtype": "fp8"}, "dtype"),
        ("mobilenet_v2", {**SMALL["mobilenet_v2"], "bogus": 1}, "unknown key"),
        (f"{OWN}:wrong_signature", {}, "returned 2 tensors"),
    ],
)
def test_faults_of_a_plan_are_found_while_loading(
    executor: TorchExecutor, source: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load(executor, "m", source, options)
    with pytest.raises(KeyError):
        executor.signature("m")


def test_cuda_without_a_device_says_what_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(EnvironmentFaultError, match="CUDA build of torch"):
        TorchExecutor("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_results_equal_the_cpu() -> None:
    inputs = images(4)
    results = []
    for device in ("cpu", "cuda"):
        executor = TorchExecutor(device)
        load_small(executor, "mobilenet_v2", dtype="fp32", tf32=False)
        outputs, _ = run(executor, "mobilenet_v2", inputs, 4)
        results.append(outputs["logits"])
        if device == "cuda":
            assert executor.device.startswith("cuda:0 NVIDIA")
            assert (executor.memory_mib() or 0) > 0
        executor.close()
    np.testing.assert_allclose(results[0], results[1], rtol=1e-3, atol=2e-2 * np.abs(results[0]).max())


def test_warm_up_inputs_fit_the_signature() -> None:
    signature = build("bert", options=SMALL["bert"]).signature
    blank = blank_inputs(signature, 3)
    assert {name: array.shape for name, array in blank.items()} == {"input_ids": (3, 8), "attention_mask": (3, 8)}
    assert blank["attention_mask"].all()


def test_a_file_takes_the_largest_sizes_that_the_plan_has_measured(executor: TorchExecutor, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (make.make_tensor_value_info(name, kind, ["batch", "tokens"]) for name in "xy")
    graph = make.make_graph([make.make_node("Identity", ["x"], ["y"])], "net", [x], [y])
    opset = make.make_opsetid("", 17)
    onnx.save(make.make_model(graph, opset_imports=[opset], ir_version=9), tmp_path / "net.onnx")
    member = MemberEntry(name="m", source=str(tmp_path / "net.onnx"))
    table = LatencyTable(points={1: 1.0})
    by_size = tuple(SizedLatency(sizes={"tokens": tokens}, latency=table) for tokens in (64, 16))
    entry = ProgramEntry(name="m", batch_size=1, members=(member,), by_size=by_size)
    executor.load(entry, [1])
    assert executor.signature("m").sizes == {"tokens": SizeRange(64)}
    own = MemberEntry(name="m", source=str(tmp_path / "net.onnx"), options={"sizes": {"tokens": 20}})
    executor.load(ProgramEntry(name="m", batch_size=1, members=(own,), by_size=by_size), [1])
    assert executor.signature("m").sizes == {"tokens": SizeRange(20)}
    with pytest.raises(InvalidInputError, match="when the workload says which sizes come"):
        executor.load(ProgramEntry(name="m", batch_size=1, members=(member,)), [1])
