"""`tenuto fleet`: observe two cells over HTTP, plan, compare and check, with what each says of wrong input."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml

from tenuto.cli import main
from tenuto.deployments.wire.status import GpuletStatus, ModelStatus, SystemStatus
from tenuto.placement import Plan

WORKLOAD = """
models:
  - {name: resnet50, rate_rps: 600, slo_ms: 200, latency: {alpha_ms: 2, beta_ms: 6}}
  - {name: bert, rate_rps: 100, slo_ms: 250, latency: {alpha_ms: 5, beta_ms: 12}, spread: cell, survive: 1}
"""


class Cell(HTTPServer):
    """The operators' port of a cell: it says which plan runs there."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Status)
        self.plan: Plan | None = None
        self.version, self.down, self.counts = "0.1.0", False, dict[str, ModelStatus]()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def status(self) -> SystemStatus:
        gpulets = [] if self.plan is None else [GpuletStatus(id=g.id, up=not self.down) for g in self.plan.gpulets]
        data = None if self.plan is None else self.plan.to_data()
        return SystemStatus(plan=data, models=self.counts, gpulets=gpulets, version=self.version)


class _Status(BaseHTTPRequestHandler):
    server: Cell

    def do_GET(self) -> None:
        body = msgspec.json.encode(self.server.status())
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def tenuto(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["fleet", *words])
    return int(ended.value.code or 0)


def test_no_cell_moves_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = Cell()
    (tmp_path / "w.yaml").write_text("models: [{name: m, rate_rps: 9, slo_ms: 99, latency: {alpha_ms: 2, beta_ms: 6}}]")
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path / "w.yaml"), "--gpus", "v100:1", "--policy", "symphony", "-o", str(tmp_path / "p")])
    cell.plan, cell.version, cell.down = Plan.load(tmp_path / "p"), "\x1b[2J\x9b2Jno\rversion\u202e", True
    capsys.readouterr()
    assert tenuto("observe", "--cell", f"east={cell.url}", "-o", str(tmp_path / "fleet.yaml")) == 0
    shown = capsys.readouterr()
    assert "\ufffd[2J\ufffd2Jno\ufffdversion\ufffd" in shown.out
    assert "\ufffd[2J\ufffd2J" in shown.err
    assert (shown.out + shown.err).replace("\n", "").isprintable()
    cell.shutdown()
    cell.server_close()


def step_of(folder: Path) -> dict[str, Any]:
    step: dict[str, Any] = yaml.safe_load((folder / "step.yaml").read_text())
    return step


