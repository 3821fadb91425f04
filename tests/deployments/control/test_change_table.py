"""The states of a change are one table, which the documentation shows and the controller goes by."""

from __future__ import annotations

import pytest

from tenuto.deployments.control.change_state import ChangeState
from tenuto.deployments.control.change_table import TRANSITIONS, Phase, as_markdown
from tenuto.deployments.control.remembered import Memory
from tenuto.deployments.control.settings import ControlSettings
from tests.instruments.forking import ROOT
from tests.instruments.plans import make_plan

PLAN = make_plan({"n0/0/a": (50.0, ["a"])})


def test_the_documentation_shows_the_table() -> None:
    assert as_markdown() in (ROOT / "docs/reference/operating.md").read_text(encoding="utf-8")


def test_every_state_is_reached_and_left() -> None:
    assert set(TRANSITIONS.values()) == set(Phase)
    assert {phase for (phase, _), after in TRANSITIONS.items() if after is not phase} == set(Phase)


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
