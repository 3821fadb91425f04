"""The baselines of iGniter's paper: every fact it states about their plans, and what they do at the edges.

What does not come out: GSLICE+ ends its loops where unpublished measurements led it, so its shares and batches are
only close, and four workloads violate instead of three. FFD+ has nine violations instead of ten: W1, W3 and W6 stay
2 to 11 % below half their SLO in the analytic model, whose stated errors reach 9 %, and the paper judges by percentile.
FFD+ with iGniter's allocation is said to put W2 on GPU 5 with 15 %; see
`test_where_first_fit_with_allocation_puts_w2`.
"""

from __future__ import annotations

from typing import Any

import pytest

from lab.tests.baselines.igniter.cases import (
    FACTS,
    Placed,
    gpus_of,
    placed,
    profiles,
    three,
    together,
    twelve,
    violating,
)
from lab.tests.baselines.igniter.test_igniter import check_what_an_elastic_cluster_buys
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Policy, Workload, load_policy, policy_names
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.first_fit import FirstFitPlus, FirstFitPlusPlus
from tenuto_lab.baselines.gpulets_plus import ALL_KNEES, GpuletsPlus, knee_by_bend
from tenuto_lab.baselines.gslice import Gslice
from tenuto_lab.baselines.igniter.igniter import Igniter
from tenuto_lab.baselines.igniter.packing import demands_of
from tenuto_lab.baselines.igniter.shares import allocate
from tests.placement.published import decided, thesis, v100s

HEADLINE, STATED, TABLE_1 = FACTS["headline"], FACTS["plan_facts_stated"], FACTS["table1_example"]
BASELINES = [FirstFitPlus(), FirstFitPlusPlus(), Gslice(), GpuletsPlus()]


def solved(policy: Policy, workload: Workload, cluster: Cluster | None = None) -> Plan:
    return decided(policy, workload, cluster or v100s(1, elastic=True), profiles())


def published(*gpus: dict[str, Any]) -> list[list[Placed]]:
    """Return the plan that the paper's table 1 states."""
    rows = {row["model"]: row for row in TABLE_1["workloads"]}
    return [
        [
            Placed(name, name, part["share_pct"], part["batch"], rows[name]["rate_rps"], rows[name]["slo_ms"])
            for name, part in gpu.items()
            if name in rows
        ]
        for gpu in gpus
    ]


@pytest.mark.parametrize("policy", ["igniter", "gslice", "gpulets"])
def test_the_published_plans_of_table_1_violate_as_published(policy: str) -> None:
    plan = TABLE_1[policy]
    gpus = [plan["gpu1"], plan["gpu2"]] if policy == "gpulets" else [plan]
    assert violating(published(*gpus)) == set(plan["violations"])


def test_gpulets_plus_makes_the_plan_stated_for_the_twelve_workloads() -> None:
    plan = solved(GpuletsPlus(), twelve())
    found, gpus = placed(plan), together(plan)
    assert plan.expected.gpus_used == HEADLINE["gpus"]["gpu_lets_plus"]
    assert plan.expected.cost_per_hour == HEADLINE["cost_per_h_usd"]["gpu_lets_plus"]
    w4 = STATED["W4"]["gpu_lets_plus"]
    assert found["W4"] == (w4["share_pct"], w4["batch"])
    assert found["W2"][0] == STATED["W2"]["gpu_lets_plus"]["share_pct"]
    assert "W2" in gpus[STATED["W2"]["gpu_lets_plus"]["gpu"] - 1]
    assert found["W9"][0] == STATED["W9"]["gpu_lets_plus_share_pct"]
    assert {share for share, _ in found.values()} <= set(STATED["gpu_lets_choices_pct"])
    assert max(len(gpulets) for gpulets in plan.by_gpu().values()) == 2


def test_the_workloads_that_violate_under_gpulets_plus_are_the_published_ones() -> None:
    gpus = gpus_of(solved(GpuletsPlus(), twelve()), twelve())
    assert violating(gpus, measured=True) == set(HEADLINE["violating_under_gpu_lets_plus"])
    # The analytic model is up to 20 % slower than the measurements at batches of one and two, which makes two more.
    assert violating(gpus) == {*HEADLINE["violating_under_gpu_lets_plus"], "W9", "W10"}


def test_gpulets_plus_by_the_rules_of_the_first_example() -> None:
    plan = solved(GpuletsPlus(batch="largest", order="load", check_neighbours=False), three())
    stated, found = TABLE_1["gpulets"], placed(plan)
    assert plan.expected.gpus_used == stated["gpus"]
    for gpu in ("gpu1", "gpu2"):
        assert set(stated[gpu]) in together(plan)
        for model, part in stated[gpu].items():
            assert found[model] == (part["share_pct"], part["batch"])
    assert violating(gpus_of(plan, three())) == set(stated["violations"])


