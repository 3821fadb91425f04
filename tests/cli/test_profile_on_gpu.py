"""`tenuto profile --device cuda` from the command line to the file, on the GPU of virtual time."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.profiles import Profile, ProfilePoint
from tenuto.profiles.measuring.profile_writer import ProfileWriter
from tenuto.profiles.networks.model_options import RunOptions
from tests.instruments.virtual_gpu import CONTEXT_MIB, SMS, UUID, VirtualGpu, fake_nvml

OWN = "tests.instruments.own_models:scale"
MEASURING = "tenuto.profiles.measuring"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verb(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    worker_server: Callable[[str], list[str]],
) -> Run:
    """Run the verb in a folder of its own, beside a CUDA MPS daemon of which only the pid file is there."""
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    (pipes / "nvidia-cuda-mps-control.pid").write_text("1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{UUID}")
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(lambda: 0))
    gpu = SimpleNamespace(uuid=f"GPU-{UUID}", sm_count=SMS)
    monkeypatch.setattr("tenuto.mps.gpu_shares.read_inventory", lambda: (gpu,))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setattr(f"{MEASURING}.measure.WORKER", worker_server("tests.instruments.virtual_gpu:worker_main"))

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


@pytest.fixture
def run(verb: Run) -> Run:
    def call(*arguments: str, device: str = "cuda") -> tuple[int, str, str]:
        common = ("--option", "width=4096", "--budget-s", "0.01", "--device", device, "-o", "p.yaml")
        return verb("profile", OWN, *common, *arguments)

    return call


def points() -> dict[tuple[int, float], ProfilePoint]:
    (model,) = Profile.load("p.yaml").models.values()
    return {(point.batch_size, point.share_pct): point for point in model.points}


def doubts() -> str:
    (model,) = Profile.load("p.yaml").models.values()
    return " ".join(model.doubts)


def test_a_grid_of_batches_and_shares_has_everything_a_gpu_can_tell(run: Run) -> None:
    code, out, err = run("--batch-sizes", "1,8,64", "--shares", "50,100")
    assert code == 0, err
    profile, found = Profile.load("p.yaml"), points()
    assert profile.gpu_type == "v100"
    assert profile.measured is not None
    assert profile.measured.hardware == "Tesla V100-SXM2-16GB"
    assert profile.measured.versions["cuda"] == "12.8"
    assert set(found) == {(b, s) for b in (1, 8, 64) for s in (50.0, 100.0)}
    for (batch, share), point in found.items():
        metrics = point.metrics
        assert metrics["sm_count"] == SMS * share / 100
        assert metrics["h2d_ms"] > 0
        assert metrics["kernels_ms"] > 0
        assert metrics["d2h_ms"] > 0
        assert point.latency_ms >= metrics["h2d_ms"] + metrics["kernels_ms"] + metrics["d2h_ms"] - 0.02
        assert metrics["h2d_bytes"] == batch * 4096 * 4
        assert metrics["d2h_bytes"] == batch * 4097 * 4
        assert metrics["kernels"] == 2
        assert 0 < metrics["kernel_ms"] <= metrics["kernels_ms"]
        assert metrics["repeat_pct"] < 3
        assert 0 < metrics["wavg_sm_util_pct"] <= 100
        assert metrics["sm_clock_mhz"] == 1380
        assert metrics["power_w"] in (55, 152.5, 250)  # what the driver says at 20 ms of real time apart
        assert point.memory_mib is not None
    assert found[64, 50.0].metrics["kernels_ms"] > 1.5 * found[64, 100.0].metrics["kernels_ms"]
    assert profile.coefficients["context_mib"] == CONTEXT_MIB
    assert found[64, 100.0].memory_mib == 4  # input, output and sums fill two blocks
    assert not doubts()
    assert "50 %" in out


def test_one_process_measures_the_whole_device_without_a_daemon(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nowhere")
    code, _, err = run("--batch-sizes", "1,2", device="auto")
    assert code == 0, err
    assert points()[2, 100.0].metrics["sm_count"] == SMS
    code, _, err = run("--batch-sizes", "1", "--shares", "50")
    assert code == 3
    assert "Traceback" not in err


def test_a_process_that_did_not_reach_the_daemon_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPU_DETACHED", "1")
    code, _, err = run("--batch-sizes", "1", "--shares", "50")
    assert code == 3
    assert "sees 80 of 80 SMs: the share is not enforced" in err


def test_batches_that_do_not_fit_are_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPU_MEMORY_MIB", "1")
    code, _, err = run("--batch-sizes", "1,8,64,128")
    assert code == 0, err
    assert set(points()) == {(1, 100.0), (8, 100.0)}
    assert "batch 64 and above at 100 %: out of memory (CUDA out of memory. Tried to allocate" in doubts()


def test_without_cupti_the_rest_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPU_NO_CUPTI", "1")
    code, _, err = run("--batch-sizes", "2")
    assert code == 0, err
    assert "no kernel metrics" in doubts()
    assert points()[2, 100.0].metrics["kernels_ms"] > 0


def test_ctrl_c_keeps_the_points_and_resume_measures_the_rest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = ProfileWriter.point

    def interrupted(writer: ProfileWriter, row: str, request: Any, point: ProfilePoint) -> None:
        keep(writer, row, request, point)
        if (point.batch_size, point.share_pct) == (1, 50.0):
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ProfileWriter, "point", interrupted)
        code, _, err = run("--batch-sizes", "1,2", "--shares", "50,100")
    assert code == 130, err
    before = points()
    assert set(before) == {(1, 100.0), (2, 100.0), (1, 50.0)}
    assert "--resume" in doubts()
    code, _, err = run("--batch-sizes", "1,2", "--shares", "50,100", "--resume")
    assert code == 0, err
    after = points()
    assert set(after) == {*before, (2, 50.0)}
    assert all(after[key] == point for key, point in before.items())
    assert "--resume" not in doubts()


def test_the_gpu_refuses_what_cuda_refuses() -> None:
    import torch

    with VirtualGpu().installed() as gpu:
        there = torch.ones(4).to("cuda:0")
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(4)
        with pytest.raises(TypeError, match="device type tensor to numpy"):
            there.numpy()
        assert there.cpu().numpy().sum() == 4
        cuda: Any = torch.cuda
        first, second = (cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        with pytest.raises(ValueError, match="must be recorded"):
            first.elapsed_time(second)
        assert gpu.launches
        there * 2
        second.record()
        with pytest.raises(RuntimeError, match="not ready"):
            first.elapsed_time(second)
        second.synchronize()
        assert first.elapsed_time(second) > 0
        with pytest.raises(ValueError, match="enable_timing"):
            cuda.Event().elapsed_time(second)


def test_a_fast_gpu_is_measured_as_it_will_be_served(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(uuid=f"GPU-{UUID}", sm_count=132)
    monkeypatch.setenv("FAKE_GPU", "h200")
    monkeypatch.setattr("tenuto.mps.gpu_shares.read_inventory", lambda: (gpu,))
    grid = ("--batch-sizes", "1,8,64", "--shares", "50,100")
    code, _, err = run(*grid)
    assert code == 0, err
    (model,) = Profile.load("p.yaml").models.values()
    assert model.run == RunOptions().chosen((9, 0)).to_data()
    off = ("dtype=fp32", "cuda_graphs=false")
    code, _, err = run(*grid, *(word for option in off for word in ("--option", option)))
    assert code == 0, err
    (model,) = Profile.load("p.yaml").models.values()
    assert model.run is not None
    assert (model.run["dtype"], model.run["cuda_graphs"], model.run["tf32"]) == ("fp32", False, True)
