from pathlib import Path

import pytest

from tenuto.cli import main
from tenuto.deployments.machines.node_gpus import cluster_of
from tenuto.errors import EnvironmentFaultError
from tenuto.mps import inventory
from tenuto.mps.inventory import processes_on, read_inventory
from tenuto.placement import Cluster

from .fake_mig import FakeMigGpu, FakeMigNvml
from .fake_nvml import A100, V100, FakeGpu, FakeNvml, FakePart

COUNTS = {A100: 108, V100: 80}  # CUDA's order differs from NVML's


def two_gpus(**changes: bool) -> FakeNvml:
    return FakeNvml(FakeGpu(V100), FakeGpu(A100, "NVIDIA A100-SXM4-40GB", 40_960, (8, 0), 0, 3, [77]), **changes)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_gpus_are_told_by_uuid_whatever_order_cuda_has(as_bytes: bool) -> None:
    nvml = two_gpus(as_bytes=as_bytes)
    first, second = read_inventory(nvml, lambda: COUNTS)
    assert (first.uuid, first.type, first.sm_count, first.compute_mode, first.is_mig) == (
        V100,
        "v100",
        80,
        "default",
        False,
    )
    assert (second.type, second.sm_count, second.compute_capability, second.compute_mode) == (
        "a100",
        108,
        (8, 0),
        "exclusive-process",
    )
    assert second.driver == "580.95.05"
    assert nvml.open == 0


def test_without_a_driver_the_reason_is_told() -> None:
    with pytest.raises(EnvironmentFaultError, match="Driver Not Loaded"):
        read_inventory(FakeNvml(has_driver=False))


def test_a_gpu_without_sm_count_is_an_error_not_a_guess() -> None:
    with pytest.raises(EnvironmentFaultError, match="CUDA does not show"):
        read_inventory(two_gpus(), lambda: {V100: 80})


def test_processes_on_a_gpu() -> None:
    nvml = two_gpus()
    assert processes_on(A100, nvml) == (77,)
    with pytest.raises(EnvironmentFaultError, match="does not know"):
        processes_on("GPU-gone", nvml)


def test_the_cluster_file_can_be_read_again(tmp_path: Path) -> None:
    devices = read_inventory(two_gpus(), lambda: COUNTS)
    cluster = cluster_of({"10.0.0.1": devices, "10.0.0.2": devices[:1]})
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster.dump(), encoding="utf-8")
    read = Cluster.load(path)
    assert read == cluster
    assert [(gpu.id, gpu.uuid) for gpu in read.gpus] == [("n0/0", V100), ("n0/1", A100), ("n1/0", V100)]


def test_mig_mode_is_refused_with_the_command() -> None:
    devices = read_inventory(FakeNvml(FakeGpu(A100, mig=1)), dict)
    with pytest.raises(EnvironmentFaultError, match="-mig 0"):
        cluster_of({None: devices})


PARTS = ("MIG-aaaaaaaa-1111-1111-1111-111111111111", "MIG-bbbbbbbb-1111-1111-1111-111111111111")


def split_gpu() -> FakeNvml:
    """A V100 and an A100 whose seven places hold two MIG devices; the second has the name of older drivers."""
    parts = [None, FakePart(PARTS[0]), None, FakePart(PARTS[1], "NVIDIA A100-SXM4-40GB", 4864, 14, 1)]
    return FakeNvml(FakeGpu(V100), FakeGpu(A100, "NVIDIA A100-SXM4-40GB", 40_960, (8, 0), 1, parts=parts))


def test_mig_devices_are_gpus_of_their_own_type() -> None:
    whole, large, small = read_inventory(split_gpu(), lambda: {V100: 80})
    assert (whole.type, whole.parent_uuid) == ("v100", None)
    assert (large.uuid, large.type, large.memory_mib, large.sm_count) == (PARTS[0], "a100-3g.20gb", 20_096, 42)
    assert (small.uuid, small.type, small.memory_mib, small.sm_count) == (PARTS[1], "a100-1g.5gb", 4864, 14)
    assert {large.parent_uuid, small.parent_uuid} == {A100}
    assert not large.is_mig
    assert large.compute_capability == (8, 0)


def test_mig_devices_come_into_the_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_of({None: read_inventory(split_gpu(), lambda: {V100: 80})}).dump(), encoding="utf-8")
    assert [(gpu.type, gpu.uuid, gpu.memory_mib) for gpu in Cluster.load(path).gpus][1:] == [
        ("a100-3g.20gb", PARTS[0], 20_096),
        ("a100-1g.5gb", PARTS[1], 4864),
    ]


def test_processes_of_mig_devices_and_clients_of_cuda_mps_are_seen() -> None:
    nvml = split_gpu()
    part = nvml.gpus[1].parts[1]
    assert part is not None
    part.pids, part.mps_pids = [7], [9, 8]
    assert processes_on(PARTS[0], nvml) == (7, 8, 9)


def test_the_verb_ends_with_3_where_there_is_no_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inventory, "load_nvml", lambda: FakeNvml(has_driver=False))
    with pytest.raises(SystemExit) as ended:
        main(["cluster"])
    assert ended.value.code == 3
    assert "no NVIDIA driver answers" in capsys.readouterr().err


def test_the_verb_writes_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices = read_inventory(two_gpus(), lambda: COUNTS)
    monkeypatch.setattr(inventory, "read_inventory", lambda: devices)
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "-o", str(tmp_path / "c.yaml"), "--json"])
    assert ended.value.code == 0
    assert [gpu.uuid for gpu in Cluster.load(tmp_path / "c.yaml").gpus] == [V100, A100]


def test_the_verb_shows_mig_devices_with_what_is_copied_from_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = read_inventory(split_gpu(), lambda: {V100: 80})
    monkeypatch.setattr(inventory, "read_inventory", lambda: devices)
    with pytest.raises(SystemExit) as ended:
        main(["cluster"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert PARTS[1] in out
    assert "a100-1g.5gb" in out


def test_a_gpu_that_is_cut_is_one_group_with_its_places(tmp_path: Path) -> None:
    nvml = FakeMigNvml(FakeMigGpu(), FakeGpu(V100))
    for profile, start in (("3g.20gb", 4), ("2g.10gb", 0)):
        nvml.gpu.cut(profile, start)
    path = tmp_path / "cluster.yaml"
    devices = read_inventory(nvml, lambda: {V100: 80})
    path.write_text(cluster_of({None: devices}, mig="managed").dump(), encoding="utf-8")
    first, second, whole = Cluster.load(path).gpus
    assert [(gpu.id, gpu.type, gpu.uuid, gpu.mig) for gpu in (first, second)] == [
        ("n0/0.0", "a100-2g.10gb", devices[1].uuid, "managed"),
        ("n0/0.4", "a100-3g.20gb", devices[0].uuid, "managed"),
    ]
    assert first.instance is not None
    assert (first.instance.gpu_uuid, whole.id, whole.mig) == (A100, "n0/1", None)


def test_an_empty_gpu_in_mig_mode_may_be_cut_by_plans() -> None:
    (gpu,) = cluster_of({None: read_inventory(FakeMigNvml(FakeMigGpu()), dict)}, mig="managed").gpus
    assert (gpu.type, gpu.uuid, gpu.mig, gpu.instance) == ("a100", A100, "managed", None)
