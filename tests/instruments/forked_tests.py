"""The processes of pytest-xdist, forked from one that has collected the tests: what they import is imported once.

Collecting takes a process 9 s of processor time, nearly all of it imports; of a forked one 1 s.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import execnet
import pytest

from tests.instruments.forked_workers import OF_THE_PROFILER, forked_workers

__all__ = ["forked_test_processes"]

_COLLECTED = "TENUTO_COLLECTED"


@contextmanager
def forked_test_processes(arguments: Sequence[str], specs: list[execnet.XSpec]) -> Iterator[None]:
    """Have the local processes of `specs` forked from one that has collected what `arguments` name."""
    loaded = [f"{__name__}:collect", *OF_THE_PROFILER]
    with forked_workers(loaded, {_COLLECTED: json.dumps(list(arguments))}) as program:
        words = shlex.join([sys.executable, *program(f"{__name__}:run_tests")])
        specs[:] = [execnet.XSpec(f"popen//python={words}") if spec.popen else spec for spec in specs]
        yield


def collect() -> None:
    """Import every test, with its assertions rewritten."""
    with contextlib.redirect_stdout(io.StringIO()):
        named = json.loads(os.environ[_COLLECTED])
        pytest.main(["--collect-only", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *named])


def run_tests() -> None:
    """Be a process of pytest-xdist: what it runs is in the last argument."""
    exec(sys.argv[-1], {"__name__": "__main__"})
