"""The exhaustive placement, and how gpulet and SBP compare with it on a sample of the published scenarios."""

from __future__ import annotations

from itertools import product

import pytest

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tenuto_lab.baselines.ideal import Ideal
from tenuto_lab.baselines.sbp import SquishyBinPacking
from tests.placement.policies.gpulet.turns import FIVE, IGNITER, assert_turns_are_kept, carried, five_models
from tests.placement.published import decided

SCENARIOS = list(product((0, 200, 400, 600), repeat=len(FIVE)))[1:]


def test_the_population_is_the_published_one() -> None:
    assert len(SCENARIOS) == 1023


@pytest.mark.parametrize("gpus", [1, 2])
def test_interference_accepts_a_subset_and_ideal_a_superset(gpus: int) -> None:
    cluster = Cluster.parse(f"v100:{gpus}")
    policies = {
        "gpulet": GpuletPolicy(),
        "gpulet+int": GpuletPolicy(interference=True),
        "sbp": SquishyBinPacking(max_batch=32),
        "halves": SquishyBinPacking(halves=True, max_batch=32),
        "ideal": Ideal(max_steps=2000),
    }
    accepted: dict[str, set[tuple[int, ...]]] = {name: set() for name in policies}
    for rates in SCENARIOS[::62]:
        workload = five_models(**{name.replace("-", "_"): rate for name, rate in zip(FIVE, rates, strict=True)})
        for name, policy in policies.items():
            plan = policy.place(workload, cluster, IGNITER)
            if carried(plan, workload):
                assert_turns_are_kept(plan, workload)
                accepted[name].add(rates)
    assert accepted["gpulet+int"] <= accepted["gpulet"] <= accepted["ideal"]
    assert accepted["sbp"] | accepted["halves"] <= accepted["ideal"]
    assert accepted["gpulet+int"]
    assert len(accepted["ideal"]) < len(SCENARIOS[::62])


def test_an_elastic_cluster_gets_the_fewest_gpus() -> None:
    workload = five_models(resnet50=400, ssd=200, vgg19=200)
    cluster = Cluster.parse("v100:1", elastic=True)
    ideal = decided(Ideal(), workload, cluster, IGNITER)
    assert carried(ideal, workload)
    for policy in (GpuletPolicy(), SquishyBinPacking(max_batch=32)):
        assert ideal.expected.gpus_used <= decided(policy, workload, cluster, IGNITER).expected.gpus_used


def test_what_cannot_be_carried_is_said() -> None:
    workload = five_models(ssd=600)
    plan = decided(Ideal(), workload, Cluster.parse("v100:1"), IGNITER)
    assert not carried(plan, workload)
    assert any("no partition" in note for note in plan.notes)


def test_a_search_that_stops_early_says_so() -> None:
    workload = five_models(resnet50=600, ssd=400, vgg19=400)
    plan = decided(Ideal(max_steps=1), workload, Cluster.parse("v100:2"), IGNITER)
    assert any("search stopped" in note for note in plan.notes)


def test_large_clusters_and_wrong_options_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at most 8"):
        Ideal().place(five_models(ssd=1), Cluster.parse("v100:9"), IGNITER)
    with pytest.raises(InvalidInputError, match="max_steps"):
        Ideal(max_steps=0)
