"""Goodput: the search and the curves on a load whose answer is known, and the verb on a real plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from tenuto.batching.virtual.highest_rate import HighestRate, SearchLimits, find_highest_rate
from tenuto.cli.goodput import command
from tenuto.errors import InvalidInputError
from tenuto.loadgen.curves import Attempted, Factors, curves
from tenuto.loadgen.report.goodput_page import prepare_goodput_folder, render_goodput, write_goodput


def up_to(limit: float, *, invalid_above: float = math.inf) -> object:
    """Return an attempt that is in time up to a rate scale of `limit`."""

    def attempt(load: Factors) -> Attempted:
        attained = 1.0 if load.rate_scale <= limit else 0.9
        invalid = "the generator was late" if load.rate_scale > invalid_above else None
        rate = 100.0 * load.rate_scale
        return Attempted(load, rate, rate * attained, attained, attained, "m", invalid)

    return attempt


def search(attempt: object, **limits: float) -> HighestRate[Attempted]:
    given = {"tolerance": 0.02, "most_runs": 24, **limits}
    return find_highest_rate(lambda scale: attempt(Factors(scale)), SearchLimits(**given))  # type: ignore[operator,arg-type]


@pytest.mark.parametrize("limit", [0.013, 0.7, 1.0, 3.3, 90.0])
def test_the_bracket_holds_the_known_limit_and_is_narrow(limit: float) -> None:
    found = search(up_to(limit), most_runs=60)

    assert found.ended == "found"
    assert found.rate_scale <= limit < found.upper_scale <= found.rate_scale * 1.02
    assert found.best is not None
    assert found.best.goodput_rps == pytest.approx(100.0 * found.rate_scale)


def test_a_load_that_is_never_in_time_ends_without_an_answer() -> None:
    found = search(up_to(0.0), most_runs=60)

    assert found.best is None
    assert found.ended == "no rate is in time"


def test_the_number_of_runs_is_bounded() -> None:
    found = search(up_to(1e12), most_runs=5)

    assert len(found.tried) == 5
    assert found.ended == "stopped after 5 runs"
    assert math.isinf(found.upper_scale)


def test_a_run_that_proves_nothing_ends_the_search_and_is_no_answer() -> None:
    found = search(up_to(10.0, invalid_above=3.0))

    assert found.rate_scale == 2.0
    assert "proves nothing: the generator was late" in found.ended


def test_an_interruption_keeps_the_best_answer() -> None:
    inner = up_to(10.0)

    def attempt(load: Factors) -> Attempted:
        if load.rate_scale > 4.0:
            raise KeyboardInterrupt
        return inner(load)  # type: ignore[operator,no-any-return]

    found = search(attempt)

    assert (found.rate_scale, found.ended) == (4.0, "interrupted")


def test_curves_run_each_value_once_in_order() -> None:
    last = list(curves(up_to(1.5), {"rate_scale": (2.0, 1.0, 1.0)}))[-1]  # type: ignore[arg-type]

    assert [point.factors.rate_scale for point in last.points] == [1.0, 2.0]
    assert [point.worst_attainment for point in last.points] == [1.0, 0.9]


def test_curves_run_at_the_base_rate_and_rate_values_are_factors_on_it() -> None:
    drawn = list(curves(up_to(3.0), {"rate_scale": (0.5, 2.0), "cv": (2.0,)}, 3.0))  # type: ignore[arg-type]

    assert [point.factors.rate_scale for point in drawn[1].points] == [1.5, 6.0]
    assert drawn[2].points[0].factors == Factors(rate_scale=3.0, cv=2.0)


@pytest.mark.parametrize("axes", [{"slo": (1.0,)}, {"cv": (0.0,)}, {"cv": (float("nan"),)}])
def test_unknown_axes_and_impossible_values_are_refused(axes: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(InvalidInputError, match="--curve"):
        list(curves(up_to(1.0), axes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "limits", [{"tolerance": 0.0}, {"most_runs": 0}, {"growth": 1.0}, {"start_scale": float("inf")}]
)
def test_limits_out_of_range_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError):
        search(up_to(1.0), **limits)


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.yaml"
    path.write_text(
        "models:\n  - {name: m, rate_rps: 100, slo_ms: 50, latency: {alpha_ms: 1, beta_ms: 5}}\n", encoding="utf-8"
    )
    return path


def test_the_verb_finds_the_rate_draws_curves_and_writes_a_page(workload: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = [str(workload), "--gpus", "v100:1", "--duration-s", "10", "--curve", "slo_scale=0.1,1", "--json"]
    ran = CliRunner().invoke(command, [*arguments, "-o", str(folder)])

    assert ran.exit_code == 0, ran.output
    answer = json.loads(ran.stdout)
    # One GPU with batches of 17 or so serves b / (b + 5) requests per ms at most.
    assert 500 < answer["goodput_rps"] < 900
    tight, given = answer["curves"][0]["points"]
    assert "m" in tight["invalid"]  # 5 ms: no batch can meet it
    assert given["worst_attainment"] >= 0.99
    page = (folder / "goodput.html").read_text(encoding="utf-8")
    assert "1 runs proved nothing" in page
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))["rate_scale"] == answer["rate_scale"]
    with pytest.raises(InvalidInputError, match="--force"):
        prepare_goodput_folder(folder, force=False)


def test_the_page_says_when_no_rate_is_in_time(tmp_path: Path) -> None:
    document = {
        "source": "plan.yaml",
        "how": "in virtual time",
        "date": "today",
        "goodput_rps": 0.0,
        "rate_scale": 0.0,
        "upper_scale": 0.01,
        "required_attainment": 0.99,
        "ended": "no rate is in time",
        "trials": [],
        "curves": [],
        "command": ["tenuto"],
        "settings": {},
        "hardware": {},
        "versions": {},
    }

    assert "No rate that was tried is in time" in render_goodput(document)
    assert write_goodput(tmp_path, document).exists()
