from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.tests.virtual_check import gpu
from tenuto.errors import EnvironmentFaultError
from tenuto.mps.inventory import GpuDevice
from tenuto_lab.gpu_check import inventory, run, same_results, sharing
from tenuto_lab.gpu_check.results import Results
from tenuto_lab.gpu_check.sharing import SHARES, sharing_experiments
from tenuto_lab.gpu_check.steps import Sizes, Step, steps


class FakeDaemon:
    def __init__(self) -> None:
        self.alive: dict[int, Any] = {}
        self.faulted = False
        self.terminated: list[int] = []

    def status(self) -> str | None:
        if self.faulted and self.alive:
            return "FAULT"
        self.faulted = False
        return "ACTIVE"

    takes_two_commands = True

    def look(self) -> tuple[str | None, tuple[int, ...]]:
        return self.status(), self.clients()

    def clients(self) -> tuple[int, ...]:
        return tuple(self.alive)

    def terminate(self, client: int) -> None:
        self.terminated.append(client)


class FakeProbe:
    """A probe on a fake GPU that behaves as the documents say."""

    made = 0

    def __init__(self, daemon: FakeDaemon, mode: str, environment: Mapping[str, str]) -> None:
        FakeProbe.made += 1
        self.pid = FakeProbe.made
        self.daemon, self.mode = daemon, mode
        daemon.alive[self.pid] = self
        share = float(environment.get("share", "100"))
        self.events: list[dict[str, Any]] = [
            {"event": "ready", "sm_count": int(132 * share / 100), "free_mib": 1000, "total_mib": 2048}
        ]
        if mode.startswith("allocate"):
            self.events += [{"event": "allocated", "mib": 64}, {"event": "refused", "kind": "OutOfMemoryError"}]
        if mode == "libraries":
            self.events += [{"event": "loaded", "free_mib": 400, "reserved_mib": 100}]
        if mode == "fault":
            self.events.append({"event": "refused", "text": "device-side assert"})
        self.waited = False

    def next_event(self, timeout_s: float) -> dict[str, Any] | None:
        if self.events:
            if self.mode == "fault" and len(self.events) == 1:
                self.daemon.faulted = True
            return self.events.pop(0)
        if self.mode != "busy" or timeout_s == 0:
            return None
        if self.daemon.faulted:
            return {"event": "refused", "text": "unspecified launch failure"}
        return {"event": "alive"}

    def tell(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def end(self, timeout_s: float = 20.0) -> int | None:
        self.daemon.alive.pop(self.pid, None)
        return 0


def run_experiments(daemon: FakeDaemon, start: Any) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}

    def environment(share: float | None, cap: str | None) -> Mapping[str, str]:
        return {} if share is None else {"share": str(share)}

    for part in ("shares", "faults"):
        sharing_experiments(
            daemon,
            environment,
            132,
            results.__setitem__,
            part=part,
            start=start,
            clock_s=lambda: 0.0,
            sleep=lambda s: None,
        )  # type: ignore[arg-type]
    return results


def test_every_experiment_reports_what_was_seen_and_leaves_nobody_behind() -> None:
    daemon = FakeDaemon()
    results = run_experiments(daemon, lambda mode, environment: FakeProbe(daemon, mode, environment))
    assert len(results) == len(SHARES) + 8
    assert results["share 25 %"]["sm_count"] == 33
    assert results["share 25 %"]["at_or_below"]
    assert results["share 25 %"]["listed_as_client"]
    for key in ("0", "UUID"):
        cap = next(result for name, result in results.items() if name.startswith("memory cap") and key in name)
        assert (cap["is_applied"], cap["allocated_mib"], cap["ended_with"]) == (True, 64, "OutOfMemoryError")
    assert results["context"] == {"context_mib": 500, "reserved_mib": 100}
    assert results["kill of a busy client"]["neighbour"] == "goes on"
    assert len(daemon.terminated) == 1
    assert list(results)[-1] == "fault and recovery"
    assert results["fault and recovery"]["status_after_fault"] == "FAULT"
    assert results["fault and recovery"]["neighbour"] == "unspecified launch failure"
    assert results["fault and recovery"]["status"] == "ACTIVE"
    assert "sees 66 SMs" in results["fault and recovery"]["new_client"]
    assert daemon.alive == {}


