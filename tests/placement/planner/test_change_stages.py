"""From one plan to another: how a new one is laid on what runs, and the stages between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.errors import InvalidInputError
from tenuto.placement import Plan
from tenuto.placement.planner import Durations
from tenuto.placement.planner.change_cost import Rent
from tenuto.placement.planner.change_stages import fits, next_stage, not_ready, stages
from tenuto.placement.planner.gpu_matching import match_to_running
from tests.instruments.plans import gpu, make_plan
from tests.instruments.seeds import seeds

DURATIONS = Durations(start_s=12.0, load_s=4.0)
BY_SHARE = Rent(by_gpu=False, price={})
GPUS = [gpu(f"n0/{index}") for index in range(4)]
MODELS = ["a", "b", "c", "d"]
SHARES = [20.0, 40.0, 50.0, 60.0, 100.0]


def random_plan(seed: int, gpus: int = 4) -> Plan:
    """Return a plan on up to so many GPUs that holds every model somewhere."""
    rng = random.Random(seed)
    while True:
        gpulets: dict[str, tuple[float, list[str]]] = {}
        for index in range(rng.randint(1, gpus)):
            left = 100.0
            for letter in "abcd"[: rng.randint(1, 4)]:
                share = rng.choice(SHARES)
                if share <= left:
                    left -= share
                    gpulets[f"n0/{index}/{letter}"] = share, rng.sample(MODELS, rng.randint(1, 4))
        if {name for _, held in gpulets.values() for name in held} == set(MODELS):
            return make_plan(gpulets)


def rates(plan: Plan) -> dict[str, float]:
    return {spec.name: spec.rate_rps for spec in plan.models}


def test_programs_of_one_process_share_their_working_memory() -> None:
    (gpulet,) = make_plan({"n0/0/a": (100.0, ["a", "b"])}).gpulets
    by_weights = [model.model_copy(update={"weights_mib": 400.0}) for model in gpulet.models]  # of 1,000 MiB each
    sharing = gpulet.model_copy(update={"models": tuple(by_weights)})
    assert [gpulet.needs_mib, sharing.needs_mib] == [2000.0, 400.0 + 400.0 + 600.0]
    assert fits([sharing], gpu("n0/0", 1400.0))
    assert not fits([sharing], gpu("n0/0", 1399.0))


# --- what is promised on the way -----------------------------------------------------------------------------------


def test_models_keep_their_planned_rates_until_what_they_are_to_grow_into_is_there() -> None:
    now = make_plan({"n0/0/a": (100.0, ["a", "b"])})
    more = make_plan({"n0/0/a": (100.0, ["a", "b"]), "n0/1/a": (100.0, ["a"])})
    grown = [spec.model_copy(update={"rate_rps": 3 * spec.rate_rps}) for spec in more.models]
    target = more.model_copy(update={"models": tuple(grown)})
    stage = next_stage(now, target, GPUS, rates(now))
    assert stage is not None
    assert (len(stage.gpulets), rates(stage)) == (2, rates(now))
    assert next_stage(stage, target, GPUS, rates(now)) == target


# --- laid on what runs --------------------------------------------------------------------------------------------


def renamed(plan: Plan, seed: int) -> Plan:
    """Return the same layout with other numbers for GPUs and gpu-lets."""
    rng = random.Random(seed)
    order = [planned.id for planned in plan.gpus]
    rng.shuffle(order)
    to = {planned.id: f"x/{order.index(planned.id)}" for planned in plan.gpus}
    gpulets = [g.model_copy(update={"gpu": to[g.gpu], "id": f"{to[g.gpu]}/{rng.random()}"}) for g in plan.gpulets]
    rng.shuffle(gpulets)
    gpus = tuple(planned.model_copy(update={"id": to[planned.id]}) for planned in plan.gpus)
    return plan.model_copy(update={"gpus": gpus, "gpulets": tuple(gpulets)})


@given(seed=st.integers(0, 10_000), other=st.integers(0, 10_000))
def test_a_plan_is_laid_on_what_runs(seed: int, other: int) -> None:
    running, new = random_plan(seed), renamed(random_plan(other), seed)
    laid = match_to_running(new, running, GPUS, keep_idle=True)
    laid.check_references()
    before = {g.id: g for g in running.gpulets}
    assert Counter(str((g.share_pct, g.models)) for g in laid.gpulets) == Counter(
        str((g.share_pct, g.models)) for g in new.gpulets
    )
    for gpulet in laid.gpulets:
        if gpulet.id in before:  # one process: where it is, with its share
            assert (gpulet.gpu, gpulet.share_pct) == (before[gpulet.id].gpu, before[gpulet.id].share_pct)


@given(seed=st.integers(0, 10_000))
def test_the_same_layout_under_other_names_changes_nothing(seed: int) -> None:
    running = match_to_running(random_plan(seed), None, GPUS, keep_idle=True)
    again = match_to_running(renamed(running, seed), running, GPUS, keep_idle=True)
    assert again.gpulets == running.gpulets
    assert next_stage(running, again, GPUS, rates(running)) is None


def test_more_gpus_than_there_are_is_refused() -> None:
    plan = make_plan({"n0/0/a": (100.0, ["a"]), "n0/1/a": (100.0, ["a"])})
    with pytest.raises(InvalidInputError, match="the cluster 1"):
        match_to_running(plan, None, GPUS[:1], keep_idle=True)


# --- the stages between -------------------------------------------------------------------------------------------


def ready_hosts(plan: Plan, waiting: frozenset[str]) -> Mapping[str, int]:
    hosts = dict.fromkeys(MODELS, 0)
    for gpulet in plan.gpulets:
        for replica in gpulet.models:
            hosts[replica.name] += gpulet.id not in waiting
    return hosts


@given(seed=st.integers(0, 10_000), other=st.integers(0, 10_000))
def test_every_stage_fits_its_gpus_and_the_last_is_the_target(seed: int, other: int) -> None:
    running = random_plan(seed)
    target = match_to_running(random_plan(other), running, GPUS, keep_idle=True)
    by_id = {one.id: one for one in GPUS}
    now, count = running, 0
    while (stage := next_stage(now, target, GPUS, rates(running))) is not None:
        for name, gpulets in stage.by_gpu().items():
            assert fits(gpulets, by_id[name])
        for gpulet in stage.gpulets:
            assert gpulet in (*running.gpulets, *target.gpulets)
        now, count = stage, count + 1
        assert count < 30
    assert now.to_data() == target.to_data()


@given(seed=st.integers(0, 10_000))
def test_with_an_idle_gpu_for_each_in_use_nothing_is_ever_away(seed: int) -> None:
    running = random_plan(seed, gpus=2)
    moved = renamed(running, seed)
    target = moved.model_copy(
        update={
            "gpus": tuple(p.model_copy(update={"id": f"n0/{2 + int(p.id[-1])}"}) for p in moved.gpus),
            "gpulets": tuple(
                g.model_copy(update={"gpu": f"n0/{2 + int(g.gpu[-1])}", "id": f"n0/{2 + int(g.gpu[-1])}/{i}"})
                for i, g in enumerate(moved.gpulets)
            ),
        }
    )
    way = stages(running, target, GPUS, rates(running))
    assert len(way) == 2  # beside it, then without the old
    for stage in way:
        hosts = ready_hosts(stage.plan, frozenset(g.id for g in stage.plan.gpulets) - stage.ready)
        assert all(hosts[name] >= min(1, len(running.hosts_of(name))) for name in MODELS)


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_without_room_every_model_with_two_replicas_keeps_one(seed: int) -> None:
    """All gpu-lets must restart, every model is on two gpu-lets of which either carries it, and GPUs are full."""
    rng = random.Random(seed)
    shares = rng.choice([(50.0, 50.0), (40.0, 60.0)])
    pairs = [MODELS[:2], MODELS[2:]]
    running = make_plan({f"n0/{i}/{x}": (shares[j], pairs[i]) for i in (0, 1) for j, x in enumerate("ab")})
    other = {f"n0/{i}/{x}": (shares[::-1][j], pairs[i]) for i in (0, 1) for j, x in enumerate("cd")}
    other = {name: (share + (5.0 if name.endswith("c") else -5.0), held) for name, (share, held) in other.items()}
    target = make_plan(other)
    now = running
    while (stage := next_stage(now, target, GPUS[:2], dict.fromkeys(MODELS, 20.0))) is not None:
        waiting = not_ready(now, stage)
        assert all(count >= 1 for count in ready_hosts(stage, waiting).values())
        now = stage
    assert now.to_data() == target.to_data()


def test_the_stages_make_before_they_break_and_end_at_the_target() -> None:
    one, two = make_plan({"n0/0/a": (100.0, ["a"])}), make_plan({"n0/0/a": (100.0, ["a"]), "n0/1/a": (100.0, ["a"])})
    way = stages(one, two, GPUS, {"a": 900.0})
    assert {gpulet.id for gpulet in way[0].plan.gpulets} == {"n0/0/a", "n0/1/a"}
    assert (way[0].ready, way[0].lasts_s(DURATIONS)) == ({"n0/0/a"}, DURATIONS.start_s)
    assert {gpulet.id for gpulet in way[-1].plan.gpulets} == {gpulet.id for gpulet in two.gpulets}
    assert stages(one, one, GPUS, {"a": 900.0}) == []
