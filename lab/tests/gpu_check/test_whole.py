"""`scripts/gpu_check --dry-run` from its first to its last step: a control program that is a script, probes that are
processes, `tenuto profile` on a GPU of virtual time."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from lab.tests.virtual_check import SIZES, gpu, virtual_steps
from tenuto.errors import EnvironmentFaultError
from tenuto.mps import daemon as daemon_module
from tenuto.mps.processes import Processes
from tenuto.profiles import Profile
from tenuto_lab.gpu_check import run, sharing
from tenuto_lab.gpu_check.results import Results
from tenuto_lab.gpu_check.sharing import SHARES, ProbeProcess
from tenuto_lab.gpu_check.steps import Step
from tests.instruments.live import until
from tests.mps.control_program import install
from tests.mps.fake_probe import MEMORY_MIB

Walk = Callable[..., int]


@pytest.fixture
def walk(worker_server: Callable[[str], list[str]], tmp_path: Path) -> Iterator[Walk]:
    """Walk steps on the virtual machine; results are in `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="m"))  # short enough for sockets

    def call(steps: str, **departures: str) -> int:
        with virtual_steps(worker_server, folder, **departures) as run_step:
            return run.main(["-o", str(tmp_path), "--steps", steps], run=run_step, sizes=SIZES)

    yield call
    shutil.rmtree(folder)


def test_every_step_leaves_its_results(walk: Walk, tmp_path: Path) -> None:
    # One of each kind: the others are the same programs with other options, which the dry run walks.
    code = walk("speed-fast,first-client,sharing,streaming,connections-4,C,D,F")
    results = Results(tmp_path)
    page = results.path("report.md").read_text()
    assert code == 0, page
    done = results.read("steps.json")
    assert {name for name, step in done.items() if "left_out" in step} == {"whole-gpu", "green-contexts"}

    found = results.read("sharing.json")
    assert len(found) == len(SHARES) + 8
    assert found["share 25 %"] == {
        "sm_count": 33,
        "share_of_sms": 33.0,
        "at_or_below": True,
        "listed_as_client": True,
        "status": "ACTIVE",
        "free_mib": MEMORY_MIB - 500,
    }
    assert found["memory cap by device 0"]["ended_with"] == "OutOfMemoryError"
    assert found["memory cap by device 0"]["context_mib"] == 512
    assert found["memory cap by UUID"]["is_applied"] is False
    assert found["context"] == {"context_mib": 500, "reserved_mib": 100}
    assert found["two commands in one run"]["taken"] is True
    for name in ("kill of an idle client", "kill of a busy client", "terminate_client, then kill"):
        assert (found[name]["neighbour"], found[name]["status"]) == ("goes on", "ACTIVE")
        assert "sees 66 SMs" in found[name]["new_client"]
    fault = found["fault and recovery"]
    assert fault["status_after_fault"] == "FAULT"
    assert "launch failure" in fault["culprit"]
    assert "launch failure" in fault["neighbour"]
    assert fault["status"] == "ACTIVE"

    profile = Profile.load(tmp_path / "profile-h200.yaml")
    assert len(profile.co_runs) == 6
    (one, _) = profile.models.values()
    assert one.run is not None
    assert one.run["dtype"] == "bf16"
    assert one.run["cuda_graphs"]
    assert "Nsight Compute" in one.doubts[0]
    assert results.read("occupancy.json")["measured"]["achieved_occupancy_pct"] == 24.0
    assert "No figure on this page was measured" in page
    for title in ("Precision and graphs", "CUDA MPS", "Streamed against plain", "Profile `profile-h200", "Occupancy"):
        assert f"## {title}" in page
    assert "| 4 connections | auto |" in page


def test_a_daemon_whose_server_takes_nobody_leaves_a_profile_all_the_same(walk: Walk, tmp_path: Path) -> None:
    assert walk("C", FAKE_GPU_DETACHED="1") == 0
    results = Results(tmp_path)
    assert "should be its client runs without it" in results.read("mps.json")["reason"]
    assert "grid" in {name for name, step in results.read("steps.json").items() if "left_out" in step}
    assert len(Profile.load(tmp_path / "profile-h200.yaml").models) == 2
    points = results.read("green-contexts.json")["points"]
    assert [point["sms"] for point in points] == [24, 48, 72, 104, 132]
    assert points[0]["kernels_ms"] > points[-1]["kernels_ms"]


def test_a_probe_that_is_no_program_of_ours_is_an_end() -> None:
    probe = ProbeProcess("look", {}, module="tests.mps.no_such_module")
    assert probe.next_event(30.0) is None
    assert probe.end() == 1


def test_a_server_that_stays_in_fault_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(prefix="m"))
    install(folder)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("TENUTO_MPS_ROOT", str(folder))
    monkeypatch.setattr(daemon_module, "detach_reaper", lambda uuid: None)
    pipes = folder / gpu().uuid[4:] / "pipe"

    def broken(mode: str, environment: Mapping[str, str]) -> ProbeProcess:
        (pipes / "fault").write_text("1", encoding="utf-8")  # process 1 never leaves
        (pipes / "clients" / "999999999").touch()
        raise EnvironmentFaultError("no probe")

    results = Results(tmp_path)
    results.write("inventory.json", gpu().to_data())
    results.write_text("sharing.json", "not json")
    assert sharing.main(["-o", str(tmp_path), "--part", "faults"], start=broken) == 1
    assert not (pipes / "fault").exists()
    assert results.read("sharing.json")["fault and recovery"] == {"failed": "no probe"}
    assert results.read("mps.json") == {}  # it can be used again
    pid = (pipes / "nvidia-cuda-mps-control.pid").read_text(encoding="utf-8")
    os.kill(int(pid), signal.SIGTERM)
    shutil.rmtree(folder)


def test_a_step_past_its_limit_is_asked_to_stop_and_leaves_nobody(tmp_path: Path) -> None:
    """The step has started long before its limit on any machine."""
    file = tmp_path / "child"
    script = f"""
import pathlib, subprocess, time
pathlib.Path({str(file)!r}).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
try:
    time.sleep(600)
except KeyboardInterrupt:
    pathlib.Path({str(file)!r} + ".asked").touch()
"""
    environment = dict(os.environ)
    assert run.run_step(Step("s", "A", ("-c", script), 600.0), environment, 28.0, grace_s=25.0) == run.STOPPED
    assert (tmp_path / "child.asked").exists()
    child = int(file.read_text(encoding="utf-8"))
    until(lambda: Processes().started_at(child) is None)
    assert run.run_step(Step("s", "A", ("-c", "raise SystemExit(3)"), 600.0), environment, 60.0) == 3
