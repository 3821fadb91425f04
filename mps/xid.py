"""Xid errors of a GPU: what the driver reports of faults, asked for without waiting (NVML's critical Xid events)."""

from __future__ import annotations

from typing import Any

from tenuto.errors import EnvironmentFaultError

# After these the GPU itself is unwell and no new process helps: uncorrectable memory, a lost bus or link, firmware that
# hangs (NVIDIA, "Xid Errors"). The others are faults of one process, which learns of its own by CUDA's error.
FATAL_XIDS = frozenset({48, 61, 62, 64, 74, 79, 95, 109, 119, 120, 140, 143})


class XidEvents:
    """The Xid errors of one GPU since this was made. Invariant: `seen` only grows."""

    def __init__(self, gpu_uuid: str, nvml: Any) -> None:
        """Register for the GPU's events with `pynvml`, or what stands for it.

        Raises:
            EnvironmentFaultError: the driver does not report them here, as in some containers.
        """
        self._nvml = nvml
        self.seen: tuple[int, ...] = ()
        try:
            nvml.nvmlInit()
            self._events = nvml.nvmlEventSetCreate()
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except (nvml.NVMLError, AttributeError) as error:
            raise EnvironmentFaultError(f"Xid events of {gpu_uuid} cannot be watched: {error}.") from error

    def look(self) -> tuple[int, ...]:
        """Return every Xid so far, oldest first; does not wait."""
        for _ in range(64):  # a storm of them is told at the next look
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:  # none is waiting
                break
            self.seen = (*self.seen, int(event.eventData))
        return self.seen
