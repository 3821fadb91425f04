"""Bringing, promoting and taking back versions: by the entries that come of it, and by a controller that plans."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from tenuto.deployments.control.version_edits import checked, promoted, to_take_back, with_version, without
from tenuto.errors import InvalidInputError
from tenuto.files import parse_yaml
from tenuto.placement import Plan, Workload
from tenuto.placement.application import Application
from tenuto.placement.workload import ModelSpec, lacking
from tests.deployments.control.desk import Desk, PlanningDesk
from tests.instruments.plans import gpu, make_plan

LATENCY = {"alpha_ms": 1.0, "beta_ms": 4.0}
M = ModelSpec(name="m", rate_rps=100.0, slo_ms=100.0, latency=LATENCY, weight=2.0)
WORKLOAD = checked([M, M.model_copy(update={"name": "x"})])
OWN = {"weights_path": "/two"}
GPUS = tuple(gpu(f"n{node}/0") for node in range(3))


def edited(workload: Workload, edits: Mapping[str, ModelSpec | None]) -> Workload:
    entries = {spec.name: spec for spec in workload.models} | dict(edits)
    return checked([spec for spec in entries.values() if spec is not None])


def test_a_canary_has_what_the_model_has_but_for_its_own_and_its_share_of_the_rate() -> None:
    edits = with_version(WORKLOAD, "m", "2", {"share_pct": 20.0}, OWN)
    expected = M.model_copy(update={"name": "m:2", "rate_rps": 20.0, "share_pct": 20.0, "weights_path": "/two"})
    rest = M.model_copy(update={"rate_rps": 80.0})
    assert edits == {"m": rest, "m:2": expected}
    more = edited(WORKLOAD, edits)
    half = expected.model_copy(update={"share_pct": 50.0, "rate_rps": 50.0})
    assert with_version(more, "m", "2", {"share_pct": 50.0}, {}) == {
        "m": M.model_copy(update={"rate_rps": 50.0}),
        "m:2": half,
    }
    assert without(more, {"m:2"}) == {"m": M, "m:2": None}
    assert with_version(more, "m", "2", {"share_pct": 20.0}, {}) == {}


def test_a_shadow_ranks_below_everything_else() -> None:
    (shadow,) = with_version(WORKLOAD, "m", "3", {"shadow": True}, OWN).values()
    assert shadow is not None
    assert (shadow.shadow, shadow.rate_rps, shadow.priority) == (True, 100.0, -1)
    assert shadow.weight < 0.01


def test_a_promoted_version_takes_the_place_of_the_one_before() -> None:
    more = edited(WORKLOAD, with_version(WORKLOAD, "m", "2", {"share_pct": 20.0}, OWN))
    edits = promoted(more, "m", "2")
    assert edits == {"m": None, "m:2": M.model_copy(update={"name": "m:2", "weights_path": "/two"})}
    assert to_take_back(more, "m", "2") == "m:2"


STAGES = [{"model": "m"}, {"model": "x", "after": ["m"], "inputs": {"x": "m.y"}}]
APP = Application.model_validate({"name": "app", "rate_rps": 50.0, "slo_ms": 400.0, "stages": STAGES})
ASKED = checked([M, M.model_copy(update={"name": "x"})], [APP])  # m at 100 r/s by clients, 50 r/s by the application


def asked(workload: Workload) -> dict[str, tuple[float, float | None]]:
    """The rate of each version of m, and that of the clients that ask it by themselves."""
    return {s.name: (s.rate_rps, s.alone and s.alone.rate_rps) for s in workload.models if s.model == "m"}


def test_versions_share_out_what_applications_ask_and_stages_follow_the_one_that_is_promoted() -> None:
    desk = PlanningDesk(plan_of(ASKED), GPUS)
    control = desk.controller
    assert asked(ASKED) == {"m": (150.0, 100.0)}
    control.edit(with_version(control.workload, "m", "2", {"share_pct": 20.0}, OWN))
    assert asked(control.workload) == {"m": (120.0, 80.0), "m:2": (30.0, 20.0)}
    assert {s.own_slo_ms for s in control.workload.models} == {100.0}  # of the clients, whichever answers
    desk.look(30)
    control.edit(promoted(control.workload, "m", "2"))
    assert asked(control.workload) == {"m:2": (150.0, 100.0)}
    desk.look(60)
    assert [s.name for s in control.plan.models if s.model == "m"] == ["m:2"]
    for workload in (control.workload, Plan.from_data(control.plan.to_data()).workload):
        (app,) = workload.applications
        assert [(stage.label, stage.model) for stage in app.stages] == [("m", "m:2"), ("x", "x")]
    assert Workload.of_document(parse_yaml(control.workload.dump(), "w"), "w") == control.workload
    control.edit(with_version(control.workload, "m", "3", {"share_pct": 0.0}, {**OWN, "rate_rps": 5.0}))
    assert asked(control.workload)["m:2"] == (150.0, 100.0)  # the other is asked by its URL alone
    control.edit(with_version(control.workload, "m", "3", {"share_pct": 50.0}, {}))
    control.edit(promoted(control.workload, "m", "3"))
    assert control.workload.applications[0].stage("m").model == "m:3"


def test_a_new_version_without_a_share_needs_a_rate_of_its_own() -> None:
    with pytest.raises(InvalidInputError, match=r"rate_rps: is missing .* asked by its number"):
        with_version(WORKLOAD, "m", "2", {"share_pct": 0.0}, OWN)


def plan_of(workload: Workload) -> Plan:
    """A plan of a workload of m and x on a GPU each."""
    made = make_plan({"n0/0/a": (100.0, ["m"]), "n1/0/a": (100.0, ["x"])})
    models = [spec.model_dump(mode="json") for spec in workload.models]
    applications = [application.model_dump(mode="json") for application in workload.applications]
    return Plan.from_data({**made.to_data(), "models": models, "applications": applications})


def test_a_version_that_had_no_share_takes_over_the_rate_of_its_model_and_adds_none() -> None:
    for rate_rps in (5.0, 100.0):  # of its own, by its number
        own = {**OWN, "rate_rps": rate_rps}
        tried = edited(WORKLOAD, with_version(WORKLOAD, "m", "2", {"share_pct": 0.0}, own))
        assert {s.name: s.rate_rps for s in tried.models if s.model == "m"} == {"m": 100.0, "m:2": rate_rps}
        main = edited(tried, promoted(tried, "m", "2"))
        assert {s.name: s.rate_rps for s in main.models if s.model == "m"} == {"m:2": 100.0}
        shared = edited(tried, with_version(tried, "m", "2", {"share_pct": 25.0}, {}))
        assert {s.name: s.rate_rps for s in shared.models if s.model == "m"} == {"m": 75.0, "m:2": 25.0}


SECOND = edited(WORKLOAD, with_version(WORKLOAD, "m", "2", {"share_pct": 60.0}, OWN))
OTHER = {"inputs": [{"name": "x", "dtype": "float32", "shape": [3]}], "outputs": []}


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda: with_version(SECOND, "m", "2", {"share_pct": 105.0}, {}), "share_pct: 105.0.*Give a smaller"),
        (lambda: with_version(SECOND, "m", "3", {"share_pct": 60.0}, OWN), "add up to less than 100"),
        (lambda: with_version(SECOND, "m", "3", {"share_pct": 5.0}, {}), "Say what it has of its own"),
        (lambda: with_version(SECOND, "m", "1", {"share_pct": 5.0}, {}), "takes the rest.*Promote another"),
        (lambda: with_version(SECOND, "z", "2", {"share_pct": 5.0}, OWN), "is not in the workload. Use one of"),
        (lambda: promoted(SECOND, "m", "7"), "is no version of 'm'. There is 1, 2"),
        (lambda: promoted(SECOND, "m", "1"), "takes the rest of 'm' already"),
        (lambda: to_take_back(SECOND, "m", "1"), "Promote another one first"),
        (lambda: to_take_back(SECOND, "x", "2"), "is no version of 'x'. There is 1"),
        (
            lambda: with_version(
                checked([M.model_copy(update={"options": {**OTHER, "outputs": [OTHER["inputs"][0]]}})]),
                "m",
                "2",
                {"share_pct": 5.0},
                {"options": OTHER},
            ),
            "m:2': has outputs .*, and m has x float32.*give it a name of its own",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(do: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        do()


class SplitDesk(PlanningDesk):
    """A desk whose planner plans at once, and whose requests go where the plan that is served sends them."""

    def __init__(self, plan: Plan, total: Mapping[str, float], settings: Mapping[str, object] | None = None) -> None:
        super().__init__(plan, GPUS, settings)
        self.total = total

    def look(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.rates = {}
            models = self.controller.plan.models
            for spec in models:
                shares = sum(s.share_pct or 0.0 for s in models if s.model == spec.model and not s.shadow)
                part = 100.0 - shares if spec.share_pct is None and not spec.shadow else spec.share_pct or 0.0
                self.rates[spec.name] = self.total[spec.model] * part / 100.0
            super().look()

    def split(self) -> dict[str, float | None]:
        return {spec.name: spec.share_pct for spec in self.controller.plan.models if spec.model == "m"}


def served(mode: str = "act", *, canary_pct: float | None = None, seconds: int = 0) -> SplitDesk:
    plan = make_plan({"n0/0/a": (100.0, ["m", "x"])}, rate_rps=100.0)
    desk = SplitDesk(plan, {"m": 300.0, "x": 50.0}, {"mode": mode})
    desk.look(30)
    if canary_pct is not None:
        bring(desk, canary_pct)
    desk.look(seconds)
    return desk


def bring(desk: SplitDesk, share_pct: float) -> None:
    controller = desk.controller
    terms = {"share_pct": share_pct}
    controller.edit(with_version(controller.workload, "m", "2", terms, OWN))


def test_a_canary_is_brought_before_it_is_sent_anything_and_a_share_moves_without_a_process() -> None:
    desk = served()
    bring(desk, 5.0)
    desk.applied.clear()
    desk.look(10)
    assert desk.split() == {"m": None, "m:2": 5.0}
    for apply in desk.applied[:-1]:  # stages
        assert {s.name: s.share_pct for s in apply.plan.models if s.model == "m"}.get("m:2", 0.0) == 0.0
    gpulets = desk.controller.plan.gpulets
    bring(desk, 8.0)
    desk.look(4)
    assert desk.split() == {"m": None, "m:2": 8.0}
    assert desk.entries[-1].version is not None  # the history keeps it
    assert {g.id for g in desk.controller.plan.gpulets} == {g.id for g in gpulets}


def test_a_promoted_version_is_planned_for_all_requests_before_it_has_them() -> None:
    desk = served(canary_pct=5.0, seconds=20)
    controller = desk.controller
    controller.edit(promoted(controller.workload, "m", "2"))
    desk.applied.clear()
    desk.look(20)
    assert desk.split() == {"m:2": None}
    assert desk.hosted() == {"m:2", "x"}
    first = next(a.plan for a in desk.applied if a.plan.model("m:2").share_pct is None)
    assert first.model("m").share_pct == 0.0  # what waits for it is still served
    assert first.hosts_of("m")
    assert first.expected.models["m:2"].goodput_rps > 290.0
    for apply in desk.applied:
        rests = [s.name for s in apply.plan.models if s.model == "m" and s.share_pct is None]
        assert len(rests) == 1
    desk.restart()
    desk.look(30)
    assert desk.split() == {"m:2": None}


def test_a_rollback_brings_back_the_versions_and_shares_of_its_time_and_no_model_that_was_removed() -> None:
    desk = served()
    controller = desk.controller
    ran = [(controller.plan, controller.workload)]
    bring(desk, 5.0)
    desk.look(20)
    ran.append((controller.plan, controller.workload))
    controller.edit(promoted(controller.workload, "m", "2"))
    desk.look(20)
    controller.edit({"x": None})
    desk.look(20)
    assert desk.split() == {"m:2": None}
    for (plan, declared), split in zip(reversed(ran), ({"m": None, "m:2": 5.0}, {"m": None}), strict=True):
        controller.deploy(desk.now_s, plan, "rollback", GPUS, declared)
        desk.look(20)
        assert desk.split() == split
        assert "x" not in desk.hosted()
    desk.restart()
    desk.look(20)
    assert desk.split() == {"m": None}


def test_advice_that_is_carried_out_brings_the_version_that_it_was_made_for() -> None:
    desk = served("advise")
    controller = desk.controller
    before = controller.workload
    bring(desk, 10.0)
    desk.look(20)
    assert controller.advice is not None
    controller.deploy(desk.now_s, controller.advice.plan, "apply", GPUS, before)
    desk.look(20)
    assert desk.split() == {"m": None, "m:2": 10.0}
    assert {spec.name: spec.rate_rps for spec in controller.workload.models} == {"m": 90.0, "m:2": 10.0, "x": 100.0}


def test_a_version_that_is_promoted_already_is_not_taken_back_on_the_way() -> None:
    desk = served(canary_pct=5.0, seconds=20)
    controller = desk.controller
    controller.edit(promoted(controller.workload, "m", "2"))
    desk.lost["m:2"] = 1.0
    Desk.look(desk, 30)  # the planner does not answer
    assert desk.split() == {"m": None, "m:2": 5.0}
    assert "m:2" in {spec.name for spec in controller.workload.models}
    assert "canary" not in desk.kinds()


def test_a_canary_that_is_worse_is_taken_back_and_the_log_says_why() -> None:
    desk = served(canary_pct=10.0, seconds=20)
    assert desk.split() == {"m": None, "m:2": 10.0}
    desk.applied.clear()
    desk.lost["m:2"] = 0.9
    desk.look(40)
    assert desk.split() == {"m": None}
    assert "m:2" not in desk.hosted()
    assert {s.name: s.share_pct for s in desk.applied[0].plan.models}["m:2"] == 0.0  # at once
    line = next(entry for entry in desk.entries if entry.kind == "canary")
    assert "is worse with a confidence of 0.999 and is taken back" in line.text
    assert 0 < line.data["lost"] < line.data["ended"]
    assert line.data["rest_lost"] == 0
    assert [spec.name for spec in desk.controller.workload.models] == ["m", "x"]


def test_a_version_that_does_not_become_ready_is_given_up() -> None:
    desk = served()
    bring(desk, 10.0)
    before = {gpulet.id for gpulet in desk.controller.plan.gpulets}
    for _ in range(200):
        desk.look()
        for gpulet in desk.controller.plan.gpulets:
            if gpulet.id not in before and any(replica.name == "m:2" for replica in gpulet.models):
                desk.broken[gpulet.id] = "no such file: /two"
    assert desk.split() == {"m": None}
    assert [spec.name for spec in desk.controller.workload.models] == ["m", "x"]
    assert desk.text("canary") == "m:2 is removed: the change that brought it failed"
    assert desk.kinds().count("roll back") == 1


def test_a_version_goes_with_a_change_that_is_taken_back_as_others_lose() -> None:
    desk = served(canary_pct=10.0, seconds=8)
    assert desk.split() == {"m": None, "m:2": 10.0}
    desk.lost["x"] = 0.5  # since then
    for _ in range(200):
        desk.look()
        if "roll back" in desk.kinds():
            desk.lost.clear()
    assert "roll back" in desk.kinds()
    assert desk.split() == {"m": None}
    assert [spec.name for spec in desk.controller.workload.models] == ["m", "x"]


def test_what_only_advises_or_is_paused_says_so_and_an_operator_can_take_back() -> None:
    desk = served(canary_pct=10.0, seconds=20)
    desk.controller.pause(paused=True)
    desk.lost["m:2"] = 1.0
    desk.look(40)
    assert desk.split() == {"m": None, "m:2": 10.0}
    assert "should be taken back. Not now: changes are paused" in desk.text("canary")
    desk.controller.withdraw("m:2", "by an operator")
    desk.look(1)
    assert desk.split() == {"m": None, "m:2": 0.0}


def test_a_shadow_that_loses_requests_is_no_reason_for_anything() -> None:
    desk = served()
    controller = desk.controller
    controller.edit(with_version(controller.workload, "m", "3", {"shadow": True}, OWN))
    desk.look(30)
    assert "m:3" in desk.hosted()
    desk.entries.clear()
    desk.lost["m:3"] = 1.0
    desk.look(60)
    assert "slo" not in {reason for entry in desk.entries for reason in entry.data.get("reasons", ())}
    assert "canary" not in desk.kinds()


class LateDesk(SplitDesk):
    """A desk whose planner takes its time."""

    def __init__(self, plan: Plan, total: Mapping[str, float], draw: random.Random) -> None:
        super().__init__(plan, total, {"rates": {"settle_s": 1.0}, "change": {"cool_down_s": 1.0}})
        self.draw = draw

    def answers(self) -> bool:
        return self.draw.random() < 0.3


@pytest.mark.parametrize("seed", range(8))
def test_what_is_asked_is_done_once_nothing_is_awaited(seed: int) -> None:
    """Whatever is asked in which order, whenever the planner answers, and when the controller's process ends: once it
    awaits nothing, its plan has what was asked."""
    draw = random.Random(seed)
    plan = make_plan({"n0/0/a": (100.0, ["m"]), "n1/0/a": (100.0, ["x"])})
    desk, before, number = LateDesk(plan, {"m": 40.0, "x": 20.0}, draw), [plan], 1
    desk.look(2)
    for _ in range(10):
        controller = desk.controller
        workload, edits = controller.workload, dict[str, ModelSpec | None]()
        tried = [spec.version for spec in workload.models if spec.is_tried]
        what = draw.choice(["canary", "share", "promote", "take back", "update", "roll back"])
        if what == "canary" and len(tried) < 3:
            number += 1
            edits = with_version(workload, "m", str(number), {"share_pct": 20.0}, {"weights_path": f"/{number}"})
        elif what == "share" and tried:
            edits = with_version(workload, "m", draw.choice(tried), {"share_pct": draw.randint(1, 30)}, {})
        elif what == "promote" and tried:
            edits = promoted(workload, "m", draw.choice(tried))
        elif what == "take back" and tried:
            name = to_take_back(workload, "m", draw.choice(tried))
            controller.withdraw(name, "a test takes it back")
            edits[name] = None
        elif what == "update":
            terms = {"slo_ms": draw.choice([80.0, 90.0]), "weights_path": f"/{draw.random()}"}
            edits["x"] = workload["x"].model_copy(update=terms)
        elif what == "roll back":
            controller.deploy(desk.now_s, before[-1], "a test goes back", desk.gpus, workload)
        if what != "take back":
            controller.edit(edits)
        desk.take()
        if draw.random() < 0.3:
            desk.restart()
            desk.questions.clear()
        looks = 0
        while desk.controller.state().awaits:
            desk.look()
            looks += 1
            assert looks < 1000, (what, desk.controller.state())
        assert lacking(desk.controller.plan.models, edits) == [], (what, desk.entries)
        before.append(desk.controller.plan)
        desk.look(draw.choice([0, 1, 12]))
