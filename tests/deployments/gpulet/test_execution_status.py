import pytest

from tenuto.deployments.gpulet.execution_status import describe_mode
from tenuto.deployments.gpulet.executors.emulated import EmulatedExecutor
from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.deployments.wire.messages import GpuletMode
from tests.deployments.programs import load
from tests.instruments.fake_cuda import FakeCuda, late_model


def test_every_model_is_said_to_run_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    cuda.capability = (9, 0)
    executor = TorchExecutor("cuda")
    for name, syncs, options in (("a", False, {}), ("b", True, {}), ("c", False, {"cuda_graphs": False})):
        made = late_model(cuda, syncs=syncs)
        monkeypatch.setattr("tenuto.profiles.networks.models.build", lambda *_args, made=made, **_options: made)
        load(executor, name, options={"dtype": "fp32", **options}, batch_sizes=[1])
    # "b" cannot be captured; nobody asked for it, so that it is no error.
    assert executor.ways() == {"a": "cuda_graphs", "b": "plain", "c": "plain"}
    mode = GpuletMode(True, True, executor.ways())
    assert describe_mode(mode.to_data()) == "share, streaming, cuda_graphs"


def test_what_is_emulated_claims_no_program() -> None:
    executor = EmulatedExecutor("v100")
    load(executor, "m", latency={"alpha_ms": 1.0, "beta_ms": 1.0}, batch_sizes=[1])
    assert executor.ways() == {"m": "emulated"}
    assert describe_mode(GpuletMode(False, False, executor.ways()).to_data()) == "plain"
