"""The marks of CONTRIBUTING have figures behind them, and every room of the machine has a mark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tenuto_lab.house.rooms import RoomFigures, figures_of, rooms_named, with_figures
from tenuto_lab.house.sources import Source, checkout, read_sources

EVERY = list(read_sources(checkout()))
SOURCES = [
    Source(Path("a/b/x.py"), "from tenuto.a.b.y import f\nimport tenuto.a.z\n\nX = 1\n"),
    Source(Path("a/b/y.py"), '"""Say."""\n\nfrom tenuto.a.b import x\n\nY = 1\nZ = 2\n'),
    Source(Path("a/z.py"), "A = 1\n"),
]


def test_arrows_are_imports_within_the_rooms() -> None:
    assert figures_of(SOURCES[:2]) == RoomFigures(lines=3, files=2, arrows=2)
    assert figures_of(SOURCES) == RoomFigures(lines=4, files=3, arrows=3)


def test_rooms_are_named_as_in_the_table() -> None:
    assert rooms_named("`a/` root", SOURCES) == SOURCES[2:]
    assert rooms_named("`a/` root, `b`", SOURCES) == [SOURCES[2], *SOURCES[:2]]
    assert rooms_named("`a/b`", SOURCES) == SOURCES[:2]
    with pytest.raises(LookupError, match="gives 'a/c' a mark"):
        rooms_named("`a/b`, `c`", SOURCES)


@pytest.mark.parametrize(
    ("text", "is_near"),
    [
        ("1,000 / 10 / 40", True),
        ("1,090 / 12 / 37", True),
        ("1,200 / 10 / 40", False),
        ("1,000 / 14 / 40", False),
        ("", False),
    ],
)
def test_figures_are_near_within_a_tenth_or_three(text: str, is_near: bool) -> None:
    assert RoomFigures(1000, 10, 40).is_near(text) == is_near


def test_the_marks_have_present_figures() -> None:
    text = (checkout() / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, stale = with_figures(text, EVERY)
    assert stale == {}, "run `tenuto lab rooms --write`"


def test_every_module_of_the_machine_has_one_mark() -> None:
    text = (checkout() / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Marks\n")[2]
    cells = re.findall(r"^\| ([^|]+) \| [\d.]+ \|", text, re.M)
    marked = sorted(str(source.path) for cell in cells for source in rooms_named(cell, EVERY) if source.is_machine)
    assert marked == sorted(str(source.path) for source in EVERY if source.is_machine)
