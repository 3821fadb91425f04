"""`tenuto plan` and `tenuto policies` as a user meets them: output, files, and wrong input without a traceback."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from tenuto.cli import main
from tenuto.placement import Plan

WORKLOAD = """\
models:
  - {name: resnet50, rate_rps: 300, slo_ms: 200}
  - {name: bert, rate_rps: 100, slo_ms: 300}
  - {name: xlnet, rate_rps: 5, slo_ms: 150}
"""


class Ran:
    """What one command did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def tenuto(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENUTO_DEBUG", raising=False)
    (tmp_path / "w.yaml").write_text(WORKLOAD)

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        output = capsys.readouterr()
        return Ran(int(stop.value.code or 0), output.out, output.err)

    return run


def test_the_table_shows_what_was_decided_and_why_not(tenuto) -> None:  # type: ignore[no-untyped-def]
    ran = tenuto("plan", "w.yaml", "--policy", "symphony", "--gpus", "v100:4")
    assert ran.code == 0
    for word in ("n0/0", "v100", "all", "resnet50", "405 of 405 rps"):
        assert word in ran.out
    ran = tenuto("plan", "w.yaml", "--policy", "ffd", "--gpus", "v100:4")
    assert ran.code == 0
    assert "unserved: xlnet: SLO below batch 1: two single requests in a row take 217.6 of 150 ms" in ran.out
    assert "idle: n0/" in ran.out
    assert "of 405 rps expected, 2 of 3 models" in ran.out


def test_json_is_the_plan(tenuto) -> None:  # type: ignore[no-untyped-def]
    ran = tenuto("plan", "w.yaml", "--policy", "gpulet", "--gpus", "v100:3", "--json")
    plan = Plan.from_data(json.loads(ran.out))
    assert plan.policy.name == "gpulet"
    assert plan.expected.models["bert"].goodput_rps == pytest.approx(100, rel=1e-3)


def test_the_written_file_is_a_plan_again(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    files = ("-o", "plan.yaml", "--executor", "emulated", "--json")
    ran = tenuto("plan", "w.yaml", "--gpus", "v100:2", "--option", "requests=200", *files)
    assert ran.code == 0
    assert "wrote plan.yaml" in ran.err
    assert json.loads(ran.out)["policy"]["name"] == "tenuto"  # where none is named
    assert Plan.load(tmp_path / "plan.yaml") == Plan.from_data(json.loads(ran.out))
    config: dict[str, Any] = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    if "applications" in config:
        assert len(config["applications"]) == 2 + len(json.loads(ran.out)["gpulets"])


def test_the_picture_is_written(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert tenuto("plan", "w.yaml", "--policy", "ffd", "--gpus", "v100:2", "--picture", "plan.svg").code == 0
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_policies_are_compared_side_by_side(tenuto) -> None:  # type: ignore[no-untyped-def]
    ran = tenuto("plan", "w.yaml", "--gpus", "v100:4", "--compare", "symphony,gpulet,ffd", "--option", "fill_pct=90")
    assert ran.code == 0
    head = ran.out.splitlines()[0].split()
    assert head == ["symphony", "gpulet", "ffd"]
    for word in ("expected rps", "GPUs used", "1×b32: 300 rps", "ffd: unserved: xlnet"):
        assert word in ran.out
    data = json.loads(tenuto("plan", "w.yaml", "--gpus", "v100:4", "--compare", "symphony,ffd", "--json").out)
    assert list(data["plans"]) == ["symphony", "ffd"]
    assert tenuto("plan", "w.yaml", "--gpus", "v100:4", "--compare", "symphony", "-o", "x.yaml").code == 2


def test_each_compared_policy_plans_with_the_profile_that_has_what_it_needs(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "r.yaml").write_text("models:\n  - {name: resnet50, rate_rps: 100, slo_ms: 100}\n")
    ran = tenuto("plan", "r.yaml", "--gpus", "v100:2", "--compare", "symphony,igniter,ffd")
    assert ran.code == 0
    assert "igniter-v100" in ran.out
    data = json.loads(tenuto("plan", "r.yaml", "--gpus", "v100:2", "--compare", "symphony,igniter", "--json").out)
    assert data["profiles"] == {"symphony": ["thesis-v100"], "igniter": ["igniter-v100", "thesis-v100"]}
    assert data["errors"] == {}


def test_a_comparison_refuses_what_no_policy_understands(tenuto) -> None:  # type: ignore[no-untyped-def]
    ran = tenuto("plan", "w.yaml", "--gpus", "v100:4", "--compare", "ffd,parvagpu", "--option", "colour=red")
    assert ran.code == 2
    assert "--option colour: 'red': no compared policy has this option. Their options: fill_pct" in ran.err
    assert "names no policy" in tenuto("plan", "w.yaml", "--gpus", "v100:4", "--compare", ",").err


def test_a_policy_that_cannot_plan_costs_the_others_nothing(tenuto) -> None:  # type: ignore[no-untyped-def]
    ran = tenuto("plan", "w.yaml", "--gpus", "v100:4", "--compare", "ffd,parvagpu")
    assert ran.code == 2
    assert "expected rps" in ran.out
    assert "--compare parvagpu: " in ran.err
    data = json.loads(tenuto("plan", "w.yaml", "--gpus", "v100:4", "--compare", "ffd,parvagpu", "--json").out)
    assert list(data["plans"]) == ["ffd"]
    assert list(data["errors"]) == ["parvagpu"]


def test_elastic_clusters_and_cluster_files(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "c.yaml").write_text("nodes:\n  - {name: left, gpus: [{type: v100, count: 1}]}\n")
    ran = tenuto("plan", "w.yaml", "--cluster", "c.yaml", "--elastic", "--policy", "gpulet", "--json")
    plan = Plan.from_data(json.loads(ran.out))
    assert [gpu.id for gpu in plan.gpus] == [f"left/{index}" for index in range(plan.expected.gpus_used)]
    assert not plan.unserved


def test_policies_lists_names_summaries_sources_and_readings(tenuto) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(tenuto("policies", "--json").out)["policies"]
    by_name = {entry["name"]: entry for entry in data}
    assert {"ffd", "gpulet", "parvagpu", "symphony", "tenuto"} <= set(by_name)
    assert all(entry["summary"] and entry["source"] and entry["readings"] for entry in data)
    assert "beyond 40 models" in tenuto("policies").out


BAD = [
    (("--policy", "symphny"), "", "unknown policy. Did you mean 'symphony'?"),
    (("--policy", "none.py:X"), "", "no such file"),
    (("--option", "colour=red"), "", "policy 'tenuto' has no such option. Known options:"),
    (("--policy", "ffd", "--option", "fill_pct=much"), "", "must be a number. The default is 80.0"),
    (("--policy", "ffd", "--option", "fill_pct=300"), "", "must be above 0 and at most 100"),
    (("--option", "fill_pct"), "", "must have the form key=value"),
    (("--profiles", "no-such"), "", "neither a file nor a shipped profile"),
    ((), "{name: resnet5, rate_rps: 1, slo_ms: 100}", "no profile of 'resnet5'"),
    ((), "{name: bert, rate_rps: 0, slo_ms: 200}", "rate_rps: 0: input should be greater than 0"),
    ((), "{name: bert, rate_rps: -5, slo_ms: 200}", "rate_rps: -5: input should be greater than 0"),
    ((), "{name: bert, rate: 5, slo_ms: 200}", "Did you mean 'rate_rps'?"),
    ((), "{name: bert, rate_rps: 5, slo_ms: 200", "not valid YAML"),
]


@pytest.mark.parametrize(("arguments", "entry", "words"), BAD)
def test_wrong_input_ends_with_code_2_and_a_cure(  # type: ignore[no-untyped-def]
    tenuto, tmp_path: Path, arguments: tuple[str, ...], entry: str, words: str
) -> None:
    if entry:
        (tmp_path / "w.yaml").write_text(f"models:\n  - {entry}\n")
    ran = tenuto("plan", "w.yaml", "--gpus", "v100:2", *arguments)
    assert ran.code == 2
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert "None" not in ran.err
    assert ran.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "h1000:2"), "unknown GPU type 'h1000'"),
        (("--gpus", "v100:0"), "counts of at least 1"),
        ((), "exactly one of"),
        (("--gpus", "v100:1", "--cluster", "c.yaml"), "exactly one of"),
        (("--cluster", "c.yaml"), "no such file"),
        (("--gpus", "t4:1"), "no profile was measured on GPU type 't4'"),
        (("--gpus", "v100:1", "--executor", "magic"), "magic"),
    ],
)
def test_wrong_clusters_and_choices(tenuto, arguments: tuple[str, ...], words: str) -> None:  # type: ignore[no-untyped-def]
    ran = tenuto("plan", "w.yaml", *arguments)
    assert ran.code == 2
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert "None" not in ran.err


