"""Nodes with notice of their end: emptied before it, room elsewhere first."""

from __future__ import annotations

import pytest

from tenuto.deployments.control.live import LiveSystem
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.serve.deployment import Deployment
from tenuto.placement.cluster import START_S
from tests.deployments.control.desk import PlanningDesk
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.plans import gpu, make_plan

ONE = make_plan({"n0/0/a": (100.0, ["a"])})  # made for 50 r/s, carries 600
BOTH = make_plan({"n0/0/a": (100.0, ["a"]), "n1/0/a": (100.0, ["a"])})


def used(desk: PlanningDesk) -> set[str]:
    return set(desk.controller.plan.used_gpus)


def present(desk: PlanningDesk) -> set[str]:
    """Return the models that the plan has on GPUs that are there."""
    there = {gpu.id for gpu in desk.gpus}
    return {replica.name for g in desk.controller.plan.gpulets if g.gpu in there for replica in g.models}


def test_what_a_leaving_node_serves_starts_elsewhere_before_it_ends_there() -> None:
    desk = PlanningDesk(ONE, [gpu("n0/0"), gpu("n1/0")], {"when": {"underused": None}})
    desk.look(5)
    desk.leaving = {"n0/0": desk.now_s + 21.0}
    desk.look()
    assert "n0 ends in 20 s" in desk.text("change")
    held = {gpulet.gpu for apply in desk.applied for gpulet in apply.plan.gpulets}
    assert held == {"n0/0", "n1/0"}  # both, then the new one alone
    desk.look(5)
    assert used(desk) == {"n1/0"}
    assert desk.text("changed").startswith("n0 ends in 20 s")
    desk.gpus = desk.gpus[1:]
    desk.leaving = {}
    desk.look(30)
    assert not {"lost", "stuck"} & set(desk.kinds())
    desk.gpus = (*desk.gpus, gpu("n0/0"))
    desk.rates["a"] = 1100.0
    desk.look(60)
    assert used(desk) == {"n0/0", "n1/0"}  # it came back
    assert desk.controller.plan.drained == ()


def test_without_room_only_what_is_served_elsewhere_ends_before_the_node() -> None:
    desk = PlanningDesk(BOTH, [gpu("n0/0"), gpu("n1/0")], {"when": {"underused": None}})
    desk.rates["a"] = 1100.0
    desk.look(30)
    desk.leaving = {"n0/0": 0.0}
    desk.look(10)
    assert used(desk) == {"n1/0"}
    assert "n0 ends soon" in desk.text("changed")
    alone = PlanningDesk(ONE, [gpu("n0/0")], {"when": {"underused": None}})
    alone.leaving = {"n0/0": 30.0}
    alone.look(10)
    assert used(alone) == {"n0/0"}  # it serves as long as it can
    alone.gpus = (*alone.gpus, gpu("n5/0"))
    alone.look(20)
    assert used(alone) == {"n5/0"}


@pytest.mark.parametrize("leaves", ["with notice", "at once"])
@pytest.mark.parametrize("place", [0, 1])
def test_where_room_lacks_the_most_valuable_model_takes_the_place_of_others(place: int, leaves: str) -> None:
    """Of three models on as many GPUs the one whose GPU leaves takes the place of the one that is worth least."""
    held = {f"n{i}/0/a": (100.0, [name]) for i, name in enumerate("abc")}
    for heaviest in ("abc"[place], "c"):
        plan = make_plan(held, weights={"b": 2.0, "c": 3.0, heaviest: 10.0})
        desk = PlanningDesk(plan, [gpu(f"n{i}/0") for i in range(3)], {"when": {"underused": None}})
        desk.rates |= dict.fromkeys("abc", 800.0)
        desk.look(30)
        if leaves == "with notice":
            desk.leaving = {f"n{place}/0": desk.now_s + 40.0}
            desk.look(40)
        desk.gpus, desk.leaving = tuple(g for g in desk.gpus if g.id != f"n{place}/0"), {}
        desk.look(20)
        weights = {spec.name: spec.weight for spec in plan.models}
        rates, promised = {spec.name: spec.rate_rps for spec in desk.controller.plan.models}, desk.controller.plan
        parts = {name: promised.expected.models[name].goodput_rps / rates[name] for name in present(desk)}
        *served, least = sorted("abc", key=lambda name: -weights[name])
        assert min(parts[name] for name in served) > 0.7 > parts.get(least, 0.0)
        desk.lost |= {least: 1.0 - parts.get(least, 0.0)}
        desk.look(60)
        assert present(desk) >= set(served)
        assert "roll back" not in desk.kinds()


