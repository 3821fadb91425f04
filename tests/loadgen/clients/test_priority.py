"""The sending thread's priority: taken where it is permitted, given back, and never passed on."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tenuto.loadgen.clients.priority import preferred

pytestmark = pytest.mark.unit


FLAG = 0x40000000
CONSTANTS = {"SCHED_OTHER": 0, "SCHED_FIFO": 1, "SCHED_RR": 2, "SCHED_BATCH": 3, "SCHED_RESET_ON_FORK": FLAG}


class Kernel:
    """Stands for the calls; refuses if told to. `policy` is what the thread has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, policy: int = 0, refuses: bool = False) -> None:
        self.policy, self.refuses = policy, refuses
        self.calls: list[tuple[int, int]] = []
        for name, value in CONSTANTS.items():
            monkeypatch.setattr(os, name, value, raising=False)
        monkeypatch.setattr(os, "sched_param", lambda priority: priority, raising=False)
        monkeypatch.setattr(os, "sched_setscheduler", self._set, raising=False)
        monkeypatch.setattr(os, "sched_getscheduler", lambda _thread: self.policy, raising=False)

    def _set(self, _thread: int, policy: int, priority: Any) -> None:
        if self.refuses or (self.policy & FLAG and not policy & FLAG):  # an ordinary user cannot clear the flag
            raise PermissionError(1, "Operation not permitted")
        self.policy = policy
        self.calls.append((policy, priority))


@pytest.mark.parametrize("before", [0, 3])  # ordinary, or SCHED_BATCH
def test_it_is_taken_for_the_block_and_given_back(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    kernel = Kernel(monkeypatch, policy=before)

    def work() -> None:
        with preferred() as got:
            assert got == "realtime"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert kernel.calls == [(2 | FLAG, 1), (before | FLAG, 0)]  # threads started within are ordinary ones


def test_who_is_real_time_already_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, policy=1)
    with preferred() as got:
        assert got == "realtime"
    assert kernel.calls == []


def test_where_it_is_refused_the_thread_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, refuses=True)
    with preferred() as got:
        assert got == "normal"
    assert kernel.calls == []


def test_other_systems_have_nothing_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setscheduler")
    with preferred() as got:
        assert got == "normal"
