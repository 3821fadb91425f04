"""Layouts of nodes: refused before anything is applied, cut in tasks, watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tenuto.deployments.machines.node_layouts import CutOrder, NodeLayouts, check_layouts
from tenuto.errors import InvalidInputError
from tenuto.mps.inventory import GpuDevice, read_inventory
from tenuto.mps.mig_layout import MigCut, read_mig_devices
from tenuto.placement import Plan
from tests.mps.fake_mig import FakeMigGpu, FakeMigNvml
from tests.mps.fake_nvml import A100, V100, FakeGpu


def driver(*cuts: tuple[str, int], **changes: Any) -> FakeMigNvml:
    nvml = FakeMigNvml(FakeMigGpu(**changes), FakeGpu(V100))
    for one in cuts:
        nvml.gpu.cut(*one)
    return nvml


def plan(mig: str | None, profile: str | None, *, uuid: str | None = None, parent: str = A100) -> Plan:
    """Return a plan with one gpu-let on a GPU, or in its instance at 4."""
    gpu: dict[str, Any] = {"id": "n0/0", "type": "a100", "uuid": parent, "mig": mig}
    if profile is not None:
        place = {"gpu": "n0/0", "start": 4, "slices": 4, "gpu_uuid": parent}
        gpu |= {"id": "n0/0.4", "type": f"a100-{profile}", "uuid": uuid, "instance": place}
    data = {"policy": {"name": "hand"}, "gpus": [gpu], "models": [{"name": "m", "rate_rps": 1, "slo_ms": 100}]}
    held = [{"name": "m", "batch_size": 1, "latency_ms": 5}]
    return Plan.from_data({**data, "gpulets": [{"id": "x", "gpu": gpu["id"], "models": held}]})


def check(wanted: Plan, nvml: FakeMigNvml) -> None:
    def read() -> dict[str, tuple[GpuDevice, ...]]:
        return {"10.0.0.1": read_inventory(nvml, lambda: {A100: 108, V100: 80})}

    check_layouts(wanted, read)


@pytest.mark.parametrize(
    ("mig", "profile", "cuts", "changes"),
    [
        ("managed", "3g.20gb", [], {"mig": 0}),
        ("managed", "3g.20gb", [("4g.20gb", 0)], {}),
        ("managed", None, [("3g.20gb", 4)], {}),
        ("fixed", "3g.20gb", [("3g.20gb", 4), ("3g.20gb", 0)], {}),
        (None, None, [], {"mig": 0}),
        (None, None, [], {"mig": None}),
    ],
)
def test_what_is_there_or_may_be_made_is_planned_on(
    mig: str | None, profile: str | None, cuts: list[tuple[str, int]], changes: dict[str, Any]
) -> None:
    check(plan(mig, profile), driver(*cuts, **changes))


@pytest.mark.parametrize(
    ("mig", "profile", "cuts", "changes", "told"),
    [
        ("fixed", "3g.20gb", [("4g.20gb", 0)], {}, "not there; its GPU is a100-4g.20gb at 0.*mig: managed"),
        ("fixed", "3g.20gb", [("3g.20gb", 0)], {}, "not there"),
        ("fixed", "3g.20gb", [], {"mig": 0}, "not there; its GPU is not cut"),
        (None, None, [("3g.20gb", 4)], {}, "planned whole and is in MIG mode.*-mig 0"),
        (None, None, [], {}, "planned whole and is in MIG mode"),
        ("managed", "3g.20gb", [], {"mig": 0, "pending": 1}, "next reset.*gpu-reset"),
        ("managed", "3g.20gb", [], {"mig": None}, "has no MIG"),
    ],
)
def test_another_layout_is_refused_with_the_cure(
    mig: str | None, profile: str | None, cuts: list[tuple[str, int]], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidInputError, match=told):
        check(plan(mig, profile), driver(*cuts, **changes))


def test_an_instance_named_by_uuid_must_be_there_and_a_gpu_that_no_node_has_is_not_cut() -> None:
    nvml = driver(("3g.20gb", 4))
    part = nvml.gpu.parts[0]
    assert part is not None
    check(plan("fixed", "3g.20gb", uuid=part.uuid), nvml)
    with pytest.raises(InvalidInputError, match="not there; its GPU is a100-3g"):
        check(plan("fixed", "3g.20gb", uuid="MIG-gone"), nvml)
    with pytest.raises(InvalidInputError, match="no node has this GPU"):
        check(plan("managed", "3g.20gb", parent="GPU-elsewhere"), nvml)


class Tasks:
    """Tasks that end when told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str | None, str, tuple[Any, ...]]] = []
        self.answers: dict[int, Any] = {}

    def start(self, node: str | None, what: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
        self.begun.append((node, what.__name__, arguments))
        return len(self.begun) - 1

    def poll(self, task: int) -> tuple[bool, Any]:
        return task in self.answers, self.answers.get(task)


def test_gpus_are_cut_and_looked_at_without_waiting() -> None:
    tasks, now = Tasks(), [0.0]
    layouts = NodeLayouts(tasks.start, tasks.poll, clock=lambda: now[0])
    devices = read_mig_devices(driver(("3g.20gb", 4)))
    assert layouts.watch(["10.0.0.1"]) == {}
    tasks.answers[0] = devices
    assert [(part.type, part.start) for part in layouts.watch(["10.0.0.1"])[A100]] == [("a100-3g.20gb", 4)]
    assert devices[V100] == ()
    layouts.begin(CutOrder("n0/0", A100, "10.0.0.1", (MigCut("3g.20gb", 0),)))
    now[0] = 60.0
    assert A100 not in layouts.watch(["10.0.0.1"])  # nothing is known of a GPU that is being cut
    assert layouts.ended() == {}
    assert [(node, arguments) for node, _, arguments in tasks.begun[1:]] == [("10.0.0.1", (A100, (("3g.20gb", 0),)))]
    tasks.answers[1] = "the driver refuses"
    assert layouts.ended() == {"n0/0": "the driver refuses"}
    layouts.watch(["10.0.0.1"])
    assert len(tasks.begun) == 3
