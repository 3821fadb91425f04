"""Long planning says how far it is, and gives the best plan so far when it is asked to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tenuto.batching.planning.tenuto_policy import TenutoPolicy
from tenuto.cli.watching import planning_watched
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Policy, Workload, solve
from tenuto.placement.policies.gpulet.gpulet import GpuletPolicy
from tenuto.placement.policy import Abilities
from tenuto.placement.watch import INTERRUPTED, PlanningWatch
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tests.placement.policies.gpulet.turns import IGNITER, five_models

THESIS = Profiles([load_shipped("thesis-v100")])
VISION = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
FEW = five_models(alexnet=500, resnet50=700, ssd=300, vgg19=400)


class After(PlanningWatch):
    """Asks to stop once it has heard so many words."""

    def __init__(self, words: int) -> None:
        self.left, self.heard = words, 0

    def say(self, progress: str) -> None:
        assert progress
        self.heard += 1
        self.left -= 1

    def is_stopped(self) -> bool:
        return self.left <= 0


def vision(rate_rps: float = 500.0) -> Workload:
    return Workload.model_validate({"models": [{"name": n, "rate_rps": rate_rps, "slo_ms": 200} for n in VISION]})


@pytest.mark.parametrize(
    ("make", "load", "profiles"),
    [(lambda: TenutoPolicy(requests=2_000), vision(), THESIS), (GpuletPolicy, FEW, IGNITER)],
)
@pytest.mark.parametrize("words", [1, 2])
def test_a_policy_that_is_stopped_gives_a_plan_of_what_it_has(
    make: Callable[[], Policy], load: Workload, profiles: Profiles, words: int
) -> None:
    check_that_it_stops(make, load, profiles, words)


def check_that_it_stops(make: Callable[[], Policy], load: Workload, profiles: Profiles, words: int) -> None:
    policy, whole = make(), make()
    policy.watch, whole.watch = After(words), After(10**9)
    plan = solve(policy, load, Cluster.parse("v100:2"), profiles)
    full = solve(whole, load, Cluster.parse("v100:2"), profiles)
    assert INTERRUPTED in plan.notes
    assert INTERRUPTED not in full.notes
    assert policy.watch.heard <= whole.watch.heard  # type: ignore[attr-defined]
    assert {r.name for g in plan.gpulets for r in g.models} | set(plan.unserved) == {m.name for m in load.models}
    assert all(plan.unserved_reasons[name] for name in plan.unserved)
    if words > 1 or isinstance(policy, TenutoPolicy):
        assert plan.gpulets


def test_an_interruption_does_not_wait_for_further_starts() -> None:
    policy = TenutoPolicy()
    policy.watch = After(1)  # while the first start is planned
    plan = solve(policy, vision(), Cluster.parse("v100:2"), THESIS)
    assert plan.notes[0].startswith("the plan of symphony; plans tried in virtual time under 'deferred': 0")


class Endless(Policy):
    """Plans until it is told to stop, and interrupts itself meanwhile."""

    name, summary, source = "endless", "", ""
    abilities = Abilities(is_interruptible=True)

    def __init__(self, signals: int) -> None:
        self.signals = signals

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        for _ in range(self.signals):
            os.kill(os.getpid(), signal.SIGINT)
        if not self.watch.is_stopped():
            raise InvalidInputError("nobody stopped it. Cure: none.")
        return GpuletPolicy().place(workload, cluster, profiles)


def test_one_ctrl_c_asks_for_the_plan_and_two_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    policy = Endless(1)
    with planning_watched(policy):
        plan = solve(policy, FEW, Cluster.parse("v100:2"), IGNITER)
    assert INTERRUPTED in plan.notes
    assert "best plan so far" in capsys.readouterr().err
    policy = Endless(2)
    with pytest.raises(KeyboardInterrupt), planning_watched(policy):
        solve(policy, FEW, Cluster.parse("v100:2"), IGNITER)
    assert signal.getsignal(signal.SIGINT) is before