def test_nothing_goes_back_to_a_node_that_ends_though_less_is_served_without_it() -> None:
    desk = PlanningDesk(BOTH, [gpu("n0/0"), gpu("n1/0")], {"when": {"underused": None}})
    desk.rates["a"] = 1100.0
    desk.look(30)
    desk.leaving = {"n0/0": desk.now_s + 30.0}
    desk.look(5)
    assert used(desk) == {"n1/0"}
    desk.lost["a"] = 0.5
    desk.look(20)
    assert used(desk) == {"n1/0"}
    assert "roll back" not in desk.kinds()


def test_what_stays_is_not_moved_to_another_type_of_gpu() -> None:
    gpus = (BOTH.gpus[0], BOTH.gpus[1].model_copy(update={"type": "t4"}))
    plan = make_plan({"n0/0/a": (100.0, ["a"]), "n1/0/a": (100.0, ["b"])}).model_copy(update={"gpus": gpus})
    bounds = {"v100": {"max": 1, "price_per_hour": 0.05}, "t4": {"max": 2, "price_per_hour": 0.1}}
    desk = PlanningDesk(
        plan, [gpu("n0/0"), gpu("n1/0", kind="t4")], {"gpus": bounds, "policy": {"name": "gpulet"}, "interval_s": 2.0}
    )
    desk.rates |= {"a": 500.0, "b": 500.0}
    desk.look(60)
    staying = desk.controller.plan.on_gpu("n0/0")
    desk.leaving = {"n1/0": desk.now_s + 20.0}
    desk.gpus = (*desk.gpus, gpu("n2/0", kind="t4"))
    desk.look(30)
    assert used(desk) == {"n0/0", "n2/0"}
    assert [g.id for g in desk.controller.plan.on_gpu("n0/0")] == [g.id for g in staying]


def test_a_grown_cluster_asks_for_what_takes_a_leaving_nodes_place() -> None:
    desk = PlanningDesk(ONE, [gpu("n0/0")], {"gpus": {"v100": {"max": 2}}})
    desk.leaving = {"n0/0": 120.0}
    desk.look(10)
    assert (desk.wanted[-1].by_type, desk.wanted[-1].more) == ({"v100": 1}, {"v100": 1})


def test_a_node_with_time_left_serves_until_there_is_room_or_no_time() -> None:
    for comes in (True, False):
        desk = PlanningDesk(BOTH, [gpu("n0/0"), gpu("n1/0")], {"gpus": {"v100": {"max": 4}}})
        desk.rates["a"] = 1100.0
        desk.look(30)
        desk.leaving = {"n0/0": desk.now_s + 600.0}
        desk.look(60)
        assert used(desk) == {"n0/0", "n1/0"}
        assert desk.wanted[-1].more == {"v100": 1}
        assert "until there is room, or no time" in desk.text("kept")
        if comes:
            desk.gpus = (*desk.gpus, gpu("n2/0"))
        desk.look(60)
        assert used(desk) == ({"n1/0", "n2/0"} if comes else {"n0/0", "n1/0"})
        desk.look(450)
        assert used(desk) == ({"n1/0", "n2/0"} if comes else {"n1/0"})


def test_a_short_notice_is_waited_out_where_a_gpu_may_come() -> None:
    for grows in (True, False):
        desk = PlanningDesk(BOTH, [gpu("n0/0"), gpu("n1/0")], {"gpus": {"v100": {"max": 4}} if grows else {}})
        desk.rates["a"] = 1100.0
        desk.look(30)
        desk.leaving = {"n0/0": desk.now_s + 1.5 * (START_S + ControlSettings().interval_s)}
        desk.look(3)
        assert used(desk) == ({"n0/0", "n1/0"} if grows else {"n1/0"})
        desk.gpus = (*desk.gpus, gpu("n2/0"))
        desk.look(3)
        assert used(desk) == {"n1/0", "n2/0"} or not grows


@pytest.mark.parametrize("mode", ["advise", "off"])
def test_who_does_not_act_changes_nothing(mode: str) -> None:
    desk = PlanningDesk(BOTH, [gpu("n0/0"), gpu("n1/0")], {"mode": mode})
    desk.leaving = {"n0/0": 30.0}
    desk.look(10)
    assert not desk.applied


def test_the_gpus_of_nodes_that_ray_drains_are_leaving() -> None:
    deployment = Deployment(plan=ONE)
    serve = FakeServe(deployment)
    gpus = [gpu("n0/0"), gpu("n1/0").model_copy(update={"address": "10.0.0.1"})]
    gpus += [gpu("n2/0").model_copy(update={"label": "10.0.0.2"})]
    system = LiveSystem(deployment, serve, serve.status, tuple(gpus))
    serve.leaving = {"10.0.0.2": 7.0, "rack=b7": 7.0}
    seen = system.look(1.0)
    assert seen is not None
    assert seen.leaving == {"n2/0": 7.0}
