"""`tenuto diff` of two plan files, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from tenuto.cli import main
from tenuto.cli.deploying import left_open
from tenuto.deployments.control.change_preview import preview_change
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.user_config import Entrance, OfflineOptions, Options
from tenuto.documents import dump_yaml
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


RUNS = Deployment(plan=make_plan({"n0/0/a": (50.0, ["m"]), "n0/1/a": (50.0, ["n"])}), executor="emulated", gateways=2)
SETTINGS = {
    "executor": "torch",
    "host": "127.0.0.2",
    "port": 9000,
    "proxy_port": 9001,
    "operator_port": 0,
    "grpc_port": 9003,
    "access": Entrance(insecure=True),
    "log_json": True,
    "encrypt": True,
    "hangs_s": 3.0,
    "scheduler": "eager",
    "scheduler_options": {"hold": 0.5},
    "gateway_options": Options(max_queued=5),
    "gateways": 3,
    "dispatchers": 3,
    "partition": {"m": 0, "n": 1},
    "control": {"mode": "advise"},
    "offline": OfflineOptions(path="/tmp/offline"),
}


def test_a_diff_speaks_of_every_setting_that_a_file_says_otherwise() -> None:
    assert SETTINGS.keys() == Deployment.model_fields.keys() - {"plan", "name", "workload", "nodes"}
    for name, value in SETTINGS.items():
        (setting,) = preview_change(RUNS, RUNS.model_copy(update={name: value}), left_open()).settings
        assert (setting.name, setting.stays) == (name, name in left_open())
        assert setting.runs != setting.wanted or setting.runs == ""


@pytest.mark.parametrize("kept", [(), left_open()], ids=["changed", "kept"])
def test_a_diff_says_that_nothing_changes_where_serve_is_told_nothing_new(kept: Collection[str]) -> None:
    """Whatever is edited: the plan file is read as commands read it, and compared with what Serve would be told."""
    plan, first = RUNS.plan, RUNS.plan.gpulets[0]
    edited = [
        *(RUNS.model_copy(update={name: value}) for name, value in SETTINGS.items()),
        *(
            RUNS.with_plan(
                plan.model_copy(update={"models": (plan.models[0].model_copy(update=terms), plan.models[1])})
            )
            for terms in ({"rate_rps": 99.0}, {"slo_ms": 77.0}, {"weight": 2.0}, {"priority": 1})
        ),
        *(
            RUNS.with_plan(plan.model_copy(update={"gpulets": (first.model_copy(update=terms), plan.gpulets[1])}))
            for terms in ({"share_pct": 40.0}, {"duty_cycle_ms": 5.0}, {"memory_mib": 500.0})
        ),
        RUNS.with_plan(plan.model_copy(update={"drained": ("n1",)})),
        RUNS,
        Deployment(plan=plan),
    ]
    for wanted in edited:
        reached = wanted.left_open_as(RUNS, kept)
        is_same = reached.config().to_data() == RUNS.config().to_data()
        assert preview_change(RUNS, wanted, kept).changes_nothing == is_same, wanted.model_fields_set


def test_a_port_that_a_plan_file_says_and_that_stays_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(dump_yaml(RUNS.config().to_data()))
    new.write_text(dump_yaml(RUNS.model_copy(update={"port": 9000, "scheduler": "eager"}).config().to_data()))
    _, out, _ = run(capsys, str(new), "--from", str(old))
    assert "port: 8000 stays, not 9000; to change it, deploy with --replace, which interrupts serving" in out
    assert "scheduler: deferred stays, not eager; to change it, give it as an option" in out
    assert [
        change["kind"] for change in json.loads(run(capsys, str(new), "--from", str(old), "--json")[1])["changes"]
    ] == ["unchanged", "unchanged"]
