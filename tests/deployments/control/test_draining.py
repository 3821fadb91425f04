"""A node is emptied while its models are served; nothing is laid on it until it is undrained."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.control.change_preview import preview_plan
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.expectation.outlook import expected_of
from tenuto.placement.placement_constraints import is_at
from tenuto.placement.planner import plan_without_places, propose
from tenuto.placement.planner.gpu_matching import gpus_of
from tenuto.placement.planner.minimal_change import changes_of, less_by
from tenuto.placement.planner.standby import still_fitting, twins
from tenuto.profiles import Profiles
from tests.deployments.control.carried_out import change_deployment
from tests.deployments.control.desk import Desk
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.plans import gpu, make_plan, request
from tests.instruments.stores import DictStore

NOTHING = Profiles([])


def planned(rates: dict[str, float]) -> Plan:
    given = [{"name": f"n{i}", "rack": f"r{i % 2}", "gpus": [{"type": "v100", "count": 2}]} for i in range(3)]
    latency = {"alpha_ms": 0.5, "beta_ms": 3.0}
    models = [{"name": name, "rate_rps": rate, "slo_ms": 60, "latency": latency} for name, rate in rates.items()]
    asked = Workload.model_validate({"models": models})
    return solve(load_policy("gpulet"), asked, Cluster.model_validate({"nodes": given}), NOTHING)


def emptied(plan: Plan, *places: str) -> Plan:
    return plan_without_places(plan, places, NOTHING)


def held_at(plan: Plan, places: tuple[str, ...]) -> list[str]:
    gpus = {gpu.id: gpu for gpu in plan.gpus}
    return [gpulet.id for gpulet in plan.gpulets if is_at(gpus[gpulet.gpu], places)]


rates = st.dictionaries(st.sampled_from("abc"), st.sampled_from([50.0, 300.0, 1500.0]), min_size=1)
places = st.sampled_from(["n0", "n1", "n0/0", "r0"])


@given(rates, places)
def test_nothing_is_unserved_while_a_place_is_drained_and_nothing_is_there_afterwards(
    asked: dict[str, float], place: str
) -> None:
    before = planned(asked)
    after = emptied(before, place)
    assert not held_at(after, (place,))
    assert {gpu.id for gpu in after.gpus} == {gpu.id for gpu in before.gpus}

    def of(plan: Plan) -> Deployment:
        return Deployment.model_validate({"plan": plan.to_data(), "executor": "emulated"})

    serve, history = FakeServe(of(before)), History(DictStore())
    how: dict[str, Any] = {"clock": serve.clock, "sleep": serve.sleep, "ready_timeout_s": 30.0}
    assert change_deployment(of(before), of(after), serve, serve.status, history, by="drain", why="a test", **how)
    if not after.unserved:
        assert serve.unserved == []
    version = history.latest()
    assert version is not None
    assert version.deployment.plan.drained == (place,)
    assert not held_at(version.deployment.plan, (place,))


@given(rates, places, st.sampled_from([0.3, 2.0]))
def test_the_controller_plans_nothing_onto_what_is_drained_and_remembers_it(
    asked: dict[str, float], place: str, grows: float
) -> None:
    running = emptied(planned(asked), place)
    assert Memory.from_data(Memory(running, running.workload).to_data()).plan.drained == (place,)
    more = {spec.name: grows * spec.rate_rps for spec in running.models}
    found = propose(request(running, gpus_of(running), more, standby_gpus=2), NOTHING)
    gpus = {gpu.id: gpu for gpu in running.gpus}
    assert not [each for each in found.standby if is_at(gpus[each.gpulet.gpu], (place,))]
    if found.plan is not None:
        assert not held_at(found.plan, (place,))
        assert found.plan.drained == (place,)
        assert {gpu.id for gpu in found.plan.gpus} == {gpu.id for gpu in running.gpus}


def promised(plan: Plan) -> dict[str, float]:
    return {name: model.goodput_rps for name, model in expected_of(plan).models.items()}


@given(rates, places)
def test_what_is_elsewhere_stays_and_no_more_is_lost_than_with_the_place(asked: dict[str, float], place: str) -> None:
    before = planned(asked)
    gpus = {gpu.id: gpu for gpu in before.gpus}
    kept = {gpulet.id: gpulet for gpulet in before.gpulets if not is_at(gpus[gpulet.gpu], (place,))}
    after = emptied(before, place)
    there, then, now = {gpulet.id: gpulet for gpulet in after.gpulets}, before.processes(), after.processes()
    held = {name: {replica.name for replica in gpulet.models} for name, gpulet in there.items()}
    if not less_by(before, after):
        assert kept.keys() <= there.keys()
        assert all(then[name] == now[name] for name in kept)
        assert all({replica.name for replica in gpulet.models} <= held[name] for name, gpulet in kept.items())
    bare = before.model_copy(update={"gpulets": tuple(kept.values()), "unserved": ()})
    assert sum(promised(after).values()) >= sum(promised(bare).values()) * (1.0 - 1e-3)


@given(rates, places)
def test_undraining_gives_back_what_was_lost_and_moves_nothing_where_nothing_was(
    asked: dict[str, float], place: str
) -> None:
    before = planned(asked)
    after = emptied(before, place)
    again = emptied(after)
    assert again.drained == ()
    assert less_by(before, again) == {}
    if not less_by(before, after):
        assert changes_of(after, again) == 0
        assert {gpulet.id for gpulet in again.gpulets} == {gpulet.id for gpulet in after.gpulets}


def test_a_replica_that_is_not_needed_stays_while_another_place_is_drained() -> None:
    """It may be there for the very loss of a node."""
    before = make_plan({"n0/0/a": (50.0, ["m"]), "n0/1/a": (50.0, ["m"]), "n1/0/a": (50.0, ["n"])}, rate_rps=10.0)
    after = emptied(before, "n1")
    assert {"n0/0/a", "n0/1/a"} <= {gpulet.id for gpulet in after.gpulets}
    assert less_by(before, after) == {}


def test_a_model_that_is_elsewhere_is_not_given_up_for_those_of_the_place() -> None:
    """Three GPUs are full; the policy, asked anew, would serve one of the models in full and two not at all."""
    full = make_plan({"n0/0/a": (100.0, ["a"]), "n0/1/a": (100.0, ["b"]), "n1/0/a": (100.0, ["c"])}, rate_rps=600.0)
    after = emptied(full, "n1")
    assert {"a", "b"} <= {replica.name for gpulet in after.gpulets for replica in gpulet.models}
    assert set(less_by(full, after)) != set()


def test_a_gpu_that_is_lost_gets_nothing_either() -> None:
    before = planned({"a": 300.0})
    after = plan_without_places(before, ["n0"], NOTHING, lost=["n1/0", "n1/1"])
    assert {gpulet.gpu.partition("/")[0] for gpulet in after.gpulets} == {"n2"}
    assert after.drained == ("n0",)


# --- beside a controller ----------------------------------------------------------------------------------------------

QUIET = {"when": {"underused": None, "rate": None, "slow": None}}
TWO = make_plan({"n0/0/a": (100.0, ["m"]), "n1/0/a": (100.0, ["n"])}, rate_rps=300.0)
ONE = make_plan({"n0/0/a": (100.0, ["m", "n"])}, rate_rps=300.0)
ONE = ONE.model_copy(update={"gpus": TWO.gpus, "drained": ("n1",)})
THERE = (gpu("n0/0"), gpu("n1/0"))


def deployed(desk: Desk, plan: Plan, why: str) -> None:
    desk.controller.deploy(desk.now_s, plan, why, desk.gpus)
    desk.take()
    desk.look(3)


@pytest.mark.parametrize("drained", [("n1",), ()])
def test_the_controller_takes_back_what_loses_requests_but_not_a_drain(drained: tuple[str, ...]) -> None:
    desk = Desk(TWO, THERE, QUIET)
    desk.look(30)
    deployed(desk, ONE.model_copy(update={"drained": drained}), "drain n1")
    desk.lost = {"m": 0.5, "n": 0.5}
    desk.look(20)
    assert any(entry.kind == "roll back" for entry in desk.entries) == (not drained)
    assert [gpulet.id for gpulet in desk.controller.plan.gpulets] == (["n0/0/a"] if drained else ["n0/0/a", "n1/0/a"])


def test_the_controller_remembers_what_is_drained_and_asks_what_to_do_with_it_once_it_is_not() -> None:
    desk = Desk(TWO, THERE, QUIET)
    desk.look(3)
    deployed(desk, ONE, "drain n1")
    desk.restart()
    desk.gpus = THERE[:1]  # the node is switched off,
    desk.look(30)
    desk.gpus = THERE  # and comes back, drained as it was
    desk.look(30)
    assert desk.controller.plan.drained == ("n1",)
    assert desk.questions == []
    deployed(desk, ONE.model_copy(update={"drained": ()}), "undrain n1")
    assert len(desk.questions) == 1
    assert desk.questions[0].request.running.plan.drained == ()


def test_what_waits_on_standby_leaves_a_place_that_is_drained() -> None:
    asked = planned({"a": 300.0})
    (used,) = {gpulet.gpu for gpulet in asked.gpulets}
    idle = next(each for each in gpus_of(asked) if each.id.partition("/")[0] != used.partition("/")[0])
    waiting = twins(asked, 1, [idle], asked)
    assert len(waiting) == len(asked.gpulets)
    assert still_fitting(waiting, asked, gpus_of(asked)) == waiting
    assert still_fitting(waiting, asked.model_copy(update={"drained": (idle.id,)}), gpus_of(asked)) == ()
    assert still_fitting(waiting, asked, [each for each in gpus_of(asked) if each.id != idle.id]) == ()


def test_what_is_left_where_it_drains_when_a_change_stops_is_planned_away() -> None:
    before = planned({"a": 300.0, "b": 300.0})
    place = before.gpulets[0].gpu.partition("/")[0]
    stopped = before.model_copy(update={"drained": (place,)})
    asked = {spec.name: spec.rate_rps for spec in before.models}
    gpus = gpus_of(before)
    for there in (gpus, tuple(each for each in gpus if each.id.partition("/")[0] != place)):
        found = propose(request(stopped, there, asked), NOTHING)
        assert found.plan is not None
        assert found.worth.pays
        assert not held_at(found.plan, (place,))


def test_a_drain_is_foreseen_and_that_a_plan_would_end_it() -> None:
    before = planned({"a": 300.0})
    after = emptied(before, "n0")
    assert (preview_plan(before, after).drained, preview_plan(before, after).undrained) == (("n0",), ())
    assert preview_plan(after, before).undrained == ("n0",)
    again = after.model_copy(update={"drained": ()})
    assert changes_of(after, again) == 0
    with pytest.raises(InvalidInputError, match="no GPU would be left"):
        emptied(before, "n0", "n1", "n2")
