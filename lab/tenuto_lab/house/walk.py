"""The walk of a command through the house: the modules in the order of their first calls, each with its caller.

A walk covers this process only, not others such as gpu-lets. Code that runs while modules are imported does not count.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

_PACKAGES = ("tenuto", "tenuto_lab")


@dataclass(frozen=True)
class Stay:
    """The first call of a module: the function that was called, and the module of ours that called it, if any."""

    module: str
    function: str
    called_by: str

    @property
    def room(self) -> str:
        """The folder of the module, without the package."""
        return "/".join(self.module.split(".")[1:-1]) or self.module


def walk(run: Callable[[], object]) -> list[Stay]:
    """Run a function and return its walk. Errors of the function are raised."""
    stays: dict[str, Stay] = {}
    known: set[CodeType] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code in known:
            return
        known.add(frame.f_code)
        module = _module(frame)
        if module not in stays and module.partition(".")[0] in _PACKAGES and not _is_importing(frame):
            function = frame.f_code.co_qualname.removeprefix("__create_fn__.<locals>.")  # of a dataclass
            stays[module] = Stay(module, function, _caller(frame))

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(stays.values())


def _caller(frame: FrameType) -> str:
    """Return the nearest caller among our modules; empty if that is this module."""
    caller = frame.f_back
    while caller is not None and _module(caller).partition(".")[0] not in _PACKAGES:
        caller = caller.f_back
    return "" if caller is None or _module(caller) == __name__ else _module(caller)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and _module(frame).partition(".")[0] in _PACKAGES:
            return True
        frame = frame.f_back
    return False
