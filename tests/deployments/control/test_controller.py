"""The controller: reasons that are named, changes that are made, refused, taken back, and survive its death."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random

import pytest

from tenuto.deployments.control.change_rate_limit import ChangeRateLimit
from tenuto.placement import Plan, Workload
from tenuto.placement.planner import Proposal
from tenuto.placement.planner.change_cost import ChangeWorth
from tenuto.placement.planner.standby import Standby, twins
from tests.deployments.control.desk import Desk, PlanningDesk, pays
from tests.instruments.plans import gpu, make_plan
from tests.instruments.seeds import seeds

GPUS = [gpu("n0/0"), gpu("n0/1"), gpu("n1/0")]
ONE = make_plan({"n0/0/a": (100.0, ["a", "b"])})
TWO = make_plan({"n0/0/a": (100.0, ["a", "b"]), "n0/1/a": (100.0, ["a", "b"])})
MOVED = make_plan({"n0/1/a": (100.0, ["a", "b"])})
NONE = Proposal(None, "", ChangeWorth(False, "no other plan was found"))


def outgrown(
    answer: Proposal | str | None = None,
    settings: Mapping[str, object] | None = None,
    *,
    not_ready: Iterable[str] = (),
    seconds: int = 0,
) -> Desk:
    """Return a desk whose model `a` has outgrown plan `ONE`, after so many looks."""
    desk = Desk(ONE, GPUS, settings)
    desk.rates["a"], desk.answer, desk.not_ready = 700.0, answer, set(not_ready)
    desk.look(seconds)
    return desk


def befall(desk: Desk, happens: str) -> None:
    """Let something happen that is a reason to plan again."""
    if happens == "losses":
        desk.lost["a"] = 0.2
    elif happens == "slow":
        desk.ratios["n0/0/a"] = {"a": 1.5}
    elif happens == "lost":
        desk.gpus = desk.gpus[1:]
    elif happens == "came":
        desk.gpus = (*desk.gpus, gpu("n9/0"))
    elif happens == "moved":
        desk.rates["a"] = 100.0


def test_what_goes_well_gives_no_reason() -> None:
    desk = Desk(ONE, GPUS, {"when": {"underused": None}})
    desk.look(100)
    assert not desk.questions
    assert not desk.entries


@pytest.mark.parametrize(
    ("happens", "kind", "words"),
    [
        ("rates", "overload", "too few requests would be in time: a "),
        ("losses", "slo", "more requests are lost than allowed: a"),
        ("slow", "slow", "batches of 'a' take 1.50"),
        ("lost", "lost", "GPU n0/0 is gone"),
        ("came", "came", "GPU n9/0 is new"),
        ("workload", "workload", "the workload changed (c)"),
        ("idle", "underused", "would be"),
        ("moved", "rate", "rates have moved: a"),
    ],
)
def test_each_reason_is_named(happens: str, kind: str, words: str) -> None:
    quiet = {"underused": None, "rate": None}
    desk = Desk(ONE, GPUS, {"when": {} if happens in ("idle", "moved") else quiet, "rates": {"settle_s": 1}})
    desk.answer = "not now"
    desk.look(60)
    desk.questions.clear()
    desk.entries.clear()
    if happens == "rates":
        desk.rates["a"] = 700.0
    elif happens == "workload":
        more = make_plan({"n0/0/a": (100.0, ["a", "b", "c"])})
        desk.controller.set_workload(Workload(models=more.models))
    elif happens == "idle":
        desk.rates = {"a": 10.0, "b": 10.0}
    befall(desk, happens)
    desk.look(45)
    assert desk.questions
    assert words in " ".join(entry.text for entry in desk.entries)


def test_a_reason_that_is_turned_off_is_not_looked_at() -> None:
    off = {"overload": False, "slo": False, "underused": None, "rate": None, "slow": None, "lost": False, "came": False}
    desk = Desk(ONE, GPUS, {"when": off})
    desk.rates["a"] = 900.0
    desk.lost["a"] = 0.5
    desk.ratios["n0/0/a"] = {"a": 3.0}
    desk.look(40)
    desk.gpus = (*desk.gpus[1:], gpu("n9/0"))
    desk.look(40)
    assert not desk.questions


def test_a_change_is_made_before_what_it_replaces_is_broken() -> None:
    desk = outgrown(pays(MOVED), not_ready={"n0/1/a"}, seconds=10)
    assert [{g.id for g in apply.plan.gpulets} for apply in desk.applied] == [{"n0/0/a", "n0/1/a"}]
    desk.not_ready.clear()
    desk.look(3)
    assert desk.applied[-1].plan.to_data() == MOVED.to_data()
    assert desk.kinds()[-1] == "changed"
    assert "too few requests would be in time: a" in desk.applied[0].why


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("the solver broke", "Running plan kept: the solver broke"),
        (None, "took more than 10 s. Raise change.plan_timeout_s"),
        (NONE, "no other plan was found"),
        (Proposal(TWO, "planned anew", ChangeWorth(False, "it carries less")), "it carries less"),
    ],
)
def test_what_is_no_better_plan_changes_nothing(answer: Proposal | str | None, words: str) -> None:
    desk = outgrown(answer, {"change": {"plan_timeout_s": 10}}, seconds=30)
    assert not desk.applied
    assert words in desk.entries[0].text
    assert len(desk.questions) <= 3  # the same question is not asked again and again


def test_a_question_is_asked_again_when_there_is_news_or_its_answer_is_old() -> None:
    desk = outgrown(NONE, {"when": {"underused": None, "rate": None}, "rates": {"settle_s": 1}}, seconds=60)
    desk.questions.clear()
    desk.rates["b"] *= 1.1  # chance does that in 20 s
    desk.look(150)
    assert not desk.questions
    desk.look(150)
    assert len(desk.questions) == 1
    desk.rates["a"] = 800.0
    desk.look(40)
    assert len(desk.questions) >= 2


@pytest.mark.parametrize(("takes_s", "happens"), [(5, "moved"), (30, "moved"), (5, "slow")])
def test_questions_that_only_save_take_at_most_a_tenth_of_a_processor(takes_s: int, happens: str) -> None:
    desk, answered = Desk(TWO, GPUS, {"rates": {"settle_s": 1}}), 0
    if happens == "slow":
        desk = Desk(TWO, GPUS, {"when": {"underused": None, "rate": None}})
    while desk.now_s < 4000.0:
        news = answered % 2  # for each question
        if happens == "slow":
            desk.ratios["n0/0/a"] = {"a": 1.5 - 0.5 * news}
        else:
            desk.rates = {"a": 10.0 + 20.0 * news, "b": 10.0}
        desk.look()
        if desk.questions:
            desk.look(takes_s)
            (asked,) = desk.questions
            desk.controller.planned(desk.now_s, asked.number, NONE)
            desk.take()
            desk.questions.clear()
            answered += 1
    assert 4 < answered <= 1 + 0.1 * desk.now_s / takes_s


@pytest.mark.parametrize("happens", ["grown", "losses", "lost", "leaving", "slow"])
def test_what_cannot_wait_takes_the_place_of_a_question_that_only_saves(happens: str) -> None:
    desk = Desk(TWO, GPUS, {"rates": {"settle_s": 1}})
    desk.rates = {"a": 10.0, "b": 10.0}
    desk.look(40)
    (saving,) = desk.questions
    befall(desk, happens)
    if happens == "grown":
        desk.rates["a"] = 3000.0
    elif happens == "slow":
        desk.ratios["n0/0/a"] = {"a": 40.0}  # too slow for what comes
    elif happens == "leaving":
        desk.leaving = {"n0/1": desk.now_s + 500.0}
    desk.look(3)
    urgent = desk.questions[-1]
    assert urgent.number > saving.number
    desk.controller.planned(desk.now_s, saving.number, pays(ONE, saves=True))
    desk.take()
    assert not desk.applied
    desk.controller.planned(desk.now_s, urgent.number, pays(make_plan({"n0/1/b": (50.0, ["a", "b"])})))
    desk.take()
    assert desk.applied


def test_a_question_goes_on_where_nothing_else_may_be_begun_or_what_comes_would_only_save_too() -> None:
    desk = Desk(TWO, GPUS, {"rates": {"settle_s": 1}})
    desk.rates = {"a": 10.0, "b": 10.0}
    desk.look(30)
    (saving,) = desk.questions
    desk.rates["b"] = 30.0
    desk.look(20)
    desk.controller.pause(paused=True)
    desk.rates["a"] = 3000.0
    desk.look(3)
    assert desk.questions == [saving]


def test_the_same_gpulets_for_other_rates_are_no_change_to_be_proved() -> None:
    desk = Desk(ONE, GPUS)
    more = ONE.model_copy(update={"models": tuple(s.model_copy(update={"rate_rps": 200.0}) for s in ONE.models)})
    desk.rates["a"] = 700.0
    desk.answer = pays(more)
    desk.look(3)
    assert [apply.plan for apply in desk.applied] == [more]
    assert desk.kinds() == ["rates"]
    assert desk.controller.change is None


def test_advice_is_given_and_not_taken() -> None:
    desk = outgrown(pays(TWO), {"mode": "advise"}, seconds=30)
    assert not desk.applied
    assert set(desk.kinds()) == {"advice"}


def test_advice_is_kept_for_who_asks_until_it_is_none_any_more() -> None:
    desk = outgrown(settings={"mode": "advise"})
    priced = TWO.model_copy(update={"expected": TWO.expected.model_copy(update={"cost_per_hour": 6.12})})
    desk.answer = pays(priced)
    desk.look(30)
    advice = desk.controller.advice
    assert advice is not None
    assert (advice.plan, advice.text) == (priced, desk.text("advice"))
    assert advice.text.endswith("; 2 GPUs, 6.12 $/h")
    desk.controller.deploy(desk.now_s, advice.plan, "an operator", GPUS, ONE.workload)
    assert desk.controller.advice is None
    assert desk.controller.workload == ONE.workload


WHY = {"losses": "slo", "slow": "slow", "lost": "lost", "came": "came", "idle": "underused", "moved": "rate"}


@pytest.mark.parametrize("happens", WHY)
def test_a_reason_that_is_none_any_more_is_not_written(happens: str) -> None:
    when = {"underused": 0.1 if happens == "idle" else None, "rate": {} if happens == "moved" else None}
    desk = Desk(ONE, GPUS, {"when": when, "rates": {"settle_s": 1}, "change": {"horizon_s": 30}})
    desk.answer = "not now"
    desk.look(60)
    rates, gpus = dict(desk.rates), desk.gpus
    desk.controller.pause(paused=True)
    desk.take()
    desk.look(40)
    desk.questions.clear()
    desk.entries.clear()
    befall(desk, happens)
    if happens == "idle":
        desk.rates = {"a": 1.0, "b": 1.0}
    desk.look(10 if happens == "losses" else 45)
    desk.rates, desk.gpus, desk.lost["a"] = rates, gpus, 0.0
    desk.ratios["n0/0/a"] = {"a": 1.0}
    if happens != "lost":  # then it is the GPU's return that is news
        desk.look(130)
    desk.look(1)
    desk.controller.pause(paused=False)
    desk.look(1)
    assert WHY[happens] not in {reason for entry in desk.entries for reason in entry.data.get("reasons", ())}


def test_nothing_that_changes_nothing_is_noted_twice_within_the_horizon() -> None:
    desk = Desk(ONE, GPUS, {"rates": {"settle_s": 1, "average_s": 2}, "interval_s": 5})
    desk.answer = Proposal(None, "", ChangeWorth(False, "no other plan was found"), {"v100": 9})
    for second in range(600):
        desk.rates = {"a": 700.0 + 200.0 * (second // 7 % 2), "b": 50.0 + 40.0 * (second // 5 % 2)}
        desk.lost["a"] = 0.3 * (second // 11 % 2)
        desk.look(1)
    assert len(desk.questions) > 20
    seen: dict[object, float] = {}
    for entry in desk.entries:
        what = entry.kind, tuple(entry.data.get("reasons", ())), entry.text if entry.kind == "missing" else ""
        assert entry.at_s - seen.get(what, -1000.0) >= 300.0
        seen[what] = entry.at_s


def test_an_answer_for_another_workload_is_none() -> None:
    desk = outgrown(seconds=3)
    (asked,) = desk.questions
    desk.controller.edit({"a": ONE.models[0].model_copy(update={"slo_ms": 40.0})})
    desk.controller.planned(desk.now_s, asked.number, pays(TWO))
    desk.look(1)
    assert not desk.applied
    assert desk.questions[-1].request.workload.models[0].slo_ms == 40.0


@pytest.mark.parametrize("seed", seeds(6, 20))
def test_what_was_declared_stays_so_whatever_plan_comes_back(seed: int) -> None:
    """Of random edits and returns, against a workload that is edited by hand."""
    draw, names = Random(seed), ["a", "b", "c", "d"]
    desk = Desk(make_plan({"n0/0/a": (100.0, names)}), GPUS)
    desk.look(3)
    asked = {spec.name: spec for spec in desk.controller.workload.models}
    first = dict(asked)
    for _ in range(8):
        name = draw.choice(names)
        entry = (
            None
            if draw.random() < 0.4 and len(asked) > 1
            else first[name].model_copy(update={"rate_rps": float(draw.randint(1, 99))})
        )
        if entry is not None or name in asked:
            desk.controller.edit({name: entry})
            asked.pop(name, None)
            asked |= {} if entry is None else {name: entry}
        if draw.random() < 0.5:  # a version before, made for measured rates
            plan = make_plan({"n0/0/a": (100.0, names)}, rate_rps=777.0)
            desk.controller.deploy(desk.now_s, plan, "rollback", GPUS, Workload(models=tuple(first.values())))
        if draw.random() < 0.5:
            desk.restart()
        desk.look(2)
        assert {spec.name: spec for spec in desk.controller.workload.models} == asked
        assert {spec.name for spec in desk.controller.plan.models} >= asked.keys() or desk.questions
    desk.controller.deploy(desk.now_s, plan := make_plan({"n0/0/a": (100.0, names)}), "a plan file", GPUS)
    assert desk.controller.workload.models == plan.models


def test_applications_stay_in_whatever_plan_takes_the_place_of_the_running_one() -> None:
    """The planner is asked for their models alone."""
    stages = [{"model": "a", "shared": True}, {"model": "b", "shared": True, "after": ["a"]}]
    app = {"name": "app", "rate_rps": 5, "slo_ms": 150, "stages": stages}
    plan = Plan.from_data({**ONE.to_data(), "applications": [app]})
    desk = PlanningDesk(plan, GPUS)
    desk.rates["a"] *= 20.0
    desk.look(60)
    assert len(desk.controller.plan.gpulets) > len(plan.gpulets)
    assert all(applied.plan.applications == plan.applications for applied in desk.applied)
    desk.restart()
    assert desk.controller.plan.applications == plan.applications


def test_off_and_paused_change_nothing() -> None:
    desk = outgrown(pays(TWO), {"mode": False}, seconds=30)
    assert not desk.questions
    paused = outgrown(pays(TWO))
    paused.controller.pause(paused=True)
    paused.look(30)
    assert not paused.applied
    paused.controller.pause(paused=False)
    paused.look(5)
    assert paused.applied


@pytest.mark.parametrize("share_pct", [0.0, 1e-9, 100.0])
def test_any_share_of_a_shadow_can_be_planned_with(share_pct: float) -> None:
    """A shadow that gets no copies ended the controller at its next check."""
    desk = PlanningDesk(ONE, GPUS)
    desk.look(25)
    shadow = ONE.model("a").model_copy(update={"name": "a:2", "shadow": True, "share_pct": share_pct})
    desk.controller.edit({"a:2": shadow})
    desk.rates["a:2"] = desk.lost["a:2"] = 0.0
    desk.look(60)
    assert desk.hosted() >= {"a", "b"}


def test_failures_without_end_can_be_waited_for() -> None:
    desk = Desk(ONE, GPUS)
    limit = ChangeRateLimit(desk.settings.change, (), 0.0, 5000)
    assert limit.failed(1.0) == 3600.0


def test_changes_are_limited_per_hour_and_cool_down_before_they_save() -> None:
    desk = Desk(TWO, GPUS, {"change": {"per_hour": 2, "cool_down_s": 300}, "rates": {"settle_s": 1}})
    desk.rates = {"a": 10.0, "b": 10.0}
    desk.answer = pays(ONE, saves=True)
    desk.look(60)
    assert len(desk.applied) == 1
    desk.answer = pays(make_plan({"n0/1/a": (50.0, ["a", "b"]), "n0/0/a": (100.0, ["a", "b"])}), saves=True)
    desk.rates = {"a": 3.0, "b": 3.0}
    desk.look(200)
    assert len(desk.applied) == 1
    desk.answer = pays(TWO)
    desk.rates = {"a": 700.0, "b": 10.0}
    desk.look(10)
    assert len(desk.applied) >= 2  # what loses requests does not wait
    count = len(desk.applied)
    desk.answer = pays(ONE)
    desk.rates = {"a": 2000.0, "b": 10.0}
    desk.look(300)
    assert len(desk.applied) == count
    desk.look(3400)
    assert len(desk.applied) > count


def test_a_model_that_is_removed_right_after_a_change_waits_for_no_cool_down() -> None:
    desk = outgrown(pays(TWO), {"change": {"cool_down_s": 300}, "rates": {"settle_s": 1}}, seconds=10)
    assert desk.controller.plan.to_data() == TWO.to_data()
    desk.answer = pays(make_plan({"n0/0/a": (100.0, ["a"])}), saves=True)
    desk.controller.edit({"b": None})
    desk.look(20)
    assert [spec.name for spec in desk.controller.plan.models] == ["a"]


@pytest.mark.parametrize("busy", [0.05, 0.4])
def test_a_model_that_is_added_is_served_also_where_another_plan_would_save_gpus(busy: float) -> None:
    running = make_plan({"n0/0/a": (100.0, ["a"]), "n0/1/a": (100.0, ["b"])}, rate_rps=busy * 100.0)
    desk = PlanningDesk(running, [gpu("n0/0"), gpu("n0/1")], {"when": {"underused": None}})
    desk.look(20)
    desk.controller.edit({"new": running.model("a").model_copy(update={"name": "new", "rate_rps": 10.0})})
    desk.rates["new"] = desk.lost["new"] = 0.0  # nobody can ask for it yet
    desk.look(30)
    assert "new" in desk.hosted()


def test_new_gpulets_that_cannot_start_roll_the_change_back() -> None:
    desk = outgrown(pays(MOVED), {"change": {"cool_down_s": 60}})
    desk.broken = {"n0/1/a": "the weights are missing"}
    desk.look(10)
    assert [sorted(g.id for g in apply.plan.gpulets) for apply in desk.applied] == [["n0/0/a", "n0/1/a"], ["n0/0/a"]]
    assert desk.applied[-1].plan.to_data() == ONE.to_data()
    assert "the weights are missing" in desk.text("roll back")
    assert desk.kinds()[-1] == "rolled back"
    desk.look(40)
    assert len(desk.applied) == 2  # no other change for a while
    desk.broken = {}
    desk.look(60)
    assert desk.controller.plan.to_data() == MOVED.to_data()


def test_new_gpulets_that_do_not_come_roll_the_change_back() -> None:
    desk = outgrown(pays(TWO), {"change": {"ready_timeout_s": 30}}, not_ready={"n0/1/a"}, seconds=50)
    assert "not ready after" in desk.text("roll back")
    assert desk.controller.plan.to_data() == ONE.to_data()


def test_attainment_that_falls_after_a_change_rolls_it_back() -> None:
    worse = make_plan({"n0/0/b": (50.0, ["a", "b"])})
    desk = Desk(ONE, GPUS, {"rates": {"settle_s": 1}})
    desk.rates = {"a": 20.0, "b": 20.0}
    desk.answer = pays(worse, saves=True)
    desk.look(5)
    assert desk.controller.plan.to_data() == worse.to_data()
    desk.lost["b"] = 0.3
    desk.look(10)
    assert "since the change more requests are lost than allowed: b" in desk.text("roll back")
    assert desk.controller.plan.to_data() == ONE.to_data()


def test_a_loss_that_nothing_explains_raises_what_is_planned_for_and_is_forgotten_in_time() -> None:
    desk = Desk(ONE, GPUS, {"when": {"underused": None}})
    before_rps = desk.controller.state().planned_for_rps
    desk.lost["a"] = 0.3
    desk.look(40)
    desk.lost["a"] = 0.0
    desk.restart()
    assert desk.controller.state().planned_for_rps["a"] > 1.3 * before_rps["a"]
    desk.look(1800)
    assert desk.controller.state().planned_for_rps == pytest.approx(before_rps, rel=0.02)
    desk.lost["a"] = 0.3
    desk.look(40)
    assert desk.controller.state().planned_for_rps["a"] > 1.3 * before_rps["a"]


def test_a_gpu_that_is_lost_soon_after_a_change_is_not_blamed_on_it() -> None:
    split = make_plan({"n0/0/b": (50.0, ["a"]), "n0/1/a": (50.0, ["b"])})
    desk = Desk(ONE, GPUS, {"rates": {"settle_s": 1}})
    desk.rates = {"a": 20.0, "b": 20.0}
    desk.answer = pays(split, saves=True)
    desk.look(5)
    assert desk.controller.plan.to_data() == split.to_data()
    desk.answer = None  # it takes its time
    desk.gpus, desk.lost["b"] = (GPUS[0], GPUS[2]), 1.0
    desk.look(5)
    assert "roll back" not in desk.kinds()
    desk.controller.planned(desk.now_s, desk.questions[-1].number, pays(ONE))
    desk.take()
    desk.look(3)
    assert desk.controller.plan.to_data() == ONE.to_data()


def test_a_gpu_that_is_lost_is_planned_around_though_a_change_has_just_failed() -> None:
    desk = outgrown(pays(TWO), {"change": {"cool_down_s": 600}})
    desk.broken = {"n0/1/a": "the weights are missing"}
    desk.look(10)
    assert desk.kinds()[-1] == "rolled back"
    desk.gpus, desk.broken, desk.answer = tuple(GPUS[1:]), {}, pays(MOVED)
    desk.look(3)
    assert desk.controller.plan.to_data() == MOVED.to_data()


def test_losses_that_the_plan_before_would_have_too_do_not_roll_back() -> None:
    desk = outgrown(pays(TWO), seconds=10)
    desk.lost["a"] = 0.5
    desk.rates["a"] = 3000.0
    desk.look(20)
    assert "roll back" not in desk.kinds()


def test_a_plan_for_gpus_that_have_changed_meanwhile_is_asked_for_again() -> None:
    desk = outgrown(seconds=5)
    (asked,) = desk.questions
    desk.gpus = (GPUS[0], GPUS[2])  # another of them is gone
    desk.look()
    desk.controller.planned(desk.now_s, asked.number, pays(TWO))
    desk.take()
    assert not desk.applied
    desk.look()
    assert desk.questions[-1].request.gpus == desk.gpus
    assert desk.questions[-1] is not asked


def test_a_plan_that_a_rate_has_outgrown_meanwhile_is_asked_for_once_more() -> None:
    desk = Desk(ONE, GPUS)
    desk.rates["a"] = 400.0
    desk.look(2)
    (asked,) = desk.questions
    desk.rates["a"] = 1500.0
    desk.look()
    desk.controller.planned(desk.now_s, asked.number, pays(TWO))
    desk.take()
    assert not desk.applied
    again = desk.questions[-1]
    assert again.request.running.traffic.mean_rps["a"] > 1000.0
    desk.controller.planned(desk.now_s, again.number, pays(TWO))  # as much as can be
    desk.take()
    assert desk.applied


def test_a_gpu_lost_during_a_change_ends_it_and_is_planned_around() -> None:
    desk = outgrown(pays(TWO), not_ready={"n0/1/a"}, seconds=5)
    assert desk.controller.change is not None
    desk.gpus = (GPUS[0], GPUS[2])
    desk.answer = pays(make_plan({"n0/0/a": (100.0, ["a", "b"]), "n1/0/a": (100.0, ["a", "b"])}))
    desk.look(5)
    assert "abandoned" in desk.kinds()
    assert {g.gpu for g in desk.controller.plan.gpulets} == {"n0/0", "n1/0"}


@pytest.mark.parametrize("died_after", range(1, 9))
def test_a_change_goes_on_after_the_controllers_death(died_after: int) -> None:
    desk = outgrown(pays(MOVED), seconds=died_after)
    desk.restart()
    desk.look(12)
    assert desk.controller.plan.to_data() == MOVED.to_data()
    assert desk.controller.rates.mean_rps["a"] == pytest.approx(700.0, rel=0.05)


def test_memory_survives_its_own_writing() -> None:
    desk = outgrown(pays(MOVED), not_ready={"n0/1/a"})
    desk.ratios["n0/0/a"] = {"b": 1.3}
    desk.look(10)
    before = desk.controller.memory().to_data()
    desk.restart()
    assert desk.controller.memory().to_data() == before


def test_gpus_are_asked_for_within_bounds_and_missing_ones_are_told() -> None:
    desk = outgrown(pays(TWO, wanted={"v100": 6}), {"gpus": {"v100": {"min": 1, "max": 4}}}, seconds=10)
    assert [want.by_type for want in desk.wanted] == [{"v100": 4}]
    assert "more GPUs than there are: v100 2" in desk.text("missing")
    fixed = outgrown(pays(TWO, wanted={"v100": 5}), seconds=10)
    assert not fixed.wanted
    assert "v100 2" in fixed.text("missing")


def test_batches_that_get_slower_still_are_planned_with_again() -> None:
    """What gpu-lets report is an average: a jump to 1.45 is first seen as one to 1.34, and then looked like no news."""
    desk = Desk(ONE, GPUS, {"when": {"underused": None, "rate": None}})
    desk.answer = NONE
    for ratio in (1.0, 1.34, 1.45, 1.45, 1.45, 1.45, 1.46):
        desk.ratios["n0/0/a"] = {"a": ratio}
        desk.look()
    asked = [round(question.request.running.slowdowns["a"], 2) for question in desk.questions]
    assert asked[0] == 1.34
    assert len(asked) == 2
    assert asked[1] > 1.34 * 1.05


# --- standby ------------------------------------------------------------------------------------------------------

HALF = make_plan({"n0/0/a": (50.0, ["a"])}, rate_rps=150.0)
LARGER = make_plan({"n0/0/b": (60.0, ["a"])}).gpulets[0]


@pytest.mark.parametrize("happens", ["slow", "losses"])
def test_a_standby_process_takes_over_at_the_next_look_without_the_planner(happens: str) -> None:
    desk = Desk(HALF, GPUS, {"standby_pct": 10, "when": {"underused": None, "rate": None}})
    desk.answer = replace(NONE, standby=(Standby("n0/0/a", LARGER),))
    desk.look(25)
    assert desk.applied[-1].plan == HALF
    assert desk.applied[-1].standby == (LARGER,)
    assert [question.request.only_standby for question in desk.questions] == [True]
    desk.answer = None
    if happens == "slow":
        desk.ratios["n0/0/a"] = {"a": 2.0}
    else:
        desk.lost["a"] = 0.3
    desk.look(2)
    taken = next(apply for apply in desk.applied if apply.plan.gpulets == (LARGER,))
    assert "standby n0/0/b takes over" in taken.why
    assert taken.standby == ()  # what waited is what serves
    desk.look(2)
    assert "changed" in desk.kinds()


def test_standby_processes_of_what_is_kept_are_kept_while_the_plan_changes() -> None:
    desk = Desk(ONE, GPUS, {"standby_pct": 10})
    other = make_plan({"n0/0/b": (60.0, ["a", "b"])}).gpulets[0]
    desk.answer = replace(NONE, standby=(Standby("n0/0/a", other),))
    desk.look(2)
    desk.rates["a"] = 700.0
    desk.answer = pays(TWO)
    desk.not_ready = {"n0/1/a"}
    desk.look(3)
    assert {gpulet.id for gpulet in desk.applied[-1].plan.gpulets} == {"n0/0/a", "n0/1/a"}
    assert desk.applied[-1].standby == (other,)


@pytest.mark.parametrize("happens", ["lost", "grown"])
def test_a_twin_joins_at_the_next_look_where_a_gpu_is_lost_or_a_model_outgrows_what_runs(happens: str) -> None:
    desk = Desk(HALF, GPUS, {"standby_gpus": 1, "when": {"underused": None}})
    waiting = twins(HALF, 1, GPUS, HALF)
    assert [(twin.of, twin.gpulet.gpu) for twin in waiting] == [("n0/0/a", "n0/1")]
    desk.answer = replace(NONE, standby=waiting)
    desk.look(25)
    assert desk.applied[-1].standby == (waiting[0].gpulet,)
    desk.answer = None
    if happens == "lost":
        desk.gpus = desk.gpus[1:]
    else:
        desk.rates["a"] *= 3.0
    desk.look(2)
    left = () if happens == "lost" else HALF.gpulets
    assert desk.applied[-1].plan.gpulets == (*left, waiting[0].gpulet)
    desk.look()
    assert "changed" in desk.kinds()
    assert len(desk.questions) == 2  # whether that is enough, and for what waits beside it


def test_standby_processes_come_with_an_answer_that_only_tells_rates() -> None:
    """Else they would wait for the next check, as the plan they are of was the answer."""
    desk = Desk(HALF, GPUS, {"standby_gpus": 1})
    waiting = twins(HALF, 1, GPUS, HALF)
    told = HALF.model_copy(update={"models": (HALF.models[0].model_copy(update={"rate_rps": 170.0}),)})
    desk.answer = replace(pays(told), standby=waiting)
    desk.look(2)
    assert [(apply.plan.models[0].rate_rps, apply.standby) for apply in desk.applied] == [(170.0, (waiting[0].gpulet,))]


def test_twins_are_no_more_than_the_memory_of_idle_gpus_holds() -> None:
    only = HALF.gpulets[0].models[0].model_copy(update={"memory_mib": 10_000.0})
    heavy = [HALF.gpulets[0].model_copy(update={"id": f"n0/0/{letter}", "models": (only,)}) for letter in "ab"]
    both = HALF.model_copy(update={"gpulets": tuple(heavy)})
    small = tuple(gpu.model_copy(update={"memory_mib": 16_000.0}) for gpu in GPUS)
    assert [twin.of for twin in twins(both, 1, small, both)] == ["n0/0/a"]
