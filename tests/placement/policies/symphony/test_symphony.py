"""Symphony's placement and the analytic table of its paper."""

from __future__ import annotations

import pytest

from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Workload
from tenuto.placement.costs import costs_of
from tenuto.placement.policies.symphony.staggering import StaggeredModel
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import default_profiles
from tests.placement.published import VISION, decided, equal_rates, facts, planned, v100s

TABLE_2 = facts("symphony_paper_facts")["table2"]


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: row["model"])
def test_the_analytic_table_comes_out(row) -> None:  # type: ignore[no-untyped-def]
    model = staggered(row["alpha_ms"], row["beta_ms"], row["slo_ms"])
    alone, together = row["no_coordination"], row["staggered"]
    assert model.on.largest_batch(row["slo_ms"] / 2) == alone["batch"]
    assert model.batch(row["gpus"]) == together["batch"]
    sizes = alone["batch"], together["batch"]
    carries = [1000.0 * row["gpus"] * size / model.on.latency().at(size) for size in sizes]
    assert carries == pytest.approx([alone["throughput_rps"], together["throughput_rps"]], abs=1)
    assert model.latency_ms(row["gpus"]) == pytest.approx(model.on.latency().at(together["batch"]))


def test_one_gpu_staggers_with_nobody() -> None:
    model = staggered(1.0, 5.0, 25.0)
    assert model.batch(1) == model.on.largest_batch(25.0 / 2)
    assert staggered(1.0, 5.0, 5.0).is_late


def staggered(alpha_ms: float, beta_ms: float, slo_ms: float) -> StaggeredModel:
    entry = {"name": "m", "rate_rps": 1.0, "slo_ms": slo_ms, "latency": {"alpha_ms": alpha_ms, "beta_ms": beta_ms}}
    workload = Workload.model_validate({"models": [entry]})
    on = costs_of(workload, Cluster.parse("v100:1"), Profiles([]))["m"]["v100"]
    return StaggeredModel(on, 1000, 0.0)


def line(name: str, rate: float, slo: float = 25.0) -> dict[str, object]:
    return {"name": name, "rate_rps": rate, "slo_ms": slo, "latency": {"alpha_ms": 1.053, "beta_ms": 5.072}}


def test_every_gpu_holds_every_model_and_the_published_batch() -> None:
    load = Workload.model_validate({"models": [line("a", 2000), line("b", 2000)]})
    plan = decided(Symphony(), load, Cluster.parse("1080ti:8"), Profiles([]))
    assert len(plan.gpulets) == 8
    for gpulet in plan.gpulets:
        assert gpulet.share_pct is None
        assert [(r.name, r.batch_size, r.rate_rps) for r in gpulet.models] == [("a", 16, 250.0), ("b", 16, 250.0)]
    assert plan.expected.goodput_rps == pytest.approx(4000)


def test_overload_is_carried_in_proportion() -> None:
    load = Workload.model_validate({"models": [line("a", 9000), line("b", 3000)]})
    plan = decided(Symphony(), load, Cluster.parse("1080ti:8"), Profiles([]))
    assert plan.expected.goodput_rps == pytest.approx(TABLE_2[0]["staggered"]["throughput_rps"], abs=1)
    assert plan.expected.models["a"].goodput_rps == pytest.approx(3 * plan.expected.models["b"].goodput_rps)
    assert "needs" in plan.unserved_reasons["a"]


def test_an_elastic_cluster_grows_to_the_need() -> None:
    load = Workload.model_validate({"models": [line("a", 5800)]})
    plan = decided(Symphony(), load, Cluster.parse("1080ti:1", elastic=True), Profiles([]))
    assert plan.expected.gpus_used == 8
    assert plan.expected.goodput_rps == pytest.approx(5800)


def test_memory_splits_models_into_sub_clusters_balanced_by_need() -> None:
    plan = planned(Symphony(), equal_rates(VISION, 500, 200), v100s(5))
    assert not plan.unserved
    hosts = {gpu.id: frozenset(r.name for g in plan.on_gpu(gpu.id) for r in g.models) for gpu in plan.gpus}
    parts = set(hosts.values())
    assert frozenset().union(*parts) == set(VISION)
    assert sum(map(len, parts)) == len(VISION)
    asked = planned(Symphony(sub_clusters=3), equal_rates(VISION, 500, 200), v100s(6))
    assert len({frozenset(r.name for r in g.models) for g in asked.gpulets}) == 3


def test_a_slo_without_slack_is_served_one_by_one() -> None:
    load = Workload.model_validate({"models": [line("a", 100), {**line("b", 100), "slo_ms": 6.2}]})
    plan = decided(Symphony(), load, Cluster.parse("1080ti:2"), Profiles([]))
    assert not plan.unserved  # one request alone just fits
    assert {r.name: r.batch_size for r in plan.gpulets[0].models} == {"a": 11, "b": 1}


def test_mixed_types_get_their_own_sub_clusters() -> None:
    load = Workload.model_validate({"models": [line("a", 1000), line("b", 900), line("c", 100)]})
    plan = decided(Symphony(), load, Cluster.parse("v100:2,t4:2"), Profiles([]))
    assert {gpu.type for gpu in plan.gpus if plan.on_gpu(gpu.id)} == {"v100", "t4"}
    assert plan.expected.goodput_rps == pytest.approx(2000)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="sub_clusters"):
        Symphony(sub_clusters=-1)
    with pytest.raises(InvalidInputError, match="max_batch"):
        Symphony(max_batch=0)


def test_batches_that_grow_with_bought_gpus_stay_within_memory() -> None:
    """Found by generated workloads: memory was checked with the batches of the GPUs at hand, not of those bought."""
    workload = Workload.model_validate(
        {
            "models": [
                {"name": "small", "profile": "alexnet", "rate_rps": 1, "slo_ms": 140},
                {"name": "large", "profile": "efficientnet_b7", "rate_rps": 385, "slo_ms": 246},
            ]
        }
    )
    cluster = Cluster.model_validate(
        {"nodes": [{"name": "n0", "gpus": [{"type": "v100", "memory_mib": 6000}]}], "elastic": True}
    )
    plan = decided(Symphony(), workload, cluster, Profiles(default_profiles("v100")))
    assert {replica.name for gpulet in plan.gpulets for replica in gpulet.models} == {"small", "large"}
    rate = sum(replica.rate_rps or 0 for g in plan.gpulets for replica in g.models if replica.name == "small")
    assert rate <= 1.0
