"""The cluster: short form, file form, what is known of GPU types, and the pool policies take GPUs from."""

from __future__ import annotations

import pytest

from tenuto.documents import parse_document
from tenuto.errors import InvalidInputError
from tenuto.files import parse_yaml
from tenuto.placement import Cluster
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import gpulet_id, planned_gpus


def test_the_short_form_names_types_and_counts() -> None:
    cluster = Cluster.parse("v100:2,t4")
    assert [(g.id, g.type) for g in cluster.gpus] == [("n0/0", "v100"), ("n0/1", "v100"), ("n0/2", "t4")]
    assert cluster.gpus[0].memory_mib == 16384
    assert cluster.gpus[0].price_per_hour == 3.06
    assert cluster.gpu_types == ("v100", "t4")


@pytest.mark.parametrize(
    "text", ["", "v100:0", "v100:x", ":3", "v100 4", "v100:-1", "v100:" + "9" * 5000, "v100:1,,t4:1"]
)
def test_other_short_forms_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--gpus v100:4"):
        Cluster.parse(text)


def test_unknown_types_need_their_memory() -> None:
    with pytest.raises(InvalidInputError, match="unknown GPU type 'b300'"):
        Cluster.parse("b300:2")
    data = {"nodes": [{"name": "n", "gpus": [{"type": "b300", "memory_mib": 280000}]}]}
    assert parse_document(Cluster, data).gpus[0].memory_mib == 280000


def test_faults_of_a_file_are_told_together() -> None:
    data = {"nodes": [{"name": "n", "gpus": [{"type": "v100", "cuont": 2}, {"type": "nope"}]}, {"name": "!"}]}
    with pytest.raises(InvalidInputError) as caught:
        parse_document(Cluster, data, origin="c.yaml")
    text = str(caught.value)
    assert "Did you mean 'count'?" in text
    assert "unknown GPU type 'nope'" in text
    assert "c.yaml: nodes.1.gpus" in text
    assert "c.yaml: nodes.1.name" in text


def test_uuids_and_node_names_must_match() -> None:
    with pytest.raises(InvalidInputError, match="1 uuids for 2 GPUs"):
        parse_document(Cluster, {"nodes": [{"name": "n", "gpus": [{"type": "v100", "count": 2, "uuids": ["GPU-1"]}]}]})
    with pytest.raises(InvalidInputError, match="used twice"):
        parse_document(Cluster, {"nodes": [{"name": "n", "gpus": []}, {"name": "n", "gpus": []}]})


def spot(**terms: object) -> dict[str, object]:
    """Return a cluster of a spot GPU and another of the same price."""
    groups = [{"type": "t4", "price_per_hour": 1.0, "spot": terms}, {"type": "v100", "price_per_hour": 1.0}]
    return {"nodes": [{"name": f"n{at}", "gpus": [group]} for at, group in enumerate(groups)]}


@pytest.mark.parametrize(
    ("terms", "price"),
    [
        ({"life_hours": 1.0, "replace_s": 36.0, "notice_s": 120.0}, 1.01),  # two GPUs for a hundredth of the time
        ({"life_hours": 1.0, "replace_s": 36.0}, 2.0),  # each lost request counts as a hundred
        ({"life_hours": 1.0, "replace_s": 36.0, "notice_s": 18.0}, 1.505),
        ({"life_hours": 12.5 / 36.0, "notice_s": 60.0}, 1.01),  # an unknown start takes 12.5 s
    ],
)
def test_a_spot_gpu_counts_with_what_its_losses_cost(terms: dict[str, object], price: float) -> None:
    cluster = parse_document(Cluster, spot(**terms))
    assert cluster.prices == pytest.approx({"t4": price, "v100": 1.0})
    assert [(gpu.rack, gpu.price_per_hour) for gpu in cluster.gpus] == [("spot", 1.0), (None, 1.0)]
    assert parse_document(Cluster, parse_yaml(cluster.dump())) == cluster


@pytest.mark.parametrize("change", [{"price_per_hour": 0}, {"price_per_hour": float("nan")}, {"price_per_hour": -1.0}])
def test_a_price_that_is_none_is_refused_with_the_cure(change: dict[str, float]) -> None:
    data = {"nodes": [{"name": "n", "gpus": [{"type": "t4", **change}]}]}
    with pytest.raises(InvalidInputError, match=r"gpus\.0\.price_per_hour.*Give a (larger|finite) number"):
        parse_document(Cluster, data)


