import pytest
from msgspec.structs import replace

from tenuto.cli import main
from tenuto.cli.status import describe_share, sharing_notes
from tenuto.deployments.gpulet.executors.emulated import EmulatedExecutor
from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.deployments.wire.status import (
    ControllerStatus,
    GpuletMode,
    GpuletStatus,
    ModelStatus,
    MpsStatus,
    OfflineCounts,
    SystemStatus,
)
from tenuto.mps.others import OtherProcess
from tests.deployments.programs import load
from tests.instruments.fake_cuda import FakeCuda, late_model

GIVEN = MpsStatus(uuid="GPU-1", sm_count=32, gpu_sm_count=80, proof="pid", others=[])


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
    assert str(mode) == "share, streaming, cuda_graphs"


def test_what_is_emulated_claims_no_program() -> None:
    executor = EmulatedExecutor("v100")
    load(executor, "m", latency={"alpha_ms": 1.0, "beta_ms": 1.0}, batch_sizes=[1])
    assert executor.ways() == {"m": "emulated"}
    assert str(GpuletMode(False, False, executor.ways())) == "plain"


def test_a_share_is_told_as_planned_and_as_given() -> None:
    assert describe_share(40.0, GIVEN) == "40 % (32/80 SMs)"
    assert describe_share(40.0, None) == "40 %"
    assert describe_share(None, None) == "-"  # down, or a whole GPU


def test_only_what_is_unusual_is_noted() -> None:
    other = OtherProcess(7, "python", 1001)
    unusual = replace(GIVEN, proof="the only client that came during its start", others=[other])
    usual, gone = GpuletStatus(id="n0/0/a", cuda_mps=GIVEN), GpuletStatus(id="n0/0/b")
    first, second = sharing_notes([usual, gone, GpuletStatus(id="n0/0/c", cuda_mps=unusual)])
    assert first == "n0/0/c: its attachment to CUDA MPS was proved by: the only client that came during its start"
    assert second.endswith("process 7 (python, user 1001)")


def test_idle_models_gpus_that_are_missing_and_offline_requests_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"rare": ModelStatus(), "busy": ModelStatus(offline=OfflineCounts(ok=7, failed=2, queued=3, gpu_s=1.5))}
    of_gpus = ControllerStatus(missing_gpus={"t4": 2}, late_gpus=["v100"], unused_nodes={"ray-aa": "it has no Tenuto"})
    lines = {"rare": {"alpha_ms": 1.0, "beta_ms": 5.0}, "busy": {"alpha_ms": 1.0, "beta_ms": 60.0}}
    hosted = [{"name": name, "batch_size": 4, "latency": line} for name, line in lines.items()]
    plan = {
        "policy": {"name": "test"},
        "gpus": [{"id": "g", "type": "v100"}],
        "gpulets": [{"id": "g/a", "gpu": "g", "models": hosted}],
        "models": [{"name": name, "rate_rps": 1.0, "slo_ms": 40.0, "latency": line} for name, line in lines.items()],
    }
    shown = SystemStatus(models=models, plan={**plan, "idle": {"rare": 24.3}}, controller=of_gpus)
    monkeypatch.setattr("tenuto.deployments.serve.endpoint.get_told", lambda _url, _type: shown)
    with pytest.raises(SystemExit, match="0"):
        main(["status", "--address", "http://127.0.0.1:1"])
    told = capsys.readouterr().out
    assert "note: rare is idle: nobody asks it. The next request brings it back, in about 24 s" in told
    assert "note: GPUs asked for and not there yet: t4 2" in told
    assert "note: GPUs that did not come in time, so plans do without more of them: v100" in told
    assert "note: ray-aa joined and is not used: it has no Tenuto" in told
    assert "note: an offline request of busy takes 61 ms, and rare can wait 34 ms on the same gpu-let" in told
    (row,) = (line.split() for line in told[told.index(" offline") :].splitlines()[1:2])
    assert row == ["busy", "7", "0", "0", "0", "2", "3", "1.5"]
