"""What must hold for every policy of this set on generated workloads and clusters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.batching.planning.tenuto_policy import TenutoPolicy
from tenuto.errors import InvalidInputError
from tenuto.files import parse_yaml
from tenuto.placement import Cluster, Plan, Policy, Workload, solve
from tenuto.placement.costs import CONTEXT_MIB
from tenuto.placement.planner.fixed_cost import check_inputs
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped
from tests.placement.published import thesis


@dataclass(frozen=True)
class Case:
    """A policy with what it can be asked: profiles, SLOs in ms, at most so many models, GPUs and requests/s of each.

    `part_of_slo` is the part of the SLO within which the policy keeps the latency of a batch; GSLICE+ keeps none.
    `is_tried`: what the policy promises is what trials served, which may be less than the rates it planned; and
    nothing of a model whose SLO is too long for its trials.
    """

    make: Callable[[], Policy]
    part_of_slo: float
    profiles: Profiles
    slo_ms: tuple[float, float] = (140, 900)
    models: int = 6
    gpus: int = 6
    rate_rps: float = 2000
    examples: int = 8
    is_tried: bool = False


def igniter_with_memory() -> Profiles:
    """Return iGniter's profile with made-up memory, so that memory binds as well: MiB grow with the batch size."""
    data = load_shipped("igniter-v100").model_dump(by_alias=True)
    for weights, model in zip((900, 700, 2500, 4000), data["models"].values(), strict=True):
        for point in model["points"]:
            point["memory_mib"] = weights + 40.0 * point["batch_size"]
    return Profiles([Profile.model_validate(data)])


THESIS, SHARES = thesis(), igniter_with_memory()
# The plans of the other policies, from which it may start, are those of their own cases.
FEW_STARTS: dict[str, Any] = {"requests": 200, "starts": ("symphony", "gpulet")}
tight: dict[str, Any] = {"profiles": SHARES, "slo_ms": (12, 120), "examples": 6}
CASES: dict[str, Case] = {
    "symphony": Case(Symphony, 1.0, THESIS),
    "gpulet": Case(GpuletPolicy, 1.0, **tight),
    "gpulet, interference": Case(lambda: GpuletPolicy(interference=True), 1.0, **tight),
    "tenuto": Case(lambda: TenutoPolicy(**FEW_STARTS), 1.0, SHARES, (12, 900), 3, 2, 400, 4, is_tried=True),
}


def workloads(case: Case) -> st.SearchStrategy[Workload]:
    rows = sorted(case.profiles.for_type("v100"))
    entries = st.tuples(st.sampled_from(rows), st.floats(1, case.rate_rps), st.floats(*case.slo_ms))
    return st.lists(entries, max_size=case.models).map(
        lambda found: Workload.model_validate(
            {
                "models": [
                    {"name": f"{row}-{index}", "profile": row, "rate_rps": rate, "slo_ms": slo}
                    for index, (row, rate, slo) in enumerate(found)
                ]
            }
        )
    )


def clusters(case: Case) -> st.SearchStrategy[Cluster]:
    return st.builds(
        lambda count, elastic, memory: Cluster.model_validate(
            {
                "nodes": [{"name": "n0", "gpus": [{"type": "v100", "count": count, "memory_mib": memory}]}],
                "elastic": elastic,
            }
        ),
        st.integers(1, case.gpus),
        st.booleans(),
        st.sampled_from([6000, 16384]),
    )


def assert_decided(plan: Plan, workload: Workload, case: Case) -> None:
    """Check what the policy decided against what it believes itself."""
    rates: dict[str, float] = {}
    for gpulet in plan.gpulets:
        if gpulet.duty_cycle_ms is not None:
            assert sum(replica.latency_ms or 0.0 for replica in gpulet.models) <= gpulet.duty_cycle_ms + 1e-3
        for replica in gpulet.models:
            assert replica.latency_ms is not None
            assert replica.latency_ms <= workload[replica.name].slo_ms * case.part_of_slo + 1e-6
            if gpulet.duty_cycle_ms is not None:  # a request waits one round at most, then its batch runs
                assert gpulet.duty_cycle_ms + replica.latency_ms <= workload[replica.name].slo_ms + 1e-3
            rates[replica.name] = rates.get(replica.name, 0.0) + (replica.rate_rps or 0.0)
    for name, rate in rates.items():
        assert rate <= workload[name].rate_rps * (1 + 1e-6)
        promised = plan.expected.models.get(name)
        if case.is_tried:
            assert promised is None or promised.goodput_rps <= rate + 1e-4
        else:
            assert promised is not None
            assert promised.goodput_rps == pytest.approx(rate, rel=1e-5, abs=1e-4)


