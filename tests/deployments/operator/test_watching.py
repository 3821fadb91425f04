"""Metrics, dashboard and alerts belong together: all names exist, expressions parse, alerts come when they should."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import tenuto.deployments.operator
from tenuto.deployments.operator.exposition import render_metrics
from tenuto.deployments.wire.status import SystemStatus
from tests.instruments.shown_status import ShownServer

WATCHING = Path(tenuto.deployments.operator.__file__).parent / "watching"
OTHERS = {"up": {"job", "instance"}}  # Prometheus' own

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")


@pytest.fixture(scope="module")
def text() -> str:
    server = ShownServer(models=5, gpulets=8)
    for _ in range(3):
        server.second()
    return render_metrics(server.status())


@pytest.fixture(scope="module")
def labels_of(text: str) -> dict[str, set[str]]:
    """The labels of every series that exists, by its name."""
    found = dict(OTHERS)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[tuple[str, str]]:
    alerts = yaml.safe_load((WATCHING / "alerts.yaml").read_text())
    found = [(rule["alert"], rule["expr"]) for group in alerts["groups"] for rule in group["rules"]]
    dashboard = json.loads((WATCHING / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", ())]
    variable = dashboard["templating"]["list"][1]["definition"]
    series, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable).groups()  # type: ignore[union-attr]
    return [*found, ("variable", f"sum by ({label}) ({series})")]


def selectors(node: Any) -> Iterator[Any]:
    """Every series that an expression names."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (below := getattr(node, name, None)) is not None:
            yield from selectors(below)
    for below in getattr(node, "args", None) or ():
        yield from selectors(below)


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_every_expression_parses_and_names_what_exists(
    title: str, expression: str, labels_of: dict[str, set[str]]
) -> None:
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    named = list(selectors(parsed))
    assert named, title
    known: set[str] = set()
    for selector in named:
        assert selector.name in labels_of, f"{title}: no metric {selector.name}"
        known |= labels_of[selector.name]
        used = {match.group(1) for match in re.finditer(r"(\w+)(?:=~|!=|!~|=)\"", str(selector.prettify()))}
        assert used <= labels_of[selector.name], f"{title}: {selector.name} has no label {used}"
    groups = re.findall(r"(?:by|on|ignoring) \(([\w, ]+)\)", expression)
    grouped = {label for group in groups for label in group.split(", ")}
    assert grouped <= known, title


def test_figures_of_the_status_come_out_in_base_units(text: str) -> None:
    samples = {
        (s.name, *sorted(s.labels.items())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    model = ("model", "network_03")
    assert samples["tenuto_slo_seconds", model] == 0.035
    assert samples["tenuto_requests_total", model, ("outcome", "late")] > 0
    count = samples["tenuto_request_duration_seconds_count", model]
    assert samples["tenuto_request_duration_seconds_bucket", ("le", "+Inf"), model] == count
    assert samples["tenuto_request_duration_seconds_bucket", ("le", "0.035"), model] < count
    assert samples["tenuto_margin_seconds", ("gateway", "n0:4001")] == pytest.approx(1.2e-3)
    assert samples["tenuto_controller_decisions_total", ("decision", "changed")] == 2
    assert samples["tenuto_gpulet_up", ("gpu", "n0/1"), ("gpulet", "n0/1/b")] == 0


def test_each_size_class_has_its_outcomes_and_its_padding(text: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    ended = families["tenuto_sized_requests"].samples
    assert {sample.labels["size"] for sample in ended} == {"tokens=16", "tokens=64", "tokens=256"}
    assert len(ended) == 3 * 5  # outcomes
    own, computed = (families[f"tenuto_{which}_elements"].samples for which in ("input", "computed"))
    assert [a.value / b.value for a, b in zip(own, computed, strict=True)] == [0.75] * 3


def test_names_of_any_kind_come_back_as_they_are() -> None:
    server, name = ShownServer(models=1, gpulets=1), 'a "quoted"\\ and\nbroken {name}'
    server.rename("network_00", name)
    server.second()
    families = list(text_string_to_metric_families(render_metrics(server.status())))
    assert {s.labels["model"] for f in families for s in f.samples if "model" in s.labels} == {name}
    kinds = {family.name: family.type for family in families}
    assert kinds["tenuto_requests"] == "counter"
    assert kinds["tenuto_batch_size"] == "histogram"


def test_what_is_not_known_is_left_out() -> None:
    assert "NaN" not in render_metrics(SystemStatus(models={}))
    assert render_metrics(SystemStatus(models={})) == ""


@needs_promtool
def test_prometheus_takes_the_rules_and_the_metrics(text: str) -> None:
    for arguments, given in ((["rules", str(WATCHING / "alerts.yaml")], None), (["metrics"], text)):
        result = subprocess.run(["promtool", "check", *arguments], input=given, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_alerts_come_when_they_should_and_not_before(tmp_path: Path) -> None:
    """Prometheus itself evaluates the rules, in its own virtual time."""
    bad, good = 'tenuto_requests_total{model="m",outcome="late"}', 'tenuto_requests_total{model="m",outcome="ok"}'
    case = {
        "rule_files": [str(WATCHING / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": good, "values": "0+100x30"},
                    {"series": bad, "values": "0+0x15 0+5x15"},
                    {"series": 'tenuto_gpulet_up{gpulet="a",gpu="0"}', "values": "1x20 0x10"},
                    {"series": 'tenuto_requests_received_total{model="m"}', "values": "0+6000x30"},
                    {"series": 'tenuto_planned_requests_per_second{model="m"}', "values": "90x30"},
                    {"series": 'tenuto_slo_seconds{model="m"}', "values": "0.1x30"},
                    {"series": 'tenuto_queue_length{model="m"}', "values": "3x20 80x10"},
                ],
                "alert_rule_test": [
                    {"eval_time": "14m", "alertname": "TenutoAttainmentLow", "exp_alerts": []},
                    {
                        "eval_time": "28m",
                        "alertname": "TenutoAttainmentLow",
                        "exp_alerts": [
                            {
                                "exp_labels": {"severity": "page", "model": "m"},
                                "exp_annotations": {"summary": "m: 95.24% of the requests in time"},
                            }
                        ],
                    },
                    {"eval_time": "20m", "alertname": "TenutoGpuletDown", "exp_alerts": []},
                    {
                        "eval_time": "24m",
                        "alertname": "TenutoGpuletDown",
                        "exp_alerts": [
                            {
                                "exp_labels": {"severity": "page", "gpulet": "a", "gpu": "0"},
                                "exp_annotations": {"summary": "Gpu-let a is not connected"},
                            }
                        ],
                    },
                    {"eval_time": "30m", "alertname": "TenutoArrivalsAbovePlan", "exp_alerts": []},
                    {"eval_time": "18m", "alertname": "TenutoQueueBeyondDeadlines", "exp_alerts": []},
                    {
                        "eval_time": "26m",
                        "alertname": "TenutoQueueBeyondDeadlines",
                        "exp_alerts": [
                            {
                                "exp_labels": {"severity": "ticket", "model": "m"},
                                "exp_annotations": {"summary": "m: more requests wait than arrive in two SLOs"},
                            }
                        ],
                    },
                ],
            }
        ],
    }
    file = tmp_path / "alerts_test.yaml"
    file.write_text(yaml.safe_dump(case))
    result = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
