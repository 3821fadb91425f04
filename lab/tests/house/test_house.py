"""What is counted of the sources: lines of code proper, and where constants say they come from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from tenuto.placement import Cluster
from tenuto_lab.house.constants import NumericConstant, find_constants
from tenuto_lab.house.lines import proper_lines
from tenuto_lab.house.sources import Source, checkout, read_sources
from tenuto_lab.house.walk import summary, walked
from tenuto_lab.verbs.lab import command

MOST_FITTED = 60


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ('"""Only a docstring,\nof two lines."""\n\n# and a comment\n', 0),
        ("import a\nfrom b import (\n    c,\n    d,\n)\n\nX = 1\n", 1),
        ('def f():\n    """Say."""\n    # why\n    return "a string"\n', 2),
        ("call(\n    1,\n\n    2,\n)\n", 4),
        ('X = """a text\n\nof three lines"""\n', 3),
        ('class C:\n    """Say."""\n\n    x: int = 1  # with a comment\n', 2),
    ],
)
def test_lines_of_code_proper(text: str, lines: int) -> None:
    assert proper_lines(text) == lines


def found(text: str) -> dict[str, NumericConstant]:
    return {constant.name: constant for constant in find_constants([Source(Path("batching/core/x.py"), text)])}


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("X = 3  # derived: twice the wave of a batch", "derived"),
        ("# Fitted on the scenarios of seed 3:\n# halved, 0.6 points are lost.\nX = 3", "fitted"),
        ('X = 3\n"""Section 4.2 of the paper."""', "paper"),
        ("X = 3  # gpulet, §4", "paper"),
        ("X = 3  # appendix D has it", "paper"),
        ("X = 3  # format: the protocol's", "format"),
        ("X = 3  # limit: bytes of a head", "limit"),
        ("X = 3  # pace: between two looks", "pace"),
        ("X = (1, 3)  # limit: the values that are tried", "unsourced"),
        ("X = 3  # how long is waited", "unsourced"),
        ("# fitted\n\nX = 3", "unsourced"),
        ("Y = 1  # fitted\nX = 3", "unsourced"),
    ],
)
def test_origins_are_read_from_what_is_said(text: str, origin: str) -> None:
    assert found(text)["X"].origin == origin


def test_constants_are_capital_names_of_numbers() -> None:
    text = "A = 1\n_B: float = -2.5 * A\nC = (1, 2)\nD = {'x': 1.0}\nE = 'text'\nF = True\nG = f(1)\nh = 3\nI = []\n"
    assert {name: constant.value for name, constant in found(text).items()} == {
        "A": "1",
        "_B": "-2.5 * A",
        "C": "(1, 2)",
        "D": "{'x': 1.0}",
    }
    assert found(text)["_B"].place == "batching/core/x.py:2"
    assert found(text)["_B"].room == "batching/core"


def test_of_several_names_at_once_each_is_a_constant() -> None:
    several = found("# limit: bytes\nA, B, c = 1, 2, 3\nD, E = f()\n")
    assert {name: constant.origin for name, constant in several.items()} == {"A": "limit", "B": "limit"}


def test_fields_defaults_and_options_are_read() -> None:
    """A field of a schema and an option are defaults by themselves; what is plain needs no source."""
    text = (
        "class A(StrictModel):\n    x: float = 5.0\n    y: int = 1\n"
        "class B:\n    C = 7\n    z: int = option(9, minimum=3)\n    w: float = 4.0  # fitted\n"
        "@click.option('--last', default=20)\ndef f(a: int = 3, *, b: float = 0.2, c: int = 0): ...\n"
    )
    assert {name: constant.origin for name, constant in found(text).items()} == {
        "A.x": "default",
        "B.C": "unsourced",
        "B.z": "default",
        "B.w": "fitted",
        "f('--last')": "default",
        "f(a)": "unsourced",
        "f(b)": "unsourced",
    }


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        ("0.4 if x else 1.0", ["0.4"]),
        ("min(x, 40)", ["40"]),
        ("3 * x + 7", ["3"]),
        ("x or 512", ["512"]),
        ("1000.0 * x / 60.0 - 0.5", []),
        ("x[3] + y[:4]", []),
        ("round(x, 3), time.sleep(0.2), np.percentile(x, 99)", []),
        ("len(x) > 3 and status >= 500", []),
        ("x << 20 | 7", []),
    ],
)
def test_literals_count_where_they_could_be_others(expression: str, values: list[str]) -> None:
    source = Source(Path("batching/core/x.py"), f"def f(x, y, status):\n    return {expression}\n")
    assert [constant.value for constant in find_constants([source])] == values


def test_a_literal_may_lean_on_the_paper_that_its_function_cites() -> None:
    text = (
        'def f(x):\n    """Return eq. (3) of the paper."""\n    return 0.3 * x\n'
        'def g(x):\n    """Say."""\n    return 0.7 * x  # derived: from 0.3\n'
    )
    assert [constant.origin for constant in find_constants([Source(Path("a/x.py"), text)])] == ["paper", "derived"]


def test_every_constant_of_the_machine_says_where_its_value_comes_from() -> None:
    machine = [source for source in read_sources(checkout()) if source.is_machine]
    constants = list(find_constants(machine))
    assert [f"{each.place} {each.name}" for each in constants if each.origin == "unsourced"] == []
    assert len([each for each in constants if each.origin == "fitted"]) <= MOST_FITTED


def test_every_module_is_read_once_and_in_its_folder() -> None:
    paths = [source.path for source in read_sources(checkout())]
    assert len(paths) == len(set(paths))
    assert Path("placement/policy.py") in paths
    assert not [path for path in paths if str(path).startswith("tenuto/placement")]


def test_the_verbs_print_what_was_counted(tmp_path: Path) -> None:
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "a.py").write_text("X = 1  # fitted on nothing\nY = 2\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "b.py").write_text("Z = 3\n")
    lines = CliRunner().invoke(command, ["lines", str(tmp_path), "--json"])
    assert json.loads(lines.stdout) == {
        "machine": 2,
        "folders": {"mps": 2, "tests": 1},
        "rooms": {"mps": 2, "tests": 1},
    }
    fitted = CliRunner().invoke(command, ["constants", str(tmp_path), "--origin", "fitted", "--json"])
    assert [row["name"] for row in json.loads(fitted.stdout)["constants"]] == ["X"]
    assert "the machine: 2 lines" in CliRunner().invoke(command, ["lines", str(tmp_path)]).stdout
    assert "1 fitted, 1 unsourced" in CliRunner().invoke(command, ["constants", str(tmp_path)]).stdout


def test_a_walk_has_stays_with_their_callers_and_no_imports() -> None:
    with walked() as stays:
        Cluster.parse("v100:4")
    assert stays[0].module == "tenuto.placement.cluster"
    assert (stays[0].room, stays[0].called_by, stays[0].is_return) == ("placement", "", False)
    assert "tenuto.profiles.gpu_types" in [stay.module for stay in stays]
    assert all(before.module != after.module for before, after in itertools.pairwise(stays))
    assert all(stay.function != "<module>" for stay in stays)


def test_a_stay_in_a_module_that_was_left_is_a_return() -> None:
    """`a` calls `b` twice, `b` calls back each time: the second time nothing is new, as functions count once."""
    first, second = ModuleType("tenuto.first"), ModuleType("tenuto.second")
    exec("def a(b):\n    b(c)\n    b(c)\n    d()\ndef c(): pass\ndef d(): pass", first.__dict__)
    exec("def b(back):\n    back()", second.__dict__)
    with walked() as stays:
        first.a(second.b)
    names = [(stay.module, stay.function, stay.is_return) for stay in stays]
    assert names == [("tenuto.first", "a", False), ("tenuto.second", "b", False), ("tenuto.first", "c", True)]
    assert summary(stays) == "3 stays in 2 modules of 2 rooms, 1 returns"
