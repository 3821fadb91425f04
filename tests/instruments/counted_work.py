"""Work as a count that no machine changes: the bytecode instructions that chosen packages execute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Work", "counted"]


class Work:
    """So many instructions were executed."""

    def __init__(self) -> None:
        self.instructions = 0


@contextmanager
def counted(*packages: str) -> Iterator[Work]:
    """Count the instructions of Python functions in these packages (`tenuto.batching`), not of what they call in C."""
    work = Work()

    def inside(_frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "opcode":
            work.instructions += 1
        return inside

    def trace(frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        if not frame.f_globals.get("__name__", "").startswith(packages):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return inside

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield work
    finally:
        sys.settrace(before)