def test_from_a_file_by_hand_to_a_step_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = {"east": Cell(), "west": Cell()}
    gpus = {"type": "v100", "count": 4, "price_per_hour": 2.5, "spot": {"life_hours": 100.0, "notice_s": 60.0}}
    nodes = [{"name": "n0", "gpus": [gpus]}]
    data = [{"name": name, "url": cell.url, "nodes": nodes} for name, cell in cells.items()]
    Path("fleet.yaml").write_text(yaml.safe_dump({"cells": data}))
    Path("workload.yaml").write_text(WORKLOAD)
    plan = ("plan", "workload.yaml", "fleet.yaml", "-o", "step", "--canary", "west", "--bind", "127.0.0.1:8080")
    assert tenuto(*plan) == 0
    assert [change["phase"] for change in step_of(Path("step"))["changes"]] == ["canary", "room"]
    made = {path.name for path in Path("step").iterdir()}
    assert made == {"cells", "lost", "step.yaml", "weights.yaml", "haproxy.cfg", "models.map", "httproutes.yaml"}
    assert "  bind 127.0.0.1:8080\n" in Path("step/haproxy.cfg").read_text()
    weights = yaml.safe_load(Path("step/weights.yaml").read_text())["models"]
    assert weights["bert"] == {"east": 0.5, "west": 0.5}
    lost = list(yaml.safe_load_all(Path("step/lost/east.yaml").read_text()))
    assert [each["metadata"]["name"] for each in lost] == ["tenuto-bert"]
    assert tenuto("diff", "step") == 0
    assert "start" in capsys.readouterr().out

    # The cells run nothing yet, then what the step says, one after the other.
    assert tenuto("observe", "-o", "fleet.yaml") == 1
    assert "cell east was never seen: no plan runs at" in capsys.readouterr().err
    for name in ("west", "east"):
        cells[name].plan = Plan.load(f"step/cells/{name}.yaml")
        tenuto("check", "step")
        assert f"{name}: done" in capsys.readouterr().out
    assert tenuto("check", "step") == 0
    assert "next: give the proxies the new weights" in capsys.readouterr().out

    # What runs is the start of the next step: nothing changes.
    assert tenuto("observe", "-o", "fleet.yaml") == 0
    seen = yaml.safe_load(Path("fleet.yaml").read_text())["cells"]
    assert seen[0]["nodes"][0]["gpus"] == [gpus]
    assert seen[0]["plan"] == "east.plan.json"
    assert tenuto("plan", "workload.yaml", "fleet.yaml", "-o", "step") == 0
    assert step_of(Path("step"))["changes"] == []
    assert list(Path("step/cells").iterdir()) == []

    # A cell that does not answer keeps its last state; another version and gpu-lets that are down are said, also by a
    # page that is drawn again after a second. What cells say stays text.
    cells["east"].shutdown()
    cells["east"].server_close()
    cells["west"].version, cells["west"].down = "0.0.9<script>", True
    cells["west"].counts = {"bert": ModelStatus(ok=90, late=10), "<img>": ModelStatus(late=1)}
    capsys.readouterr()
    pages: list[str] = []

    def sleep(_: float) -> None:
        pages.append(Path("fleet.html").read_text(encoding="utf-8"))
        cells["west"].counts = {"bert": ModelStatus(ok=190, late=10)}
        if len(pages) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("tenuto.cli.fleet.time", SimpleNamespace(sleep=sleep))  # not for other threads
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(["fleet", "observe", "-o", "fleet.yaml", "--page", "fleet.html", "--watch", "7"])
    for why in ("90.00 % of 100 requests in time since the start", "its cell does not answer", "gpu-lets down: "):
        assert why in pages[0]
    assert "<script" not in pages[0]
    assert "<img" not in pages[0]
    assert "runs Tenuto 0.0.9&lt;script&gt;" in pages[0]
    assert "&lt;img&gt;" in pages[0]
    assert 'http-equiv="refresh" content="7"' in pages[0]
    assert pages[0].count("class=unknown") == len(Plan.load("east.plan.json").gpulets)
    assert "in time since" not in pages[1]  # all were in time since the last look
    capsys.readouterr()
    assert tenuto("observe", "-o", "fleet.yaml", "--page", "fleet.html") == 1
    assert "refresh" not in Path("fleet.html").read_text(encoding="utf-8")
    said = capsys.readouterr()
    assert "cell east is as" in said.err
    assert "runs Tenuto 0.0.9" in said.err
    assert "down" in said.out
    assert yaml.safe_load(Path("fleet.yaml").read_text())["cells"][0]["plan"] == "east.plan.json"
    cells["west"].shutdown()
    cells["west"].server_close()