def test_gpulets_plus_that_books_what_is_left_beside_a_neighbour_keeps_every_rate() -> None:
    workload = twelve()
    plan = solved(GpuletsPlus(booked="beside"), workload)
    assert not any("carries" in note for note in plan.notes)
    for gpulet in plan.gpulets:
        replica = gpulet.models[0]
        assert replica.latency_ms is not None
        assert replica.latency_ms <= workload[replica.name].slo_ms / 2


def test_gslice_ends_close_to_the_published_shares_of_table_1() -> None:
    plan, stated = solved(Gslice(), three()), TABLE_1["gslice"]
    assert plan.expected.gpus_used == stated["gpus"]
    for model, (share, batch) in placed(plan).items():
        assert share is not None
        assert abs(share - stated[model]["share_pct"]) <= 5.0
        assert abs(batch - stated[model]["batch"]) <= 2
    assert placed(plan)["vgg19"] == (stated["vgg19"]["share_pct"], stated["vgg19"]["batch"])
    assert plan.overcommits


def test_gslice_takes_the_published_number_of_gpus() -> None:
    plan = solved(Gslice(), twelve())
    assert plan.expected.gpus_used == HEADLINE["gpus"]["gslice_plus"]
    assert plan.expected.cost_per_hour == HEADLINE["cost_per_h_usd"]["gslice_plus"]
    assert violating(gpus_of(plan, twelve())) == {"W1", "W2", "W3", "W6"}  # published: three, not named


def test_violations_of_igniter_and_ffd_plus() -> None:
    assert len(violating(gpus_of(solved(Igniter(), twelve()), twelve()))) == HEADLINE["violations"]["igniter"]
    ffd = violating(gpus_of(solved(FirstFitPlus(), twelve()), twelve()))
    assert ffd == {spec.name for spec in twelve().models} - {"W1", "W3", "W6"}  # published: ten, not named


def test_where_first_fit_with_allocation_puts_w2() -> None:
    """The paper: GPU 5 with 15 %. First fit of W2 on iGniter's placement of the others is on GPU 5, but with 10 %.

    All of GPU 5 grow by 20 points for it. No order of updating the shares in Algorithm 2 gives 15 %, nor does a change
    of the coefficients within their rounding. When all workloads are placed first fit, W2 is alone on GPU 6.
    """
    demands = {spec.name: demands_of(spec, "v100", profiles())[0][0] for spec in twelve().models}
    plan = solved(Igniter(), Workload(models=tuple(spec for spec in twelve().models if spec.name != "W2")))
    fits = []
    for gpulets in plan.by_gpu().values():
        names = [g.models[0].name for g in gpulets] + ["W2"]
        units = [round((g.share_pct or 0.0) / 2.5) for g in gpulets] + [demands["W2"].lower_units or 0]
        fits.append(allocate([demands[name] for name in names], units))
    first = next(index for index, shares in enumerate(fits) if shares is not None)
    shares = fits[first]
    assert first + 1 == STATED["W2"]["ffd_plus_with_alloc"]["gpu"]
    assert shares is not None
    assert shares[-1] * 2.5 == 10.0
    alone = solved(FirstFitPlusPlus(), twelve())
    assert together(alone)[5] == {"W2"}
    assert placed(alone)["W2"] == (7.5, 3)


def test_the_knees_are_the_published_efficient_shares() -> None:
    rows = profiles().for_type("v100")
    shares = STATED["gpu_lets_choices_pct"]
    knees = {
        name: knee_by_bend([(share, rows[name].throughput_rps(1, share)) for share in map(float, shares)])
        for name in ("resnet50", "vgg19")
    }
    assert knees == {"resnet50": 60.0, "vgg19": 40.0}
    assert knee_by_bend([(20.0, 100.0), (40.0, 200.0)]) == 40.0


def test_no_knee_depends_on_the_unit_of_the_rate() -> None:
    for model in profiles().for_type("v100").values():
        for knee in ALL_KNEES.values():
            a_second = [(share, model.throughput_rps(1, share)) for share in (20.0, 40.0, 50.0, 60.0, 80.0)]
            an_hour = [(share, 3600.0 * rate) for share, rate in a_second]
            assert knee(a_second) == knee(an_hour)


@pytest.mark.parametrize("policy", BASELINES, ids=lambda policy: policy.name)
def test_plans_are_deterministic_and_survive_yaml(policy: Policy) -> None:
    plan = solved(policy, twelve())
    assert plan == solved(policy, twelve()) == Plan.from_data(plan.to_data())


