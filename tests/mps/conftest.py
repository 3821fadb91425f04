"""A folder whose path is short enough for sockets; pytest's own is not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .fakes import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        yield Bench(Path(folder))
