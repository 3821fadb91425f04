"""Costs fitted to a log predict requests that the log does not have, and a log that tells too little says so."""

import random
from pathlib import Path

import numpy as np
import pytest

from tenuto.batching.core.step_scheduler import UNLIMITED, StepLimits
from tenuto.batching.virtual.virtual_steps import VirtualSteps, run_log
from tenuto.errors import InvalidInputError
from tenuto.profiles import StepCost
from tenuto_lab.generation.request_fit import ServedLog, fit_requests
from tenuto_lab.generation.request_log import COLUMNS, read_requests
from tests.instruments.mutated_files import Reader, is_accepted, mutated

COST = StepCost.line(9.0, 0.06, 0.05, 6e-5, 1e-6)


def served(
    count: int, gap_ms: float, kv_tokens: int = UNLIMITED, *, cost: StepCost = COST, places: int = 256
) -> ServedLog:
    generator = np.random.default_rng(3)
    at = np.cumsum(generator.exponential(gap_ms, count))
    prompts, outputs = generator.integers(20, 900, count), generator.integers(2, 160, count)
    replica = VirtualSteps(StepLimits(places, 2048, kv_tokens), cost, decided_ahead=True)
    first, last = run_log(at.tolist(), prompts.tolist(), outputs.tolist(), replica)
    return ServedLog(at, prompts, outputs, first, last)


@pytest.mark.parametrize("kv_tokens", [pytest.param(UNLIMITED, marks=pytest.mark.night), 8000])
def test_the_first_part_of_a_log_predicts_the_second(kv_tokens: int) -> None:
    log = served(120, 60.0, kv_tokens)
    fitted = fit_requests(ServedLog(*(column[:60] for column in log.columns)), rounds=20)
    generation = fitted.generation
    limits = StepLimits(fitted.max_sequences, 2048, generation.kv_tokens or UNLIMITED)
    replica = VirtualSteps(limits, generation.cost(), decided_ahead=generation.decided_ahead)
    found = run_log(log.queued_ms.tolist(), log.prompt_tokens.tolist(), log.output_tokens.tolist(), replica)
    for mine, real in zip(log.figures(*found), log.figures(log.first_ms, log.last_ms), strict=True):
        assert mine[60:].mean() == pytest.approx(real[60:].mean(), rel=0.05)
    assert (generation.kv_tokens is None) == (kv_tokens == UNLIMITED)


@pytest.mark.parametrize(("places", "prompt_token_ms"), [(24, 0.02), (48, 0.6)])  # with 0.6 prompts wait for prompts
def test_a_limit_of_sequences_is_found(places: int, prompt_token_ms: float) -> None:
    cost = StepCost.line(20.0, prompt_token_ms, 0.1, 6e-5, 1e-6)
    fitted = fit_requests(served(120, 30.0, cost=cost, places=places), rounds=1)  # what steps cost is not judged here
    assert fitted.max_sequences == places
    assert fitted.generation.kv_tokens is None


def test_a_log_that_begins_amid_waiting_says_so() -> None:
    log = served(120, 30.0, 8000)
    rest = ServedLog(*(column[60:] for column in log.columns))
    assert "the first request waited" in " ".join(fit_requests(rest, rounds=1).warnings)


def test_a_log_that_tells_too_little_says_so() -> None:
    said = " ".join(fit_requests(served(4, 1e5), rounds=1).warnings)
    for part in ("4 requests", "no two requests ran at once", "never ran out"):
        assert part in said


GOOD = ["0,10,5,0.1,0.5", "0.2,20,9,0.4,0.9"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["1,2"], "line 1.*has no column queued_s"),
        ([",".join(COLUMNS)], "has 0 requests"),
        ([",".join(COLUMNS), GOOD[0], "0.2,x,9,0.4,0.9"], "line 3.*input_tokens is not a whole number"),
        ([",".join(COLUMNS), GOOD[0], "0.2,5,0,0.4,0.9"], "line 3.*output_tokens is not a whole number"),
        ([",".join(COLUMNS), GOOD[0], "0.2,5,2,0.1,0.9"], "line 3.*follow each other"),
        ([",".join(COLUMNS), GOOD[0], "0.2,5,2,0.4,"], "line 3.*last_token_s is not a number"),
        (None, "no such file"),
    ],
)
def test_a_log_that_cannot_be_is_refused_with_its_line(lines: list[str] | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    if lines is not None:
        file.write_text("\n".join(lines))
    with pytest.raises(InvalidInputError, match=said):
        read_requests(file)


def test_columns_may_come_in_any_order_and_lines_too(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    swapped = [",".join(reversed(line.split(","))) + ",more" for line in (",".join(COLUMNS), *reversed(GOOD))]
    file.write_text("\n".join(swapped))
    log = read_requests(file)
    assert log.queued_ms.tolist() == [0.0, 200.0]
    assert log.prompt_tokens.tolist() == [10, 20]
    assert log.last_ms.tolist() == [500.0, 900.0]


def test_requests_of_one_moment_stay_in_the_order_of_the_log(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("\n".join([",".join(COLUMNS), "0,30,5,0.1,0.5", "0,20,9,0.4,0.9", "0,25,9,0.4,0.9"]))
    assert read_requests(file).prompt_tokens.tolist() == [30, 20, 25]


def test_mutated_logs_are_accepted_or_refused(tmp_path: Path) -> None:
    reader = Reader(read_requests, "\n".join([",".join(COLUMNS), *GOOD]).encode(), ".csv")
    assert is_accepted(reader, reader.valid, tmp_path)
    for seed in range(20):
        is_accepted(reader, mutated(reader.valid, random.Random(seed)), tmp_path)
