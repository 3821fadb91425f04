"""A node is emptied while its models are served; nothing is laid on it until it is undrained."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.deployments.control.change import change_deployment
from tenuto.deployments.control.fit import gpus_of
from tenuto.deployments.control.foreseen import foresee
from tenuto.deployments.control.near import changes_of, planned_without
from tenuto.deployments.control.planning import PlanRequest, propose
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.worth import Durations
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.surviving import is_at
from tenuto.profiles import Profiles
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.stores import DictStore

NOTHING = Profiles([])


def planned(rates: dict[str, float]) -> Plan:
    given = [{"name": f"n{i}", "rack": f"r{i % 2}", "gpus": [{"type": "v100", "count": 2}]} for i in range(3)]
    latency = {"alpha_ms": 0.5, "beta_ms": 3.0}
    models = [{"name": name, "rate_rps": rate, "slo_ms": 60, "latency": latency} for name, rate in rates.items()]
    asked = Workload.model_validate({"models": models})
    return solve(load_policy("gpulet"), asked, Cluster.model_validate({"nodes": given}), NOTHING)


def emptied(plan: Plan, *places: str) -> Plan:
    return planned_without(plan, places, NOTHING, ())


def held_at(plan: Plan, places: tuple[str, ...]) -> list[str]:
    gpus = {gpu.id: gpu for gpu in plan.gpus}
    return [gpulet.id for gpulet in plan.gpulets if is_at(gpus[gpulet.gpu], places)]


rates = st.dictionaries(st.sampled_from("abc"), st.sampled_from([50.0, 300.0, 1500.0]), min_size=1)
places = st.sampled_from(["n0", "n1", "n0/0", "r0"])


@settings(max_examples=15)
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


@settings(max_examples=15)
@given(rates, places, st.sampled_from([0.3, 2.0]))
def test_the_controller_plans_nothing_onto_what_is_drained_and_remembers_it(
    asked: dict[str, float], place: str, grows: float
) -> None:
    running = emptied(planned(asked), place)
    assert Memory.from_data(Memory(running, running.workload).to_data()).plan.drained == (place,)
    more = {spec.name: grows * spec.rate_rps for spec in running.models}
    request = PlanRequest(
        running.workload,
        Traffic(more),
        more,
        running,
        gpus_of(running),
        running.policy,
        Durations(10.0, 5.0),
        300.0,
        0.2,
        standby_gpus=2,
    )
    found = propose(request, NOTHING)
    gpus = {gpu.id: gpu for gpu in running.gpus}
    assert not [each for each in found.standby if is_at(gpus[each.gpulet.gpu], (place,))]
    if found.plan is not None:
        assert not held_at(found.plan, (place,))
        assert found.plan.drained == (place,)
        assert {gpu.id for gpu in found.plan.gpus} == {gpu.id for gpu in running.gpus}


def test_a_drain_is_foreseen_and_that_a_plan_would_end_it() -> None:
    before = planned({"a": 300.0})
    after = emptied(before, "n0")
    assert (foresee(before, after).drained, foresee(before, after).undrained) == (("n0",), ())
    assert foresee(after, before).undrained == ("n0",)
    again = after.model_copy(update={"drained": ()})
    assert changes_of(after, again) == 0
    with pytest.raises(InvalidInputError, match="no GPU would be left"):
        emptied(before, "n0", "n1", "n2")
