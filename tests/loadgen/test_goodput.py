"""Goodput: the search on a load whose answer is known, and the verb on a real plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from tenuto.batching.virtual.highest_rate import HighestRate, SearchLimits, find_highest_rate
from tenuto.cli.goodput import command
from tenuto.errors import InvalidInputError
from tenuto.loadgen.endpoint_trials import EndpointTrial


def up_to(limit: float, *, invalid_above: float = math.inf) -> object:
    """Return an attempt that is in time up to a rate scale of `limit`."""

    def attempt(scale: float) -> EndpointTrial:
        attained = 1.0 if scale <= limit else 0.9
        invalid = "the generator was late" if scale > invalid_above else None
        rate = 100.0 * scale
        return EndpointTrial(scale, rate, rate * attained, attained, attained, "m", invalid)

    return attempt


def search(attempt: object, **limits: float) -> HighestRate[EndpointTrial]:
    given = {"tolerance": 0.02, "most_runs": 24, **limits}
    return find_highest_rate(attempt, SearchLimits(**given))  # type: ignore[arg-type]


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

    def attempt(scale: float) -> EndpointTrial:
        if scale > 4.0:
            raise KeyboardInterrupt
        return inner(scale)  # type: ignore[operator,no-any-return]

    found = search(attempt)

    assert (found.rate_scale, found.ended) == (4.0, "interrupted")


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


def test_the_verb_finds_the_rate(workload: Path) -> None:
    ran = CliRunner().invoke(command, [str(workload), "--gpus", "v100:1", "--duration-s", "10", "--json"])

    assert ran.exit_code == 0, ran.output
    # One GPU with batches of 17 or so serves b / (b + 5) requests per ms at most.
    assert 500 < json.loads(ran.stdout)["goodput_rps"] < 900
