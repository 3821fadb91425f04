"""GPUs cut into MIG instances: clusters, plans, what is refused, what a change of layout costs."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.deployments.control.change_preview import preview_plan
from tenuto.deployments.serve.diff import layout_changes
from tenuto.documents import parse_document
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Gpulet, Plan, Policy, PolicyUsed, Replica, Workload, load_policy, solve
from tenuto.placement.cluster import Gpu
from tenuto.placement.placement_constraints import domain_of, is_at
from tenuto.placement.plan import PlannedGpu
from tenuto.placement.planner import Durations
from tenuto.placement.planner.change_stages import CUTTING_S, next_stage, stages
from tenuto.placement.planner.gpu_matching import renamed
from tenuto.placement.shown.picture import draw
from tenuto.placement.shown.table import totals_of
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import LinearLatency, ModelProfile, Profile, ProfilePoint, Profiles
from tenuto.profiles.mig_instances import ALL_GPCS, instance_profiles, instance_type_of, mig_types


def cluster(**group: Any) -> Cluster:
    return Cluster.model_validate({"nodes": [{"name": "n0", "gpus": [{"type": "a100-80gb", **group}]}]})


def layout(*instances: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"profile": profile, "start": start} for profile, start in instances]


def whole(gpu: str = "n0/0") -> Gpu:
    return Gpu(id=gpu, type="a100-80gb", memory_mib=81_920, mig="managed")


def plan(*places: tuple[str, int, str] | str, gpu: str = "n0/0") -> Plan:
    """Return a plan with one gpu-let in each instance (profile, start, model) of one GPU, or on all of it (a model)."""
    gpus, gpulets = [], []
    for place in places:
        there = whole(gpu) if isinstance(place, str) else whole(gpu).cut(place[0], place[1])
        model = place if isinstance(place, str) else place[2]
        gpus.append(PlannedGpu.of(there))
        replica = Replica(name=model, batch_size=8, rate_rps=10.0, memory_mib=500.0)
        gpulets.append(Gpulet(id=f"{there.id}/a", gpu=there.id, models=(replica,)))
    specs = (
        ModelSpec(name=r.name, rate_rps=10, slo_ms=100, latency=LinearLatency(alpha_ms=1, beta_ms=4))
        for g in gpulets
        for r in g.models
    )
    return Plan(policy=PolicyUsed(name="hand"), gpus=tuple(gpus), gpulets=tuple(gpulets), models=tuple(specs))


METRICS = {"achieved_occupancy_pct": 30.0, "wavg_ach_occ_pct": 30.0, "wavg_sm_util_pct": 30.0}


# --- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", mig_types())
def test_a_gpu_has_room_for_its_largest_instance_and_for_seven_of_the_smallest(kind: str) -> None:
    profiles = instance_profiles(kind)
    assert max(size.gpcs for size in profiles.values()) == ALL_GPCS
    for name, size in profiles.items():
        assert instance_type_of(f"{kind}-{name}") is not None
        assert all(start + size.slices <= 8 for start in size.starts)
    smallest = next(name for name, size in profiles.items() if size.gpcs == size.slices == 1)
    cut = Cluster.model_validate(
        {
            "nodes": [
                {
                    "name": "n",
                    "gpus": [{"type": kind, "mig": "fixed", "instances": layout(*((smallest, s) for s in range(7)))}],
                }
            ]
        }
    )
    assert len(cut.gpus) == 7


# --- clusters -----------------------------------------------------------------------------------------------------


def test_in_place_of_a_gpu_that_is_cut_there_are_its_instances() -> None:
    found = cluster(count=2, mig="fixed", instances=layout(("3g.40gb", 4), ("4g.40gb", 0)))
    assert [gpu.id for gpu in found.gpus] == ["n0/0.4", "n0/0.0", "n0/1.4", "n0/1.0"]
    assert {gpu.device for gpu in found.gpus} == {"n0/0", "n0/1"}
    assert found.gpus[0].type == "a100-80gb-3g.40gb"
    assert found.gpus[0].memory_mib < 41_000
    assert Cluster.model_validate(found.model_dump(mode="json", by_alias=True)) == found


def test_gpus_that_plans_may_cut_are_whole_to_those_that_cut() -> None:
    found = cluster(count=2, mig="managed", instances=layout(("3g.40gb", 4)))
    assert [(gpu.id, gpu.type) for gpu in found.uncut.gpus] == [("n0/0", "a100-80gb"), ("n0/1", "a100-80gb")]
    assert found.uncut.gpus[0].price_per_hour == cluster().gpus[0].price_per_hour
    small = cluster(mig="managed", memory_mib=70_000.0, instances=layout(("3g.40gb", 4)))
    assert [gpu.memory_mib for gpu in small.uncut.gpus] == [70_000.0]
    kept = cluster(mig="fixed", instances=layout(("3g.40gb", 4)))
    assert kept.uncut.gpus == kept.gpus
    (short,) = Cluster.parse("a100-80gb:1:mig").gpus
    assert (short.type, short.mig) == ("a100-80gb", "managed")


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("managed", [(), (("3g.40gb", 4),), (("3g.40gb", 0), ("3g.40gb", 4))])
def test_gpus_that_plans_may_not_cut_stay_as_they_are(managed: tuple[tuple[str, int], ...], *, mixed: bool) -> None:
    base: dict[str, Any] = {"type": "a100-80gb"}
    fixed = [
        {**base, "mig": "fixed", "instances": layout(*at)}
        for at in ([("3g.40gb", 4), ("4g.40gb", 0)], [("1g.10gb", 2)])
    ]
    groups = [{**base, "mig": "managed", "count": 2, "instances": layout(*managed)}, *fixed, *([base] if mixed else [])]
    found = Cluster.model_validate({"nodes": [{"name": "n0", "gpus": groups}]})
    stays = {gpu for gpu in found.gpus if gpu.mig != "managed"}
    (place,) = [gpu.cut("1g.10gb", 0) for gpu in found.uncut.gpus if gpu.id == "n0/0"]
    for cluster in (found.uncut, found.cut_as([]), found.cut_as([place])):
        assert {gpu for gpu in cluster.gpus if gpu.mig != "managed"} == stays
        assert len({gpu.id for gpu in cluster.gpus}) == len(cluster.gpus)
    assert [gpu.id for gpu in found.as_cut.gpus] == [gpu.id for gpu in found.gpus]


def test_leaving_out_a_gpu_leaves_out_its_instances() -> None:
    found = cluster(count=2, mig="fixed", instances=layout(("3g.40gb", 4)))
    assert [gpu.id for gpu in found.model_copy(update={"left_out": ("n0/0",)}).gpus] == ["n0/1.4"]
    assert [gpu.id for gpu in found.model_copy(update={"left_out": ("n0/1.4",)}).gpus] == ["n0/0.4"]


@pytest.mark.parametrize(
    ("group", "fault"),
    [
        ({"instances": layout(("3g.40gb", 4))}, "without `mig`"),
        ({"mig": "fixed"}, "without `instances`"),
        ({"type": "v100", "mig": "managed"}, "'v100' has no MIG.*a100"),
        ({"mig": "fixed", "instances": layout(("3g.20gb", 4))}, "no MIG profile '3g.20gb'"),
        ({"mig": "fixed", "instances": layout(("3g.40gb", 2))}, "cannot begin at memory slice 2.*0, 4"),
        ({"mig": "fixed", "instances": layout(("3g.40gb", 4), ("1g.10gb", 6))}, "same memory slices"),
        (
            {"count": 2, "mig": "fixed", "instances": [{"profile": "3g.40gb", "start": 4, "uuid": "MIG-1"}]},
            "one group per GPU",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused(group: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidInputError, match=f"(?s){fault}"):
        parse_document(Cluster, {"nodes": [{"name": "n0", "gpus": [{"type": "a100-80gb", **group}]}]}, origin="cluster")


# --- plans --------------------------------------------------------------------------------------------------------


def test_a_plan_with_instances_survives_its_file() -> None:
    found = plan(("3g.40gb", 4, "a"), ("4g.40gb", 0, "b"))
    read = Plan.from_data(found.to_data())
    assert read == found
    assert read.devices(gpu.id for gpu in read.gpus) == ("n0/0",)
    assert totals_of(read).gpus == 1


@pytest.mark.parametrize(
    ("places", "fault"),
    [
        ([("3g.40gb", 4, "a"), ("2g.20gb", 4, "b")], "same memory slices"),
        ([("3g.40gb", 2, "a")], "cannot begin at memory slice 2"),
        (["a", ("3g.40gb", 4, "b")], "whole and cut"),
    ],
)
def test_instances_that_cannot_be_together_are_refused(places: list[Any], fault: str) -> None:
    with pytest.raises(InvalidInputError, match=fault):
        plan(*places).check_references()


def test_mig_on_a_type_without_it_and_unknown_instances_are_refused() -> None:
    data = plan(("3g.40gb", 4, "a")).to_data()
    data["gpus"][0]["type"] = "v100-3g.40gb"
    with pytest.raises(InvalidInputError, match="GPU type 'v100' has no MIG"):
        Plan.from_data(data)
    data["gpus"][0]["type"] = "v100"
    with pytest.raises(InvalidInputError, match="its type is no MIG instance"):
        Plan.from_data(data)
    data = plan(("3g.40gb", 4, "a")).to_data()
    data["gpulets"][0]["gpu"] = "n0/0"
    with pytest.raises(InvalidInputError, match=r"cut into MIG instances: n0/0\.4"):
        Plan.from_data(data)


def test_instances_of_a_gpu_are_lost_and_named_together() -> None:
    first, second = plan(("3g.40gb", 4, "a"), ("4g.40gb", 0, "b")).gpus
    assert domain_of(first, "gpu") == domain_of(second, "gpu") == "n0/0"
    assert is_at(first, ["n0/0"])
    assert is_at(first, ["n0/0.4"])
    assert not is_at(second, ["n0/0.4"])


def test_the_picture_frames_each_instance() -> None:
    picture = draw(plan(("3g.40gb", 4, "a"), ("2g.20gb", 0, "b")))
    assert picture.count('class="instance"') == 2
    assert picture.count('class="bar"') == 1
    assert "MIG instance 3g.40gb" in picture


# --- what holds inside an instance --------------------------------------------------------------------------------


def measured() -> Profiles:
    """Return a profile in which two equal processes of `a` share an instance for free, and two of `b` do not."""
    rows = {}
    for name, beside in (("a", 10.0), ("b", 20.0)):
        points = (
            ProfilePoint(
                batch_size=8,
                share_pct=42.86,
                mig_gpcs=3,
                latency_ms=10,
                processes_ms={2: beside},
                memory_mib=100,
                metrics=METRICS,
            ),
            ProfilePoint(batch_size=8, latency_ms=5.0, memory_mib=100, metrics=METRICS),
        )
        rows[name] = ModelProfile(points=points)
    return Profiles([Profile(name="test", gpu_type="a100", source="test", models=rows)])


def workload(*names: str, rate_rps: float = 20.0) -> Workload:
    return Workload(models=tuple(ModelSpec(name=name, rate_rps=rate_rps, slo_ms=100) for name in names))


def test_what_was_measured_in_instances_holds_for_instances_of_as_many_gpcs() -> None:
    profiles = measured()
    assert profiles.get("a", "a100-80gb-3g.40gb").latency_ms(8) == 10
    assert profiles.get("a", "a100-3g.20gb").latency_ms(8) == 10
    assert profiles.get("a", "a100-80gb").latency_ms(8) == 5
    with pytest.raises(InvalidInputError):
        profiles.get("a", "a100-80gb-2g.20gb")


@pytest.mark.parametrize(
    ("held", "slowdowns"), [(["a", "a"], [1.0, 1.0]), (["b", "b"], [2.0, 2.0]), (["a", "b"], [1.5, 1.5])]
)
def test_processes_in_one_instance_are_as_slow_as_measured_and_those_in_two_are_not(
    held: list[str], slowdowns: list[float]
) -> None:
    class ByHand(Policy):
        name = summary = source = "hand"

        def place(self, asked: Workload, there: Cluster, profiles: Profiles) -> Plan:
            first, second = there.gpus
            gpulets = [
                Gpulet(id=f"{first.id}/{letter}", gpu=first.id, models=(Replica(name=name, batch_size=8),))
                for letter, name in zip("ab", held, strict=True)
            ]
            other = Gpulet(id=f"{second.id}/a", gpu=second.id, models=(Replica(name=held[0], batch_size=8),))
            gpus = tuple(PlannedGpu.of(gpu) for gpu in there.gpus)
            return Plan(policy=PolicyUsed(name="hand"), gpus=gpus, gpulets=(*gpulets, other), overcommits=True)

    there = cluster(mig="fixed", instances=layout(("3g.40gb", 4), ("3g.40gb", 0)))
    found = solve(ByHand(), workload(*dict.fromkeys(held)), there, measured())  # type: ignore[arg-type]
    assert [gpulet.models[0].slowdown for gpulet in found.gpulets] == [*slowdowns, 1.0]
    assert found.expected.gpus_used == 1
    assert found.expected.cost_per_hour == cluster().gpus[0].price_per_hour


def test_memory_is_counted_per_instance() -> None:
    large = Profiles(
        [
            Profile(
                name="test",
                gpu_type="a100",
                source="test",
                models={
                    "a": ModelProfile(
                        points=(
                            ProfilePoint(batch_size=1, share_pct=14.29, mig_gpcs=1, latency_ms=5, memory_mib=12_000),
                        )
                    )
                },
            )
        ]
    )
    there = cluster(mig="fixed", instances=layout(("1g.10gb", 0), ("1g.20gb", 2)))
    found = solve(load_policy("symphony", {"time_limit_s": "0"}), workload("a"), there, large)
    assert {gpulet.gpu for gpulet in found.gpulets} == {"n0/0.2"}


@pytest.mark.parametrize("policy", ["symphony", "gpulet", "tenuto"])
def test_every_policy_plans_inside_given_instances(policy: str) -> None:
    there = cluster(mig="fixed", instances=layout(("3g.40gb", 4), ("3g.40gb", 0)))
    options = {"requests": "500"} if policy == "tenuto" else {}
    found = solve(load_policy(policy, options), workload("a", "b"), there, measured())
    assert not found.unserved
    assert {gpulet.gpu for gpulet in found.gpulets} <= {"n0/0.4", "n0/0.0"}


# --- changes ------------------------------------------------------------------------------------------------------


def test_a_change_of_layout_says_what_it_empties() -> None:
    old, new = plan(("3g.40gb", 4, "a"), ("4g.40gb", 0, "b")), plan(("3g.40gb", 4, "a"), ("2g.20gb", 0, "b"))
    (change,) = layout_changes(old, new)
    assert (change.gpu, change.before, change.after) == ("n0/0", ("4g.40gb at 0",), ("2g.20gb at 0",))
    assert change.emptied == ("n0/0.0/a",)
    assert change.rate_rps == 10
    assert layout_changes(old, old) == ()
    assert preview_plan(old, new).layouts[0].gpu == "n0/0"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([("3g.40gb", 4, "a"), ("4g.40gb", 0, "b")], [("3g.40gb", 4, "a"), ("2g.20gb", 0, "b")]),
        ([("7g.80gb", 0, "a")], [("3g.40gb", 4, "a")]),
        (["a"], [("3g.40gb", 4, "a")]),
        ([("3g.40gb", 4, "a")], ["a"]),
    ],
)
def test_instances_are_empty_before_others_take_their_place(old: list[Any], new: list[Any]) -> None:
    now, target = plan(*old), plan(*new)
    target = renamed(target, now)
    rates = {spec.name: spec.rate_rps for spec in now.models}
    gpus = tuple(gpu.as_gpu.model_copy(update={"memory_mib": 81_920}) for gpu in now.gpus)
    seen, stage = [now], now
    while (following := next_stage(stage, target, gpus, rates)) is not None:
        following.check_references()
        seen.append(following)
        stage = following
        assert len(seen) < 10
    assert {(g.id, g.type) for g in stage.gpus} == {(g.id, g.type) for g in target.gpus}
    durations = Durations(1.0, 1.0)
    assert sum(stage.lasts_s(durations) for stage in stages(now, target, gpus, rates)) >= CUTTING_S


def test_a_cluster_may_be_taken_as_it_is_cut() -> None:
    there = cluster(count=2, mig="managed", instances=layout(("3g.40gb", 4)))
    assert {gpu.mig for gpu in there.as_cut.gpus} == {"fixed"}
    assert there.as_cut.uncut.gpus == there.as_cut.gpus
    assert {gpu.mig for gpu in cluster(mig="managed").as_cut.gpus} == {None}
