"""The one path from policy to plan: what is checked before, completed between and refused after."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.documents import parse_document
from tenuto.errors import InvalidInputError
from tenuto.outcome import ATTAINED
from tenuto.placement import Cluster, Gpulet, Plan, Policy, Replica, Workload, solve
from tenuto.placement.expectation.outlook import Outlooks, Traffic
from tenuto.placement.plan import PlannedGpu, PolicyUsed
from tenuto.placement.planner import PlanTask, make_plan
from tenuto.placement.planner.completion import usage_of
from tenuto.placement.planner.fixed_cost import check_inputs
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.placement.policy import load_policy
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.usher.usher import WaoUsher
from tests.placement.published import equal_rates, requirement_profile, thesis, v100s


class Fixed(Policy):
    """Returns the plan it was given."""

    name = "fixed"
    summary = source = "test"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        return self.plan


def given(*gpulets: dict[str, Any], **more: Any) -> Fixed:
    gpus = [{"id": "n0/0", "type": "v100"}, {"id": "n0/1", "type": "v100"}]
    return Fixed(Plan.from_data({"policy": {"name": "fixed"}, "gpus": gpus, "gpulets": list(gpulets), **more}))


def gpulet(name: str, model: str, batch: int = 4, **more: Any) -> dict[str, Any]:
    return {"id": name, "gpu": name.rsplit("/", 1)[0], "models": [{"name": model, "batch_size": batch}], **more}


def test_what_follows_from_the_decision_is_filled_in() -> None:
    policy = given(gpulet("n0/0/a", "resnet50", 8), gpulet("n0/1/a", "bert", 4))
    plan = solve(policy, equal_rates(["resnet50", "bert"], 200, 300), v100s(2), thesis())
    assert plan.gpulets[0].models[0].latency_ms == pytest.approx(1000 * 8 / 829.08)
    assert plan.gpulets[0].models[0].memory_mib == pytest.approx(1.77 / 100 * 16384, abs=0.1)
    assert plan.expected.models["resnet50"].goodput_rps == 200
    assert plan.expected.models["bert"].goodput_rps == pytest.approx(117.34, abs=0.01)
    assert plan.expected.gpus_used == 2
    assert plan.expected.cost_per_hour == pytest.approx(6.12)
    assert [spec.name for spec in plan.models] == ["resnet50", "bert"]
    assert plan.policy.name == "fixed"


@pytest.mark.parametrize(
    ("gpulets", "words"),
    [
        ((gpulet("n0/0/a", "bert", share_pct=60), gpulet("n0/0/b", "bert", share_pct=60)), "more than 100 %"),
        ((gpulet("n0/0/a", "bert", memory_mib=17000),), "more memory than the GPU has"),
        ((gpulet("n0/0/a", "bert", 4), gpulet("n0/1/a", "who")), "not a model of the workload"),
        ((), "neither served nor listed as unserved"),
    ],
)
def test_plans_that_break_a_rule_are_refused(gpulets: tuple[dict[str, Any], ...], words: str) -> None:
    line = {"latency": {"alpha_ms": 1, "beta_ms": 1}}
    gpulets = tuple({**g, "models": [{**m, **line} for m in g["models"]]} for g in gpulets)
    with pytest.raises(InvalidInputError, match=words):
        solve(given(*gpulets), equal_rates(["bert"], 10, 300), v100s(2), thesis())


@pytest.mark.parametrize("sizes_mib", [(16_384, 8_192), (8_192, 16_384)])
def test_plans_are_for_the_smallest_gpu_of_a_type(sizes_mib: tuple[int, int]) -> None:
    """GPUs of a type are alike to a policy, which may use either."""
    node = {"name": "n0", "gpus": [{"type": "v100", "memory_mib": mib} for mib in sizes_mib]}
    cluster = parse_document(Cluster, {"nodes": [node]}, origin="cluster.yaml")
    assert cluster.one_of_each["v100"].memory_mib == 8_192
    for gpu in ("n0/0", "n0/1"):
        policy = given(gpulet(f"{gpu}/a", "bert", memory_mib=9_000))
        with pytest.raises(InvalidInputError, match=r"more memory than the GPU has \(8192 MiB\)"):
            solve(policy, equal_rates(["bert"], 10, 300), cluster, thesis())


def test_overcommitment_is_allowed_when_the_plan_says_so() -> None:
    two = (gpulet("n0/0/a", "bert"), gpulet("n0/0/b", "resnet50"))
    workload = equal_rates(["bert", "resnet50"], 10, 300)
    with pytest.raises(InvalidInputError, match="more than 100 %"):
        solve(given(*two), workload, v100s(2), thesis())
    assert solve(given(*two, overcommits=True), workload, v100s(2), thesis())


def test_shares_without_mps_are_refused() -> None:
    workload = equal_rates(["bert", "resnet50"], 10, 300).model_copy(update={"mps": "off"})
    with pytest.raises(InvalidInputError, match="needs CUDA MPS") as caught:
        solve(WaoUsher(), workload, v100s(2), thesis())
    assert len(caught.value.problems) == 2
    for policy in (Symphony(), WaoUsher(shares=False)):
        assert solve(policy, workload, v100s(2), thesis()).mps == "off"


def test_models_without_a_profile_are_told_at_once() -> None:
    workload = equal_rates(["resnet5", "bert", "vgg1"], 1, 100)
    with pytest.raises(InvalidInputError) as caught:
        check_inputs(workload, v100s(1), thesis())
    rules = [problem.rule for problem in caught.value.problems]
    assert rules == [f"no profile of '{name}' on GPU type 'v100'" for name in ("resnet5", "vgg1")]


def test_one_impossible_model_does_not_refuse_the_others() -> None:
    workload = Workload.model_validate(
        {
            "models": [
                {"name": "bert", "rate_rps": 1, "slo_ms": 20},
                {"name": "vgg19", "rate_rps": 1, "slo_ms": 500},
                {"name": "alexnet", "rate_rps": 1, "slo_ms": 500},
            ]
        }
    )
    small = Cluster.model_validate({"nodes": [{"name": "n", "gpus": [{"type": "v100", "memory_mib": 1000}]}]})
    for policy in (WaoUsher(), Symphony()):
        plan = solve(policy, workload, small, thesis())
        assert [g.models[0].name for g in plan.gpulets] == ["alexnet"]
        assert plan.unserved == ("bert", "vgg19")
        slo, memory = plan.unserved_reasons["bert"], plan.unserved_reasons["vgg19"]
        assert slo.startswith("SLO below batch 1: a single request takes 34.09 ms")
        assert memory.startswith("memory: it needs 686 MiB")
        assert "leaves 400 MiB" in memory  # beside a context of 600


def test_one_type_that_suits_a_model_is_enough() -> None:
    profiles = Profiles([*thesis(), requirement_profile({"own": {4: (50.0, 5.0, 100.0)}}, "t4")])
    workload = equal_rates(["bert", "own"], 10, 300)
    check_inputs(workload, Cluster.parse("v100:1,t4:1"), profiles)
    policy = given(gpulet("n0/0/a", "bert"), unserved=["own"])
    assert solve(policy, workload, Cluster.parse("v100:1,t4:1"), profiles).unserved == ("own",)


def test_a_rate_beyond_what_an_elastic_cluster_grows_to_is_refused_at_once() -> None:
    workload = equal_rates(["alexnet", "resnet50"], 1e9, 100)
    with pytest.raises(InvalidInputError, match=r"rate_rps.*at least .* GPUs.*elastic cluster grows to 10,000"):
        check_inputs(workload, Cluster.parse("v100:1", elastic=True), thesis())
    check_inputs(workload, v100s(4), thesis())  # a fixed cluster carries what it can


def test_gpus_of_one_type_cost_what_each_of_them_costs() -> None:
    prices = [{"type": "v100", "price_per_hour": price} for price in (1.0, 5.0)]
    cluster = Cluster.model_validate({"nodes": [{"name": "n0", "gpus": prices}]})
    workload = Workload.model_validate({"models": [{"name": "resnet50", "rate_rps": 10, "slo_ms": 300}]})
    plan = solve(load_policy("gpulet"), workload, cluster, thesis())
    assert (plan.used_gpus, plan.expected.cost_per_hour) == (("n0/0",), 1.0)


def test_a_bought_gpu_with_the_id_of_another_type_costs_what_its_own_type_does() -> None:
    prices = [{"type": kind, "price_per_hour": price} for kind, price in (("t4", 0.5), ("v100", 3.0))]
    cluster = Cluster.model_validate({"nodes": [{"name": "n0", "gpus": prices}], "elastic": True})
    bought = PlannedGpu(id="n0/0", type="v100")
    replica = Replica(name="resnet50", batch_size=1)
    plan = Plan(
        policy=PolicyUsed(name="by hand"), gpus=(bought,), gpulets=(Gpulet(id="a", gpu="n0/0", models=(replica,)),)
    )
    assert usage_of(plan, cluster) == {"gpus_used": 1, "cost_per_hour": 3.0}


@pytest.mark.parametrize("policy", ["gpulet", "symphony"])
def test_an_elastic_plan_of_a_policy_that_knows_no_queues_keeps_what_it_promises(policy: str) -> None:
    profile = load_shipped("symphony-1080ti")
    rows = ("InceptionResNetV2", "NASNetLarge", "BERT", "VGG19", "ResNet152V2")
    models = [
        {"name": row, "rate_rps": 12 + at, "slo_ms": profile.models[row].coefficients["slo_ms"]}
        for at, row in enumerate(rows)
    ]
    workload, profiles = Workload.model_validate({"models": models}), Profiles([profile])

    def planned(cluster: Cluster, attainment: float) -> Plan:
        return make_plan(PlanTask(load_policy(policy), workload, cluster, profiles, attainment=attainment))

    elastic, fixed = Cluster.parse("1080ti:1", elastic=True), Cluster.parse("1080ti:5")
    believed = planned(elastic, 0.0)
    assert believed.unserved_reasons
    plan = solve(load_policy(policy), workload, elastic, profiles)
    assert not plan.unserved_reasons
    assert all(plan.expected.models[spec.name].goodput_rps >= ATTAINED * spec.rate_rps for spec in workload.models)
    # Many requests of a second do not come in every second: for fewer, less is enough.
    mean = Traffic({spec.name: 0.7 * spec.rate_rps for spec in workload.models})
    cheaper = make_plan(PlanTask(load_policy(policy), workload, elastic, profiles, traffic=mean))
    assert believed.expected.gpus_used <= cheaper.expected.gpus_used <= plan.expected.gpus_used
    assert all(part >= ATTAINED for part in Outlooks().promised(cheaper, mean)[0].values())
    assert planned(fixed, 0.0) == planned(fixed, 1.0)  # there are no more
