"""The sending thread's priority: taken where it is permitted, given back, and never passed on."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tenuto.loadgen.priority import prefer_this_thread, preferred

pytestmark = pytest.mark.unit


class Kernel:
    """Stands for the calls; refuses if told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False) -> None:
        self.calls: list[tuple[int, int]] = []
        self.refuses = refuses
        for name, value in {"SCHED_RR": 2, "SCHED_OTHER": 0, "SCHED_RESET_ON_FORK": 0x40000000}.items():
            monkeypatch.setattr(os, name, value, raising=False)
        monkeypatch.setattr(os, "sched_param", lambda priority: priority, raising=False)
        monkeypatch.setattr(os, "sched_setscheduler", self._set, raising=False)

    def _set(self, _thread: int, policy: int, priority: Any) -> None:
        if self.refuses:
            raise PermissionError(1, "Operation not permitted")
        self.calls.append((policy, priority))


def test_it_is_taken_for_the_block_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)

    def work() -> None:
        with preferred() as got:
            assert got == "realtime"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert kernel.calls == [(2 | 0x40000000, 1), (0, 0)]  # threads started within are ordinary ones


def test_where_it_is_refused_the_thread_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, refuses=True)
    with preferred() as got:
        assert got == "normal"
    assert kernel.calls == []


def test_normal_asks_for_nothing_and_other_systems_have_nothing_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    assert prefer_this_thread("normal") == "normal"
    assert kernel.calls == []
    monkeypatch.delattr(os, "sched_setscheduler")
    assert prefer_this_thread() == "normal"
