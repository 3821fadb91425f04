"""Limits changes of plan: at most so many an hour, none for a while after a failed one, and none soon after another
that only saves GPUs. It is one of the five brakes against flapping that docs/reference/control.md names."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tenuto.deployments.control.settings import Change

HOUR_S = 3600.0  # unit


class ChangeRateLimit:
    """Times are seconds on the controller's clock. `memory` survives the controller.

    `failures`: failed changes in a row.
    """

    def __init__(self, change: Change, changes_s: Iterable[float], quiet_until_s: float, failures: int) -> None:
        """Go on from the times of changes made and the number failed in a row."""
        self._change = change
        self._changes_s = deque(changes_s)
        self._quiet_until_s, self.failures = quiet_until_s, failures

    def memory(self) -> tuple[tuple[float, ...], float, int]:
        """Return what the constructor takes."""
        return tuple(self._changes_s), self._quiet_until_s, self.failures

    def begun(self, now_s: float) -> None:
        """Note that a change begins."""
        self._changes_s.append(now_s)

    def failed(self, now_s: float) -> float:
        """Note that a change is taken back. Return for how many seconds no other begins: twice as long after each
        failure in a row."""
        self.failures += 1
        wait_s = min(HOUR_S, self._change.cool_down_s * 2.0 ** min(30, self.failures - 1))  # limit: of floats
        self._quiet_until_s = now_s + wait_s
        return wait_s

    def proved(self) -> None:
        """Note that a change has proved itself."""
        self.failures = 0

    def forgive(self) -> None:
        """Lift the wait after a failed change: the one needed now is another."""
        self._quiet_until_s = 0.0

    def obstacle(self, now_s: float, *, saves_only: bool) -> str | None:
        """Return what forbids a change now, in words for the log; None when nothing does."""
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
