"""Whole runs with applications against a fake endpoint, and the verbs that judge applications end to end."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from pyarrow import parquet

from tenuto.cli.bench import command as bench_verb
from tenuto.cli.goodput import command as goodput_verb
from tenuto.cli.simulate import command as simulate_verb
from tenuto.loadgen.bench import BenchOptions, BenchResult, asked_of, run_bench
from tenuto.loadgen.clients.client import ClientJob, ClientReport
from tenuto.loadgen.clients.group import LocalClient
from tenuto.loadgen.report.run_page import render_page
from tenuto.loadgen.run import load_run
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.profiles import Profiles
from tests.instruments.fake_server import Answer, FakeServer, fake_server, signature
from tests.instruments.fan_out import game, traffic, workload

ALONE = {"name": "alone", "rate_rps": 50, "slo_ms": 3000, "latency": {"alpha_ms": 1, "beta_ms": 5}}
STAGES = ("traffic.ssd", "traffic.a", "traffic.b", "traffic.end")


def served(**changes: Any) -> Workload:
    """`traffic` with a long SLO, and a model of its own."""
    return workload(traffic(**{"rate_rps": 50.0, "slo_ms": 4000.0, **changes}), models=[ALONE])


def run(server: FakeServer, work: Workload, sender: Any = None, **settings: Any) -> BenchResult:
    options = BenchOptions(
        **{"url": server.url, "duration_s": 0.3, "clients": 0, "grace_s": 0.3, "warmup_s": 0.0, **settings}
    )
    return run_bench(work.models, options, clients=sender, applications=work.applications)


def answered(_number: int, model: str, _headers: dict[str, str]) -> Answer:
    times = ", ".join(f"{stage.split('.')[1]};begin=1.0;end=3.5;requests=1" for stage in STAGES)
    return Answer(headers=f"X-Tenuto-Stages: {times}\r\n") if model == "traffic" else Answer()


def endpoint(**settings: Any) -> Any:
    """`traffic` says how long its stages took."""
    return fake_server({name: signature(4) for name in ("traffic", "alone")}, **{"answer": answered, **settings})


def test_a_run_is_judged_by_its_application_and_its_own_models() -> None:
    with endpoint() as server:
        result = run(server, served())
    row = result.summary["applications"]["traffic"]
    assert (row["offered"], row["ok"], row["attainment"]) == (15, 15, 1.0)
    models = result.summary["models"]
    assert [*models] == ["alone"]
    assert [stage["model"] for stage in row["stages"].values()] == [*STAGES]
    conditions = result.verdict.conditions
    assert conditions["scheduled"] == conditions["sent"] == 15 + models["alone"]["offered"] == len(result.records)
    assert [path for path, _, _ in server.requests].count("/v2/models/traffic/infer") == 15
    assert all("x-slo-ms" not in headers for _, headers, _ in server.requests)
    assert {stage["p50_ms"] for stage in row["stages"].values()} == {2.5}


def test_the_verdict_names_the_application() -> None:
    with endpoint(answer=lambda _n, model, _h: Answer(503 if model == "traffic" else 200)) as server:
        result = run(server, served())
    assert result.summary["applications"]["traffic"]["failed"] == 15
    judged = [reason for reason in result.verdict.reasons if "in time" in reason]
    if result.verdict.result != "INVALID":  # the machine was too busy to send in time
        assert judged == ["traffic: 0.00 % in time, 99 % wanted"]


def test_slo_scale_scales_the_application() -> None:
    with endpoint() as server:
        result = run(server, served(), slo_scale=0.5)
    assert result.schedule.applications[0].slo_ms == 2000.0
    assert result.summary["applications"]["traffic"]["slo_ms"] == 2000.0
    assert {headers["x-slo-ms"] for path, headers, _ in server.requests if "traffic" in path} == {"2000"}
    assert {headers["x-slo-ms"] for path, headers, _ in server.requests if "alone" in path} == {"1500"}


class OneOfTwoLost(LocalClient):
    """Two clients, of which the second never reports."""

    def prepare(self, jobs: Sequence[ClientJob]) -> None:
        assert len(jobs) == 2
        super().prepare(jobs[:1])

    def results(self) -> tuple[list[ClientReport], list[str]]:
        found, _ = super().results()
        return found, ["client 1 was lost (ActorDiedError); its requests count as not sent"]


def test_a_lost_client_makes_the_run_invalid_and_its_requests_of_applications_failed() -> None:
    with endpoint() as server:
        result = run(server, served(), OneOfTwoLost(), clients=2)
    assert result.verdict.result == "INVALID"
    assert result.verdict.reasons[0].startswith("client 1 was lost")
    row = result.summary["applications"]["traffic"]
    offered = result.summary["requests"]
    assert row["offered"] == row["ok"] + row["failed"] == 15
    assert result.summary["models"]["alone"]["failed"] + row["failed"] == offered // 2
    assert len(result.records.request) == len(set(result.records.request.tolist()))


class Interrupting(LocalClient):
    def is_done(self) -> bool:
        if self.progress().get("answered", 0) >= 20:
            raise KeyboardInterrupt
        return super().is_done()


def test_an_interrupted_run_keeps_whole_requests_of_applications() -> None:
    with endpoint() as server:
        result = run(server, served(), Interrupting(), duration_s=30.0)
    assert "interrupted" in result.verdict.reasons[0]
    row = result.summary["applications"]["traffic"]
    assert 0 < row["offered"] == row["ok"] + row["late"]


def planned(work: Workload, gpus: int = 2) -> Plan:
    return solve(load_policy("ffd"), work, Cluster.parse(f"v100:{gpus}"), Profiles(()))


def test_the_verb_writes_applications_into_every_file(tmp_path: Path) -> None:
    work = served()
    path, out = tmp_path / "plan.yaml", tmp_path / "out"
    path.write_text(json.dumps(planned(work).to_data()), encoding="utf-8")
    with endpoint(plan=planned(work).to_data()) as server:
        arguments = [str(path), "--url", server.url, "--duration-s", "1", "--clients", "0", "-o", str(out)]
        ran = CliRunner().invoke(bench_verb, arguments, standalone_mode=False)
    assert ran.exception is None, ran.output
    assert "traffic.ssd" in ran.output

    document = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert document["applications"]["traffic"]["offered"] == 47  # of 50, those of the first 50 ms are warm-up
    table = parquet.read_table(out / "requests.parquet")
    mine = [row for row in table.to_pylist() if row["model"] == "traffic"]
    assert len({row["id"] for row in mine}) == 50
    assert all(row["stage_end_ms"] > 0.0 for row in mine)
    assert all(math.isnan(row["stage_end_ms"]) for row in table.to_pylist() if row["model"] == "alone")
    with (out / "timeline.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert sum(int(row["offered"]) for row in rows) == len(table)

    again = load_run(out)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert render_page(again) == page
    for words in (
        "<h2>Applications</h2>",
        "<td>traffic.ssd</td>",
        "traffic over time",
        "PASS needs 99 % of every application's and every model's requests in time.",
    ):
        assert words in page
    assert len(again.records.where(again.records.model == again.names.index("traffic"))) == 50


def test_an_application_with_an_unserved_stage_is_left_out_with_a_line() -> None:
    plan = planned(served())
    models, applications, notes = asked_of(plan.model_copy(update={"unserved": ("traffic.b",)}))
    assert [spec.name for spec in models] == ["alone"]
    assert applications == ()
    assert notes == ("application traffic is not asked: the plan does not serve traffic.b",)
    assert asked_of(plan) == (plan.models, plan.applications, ())


# --- virtual time -------------------------------------------------------------------------------------------------


def saved(tmp_path: Path, work: Workload, gpus: int = 2) -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(planned(work, gpus).to_data()), encoding="utf-8")
    return str(path)


def invoke(verb: Any, *arguments: str) -> Any:
    ran = CliRunner().invoke(verb, [*arguments, "--json"])
    assert ran.exit_code in (0, 1), (ran.output, ran.exception)
    return json.loads(ran.stdout)


def test_simulate_writes_the_same_report(tmp_path: Path) -> None:
    work = workload(traffic(arrival={"process": "poisson"}), game(), models=[{**ALONE, "slo_ms": 60}])
    out = tmp_path / "out"
    summary = invoke(simulate_verb, saved(tmp_path, work), "--duration-s", "20", "-o", str(out))
    loaded = load_run(out)

    assert set(summary["applications"]) == {"traffic", "game"}
    assert loaded.document["applications"] == summary["applications"]
    for name, row in loaded.document["models"].items():
        assert (row["offered"], row["ok"]) == tuple(summary["models"][name][key] for key in ("offered", "ok"))
    for name in ("traffic", "game"):
        assert int((loaded.by_name()[name].outcome == Outcome.OK).sum()) == summary["applications"][name]["ok"]
    assert "traffic over time" in (out / "report.html").read_text(encoding="utf-8")


def test_simulated_stages_after_one_that_was_given_up_are_never_due(tmp_path: Path) -> None:
    work = workload(traffic(rate_rps=400.0, arrival={"process": "poisson"}))
    invoke(
        simulate_verb, saved(tmp_path, work, 8), "--duration-s", "4", "-o", str(tmp_path / "out"), "--rate-scale", "3"
    )
    rows = parquet.read_table(tmp_path / "out" / "requests.parquet").to_pylist()
    lost = [row for row in rows if row["outcome"] == "expired"]
    assert lost
    assert all(math.isnan(row["stage_end_ms"]) and math.isnan(row["answered_ms"]) for row in lost)
    # Most are lost at the first stage, as nothing was spent on them.
    behind = [row for row in lost if row["stage_ssd_ms"] > 0.0]
    assert len(behind) < 0.1 * len(lost)


def test_goodput_asks_99_percent_of_every_application_and_not_of_its_stages(tmp_path: Path) -> None:
    work = workload(traffic(arrival={"process": "poisson"}), models=[{**ALONE, "slo_ms": 60}])
    answer = invoke(goodput_verb, saved(tmp_path, work), "--duration-s", "4")

    assert {trial["worst_model"] for trial in answer["trials"]} <= {"traffic", "alone"}
    found = answer["simulation"]
    assert found["applications"]["traffic"]["attainment"] >= 0.99
    assert found["models"]["alone"]["attainment"] >= 0.99
    above = [trial for trial in answer["trials"] if not trial["passed"]]
    assert above
    scale = str(min(trial["rate_scale"] for trial in above))
    failed = invoke(simulate_verb, saved(tmp_path, work), "--duration-s", "4", "--rate-scale", scale)
    worst = min(failed["applications"]["traffic"]["attainment"], failed["models"]["alone"]["attainment"])
    assert worst < 0.99


def test_goodput_judges_applications(tmp_path: Path) -> None:
    work = workload(traffic(arrival={"process": "poisson"}))
    answer = invoke(goodput_verb, saved(tmp_path, work), "--duration-s", "6", "--runs", "4")
    assert {run["worst_model"] for run in answer["trials"]} == {"traffic"}