def test_probes_that_do_not_start_are_results_too() -> None:
    daemon = FakeDaemon()

    class Silent(FakeProbe):
        def next_event(self, timeout_s: float) -> dict[str, Any] | None:
            return None

    results = run_experiments(daemon, lambda mode, environment: Silent(daemon, mode, environment))
    assert all("did not start" in result["failed"] for result in results.values())
    assert daemon.alive == {}


class FakeMachine:
    """Runs steps by leaving what they would leave; takes 10 s for each."""

    def __init__(self, folder: Path, *, mps: bool = True, failing: Sequence[str] = (), has_gpu: bool = True) -> None:
        self.results, self.mps, self.failing, self.has_gpu = Results(folder), mps, failing, has_gpu
        self.ran: list[str] = []
        self.environments: list[Mapping[str, str]] = []
        self.limits_s: list[float] = []
        self.now_s = 0.0

    def run(self, step: Step, environment: Mapping[str, str], limit_s: float) -> int:
        self.ran.append(step.name)
        self.environments.append(environment)
        self.limits_s.append(limit_s)
        self.now_s += 10.0
        if step.name == "inventory":
            if not self.has_gpu:
                return 3
            self.results.write("inventory.json", {**gpu(driver="580.1").to_data(), "date": "2026-11-22"})
        if step.name == "first-client":
            self.results.write("mps.json", {"is_usable": self.mps, "reason": None if self.mps else "nobody is taken"})
        return 124 if step.name in self.failing else 0

    def check(self, *arguments: str) -> int:
        given = ["-o", str(self.results.folder), *arguments]
        return run.main(given, run=self.run, clock_s=lambda: self.now_s)

    def page(self) -> str:
        return self.results.path("report.md").read_text()


def test_without_a_gpu_it_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = FakeMachine(tmp_path, has_gpu=False)
    assert machine.check() == 3
    assert machine.ran == ["inventory"]
    assert "no GPU to check" in capsys.readouterr().err


def test_what_came_to_an_end_is_not_run_again(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, failing=["grid"])
    assert machine.check() == 1
    assert machine.ran[-1] == "faults"
    assert "grid: stopped after 330 s; what was measured by then is kept" in machine.page()
    again = FakeMachine(tmp_path)
    assert again.check() == 0
    assert again.ran == ["grid"]
    assert "--resume" in machine.results.read("steps.json")["grid"]["command"]
    assert "580.1" in machine.page()
    assert "dry run" not in machine.page()


def test_a_server_that_takes_nobody_leaves_whole_gpu_measurements(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, mps=False)
    assert machine.check("--steps", "C") == 0
    assert machine.ran == ["inventory", "first-client", "whole-gpu", "green-contexts"]
    assert "Without CUDA MPS: nobody is taken." in machine.page()
    assert "grid: left out: CUDA MPS cannot be used here: nobody is taken" in machine.page()


