"""GPUs asked of Ray's autoscaler: by type, by node, and given up when they do not come."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tenuto.deployments.control.autoscaler import GpuAutoscaler
from tenuto.deployments.control.controller import Controller
from tenuto.deployments.control.controller_process import keep_ground, read_declared_nodes, read_ground
from tenuto.deployments.control.gpu_requests import GpuRequests
from tenuto.deployments.control.live import Live, LiveSystem
from tenuto.deployments.control.planner import NoPlanner
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings, GpuBounds
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.placement.cluster import Gpu
from tenuto.profiles import Profiles
from tests.deployments.control.desk import Desk, PlanningDesk
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.plans import gpu, make_plan
from tests.instruments.stores import DictStore

ONE = make_plan({"n0/0/a": (100.0, ["a"])})  # made for 50 r/s, carries 600
QUICK = {"name": "tenuto", "options": {"requests": 200, "starts": ["symphony", "gpulet"]}}
BOTH = {"v100": {"max": 4}, "t4": {"max": 8}}


class Ray:
    """What Ray is asked for, by the nodes that it has."""

    def __init__(self, bounds: dict[str, Any], *nodes: tuple[float, dict[str, str]]) -> None:
        self.asked: list[tuple[dict[str, float], dict[str, str]]] = []
        described = [{"Resources": {"GPU": count}, "Labels": labels} for count, labels in nodes]
        parsed = {kind: GpuBounds.model_validate(bound) for kind, bound in bounds.items()}
        self.autoscaler = GpuAutoscaler(parsed, self._request, lambda: described)

    def _request(self, bundles: Any, selectors: Any) -> None:
        self.asked = list(zip(bundles, selectors, strict=True))


def test_gpus_are_asked_for_by_the_labels_of_their_type() -> None:
    ray = Ray({"a100-80gb": {"max": 4}, "t4": {"max": 4}})
    ray.autoscaler.ask_for({"a100-80gb": 1, "t4": 2})
    t4, a100 = ({"ray.io/accelerator-type": f"in({names})"} for names in ("T4,T4-15G", "A100,A100-80G"))
    assert ray.asked == [({"GPU": 1}, a100), ({"GPU": 1}, t4), ({"GPU": 1}, t4)]
    ray.autoscaler.ask_for({"a100-80gb": 0, "t4": -1})
    assert ray.asked == []


@pytest.mark.parametrize("per_node", [1, 2, 3, 4])
@pytest.mark.parametrize("most", [0, 1, 3, 4, 7])
def test_ray_is_never_asked_for_more_than_a_bound(most: int, per_node: int) -> None:
    ray = Ray({"t4": {"max": most, "per_node": per_node}})
    for more in range(10):
        ray.autoscaler.ask_for({"t4": more})
        assert sum(bundle["GPU"] for bundle, _ in ray.asked) <= most


def test_ray_is_asked_anew_when_a_type_is_given_up() -> None:
    """Before, bundles that cannot be had stayed asked for where nothing else changed, and kept all others away."""
    settings = ControlSettings.model_validate({"gpus": BOTH, "change": {"come_s": 60}})
    for needed in ({"v100": 2}, {"v100": 2, "t4": 1}):
        requests = GpuRequests(settings)
        assert requests.update_totals(0.0, needed, {}) == {"v100": 0, "t4": 0} | needed
        assert requests.update_totals(10.0, needed, {}) is None
        assert requests.give_up_late(70.0, {"t4": 1}) == {"v100": 2}
        assert requests.update_totals(71.0, needed, {"t4": 1}) == {"t4": needed.get("t4", 0)}
        assert requests.update_totals(72.0, needed, {"t4": 1}) is None


def test_ray_counts_by_labels_what_the_plan_counts_by_gpus() -> None:
    t4 = {"ray.io/accelerator-type": "T4"}
    ray = Ray({"t4": {"max": 4}}, (1.0, t4), (1.0, {}), (2.0, {"ray.io/accelerator-type": "L4"}))
    for more, total in ((1, 2), (0, 1), (-1, 0), (-5, 0), (9, 4)):
        ray.autoscaler.ask_for({"t4": more})
        assert len(ray.asked) == total


def test_nodes_of_several_gpus_are_asked_for_whole_and_by_labels_of_ones_own() -> None:
    ray = Ray({"3080": {"max": 8, "per_node": 4, "labels": {"pool": "gamer"}}}, (4.0, {"pool": "gamer"}))
    ray.autoscaler.ask_for({"3080": 1})
    assert ray.asked == [({"GPU": 4}, {"pool": "gamer"})] * 2


@pytest.mark.parametrize("price", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    with pytest.raises(ValueError, match="price_per_hour"):
        ControlSettings.model_validate({"gpus": {"t4": {"max": 1, "price_per_hour": price}}})


def requests(**change: Any) -> GpuRequests:
    return GpuRequests(ControlSettings.model_validate({"gpus": BOTH, "change": {"come_s": 100.0, **change}}))


def test_what_was_asked_is_missing_until_it_comes() -> None:
    asked = requests()
    assert asked.update_totals(0.0, {"v100": 2, "l4": 1}, {"v100": 1}) == {"v100": 2, "t4": 0}
    assert asked.missing == {"v100": 1}
    assert asked.update_totals(5.0, {"v100": 2}, {"v100": 1}) is None
    assert not asked.give_up_late(99.0, {"v100": 1})
    assert not asked.give_up_late(100.0, {"v100": 2})
    assert not asked.missing


def test_how_long_gpus_take_to_come_is_learnt_from_those_that_came() -> None:
    asked = requests()
    assert asked.come_s == 100.0  # none has come: as late as they may
    for _ in range(20):
        asked.update_totals(0.0, {"v100": 1}, {"v100": 0})
        asked.give_up_late(20.0, {"v100": 0})
        asked.update_totals(30.0, {"v100": 2}, {"v100": 0})
        asked.update_totals(40.0, {"v100": 1}, {"v100": 0})
        asked.give_up_late(70.0, {"v100": 1})
        asked.update_totals(80.0, {}, {"v100": 1})
        asked.give_up_late(90.0, {"v100": 0})
    assert asked.come_s == pytest.approx(40.0, abs=1.0)  # since the last of them was asked for


def test_a_type_that_never_comes_is_given_up_longer_each_time() -> None:
    asked, now_s, until_s = requests(), 0.0, []
    for _ in range(3):
        assert asked.update_totals(now_s, {"v100": 1}, {}) == {"v100": 1, "t4": 0}
        assert asked.give_up_late(now_s + 100.0, {}) == {"v100": 1}
        assert not asked.missing
        assert asked.update_totals(now_s + 100.0, {"t4": 3}, {}) == {"t4": 3}  # of the other type alone
        until_s.append(asked.given_up["v100"] - now_s - 100.0)
        now_s += 100.0 + until_s[-1]
        asked.give_up_late(now_s, {"t4": 3})
        assert not asked.given_up
    assert until_s == [1000.0, 2000.0, 4000.0]


def test_a_gpu_that_leaves_has_as_long_to_be_replaced_as_one_that_was_asked_for_has_to_come() -> None:
    asked = requests()
    asked.update_totals(0.0, {"v100": 1}, {})
    assert not asked.give_up_late(50.0, {"v100": 1})
    assert not asked.give_up_late(500.0, {})
    assert not asked.give_up_late(599.0, {})
    assert asked.give_up_late(600.0, {}) == {"v100": 1}


def grown(desk: Desk, kind: str, count: int) -> None:
    desk.gpus = (*desk.gpus, *(gpu(f"{kind}-{i}/0", kind=kind) for i in range(count)))


def test_plans_do_with_another_type_when_the_first_does_not_come() -> None:
    settings = {"gpus": BOTH, "policy": {"name": "gpulet"}, "change": {"come_s": 60.0}}
    desk = PlanningDesk(ONE, [gpu("n0/0")], settings)
    desk.rates["a"] = 1100.0
    desk.look(30)
    first = dict(desk.wanted[-1].by_type)
    (kind,) = (kind for kind in first if desk.wanted[-1].more[kind] > 0)
    (other,) = first.keys() - {kind}
    state = desk.controller.state()
    assert state.missing_gpus == {kind: desk.wanted[-1].more[kind]}
    assert f"{kind} {state.missing_gpus[kind]}" in desk.text("asked")
    desk.look(60)
    assert desk.controller.state().late_gpus == [kind]
    assert "did not come within 60 s" in desk.text("late")
    desk.look(30)
    assert desk.wanted[-1].by_type.keys() == {other}
    assert desk.wanted[-1].more[other] > 0
    grown(desk, other, desk.wanted[-1].more[other])
    desk.look(20)
    assert not desk.controller.state().missing_gpus
    assert len(desk.controller.plan.used_gpus) == 2


def test_without_an_autoscaler_what_is_there_serves_on_and_it_is_asked_again_later() -> None:
    settings = {"gpus": BOTH, "policy": {"name": "gpulet"}, "change": {"come_s": 20.0}}
    desk = PlanningDesk(ONE, [gpu("n0/0")], settings)
    desk.rates["a"] = 1100.0
    desk.look(60)
    assert desk.controller.state().late_gpus == ["t4", "v100"]
    assert desk.kinds().count("late") == 2
    assert set(desk.controller.plan.used_gpus) == {"n0/0"}
    asked = desk.kinds().count("asked")
    desk.look(170)
    assert desk.kinds().count("asked") > asked
    (kind,) = desk.controller.state().missing_gpus
    grown(desk, kind, desk.wanted[-1].more[kind])
    desk.look(20)
    assert len(desk.controller.plan.used_gpus) == 2
    assert not {"lost", "stuck", "roll back"} & set(desk.kinds())


def test_the_price_of_the_settings_decides_which_type_is_asked_for() -> None:
    for cheap, dear in (("v100", "t4"), ("t4", "v100")):
        prices = {cheap: {"max": 8, "price_per_hour": 0.01}, dear: {"max": 8, "price_per_hour": 9.0}}
        desk = PlanningDesk(ONE, [gpu("n0/0")], {"gpus": prices, "policy": QUICK})
        desk.rates["a"] = 1100.0
        desk.look(30)
        assert desk.wanted[-1].by_type[dear] <= 1
        assert desk.wanted[-1].by_type[cheap] > 1


@pytest.mark.parametrize(
    ("life_hours", "notice_s", "chosen"), [(24.0, 60.0, "t4"), (0.05, 60.0, "t4"), (0.05, 0.0, "v100")]
)
def test_a_spot_type_is_asked_for_unless_its_losses_cost_more_than_it_saves(
    life_hours: float, notice_s: float, chosen: str
) -> None:
    spot = {"max": 8, "price_per_hour": 1.0, "spot": {"life_hours": life_hours, "notice_s": notice_s}}
    bounds = {"v100": {"max": 8, "price_per_hour": 4.0}, "t4": spot}
    desk = PlanningDesk(ONE, [gpu("n0/0")], {"gpus": bounds, "policy": QUICK})
    desk.rates["a"] = 1100.0
    desk.look(30)
    assert desk.wanted[-1].by_type[chosen] > 1


@pytest.mark.parametrize("bounds", [{"t4": {"max": 8}}, {"v100": {"max": 1, "price_per_hour": 0.01}, "t4": {"max": 8}}])
def test_beside_gpus_of_which_there_are_no_more_another_type_is_asked_for(bounds: dict[str, Any]) -> None:
    desk = PlanningDesk(ONE, [gpu("n0/0").model_copy(update={"price_per_hour": 0.01})], {"gpus": bounds})
    desk.rates["a"] = 1100.0
    desk.look(30)
    assert {kind: count for kind, count in desk.wanted[-1].more.items() if count} == {"t4": 1}
    grown(desk, "t4", 1)
    desk.look(30)
    assert {gpu.type for gpu in desk.controller.plan.gpus if desk.controller.plan.on_gpu(gpu.id)} == {"v100", "t4"}


class Joining:
    """Nodes that join as a test says."""

    def __init__(self) -> None:
        self.gpus: tuple[Gpu, ...] = ()
        self.unused: dict[str, str] = {}

    def find_gpus(self, present: Any) -> tuple[Gpu, ...]:
        return self.gpus


def test_gpus_of_nodes_that_join_are_seen_and_unused_nodes_are_told_once() -> None:
    deployment, joining, log = Deployment(plan=ONE), Joining(), []
    serve = FakeServe(deployment)
    system = LiveSystem(deployment, serve, serve.status, (gpu("n0/0"),), joining=joining)
    memory = Memory(ONE, ONE.workload)
    live = Live(
        Controller(ControlSettings(), memory), system, NoPlanner(), History(DictStore()), by="", tell=log.append
    )
    new = gpu("ray-aa/0").model_copy(update={"label": "10.0.0.2"})
    joining.gpus, joining.unused = (new,), {"ray-bb": "it has no Tenuto"}
    for now_s in (1.0, 2.0):
        live.step(now_s)
        assert [gpu.id for gpu in system.gpus()] == ["n0/0", "ray-aa/0"]
    assert [line.text for line in log if line.kind == "unused"] == ["ray-bb is not used: it has no Tenuto"]
    assert live.state().unused_nodes == {"ray-bb": "it has no Tenuto"}
    serve.dead_nodes = {"10.0.0.2"}
    assert [gpu.id for gpu in system.gpus()] == ["n0/0"]
    joining.gpus = ()
    serve.dead_nodes = set()
    assert [gpu.id for gpu in system.gpus()] == ["n0/0", "ray-aa/0"]  # known by its label since


def test_the_nodes_that_were_there_when_gpus_were_declared_are_kept() -> None:
    store = DictStore()
    assert read_declared_nodes(store) == []
    keep_ground(store, Profiles([]), (gpu("n0/0"),), ["bb", "aa"])
    assert read_declared_nodes(store) == ["aa", "bb"]
    assert read_ground(store)[1] == (gpu("n0/0"),)


def test_only_types_that_have_mig_may_be_cut() -> None:
    assert (
        ControlSettings.model_validate({"gpus": {"h100": {"max": 2, "mig": "managed"}}}).gpus["h100"].mig == "managed"
    )
    for kind, mig in (("v100", "managed"), ("a100-3g.20gb", "managed"), ("a100", "cut")):
        with pytest.raises(ValidationError, match=r"has no MIG|Input should be"):
            ControlSettings.model_validate({"gpus": {kind: {"max": 2, "mig": mig}}})
