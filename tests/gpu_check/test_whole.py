"""`scripts/gpu_check` from its first to its last step: a control program that is a script, probes that are processes,
and a recorder in place of `tenuto profile`, whose own tests run it on a virtual GPU."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from tenuto.cli import profile
from tenuto.errors import EnvironmentFaultError
from tenuto.gpu_check import check as gpu_check
from tenuto.gpu_check.sharing import SHARES, ProbeProcess
from tenuto.gpu_check.streaming import VARIANTS
from tenuto.mps import daemon as daemon_module
from tenuto.mps import inventory
from tenuto.mps.inventory import GpuDevice
from tenuto.mps.processes import Processes
from tests.instruments.live import until
from tests.mps.control_program import install
from tests.mps.fake_probe import MEMORY_MIB, SMS

UUID = "GPU-11111111-2222-3333-4444-555555555555"
GPU = GpuDevice(UUID, "NVIDIA H200", "h200", MEMORY_MIB, MEMORY_MIB, (9, 0), SMS, "580.95.05", False, "default")
PROBE = partial(ProbeProcess, module="tests.mps.fake_probe")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A node with one GPU and the control program on PATH."""
    folder = Path(tempfile.mkdtemp(prefix="m"))  # short enough for sockets
    install(folder)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("TENUTO_MPS_ROOT", str(folder))
    monkeypatch.setattr(inventory, "read_inventory", lambda: (GPU,))
    monkeypatch.setattr(daemon_module, "_start_reaper", lambda uuid: None)
    yield folder
    for path in folder.glob("*/pipe/nvidia-cuda-mps-control.pid"):
        subprocess.run(["kill", path.read_text(encoding="utf-8")], check=False, capture_output=True)
    shutil.rmtree(folder)


def recorder(commands: list[Sequence[str]]) -> gpu_check.Run:
    """Write down every command, after `tenuto profile` has read its arguments."""

    def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
        commands.append(command)
        assert environment["CUDA_VISIBLE_DEVICES"] == UUID
        assert "CUDA_MPS_PIPE_DIRECTORY" in environment
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in environment
        if "profile" in command:
            arguments = list(command[command.index("profile") + 1 :])
            context = profile.command.make_context("profile", arguments)  # refuses unknown options and values
            assert context.params["device"] == "cuda"
        else:
            found = {"model": "resnet50", **{name: {"ratio": 1.2} for name in VARIANTS}}
            Path(command[-1]).write_text(json.dumps(found), encoding="utf-8")
        return 0

    return run


def test_every_step_runs_once_and_leaves_its_results(root: Path, tmp_path: Path) -> None:
    commands: list[Sequence[str]] = []
    assert gpu_check.main(["-o", str(tmp_path)], run=recorder(commands), start_probe=PROBE) == 0

    results = json.loads((tmp_path / "sharing.json").read_text(encoding="utf-8"))
    assert len(results) == len(SHARES) + 5
    assert not [result for result in results.values() if "failed" in result]
    assert results["share 25 %"] == {
        "sm_count": 33, "share_of_sms": 33.0, "at_or_below": True, "listed_as_client": True, "status": "ACTIVE",
        "free_mib": MEMORY_MIB - 500,
    }  # fmt: skip
    assert results["memory cap"]["ended_with"] == "OutOfMemoryError"
    assert results["memory cap"]["allocated_mib"] == 1536
    for name in ("kill of an idle client", "kill of a busy client", "terminate_client, then kill"):
        assert (results[name]["neighbour"], results[name]["status"]) == ("goes on", "ACTIVE")
        assert "sees 66 SMs" in results[name]["new_client"]
    fault = results["fault and recovery"]
    assert fault["status_after_fault"] == "FAULT"
    assert "launch failure" in fault["culprit"]
    assert "launch failure" in fault["neighbour"]
    assert fault["status"] == "ACTIVE"
    assert "## Fault and recovery" in (tmp_path / "sharing.md").read_text(encoding="utf-8")
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    steps = list(gpu_check._steps(False))
    assert len(commands) == len(steps) - 1
    assert all(f" {step}: exit code 0" in log for step in steps if step != "sharing")


def test_a_second_run_repeats_only_what_failed(root: Path, tmp_path: Path) -> None:
    names = [f"share {share} %" for share in SHARES]
    kept: dict[str, dict[str, object]] = {
        name: {"sm_count": 1, "share_of_sms": 1, "at_or_below": True, "listed_as_client": True} for name in names
    }
    later = ("memory cap", "kill of an idle client", "kill of a busy client", "terminate_client, then kill")
    kept |= {name: {"status": "ACTIVE"} for name in later}
    failed = {"fault and recovery": {"failed": "a probe did not start"}}
    (tmp_path / "sharing.json").write_text(json.dumps(kept | failed), encoding="utf-8")

    assert gpu_check.main(["-o", str(tmp_path), "--steps", "sharing"], start_probe=PROBE) == 0
    results = json.loads((tmp_path / "sharing.json").read_text(encoding="utf-8"))
    assert {name: results[name] for name in kept} == kept
    assert results["fault and recovery"]["status"] == "ACTIVE"
    assert len((root / UUID[4:] / "pipe" / "commands").read_text(encoding="utf-8").splitlines()) < 60


def test_a_server_that_stays_in_fault_is_renewed_before_the_next_step(root: Path, tmp_path: Path) -> None:
    pipes = root / UUID[4:] / "pipe"
    commands: list[Sequence[str]] = []
    record = recorder(commands)

    def broken(mode: str, environment: Mapping[str, str]) -> ProbeProcess:
        (pipes / "fault").write_text("1", encoding="utf-8")  # process 1 never leaves
        (pipes / "clients" / "999999999").touch()
        raise EnvironmentFaultError("no probe")

    (tmp_path / "sharing.json").write_text("not json", encoding="utf-8")
    given = ["-o", str(tmp_path), "--quick", "--steps", "sharing,model-resnet50"]
    assert gpu_check.main(given, run=record, start_probe=broken) == 0
    assert len(commands) == 1
    assert not (pipes / "fault").exists()
    assert "no probe" in (tmp_path / "sharing.md").read_text(encoding="utf-8")


def test_a_step_past_its_limit_is_asked_to_stop_and_leaves_nobody(tmp_path: Path) -> None:
    """The step is a shell, which has started long before its limit on any machine."""
    script = "trap 'touch \"$0.asked\"; exit 1' INT; sleep 600 & echo $! > \"$0\"; wait"
    file = tmp_path / "child"
    assert gpu_check._run(["sh", "-c", script, str(file)], os.environ, 3.0) == 124
    assert (tmp_path / "child.asked").exists()
    child = int(file.read_text(encoding="utf-8"))
    until(lambda: Processes().started_at(child) is None)
    assert gpu_check._run([sys.executable, "-c", "raise SystemExit(3)"], os.environ) == 3