@pytest.mark.parametrize("terms", [{}, {"life_hours": 0.0}, {"life_hours": 4.0, "notice_s": -1.0}])
def test_spot_terms_that_say_no_life_are_refused(terms: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=r"gpus\.0\.spot"):
        parse_document(Cluster, spot(**terms))


def test_a_spot_gpu_needs_its_own_price() -> None:
    data = {"nodes": [{"name": "n", "gpus": [{"type": "t4", "spot": {"life_hours": 4.0}}]}]}
    with pytest.raises(InvalidInputError, match="Give what an hour of such a GPU costs now"):
        parse_document(Cluster, data)


def test_a_cluster_survives_a_round_trip() -> None:

    data = {
        "nodes": [
            {
                "name": "a",
                "address": "10.0.0.1",
                "gpus": [{"type": "v100", "count": 2, "uuids": ["GPU-1", "GPU-2"], "price_per_hour": 1.5}],
            }
        ],
        "elastic": True,
    }
    cluster = parse_document(Cluster, data)
    assert parse_document(Cluster, parse_yaml(cluster.dump())) == cluster
    assert [gpu.uuid for gpu in cluster.gpus] == ["GPU-1", "GPU-2"]


def test_a_fixed_pool_runs_dry_and_an_elastic_one_numbers_on() -> None:
    fixed = GpuPool(Cluster.parse("v100:1,t4:1"))
    assert fixed.left("v100") == 1
    assert [gpu.id if (gpu := fixed.next_gpu("v100")) else None for _ in range(2)] == ["n0/0", None]
    assert fixed.left("v100") == fixed.left("a100") == 0
    elastic = GpuPool(Cluster.parse("v100:1,t4:1", elastic=True))
    taken = [elastic.next_gpu(kind) for kind in ("t4", "v100", "v100", "t4", "v100")]
    assert [gpu.id for gpu in taken if gpu] == ["n0/1", "n0/0", "n0/2", "n0/3", "n0/4"]


def test_gpulet_ids_never_repeat() -> None:
    ids = [gpulet_id("g", index) for index in range(800)]
    assert ids[:3] == ["g/a", "g/b", "g/c"]
    assert ids[25:28] == ["g/z", "g/aa", "g/ab"]
    assert len(set(ids)) == 800


def test_plans_list_idle_gpus_of_fixed_clusters_only() -> None:
    fixed, elastic = Cluster.parse("v100:3"), Cluster.parse("v100:3", elastic=True)
    assert len(planned_gpus(fixed, fixed.gpus[:1])) == 3
    assert len(planned_gpus(elastic, elastic.gpus[:1])) == 1


def test_a_count_that_no_cluster_has_is_refused_at_once() -> None:
    with pytest.raises(InvalidInputError, match=r"count: 1000000000: .*100000"):
        Cluster.parse("v100:1000000000")


def test_mig_devices_are_types_whose_memory_their_name_tells() -> None:
    large, small, whole = Cluster.parse("a100-3g.20gb:1,h100-1c.2g.20gb:1,a100").gpus
    assert (large.type, large.memory_mib) == ("a100-3g.20gb", 19_456)
    assert (small.memory_mib, small.price_per_hour) == (19_456, None)
    assert whole.memory_mib == 40_960


@pytest.mark.parametrize("kind", ["a100-3g", "b300-3g.20gb", "cpu-1g.5gb", "a100-3g.20"])
def test_what_only_looks_like_a_mig_device_is_refused(kind: str) -> None:
    with pytest.raises(InvalidInputError, match=f"unknown GPU type '{kind}'"):
        Cluster.parse(kind)


def test_a_name_that_a_plan_gave_to_another_type_is_not_handed_out_again() -> None:
    pool = GpuPool(Cluster.parse("a100-80gb:1,v100:1", elastic=True))
    named = pool.named_gpu("n0/0", "v100")
    bought = pool.next_gpu("a100-80gb")
    assert named is not None
    assert bought is not None
    assert (named.type, bought.type) == ("v100", "a100-80gb")
    assert named.id != bought.id
