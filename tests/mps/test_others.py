"""Who else is on a GPU: neither gpu-lets nor the server of its daemon."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tenuto.mps import inventory
from tenuto.mps import others as others_module
from tenuto.mps.others import OtherProcess, find_others, others_on, read_others

from .fake_nvml import FakeGpu, FakeNvml
from .fakes import UUID, Bench, FakeProcesses


@dataclass
class NamedProcesses(FakeProcesses):
    names: dict[int, str] = field(default_factory=dict)

    def name_of(self, pid: int) -> str | None:
        return self.names.get(pid)

    def user_of(self, pid: int) -> int | None:
        return 1001 if pid in self.names else None


def test_server_and_clients_are_ours_and_the_rest_is_named(bench: Bench) -> None:
    bench.processes = NamedProcesses(names={88: "python", 701: "nvidia-cuda-mps-server"})
    gpulet = bench.gpulet()
    bench.daemon.processes = bench.processes
    gpulet.join()
    bench.daemon.connect(41)
    nvml = FakeNvml(FakeGpu(UUID, pids=[701, 88, 99], mps_pids=[41]))
    assert read_others(gpulet, nvml) == (OtherProcess(88, "python", 1001), OtherProcess(99, None, None))


def test_where_nvml_does_not_tell_nothing_is_known(bench: Bench) -> None:
    gpulet = bench.joined()
    assert read_others(gpulet, FakeNvml(has_driver=False)) is None


def test_ours_are_known_by_the_numbers_of_other_namespaces_too() -> None:
    processes = NamedProcesses(alive={41: 1}, outside={41: {9041}})
    assert find_others((9041, 9042), {41}, processes) == (OtherProcess(9042, None, None),)


def test_without_a_daemon_gpulets_are_known_by_their_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TENUTO_MPS_ROOT", str(tmp_path)[:40])
    monkeypatch.setattr(inventory, "load_nvml", lambda: FakeNvml(FakeGpu(UUID, pids=[5, 6])))
    names = {5: "ray::ServeReplica:gpulet-n0-0-a:gpulet", 6: "python"}
    monkeypatch.setattr(others_module, "Processes", lambda: NamedProcesses(names=names))
    assert others_on(UUID) == (OtherProcess(6, "python", 1001),)
