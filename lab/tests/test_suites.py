"""The suites of other people say how they are called, and their table is read as it was written; none is run here."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "suites"
SHARED = ("environments", "served", "suite_models", "verdicts")


@pytest.fixture(autouse=True)
def seen_as_scripts_see_one_another(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in set(sys.modules) - known:
        if (FOLDER / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.parametrize("suite", sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED))
def test_a_suite_says_how_it_is_called(
    suite: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [suite, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(suite).main()
    assert ended.value.code == 0
    assert suite in capsys.readouterr().out


def test_every_suite_is_among_all_suites() -> None:
    named = importlib.import_module("all_suites").SUITES
    assert sorted(named) == sorted(
        path.stem for path in FOLDER.glob("*.py") if path.stem not in (*SHARED, "all_suites")
    )


def test_a_table_is_read_as_it_was_written() -> None:
    verdicts = importlib.import_module("verdicts")
    cases = [
        verdicts.Case("fast", "passed", "3 ms | 4"),
        verdicts.Case("plain", "passed"),
        verdicts.Case("wrong", "failed", "why"),
        verdicts.Case("absent", "skipped", "why"),
    ]
    row = verdicts.Row.of("suite", "1.0", cases)
    assert (row.passed, row.failed, row.skipped, row.figures) == (2, 1, 1, "fast: 3 ms | 4")
    assert row.status == verdicts.FAILED
    assert verdicts.Row.of("suite", "1.0", cases[:2]).status == verdicts.PASSED
    assert verdicts.Row.of("suite", "1.0", []).status == verdicts.FAILED  # nothing ran
    read = verdicts.rows_of(f"failed  wrong: why\n\n{verdicts.table([row, row])}\n")
    assert [each.figures for each in read] == ["fast: 3 ms / 4"] * 2
    assert [(each.suite, each.version, each.passed, each.failed, each.skipped) for each in read] == [
        ("suite", "1.0", 2, 1, 1)
    ] * 2


def test_the_plan_that_is_served_is_one() -> None:
    from tenuto.placement import Plan

    served = importlib.import_module("served")
    plan = Plan.from_data(served.plan(Path("tokenizer"), ["gpt-6-astra"]))
    assert {"simple", "tiny", "chat", "gpt-6-astra"} <= {model.name for model in plan.models}
