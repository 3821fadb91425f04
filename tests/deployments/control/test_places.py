"""Where the controller lays replicas: random plans on random GPUs obey what models ask, and what a loss took is made up
for, so that the next loss takes nothing either."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.control.settings import ControlSettings
from tenuto.errors import InvalidInputError
from tenuto.loadgen.controlled import ControlledSimulation
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.placement.cluster import node_of
from tenuto.placement.placement_constraints import bearable, may_lie
from tenuto.placement.planner import Proposal, propose
from tenuto.placement.planner.fault_tolerance import unmet
from tenuto.placement.planner.gpu_matching import match_to_running
from tenuto.profiles import Profiles
from tests.instruments.plans import request

NOTHING = Profiles([])


def cluster(nodes: int, each: int = 2) -> Cluster:
    given = [{"name": f"n{i}", "rack": f"r{i % 2}", "gpus": [{"type": "v100", "count": each}]} for i in range(nodes)]
    return Cluster.model_validate({"nodes": given})


def workload(*models: dict[str, Any]) -> Workload:
    fast = {"alpha_ms": 0.5, "beta_ms": 3.0}
    entries = [{"name": f"m{index}", "latency": fast, "slo_ms": 80, **entry} for index, entry in enumerate(models)]
    return Workload.model_validate({"models": entries})


def planned(asked: Workload, on: Cluster) -> Plan:
    return solve(load_policy("gpulet"), asked, on, NOTHING)


def proposed(asked: Workload, running: Plan, on: Cluster) -> Proposal:
    rates = {spec.name: spec.rate_rps for spec in asked.models}
    return propose(request(running, on.gpus, rates, asked), NOTHING)


models = st.fixed_dictionaries(
    {"rate_rps": st.sampled_from([20.0, 100.0, 300.0])},
    optional={
        "spread": st.sampled_from(["gpu", "node", "rack"]),
        "survive": st.sampled_from([0.5, 1.0]),
        "keep_off": st.sampled_from([["n0"], ["n2"], ["n2/0", "n1/0"]]),
        "prefer": st.sampled_from(["n1", "r1", "n1/1"]),
    },
)


def test_a_preference_chooses_among_equal_gpus_and_moves_nothing_that_runs() -> None:
    on = cluster(3)
    plan = planned(workload({"rate_rps": 1200, "prefer": "n1"}, {"rate_rps": 1200, "prefer": "n2"}), on)
    for left, where in ((on.gpus, {"m0": {"n1"}, "m1": {"n2"}}), (on.gpus[:4], {"m0": {"n1"}})):
        laid = match_to_running(plan, None, left, keep_idle=True)
        for name, nodes in where.items():
            assert {node_of(gpulet.gpu) for gpulet in laid.hosts_of(name)} == nodes
    elsewhere = planned(workload({"rate_rps": 1200, "prefer": "n0"}, {"rate_rps": 1200}), on)
    again = match_to_running(plan, elsewhere, on.gpus, keep_idle=True)
    assert {g.gpu for g in again.hosts_of("m0")} == {g.gpu for g in elsewhere.hosts_of("m0")}


@given(st.lists(models, min_size=1, max_size=3), st.sampled_from(["n0", "n1", "n2", "n1/0"]))
def test_after_any_loss_what_is_proposed_lies_as_the_gpus_that_are_left_allow(
    entries: list[dict[str, Any]], lost: str
) -> None:
    asked, whole = workload(*entries), cluster(4)
    before = planned(asked, whole)
    left = Cluster.of([gpu for gpu in whole.gpus if lost not in (gpu.id, node_of(gpu.id))])
    ids = {gpu.id for gpu in left.gpus}
    running = before.model_copy(update={"gpulets": tuple(g for g in before.gpulets if g.gpu in ids)})
    found = proposed(asked, running, left)
    after = found.plan if found.plan is not None and found.worth.pays else running
    gpus = {gpu.id: gpu for gpu in left.gpus}
    for gpulet in after.gpulets:
        assert all(may_lie(asked[replica.name], gpus[gpulet.gpu]) for replica in gpulet.models)
    possible = after.model_copy(update={"models": bearable(asked, left.gpus).models})
    try:
        anew = solve(load_policy("gpulet"), bearable(asked, left.gpus), left, NOTHING)
    except InvalidInputError:
        return
    assert len(unmet(possible)) <= len(unmet(anew))


def test_what_a_lost_node_held_is_made_up_for_so_that_the_next_loss_takes_nothing() -> None:
    asked = workload({"rate_rps": 200, "survive": 1, "spread": "node"}, {"rate_rps": 100})
    on = cluster(4, 1)
    plan = planned(asked, on)
    first = node_of(plan.hosts_of("m0")[0].gpu)
    control = ControlSettings.model_validate({"mode": "act"})
    lost = frozenset(gpu.id for gpu in on.gpus if node_of(gpu.id) == first)
    run = ControlledSimulation(asked, plan, on.gpus, NOTHING, control, duration_s=60.0, losses=((10.0, lost),)).run()
    _, last, why = run.plans[-1]
    assert "is gone" in why
    there = last.model_copy(update={"gpulets": tuple(g for g in last.gpulets if g.gpu not in lost)})
    assert there == last
    assert not unmet(last)
    assert len({node_of(gpulet.gpu) for gpulet in last.hosts_of("m0")}) > 1
    assert run.attainments()["m0"] > 0.99


def test_with_one_node_left_models_go_on_though_nothing_could_survive_its_loss() -> None:
    asked = workload({"rate_rps": 900, "survive": 1, "spread": "node"}, {"rate_rps": 300, "only_on": ["n0"]})
    on = cluster(2, 1)
    plan, left = planned(asked, on), Cluster.of(on.gpus[1:])
    running = plan.model_copy(update={"gpulets": tuple(g for g in plan.gpulets if g.gpu == "n1/0")})
    assert running.hosts_of("m0")
    more = workload(
        {"rate_rps": 900, "survive": 1, "spread": "node"}, {"rate_rps": 300, "only_on": ["n0"]}, {"rate_rps": 50}
    )
    found = proposed(more, running, left)
    assert found.plan is not None
    assert found.worth.pays
    assert found.plan.hosts_of("m2")
    assert found.plan.hosts_of("m0")
    assert found.plan.unserved == ("m1",)


def test_a_model_that_is_kept_off_where_it_runs_moves() -> None:
    on = cluster(2, 1)
    plan = planned(workload({"rate_rps": 100}), on)
    (host,) = plan.hosts_of("m0")
    asked = workload({"rate_rps": 100, "keep_off": [node_of(host.gpu)]})
    found = proposed(asked, plan, on)
    assert found.worth.pays
    assert found.plan is not None
    (moved,) = found.plan.hosts_of("m0")
    assert moved.gpu != host.gpu
