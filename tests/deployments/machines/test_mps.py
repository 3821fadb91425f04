import json
from pathlib import Path

import pytest

from tenuto.deployments.machines.environment import diagnose
from tenuto.deployments.machines.finding import Finding
from tenuto.deployments.machines.mps_checks import check_gpus, check_mps, foreign_daemons
from tenuto.errors import EnvironmentFaultError
from tenuto.mps.inventory import GpuDevice, read_inventory
from tenuto.mps.others import OtherProcess
from tenuto.mps.processes import Processes
from tests.mps.fake_mig import FakeMigGpu, FakeMigNvml
from tests.mps.fake_nvml import A100, V100, FakeGpu, FakeNvml, FakePart


class NoProcesses(Processes):
    def started_at(self, pid: int) -> int | None:
        return None

    def user_of(self, pid: int) -> int | None:
        return 1001


def gpus(**changes: object) -> tuple[GpuDevice, ...]:
    return read_inventory(FakeNvml(FakeGpu(V100, **changes)), lambda: {V100: 80})  # type: ignore[arg-type]


def of_mps(
    root: Path,
    *,
    has_driver: bool = True,
    binary: str | None = "/usr/bin/nvidia-cuda-mps-control",
    user: int | None = None,
    others: tuple[int, ...] = (),
) -> dict[str, Finding]:
    checks = check_mps(
        has_driver=has_driver,
        root=root,
        processes=NoProcesses(),
        which=lambda _: binary,
        user=user,
        others=lambda: others,
    )
    return {check.name: check for check in checks}


def test_a_gpu_in_order_is_one_line_with_its_free_memory() -> None:
    driver, gpu = check_gpus(gpus, lambda uuid: ())
    assert (driver.state, driver.found) == ("ok", "580.95.05, 1 GPUs")
    assert (gpu.name, gpu.state, gpu.cure) == ("gpu 11111111", "ok", "")
    assert "8080 of 16160 MiB free, 80 SMs" in gpu.found


@pytest.mark.parametrize(
    ("changes", "state", "cure"),
    [
        ({"mig": 1}, "fail", f"nvidia-smi -i {V100} -mig 0"),
        ({"compute_mode": 2}, "fail", "EXCLUSIVE_PROCESS"),
        ({"capability": (6, 0)}, "note", "mps: off"),
        ({"memory_mib": 1500}, "note", "holds the memory"),
    ],
)
def test_what_is_wrong_with_a_gpu_comes_with_its_repair(changes: dict[str, object], state: str, cure: str) -> None:
    gpu = check_gpus(lambda: gpus(**changes), lambda uuid: None)[1]
    assert gpu.state == state
    assert cure in gpu.cure


def test_other_processes_are_named_and_a_mig_device_is_a_gpu() -> None:
    part = FakePart("MIG-22222222-aaaa-aaaa-aaaa-aaaaaaaaaaaa")
    found = read_inventory(FakeNvml(FakeGpu(V100, mig=1, parts=[None, part])), dict)
    driver, mig, others, layout = check_gpus(
        lambda: found, lambda uuid: (OtherProcess(7, "python", 1001), OtherProcess(8, None, None))
    )
    assert driver.state == "ok"
    assert (mig.name, mig.state) == ("mig 22222222", "ok")
    assert (others.name, others.state) == ("mig 22222222 others", "note")
    assert "process 7 (python, user 1001), process 8 of another container" in others.found
    assert (layout.state, layout.found) == ("note", "a100-3g.20gb at ?: this user is not told where")


