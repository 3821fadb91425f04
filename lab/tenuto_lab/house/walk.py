"""The walk of a command through the house: how often somebody who follows it goes from one module to another.

The walk lists the functions of a run, each once, in the order of their first calls. A *stay* is an uninterrupted run of
the list in one module. A *return* is a stay in a module that was left before. So figures do not depend on how many
models or requests there are, and a helper that is called from everywhere counts where it is first needed.

A walk covers this thread, and threads that begin meanwhile; it does not cover other processes such as gpu-lets. Code
that runs while modules are imported does not count, nor does what a cache answers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

_PACKAGES = ("tenuto", "tenuto_lab")


@dataclass(frozen=True)
class Stay:
    """A stay in a module: the function with which it begins, and the module of ours that called it, if any."""

    module: str
    function: str
    called_by: str
    is_return: bool

    @property
    def room(self) -> str:
        """The folder of the module, without the package."""
        return "/".join(self.module.split(".")[1:-1]) or self.module


@contextmanager
def walked() -> Iterator[list[Stay]]:
    """Give a list that holds the stays of the block in order once the block has ended."""
    stays: list[Stay] = []
    visited: set[str] = set()
    known: set[CodeType] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code in known:
            return
        known.add(frame.f_code)
        module = _module(frame)
        if module.partition(".")[0] not in _PACKAGES or module == __name__ or _is_importing(frame):
            return
        if not stays or stays[-1].module != module:
            function = frame.f_code.co_qualname.removeprefix("__create_fn__.<locals>.")  # of a dataclass
            stays.append(Stay(module, function, _caller(frame), module in visited))
            visited.add(module)

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield stays
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def summary(stays: list[Stay]) -> str:
    """Return the figures of a walk in words."""
    modules = {stay.module for stay in stays}
    returns = sum(stay.is_return for stay in stays)
    return f"{len(stays)} stays in {len(modules)} modules of {len({s.room for s in stays})} rooms, {returns} returns"


def _caller(frame: FrameType) -> str:
    """Return the nearest caller among our modules; empty if there is none."""
    caller = frame.f_back
    while caller is not None and _module(caller).partition(".")[0] not in _PACKAGES:
        caller = caller.f_back
    return "" if caller is None else _module(caller)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and _module(frame).partition(".")[0] in _PACKAGES:
            return True
        frame = frame.f_back
    return False
