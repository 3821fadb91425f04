from pathlib import Path
from typing import Any

import pytest

from tenuto.deployments.gpulet.executors import choose, torch_executor
from tenuto.deployments.gpulet.executors.choose import has_nvidia_devices, make_executor
from tenuto.deployments.gpulet.executors.emulated import EmulatedExecutor
from tenuto.deployments.serve.user_config import GpuletSpec
from tenuto.errors import EnvironmentFaultError


def spec(kind: str = "v100", **changes: Any) -> GpuletSpec:
    gpu = {"id": "n0/0", "type": kind, "uuid": changes.pop("uuid", None)}
    return GpuletSpec.model_validate({"gpulet": "n0/0/a", "gpu": gpu, **changes})


def with_driver(monkeypatch: pytest.MonkeyPatch, present: bool) -> None:
    monkeypatch.setattr(choose, "has_nvidia_devices", lambda: present)


def test_the_driver_is_seen_in_the_file_system(tmp_path: Path) -> None:
    assert not has_nvidia_devices(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert has_nvidia_devices(tmp_path)


def test_a_logical_gpu_is_emulated_only_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, False)
    executor = make_executor(spec(share_pct=40))
    assert isinstance(executor, EmulatedExecutor)
    assert executor.device == "emulated v100"


@pytest.mark.parametrize("present", [True, False])
def test_torch_refuses_several_gpus_together_and_the_emulated_one_runs_them(
    monkeypatch: pytest.MonkeyPatch, present: bool
) -> None:
    with_driver(monkeypatch, present)
    assert isinstance(make_executor(spec(also_on=["n0/1"], executor="emulated")), EmulatedExecutor)
    for changes in ({"executor": "torch"}, {"uuid": "GPU-1"}):
        with pytest.raises(EnvironmentFaultError, match="torch executor runs a model on one"):
            make_executor(spec(also_on=["n0/1"], **changes))
    if not present:
        assert isinstance(make_executor(spec(also_on=["n0/1"])), EmulatedExecutor)


@pytest.mark.parametrize("changes", [{"uuid": "GPU-1"}, {"executor": "torch"}])
def test_a_physical_gpu_is_never_emulated(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    with_driver(monkeypatch, False)
    with pytest.raises(EnvironmentFaultError, match="no NVIDIA driver"):
        make_executor(spec(**changes))


def test_a_share_of_a_real_gpu_is_refused_rather_than_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, True)
    with pytest.raises(EnvironmentFaultError, match="mps: off"):
        make_executor(spec(share_pct=40, uuid="GPU-1", mps="off"))
    with pytest.raises(EnvironmentFaultError, match="not bound by UUID"):
        make_executor(spec(share_pct=40, mps="auto"))


@pytest.mark.parametrize("present", [True, False])
def test_required_sharing_is_never_dropped(monkeypatch: pytest.MonkeyPatch, present: bool) -> None:
    with_driver(monkeypatch, present)
    with pytest.raises(EnvironmentFaultError):
        make_executor(spec(mps="required"))


def test_a_share_that_cuda_mps_enforces_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, True)
    made: list[str] = []
    monkeypatch.setattr(torch_executor, "TorchExecutor", lambda device, **_options: made.append(device))
    make_executor(spec(share_pct=40, uuid="GPU-1", mps="auto", cuda_mps=True))
    assert made == ["cuda"]


def test_the_processor_runs_real_models() -> None:
    executor = make_executor(spec("cpu", share_pct=50))
    assert executor.device == "cpu"
    executor.close()
