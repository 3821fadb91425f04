"""Nodes of several GPUs come and go as a whole."""

from __future__ import annotations

from tenuto.placement.cluster import node_of
from tests.deployments.control.desk import PlanningDesk
from tests.instruments.plans import gpu, make_plan

GPUS = [gpu("n0/0"), gpu("n0/1"), gpu("n1/0"), gpu("n1/1")]
APART = make_plan({"n0/0/a": (100.0, ["a"]), "n1/0/b": (100.0, ["b"])}, rate_rps=500.0)


def nodes(desk: PlanningDesk) -> set[str]:
    return set(map(node_of, desk.controller.plan.used_gpus))


def test_a_node_is_emptied_where_fewer_nodes_hold_all() -> None:
    desk = PlanningDesk(APART, GPUS, {"gpus": {"v100": {"max": 4, "per_node": 2}}, "change": {"cool_down_s": 0.0}})
    desk.look(120)
    assert len(nodes(desk)) == 1
    assert len(desk.controller.plan.used_gpus) == 2
    assert "emptying n" in desk.text("change").lower()
    assert desk.wanted[-1].by_type == {"v100": 2}
    changes = desk.kinds().count("change")
    desk.look(600)
    assert desk.kinds().count("change") == changes


def test_nothing_moves_where_gpus_come_one_by_one_or_a_node_does_not_hold_all() -> None:
    for gpus, per_node in ((GPUS, 1), ([GPUS[0], GPUS[2]], 2)):
        settings = {"gpus": {"v100": {"max": 4, "per_node": per_node}}}
        desk = PlanningDesk(APART, gpus, settings)
        desk.look(120)
        assert nodes(desk) == {"n0", "n1"}


def test_the_node_goes_that_costs_fewest_starts() -> None:
    held = {"n0/0/a": (100.0, ["a"]), "n0/1/b": (100.0, ["b"]), "n1/0/c": (100.0, ["c"]), "n2/0/d": (100.0, ["d"])}
    gpus = [*GPUS, gpu("n2/0"), gpu("n2/1")]
    settings = {"gpus": {"v100": {"max": 6, "per_node": 2}}, "change": {"cool_down_s": 0.0}}
    desk = PlanningDesk(make_plan(held, rate_rps=500.0), gpus, settings)
    desk.look(120)
    assert len(nodes(desk)) == 2
    assert {"n0/0", "n0/1"} <= set(desk.controller.plan.used_gpus)