def test_a_fleet_is_simulated_and_loses_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = [{"name": "n0", "gpus": [{"type": "v100", "count": 4}]}]
    Path("fleet.yaml").write_text(yaml.safe_dump({"cells": [{"name": n, "nodes": nodes} for n in ("east", "west")]}))
    Path("workload.yaml").write_text(WORKLOAD)
    assert tenuto("plan", "workload.yaml", "fleet.yaml", "-o", "step") == 0
    simulate = ("simulate", "workload.yaml", "step", "--duration-s", "40", "--json")
    capsys.readouterr()
    assert tenuto(*simulate) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["attainment"] > 0.99
    assert whole["models"]["bert"]["cells"].keys() == {"east", "west"}
    home = next(iter(whole["models"]["resnet50"]["cells"]))
    assert tenuto(*simulate, "--lose", f"cell:{home}@20s") == 0
    lost = json.loads(capsys.readouterr().out)["models"]
    assert lost["resnet50"]["after_losses"]["ok"] == 0  # it has no other cell
    after = lost["bert"]["after_losses"]  # half of it is lost for 4 of the 20 s
    assert 1.0 - after["attainment"] == pytest.approx(0.5 * 4.0 / 20.0, abs=0.02)
    assert lost["bert"]["otherwise"]["attainment"] > 0.99
    assert tenuto(*simulate[:-1], "--lose", f"node:{home}/n0@20s") == 0
    assert "minute of loss" in capsys.readouterr().out

    nowhere = yaml.safe_load(WORKLOAD)
    nowhere["models"].append({**nowhere["models"][0], "name": "nowhere"})
    Path("more.yaml").write_text(yaml.safe_dump(nowhere))
    assert tenuto("simulate", "more.yaml", *simulate[2:]) == 1  # no cell has it
    assert json.loads(capsys.readouterr().out)["models"]["nowhere"]["otherwise"]["attainment"] == 0.0

    for what, text in (("cell:north@5s", "no such cell"), ("region:east@5s", "must be KIND:NAME@SECONDS")):
        assert tenuto(*simulate, "--lose", what) == 2
        assert text in capsys.readouterr().err
    weights = Path("step/weights.yaml")
    weights.write_text(weights.read_text().replace(step_of(Path("step"))["id"], "another"))
    assert tenuto(*simulate) == 2
    assert "are those of another step" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["diff", "check", "simulate"])
def test_a_step_that_was_written_in_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = [{"name": "n0", "gpus": [{"type": "v100", "count": 4}]}]
    Path("fleet.yaml").write_text(yaml.safe_dump({"cells": [{"name": "east", "nodes": nodes}]}))
    Path("workload.yaml").write_text(WORKLOAD.partition("  - {name: bert")[0])
    assert tenuto("plan", "workload.yaml", "fleet.yaml", "--policy", "symphony", "-o", "step") == 0
    old = Path("step/step.yaml").read_text()
    Path("workload.yaml").write_text(Path("workload.yaml").read_text().replace("600", "500"))
    assert tenuto("plan", "workload.yaml", "fleet.yaml", "--policy", "symphony", "-o", "step") == 0
    Path("step/step.yaml").write_text(old)  # which is written last
    words = ("workload.yaml", "step", "--duration-s", "1") if command == "simulate" else ("step",)
    assert tenuto(command, *words) == 2
    assert "is not the plan that step.yaml was made with" in capsys.readouterr().err


def test_kubernetes_gets_rayservices(tmp_path: Path) -> None:
    nodes = [{"name": "n0", "label": "tenuto-node=a", "gpus": [{"type": "v100", "count": 4}]}]
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(yaml.safe_dump({"cells": [{"name": "east", "nodes": nodes}]}))
    (tmp_path / "workload.yaml").write_text(WORKLOAD.replace(", spread: cell, survive: 1", ""))
    folder = tmp_path / "step"
    assert tenuto("plan", str(tmp_path / "workload.yaml"), str(fleet), "-o", str(folder), "--kubernetes") == 0
    assert yaml.safe_load((folder / "cells/east.yaml").read_text())["kind"] == "RayService"
    assert not (folder / "haproxy.cfg").exists()  # no cell has a URL


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--without", "south"), "--without: 'south': no such cell. Use one of east"),
        (("--canary", "south"), "--canary: 'south': no such cell"),
        (("--without", "east"), "no cell would be left"),
    ],
)
def test_wrong_names_of_cells_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    nodes = [{"name": "n0", "gpus": [{"type": "v100"}]}]
    (tmp_path / "fleet.yaml").write_text(json.dumps({"cells": [{"name": "east", "nodes": nodes}]}))
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    files = (str(tmp_path / "workload.yaml"), str(tmp_path / "fleet.yaml"), "-o", str(tmp_path / "step"))
    assert tenuto("plan", *files, *words) == 2
    assert text in capsys.readouterr().err
