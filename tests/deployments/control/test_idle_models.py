"""Models that nobody asks: they leave, down to no GPU at all, and come back when somebody asks."""

from __future__ import annotations

import pytest

from tenuto.placement import Plan
from tests.deployments.control.desk import PlanningDesk
from tests.instruments.plans import gpu, make_plan

ALONE = make_plan({"n0/0/a": (100.0, ["a"])})
BESIDE = make_plan({"n0/0/a": (50.0, ["a"]), "n1/0/b": (50.0, ["b"])})


def leaving_after(plan: Plan, seconds: float, *names: str) -> Plan:
    """Return the plan with models that may leave when nobody has asked them for so long; by default all of them."""
    models = (
        spec.model_copy(update={"idle_after_s": seconds}) if spec.name in names or not names else spec
        for spec in plan.models
    )
    return plan.model_copy(update={"models": tuple(models)})


def test_a_model_that_nobody_asks_leaves_and_comes_back() -> None:
    desk = PlanningDesk(leaving_after(BESIDE, 60.0, "b"), [gpu("n0/0"), gpu("n1/0")])
    desk.look(30)
    desk.rates["b"] = 0.0
    desk.look(50)
    assert desk.hosted() == {"a", "b"}
    desk.look(30)
    assert desk.hosted() == {"a"}
    assert "nobody has asked b" in desk.text("changed")
    plan = desk.controller.plan
    assert (plan.unserved, [*plan.idle]) == (("b",), ["b"])
    assert {spec.name for spec in plan.models} == {"a", "b"}
    assert Plan.from_data(plan.to_data(), origin="the plan") == plan
    desk.look(300)
    assert desk.hosted() == {"a"}
    desk.rates["b"] = 1.0
    desk.look(5)
    assert desk.hosted() == {"a", "b"}
    assert "b is asked again" in desk.text("changed")
    assert not desk.controller.plan.idle
    assert not desk.controller.plan.unserved
    assert not {"stuck", "roll back"} & set(desk.kinds())


def test_a_model_that_is_asked_offline_alone_stays_until_nothing_waits() -> None:
    desk = PlanningDesk(leaving_after(BESIDE, 60.0, "b"), [gpu("n0/0"), gpu("n1/0")])
    desk.rates["b"], desk.offline["b"] = 0.0, 1
    desk.look(300)
    assert desk.hosted() == {"a", "b"}
    desk.offline["b"] = 0
    desk.look(90)
    assert desk.hosted() == {"a"}


def test_the_last_model_leaves_no_gpu_in_use() -> None:
    desk = PlanningDesk(leaving_after(ALONE, 60.0), [gpu("n0/0")], {"gpus": {"v100": {"max": 2}}})
    desk.rates["a"] = 0.0
    desk.look(90)
    assert not desk.controller.plan.gpulets
    assert desk.wanted[-1].by_type == {"v100": 0}
    desk.gpus = ()
    desk.look(120)
    assert not {"stuck", "lost"} & set(desk.kinds())
    desk.rates["a"] = 1.0
    desk.look(2)
    assert desk.wanted[-1].by_type == {"v100": 1}
    desk.rates["a"] = 0.0  # one request only; the GPU takes longer than `idle_after_s`
    desk.look(50)
    desk.gpus = (gpu("n7/0"),)
    desk.look(3)
    assert desk.hosted() == {"a"}
    desk.look(90)
    assert 50.0 < desk.controller.plan.idle["a"] < 60.0  # so long the start took


def test_a_model_stays_idle_over_a_restart_and_follows_an_operator() -> None:
    first = leaving_after(BESIDE, 60.0, "b")
    desk = PlanningDesk(first, [gpu("n0/0"), gpu("n1/0")])
    desk.rates["b"] = 0.0
    desk.look(90)
    assert desk.hosted() == {"a"}
    desk.restart()
    desk.look(30)
    assert desk.hosted() == {"a"}
    desk.controller.deploy(desk.now_s, first, "by an operator", desk.gpus)
    desk.take()
    desk.look(30)
    assert desk.hosted() == {"a", "b"}
    desk.look(120)
    assert desk.hosted() == {"a"}


