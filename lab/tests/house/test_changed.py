"""A number of a module is changed before the module is imported, wherever the number stands."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tenuto_lab.house.changed import changed_source
from tenuto_lab.house.constants import NumericConstant, find_constants
from tenuto_lab.house.sources import Source, checkout, read_sources


@functools.cache
def fitted() -> dict[Source, list[NumericConstant]]:
    """The fitted numbers of the modules that have any."""
    machine = [source for source in read_sources(checkout()) if source.is_machine]
    found = {source: [each for each in find_constants([source]) if each.origin == "fitted"] for source in machine}
    return {source: constants for source, constants in found.items() if constants}


def test_every_fitted_number_can_be_changed() -> None:
    assert fitted()
    for source, constants in fitted().items():
        lines = ast.unparse(ast.parse(source.text)).splitlines()
        for constant in constants:
            for factor in (0.5, 2.0):
                changed = ast.unparse(changed_source(source.text, constant, factor)).splitlines()
                assert sum(new != old for new, old in zip(changed, lines, strict=True)) == 1, constant.place


def test_the_journal_names_every_fitted_number() -> None:
    text = (checkout() / "lab" / "journal" / "constants.md").read_text(encoding="utf-8")
    names = [each.name for constants in fitted().values() for each in constants]
    assert [name for name in names if f": {name}`" not in text] == []


@pytest.mark.parametrize(
    ("value", "halved", "doubled"),
    [
        ("8", "4", "16"),
        ("1", "0", "2"),
        ("0.4", "0.2", "0.8"),
        ("1.5", "1.25", "2.0"),
        ("0.9375", "0.96875", "0.875"),
        ("(1, 4)", "(0, 2)", "(2, 8)"),
    ],
)
def test_ratios_and_parts_stay_ratios_and_parts(value: str, halved: str, doubled: str) -> None:
    source = Source(Path("a/x.py"), f"X = {value}  # fitted\n")
    [constant] = find_constants([source])
    for factor, expected in ((0.5, halved), (2.0, doubled)):
        assert ast.unparse(changed_source(source.text, constant, factor)) == f"X = {expected}"


def test_a_number_that_is_not_there_is_an_error() -> None:
    [constant] = find_constants([Source(Path("a/x.py"), "X = 3  # fitted\n")])
    with pytest.raises(LookupError, match="X is not at"):
        changed_source("Y = 4\n", constant, 2.0)


def test_what_follows_from_a_number_follows_its_change() -> None:
    """Another process imports a module that takes the number from the one where it stands."""
    program = """
import sys
from pathlib import Path
from tenuto_lab.house.changed import import_changed
from tenuto_lab.house.constants import find_constants
from tenuto_lab.house.sources import checkout, read_sources
sources = [source for source in read_sources(checkout()) if source.path == Path("tenuto/outcome.py")]
[constant] = [each for each in find_constants(sources) if each.name == "ATTAINED"]
import_changed(checkout(), constant, 2.0)
from tenuto.batching.virtual.criterion import Goal
print(Goal("each").attainment)
"""
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert float(ran.stdout) == pytest.approx(0.98)
