"""Groups of models that run as one merged program: what a workload may ask for, what plans accept, what they cost."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tenuto.deployments.serve.diff import diff
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Policy, Workload, load_policy, solve
from tenuto.placement.merging import apply_merging
from tenuto.placement.planner.completion import check_plan
from tenuto.placement.program import MergedGroup, worst_split_ms
from tenuto.profiles import LatencyTable, LinearLatency, Profile, Profiles
from tenuto_lab.baselines.milp.milp import AoMilp, WsmMilp
from tenuto_lab.baselines.usher.usher import Usher, WaoUsher

ONE_GPU = Cluster.model_validate({"nodes": [{"name": "n0", "gpus": [{"type": "v100", "count": 1}]}]})


def workload(merge: Any, names: str = "ab", slo_ms: float = 100.0) -> Workload:
    models = [
        {"name": n, "source": "resnet50", "rate_rps": 10, "slo_ms": slo_ms, "latency": {"alpha_ms": 2, "beta_ms": 4}}
        for n in names
    ]
    return Workload.model_validate({"models": models, "merge": merge})


class Placed(Policy):
    """A policy that puts models where it is told, with a batch of 4."""

    name = summary = source = "placed"

    def __init__(self, *gpulets: str, share_pct: float | None = None) -> None:
        self.gpulets = gpulets
        self.share_pct = share_pct

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        del workload, profiles
        return Plan.from_data(
            {
                "policy": {"name": "placed"},
                "gpus": [{"id": gpu.id, "type": gpu.type} for gpu in cluster.gpus],
                "gpulets": [
                    {
                        "id": f"n0/0/{position}",
                        "gpu": "n0/0",
                        "share_pct": 100 / len(self.gpulets),
                        "models": [{"name": name, "batch_size": 4} for name in names],
                    }
                    for position, names in enumerate(self.gpulets)
                ],
            }
        )


def merged_row(latency: dict[int, float], memory_mib: float | None = None) -> Profiles:
    points = [{"batch_size": b, "latency_ms": ms, "memory_mib": memory_mib} for b, ms in latency.items()]
    data = {"name": "m", "gpu_type": "v100", "source": "test", "models": {"a+b": {"points": points}}}
    return Profiles([Profile.model_validate(data)])


def test_without_asking_nothing_is_merged() -> None:
    plan = solve(Placed("ab"), workload("off"), ONE_GPU, merged_row({8: 1.0}))
    assert plan.gpulets[0].merge == ()
    assert "merge" not in plan.to_data()["gpulets"][0]


def test_an_explicit_group_costs_the_sum_of_its_members_until_it_is_measured() -> None:
    plan = solve(Placed("ab"), workload([["b", "a"]]), ONE_GPU, Profiles([]))
    (group,) = plan.gpulets[0].merge
    assert (group.models, group.name, group.batch_size, group.basis) == (("a", "b"), "a+b", 8, "sum")
    assert group.latency is not None
    # 1: one of either; 2: one of each; 8: four of each, or five of one, in two batches, and three of the other
    assert [group.latency.at(b) for b in (1, 2, 3, 8)] == [6.0, 12.0, 14.0, 28.0]
    assert any("a+b is merged on n0/0/0" in note and "in turn" in note for note in plan.notes)
    assert Plan.from_data(plan.to_data()) == plan


def test_the_measured_row_is_used_where_there_is_one() -> None:
    plan = solve(Placed("ab"), workload([["a", "b"]]), ONE_GPU, merged_row({1: 5.0, 8: 20.0, 16: 40.0}, 900.0))
    (group,) = plan.gpulets[0].merge
    assert group.latency == LatencyTable(points={1: 5.0, 8: 20.0})
    assert (group.basis, group.memory_mib, group.batch_size) == ("measured", 900.0, 8)


def test_joint_batches_do_not_grow_beyond_what_was_measured_or_the_slo() -> None:
    plan = solve(Placed("ab"), workload([["a", "b"]]), ONE_GPU, merged_row({1: 5.0, 6: 20.0}))
    assert plan.gpulets[0].merge[0].batch_size == 6
    plan = solve(Placed("ab"), workload([["a", "b"]], slo_ms=15.0), ONE_GPU, Profiles([]))
    assert plan.gpulets[0].merge[0].batch_size == 3


def test_auto_merges_what_was_measured_to_pay() -> None:
    pays = solve(Placed("ab"), workload("auto"), ONE_GPU, merged_row({8: 20.0}))
    assert [g.name for g in pays.gpulets[0].merge] == ["a+b"]
    does_not = solve(Placed("ab"), workload("auto"), ONE_GPU, merged_row({8: 24.0}))
    assert does_not.gpulets[0].merge == ()
    assert any("a+b is not merged" in note and "333.3 rps" in note for note in does_not.notes)
    unknown = solve(Placed("ab"), workload("auto"), ONE_GPU, Profiles([]))
    assert unknown.gpulets[0].merge == ()
    assert any("tenuto merge a=resnet50 b=resnet50 -o FILE" in note for note in unknown.notes)


def test_a_row_is_found_by_the_profile_rows_of_renamed_models() -> None:
    points = [{"batch_size": b, "latency_ms": 4.0 + 2 * b} for b in (1, 2, 4)]
    rows = {"a": {"points": points}, "b": {"points": points}, "a+b": {"points": [{"batch_size": 8, "latency_ms": 14}]}}
    profile = Profile.model_validate({"name": "m", "gpu_type": "v100", "source": "test", "models": rows})
    models = [{"name": f"strict-{n}", "profile": n, "source": "resnet50", "rate_rps": 10, "slo_ms": 100} for n in "ab"]
    for merge in ("auto", [["strict-b", "strict-a"]]):
        asked = Workload.model_validate({"models": models, "merge": merge})
        (group,) = solve(load_policy("symphony", {}), asked, ONE_GPU, Profiles([profile])).gpulets[0].merge
        assert (group.name, group.basis) == ("strict-a+strict-b", "measured")


def test_a_share_that_was_not_measured_does_not_use_the_row() -> None:
    one = workload([["a", "b"]]).model_dump(mode="json", exclude_none=True)
    points = [{"batch_size": b, "latency_ms": 2.0 * b, "share_pct": s} for b in (1, 8) for s in (50, 100)]
    for entry in one["models"]:
        del entry["latency"]
    rows = {
        "a": {"points": points},
        "b": {"points": points},
        "c": {"points": points},
        "a+b": {"points": [{"batch_size": 8, "latency_ms": 3.0}]},
    }
    data = {"name": "m", "gpu_type": "v100", "source": "test", "models": rows}
    one["models"].append({**one["models"][0], "name": "c"})
    plan = solve(Placed("ab", "c"), Workload.model_validate(one), ONE_GPU, Profiles([Profile.model_validate(data)]))
    assert plan.gpulets[0].merge[0].basis == "sum"


@pytest.mark.parametrize(
    ("places", "why"), [(("ab", "b"), "n0/0/1 holds b"), (("a", "b", "ab"), "n0/0/0 holds a; n0/0/1 holds b")]
)
def test_groups_that_lie_apart_are_left_out_and_the_plan_says_why(places: tuple[str, ...], why: str) -> None:
    data = workload([["a", "b"]]).model_dump(mode="json", exclude_none=True)
    points = [{"batch_size": 4, "latency_ms": 9.0, "share_pct": s} for s in (50, 100)]
    for entry in data["models"]:
        del entry["latency"]
    profile = {"name": "m", "gpu_type": "v100", "source": "t", "models": {n: {"points": points} for n in "ab"}}
    profiles = Profiles([Profile.model_validate(profile)])
    plan = solve(Placed(*places), Workload.model_validate(data), ONE_GPU, profiles)
    assert not any(gpulet.merge for gpulet in plan.gpulets)
    assert any("a+b is not merged" in note and why in note for note in plan.notes)


def beside_each_other(merge: Any, together_ms: float, *, gpus: int = 1, policy: Policy | None = None) -> Plan:
    """A plan of two models that take 40 and 35 % of a GPU each, alike but for the last layers; merged, a joint batch of
    eight takes `together_ms` on the whole GPU."""

    def row(occupancy: float, latency: dict[int, float], memory: float) -> dict[str, Any]:
        metrics = {"achieved_occupancy_pct": occupancy, "wavg_ach_occ_pct": occupancy, "wavg_sm_util_pct": occupancy}
        points = [
            {"batch_size": b, "latency_ms": ms, "memory_mib": memory, "metrics": metrics} for b, ms in latency.items()
        ]
        return {"points": points}

    alone = {4: 8.0}
    rows = {
        "a": row(40.0, alone, 2000.0),
        "b": row(35.0, alone, 2000.0),
        "a+b": row(75.0, {4: 0.6 * together_ms, 8: together_ms}, 2500.0),
    }
    profile = Profile.model_validate({"name": "m", "gpu_type": "v100", "source": "t", "models": rows})
    models = [{"name": n, "source": "resnet50", "rate_rps": 480 * gpus, "slo_ms": 60} for n in "ab"]
    given = Workload.model_validate({"models": models, "merge": merge})
    return solve(policy or Usher(), given, Cluster.parse(f"v100:{gpus}"), Profiles([profile]))


@pytest.mark.parametrize("policy", [Usher(), WaoUsher()])
def test_models_side_by_side_on_a_gpu_become_one_context_with_the_sum_of_their_shares(policy: Policy) -> None:
    apart, merged = (beside_each_other(merge, 8.0, policy=policy) for merge in ("off", "auto"))
    assert [gpulet.share_pct for gpulet in apart.gpulets] == [40.0, 35.0]
    (one,) = merged.gpulets
    assert (one.share_pct, [group.models for group in one.merge]) == (75.0, [("a", "b")])
    (program,) = one.programs
    assert program.latency is not None
    assert program.latency.at(8) == pytest.approx(10.0)  # 8 ms on the whole GPU, times u/s + 1 - u
    assert (one.held_mib, sum(gpulet.held_mib or 0.0 for gpulet in apart.gpulets)) == (2500.0, 4000.0)
    # The ablation M is `merge: off`.
    assert merged.expected.goodput_rps > 1.1 * apart.expected.goodput_rps
    assert any("a+b is merged" in note and "75 %" in note for note in merged.notes)


@pytest.mark.parametrize("policy", [WsmMilp(), AoMilp()])
def test_so_they_do_under_every_policy_that_puts_them_side_by_side_without_shares(policy: Policy) -> None:
    plan = beside_each_other("auto", 8.0, policy=policy)
    (one,) = plan.gpulets
    assert (one.share_pct, [group.models for group in one.merge]) == (None, [("a", "b")])


def test_side_by_side_it_has_to_beat_both_at_once() -> None:
    plan = beside_each_other("auto", 13.0)  # in turn they take 16 ms, side by side less
    assert len(plan.gpulets) == 2
    assert any("a+b is not merged" in note and "side by side" in note for note in plan.notes)


def test_of_a_group_on_several_gpus_every_gpu_holds_all_or_it_stays_apart() -> None:
    plan = beside_each_other([["a", "b"]], 8.0, gpus=2)
    assert [(g.gpu, [r.name for r in g.models]) for g in plan.gpulets] == [("n0/0", ["a", "b"]), ("n0/1", ["a", "b"])]
    assert all(gpulet.merge for gpulet in plan.gpulets)
    three = Placed("a", "b", "ab")
    asked = workload([["a", "b"]])
    assert not any(gpulet.merge for gpulet in solve(three, asked, ONE_GPU, Profiles([])).gpulets)


def test_models_without_a_network_are_not_merged() -> None:
    data = workload([["a", "b"]]).model_dump(mode="json", exclude_none=True)
    del data["models"][0]["source"]
    plan = solve(Placed("ab"), Workload.model_validate(data), ONE_GPU, Profiles([]))
    assert not plan.gpulets[0].merge
    assert any("a has no network to merge" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("merge", "problem"),
    [
        ("on", "off"),
        ([["a"]], "two or more models"),
        ([], "two or more models"),
        ([["a", "z"]], "no such model"),
        ([["a", "b"], ["b", "c"]], "named twice"),
    ],
)
def test_a_workload_refuses_impossible_groups(merge: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        workload(merge, "abc")


def test_a_bare_off_in_yaml_is_off(tmp_path: Any) -> None:
    (tmp_path / "w.yaml").write_text("models: []\nmps: off\nmerge: off\n")
    loaded = Workload.load(tmp_path / "w.yaml")
    assert (loaded.mps, loaded.merge) == ("off", "off")


PLAN: dict[str, Any] = {
    "policy": {"name": "hand"},
    "gpus": [{"id": "n0/0", "type": "v100", "memory_mib": 60_000}],
    "gpulets": [
        {
            "id": "x",
            "gpu": "n0/0",
            "merge": [["a", "b"]],
            "models": [
                {"name": n, "batch_size": 2, "memory_mib": 9000.0, "latency": {"alpha_ms": 1, "beta_ms": 1}}
                for n in "abc"
            ],
        }
    ],
    "models": [{"name": n, "source": "resnet50", "rate_rps": 1, "slo_ms": 50} for n in "abc"],
}


def with_merge(*groups: Any) -> dict[str, Any]:
    return PLAN | {"gpulets": [PLAN["gpulets"][0] | {"merge": list(groups)}]}


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ([["a", "z"]], "no such model on gpu-let x"),
        ([["a", "b"], ["b", "c"]], "two merged groups"),
        ([["a"]], "merge.0.models"),
        ([["a", "a"]], "names a model twice"),
        ([{"models": ["a", "b"], "batch_size": 9, "latency": {"points": {4: 2.0}}}], "above the largest batch"),
        ([{"models": ["a", "b"], "colour": 1}], "colour"),
    ],
)
def test_a_plan_refuses_impossible_groups(groups: list[Any], problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        Plan.from_data(with_merge(*groups))


def test_a_plan_refuses_members_elsewhere_without_their_group() -> None:
    first = PLAN["gpulets"][0]
    alone = {"id": "y", "gpu": "n0/0", "models": [first["models"][0]]}
    with pytest.raises(InvalidInputError, match="share one queue"):
        Plan.from_data(PLAN | {"gpulets": [first, alone]})
    both = {"id": "y", "gpu": "n0/0", "models": first["models"]}
    with pytest.raises(InvalidInputError, match="the same `merge`"):
        Plan.from_data(PLAN | {"gpulets": [first, both]})
    Plan.from_data(PLAN | {"gpulets": [first, {**first, "id": "y"}]})


def test_a_plan_refuses_members_without_a_network() -> None:
    models = [{"name": "a", "rate_rps": 1, "slo_ms": 50}, *PLAN["models"][1:]]
    with pytest.raises(InvalidInputError, match="no network to merge"):
        Plan.from_data(PLAN | {"models": models})


def test_the_memory_ledger_counts_a_merged_program_once_where_it_is_known() -> None:
    sum_of_all = Plan.from_data(with_merge(["a", "b"]))
    with pytest.raises(InvalidInputError, match="27000 MiB"):
        check_plan(sum_of_all, ONE_GPU)
    check_plan(Plan.from_data(with_merge({"models": ["a", "b"], "memory_mib": 5000})), ONE_GPU)


def test_a_new_group_is_a_change_in_place() -> None:
    merged, apart = Plan.from_data(PLAN), Plan.from_data(with_merge())
    (change,) = diff(apart, merged)
    assert (change.kind, change.reasons) == ("reconfigure", ("program a+b: added",))
    (change,) = diff(merged, apart)
    assert change.reasons == ("program a+b: removed",)
    assert diff(merged, merged)[0].kind == "unchanged"


def test_the_worst_split_is_the_worst_of_all_splits() -> None:
    slow, fast = LinearLatency(alpha_ms=3, beta_ms=1), LatencyTable(points={1: 2.0, 2: 2.5, 3: 10.0})
    steps = worst_split_ms([(2, slow), (3, fast)], 5)

    def alone(planned: int, latency: Any, rows: int) -> float:
        whole, rest = divmod(rows, planned)
        return whole * latency.at(planned) + (latency.at(rest) if rest else 0.0)

    for rows in range(6):
        brute = max(alone(2, slow, mine) + alone(3, fast, rows - mine) for mine in range(rows + 1))
        assert steps[rows] == pytest.approx(max(brute, steps[rows - 1] if rows else 0.0))


def test_a_group_of_three_has_one_name_whatever_the_order() -> None:
    assert MergedGroup(models=("c", "a", "b")).name == "a+b+c"


def test_all_merges_every_network_on_the_same_gpus_whatever_it_costs() -> None:
    rng = random.Random(7)
    for _ in range(40):
        count = rng.randint(2, 9)
        names = [f"m{index}" for index in range(count)]
        sources = {name: rng.choice(["resnet50", "bert"]) for name in names}
        gpus = {name: tuple(sorted(rng.sample(["n0/0", "n0/1"], rng.randint(1, 2)))) for name in names}
        specs = [
            {"name": n, "source": sources[n], "rate_rps": 1, "slo_ms": 1e4, "latency": {"alpha_ms": 1, "beta_ms": 1}}
            for n in names
        ]
        asked = Workload.model_validate({"models": specs, "merge": "all"})
        placed = [(name, gpu) for name in names for gpu in gpus[name]]
        plan = Plan.from_data(
            {
                "policy": {"name": "hand"},
                "gpus": [{"id": gpu, "type": "v100"} for gpu in ("n0/0", "n0/1")],
                "gpulets": [
                    {
                        "id": f"{gpu}/{name}",
                        "gpu": gpu,
                        "share_pct": 10,
                        "models": [{"name": name, "batch_size": 2, "latency": {"alpha_ms": 1, "beta_ms": 1}}],
                    }
                    for name, gpu in placed
                ],
            }
        )
        made = apply_merging(plan, asked, Profiles([]))
        for gpu, gpulets in made.by_gpu().items():
            groups = [group.models for gpulet in gpulets for group in gpulet.merge]
            members = [name for group in groups for name in group]
            assert len(members) == len(set(members))
            for group in groups:
                assert len({(sources[name], gpus[name]) for name in group}) == 1
                shares = [g.share_pct for g in gpulets if {r.name for r in g.models} == set(group)]
                assert shares == [10.0 * len(group)]  # one context with the sum of the shares
            alone = Counter((sources[n], gpus[n]) for n, g in placed if g == gpu and n not in members)
            sizes = Counter((sources[n], gpus[n]) for n, g in placed if g == gpu)
            assert all(alone[kind] == (1 if size % 4 == 1 else 0) for kind, size in sizes.items())
        partly = {s for s in sources.values() if {("n0/0", "n0/1")} < {gpus[n] for n in names if sources[n] == s}}
        assert sum("one queue" in note for note in made.notes) == len(partly)
