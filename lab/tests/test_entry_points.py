"""The laboratory registers what the machine believes it has, and each of it loads."""

import tomllib
from pathlib import Path

import pytest

from tenuto.plugins import LABORATORY, cure_of_unknown, registered

ROOT = Path(__file__).parents[2]
WRITTEN = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]


@pytest.mark.parametrize("group", LABORATORY)
def test_the_machine_knows_the_laboratorys_names(group: str) -> None:
    written = WRITTEN.get(group, {})
    assert LABORATORY[group] == set(written)
    assert {name: point.value for name, point in registered(group).items() if name in written} == written
    assert [name for name in written if registered(group)[name].load() is None] == []
    for name in written:
        assert "pip install tenuto-lab" in cure_of_unknown(group, name, ())
