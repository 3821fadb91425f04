"""What must hold for every policy, of the laboratory's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lab.tests.baselines.igniter.cases import three
from tenuto.placement import Policy, Workload
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.ffd import FirstFitDecreasing
from tenuto_lab.baselines.first_fit import FirstFitPlus, FirstFitPlusPlus
from tenuto_lab.baselines.gpulets_plus import GpuletsPlus
from tenuto_lab.baselines.gslice import Gslice
from tenuto_lab.baselines.ideal import Ideal
from tenuto_lab.baselines.igniter.igniter import Igniter
from tenuto_lab.baselines.milp.milp import AoMilp, WsmMilp
from tenuto_lab.baselines.sbp import SquishyBinPacking
from tenuto_lab.baselines.usher.usher import Usher, WaoUsher
from tenuto_lab.baselines.without_a_plan import MpsDefault, SelfTuning
from tests.placement.policies.gpulet.turns import IGNITER
from tests.placement.policies.test_properties import (
    SHARES,
    Case,
    check_a_cluster_without_gpus,
    check_an_empty_workload,
    check_plans,
    check_shared_memory,
    check_what_fits_nowhere,
    tight,
)
from tests.placement.published import decided, thesis, v100s
from tests.placement.test_merging import beside_each_other
from tests.placement.test_watch import FEW, check_that_it_stops, vision

CASES: dict[str, Case] = {
    "igniter": Case(Igniter, 0.5, **tight),
    "usher": Case(Usher, 1.0, thesis(), models=5),
    "wao-usher": Case(WaoUsher, 1.0, thesis(), models=4, examples=5),
    "ao-milp": Case(AoMilp, 1.0, thesis(), examples=6),
    "wsm-milp": Case(WsmMilp, 1.0, thesis(), examples=6),
    "ffd": Case(FirstFitDecreasing, 0.5, thesis()),
    "sbp": Case(SquishyBinPacking, 1.0, **tight),
    "sbp, halves": Case(lambda: SquishyBinPacking(halves=True), 1.0, **tight),
    "ffd++": Case(FirstFitPlusPlus, 0.5, **tight),
    "ffd+": Case(FirstFitPlus, math.inf, **tight),
    "gslice": Case(Gslice, math.inf, **tight),
    "gslice, no over-commitment": Case(lambda: Gslice(overcommit=False), math.inf, **tight),
    "gpulets+": Case(GpuletsPlus, 0.5, **tight),
    "self-tuning": Case(lambda: SelfTuning(max_steps=500), 1.0, **tight),
    "mps-default": Case(MpsDefault, math.inf, **tight),
    "ideal": Case(lambda: Ideal(max_steps=500), 1.0, SHARES, (12, 120), 4, 2, 500, 6),
}


@pytest.mark.parametrize("name", CASES)
def test_plans_are_valid_deterministic_and_leave_their_input_alone(name: str) -> None:
    check_plans(CASES[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("elastic", [False, True])
def test_an_empty_workload_gives_an_empty_plan(name: str, elastic: bool) -> None:
    check_an_empty_workload(CASES[name], elastic)


@pytest.mark.parametrize("name", CASES)
def test_a_cluster_without_gpus_serves_nobody(name: str) -> None:
    check_a_cluster_without_gpus(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_fits_nowhere_is_reported_not_dropped(name: str) -> None:
    check_what_fits_nowhere(CASES[name])


@pytest.mark.parametrize("policy", [FirstFitDecreasing(), SquishyBinPacking()])
def test_models_that_take_turns_share_what_only_a_running_batch_needs(policy: Policy) -> None:
    check_shared_memory(policy)


@pytest.mark.parametrize(
    ("make", "load", "profiles"),
    [
        (lambda: Ideal(max_steps=2_000), FEW, IGNITER),
        (lambda: SelfTuning(max_steps=2_000), FEW, IGNITER),
        (Usher, vision(), thesis()),
    ],
)
@pytest.mark.parametrize("words", [1, 2])
def test_a_policy_that_is_stopped_gives_a_plan_of_what_it_has(
    make: Callable[[], Policy], load: Workload, profiles: Profiles, words: int
) -> None:
    check_that_it_stops(make, load, profiles, words)


def test_models_that_run_side_by_side_without_shares_are_merged() -> None:
    (one,) = beside_each_other("auto", 8.0, policy=MpsDefault()).gpulets
    assert (one.share_pct, [group.models for group in one.merge]) == (None, [("a", "b")])


@pytest.mark.parametrize("make", [FirstFitPlusPlus, Gslice])
def test_memory_counts_where_it_was_measured(make: Callable[[], Policy]) -> None:
    data = load_shipped("igniter-v100").model_dump(by_alias=True)
    for model in data["models"].values():
        for point in model["points"]:
            point["memory_mib"] = 6000.0
    big = Profiles([Profile.model_validate(data)])
    assert decided(make(), three(), v100s(1, elastic=True), big).expected.gpus_used == 2
