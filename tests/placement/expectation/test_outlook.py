"""The flow of requests over gpu-lets that a promise rests on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.trial import Trials
from tenuto.placement import Plan, Workload, load_policy, solve
from tenuto.placement.components import connected_with
from tenuto.placement.expectation.component import mean_of_capped
from tenuto.placement.expectation.outlook import Outlooks, Traffic, expected_of
from tenuto.placement.plan_edits import with_gpulets
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.igniter.igniter import Igniter
from tests.instruments.near_plans import changed_scene
from tests.instruments.plans import make_plan
from tests.placement.published import v100s


def test_one_queue_keeps_alike_gpulets_equally_busy() -> None:
    """Two GPUs alike: a model on both, and beside it on each another one, which its batches slow down alike."""

    def replica(name: str) -> dict[str, object]:
        return {"name": name, "batch_size": 4, "slowdown": 2.0, "latency": {"alpha_ms": 2.0, "beta_ms": 2.0}}

    places = [("x", 0, "both"), ("y", 0, "left"), ("z", 1, "both"), ("w", 1, "right")]
    plan = Plan.from_data(
        {
            "policy": {"name": "hand"},
            "gpus": [{"id": f"n0/{i}", "type": "v100"} for i in range(2)],
            "gpulets": [
                {"id": let, "gpu": f"n0/{gpu}", "share_pct": 50, "models": [replica(name)]} for let, gpu, name in places
            ],
            "models": [{"name": name, "rate_rps": 250, "slo_ms": 40} for name in ("both", "left", "right")],
        }
    )
    models = expected_of(plan).models
    assert models["left"].goodput_rps == pytest.approx(models["right"].goodput_rps)
    assert models["left"].goodput_rps < 250


def plan_of(*models: tuple[str, float, float, float, float], slowdown: float = 1.0, batch: int = 32) -> Plan:
    """Return models (name, rate, SLO, alpha, beta) that take turns on one GPU."""
    return Plan.from_data(
        {
            "policy": {"name": "hand"},
            "gpus": [{"id": "n0/0", "type": "v100"}],
            "gpulets": [
                {
                    "id": "n0/0/a",
                    "gpu": "n0/0",
                    "models": [
                        {
                            "name": name,
                            "batch_size": batch,
                            "slowdown": slowdown,
                            "latency": {"alpha_ms": alpha, "beta_ms": beta},
                        }
                        for name, _, _, alpha, beta in models
                    ],
                }
            ],
            "models": [{"name": name, "rate_rps": rate, "slo_ms": slo} for name, rate, slo, _, _ in models],
        }
    )


def test_a_rare_model_beside_busy_ones_is_not_promised_in_full() -> None:
    """Where time is short for a moment, a request that takes as long as thirty others is given up first."""
    rare, busy = ("rare", 30.0, 30.0, 0.1, 4.9), ("busy", 5_000.0, 60.0, 0.15, 1.0)
    parts = Outlooks().of(plan_of(rare, busy)).parts
    assert parts["busy"] > 0.995
    assert parts["rare"] < 0.99


@pytest.mark.parametrize(
    ("gpus", "rate_rps", "slo_ms", "alpha_ms", "beta_ms"),
    [
        (1, 866.0, 50.0, 2.2, 11.0),
        (1, 762.0, 60.0, 3.0, 3.0),
        (2, 554.0, 45.0, 2.0, 15.0),
        (3, 1_200.0, 34.0, 1.5, 12.0),
    ],
)
def test_gpulets_of_one_program_serve_what_is_promised_at_and_beyond_their_capacity(
    gpus: int, rate_rps: float, slo_ms: float, alpha_ms: float, beta_ms: float
) -> None:
    """Beyond it hardly any time is idle, and gpu-lets that run out of phase find one free soon."""
    plan = plan_of(("m", rate_rps, slo_ms, alpha_ms, beta_ms), batch=16)
    plan = plan.model_copy(
        update={
            "gpus": tuple(plan.gpus[0].model_copy(update={"id": f"n0/{i}"}) for i in range(gpus)),
            "gpulets": tuple(
                plan.gpulets[0].model_copy(update={"id": f"n0/{i}/a", "gpu": f"n0/{i}"}) for i in range(gpus)
            ),
        }
    )
    trials = Trials(plan.models, requests=4_000, seed=3, scheduler="deferred", network=NetworkDelay())
    served = trials.run(plan).attainment[0]
    assert Outlooks().of(plan).parts["m"] == pytest.approx(served, rel=0.05)
    assert served < 0.9


def test_less_than_in_full_is_promised_where_neighbours_that_all_run_at_once_would_break_it() -> None:
    def promised(slowdown: float, slo_ms: float) -> float:
        names = ("m", "a", "b")
        plan = Plan.from_data(
            {
                "policy": {"name": "hand"},
                "gpus": [{"id": "n0/0", "type": "v100"}],
                "gpulets": [
                    {
                        "id": f"n0/0/{name}",
                        "gpu": "n0/0",
                        "share_pct": 30,
                        "models": [
                            {
                                "name": name,
                                "batch_size": 1,
                                "slowdown": slowdown,
                                "latency": {"alpha_ms": 1.0, "beta_ms": 5.0},
                            }
                        ],
                    }
                    for name in names
                ],
                "models": [{"name": name, "rate_rps": 10, "slo_ms": slo_ms} for name in names],
            }
        )
        assert Outlooks().of(plan).parts["m"] > 0.99
        return expected_of(plan).models["m"].goodput_rps / 10.0

    assert 0.97 < promised(3.0, 19.0) < 0.99
    assert promised(3.0, 100.0) > 0.99
    assert promised(1.1, 19.0) > 0.99


def test_a_model_that_takes_turns_in_small_batches_on_a_full_gpulet_is_not_promised_in_full() -> None:
    """Where batches are capped at what a duty cycle brings, one with more requests than usual loses some."""
    models = [("a", 360.0, 150.0, 0.45, 12.0), ("b", 330.0, 300.0, 0.4, 12.0), ("c", 290.0, 100.0, 0.7, 6.0)]
    plan = plan_of(*models, ("small", 58.0, 100.0, 0.2, 6.5))
    caps = {"a": 29, "b": 26, "c": 23, "small": 5}
    replicas = tuple(r.model_copy(update={"batch_size": caps[r.name]}) for r in plan.gpulets[0].models)
    plan = plan.model_copy(update={"gpulets": (plan.gpulets[0].model_copy(update={"models": replicas}),)})
    trials = Trials(plan.models, requests=10_000, seed=3, scheduler="deferred", network=NetworkDelay())
    served = trials.run(plan).attainment[3]
    assert expected_of(plan).models["small"].goodput_rps < 0.99 * 58.0
    assert served < 0.99


def test_a_gathered_batch_is_capped_in_the_mean_of_what_comes() -> None:
    numbers = np.random.default_rng(1)
    for largest, come in ((1, 3.0), (5, 4.5), (32, 20.0), (32, 90.0), (128, 1_000.0)):
        drawn = np.minimum(largest, 1 + numbers.poisson(come, 40_000)).mean()
        assert mean_of_capped(largest, come) == pytest.approx(drawn, rel=0.01)


def test_what_is_late_beside_its_neighbours_is_promised_nothing() -> None:
    model = ("m", 1.0, 50.0, 1.0, 20.0)
    assert Outlooks().of(plan_of(model)).parts["m"] > 0.99
    assert Outlooks().of(plan_of(model, slowdown=3.0)).parts["m"] == 0.0


def test_who_is_late_on_gpulets_that_differ_is_promised_nothing_and_others_all() -> None:
    plan = plan_of(("late", 10.0, 50.0, 1.0, 60.0), ("a", 10.0, 100.0, 1.0, 5.0), ("b", 10.0, 100.0, 1.0, 5.0))
    [first] = plan.gpulets
    second = first.model_copy(update={"id": "n0/0/b", "models": first.models[:2], "share_pct": 50.0})
    plan = plan.model_copy(update={"gpulets": (first.model_copy(update={"share_pct": 50.0}), second)})
    parts = Outlooks().of(plan).parts
    assert parts["late"] == 0.0
    assert min(parts["a"], parts["b"]) > 0.9


def test_the_outlook_adds_up_to_what_is_expected() -> None:
    plan = plan_of(("a", 400.0, 100.0, 1.0, 5.0), ("b", 300.0, 80.0, 1.0, 8.0))
    outlook, expected = Outlooks().of(plan), expected_of(plan)
    assert 0.9 < outlook.busy[0] <= 1.0
    for name, rate in (("a", 400.0), ("b", 300.0)):
        assert -1e-5 <= outlook.parts[name] * rate - expected.models[name].goodput_rps < 0.02 * rate
        assert outlook.carried[0][name] >= expected.models[name].goodput_rps - 1e-6
        assert 1 < outlook.batches[0][name] <= 32


# --- under other rates, with other gpu-lets, at other speeds ----------------------------------------------------------

FOUR = ["a", "b", "c", "d"]


def test_load_is_the_time_that_gpulets_need_for_all_requests() -> None:
    plan = make_plan({"n0/0/a": (100.0, ["a"])}, slo_ms=24.0)
    # At 1000 r/s batches of 8, the largest, take 12 ms.
    assert Outlooks().of(plan, Traffic({"a": 1000.0})).load == pytest.approx(1.5, rel=0.01)
    two = make_plan({"n0/0/a": (100.0, ["a"]), "n0/1/a": (100.0, ["a"])}, slo_ms=24.0)
    assert Outlooks().of(two, Traffic({"a": 1000.0})).load == pytest.approx(0.75, rel=0.02)
    assert Outlooks({"a": 2.0}).of(two, Traffic({"a": 1000.0})).load > 1.5


def test_who_has_no_gpulet_has_nothing_in_time() -> None:
    plan = make_plan({"n0/0/a": (100.0, ["a"])}, models=["b"])
    kept = Outlooks().attained_parts(plan, Traffic({"a": 1.0, "b": 1.0, "stranger": 1.0, "idle": 0.0}), 0.99)
    assert kept == {"a": 1.0, "b": 0.0, "stranger": 0.0}


def test_weights_decide_who_gives_way() -> None:
    plan = make_plan({"n0/0/a": (100.0, ["a", "b"])}, weights={"a": 1.0, "b": 3.0})
    parts = Outlooks().of(plan, Traffic({"a": 500.0, "b": 500.0})).parts
    assert 0.0 < parts["a"] < parts["b"]


def test_arrivals_that_vary_more_cost_more_and_less_where_models_share_gpulets() -> None:
    """What varies by itself adds up to something steadier."""
    alone = make_plan({f"n0/{i}/a": (100.0, [name]) for i, name in enumerate(FOUR)}, slo_ms=30.0)
    together = make_plan({f"n0/{i}/a": (100.0, FOUR) for i in range(4)}, slo_ms=30.0)

    def worst(plan: Plan, dispersion: float) -> float:
        traffic = Traffic(dict.fromkeys(FOUR, 400.0), dict.fromkeys(FOUR, dispersion))
        return min(Outlooks().of(plan, traffic).parts.values())

    assert worst(alone, 1.0) > worst(alone, 4.0) > worst(alone, 16.0)
    assert worst(together, 16.0) > worst(alone, 16.0)


def test_traffic_says_what_a_second_may_bring() -> None:
    traffic = Traffic({"a": 100.0, "b": 400.0}, {"b": 4.0}, sigmas=2.0)
    assert traffic.upper_rps == pytest.approx({"a": 120.0, "b": 480.0})
    assert Traffic({"a": 100.0}).upper_rps == {"a": 100.0}


@given(seed=st.integers(0, 10_000))
def test_what_was_found_for_other_plans_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [*FOUR, "e"]
    gpulets = {
        f"n0/{gpu}/{letter}": (
            float(rng.choice([20.0, 40.0])),
            list(rng.choice(names, rng.integers(1, 4), replace=False)),
        )
        for gpu in range(3)
        for letter in "xy"
    }
    plan = make_plan(gpulets, slo_ms=80.0)
    one = Outlooks({"a": 1.3})
    for _ in range(6):
        left = tuple(g for g in plan.gpulets if rng.random() < 0.7)
        traffic = Traffic({name: float(rng.choice([20.0, 60.0, 150.0])) for name in names})
        some = plan.model_copy(update={"gpulets": left})
        assert one.of(some, traffic) == Outlooks({"a": 1.3}).of(some, traffic)


def test_slower_batches_break_a_promise_before_there_is_no_time_left() -> None:
    """Waiting until then is waiting until requests are lost."""
    workload = Workload.model_validate({"models": [{"name": "resnet50", "rate_rps": 300, "slo_ms": 60}]})
    profiles = Profiles([load_shipped("igniter-v100")])
    plan, traffic = solve(Igniter(), workload, v100s(1), profiles), Traffic({"resnet50": 150.0})

    def part(slowdown: float) -> float:
        return Outlooks({"resnet50": slowdown}).of(plan, traffic).parts["resnet50"]

    assert Outlooks({"resnet50": 1.8}).of(plan, traffic).load < 1.0
    assert part(1.8) < 0.99 < part(1.2)


def test_a_plan_says_which_models_cannot_wait_for_their_neighbours() -> None:
    quick, slow = ("quick", 100.0, 1.27, 0.258, 0.461), ("slow", 5.0, 155.6, 4.69, 30.05)
    (said,) = [line for line in expected_of(plan_of(quick, slow)).assumptions if "some requests are lost while" in line]
    assert "quick" in said
    assert "slow" not in said
    for patient in (plan_of(quick), plan_of(slow), plan_of(slow, ("patient", 20.0, 90.0, 0.258, 0.461))):
        assert not any("some requests are lost while" in line for line in expected_of(patient).assumptions)


@pytest.mark.parametrize("policy", ["symphony", "gpulet"])
def test_what_a_changed_gpulet_is_not_connected_with_promises_what_it_did(policy: str) -> None:
    """Of random plans, each gpu-let in turn ends: what is connected with it promises what it does in the whole plan,
    and everything else what it did before."""
    for seed in range(4):
        workload, _, cluster, _, profiles = changed_scene(seed, policy)
        plan = solve(load_policy(policy), workload, cluster, profiles)
        before = Outlooks().promised(plan)[0]
        for gone in plan.gpulets:
            left = with_gpulets(plan, [gpulet for gpulet in plan.gpulets if gpulet is not gone])
            near = connected_with([gone], left.gpulets)
            after, own = (Outlooks().promised(with_gpulets(plan, gpulets))[0] for gpulets in (left.gpulets, near))
            others = {r.name for g in left.gpulets if g not in near for r in g.models}
            assert own.keys() <= after.keys()
            assert others.isdisjoint(own)
            for name, part in after.items():
                assert part == pytest.approx(before[name] if name in others else own[name], abs=1e-3), name
