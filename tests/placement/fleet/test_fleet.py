"""A workload over cells: the file, the spread, the plans, and the step with what is true of it later."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tenuto.documents import parse_document
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, PolicyUsed, Workload, load_policy, solve
from tenuto.placement.demand import HEADROOM, fluid_of, group_models, room_of
from tenuto.placement.fleet.fleet_file import FleetFile, nodes_of
from tenuto.placement.fleet.fleet_plan import CellState, FleetPlan, FleetTask, plan_fleet
from tenuto.placement.fleet.step import FleetStep, SeenCell, check_step, fingerprint, make_step
from tenuto.placement.fleet.traffic_spread import MOST_CELLS_OF_MODEL, CellRoom, Spread, after_loss, spread_traffic
from tenuto.placement.plan_edits import drained
from tenuto.placement.planner import PlanTask, plan_on_fewest
from tenuto.placement.planner.gpu_matching import gpus_of
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped


def cluster(gpus: int = 4, kind: str = "v100", **node: Any) -> Cluster:
    return Cluster.model_validate({"nodes": [{"name": "n0", "gpus": [{"type": kind, "count": gpus}], **node}]})


def cells(*names: str, gpus: int = 4) -> list[CellState]:
    return [CellState(name, cluster(gpus)) for name in names]


def model(name: str, rate_rps: float, **more: Any) -> dict[str, Any]:
    """A model that needs about a GPU for 450 requests per second."""
    return {"name": name, "rate_rps": rate_rps, "slo_ms": 200, "latency": {"alpha_ms": 2, "beta_ms": 6}, **more}


def workload(*models: dict[str, Any], **more: Any) -> Workload:
    return Workload.model_validate({"models": models, **more})


def planned(asked: Workload, states: list[CellState], **more: Any) -> FleetPlan:
    return plan_fleet(FleetTask(asked, states, PolicyUsed(name="symphony"), Profiles([]), **more))


def running(states: list[CellState], plans: dict[str, Plan]) -> list[CellState]:
    """The cells with the plans that run there."""
    return [
        replace(s, rates_rps={m.name: m.rate_rps for m in plans[s.name].models}, running=partial(plans.get, s.name))
        if s.name in plans
        else s
        for s in states
    ]


def promised(plan: Plan, name: str) -> float:
    """The requests per second of a model that a plan promises; near the limit of its GPUs it keeps 1 % for chance."""
    expected = plan.expected.models.get(name)
    return 0.0 if expected is None else expected.goodput_rps


# --- the file ---------------------------------------------------------------------------------------------------------


def fleet_data(**second: Any) -> dict[str, Any]:
    node = {"name": "n0", "gpus": [{"type": "v100", "uuids": ["GPU-1"]}], "rack": "r1", "address": "10.0.0.1"}
    other = {"name": "n0", "gpus": [{"type": "v100", "uuids": ["GPU-2"]}], "rack": "r2", "address": "10.0.0.2"}
    east = {"name": "east", "url": "http://10.0.0.1:8000", "nodes": [node]}
    west = {"name": "west", "url": "http://10.0.0.2:8000", "nodes": [other | second.pop("node", {})]}
    return {"cells": [east, west | second]}


def test_nodes_of_different_cells_may_have_one_name() -> None:
    fleet = parse_document(FleetFile, fleet_data())
    assert [cell.cluster.gpus[0].id for cell in fleet.cells] == ["n0/0", "n0/0"]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"name": "east"}, "name east"),
        ({"url": "http://10.0.0.1:8000"}, "url http://10.0.0.1:8000"),
        ({"operator_url": "http://10.0.0.1:8000"}, "url http://10.0.0.1:8000"),
        ({"node": {"rack": "r1"}}, "rack r1"),
        ({"node": {"address": "10.0.0.1"}}, "address 10.0.0.1"),
        ({"node": {"gpus": [{"type": "v100", "uuids": ["GPU-1"]}]}}, "GPU GPU-1"),
    ],
)
def test_cells_that_overlap_are_refused(second: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{words} is in cell east too: cells overlap"):
        parse_document(FleetFile, fleet_data(**second))


def test_unknown_keys_and_empty_fleets_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown key.*Known keys"):
        parse_document(FleetFile, fleet_data(urls=[]))
    with pytest.raises(InvalidInputError, match="Give at least one entry"):
        parse_document(FleetFile, {"cells": []})


def test_the_gpus_of_a_plan_become_nodes_of_the_file() -> None:
    node = {"name": "n1", "gpus": [{"type": "v100", "count": 2}, {"type": "t4", "uuids": ["GPU-7"]}], "rack": "r"}
    cut = {"type": "a100", "mig": "fixed", "instances": [{"profile": "3g.20gb", "start": 0}]}
    given = Cluster.model_validate({"nodes": [node, {"name": "n2", "gpus": [cut], "label": "pool=a"}]})
    plan = solve(load_policy("ffd"), workload(model("a", 10.0)), given, Profiles([]))
    again = Cluster(nodes=nodes_of(gpus_of(plan)))
    assert [(g.id, g.type, g.uuid, g.rack, g.label) for g in again.gpus] == [
        (g.id, g.type, g.uuid, g.rack, g.label) for g in given.gpus
    ]
    assert again.nodes[0].gpus[0].count == 2
    with pytest.raises(ValueError, match="are numbered 1, 2"):
        nodes_of(gpus_of(plan)[1:3])


def test_cells_with_spot_gpus_do_not_overlap_and_nodes_of_two_kinds_keep_theirs() -> None:
    spot = {"type": "v100", "price_per_hour": 1.0, "spot": {"life_hours": 10.0}}
    for groups in ([spot], [spot, {"type": "t4"}], [{"type": "t4"}, spot]):
        node = {"name": "n0", "gpus": groups}
        given = Cluster.model_validate({"nodes": [node, {**node, "name": "n1", "rack": "r"}]})
        data = {"nodes": [node.model_dump() for node in nodes_of(given.gpus)]}
        assert Cluster.model_validate(data).gpus == given.gpus
        plan = solve(load_policy("ffd"), workload(model("a", 10.0)), given, Profiles([]))
        nodes = [node.model_dump() for node in nodes_of(gpus_of(plan)[: len(groups)])]
        parse_document(FleetFile, {"cells": [{"name": name, "nodes": nodes} for name in ("east", "west")]})


# --- the spread -------------------------------------------------------------------------------------------------------


def test_a_model_is_whole_in_one_cell_where_it_fits_and_large_ones_are_in_several() -> None:
    done = planned(workload(model("small", 200.0), model("large", 2200.0)), cells("c1", "c2"))
    assert len(done.traffic["small"]) == 1
    assert len(done.traffic["large"]) == 2
    assert all(abs(sum(shares.values()) - 1.0) < 1e-6 for shares in done.traffic.values())
    assert all(not plan.unserved_reasons for plan in done.plans.values())
    rates = [plan.model("large").rate_rps for plan in done.plans.values()]
    assert 2200.0 / HEADROOM <= sum(rates) <= 2200.001


def test_what_has_no_room_anywhere_is_said_and_nobody_else_suffers() -> None:
    done = planned(workload(model("a", 300.0), model("b", 6000.0)), cells("c1", "c2"))
    assert done.spread.lacking.keys() == {"b"}
    assert (done.spread.moved, done.spread.givers) == (0.0, frozenset())  # nothing ran before
    assert sum(promised(plan, "a") for plan in done.plans.values()) >= 0.95 * 300.0


def test_what_has_room_by_the_margin_alone_is_not_left_out() -> None:
    done = planned(workload(model("a", 1000.0), model("b", 2300.0)), cells("c1", "c2"))
    assert not done.spread.lacking
    assert sum(promised(plan, "b") for plan in done.plans.values()) >= 0.95 * 2300.0
    assert all(sum(used.values()) <= 4.0 + 1e-9 for used in done.spread.used.values())


def test_models_of_an_application_stay_together() -> None:
    stages = [{"model": "s1", "latency": {"alpha_ms": 1, "beta_ms": 3}}]
    stages.append({"model": "s2", "latency": {"alpha_ms": 1, "beta_ms": 3}, "after": ["s1"]})
    app = {"name": "app", "rate_rps": 100.0, "slo_ms": 200, "stages": stages}
    done = planned(workload(model("a", 400.0), applications=[app]), cells("c1", "c2", "c3"))
    (cell,) = done.traffic["app"]
    names = {spec.name for spec in done.plans[cell].models}
    assert names >= {"app.s1", "app.s2"}
    assert done.plans[cell].applications[0].rate_rps == pytest.approx(100.0)


@pytest.mark.parametrize("survive", [1.0, 0.5])
def test_what_survives_a_cell_has_that_much_planned_in_the_others(survive: float) -> None:
    asked = workload(model("a", 600.0, spread="cell", survive=survive), model("b", 300.0))
    done = planned(asked, cells("c1", "c2", "c3"))
    rates = {name: done.plans[name].model("a").rate_rps for name in done.traffic["a"]}
    assert len(rates) >= 2
    for lost in rates:
        assert sum(rate for name, rate in rates.items() if name != lost) >= survive * 600.0 * 0.999
    (left,) = after_loss({"a": done.traffic["a"]}, next(iter(rates))).values()
    assert sum(left.values()) == pytest.approx(1.0)


def test_a_spread_over_cells_needs_a_second_cell_and_more_than_a_cluster() -> None:
    asked = workload(model("a", 100.0, spread="cell", survive=1.0, only_on=["c1"]))
    done = planned(asked, cells("c1", "c2"))
    assert "needs a second cell" in done.spread.unmet["a"]
    with pytest.raises(InvalidInputError, match="one cell only, and nothing survives its loss"):
        solve(load_policy("symphony"), workload(model("a", 100.0, spread="cell", survive=1.0)), cluster(), Profiles([]))


def test_a_cell_with_one_rack_left_serves_on_and_says_what_would_not_survive() -> None:
    asked = workload(model("a", 300, spread="rack", survive=1.0), model("b", 300))
    nodes = [{"name": f"n{n}", "rack": f"r{n}", "gpus": [{"type": "v100", "count": 2}]} for n in range(2)]
    both = [CellState("east", Cluster.model_validate({"nodes": nodes}))]
    first = planned(asked, both)
    assert not first.spread.unmet
    left = [CellState("east", Cluster.model_validate({"nodes": nodes[:1]}))]
    after = planned(asked, running(left, dict(first.plans)))
    assert after.spread.unmet == {"a": "east has no second rack that it may be on"}
    assert {"a", "b"} == {name for name in ("a", "b") if after.plans["east"].hosts_of(name)}
    again = planned(asked, running(left, {**first.plans, **after.plans}))
    assert again.spread.unmet
    assert not again.plans


def racks(name: str, *gpus: int) -> CellState:
    """A cell of nodes that are racks."""
    nodes = [{"name": f"n{n}", "gpus": [{"type": "v100", "count": count}]} for n, count in enumerate(gpus)]
    return CellState(name, Cluster.model_validate({"nodes": nodes}))


def surviving(*rates_rps: float) -> Workload:
    """Models that survive the loss of a rack."""
    return workload(*(model(f"m{n}", rate, spread="rack", survive=1.0) for n, rate in enumerate(rates_rps)))


@pytest.mark.parametrize("rate_rps", [1900.0, 2100.0, 2300.0])
def test_what_cannot_survive_in_full_survives_as_far_as_it_can(rate_rps: float) -> None:
    states = [racks("c0", 4, 4, 4)]
    first = planned(surviving(1.5 * rate_rps), states)
    plan = planned(surviving(rate_rps), running([racks("c0", 4, 4)], dict(first.plans))).plans["c0"]
    assert plan.unserved_reasons.keys() == {"m0"}
    assert len({*plan.used_gpus}) == 8  # though fewer serve all while nothing is lost


def test_a_model_lies_where_it_may_by_cell_or_rack() -> None:
    states = [CellState("c1", cluster(rack="r1")), CellState("c2", cluster(rack="r2"))]
    done = planned(workload(model("a", 100.0, only_on=["r2"]), model("b", 100.0, keep_off=["c2"])), states)
    assert (done.traffic["a"].keys(), done.traffic["b"].keys()) == ({"c2"}, {"c1"})
    assert done.plans["c2"].model("a").only_on == ("r2",)
    with pytest.raises(InvalidInputError, match=r"models\.0\.only_on: 'c9': no such place"):
        planned(workload(model("a", 100.0, only_on=["c9"])), states)


def test_a_model_that_no_cell_can_hold_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInputError, match="no GPU of the fleet serves slow within its SLO"):
        planned(workload(model("slow", 10.0) | {"slo_ms": 5}), cells("c1", "c2"))


def test_scarce_gpus_are_worth_more_than_their_price() -> None:
    joint = Cluster.model_validate(
        {"nodes": [{"name": "n0", "gpus": [{"type": "t4", "count": 1}, {"type": "v100", "count": 9}]}]}
    )
    groups = group_models(workload(model("a", 2000.0)), joint, Profiles([]))
    fluid = fluid_of(groups, room_of(joint))
    worth = {kind: value for (kind, _), value in fluid.worth.items()}
    prices = joint.prices
    assert worth["t4"] > prices["t4"]
    assert worth["v100"] == pytest.approx(prices["v100"])


def test_a_model_of_several_gpus_of_a_node_has_a_place_in_a_fleet_whose_nodes_have_them() -> None:
    tokens = {"prompt_tokens": 400, "output_tokens": 100}
    asked = {"name": "llama-65b", "rate_rps": 4.0, "slo": {"ttft_ms": 2000, "tpot_ms": 200}, "generates": tokens}
    profiles = Profiles([load_shipped("muxserve-a100")])
    policy = PolicyUsed(name="tenuto")
    large = [CellState(name, cluster(8, "a100-80gb")) for name in ("east", "west")]
    done = plan_fleet(FleetTask(workload(asked, mps="off"), large, policy, profiles))
    assert done.spread.lacking == {}
    assert sum(promised(plan, "llama-65b") for plan in done.plans.values()) == pytest.approx(4.0, rel=0.02)
    # Four nodes of two GPUs are no node of eight, also where cells call their nodes alike.
    small = [CellState(name, cluster(2, "a100-80gb")) for name in ("c1", "c2", "c3", "c4")]
    with pytest.raises(InvalidInputError, match="no cell can hold it"):
        plan_fleet(FleetTask(workload(asked, mps="off"), small, policy, profiles))


# --- never from scratch -----------------------------------------------------------------------------------------------


def drawn() -> tuple[Workload, list[CellState], FleetPlan]:
    asked = workload(*(model(f"m{index}", 150.0 + 40.0 * index) for index in range(8)))
    states = cells("c1", "c2", "c3")
    return asked, states, planned(asked, states)


def test_what_is_in_its_band_is_not_planned_again() -> None:
    asked, states, first = drawn()
    again = planned(asked.scaled(1.05), running(states, dict(first.plans)))
    assert again.plans == {}
    assert again.spread.moved == 0.0
    assert again.before == first.plans


def test_what_only_a_trial_promises_stands_no_more_load() -> None:
    states, asked = cells("c0", gpus=12), workload(model("a", 1900.0), model("b", 850.0))
    task = FleetTask(asked.scaled(HEADROOM - 1e-6), states, PolicyUsed(name="tenuto"), Profiles([]))
    tried = plan_on_fewest(PlanTask(load_policy("tenuto"), asked, states[0].cluster, task.profiles))
    roomy = plan_fleet(replace(task, workload=asked)).plans["c0"]
    assert tried.expected.gpus_used < roomy.expected.gpus_used  # as many as the formulas ask for
    for plan, replanned in ((tried, {"c0"}), (roomy, set())):
        assert plan_fleet(replace(task, cells=running(states, {"c0": plan}))).plans.keys() == replanned


@pytest.mark.parametrize(("gpus", "is_tried"), [(12, True), (48, False)])
def test_a_large_cell_is_not_tried_though_it_needs_few_gpus(gpus: int, is_tried: bool) -> None:
    asked = workload(model("a", 1700.0), model("b", 800.0))
    plan = plan_fleet(FleetTask(asked, cells("c0", gpus=gpus), PolicyUsed(name="tenuto"), Profiles([]))).plans["c0"]
    assert plan.expected.gpus_used < 12
    assert (plan.believed is not None) == is_tried


def test_only_the_cell_of_a_model_that_grows_is_planned_again_and_keeps_its_gpulets() -> None:
    asked, states, first = drawn()
    (cell,) = first.traffic["m0"]
    models = tuple(spec.with_rate_scaled(1.5) if spec.name == "m0" else spec for spec in asked.models)
    again = planned(asked.model_copy(update={"models": models}), running(states, dict(first.plans)))
    assert again.plans.keys() == {cell}
    assert again.traffic == first.traffic
    before, after = ({g.id for g in plan.gpulets} for plan in (first.plans[cell], again.plans[cell]))
    assert before <= after
    assert all(promised(again.plans[cell], s.name) >= 0.98 * s.rate_rps for s in again.plans[cell].models)


def test_what_few_requests_of_a_costly_model_no_longer_need_ends() -> None:
    """Requests of a cheap model are many, and hide by their number what the GPUs are for."""
    costly = model("costly", 80.0) | {"slo_ms": 2000, "latency": {"alpha_ms": 40, "beta_ms": 100}}
    states, asked = cells("c0", gpus=8), workload(costly, model("cheap", 800.0))
    first = planned(asked, states).plans["c0"]
    models = tuple(s.with_rate_scaled(0.3) if s.name == "costly" else s for s in asked.models)
    less = asked.model_copy(update={"models": models})
    assert less.rate_rps > asked.rate_rps / HEADROOM
    again = planned(less, running(states, {"c0": first})).plans["c0"]
    assert again.expected.gpus_used < first.expected.gpus_used
    assert all(promised(again, spec.name) >= 0.98 * spec.rate_rps for spec in models)


def test_another_slo_is_planned_though_no_rate_changed() -> None:
    asked, states, first = drawn()
    models = tuple(spec.model_copy(update={"slo_ms": 150.0}) if spec.name == "m3" else spec for spec in asked.models)
    again = planned(asked.model_copy(update={"models": models}), running(states, dict(first.plans)))
    assert again.plans.keys() == set(first.traffic["m3"])


def test_a_cell_that_grows_too_full_gives_and_none_both_gives_and_takes() -> None:
    asked, states, first = drawn()
    (full,) = first.traffic["m7"]
    inside = {name for name, shares in first.traffic.items() if full in shares}
    models = tuple(spec.with_rate_scaled(2.2) if spec.name in inside else spec for spec in asked.models)
    grown = asked.model_copy(update={"models": models})
    again = planned(grown, running(states, dict(first.plans)))
    assert again.spread.moved > 0.0
    assert again.spread.givers == {full}
    taken = {cell for name, shares in again.traffic.items() for cell in shares if cell not in first.traffic[name]}
    assert taken
    assert full not in taken
    bounded = planned(grown, running(states, dict(first.plans)), at_most=0.0)
    assert bounded.spread.moved == 0.0
    assert bounded.traffic == first.traffic


def test_a_cell_that_is_gone_leaves_its_models_to_the_others() -> None:
    asked, states, first = drawn()
    left = running(states[:2], dict(first.plans))
    again = planned(asked.scaled(0.8), left)
    assert {cell for shares in again.traffic.values() for cell in shares} == {"c1", "c2"}
    stayed = [name for name, shares in first.traffic.items() if "c3" not in shares]
    assert all(again.traffic[name] == first.traffic[name] for name in stayed)


def spread_of(rates: dict[str, float], then: dict[str, dict[str, float]], idle: dict[str, float]) -> Spread:
    """The spread over cells of four GPUs with so many idle, where models ran with these rates by cell."""
    states = cells(*idle)
    joint = Cluster.of(gpu for state in states for gpu in state.cluster.gpus)
    groups = group_models(workload(*(model(name, rate) for name, rate in rates.items())), joint, Profiles([]))
    kind = next(iter(room_of(joint)))
    rooms = [CellRoom.of(s.name, s.cluster, room_of(s.cluster), {kind: idle[s.name]}) for s in states]
    return spread_traffic(groups, rooms, fluid_of(groups, room_of(joint)), then)


def test_what_has_to_move_goes_to_one_cell_with_idle_gpus_and_not_where_the_plan_leaves_none() -> None:
    small = {f"s{index}": 60.0 for index in range(5)}
    then = {"big": {"full": 900.0}, **{name: {"full": rate} for name, rate in small.items()}, "x": {"busy": 1100.0}}
    spread = spread_of({"big": 1450.0, "x": 1100.0, **small}, then, {"full": 0, "busy": 0, "c1": 4, "c2": 4})
    takers = {cell for name in small for cell in spread.traffic[name]} - {"full"}
    assert len(takers) == 1
    assert takers <= {"c1", "c2"}  # by the fluid, "busy" would have room as well
    shrunk = {**then, "x": {"busy": 1800.0}}  # what no longer runs there leaves room
    after = spread_of({"big": 1450.0, "x": 400.0, **small}, shrunk, {"full": 0, "busy": 0})
    assert {cell for name in small for cell in after.traffic[name]} == {"full", "busy"}


def test_a_model_is_not_cut_into_parts_of_less_than_a_gpu_where_one_cell_has_room_for_the_rest() -> None:
    filled = {f"f{index}": 1300.0 for index in range(4)}  # leave less than a GPU each
    then = {name: {f"c{index}": rate} for index, (name, rate) in enumerate(filled.items())}
    idle = {f"c{index}": 0.9 for index in range(4)} | {"e": 4.0}
    spread = spread_of({**filled, "new": 1550.0}, then, idle)
    assert spread.traffic["new"].keys() == {"e"}


@pytest.mark.parametrize("seed", [1, 4, 7])
def test_traffic_goes_only_where_a_plan_has_the_model_for_about_that_rate(seed: int) -> None:
    rng = random.Random(f"full cells {seed}")
    states, rates = cells(*(f"c{n}" for n in range(4))), {f"m{n}": rng.uniform(100.0, 900.0) for n in range(20)}
    part = 16 * 450.0 * rng.uniform(0.9, 1.05) / sum(rates.values())  # of all GPUs: every spread leaves a cell short
    done = planned(workload(*(model(name, part * rate) for name, rate in rates.items())), states)
    for name, shares in done.traffic.items():
        for cell, share in shares.items():
            then = {spec.name: spec.rate_rps for spec in done.plans[cell].models}
            assert share * part * rates[name] <= HEADROOM * then[name] * (1.0 + 1e-6)


def test_a_model_that_one_cell_alone_can_hold_stays_and_one_with_a_choice_moves() -> None:
    states = [CellState("fast", cluster(2, "a100")), CellState("slow", cluster(8, "t4"))]
    batches_ms = {"a100": {1: 4, 32: 35}, "t4": {1: 16, 32: 140}}
    profiles = Profiles(
        Profile.model_validate(
            {
                "name": f"p-{kind}",
                "source": "made up",
                "gpu_type": kind,
                "models": {"net": {"points": [{"batch_size": b, "latency_ms": each} for b, each in ms.items()]}},
            }
        )
        for kind, ms in batches_ms.items()
    )

    def asked(factor: float) -> Workload:
        small = {"name": "small", "profile": "net", "rate_rps": factor * 200.0, "slo_ms": 12}  # none in time on a T4
        large = {"name": "large", "profile": "net", "rate_rps": factor * 900.0, "slo_ms": 200}
        return workload(large, small)

    def plan(factor: float, at: list[CellState]) -> FleetPlan:
        return plan_fleet(FleetTask(asked(factor), at, PolicyUsed(name="symphony"), profiles))

    first = plan(1.0, states[:1])
    grown = plan(1.8, running(states, dict(first.plans)))
    assert grown.traffic["small"] == {"fast": 1.0}
    assert "slow" in grown.traffic["large"]
    assert not grown.spread.lacking


def test_models_lie_on_the_kinds_of_the_fluid_though_a_dearer_cell_has_more_room() -> None:
    states = [CellState("dear", cluster(20)), CellState("c1", cluster(4, "t4")), CellState("c2", cluster(4, "t4"))]
    asked = workload(model("a", 1000.0), model("b", 1000.0), model("c", 900.0))
    joint = Cluster.of(gpu for state in states for gpu in state.cluster.gpus)
    groups = group_models(asked, joint, Profiles([]))  # a GPU of either type serves as much
    fluid = fluid_of(groups, {kind: count / HEADROOM for kind, count in room_of(joint).items()})
    rooms = [CellRoom.of(state.name, state.cluster, room_of(state.cluster)) for state in states]
    spread = spread_traffic(groups, rooms, fluid)
    assert {cell for shares in spread.traffic.values() for cell in shares} == {"c1", "c2"}
    assert sum(spread.traffic["c"].values()) == pytest.approx(1.0)
    assert spread.traffic["c"].keys() == {"c1", "c2"}  # it is in parts before it is where a GPU costs six times as much


def test_what_is_to_survive_a_cell_keeps_its_rate_and_others_share_what_is_left() -> None:
    asked = workload(model("a", 300.0, spread="cell", survive=1.0), model("b", 2400.0), model("c", 600.0))
    states = cells("c0", "c1")
    first = planned(asked, states)
    after = planned(asked, running(states, dict(first.plans))[:1])
    assert after.traffic["a"] == {"c0": pytest.approx(1.0)}
    assert set(after.spread.lacking) <= {"b", "c"}
    assert sum(after.spread.used["c0"].values()) == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_a_drained_node_is_as_one_that_is_left_out(seed: int) -> None:
    rng = random.Random(f"drained {seed}")
    rates = [rng.uniform(100.0, 900.0) for _ in range(8)]
    part = 450.0 * rng.uniform(7.0, 10.0) / sum(rates)  # about what nine GPUs serve, of which one is drained
    asked = workload(*(model(f"m{n}", part * rate) for n, rate in enumerate(rates)))
    states = [racks("c0", 2, 1), racks("c1", 2, 1), racks("c2", 2, 1)]
    left = [racks("c0", 2), *states[1:]]
    first = dict(planned(asked.scaled(0.6), left).plans)
    aside = {**first, "c0": drained(first["c0"], states[0].cluster, ["n1"])}
    one, other = planned(asked, running(left, first)), planned(asked, running(states, aside))
    assert (other.spread, other.traffic) == (one.spread, one.traffic)
    assert {name: plan.gpulets for name, plan in other.plans.items()} == {n: p.gpulets for n, p in one.plans.items()}


def test_a_model_that_outgrows_the_only_cell_keeps_all_of_that_cell() -> None:
    states = cells("c0")
    first = planned(workload(model("a", 900.0)), states)
    after = planned(workload(model("a", 9000.0)), running(states, dict(first.plans)))
    assert sum(after.spread.used["c0"].values()) == pytest.approx(4.0, rel=0.01)
    assert after.traffic["a"]["c0"] == pytest.approx(1.0 - after.spread.lacking["a"])
    assert promised(after.plans["c0"], "a") > promised(first.plans["c0"], "a")


def test_plans_in_processes_of_their_own_are_the_same() -> None:
    asked, states, first = drawn()
    assert planned(asked, states, workers=2) == first


def test_a_model_is_in_no_more_cells_than_a_route_has_backends() -> None:
    states = cells(*(f"c{index}" for index in range(20)), gpus=1)
    done = planned(workload(model("a", 9000.0)), states)
    assert len(done.traffic["a"]) == MOST_CELLS_OF_MODEL
    assert done.spread.lacking


# --- the step ---------------------------------------------------------------------------------------------------------


def a_step() -> tuple[FleetStep, dict[str, str], dict[str, str]]:
    """A step in which c1 gives, and c2 takes; what runs in all cells before, and after it."""
    asked, states, first = drawn()
    (full,) = first.traffic["m7"]
    inside = {name for name, shares in first.traffic.items() if full in shares}
    models = tuple(spec.with_rate_scaled(2.2) if spec.name in inside else spec for spec in asked.models)
    again = planned(asked.model_copy(update={"models": models}), running(states, dict(first.plans)))
    before = {name: fingerprint(plan) for name, plan in first.plans.items()}
    files = {name: f"cells/{name}.yaml" for name in again.plans}
    step = make_step(again, before, files, fleet="fleet.yaml", version="1", canary=None)
    return step, before, before | {name: fingerprint(plan) for name, plan in again.plans.items()}


def seen(running: dict[str, str]) -> dict[str, SeenCell]:
    return {name: SeenCell(plan) for name, plan in running.items()}


def test_a_step_goes_room_first_then_traffic_then_what_is_no_longer_needed() -> None:
    step, now, after = a_step()
    phases = [change.phase for change in step.changes]
    assert phases == sorted(phases, key=("room", "release").index)
    assert {*phases} == {"room", "release"}
    todo = []
    for change in [c for c in step.changes if c.phase == "room"]:
        todo.append(check_step(step, seen(now), "").todo)
        now[change.cell] = after[change.cell]
    assert all(text.startswith("deploy cells/") for text in todo)
    assert check_step(step, seen(now), "").todo == "give the proxies the new weights"
    last = step.changes[-1]
    assert check_step(step, seen(now), step.id).todo == f"deploy {last.file} to {last.cell}"
    done = check_step(step, seen(after), step.id)
    assert (done.todo, done.problems) == ("", ())


def test_once_every_change_was_carried_out_nothing_is_to_do() -> None:
    step, _, after = a_step()
    same = step.changes[0].model_copy(update={"before": step.changes[0].after})
    for each in (step, step.model_copy(update={"changes": (same, *step.changes[1:])})):
        done = check_step(each, seen(after), each.id)
        assert ({*done.states.values()}, done.todo, done.problems) == ({"done"}, "", ())
    _, _, first = drawn()
    files = {name: f"{name}.yaml" for name in first.plans}
    runs = {name: fingerprint(plan) for name, plan in first.plans.items()}
    none = make_step(first, runs, files, fleet="f", version="1", canary="c2")
    assert (none.changes, none.others) == ((), runs)


def test_a_step_out_of_order_stale_or_beside_another_one_is_said() -> None:
    step, now, after = a_step()
    last, first = step.changes[-1].cell, step.changes[0].cell
    early = check_step(step, seen(now | {last: after[last]}), "")
    assert f"out of order: {last} gave models up before {first}" in early.problems[0]
    assert early.todo.startswith("deploy")
    assert "the proxies have the new weights before" in check_step(step, seen(now), step.id).problems[0]
    stale = check_step(step, seen(now | {first: "other"}), None)
    assert stale.states[first] == "runs another plan"
    assert stale.todo.startswith("observe the fleet and plan again")
    busy = check_step(step, seen(now) | {first: SeenCell(now[first], "it is changing: more load")}, None)
    assert busy.problems == (f"{first} is not to be changed now: it is changing: more load",)
    silent = check_step(step, seen(now) | {first: SeenCell(None)}, None)
    assert silent.states[first] == "does not answer"
    assert silent.problems == (f"{first} does not answer, so that nobody knows what runs there",)


def test_a_step_sees_that_another_step_changed_a_cell_that_it_leaves_alone() -> None:
    asked, states, first = drawn()
    models = tuple(spec.with_rate_scaled(1.5) if spec.name == "m0" else spec for spec in asked.models)
    again = planned(asked.model_copy(update={"models": models}), running(states, dict(first.plans)))
    before = {name: fingerprint(plan) for name, plan in first.plans.items()}
    step = make_step(again, before, {c: f"{c}.yaml" for c in again.plans}, fleet="f", version="1", canary=None)
    other = next(iter(step.others))
    silent = check_step(step, seen({name: plan for name, plan in before.items() if name != other}), None)
    assert silent.problems == (f"{other} does not answer, and has traffic; if it is lost, plan with --without {other}",)
    assert (
        check_step(step.model_copy(update={"idle": (other,)}), seen(before) | {other: SeenCell(None)}, None).problems
        == ()
    )
    result = check_step(step, seen(before | {other: "another"}), None)
    assert result.problems == (f"{other} runs another plan than when the step was made",)


def test_the_canary_is_first() -> None:
    _, _, first = drawn()
    before = dict.fromkeys(first.plans, "nothing")
    files = {name: f"{name}.yaml" for name in first.plans}
    step = make_step(first, before, files, fleet="f", version="1", canary="c2")
    assert [change.cell for change in step.changes] == ["c2", "c1", "c3"]
    begin = check_step(step, {}, None)  # where nothing runs yet, nothing answers
    assert ({*begin.states.values()}, begin.problems, begin.todo) == ({"to do"}, (), "deploy c2.yaml to c2")


def test_a_fingerprint_knows_what_runs_and_not_how_gpulets_are_called() -> None:
    _, _, first = drawn()
    plan = first.plans["c1"]
    renamed = plan.model_copy(update={"gpulets": tuple(g.model_copy(update={"id": f"{g.id}x"}) for g in plan.gpulets)})
    assert fingerprint(renamed) == fingerprint(plan)
    less = plan.model_copy(update={"gpulets": plan.gpulets[1:]})
    assert fingerprint(less) != fingerprint(plan)
    assert fingerprint(None) == "nothing"


def test_a_plan_on_other_terms_has_another_fingerprint_and_one_that_is_read_again_has_not() -> None:
    stages = [{"model": "s1", "latency": {"alpha_ms": 1, "beta_ms": 3}}]
    app = {"name": "app", "rate_rps": 100.0, "slo_ms": 200, "stages": stages}
    asked = workload(model("a", 400.0), applications=[app])
    plan = planned(asked, cells("c1")).plans["c1"]
    assert fingerprint(Plan.from_data(json.loads(json.dumps(plan.to_data())))) == fingerprint(plan)
    first, *others = asked.models
    urgent = asked.model_copy(update={"models": (first.model_copy(update={"priority": 1}), *others)})
    again = planned(urgent, running(cells("c1"), {"c1": plan})).plans["c1"]
    assert fingerprint(again) != fingerprint(plan)
