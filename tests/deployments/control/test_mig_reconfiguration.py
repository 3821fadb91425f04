"""GPUs are cut anew while a deployment changes: only when empty, only where need be, and back where that fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.control.live import LiveSystem
from tenuto.deployments.control.mig_reconfiguration import MigReconfiguration
from tenuto.deployments.machines.node_layouts import CutOrder
from tenuto.deployments.serve.config import ServeConfig
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.mps.mig_layout import MigCut, MigDevice
from tenuto.placement import Gpulet, Plan, PolicyUsed, Replica
from tenuto.placement.cluster import Gpu
from tenuto.placement.plan import PlannedGpu
from tenuto.placement.planner.gpu_matching import gpus_of, renamed
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import LinearLatency
from tests.deployments.control.carried_out import change_deployment
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.stores import DictStore

A100 = "GPU-22222222-2222-2222-2222-222222222222"
HALVES = (("3g.20gb", 0, "a"), ("3g.20gb", 4, "b"))
MIXED = (("2g.10gb", 0, "a"), ("1g.5gb", 2, "c"), ("3g.20gb", 4, "b"))


def plan(places: Sequence[tuple[str, int, str]], uuid: str | None = A100) -> Plan:
    """Return a plan with one gpu-let in each instance (profile, start, model) of one GPU that may be cut."""
    gpu = Gpu(id="n0/0", type="a100", uuid=uuid, memory_mib=40_960, mig="managed")
    latency, gpus, gpulets = LinearLatency(alpha_ms=1, beta_ms=4), [], []
    for profile, start, model in places:
        place = gpu.cut(profile, start)
        gpus.append(PlannedGpu.of(place))
        replica = Replica(name=model, batch_size=4, rate_rps=10.0, memory_mib=500.0, latency=latency, latency_ms=8.0)
        gpulets.append(Gpulet(id=f"{place.id}/a", gpu=place.id, models=(replica,)))
    specs = tuple(ModelSpec(name=name, rate_rps=10, slo_ms=100, latency=latency) for _, _, name in places)
    return Plan(policy=PolicyUsed(name="hand"), gpus=tuple(gpus), gpulets=tuple(gpulets), models=specs)


class FakeLayouts:
    """A node that cuts in no time, or refuses."""

    def __init__(self, serve: FakeServe, refuses: str = "") -> None:
        self.serve, self.refuses = serve, refuses
        self.orders: list[tuple[CutOrder, set[str]]] = []  # with the applications that ran
        self.present: dict[str, tuple[MigDevice, ...]] = {}
        self._ended: dict[str, str] = {}

    def begin(self, order: CutOrder) -> None:
        self.orders.append((order, set(self.serve.states())))
        self._ended[order.device] = self.refuses if MigCut("2g.10gb", 0) in order.wanted else ""

    def ended(self) -> dict[str, str]:
        found, self._ended = self._ended, {}
        return found

    def watch(self, nodes: Sequence[str | None]) -> Mapping[str, tuple[MigDevice, ...]]:
        return self.present


class CutCluster:
    """A fake cluster with one GPU that runs a plan, and what a change did to it."""

    def __init__(self, running: Plan, executor: str = "auto", refuses: str = "") -> None:
        self.executor = executor
        self.deployment = self.of(running)
        self.serve = FakeServe(self.deployment)
        self.layouts = FakeLayouts(self.serve, refuses)
        self.told: list[str] = []

    def of(self, wanted: Plan) -> Deployment:
        return Deployment.model_validate({"plan": wanted.to_data(), "executor": self.executor})

    def change(self, wanted: Plan) -> bool:
        return change_deployment(
            self.deployment,
            self.of(wanted),
            self.serve,
            self.serve.status,
            History(DictStore()),
            by="deploy",
            why="a test",
            ready_timeout_s=60.0,
            layouts=self.layouts,
            tell=self.told.append,
            clock=self.serve.clock,
            sleep=self.serve.sleep,
        )

    def places(self) -> list[list[tuple[str, str]]]:
        """Return the GPUs of the gpu-lets that ran at a time, after every step."""
        return [places_of(config) for config in self.serve.configs]


def places_of(config: ServeConfig) -> list[tuple[str, str]]:
    return sorted((app.spec.gpu.id, app.spec.gpu.type) for app in config.gpulets if app.spec is not None)


WHOLE = (("7g.40gb", 0, "a"),)


class SlowLayouts(FakeLayouts):
    """A driver that cuts a GPU, and takes some looks for it."""

    def __init__(self, layout: Plan) -> None:
        self.layout = {(gpu.id, gpu.type) for gpu in layout.gpus}
        self.cutting: tuple[int, CutOrder] | None = None
        self.present = {}

    def begin(self, order: CutOrder) -> None:
        assert self.cutting is None
        self.cutting = 3, order

    def ended(self) -> dict[str, str]:
        if self.cutting is None:
            return {}
        left, order = self.cutting
        self.cutting = (left - 1, order) if left else None
        if left:
            return {}
        self.layout = {(f"{order.device}.{cut.start}", f"a100-{cut.profile}") for cut in order.wanted}
        return {order.device: ""}


@given(asked=st.lists(st.tuples(st.sampled_from([HALVES, MIXED, WHOLE]), st.integers(0, 6)), min_size=1, max_size=6))
def test_a_gpu_has_the_layout_of_the_last_plan_whenever_that_came(
    asked: list[tuple[Sequence[tuple[str, int, str]], int]],
) -> None:
    """A plan may change while a GPU is being cut for the one before. Then nothing was cut back, or an instance was
    believed to be there that never was."""
    wanted = plan(HALVES)
    driver = SlowLayouts(wanted)
    layouts = MigReconfiguration(driver, wanted.gpus)
    for places, looks in [*asked, (asked[-1][0], 20)]:
        wanted = plan(places)
        layouts.need(wanted, emulated=False)
        for _ in range(looks):
            layouts.go_on([])
            ready = {(gpu.id, gpu.type) for gpu in wanted.gpus if gpu.id not in layouts.waiting}
            if driver.cutting is None:
                assert ready <= driver.layout
    assert not layouts.waiting
    assert driver.layout == {(gpu.id, gpu.type) for gpu in wanted.gpus}


@pytest.mark.parametrize(("executor", "uuid"), [("emulated", None), ("auto", A100)])
def test_a_gpu_is_cut_when_what_is_in_the_way_has_ended_and_the_rest_goes_on(executor: str, uuid: str | None) -> None:
    cluster = CutCluster(plan(HALVES, uuid), executor)
    assert cluster.change(plan(MIXED, uuid))
    old, new = ("n0/0.0", "a100-3g.20gb"), [("n0/0.0", "a100-2g.10gb"), ("n0/0.2", "a100-1g.5gb")]
    for places in cluster.places():
        assert ("n0/0.4", "a100-3g.20gb") in places
        assert not (old in places and set(new) & set(places))
    assert cluster.places()[-1] == sorted([*new, ("n0/0.4", "a100-3g.20gb")])
    assert "gpulet-n0-0.4-a" not in {name for _, name in cluster.serve.ended}
    assert {name for _, name in cluster.serve.unserved} <= {"a", "c"}


def test_the_node_is_told_what_the_plan_needs_once_the_instance_is_empty() -> None:
    cluster = CutCluster(plan(HALVES))
    assert cluster.change(plan(MIXED))
    ((order, ran),) = cluster.layouts.orders
    assert (order.device, order.gpu_uuid, order.node) == ("n0/0", A100, None)
    assert sorted(order.wanted) == [("1g.5gb", 2), ("2g.10gb", 0), ("3g.20gb", 4)]
    assert {name for name in ran if name.startswith("gpulet-")} == {"gpulet-n0-0.4-a"}


def test_bringing_up_cuts_before_any_gpulet_starts() -> None:
    cluster = CutCluster(plan(HALVES))
    cluster.serve = FakeServe(None)
    cluster.layouts.serve = cluster.serve
    cluster.deployment = cluster.of(Plan(policy=PolicyUsed(name="none")))
    assert cluster.change(plan(HALVES))
    ((order, ran),) = cluster.layouts.orders
    assert len(order.wanted) == 2
    assert not {name for name in ran if name.startswith("gpulet-")}


def test_a_plan_without_another_layout_cuts_nothing() -> None:
    cluster = CutCluster(plan(HALVES))
    assert cluster.change(plan((("3g.20gb", 0, "b"), ("3g.20gb", 4, "a"))))
    assert cluster.layouts.orders == []


def test_a_driver_that_refuses_brings_the_plan_before_back() -> None:
    cluster = CutCluster(plan(HALVES), refuses="process 7 (python) would be cut off")
    assert not cluster.change(plan(MIXED))
    assert "process 7 (python) would be cut off" in " ".join(cluster.told)
    assert cluster.places()[-1] == [("n0/0.0", "a100-3g.20gb"), ("n0/0.4", "a100-3g.20gb")]
    assert set(cluster.layouts.orders[-1][0].wanted) == {("3g.20gb", 0), ("3g.20gb", 4)}
    assert "gpulet-n0-0.4-a" not in {name for _, name in cluster.serve.ended}


def test_an_instance_that_another_tool_ended_is_gone_with_its_gpulets() -> None:
    cluster = CutCluster(plan(HALVES))
    first, second = (MigDevice("a100-3g.20gb", start, f"MIG-{start}") for start in (0, 4))
    system = LiveSystem(cluster.deployment, cluster.serve, cluster.serve.status, gpus_of(plan(HALVES)), cluster.layouts)
    cluster.layouts.present = {A100: (first, second)}
    seen = system.look(1.0)
    assert seen is not None
    assert [gpu.id for gpu in seen.gpus] == ["n0/0.0", "n0/0.4"]
    cluster.layouts.present = {A100: (second,)}
    seen = system.look(2.0)
    assert seen is not None
    assert [gpu.id for gpu in seen.gpus] == ["n0/0.4"]
    assert seen.ready == {"n0/0.4/a"}
    system.apply(plan(HALVES), 3.0)
    assert [set(order.wanted) for order, _ in cluster.layouts.orders] == [{("3g.20gb", 0), ("3g.20gb", 4)}]


def test_who_takes_over_in_the_middle_of_a_change_has_the_gpu_cut_first() -> None:
    cluster = CutCluster(plan(HALVES[1:]))
    stage = cluster.of(plan(MIXED))
    system = LiveSystem(stage, cluster.serve, cluster.serve.status, gpus_of(plan(MIXED)), cluster.layouts)
    system.look(1.0)
    assert [len(order.wanted) for order, _ in cluster.layouts.orders] == [3]
    assert cluster.places()[-1] == [("n0/0.4", "a100-3g.20gb")]
    system.look(2.0)
    assert len(cluster.places()[-1]) == 3


def test_a_controllers_plan_may_make_instances_that_the_cluster_never_had_and_says_which_are_to_be_cut_yet() -> None:
    cluster = CutCluster(plan(HALVES))
    system = LiveSystem(cluster.deployment, cluster.serve, cluster.serve.status, gpus_of(plan(HALVES)), cluster.layouts)
    assert system.cutting == []
    system.apply(renamed(plan(MIXED), plan(HALVES)), 1.0)
    assert system.cutting == ["n0/0.0", "n0/0.2"]
    for at_s in range(2, 12):
        cluster.serve.sleep(1.0)
        system.look(float(at_s))
    assert system.cutting == []
    assert {(gpu.id, gpu.type) for gpu in system.gpus()} == set(places_of(cluster.serve.configs[-1]))


def test_instances_that_cannot_be_there_together_are_not_planned_on() -> None:
    cluster = CutCluster(plan(HALVES))
    gpus = (*gpus_of(plan(HALVES)), *gpus_of(plan(MIXED)))
    system = LiveSystem(cluster.deployment, cluster.serve, cluster.serve.status, gpus, cluster.layouts)
    assert {(gpu.id, gpu.type) for gpu in system.gpus()} == set(places_of(cluster.serve.configs[-1]))