def test_the_whole_has_a_limit(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    assert machine.check("--limit-s", "100", "--steps", "A,B,C") == 1
    assert sum(limit_s > 100 for limit_s in machine.limits_s) == 0
    assert machine.now_s <= 100
    assert "the time for the whole check was over" in machine.page()


def test_options_and_models_reach_every_measurement(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.check("--option", "dtype=fp16", "--models", "bert,t5", "--gpu", "GPU-1")
    commands = {name: step["command"] for name, step in machine.results.read("steps.json").items()}
    assert "--gpu GPU-1" in commands["inventory"]
    assert "profile bert t5" in commands["grid"]
    for name in ("speed-fast", "streaming", "connections-8", "grid", "occupancy"):
        assert "bert" in commands[name]
        assert "--option dtype=fp16" in commands[name]
    for environment in machine.environments[1:]:
        assert environment["CUDA_VISIBLE_DEVICES"] == gpu().uuid
        assert not [key for key in environment if key.startswith("CUDA_MPS_")]


def test_results_beside_the_processors(tmp_path: Path) -> None:
    asked: list[str] = []
    given = ["--device", "cpu", "-o", str(tmp_path)]
    assert same_results.main(given) == 0
    found = Results(tmp_path).read("same-results.json")
    assert set(found) == set(same_results.WAYS)
    assert all(result["difference"] < same_results.LARGEST_DIFFERENCE for result in found.values())

    def broken(way: str, device: str) -> float:
        asked.append(device)
        if way == "pixels":
            raise RuntimeError("no kernel image")
        return float("nan") if way == "eager" else 0.0

    assert same_results.main(given, measure=broken) == 1
    found = Results(tmp_path).read("same-results.json")
    assert {way for way, result in found.items() if "failed" in result} == {"eager", "pixels"}
    assert set(asked) == {"cpu"}


def test_no_step_runs_tests() -> None:
    commands = [step.shown("python") for step in steps(Path("out"), "h200", Sizes())]
    assert [command for command in commands if "pytest" in command or "tests" in command] == []


def test_a_dry_run_prints_every_command_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert run.main(["-o", str(folder), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "CUDA_DEVICE_MAX_CONNECTIONS=4 python" in out
    assert "# D occupancy, within 180 s" in out
    assert not folder.exists()
    assert run.main(["--list", "--steps", "E"]) == 0
    assert "pair-resnet50-vgg19" in capsys.readouterr().out
    assert run.main(["--steps", "Q"]) == 2
    assert "no step begins with 'Q'" in capsys.readouterr().err


def test_a_machine_without_nvml_is_known_by_what_pytorch_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent() -> tuple[GpuDevice, ...]:
        raise EnvironmentFaultError("NVML does not answer: Driver Not Loaded. Run nvidia-smi.")

    monkeypatch.setattr(inventory, "read_inventory", silent)
    assert inventory.main(["-o", str(tmp_path)]) == 3
    assert "no GPU to check: NVML does not answer" in capsys.readouterr().err
    properties = SimpleNamespace(
        name="NVIDIA H200", uuid="7b4a", major=9, minor=0, multi_processor_count=132, total_memory=2**37
    )
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda _index: properties,
        "mem_get_info": lambda _index: (2**36, 2**37),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert inventory.main(["-o", str(tmp_path)]) == 0
    found = Results(tmp_path).read("inventory.json")
    assert (found["uuid"], found["type"], found["sm_count"], found["driver"]) == ("GPU-7b4a", "h200", 132, "unknown")
    assert "NVML does not answer" in found["doubts"][0]


def test_a_gpu_in_mig_mode_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = [gpu(uuid="GPU-a", is_mig=True), gpu(uuid="GPU-b")]
    monkeypatch.setattr(inventory, "read_inventory", lambda: tuple(there))
    assert inventory.main(["-o", str(tmp_path)]) == 0
    assert Results(tmp_path).read("inventory.json")["uuid"] == "GPU-b"
    there.pop()
    assert inventory.main(["-o", str(tmp_path)]) == 3
    assert "GPU-a is in MIG mode without a MIG device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        FileNotFoundError("No usable temporary directory"),
        ValueError("odd\nx"),
    ],
)
def test_whatever_keeps_cuda_mps_from_starting_is_a_reason_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(_uuid: str) -> Any:
        raise error

    monkeypatch.setattr(sharing, "PrivateDaemon", refuse)
    Results(tmp_path).write("inventory.json", gpu().to_data())
    assert sharing.main(["-o", str(tmp_path), "--part", "first"]) == 0
    found = Results(tmp_path).read("mps.json")
    assert found["is_usable"] is False
    assert type(error).__name__ in found["reason"]
    assert "\n" not in found["reason"]


def test_a_step_whose_package_is_missing_is_left_out_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None if name == "msgspec" else object())
    Results(tmp_path).write("inventory.json", gpu().to_data())
    assert run.main(["-o", str(tmp_path), "--steps", "served"], run=lambda *_: 0) == 0
    assert "needs the package msgspec" in Results(tmp_path).read("steps.json")["served"]["left_out"]


def test_counters_without_a_profile_are_kept_for_later(tmp_path: Path) -> None:
    Results(tmp_path).write("inventory.json", gpu().to_data())
    assert run.main(["-o", str(tmp_path), "--steps", "D"], run=lambda *_: 0) == 0
    assert "group C" in Results(tmp_path).read("steps.json")["occupancy-import"]["left_out"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run.main(["-o", str(tmp_path / "file" / "out"), "--steps", "A"], run=lambda *_: 0) == 3
    assert "cannot be written" in capsys.readouterr().err