@pytest.mark.parametrize(
    ("cuts", "changes", "state", "told"),
    [
        ((("3g.20gb", 4), ("1g.5gb", 0)), {}, "ok", "a100-3g.20gb at 4, a100-1g.5gb at 0"),
        ((), {"mig": 0}, "ok", "whole; it could be cut (MIG is off)"),
        ((), {}, "ok", "in MIG mode, without instances"),
        ((), {"mig": 0, "pending": 1}, "fail", "its MIG mode changes at its next reset"),
    ],
)
def test_every_gpu_that_can_be_cut_has_a_line_with_its_layout(
    cuts: tuple[tuple[str, int], ...], changes: dict[str, object], state: str, told: str
) -> None:
    nvml = FakeMigNvml(FakeMigGpu(**changes))  # type: ignore[arg-type]
    for cut in cuts:
        nvml.gpu.cut(*cut)
    found = check_gpus(lambda: read_inventory(nvml, lambda: {A100: 108}), lambda uuid: ())[-1]
    assert (found.name, found.state) == ("layout 22222222", state)
    assert told in found.found
    assert ("--gpu-reset" in found.cure) == (state == "fail")


def test_a_driver_that_does_not_answer_is_one_failed_line() -> None:
    def fails() -> tuple[GpuDevice, ...]:
        raise EnvironmentFaultError("NVML does not answer")

    assert [check.state for check in check_gpus(fails)] == ["fail"]
    assert [check.cure for check in check_gpus(lambda: ())] == ["nvidia-smi -L"]


def test_all_is_well_before_the_first_start() -> None:
    assert {check.state for check in of_mps(Path("/tmp/t-mps-none")).values()} == {"ok"}


def test_a_missing_program_fails_only_where_there_is_a_gpu() -> None:
    root = Path("/tmp/t-mps-none")
    assert of_mps(root, binary=None)["CUDA MPS"].state == "fail"
    assert of_mps(root, binary=None, has_driver=False)["CUDA MPS"].state == "note"


def test_the_folder_of_another_user_fails() -> None:
    check = of_mps(Path("/tmp"), user=987_654)["CUDA MPS folder"]
    assert check.state == "fail"
    assert "run as that user" in check.cure


def test_a_folder_too_deep_for_sockets_fails() -> None:
    check = of_mps(Path("/tmp/" + "x" * 80))["CUDA MPS folder"]
    assert (check.state, check.cure) == ("fail", "export TENUTO_MPS_ROOT=/tmp/tenuto-mps")


def test_a_dead_daemon_of_ours_is_shown_with_what_to_remove(tmp_path: Path) -> None:
    folder = tmp_path / V100.removeprefix("GPU-")
    folder.mkdir()
    (folder / "owner.json").write_text(json.dumps({"gpu_uuid": V100, "pid": 9, "started_at": 5}), encoding="utf-8")
    check = of_mps(tmp_path)["CUDA MPS leftovers"]
    assert (check.state, check.cure) == ("note", f"if no plan is being served: rm -r {folder}")


def test_daemons_of_others_are_shown_and_left_alone() -> None:
    check = of_mps(Path("/tmp/t-mps-none"), others=(55,))["CUDA MPS of others"]
    assert check.state == "note"
    assert "pid 55 of user 1001" in check.found


def test_daemons_of_others_are_told_by_their_pipe_directory(tmp_path: Path) -> None:
    def process(pid: int, program: str, environ: str | None) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(f"{program}\0-d\0".encode())
        if environ is not None:
            (tmp_path / str(pid) / "environ").write_bytes(f"A=b\0{environ}\0".encode())

    control = "/usr/bin/nvidia-cuda-mps-control"
    process(10, control, "CUDA_MPS_PIPE_DIRECTORY=/tmp/tenuto-mps/1/pipe")  # ours
    process(11, control, "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps")
    process(12, control, "B=c")  # at the default
    process(13, control, None)  # another user's, cannot be read
    process(14, "/usr/bin/python", "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps")  # a client
    assert foreign_daemons(Path("/tmp/tenuto-mps"), tmp_path) == (11, 12, 13)


def test_doctor_runs_here_whatever_there_is() -> None:
    names = [check.name for check in diagnose()]
    assert len(names) == len(set(names))
    assert {"ray", "nvidia driver", "CUDA MPS", "CUDA MPS folder", "CUDA MPS leftovers", "memory"} <= set(names)
