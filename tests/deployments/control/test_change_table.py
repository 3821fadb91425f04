"""The states of a change and of a gpu-let are tables, which the documentation shows and the machine goes by."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest

from tenuto.deployments.control.change_state import ChangeState
from tenuto.deployments.control.change_table import TRANSITIONS, Phase
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.dispatch.readiness import READINESS, GpuletEvent, Readiness
from tenuto.deployments.process.transitions import TransitionTable
from tests.instruments.forking import ROOT
from tests.instruments.plans import make_plan

PLAN = make_plan({"n0/0/a": (50.0, ["a"])})


@pytest.mark.parametrize(("table", "page"), [(TRANSITIONS, "operating.md"), (READINESS, "faults.md")])
def test_the_documentation_shows_the_table(table: TransitionTable[Any, Any], page: str) -> None:
    assert table.as_markdown() in (ROOT / "docs/reference" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(("table", "states"), [(TRANSITIONS, Phase), (READINESS, Readiness)])
def test_every_state_is_reached_and_left(table: TransitionTable[Any, Any], states: type[StrEnum]) -> None:
    steps = {
        (before, after) for each in table.transitions.values() for before, after in each.items() if before != after
    }
    assert {before for before, _ in steps} == {after for _, after in steps} == set(states)


def test_a_gpulet_is_told_only_what_may_come() -> None:
    with pytest.raises(ValueError, match="a gpu-let that is 'away' cannot go on when its rest is over"):
        READINESS.after(Readiness.AWAY, GpuletEvent.RESTED)


def test_a_change_goes_through_its_states() -> None:
    state = ChangeState(ControlSettings(mode="act"), Memory(PLAN, PLAN.workload), lambda _decision: None)
    phases = [state.phase]
    state.begin(0.0, make_plan({"n0/0/a": (50.0, ["a"])}, rate_rps=7.0), "a test", (), {})
    phases.append(state.phase)
    change = state.change
    assert change is not None
    state.take_back(1.0, change, "a test", {})
    phases.append(state.phase)
    assert phases[:2] == [Phase.NONE, Phase.UNDER_WAY]
    assert phases[2] in (Phase.GOING_BACK, Phase.NONE)
    other = ChangeState(ControlSettings(mode="act"), Memory(PLAN, PLAN.workload), lambda _decision: None)
    with pytest.raises(ValueError, match="a change that is 'none' cannot go on when a gpu-let cannot start"):
        other.take_back(2.0, change, "nothing is under way", {})