@pytest.mark.parametrize("policy", BASELINES, ids=lambda policy: policy.name)
def test_a_small_cluster_names_what_it_cannot_serve(policy: Policy) -> None:
    plan = solved(policy, twelve(), v100s(2))
    assert plan.unserved
    assert all(plan.unserved_reasons[name] for name in plan.unserved)


def test_gpulets_plus_with_other_interference_models() -> None:
    plain = solved(GpuletsPlus(interference=False), twelve())
    for name in ("igniter", "gpulet"):
        assert solved(GpuletsPlus(interference=name), twelve()).expected.models != plain.expected.models


def test_gslice_within_the_gpu() -> None:
    plan = solved(Gslice(overcommit=False), twelve())
    assert not plan.overcommits
    assert any("expected to miss" in note for note in plan.notes)


def test_gpulets_plus_gives_unmeasured_models_no_neighbours_and_whole_gpus() -> None:
    workload = Workload.model_validate(
        {
            "models": [
                {"name": "resnet50", "rate_rps": 100, "slo_ms": 150},
                {"name": "alexnet", "rate_rps": 100, "slo_ms": 150},
            ]
        }
    )
    plan = decided(GpuletsPlus(), workload, v100s(3), thesis())
    assert not plan.unserved
    assert [g.share_pct for g in plan.gpulets] == [None, None]
    data = load_shipped("igniter-v100").model_dump(by_alias=True)
    for point in data["models"]["resnet50"]["points"]:
        point["metrics"] = {}
    unmeasured = Profiles([Profile.model_validate(data)])
    for check in (True, False):
        plan = decided(GpuletsPlus(check_neighbours=check), workload, v100s(3), unmeasured)
        assert len(together(plan)) == 2


def test_policies_are_found_by_name() -> None:
    assert {"gslice", "gpulets+", "igniter", "ffd++"} <= set(policy_names())


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("gslice", {"placement": "best"}),
        ("gslice", {"threshold": "2"}),
        ("gslice", {"observed": "all"}),
        ("gslice", {"start_share_pct": "0"}),
        ("gslice", {"share_rounds": "0"}),
        ("gslice", {"rounds": "3"}),
        ("gpulets+", {"shares": "0,50"}),
        ("gpulets+", {"shares": "120"}),
        ("gpulets+", {"batch": "big"}),
        ("gpulets+", {"order": "slo"}),
        ("gpulets+", {"booked": "x"}),
        ("gpulets+", {"knee": "x"}),
        ("gpulets+", {"interference": "x"}),
        ("gpulets+", {"max_batch": "0"}),
        ("gpulets+", {"max_batch": "many"}),
    ],
)
def test_wrong_options_are_refused_by_name(policy: str, options: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        load_policy(policy, options)


@pytest.mark.parametrize("policy", BASELINES, ids=lambda policy: policy.name)
def test_an_absurd_rate_is_refused_or_carried_in_part(policy: Policy) -> None:
    workload = Workload.model_validate({"models": [{"name": "resnet50", "rate_rps": 1e9, "slo_ms": 40}]})
    plan = solved(policy, workload, v100s(2))
    assert 0 < plan.expected.goodput_rps < 1e4
    assert plan.unserved_reasons["resnet50"]


def test_an_absurd_rate_on_an_elastic_cluster() -> None:
    def asked(rate_rps: float) -> Workload:
        return Workload.model_validate({"models": [{"name": "resnet50", "rate_rps": rate_rps, "slo_ms": 40}]})

    assert "more than 1,024 replicas" in solved(Igniter(), asked(4e6)).unserved_reasons["resnet50"]
    for policy in (Igniter(), GpuletsPlus()):
        with pytest.raises(InvalidInputError, match=r"models\.0\.rate_rps: .* an elastic cluster grows to 10,000"):
            solved(policy, asked(1e9))


def test_ffd_plus_takes_five_gpus() -> None:
    plan = solved(FirstFitPlus(), twelve())
    assert plan.expected.gpus_used == FACTS["headline"]["gpus"]["ffd_plus"]
    assert plan.expected.cost_per_hour == FACTS["headline"]["cost_per_h_usd"]["ffd_plus"]
    assert "W2" in together(plan)[FACTS["plan_facts_stated"]["W2"]["ffd_plus"]["gpu"] - 1]


def test_first_fit_on_an_elastic_cluster_buys_the_type_that_serves_all_at_the_lowest_price() -> None:
    check_what_an_elastic_cluster_buys(FirstFitPlusPlus())