def assert_valid(plan: Plan, workload: Workload, cluster: Cluster) -> None:
    """Check a completed plan against the rules that hold for all."""
    memory = {gpu.type: gpu.memory_mib for gpu in cluster.gpus}
    for gpu in plan.gpus:
        gpulets = plan.on_gpu(gpu.id)
        held = sum((g.held_mib or 0.0) + CONTEXT_MIB for g in gpulets)
        assert held <= memory[gpu.type] + 1e-6
        assert sum(g.memory_mib or 0.0 for g in gpulets) <= memory[gpu.type] + 0.1
        assert all((g.held_mib or 0.0) + CONTEXT_MIB <= (g.memory_mib or math.inf) + 1e-2 for g in gpulets)
        assert plan.overcommits or sum(g.effective_share_pct for g in gpulets) <= 100 + 1e-6
    if not cluster.elastic:
        assert {gpu.id for gpu in plan.gpus} == {gpu.id for gpu in cluster.gpus}
    served = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
    assert served | set(plan.unserved) == {spec.name for spec in workload.models}
    assert not served & set(plan.unserved)
    below = {n for n, m in plan.expected.models.items() if m.goodput_rps < 0.99 * workload[n].rate_rps}
    assert set(plan.unserved_reasons) == {*plan.unserved, *below}
    assert all(plan.unserved_reasons.values())
    for gpulet in plan.gpulets:
        for replica in gpulet.models:
            assert replica.latency is not None
            whole = replica.latency.at(replica.batch_size) * replica.slowdown
            assert replica.latency_ms == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_plans_are_valid_deterministic_and_leave_their_input_alone(name: str) -> None:
    check_plans(CASES[name])


def check_plans(case: Case) -> None:
    @given(workload=workloads(case), cluster=clusters(case))
    @settings(max_examples=max(2, settings.default.max_examples * case.examples // 25))
    def holds(workload: Workload, cluster: Cluster) -> None:
        before = (workload.model_dump_json(), cluster.model_dump_json())
        policy = _Recorder(case.make())
        try:
            check_inputs(workload, cluster, case.profiles)
        except InvalidInputError:
            return  # an elastic cluster would grow too far
        plan = solve(policy, workload, cluster, case.profiles)
        assert_valid(plan, workload, cluster)
        if policy.decision is not None:
            assert_decided(policy.decision, workload, case)
        assert solve(case.make(), workload, cluster, case.profiles).dump() == plan.dump()
        assert Plan.from_data(parse_yaml(plan.dump())) == plan
        assert (workload.model_dump_json(), cluster.model_dump_json()) == before

    holds()


class _Recorder(Policy):
    """A policy that keeps what it decided."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        vars(self).update(name=policy.name, abilities=policy.abilities)
        self.decision: Plan | None = None

    @property
    def options(self) -> dict[str, Any]:
        return self._policy.options

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        self.decision = self._policy.place(workload, cluster, profiles)
        return self.decision


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("elastic", [False, True])
def test_an_empty_workload_gives_an_empty_plan(name: str, elastic: bool) -> None:
    check_an_empty_workload(CASES[name], elastic)


def check_an_empty_workload(case: Case, elastic: bool) -> None:
    plan = solve(case.make(), Workload(), Cluster.parse("v100:2", elastic=elastic), case.profiles)
    assert plan.gpulets == ()
    assert plan.unserved == ()
    assert plan.expected.goodput_rps == 0


@pytest.mark.parametrize("name", CASES)
def test_a_cluster_without_gpus_serves_nobody(name: str) -> None:
    check_a_cluster_without_gpus(CASES[name])


def check_a_cluster_without_gpus(case: Case) -> None:
    plan = solve(case.make(), Workload(), Cluster(), Profiles([]))
    assert plan.gpus == ()


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_fits_nowhere_is_reported_not_dropped(name: str) -> None:
    check_what_fits_nowhere(CASES[name])


def check_what_fits_nowhere(case: Case) -> None:
    rates = {"resnet50": 100, "vgg19": 5000, "ssd" if case.profiles is SHARES else "bert": 9000}
    workload = Workload.model_validate(
        {"models": [{"name": name, "rate_rps": rate, "slo_ms": 150} for name, rate in rates.items()]}
    )
    plan = solve(case.make(), workload, Cluster.parse("v100:1"), case.profiles)
    served = {r.name for g in plan.gpulets for r in g.models}
    assert served | set(plan.unserved) == set(rates)
    assert all(plan.unserved_reasons[name] for name in plan.unserved)
    assert plan.expected.goodput_rps < 14_100


def test_models_that_take_turns_share_what_only_a_running_batch_needs() -> None:
    check_shared_memory(GpuletPolicy())


def check_shared_memory(policy: Policy) -> None:
    points = [{"batch_size": b, "latency_ms": 4.0 + b, "memory_mib": 900.0 + 10.0 * b} for b in (1, 2, 4)]
    rows = {name: {"points": points, "weights_mib": 100.0} for name in "abc"}
    profile = Profile.model_validate({"name": "t", "gpu_type": "v100", "source": "test", "models": rows})
    load = Workload.model_validate({"models": [{"name": name, "rate_rps": 20, "slo_ms": 100} for name in rows]})
    gpus = [{"type": "v100", "count": 2, "memory_mib": CONTEXT_MIB + 300.0 + 840.0}]
    plan = solve(policy, load, Cluster.model_validate({"nodes": [{"name": "n", "gpus": gpus}]}), Profiles([profile]))
    assert not plan.unserved
    assert plan.expected.gpus_used == 1  # 3 x 100 MiB of weights and 840 of the largest batch