def test_nothing_leaves_in_other_modes_or_without_leave() -> None:
    for plan, settings in (
        (leaving_after(BESIDE, 60.0), {"mode": "advise"}),
        (leaving_after(BESIDE, 60.0), {"mode": "off"}),
        (BESIDE, {"when": {"underused": None}}),
    ):
        desk = PlanningDesk(plan, [gpu("n0/0"), gpu("n1/0")], settings)
        desk.rates = dict.fromkeys(desk.rates, 0.0)
        desk.look(300)
        assert desk.hosted() == {"a", "b"}


def test_versions_leave_together() -> None:
    plan = make_plan({"n0/0/a": (50.0, ["a"]), "n1/0/b": (50.0, ["a:2"])})
    split = tuple(spec.model_copy(update={"share_pct": 1.0}) if spec.name == "a:2" else spec for spec in plan.models)
    desk = PlanningDesk(leaving_after(plan.model_copy(update={"models": split}), 60.0), [gpu("n0/0"), gpu("n1/0")])
    desk.rates["a:2"] = 0.0
    desk.look(120)
    assert desk.hosted() == {"a", "a:2"}
    desk.rates["a"] = 0.0
    desk.look(120)
    assert not desk.controller.plan.gpulets


class SlowDesk(PlanningDesk):
    """A desk whose planner takes its time over each question; a newer one takes the place of an older."""

    takes_s, _number, _since_s = 45.0, -1, 0.0

    def answers(self) -> bool:
        if self.questions[-1].number != self._number:
            self._number, self._since_s = self.questions[-1].number, self.now_s
        return self.now_s - self._since_s >= self.takes_s

    def ask_once(self, model: str) -> None:
        """Let a single request come."""
        self.rates[model] = 1.0
        self.look()
        self.rates[model] = 0.0


@pytest.mark.parametrize("after_s", [1, 20, 60])
def test_one_request_wakes_a_model_though_the_planner_takes_longer_than_it_may_be_idle(after_s: int) -> None:
    desk = SlowDesk(leaving_after(BESIDE, 20.0, "b"), [gpu("n0/0"), gpu("n1/0")])
    desk.rates["b"] = 0.0
    while desk.hosted() != {"a"}:
        desk.look()
    desk.look(after_s)  # at first the planner works on what the rest needs
    desk.ask_once("b")
    desk.look(int(desk.takes_s) + 2)
    assert desk.hosted() == {"a", "b"}
    desk.look(60)
    assert desk.hosted() == {"a"}


def test_one_request_wakes_a_model_though_its_gpu_comes_later_than_it_may_be_idle() -> None:
    desk = PlanningDesk(leaving_after(ALONE, 20.0), [gpu("n0/0")], {"gpus": {"v100": {"max": 2}}})
    desk.rates["a"] = 0.0
    desk.look(60)
    desk.gpus = ()
    desk.look(60)
    assert desk.wanted[-1].by_type == {"v100": 0}
    desk.rates["a"] = 1.0
    desk.look()
    desk.rates["a"] = 0.0
    desk.look(100)
    assert desk.wanted[-1].by_type == {"v100": 1}
    desk.gpus = (gpu("n7/0"),)
    desk.look(3)
    assert desk.hosted() == {"a"}


def test_a_model_for_which_no_gpu_comes_is_waited_for_no_longer_than_for_the_gpu() -> None:
    desk = PlanningDesk(
        leaving_after(ALONE, 20.0), [gpu("n0/0")], {"gpus": {"v100": {"max": 2}}, "change": {"come_s": 200.0}}
    )
    desk.rates["a"] = 0.0
    desk.look(60)
    desk.gpus = ()
    desk.look(60)
    desk.rates["a"] = 1.0
    desk.look()
    desk.rates["a"] = 0.0
    desk.look(300)
    desk.gpus = (gpu("n7/0"),)
    desk.look(30)
    assert desk.hosted() == set()
