"""Layouts on a fake driver: nothing is touched that need not be, nobody is cut off, and what fails is taken back."""

import pytest

from tenuto.errors import EnvironmentFaultError
from tenuto.mps.inventory import read_inventory
from tenuto.mps.mig_layout import MigCut, MigLayout, apply_layout

from .fake_mig import FakeMigGpu, FakeMigNvml
from .fake_nvml import A100

HALVES = [MigCut("3g.20gb", 0), MigCut("3g.20gb", 4)]
MIXED = [MigCut("1g.5gb", 2), MigCut("2g.10gb", 0), MigCut("3g.20gb", 4)]


def driver(*cuts: MigCut, **changes: object) -> FakeMigNvml:
    gpu = FakeMigGpu(**changes)  # type: ignore[arg-type]
    for cut in cuts:
        gpu.cut(*cut)
    return FakeMigNvml(gpu)


def layout_of(nvml: FakeMigNvml) -> MigLayout:
    """Return how the GPU is cut: as it should be already, so nothing is touched."""
    before = list(nvml.log)
    layout = apply_layout(A100, [MigCut(*cut) for cut in nvml.gpu.cuts], nvml=nvml)
    assert nvml.log == before
    return layout


def apply(nvml: FakeMigNvml, wanted: list[MigCut], leave_s: int = 0) -> list[tuple[str, int]]:
    layout = apply_layout(A100, wanted, nvml=nvml, leave_s=leave_s, sleep=lambda _s: None)
    assert [instance.cut for instance in layout.instances if len(instance.uuids) != 1] == []
    assert nvml.open == 0
    return [tuple(instance.cut) for instance in layout.instances]  # type: ignore[misc]


def test_a_layout_is_read_as_nvml_shows_it() -> None:
    nvml = driver(*HALVES)
    layout = layout_of(nvml)
    assert (layout.is_on, layout.is_pending, str(layout)) == (True, False, "3g.20gb at 0, 3g.20gb at 4")
    assert [device.start for device in read_inventory(nvml, dict)] == [0, 4]


def test_only_instances_in_the_way_are_touched() -> None:
    nvml = driver(*HALVES)
    kept = layout_of(nvml).instances[1].uuids
    assert apply(nvml, MIXED) == [("2g.10gb", 0), ("1g.5gb", 2), ("3g.20gb", 4)]
    assert nvml.log == ["end 3g.20gb at 0", "make 1g.5gb at 2", "make 2g.10gb at 0"]
    assert layout_of(nvml).instances[2].uuids == kept
    nvml.log.clear()
    assert apply(nvml, MIXED[1:]) == [("2g.10gb", 0), ("1g.5gb", 2), ("3g.20gb", 4)]
    assert nvml.log == []


def test_a_gpu_goes_into_mig_mode_and_out_of_it() -> None:
    nvml = driver(mig=0)
    assert apply(nvml, HALVES) == [("3g.20gb", 0), ("3g.20gb", 4)]
    assert apply(nvml, []) == []
    assert (nvml.gpu.mig, nvml.gpu.cuts) == (0, [])


@pytest.mark.parametrize(
    ("changes", "wanted", "told"),
    [
        ({"mig": 0, "pids": [7]}, HALVES, "process 7"),
        ({"mig": 0, "needs_reset": True}, HALVES, "cannot go on without a reset"),
        ({"mig": 0, "pending": 1}, HALVES, "nvidia-smi --gpu-reset"),
        ({"mig": None}, HALVES, "Not Supported"),
        ({"forbids": True}, HALVES, "Insufficient Permissions.*Cutting takes root"),
        ({}, [MigCut("3g.20gb", 2)], "no 3g.20gb at memory slice 2. It begins at 0, 4"),
        ({}, [MigCut("5g.30gb", 0)], "no 5g.30gb"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_all_as_it_was(
    changes: dict[str, object], wanted: list[MigCut], told: str
) -> None:
    nvml = driver(**changes)
    before = (nvml.gpu.mig, nvml.gpu.cuts)
    with pytest.raises(EnvironmentFaultError, match=told):
        apply(nvml, wanted)
    assert (nvml.gpu.mig, nvml.gpu.cuts) == before
    assert nvml.gpu.pending == changes.get("pending")


def test_an_instance_with_a_process_in_it_is_not_cut() -> None:
    nvml = driver(*HALVES)
    first = nvml.gpu.parts[0]
    assert first is not None
    first.pids.append(4242)
    with pytest.raises(EnvironmentFaultError, match=r"process 4242 .*would be cut off.*mig: fixed"):
        apply(nvml, MIXED)
    assert nvml.log == []
    nvml.gpu.parts[0], first.pids[:] = first, []  # it leaves
    assert apply(nvml, MIXED)


def test_processes_of_instances_that_stay_do_not_matter() -> None:
    nvml = driver(*HALVES)
    second = nvml.gpu.parts[1]
    assert second is not None
    second.pids.append(4242)
    assert apply(nvml, MIXED)


def test_a_change_that_the_driver_refuses_half_way_is_taken_back() -> None:
    nvml = driver(*HALVES)
    nvml.gpu.refuses.add(("2g.10gb", 0))
    with pytest.raises(EnvironmentFaultError, match=r"Insufficient Resources.*3g.20gb at 0, 3g.20gb at 4 as before"):
        apply(nvml, MIXED)
    assert nvml.gpu.cuts == HALVES
    assert all(len(instance.uuids) == 1 for instance in layout_of(nvml).instances)


def test_a_layout_that_cannot_be_brought_back_is_told_as_it_is() -> None:
    nvml = driver(*HALVES)
    nvml.gpu.refuses |= {("2g.10gb", 0), ("3g.20gb", 0)}
    with pytest.raises(EnvironmentFaultError, match=r"was 3g.20gb at 0, 3g.20gb at 4 and is 3g.20gb at 4 now"):
        apply(nvml, MIXED)
    assert nvml.gpu.cuts == HALVES[1:]


def test_an_instance_without_a_mig_device_is_made_anew() -> None:
    nvml = driver(*HALVES)
    nvml.gpu.instances[1].part = None
    nvml.gpu.parts[0] = None
    assert apply(nvml, HALVES) == HALVES
