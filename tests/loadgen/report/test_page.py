"""The page and the files: self-contained, complete, small, and made from live and simulated runs alike."""

from __future__ import annotations

import copy
import functools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.files import parse_yaml
from tenuto.loadgen.records import Records
from tenuto.loadgen.report.charts import Figure, Plot, ticks
from tenuto.loadgen.report.palette import Style, styles_for
from tenuto.loadgen.report.run_page import render_page, write_report
from tenuto.loadgen.report.series import batch_counts, cdf, predictions, waiting_and_under_way
from tenuto.loadgen.run import Run, load_run
from tenuto.loadgen.run_files import prepare_report, write_run_files
from tenuto.loadgen.simulated import Simulation
from tenuto.outcome import Outcome
from tenuto.pages import templates
from tenuto.placement import Arrival, Gpulet, ModelSpec, Plan, PlannedGpu, PolicyUsed, Replica
from tenuto.profiles import LinearLatency

LINES = {"a": LinearLatency(alpha_ms=1.0, beta_ms=5.0), "b<i>": LinearLatency(alpha_ms=2.0, beta_ms=10.0)}


def plan(models: tuple[str, ...] = ("a", "b"), rate: float = 60.0) -> Plan:
    lines = {"a": LINES["a"], "b": LINES["b<i>"]}
    specs = tuple(ModelSpec(name=n, rate_rps=rate, slo_ms=80.0, latency=lines[n], arrival=Arrival()) for n in models)
    replicas = tuple(Replica(name=n, batch_size=8, latency=lines[n]) for n in models)
    return Plan(
        policy=PolicyUsed(name="by <hand>"),
        gpus=(PlannedGpu(id="n0/0", type="v100"), PlannedGpu(id="n0/1", type="v100")),
        gpulets=(Gpulet(id="n0/0/a", gpu="n0/0", share_pct=40.0, models=replicas),),
        models=specs,
        notes=("a <note>",),
    )


def simulated(
    rate: float = 60.0, duration_s: float = 20.0, chosen: Plan | None = None
) -> tuple[dict[str, Any], Records, Plan]:
    chosen = chosen or plan(rate=rate)
    document, records = _described(chosen.dump(), duration_s)
    return copy.deepcopy(document), records, chosen


@functools.cache  # most tests look at the same run
def _described(chosen: str, duration_s: float) -> tuple[dict[str, Any], Records]:
    read = Plan.from_data(parse_yaml(chosen))
    run = Simulation.of_plan(read, duration_s=duration_s).run()
    return run.describe(read, options={"seed": 0}, command=["tenuto", "<x>"])


