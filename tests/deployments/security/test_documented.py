"""docs/reference/security.md names a test for each of its lines, and every one of them exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(
        r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "reference" / "security.md").read_text(encoding="utf-8")
    )
    assert len(named) > 40
    absent = [
        f"{file}::{name}"
        for file, name in named
        if re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M) is None
    ]
    assert absent == []
