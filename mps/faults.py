"""Faults and health of a GPU: Xid errors that the driver reports, and a log of recent faults of the GPU's server. All
gpu-lets of the GPU share this log, so that they are not restarted without end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tenuto.documents import load_document, write_whole
from tenuto.errors import EnvironmentFaultError, InvalidInputError

MOST_FAULTS = 3  # limit: faults within the window: there are two restarts, then a refusal
WINDOW_S = 600.0  # limit: time after which a fault is forgotten

# After these errors the GPU itself is broken, and a new process does not help: uncorrectable memory, a lost bus or
# link, firmware that hangs (NVIDIA, "Xid Errors"). Other errors are faults of one process, which gets an error from
# CUDA.
FATAL_XIDS = frozenset({48, 61, 62, 64, 74, 79, 95, 109, 119, 120, 140, 143})


class FaultLog:
    """The faults of one GPU. A fault is one event however many gpu-lets see it, from `note` to `over`.

    The caller holds a lock around `note` and `over`.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Take the file, and a clock in s that all processes share and that a restart of the machine does not reset."""
        self.path, self._clock = path, clock

    def note(self) -> None:
        """Record that the server is in FAULT, unless this fault is recorded already."""
        times, is_open = self._read()
        if not is_open:
            self._write([*times, self._clock()], True)

    def over(self) -> None:
        """Record that the server takes clients again."""
        times, is_open = self._read()
        if is_open:
            self._write(times, False)

    def recent(self) -> int:
        """Return the number of faults within `WINDOW_S`."""
        return len(self._read()[0])

    def wait_s(self) -> float:
        """Return the time in s until fewer than `MOST_FAULTS` are recent; 0 if that is now."""
        times, _ = self._read()
        return 0.0 if len(times) < MOST_FAULTS else max(0.0, times[-MOST_FAULTS] + WINDOW_S - self._clock())

    def clear(self) -> None:
        """Forget everything."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> tuple[list[float], bool]:
        try:
            data = load_document(self.path)
            now = self._clock()
            return [float(at) for at in data["at_s"] if 0 <= now - float(at) < WINDOW_S], bool(data["open"])
        except (InvalidInputError, ValueError, KeyError, TypeError):
            return [], False

    def _write(self, times: list[float], is_open: bool) -> None:
        write_whole(self.path, json.dumps({"at_s": times, "open": is_open}) + "\n")


class XidEvents:
    """The Xid errors of one GPU since this object was made (NVML's critical Xid events).

    Invariant: `seen` only grows."""

    def __init__(self, gpu_uuid: str, nvml: Any) -> None:
        """Register for the GPU's events with `pynvml`, or a fake of it.

        Raises:
            EnvironmentFaultError: the driver does not report them here, as in some containers.
        """
        self._nvml = nvml
        self.seen: tuple[int, ...] = ()
        try:
            nvml.nvmlInit()
            self._events = nvml.nvmlEventSetCreate()
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
            if gpu_uuid.startswith("MIG-"):  # events are the whole GPU's
                handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except (nvml.NVMLError, AttributeError) as error:
            raise EnvironmentFaultError(f"Xid events of {gpu_uuid} cannot be watched: {error}.") from error

    def look(self) -> tuple[int, ...]:
        """Return every Xid so far, oldest first; does not wait."""
        for _ in range(64):  # further events are read at the next look
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:  # none is waiting
                break
            self.seen = (*self.seen, int(event.eventData))
        return self.seen