def test_a_model_larger_than_every_gpu(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "c.yaml").write_text("nodes: [{name: n, gpus: [{type: v100, memory_mib: 150}]}]\n")
    ran = tenuto("plan", "w.yaml", "--cluster", "c.yaml")
    assert ran.code == 1  # a plan that serves nothing is no success
    assert ran.out.count("MiB even with its smallest measured batch") == 3


def test_every_model_that_is_not_served_in_full_is_named_with_its_figure(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    entries = "".join(f"  - {{name: m{i}, profile: bert, rate_rps: 60, slo_ms: 200}}\n" for i in range(6))
    (tmp_path / "w.yaml").write_text(f"models:\n{entries}")
    ran = tenuto("plan", "w.yaml", "--policy", "symphony", "--gpus", "v100:2")
    assert ran.code == 0
    below = [line for line in ran.out.splitlines() if line.startswith(("below: ", "unserved: "))]
    assert below
    assert all("%" in line for line in below if line.startswith("below: "))
    plan = json.loads(tenuto("plan", "w.yaml", "--policy", "symphony", "--gpus", "v100:2", "--json").out)
    short = {name for name, model in plan["expected"]["models"].items() if model["goodput_rps"] < 59.4}
    assert {line.split(": ")[1] for line in below} == short | set(plan["unserved"])
    assert "believed by the policy" in ran.out


def test_all_problems_of_all_inputs_come_at_once(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    entries = "  - {name: bert, rate_rps: 0, slo: 1}\n  - {name: x, rate_rps: 1, slo_ms: -2}\n"
    (tmp_path / "w.yaml").write_text("models:\n" + entries)
    ran = tenuto("plan", "w.yaml", "--gpus", "v100:x", "--policy", "no", "--option", "a", "--profiles", "b")
    assert ran.code == 2
    for path in (
        "models.0.rate_rps",
        "models.0.slo:",
        "models.1.slo_ms",
        "--gpus",
        "--policy",
        "--option",
        "--profiles",
    ):
        assert path in ran.err
    assert len(ran.err.strip().splitlines()) == 7


def test_a_plan_from_another_schema_version_is_refused(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tenuto("plan", "w.yaml", "--policy", "ffd", "--gpus", "v100:2", "-o", "plan.yaml")
    old = (tmp_path / "plan.yaml").read_text().replace("schema: 1", "schema: 9")
    (tmp_path / "plan.yaml").write_text(old)
    ran = tenuto("simulate", "plan.yaml", "--duration-s", "1", "--seed", "1")
    assert ran.code == 2
    assert "schema 9 is not supported" in ran.err


def test_an_unwritable_path_is_told(tenuto) -> None:  # type: ignore[no-untyped-def]
    ran = tenuto("plan", "w.yaml", "--policy", "ffd", "--gpus", "v100:2", "-o", "missing/plan.yaml")
    assert ran.code == 2
    assert "cannot be written" in ran.err


@pytest.mark.parametrize("verb", ["plan", "policies"])
def test_help_starts_with_a_sentence_and_ends_with_an_example(tenuto, verb: str) -> None:  # type: ignore[no-untyped-def]
    ran = tenuto(verb, "--help")
    assert ran.code == 0
    assert f"Example: tenuto {verb}" in ran.out


@pytest.mark.parametrize("gpus", ["v100:1", "v100:3"])
def test_what_ffd_promises_holds_in_virtual_time(tenuto, tmp_path: Path, gpus: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "w.yaml").write_text("""\
models:
  - {name: resnet50, rate_rps: 150, slo_ms: 150}
  - {name: bert, rate_rps: 15, slo_ms: 300}
  - {name: vgg19, rate_rps: 60, slo_ms: 250}
  - {name: alexnet, rate_rps: 200, slo_ms: 100}
""")
    tenuto("plan", "w.yaml", "--policy", "ffd", "--gpus", gpus, "-o", "plan.yaml")
    assert not Plan.load(tmp_path / "plan.yaml").unserved
    ran = tenuto("simulate", "plan.yaml", "--duration-s", "10", "--seed", "3", "--json")
    assert json.loads(ran.out)["attainment"] >= 0.99


def test_options_that_cannot_be_run_are_refused_before_anything_starts(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    models = (
        "models:\n"
        "- {name: a, source: resnet50, rate_rps: 1, slo_ms: 100, latency: {alpha_ms: 1, beta_ms: 1}, "
        "options: {dtype: half, compile: true, cuda_graphs: true, depth: 3}}\n"
    )
    (tmp_path / "o.yaml").write_text(models)
    gpulets = "gpulets: [{id: g/a, gpu: g, models: [{name: a, batch_size: 2}]}]\n"
    plan = f"policy: {{name: p}}\ngpus: [{{id: g, type: v100}}]\n{gpulets}"
    (tmp_path / "p.yaml").write_text(plan + models)
    for arguments in (("plan", "o.yaml", "--gpus", "v100:1"), ("serve", "p.yaml", "--emulate")):
        ran = tenuto(*arguments)
        assert ran.code == 2
        assert "models.0.options.dtype: 'half': input should be 'auto', 'fp32', 'fp16' or 'bf16'. Use one of" in ran.err
        assert "models.0.options.cuda_graphs: True: gives both 'compile' and 'cuda_graphs'. Keep one" in ran.err
        assert "depth" not in ran.err


def test_merged_groups_and_streaming_are_shown(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    latency = "latency: {alpha_ms: 1, beta_ms: 4}"
    (tmp_path / "m.yaml").write_text(
        "models:\n"
        f"- {{name: cats, source: resnet50, rate_rps: 50, slo_ms: 100, {latency}, options: {{copy_in_ms: 0.5}}}}\n"
        f"- {{name: dogs, source: resnet50, rate_rps: 50, slo_ms: 100, {latency}}}\n"
        f"- {{name: own, source: resnet50, rate_rps: 50, slo_ms: 100, {latency}, options: {{copy_in_ms: 0.5}}}}\n"
        "merge: [[cats, dogs]]\nstreaming: true\n"
    )
    arguments = ("plan", "m.yaml", "--gpus", "v100:1")
    ran = tenuto(*arguments, "--policy", "symphony", "--picture", "m.svg")
    assert ran.code == 0
    assert "hidden ms" in ran.out
    assert [line.split()[0] for line in ran.out.splitlines() if line.startswith(" " * 8)].count("own") == 1
    table = ran.out.partition("note:")[0]
    assert "cats+dogs" in table
    assert "\n                             dogs" not in table
    assert "streaming: each gpu-let takes the next batch while one executes" in ran.out
    assert ">cats+dogs<" in (tmp_path / "m.svg").read_text()
    compared = tenuto(*arguments, "--compare", "symphony,ffd").out
    assert "in cats+dogs" in compared
    assert "streaming: each gpu-let" in compared
    assert "streaming" not in tenuto("plan", "w.yaml", "--policy", "ffd", "--gpus", "v100:4").out


def test_a_plan_is_extended_by_newcomers_and_what_is_placed_stays(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    first = "models:\n- {name: resnet50, rate_rps: 200, slo_ms: 30}\n"
    (tmp_path / "first.yaml").write_text(first)
    (tmp_path / "both.yaml").write_text(first + "- {name: vgg19, rate_rps: 100, slo_ms: 60}\n")
    where = ("--gpus", "v100:2", "--profiles", "igniter-v100", "--policy", "igniter")
    assert tenuto("plan", "first.yaml", *where, "-o", "first.plan.yaml").code == 0
    before = Plan.load(tmp_path / "first.plan.yaml")
    ran = tenuto("plan", "both.yaml", *where, "--from", "first.plan.yaml", "--json")
    assert ran.code == 0
    after = Plan.from_data(json.loads(ran.out))
    (old,) = before.gpulets
    (kept,) = after.hosts_of("resnet50")
    assert (kept.gpu, kept.models[0].batch_size) == (old.gpu, old.models[0].batch_size)
    assert kept.effective_share_pct >= old.effective_share_pct
    assert after.hosts_of("vgg19")
    assert "near what runs: " in after.notes[-1]
    assert tenuto("plan", "both.yaml", *where, "--at-most", "1").code == 2
    ran = tenuto("plan", "both.yaml", *where, "--from", "first.plan.yaml", "--at-most", "0", "--json")
    assert Plan.from_data(json.loads(ran.out)).unserved == ("vgg19",)


@pytest.mark.parametrize("policy", ["ffd", "gpulet", "symphony"])
def test_two_gpu_types_under_the_same_names_of_networks(tenuto, tmp_path: Path, policy: str) -> None:  # type: ignore[no-untyped-def]
    """Rates that a cheap GPU of either type alone could not carry; what was estimated of the A100 is named."""
    (tmp_path / "m.yaml").write_text(
        "models:\n- {name: resnet50, rate_rps: 2500, slo_ms: 100}\n- {name: vgg19, rate_rps: 700, slo_ms: 150}\n"
        "- {name: densenet121, rate_rps: 400, slo_ms: 150}\n"
    )
    ran = tenuto("plan", "m.yaml", "--gpus", "v100:2,a100:2", "--policy", policy, "--json")
    assert ran.code == 0
    plan = Plan.from_data(json.loads(ran.out))
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    used = {types[gpulet.gpu] for gpulet in plan.gpulets}
    assert any(note.startswith("estimated, not measured (a100): memory_mib") for note in plan.notes) == ("a100" in used)
    ran = tenuto("plan", "m.yaml", "--gpus", "v100:1,a100:1", "--elastic", "--policy", policy, "--json")
    assert ran.code == 0
    bought = Plan.from_data(json.loads(ran.out))
    assert bought.expected.cost_per_hour is not None
    assert "a100" in {gpu.type for gpu in bought.gpus}  # of which one carries what two V100 do, for 1.2 times the price


@pytest.mark.parametrize(
    ("entry", "gpus"),
    [
        ("{name: bert, rate_rps: 300, slo_ms: 300}", "v100:1"),
        ("{name: resnet50, rate_rps: 3000, slo_ms: 200}", "v100:2"),
        ("{name: vgg19, rate_rps: 4000, slo_ms: 100}", "v100:1,a100:1"),
    ],
)
@pytest.mark.parametrize("policy", ["symphony", "ffd", "tenuto"])
def test_what_is_said_to_serve_all_does(tenuto, tmp_path: Path, entry: str, gpus: str, policy: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "w.yaml").write_text(f"models:\n  - {entry}\n")
    quick = ("--option", "requests=500", "--option", "starts=symphony,gpulet") if policy == "tenuto" else ()
    ran = tenuto("plan", "w.yaml", "--policy", policy, *quick, "--gpus", gpus, "--strict")
    assert ran.code == 1
    last = ran.out.splitlines()[-1]
    assert last.startswith("would serve all as asked: ")
    _, figures, how = last.split(": ")
    asked = how.split() if how != "--elastic" else ["--gpus", gpus, "--elastic"]
    again = tenuto("plan", "w.yaml", "--policy", policy, *quick, *asked, "--strict", "--json")
    assert again.code == 0
    expected = Plan.from_data(json.loads(again.out)).expected
    assert figures == f"{expected.gpus_used} GPUs, {expected.cost_per_hour:,.2f} $/h"


def test_where_more_gpus_do_not_help_the_last_line_says_why(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "w.yaml").write_text("models:\n  - {name: vgg19, rate_rps: 400, slo_ms: 20}\n")
    asked = ("plan", "w.yaml", "--profiles", "parvagpu-a100", "--policy", "parvagpu", "--gpus")
    last = tenuto(*asked, "a100-80gb:1:mig").out.splitlines()[
        -1
    ]  # this policy cuts GPUs, and nothing is added to its plan
    words = r"more GPUs do not help: with (\d+) parvagpu uses (\d+), and vgg19 gets ([\d.]+) of 400 rps"
    found = re.match(words, last)
    assert found, last
    ran = tenuto(*asked, f"a100-80gb:{found[1]}:mig", "--strict", "--json")
    expected = Plan.from_data(json.loads(ran.out)).expected
    assert (ran.code, expected.gpus_used) == (1, int(found[2]))
    assert expected.models["vgg19"].goodput_rps == pytest.approx(float(found[3]), abs=1.0)
    assert tenuto(*asked, f"a100-80gb:{int(found[1]) + 4}:mig", "--strict").code == 1


def test_a_policy_that_cannot_tell_what_is_enough_says_so(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    nodes = "nodes:\n  - {name: n0, gpus: [{type: v100, count: 1}]}\n"
    (tmp_path / "c.yaml").write_text(nodes)
    (tmp_path / "w.yaml").write_text("models:\n  - {name: resnet50, rate_rps: 3000, slo_ms: 60, only_on: [n0]}\n")
    last = tenuto("plan", "w.yaml", "--cluster", "c.yaml", "--policy", "ffd").out.splitlines()[-1]
    assert last.startswith("how many GPUs would serve all models is not known: an elastic cluster does not say")


def test_gpus_that_may_be_cut_and_need_not_be_count_whole(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    entry = "{name: m, rate_rps: 1500, slo_ms: 100, latency: {alpha_ms: 1, beta_ms: 4}}"
    (tmp_path / "w.yaml").write_text(f"models: [{entry}]")
    quick = ("--option", "starts=symphony", "--option", "requests=200")
    last = tenuto("plan", "w.yaml", "--gpus", "a100-80gb:1:mig", *quick).out.splitlines()[-1]
    assert last.startswith("would serve all as asked: 2 GPUs"), last
    assert last.endswith("--gpus a100-80gb:2:mig")


def test_where_no_number_of_gpus_would_do_it_is_said(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "w.yaml").write_text("models:\n  - {name: xlnet, rate_rps: 10, slo_ms: 5}\n")
    ran = tenuto("plan", "w.yaml", "--policy", "ffd", "--gpus", "v100:1")
    assert ran.out.splitlines()[-1] == "no number of these GPUs serves: xlnet"


@pytest.mark.parametrize(("environment", "code"), [("", 0), ("1", 1), ("0", 0)])
def test_ci_may_ask_for_strict_plans_once_for_all(  # type: ignore[no-untyped-def]
    tenuto, monkeypatch: pytest.MonkeyPatch, environment: str, code: int
) -> None:
    monkeypatch.setenv("TENUTO_STRICT", environment)
    assert tenuto("plan", "w.yaml", "--policy", "ffd", "--gpus", "v100:4", "--json").code == code


def test_what_is_measured_otherwise_than_here_is_noted(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "w.yaml").write_text(
        "models:\n  - {name: a, rate_rps: 5, slo_ms: 300}\n  - {name: b, rate_rps: 5, slo_ms: 300}\n"
    )
    here = metadata.version("torch").partition("+")[0]
    for name, versions in (("a", f"{{torch: '{here}+cu1'}}"), ("b", "{torch: '1.0'}")):
        (tmp_path / f"{name}.yaml").write_text(
            f"{{schema: 1, name: {name}, gpu_type: v100, source: s, measured: {{hardware: card {name}, date: d, "
            f"versions: {versions}}}, models: {{{name}: {{line: {{alpha_ms: 1, beta_ms: 5}}}}}}}}"
        )
    given = (
        "plan",
        "w.yaml",
        "--policy",
        "symphony",
        "--gpus",
        "v100:1",
        "--profiles",
        "a.yaml",
        "--profiles",
        "b.yaml",
    )
    notes = [line for line in tenuto(*given).out.splitlines() if line.startswith("note: ")]
    assert "note: profiles of v100 come from several devices: card a; card b" in notes
    (torch,) = [note for note in notes if "torch" in note]
    assert (torch.startswith("note: measured with torch 1.0, installed here is "), torch[-3:]) == (True, ": b")


def test_what_may_only_be_on_a_node_that_is_left_out_is_not_served_and_the_rest_is(tenuto) -> None:  # type: ignore[no-untyped-def]
    nodes = "".join(f"  - {{name: {name}, gpus: [{{type: v100, count: 1}}]}}\n" for name in ("left", "right"))
    Path("c.yaml").write_text(f"nodes:\n{nodes}")
    only = WORKLOAD.replace("slo_ms: 300", "slo_ms: 300, only_on: [right]")
    Path("w.yaml").write_text(only)
    ran = tenuto("plan", "w.yaml", "--policy", "gpulet", "--cluster", "c.yaml", "--without", "right", "--json")
    plan = json.loads(ran.out)
    assert (ran.code, plan["drained"]) == (0, ["right"])
    assert plan["unserved_reasons"]["bert"] == "no GPU that it may be on is left"
    assert {gpulet["gpu"] for gpulet in plan["gpulets"]} == {"left/0"}
    Path("w.yaml").write_text(only.replace("[right]", "[rihgt]"))
    ran = tenuto("plan", "w.yaml", "--policy", "gpulet", "--cluster", "c.yaml", "--without", "right")
    assert (ran.code, ran.err.count("models.1.")) == (2, 1)
    assert "models.1.only_on: 'rihgt': no such place in the cluster" in ran.err


S1 = """
models:
  - {name: bert, rate_rps: 19, slo_ms: 1000}
  - {name: densenet121, rate_rps: 353, slo_ms: 183}
  - {name: vgg19, rate_rps: 354, slo_ms: 396}
"""


def test_gpus_that_may_be_cut_are_planned_changed_and_compared(tenuto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "w.yaml").write_text(S1)
    quick = ("--option", "requests=500")
    made = tenuto("plan", "w.yaml", "--gpus", "a100-80gb:2:mig", *quick, "--fewest-gpus", "-o", "p.yaml", "--json")
    plan = Plan.from_data(json.loads(made.out))
    assert plan.expected.gpus_used == 1
    assert {gpu.device for gpu in plan.gpus} == {"n0/0", "n0/1"}
    near = tenuto("plan", "w.yaml", "--gpus", "a100-80gb:2:mig", *quick, "--from", "p.yaml", "--json")
    cut = {(gpu.id, gpu.type) for gpu in plan.gpus if gpu.instance is not None}
    assert cut <= {(gpu.id, gpu.type) for gpu in Plan.from_data(json.loads(near.out)).gpus}
    shown = tenuto("plan", "w.yaml", "--gpus", "a100-80gb:2:mig", *quick, "--compare", "tenuto,parvagpu")
    assert "of 2" in shown.out
