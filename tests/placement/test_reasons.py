"""Reasons that plans give, held against their structure over random workloads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.placement import Cluster, Plan, Policy, Workload, solve
from tenuto.placement.planner.completion import ATTAINED
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.igniter.igniter import Igniter

PROFILES = Profiles([load_shipped("igniter-v100"), load_shipped("thesis-v100")])
NAMES = ("alexnet", "resnet50", "vgg19")  # which iGniter knows
MODEL = st.fixed_dictionaries(
    {"profile": st.sampled_from(NAMES), "rate_rps": st.floats(1.0, 3000.0), "slo_ms": st.floats(2.0, 200.0)}
)


def untrue(plan: Plan) -> list[str]:
    """The reasons that say something of the plan that is not so."""
    found = []
    by_gpu = plan.by_gpu()
    for name, reason in plan.unserved_reasons.items():
        hosts = plan.hosts_of(name)
        is_shared = any(host.effective_share_pct < 100 for host in hosts)
        has_neighbours = any(len(by_gpu[host.gpu]) > 1 for host in hosts)
        served = name not in plan.unserved
        if (
            ("its share" in reason and served and not is_shared)
            or ("its neighbours" in reason and served and not has_neighbours)
            or ("expected in time" in reason) != served
            or (served and not hosts)
        ):
            found.append(f"{name}: {reason}")
    return found


@pytest.mark.parametrize("policy", [Symphony(), GpuletPolicy(), Igniter()])
@given(models=st.lists(MODEL, min_size=1, max_size=5), gpus=st.integers(1, 4))
def test_reasons_are_true_of_the_plan(policy: Policy, models: list[dict[str, object]], gpus: int) -> None:
    entries = [{"name": f"m{number}", **model} for number, model in enumerate(models)]
    plan = solve(policy, Workload.model_validate({"models": entries}), Cluster.parse(f"v100:{gpus}"), PROFILES)
    assert untrue(plan) == []
    below = {
        spec.name
        for spec in plan.models
        if spec.name in plan.unserved or plan.expected.models[spec.name].goodput_rps < ATTAINED * spec.rate_rps
    }
    assert below == set(plan.unserved_reasons)
