import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.errors import EnvironmentFaultError
from tenuto.gpu_check import check as gpu_check
from tenuto.gpu_check.sharing import SHARES, sharing_experiments
from tenuto.gpu_check.streaming import VARIANTS

GPU = SimpleNamespace(
    uuid="GPU-1", name="NVIDIA H200", type="h200", memory_mib=140_000, free_memory_mib=139_000,
    compute_capability=(9, 0), sm_count=132, driver="580.1", is_mig=False, compute_mode="default",
)  # fmt: skip


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

    def environment(share: float | None, cap: float | None) -> Mapping[str, str]:
        return {} if share is None else {"share": str(share)}

    sharing_experiments(daemon, environment, 132, results.__setitem__, start=start, clock_s=lambda: 0.0,
                        sleep=lambda s: None)  # fmt: skip
    return results


def test_every_experiment_reports_what_was_seen_and_leaves_nobody_behind() -> None:
    daemon = FakeDaemon()
    results = run_experiments(daemon, lambda mode, environment: FakeProbe(daemon, mode, environment))
    assert len(results) == len(SHARES) + 5
    assert results["share 30 %"]["sm_count"] == 39
    assert results["share 30 %"]["at_or_below"]
    assert results["share 30 %"]["listed_as_client"]
    assert results["memory cap"]["allocated_mib"] == 64
    assert results["memory cap"]["ended_with"] == "OutOfMemoryError"
    assert results["kill of a busy client"]["neighbour"] == "goes on"
    assert len(daemon.terminated) == 1
    assert results["fault and recovery"]["status_after_fault"] == "FAULT"
    assert results["fault and recovery"]["neighbour"] == "unspecified launch failure"
    assert results["fault and recovery"]["status"] == "ACTIVE"
    assert "sees 66 SMs" in results["fault and recovery"]["new_client"]
    assert daemon.alive == {}
    page = gpu_check.sharing_page(GPU, results)  # type: ignore[arg-type]
    assert "| 30 % | 39 | 39.6 | yes | yes |" in page
    assert "## Fault and recovery" in page


def test_probes_that_do_not_start_are_results_too() -> None:
    daemon = FakeDaemon()

    class Silent(FakeProbe):
        def next_event(self, timeout_s: float) -> dict[str, Any] | None:
            return None

    results = run_experiments(daemon, lambda mode, environment: Silent(daemon, mode, environment))
    assert all("did not start" in result["failed"] for result in results.values())
    assert daemon.alive == {}


def test_without_a_gpu_it_ends_with_3_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(uuid: str | None) -> Any:
        raise EnvironmentFaultError("NVML finds no driver. Install one.")

    monkeypatch.setattr(gpu_check, "_device", none)
    assert gpu_check.main(["-o", str(tmp_path / "out")]) == 3
    assert "no GPU to check: NVML finds no driver" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_each_step_is_one_command_within_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "_device", lambda uuid: GPU)
    no_mps = SimpleNamespace(**{**vars(GPU), "is_mig": True})
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
        commands.append(command)
        if "tenuto.gpu_check.streaming" in command:
            results = {name: {"ratio": 1.2} for name in VARIANTS}
            Path(command[-1]).write_text(json.dumps({"model": "resnet50", **results}))
        return 0 if "resnet50" in command else 3

    monkeypatch.setattr(gpu_check, "_device", lambda uuid: no_mps)
    assert gpu_check.main(["-o", str(tmp_path), "--quick"], run=run) == 1  # bert failed
    streaming, *commands = commands
    assert streaming[1:6] == ["-m", "tenuto.gpu_check.streaming", "resnet50", "--batch-size", "8"]
    assert [c[4] for c in commands] == ["resnet50", "bert", "resnet50"]  # no co-runs without CUDA MPS
    assert all(c[c.index("--shares") + 1] == "100" for c in commands)
    assert float(commands[0][commands[0].index("--time-limit-s") + 1]) < 600
    assert json.loads((tmp_path / "inventory.json").read_text())["uuid"] == "GPU-1"
    assert json.loads((tmp_path / "sharing.json").read_text())["CUDA MPS"]["failed"] == "MIG is on"
    assert "igniter-bert: left out" in (tmp_path / "log.txt").read_text()


def test_streaming_that_was_measured_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "_device", lambda uuid: SimpleNamespace(**{**vars(GPU), "is_mig": True}))
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
        commands.append(command)
        found = {"ratio": 1.2} if len(commands) > 1 else {"failed": "no compiler"}
        Path(command[-1]).write_text(json.dumps(dict.fromkeys(VARIANTS, found)))
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
        return 1 if len(commands) == 1 else 0

    codes = [gpu_check.main(["-o", str(tmp_path), "--steps", "streaming"], run=run) for _ in range(3)]
    assert codes == [1, 0, 0]
    assert len(commands) == 2


def test_steps_are_listed_and_chosen_by_their_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert sum(name.startswith("model-") for name in names) == 13
    assert sum(name.startswith("pair-") for name in names) == 78
    assert gpu_check.main(["--steps", "nothing"]) == 2
