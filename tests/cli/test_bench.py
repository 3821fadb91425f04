"""bench and report as a user meets them: exit codes, what is on stdout and stderr, files, messages without
traces.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.placement import Arrival, ModelSpec, Plan, PolicyUsed
from tests.instruments.fake_server import Answer, FakeServer, fake_server
from tests.instruments.live import LONG_MS, until
from tests.instruments.local_ray import LocalRay

PLAN = Plan(
    policy=PolicyUsed(name="test"),
    models=(ModelSpec(name="m", rate_rps=100, slo_ms=LONG_MS, arrival=Arrival(process="uniform")),),
)


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.dump())
    return str(path)


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    code = caught.value.code
    return code if isinstance(code, int) else 0


def bench(plan: str, server: FakeServer, *more: str) -> int:
    return run("bench", plan, "--url", server.url, "--duration-s", "0.3", "--warmup-s", "0", "--clients", "0", *more)


def test_a_run_that_passes(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        code = bench(plan_file, server, "-o", str(tmp_path / "out"))
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.splitlines()[-1] == "verdict: PASS (emulated GPUs)"
    assert "m" in out
    assert "Traceback" not in err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "report.html",
        "requests.parquet",
        "result.json",
        "schedule.npz",
        "timeline.csv",
    ]


def test_json_has_the_keys_of_simulate_and_more(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        assert bench(plan_file, server, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {
        "offered_rps",
        "goodput_rps",
        "attainment",
        "gpu_utilisation",
        "wall_s",
        "requests",
        "models",
        "gpulets",
    } <= set(document)
    assert {"verdict", "schedule_hash", "command", "hardware", "versions", "options", "plan"} <= set(document)
    assert {
        "offered",
        "ok",
        "late",
        "expired",
        "rejected",
        "failed",
        "attainment",
        "p50_ms",
        "p90_ms",
        "p99_ms",
        "mean_batch",
        "split_p95_ms",
    } <= set(document["models"]["m"])
    assert document["models"]["m"]["p99_ms"] is None  # 30 requests
    assert document["verdict"]["result"] == "PASS"


def test_a_run_that_fails_exits_1_and_says_why(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(number: int, *_: Any) -> Answer:
        return Answer(503, body=b'{"error":"gpu-let n0/0/a died"}', headers="") if number % 3 == 0 else Answer()

    with fake_server(answer=answer) as server:
        assert bench(plan_file, server) == 1
    out = capsys.readouterr().out
    assert "10 × HTTP 503: gpu-let n0/0/a died" in out
    assert "m: 66.67 % in time, 99 % wanted" in out
    assert out.splitlines()[-1].startswith("verdict: FAIL")


def test_an_address_alone_takes_the_plan_from_the_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(plan=PLAN.to_data()) as server:
        code = run("bench", server.url, "--duration-s", "0.3", "--clients", "0", "--rate-scale", "0.5", "--json")
    assert code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"]["conditions"]["scheduled"] == 15


def test_wrong_input_exits_2(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        assert bench(plan_file, server, "--warmup-s", "7") == 2
        assert bench(plan_file, server, "--seed", "-1") == 2
        assert bench(str(tmp_path / "absent.yaml"), server) == 2
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "result.json").write_text("{}")
        assert bench(plan_file, server, "-o", str(tmp_path / "full")) == 2
        assert server.requests == []
    assert "Traceback" not in capsys.readouterr().err


def test_no_endpoint_exits_3(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", plan_file, "--url", "http://127.0.0.1:9", "--clients", "0") == 3
    assert "tenuto serve" in capsys.readouterr().err


def test_a_full_disk_keeps_the_figures(
    plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with fake_server() as server:
        assert bench(plan_file, server, "-o", str(tmp_path / "out")) == 3
    out, err = capsys.readouterr()
    assert "verdict: PASS" in out
    assert "No space left on device" in err


def test_report_rebuilds_the_page(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with fake_server() as server:
        bench(plan_file, server, "-o", str(out))
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert run("report", str(out)) == 0
    assert (out / "report.html").read_text() == page
    assert "report.html" in capsys.readouterr().out
    assert run("report", str(tmp_path)) == 2


def test_a_simulation_writes_the_same_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = tmp_path / "w.yaml"
    workload.write_text("models: [{name: m, rate_rps: 50, slo_ms: 100, latency: {alpha_ms: 1, beta_ms: 5}}]")
    args = ("simulate", str(workload), "--gpus", "v100:1", "--duration-s", "5", "-o")
    for name, scheduler in (("a", "deferred"), ("b", "deferred")):
        assert run(*args, str(tmp_path / name), "--scheduler", scheduler) == 0
    page = (tmp_path / "a" / "report.html").read_text()
    assert "simulated in virtual time" in page
    assert run("report", str(tmp_path / "a")) == 0
    assert (tmp_path / "a" / "report.html").read_text() == page
    assert run(*args, str(tmp_path / "a")) == 2


SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.night)])


@SIGNALS
def test_interrupting_writes_the_first_part_and_marks_it(plan_file: str, tmp_path: Path, number: int) -> None:
    interrupt(plan_file, tmp_path / "out", "0", number)


@pytest.mark.ray
@SIGNALS
def test_interrupting_reaches_clients_on_ray(plan_file: str, tmp_path: Path, number: int, local_ray: LocalRay) -> None:
    local_ray.connect()
    interrupt(plan_file, tmp_path / "out", "2", number)


def interrupt(plan: str, out: Path, clients: str, number: int) -> None:
    """Interrupt a run with so many clients on Ray once it sends, and judge what it writes."""
    command = [sys.executable, "-c", "from tenuto.cli import main; main()", "bench", plan]
    options = ["--duration-s", "120", "--warmup-s", "0", "--clients", clients, "-o", str(out)]
    with fake_server() as server:
        process = subprocess.Popen(
            [*command, "--url", server.url, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            until(lambda: len(server.requests) >= 20 or process.poll() is not None)
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # as a terminal does: the clients get it too
            else:
                process.send_signal(number)
            stdout, stderr = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 1, stderr
    assert "verdict: INVALID" in stdout
    assert "interrupted" in stdout
    assert "Traceback" not in stderr
    assert json.loads((out / "result.json").read_text())["verdict"]["result"] == "INVALID"
    assert "interrupted" in (out / "report.html").read_text()
