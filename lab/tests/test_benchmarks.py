"""Every benchmark is imported and says how it is called: the type checker does not look at them."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def found_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts find one another as when they are run; what they import is forgotten afterwards."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in set(sys.modules) - known:
        if (FOLDER / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what others import
@pytest.mark.parametrize("script", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_a_benchmark_says_how_it_is_called(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        module = importlib.import_module(script)
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] in ("tenuto", "tenuto_lab", "tests"):
            raise
        pytest.skip(f"needs {missing.name}")
    if "ArgumentParser(" not in (FOLDER / f"{script}.py").read_text("utf-8") or not hasattr(module, "main"):
        return
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert script in capsys.readouterr().out


def test_the_highest_rate_is_found_behind_a_gap_and_is_none_where_nothing_is_accepted() -> None:
    highest = importlib.import_module("bench_highest_rates").highest
    assert highest(lambda factor: factor <= 3.0) == pytest.approx(3.0, rel=0.003)
    assert highest(lambda factor: factor <= 3.0 or 3.1 < factor <= 3.2) == pytest.approx(3.2, rel=0.003)
    assert highest(lambda factor: factor <= 0.01) == pytest.approx(0.01, rel=0.003)
    assert highest(lambda _factor: False) == 0.0
