"""Xid errors as the driver reports them."""

from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.errors import EnvironmentFaultError
from tenuto.mps.faults import FATAL_XIDS, XidEvents
from tests.mps.fakes import UUID


class EventNvml:
    class NVMLError(Exception):
        pass

    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *, permitted: bool = True) -> None:
        self.permitted = permitted
        self.waiting: list[int] = []
        self.registered: list[Any] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceRegisterEvents(self, handle: str, types: int, events: str) -> None:
        if not self.permitted:
            raise self.NVMLError("Not Supported")
        self.registered.append((handle, types, events))

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0
        if not self.waiting:
            raise self.NVMLError("Timeout")
        return SimpleNamespace(eventData=self.waiting.pop(0))


def test_events_are_taken_without_waiting_and_kept() -> None:
    nvml = EventNvml()
    events = XidEvents(UUID, nvml)
    assert nvml.registered == [(UUID, 8, "set")]
    assert events.look() == ()
    nvml.waiting = [13, 79]
    assert events.look() == (13, 79)
    assert events.look() == (13, 79)
    assert FATAL_XIDS & {13, 79} == {79}


def test_a_driver_that_reports_none_is_told_as_such() -> None:
    with pytest.raises(EnvironmentFaultError, match="cannot be watched: Not Supported"):
        XidEvents(UUID, EventNvml(permitted=False))
