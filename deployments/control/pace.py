"""How often there may be a change of plan: at most so many an hour, none for a while after one that failed, and none
soon after another that only saves GPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tenuto.deployments.control.settings import Change

HOUR_S = 3600.0  # unit


class Pace:
    """Times are seconds on the controller's clock. What `memory` returns outlives the controller.

    `failures`: changes in a row that failed.
    """

    def __init__(self, change: Change, changes_s: Iterable[float], quiet_until_s: float, failures: int) -> None:
        """Go on from the changes that were made, and from those in a row that failed."""
        self._change = change
        self._changes_s = deque(changes_s)
        self._quiet_until_s, self.failures = quiet_until_s, failures

    def memory(self) -> tuple[tuple[float, ...], float, int]:
        """Return what the constructor takes."""
        return tuple(self._changes_s), self._quiet_until_s, self.failures

    def begun(self, now_s: float) -> None:
        """A change begins."""
        self._changes_s.append(now_s)

    def failed(self, now_s: float) -> float:
        """A change is taken back; return for how many seconds there is no other, twice as long each time in a row."""
        self.failures += 1
        wait_s = min(HOUR_S, self._change.cool_down_s * 2.0 ** (self.failures - 1))
        self._quiet_until_s = now_s + wait_s
        return wait_s

    def proved(self) -> None:
        """A change has proved itself: the next failure is the first in a row."""
        self.failures = 0

    def forgive(self) -> None:
        """A change that failed before says nothing of the one that is needed now."""
        self._quiet_until_s = 0.0

    def obstacle(self, now_s: float, *, saves_only: bool) -> str | None:
        """Return what stands against a change now, in words for the log; None where nothing does."""
        if now_s < self._quiet_until_s:
            return f"the last change failed; the next may come in {self._quiet_until_s - now_s:.0f} s"
        while self._changes_s and self._changes_s[0] <= now_s - HOUR_S:
            self._changes_s.popleft()
        if len(self._changes_s) >= self._change.per_hour:
            return f"{self._change.per_hour} changes were made within the hour"
        since_s = now_s - self._changes_s[-1] if self._changes_s else HOUR_S
        if saves_only and since_s < self._change.cool_down_s:
            return f"the last change was {since_s:.0f} s ago"
        return None