class Checker(HTMLParser):
    """Collects what a page refers to and checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.outside: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href")]
        if tag not in ("meta", "link", "br", "img"):
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.stack == []
    return checker


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    page = render_page(Run(*simulated()))
    checker = check(page)
    assert checker.outside == []
    assert "script" not in checker.tags
    assert "url(" not in page
    assert "http://" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    for heading in (
        "Goodput",
        "What became of the requests",
        "Latency",
        "Where the time goes",
        "Load over time",
        "Queue over time",
        "Batch sizes over time",
        "Batches of a",
        "Placement by",
        "Execution on n0/0/a",
        "Predicted and measured",
        "Utilisation of the gpu-lets",
        "How it was made",
    ):
        assert heading in page
    assert "prefers-color-scheme:dark" in page
    assert "@media print" in page
    assert "NaN" not in page
    assert not re.findall(r"""="[^"]*nan""", page)


def test_names_from_files_are_escaped() -> None:
    document, records, chosen = simulated()
    page = render_page(Run({**document, "errors": ["<script>alert(1)</script>"]}, records, chosen))
    assert "<script>" not in page
    assert "by &lt;hand&gt;" in page
    assert "a &lt;note&gt;" in page


def test_a_simulation_says_that_it_is_one() -> None:
    document, records, chosen = simulated()
    page = render_page(Run(document, records, chosen))
    assert "simulated in virtual time" in page
    assert "generator was late" not in page


def test_an_overloaded_run_fails_with_reasons() -> None:
    document, records, chosen = simulated(rate=900.0, duration_s=5.0)
    assert document["verdict"]["result"] == "FAIL"
    page = render_page(Run(document, records, chosen))
    check(page)
    assert "% in time, 99 % wanted" in page


def test_written_and_read_again_gives_the_same_page(tmp_path: Path) -> None:
    document, records, chosen = simulated()
    write_run_files(tmp_path, document, records, None)
    direct = render_page(Run(document, records, chosen))
    write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == direct
    loaded = load_run(tmp_path).records
    for name in Records.columns():
        kept, read = getattr(records, name), getattr(loaded, name)
        same = kept == read if name == "gpulet" else np.isclose(kept, read, equal_nan=True)
        assert np.all(same), name


def test_the_timeline_counts_every_request(tmp_path: Path) -> None:
    document, records, _ = simulated()
    write_run_files(tmp_path, document, records, None)
    lines = (tmp_path / "timeline.csv").read_text().splitlines()
    assert lines[0] == "second,offered,ok,late,expired,rejected,failed"
    rows = np.array([[int(cell) for cell in line.split(",")] for line in lines[1:]])
    assert len(rows) == 20
    assert rows[:, 1].sum() == len(records)
    assert rows[:, 2:].sum() == len(records)


def test_a_run_in_which_nothing_was_answered() -> None:
    document, records, chosen = simulated()
    total = len(records)
    nothing = Records(
        records.request,
        records.model,
        records.scheduled_ms,
        records.sent_ms,
        np.full(total, np.nan),
        np.zeros(total, np.int32),
        np.full(total, Outcome.FAILED, np.int8),
        np.full(total, np.nan),
        np.full(total, np.nan),
        np.full(total, np.nan),
        np.zeros(total, np.int32),
        np.full(total, "", dtype=object),
    )
    page = render_page(Run({**document, "gpulets": {}}, nothing, chosen))
    check(page)
    assert "No request was answered." in page


def test_a_run_without_a_plan() -> None:
    document, records, _ = simulated()
    page = render_page(Run({**document, "plan": None}, records, None))
    check(page)
    assert "Placement by" not in page


def test_an_empty_run() -> None:
    document, records, chosen = simulated()
    none = records.where(np.zeros(len(records), dtype=bool))
    models = {
        n: {**m, "offered": 0, "attainment": None, "p50_ms": None, "p90_ms": None, "p99_ms": None, "mean_batch": None}
        for n, m in document["models"].items()
    }
    check(render_page(Run({**document, "models": models, "attainment": None}, none, chosen)))


def test_predictions_match_what_the_simulator_executed() -> None:
    found = predictions(Run(*simulated()))
    assert [(p.gpulet, p.model) for p in found] == [("n0/0/a", "a"), ("n0/0/a", "b")]
    for entry in found:
        assert entry.error == pytest.approx(0.0, abs=1e-9)
        assert np.allclose(entry.measured_ms, entry.predicted_ms)


def test_models_that_ran_merged_are_predicted_as_joint_batches() -> None:
    data = plan().to_data()
    data["gpulets"][0]["merge"] = [["a", "b"]]
    data["models"] = [{**model, "source": "resnet50"} for model in data["models"]]
    document, records, chosen = simulated(chosen=Plan.from_data(data))
    assert list(document["models"]) == ["a", "b"]
    found = predictions(Run(document, records, chosen))
    assert [entry.model for entry in found] == ["a", "b"]
    for entry in found:
        assert entry.error == pytest.approx(0.0, abs=1e-9)
    render_page(Run(document, records, chosen))


def test_a_batch_counts_once() -> None:
    _, records, _ = simulated()
    sizes, counts = batch_counts(records)
    assert np.allclose(counts, np.round(counts))
    assert (sizes * counts).sum() == pytest.approx((records.batch_size > 0).sum())


def test_the_cdf_is_over_offered_requests() -> None:
    values, shares = cdf(np.array([3.0, np.nan, 1.0, 2.0]), offered=8)
    assert values.tolist() == [1.0, 2.0, 3.0]
    assert shares.tolist() == [0.125, 0.25, 0.375]
    thinned, _ = cdf(np.arange(100_000.0), 100_000)
    assert len(thinned) == 300
    assert thinned[-1] == 99_999.0


def test_the_queue_empties_at_the_end() -> None:
    run = Run(*simulated())
    _, waiting, under_way = waiting_and_under_way(run)
    assert np.all(waiting <= under_way)
    assert np.all(waiting >= 0)


def test_the_page_does_not_grow_with_the_run() -> None:
    document, records, chosen = simulated()
    many = Records(**{name: np.tile(getattr(records, name), 20) for name in Records.columns()})
    small, large = len(render_page(Run(document, records, chosen))), len(render_page(Run(document, many, chosen)))
    assert large < 1.2 * small < 5_000_000


def test_styles_are_stable_and_distinct() -> None:
    names = [f"m{i}" for i in range(20)]
    styles = styles_for(names)
    assert len({(s.colour, s.dash) for s in styles.values()}) == 20
    assert styles_for(names[:3]) == {name: styles[name] for name in names[:3]}


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.003), (0, 123456), (5, 7), (0, 1e-9), (-3, 3)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 3 <= len(found) <= 9
    assert all(low - 1e-12 <= t <= high + (high - low) * 1e-6 for t in found)


def test_degenerate_axes() -> None:
    assert ticks(1, 1) == [1]
    plot = Plot((0, 0), (0, 0), x_label="x", y_label="y")
    plot.line(np.array([0.0, np.nan, 1.0]), np.array([np.nan, np.nan, 1.0]), Style("red"), "s")
    drawn = templates("tenuto.loadgen.report").get_template("charts.html").module
    assert "nan" not in str(drawn.figure(Figure("h", plot, "t")))  # type: ignore[attr-defined]


def test_a_folder_with_a_report_is_refused_unless_forced(tmp_path: Path) -> None:
    document, records, _ = simulated()
    write_run_files(tmp_path, document, records, None)
    with pytest.raises(InvalidInputError, match="already holds a report"):
        prepare_report(tmp_path, force=False)
    assert prepare_report(tmp_path, force=True) == tmp_path


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(InvalidInputError, match="is a file"):
        prepare_report(tmp_path / "x", force=False)
    with pytest.raises(InvalidInputError, match="cannot be created"):
        prepare_report(tmp_path / "x" / "y", force=False)


def test_a_disk_that_fills_names_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document, records, _ = simulated()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(EnvironmentFaultError, match=r"No space left on device.*result\.json, timeline\.csv"):
        write_run_files(tmp_path, document, records, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "timeline.csv"]
    assert json.loads((tmp_path / "result.json").read_text())["verdict"]


@pytest.mark.parametrize("text", [None, "no json", "{}"])
def test_folders_that_hold_no_run(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "result.json").write_text(text)
    with pytest.raises(InvalidInputError):
        load_run(tmp_path)


def test_a_broken_parquet(tmp_path: Path) -> None:
    document, records, _ = simulated()
    write_run_files(tmp_path, document, records, None)
    (tmp_path / "requests.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InvalidInputError, match=r"requests\.parquet"):
        load_run(tmp_path)
