"""Tells a scheduler core that a streaming gpu-let is free shortly before it is, so that its next batch comes in time.

Only for cores that wait for a gpu-let to be idle; one that sends ahead by itself (`Scheduler.sends_ahead`) knows better
when. The gpu-let still executes one batch after the other: what comes early waits there, staged.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.deployments.dispatch.alarm import Alarm
from tenuto.deployments.dispatch.in_flight import Batch

_KEPT = 64
_QUANTILE = 0.95


@dataclass(slots=True)
class _Sent:
    batch: Batch
    start_ms: float  # as the core expects it
    is_released: bool = False

    @property
    def execution_ms(self) -> float:
        return self.batch.finish_ms - self.batch.start_ms


class EarlyRelease:
    """Invariant: at most two batches of a gpu-let are unanswered because of this, and each is told once.

    A batch is told as done at *expected end + overrun - lead*. The lead is the delay that the core budgets for the way
    of any batch (95th percentiles of what was measured: the wire, and the copies of the largest batch), the overrun the
    95th percentile of how much longer batches executed than expected. The core then expects the next batch to start a
    lead after its dispatch, that is not before the end of this one: what it promises to that batch's deadlines holds.
    """

    def __init__(
        self,
        now_ms: Callable[[], float],
        free: Callable[[int, Batch], None],
        make_alarm: Callable[[Callable[[], None]], Alarm],
    ) -> None:
        """Take the time, what tells the core that a batch of a gpu-let is done, and what makes alarms in that time."""
        self._now_ms = now_ms
        self._free = free
        self._make_alarm = make_alarm
        self._scheduler: Scheduler | None = None
        self._largest = 1
        self._planned_copies_ms = 0.0
        self._lead_ms = 0.0
        self._sent: dict[int, deque[_Sent]] = {}
        self._alarms: dict[int, Alarm] = {}
        self._overruns: deque[float] = deque(maxlen=_KEPT)

    def follow(self, scheduler: Scheduler | None, largest_batch: int = 1, planned_copies_ms: float = 0.0) -> None:
        """Work for this core from now on, or for none; batches of the one before are forgotten.

        Args:
            scheduler: the core.
            largest_batch: of the plan.
            planned_copies_ms: what the plan expects a batch's copies to take at most, until they are measured.
        """
        for gpulet in list(self._sent):
            self.lost(gpulet)
        self._scheduler = scheduler
        self._largest, self._planned_copies_ms = largest_batch, planned_copies_ms
        self._overruns.clear()

    def budget(self, delay: NetworkDelay) -> NetworkDelay:
        """Return what the core is to budget for measured delays: the copies of the largest batch for every batch.

        Nobody knows which batch comes next when a core is told early, and one that sends ahead by itself guesses its
        size too small when it is overloaded: with a delay per request it served 26 % less then
        (tests/deployments/dispatch/test_streaming_dispatch.py, executions 0.9 to 1.3 times as long as planned).
        """
        if self._scheduler is None:
            return delay
        self._lead_ms = delay.ctrl_ms + (delay.data_ms_per_request * self._largest or self._planned_copies_ms)
        return NetworkDelay(ctrl_ms=self._lead_ms, response_ms=delay.response_ms)

    def sent(self, gpulet: int, batch: Batch) -> None:
        """Take note of a batch."""
        scheduler = self._scheduler
        if scheduler is None or scheduler.sends_ahead or scheduler.preempts:
            return
        self._sent.setdefault(gpulet, deque()).append(_Sent(batch, batch.start_ms))
        self._arm(gpulet)

    def answered(self, gpulet: int, batch: Batch, execution_ms: float | None) -> bool:
        """Forget an answered batch, learning from its execution time if it has one; True when the core was told before
        that it is done."""
        waiting = self._sent.get(gpulet, deque())
        found = next((sent for sent in waiting if sent.batch is batch), None)
        if found is None:
            return False
        waiting.remove(found)
        if execution_ms is not None:
            self._overruns.append(max(0.0, execution_ms - found.execution_ms))
        if waiting:  # it begins now, or when the core expected it
            waiting[0].start_ms = max(waiting[0].start_ms, self._now_ms())
        self._arm(gpulet)
        return found.is_released

    def lost(self, gpulet: int) -> None:
        """Forget what runs on a gpu-let."""
        self._sent.pop(gpulet, None)
        alarm = self._alarms.pop(gpulet, None)
        if alarm is not None:
            alarm.close()

    @property
    def overrun_ms(self) -> float:
        """How much longer than expected a batch may execute, in ms; 0 before anything was measured."""
        ordered = sorted(self._overruns)
        return ordered[min(len(ordered) - 1, int(_QUANTILE * len(ordered)))] if ordered else 0.0

    def _arm(self, gpulet: int) -> None:
        """Set the alarm of a gpu-let that has exactly one batch."""
        alarm = self._alarms.get(gpulet)
        waiting = self._sent[gpulet]
        lead_ms = self._lead_ms - self.overrun_ms  # not above 0 where ends are known too badly to come early
        if len(waiting) != 1 or waiting[0].is_released or lead_ms <= 0.0:
            if alarm is not None:
                alarm.clear()
            return
        if alarm is None:
            alarm = self._alarms[gpulet] = self._make_alarm(functools.partial(self._release, gpulet))
        alarm.set(max(self._now_ms(), waiting[0].start_ms + waiting[0].execution_ms - lead_ms) / 1000.0)

    def _release(self, gpulet: int) -> None:
        only = self._sent[gpulet][0]
        only.is_released = True
        self._free(gpulet, only.batch)
