"""`tenuto diff` of two plan files, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto.cli import main
from tenuto.deployments.control.foreseen import foresee
from tenuto.placement import Plan
from tests.instruments.plans import make_plan


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["diff", *arguments])
    output = capsys.readouterr()
    return int(stop.value.code or 0), output.out, output.err


@pytest.fixture
def plans(tmp_path: Path) -> dict[str, str]:
    def written(name: str, plan: Plan) -> str:
        path = tmp_path / name
        path.write_text(plan.dump())
        return str(path)

    return {
        "old": written("old.yaml", make_plan({"n0/0/a": (50.0, ["a"]), "n0/1/a": (100.0, ["b"])})),
        "new": written("new.yaml", make_plan({"n0/0/a": (40.0, ["a"]), "n0/1/a": (100.0, ["b", "c"])})),
        "full": written("full.yaml", make_plan({"n0/0/a": (50.0, ["a"]), "n0/1/a": (90.0, ["b"])})),
    }


def test_every_gpulet_and_every_step_is_shown(capsys: pytest.CaptureFixture[str], plans: dict[str, str]) -> None:
    code, out, _ = run(capsys, plans["new"], "--from", plans["old"], "--json")
    found = json.loads(out)
    assert code == 0
    assert {change["gpulet"]: change["kind"] for change in found["changes"]} == {
        "n0/0/a": "stop",
        "n0/0/b": "start",
        "n0/1/a": "reconfigure",
    }
    assert found["steps"][0]["starting"] == ["n0/0/b"]  # beside the old one, which has room
    assert found["steps"][-1]["gpulets"] == ["n0/0/b", "n0/1/a"]
    assert all(step["unserved"] == [] for step in found["steps"])
    assert "step 1 of" in run(capsys, plans["new"], "--from", plans["old"])[1]


def test_what_cannot_be_served_meanwhile_is_said(capsys: pytest.CaptureFixture[str], plans: dict[str, str]) -> None:
    _, out, _ = run(capsys, plans["full"], "--from", plans["old"])
    assert "unserved meanwhile: b" in out


def test_models_that_lose_their_service_are_named(capsys: pytest.CaptureFixture[str], plans: dict[str, str]) -> None:
    _, out, _ = run(capsys, plans["old"], "--from", plans["new"], "--json")
    assert json.loads(out)["lost"] == ["c"]
    assert "no longer served: c" in run(capsys, plans["old"], "--from", plans["new"])[1]


def test_the_same_plan_changes_nothing(capsys: pytest.CaptureFixture[str], plans: dict[str, str]) -> None:
    assert "nothing changes" in run(capsys, plans["old"], "--from", plans["old"])[1]


def test_what_no_plan_has_is_ended_whatever_else_changes() -> None:
    old, new = make_plan({"n0/0/a": (50.0, ["a"])}), make_plan({"n0/1/a": (50.0, ["a"])})
    for wanted in (old, new):
        first, *others = foresee(old, wanted, ["gpulet-n0-2-a"]).changes
        assert (first.gpulet, first.kind) == ("gpulet-n0-2-a", "stop")
        assert tuple(others) == foresee(old, wanted).changes
