"""Turns requests away when the gateway's event loop reads them too late (CoDel)."""

from __future__ import annotations

import math

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.outcome import Outcome


class ReadingLag:
    """Whether the event loop reads too late, by the rule of CoDel (RFC 8289). When for a tenth of a second every
    request has waited too long to be read, requests that waited so long are turned away at once. That ends when no
    request has waited so long for a second.

    When more comes than the processor can read, first come first served would read each request when its deadline is
    almost over, and serve none in time. A short standstill of the machine does not begin this, because the requests
    that came meanwhile may still be in time.
    """

    _INTERVAL_MS = 100.0  # paper: CoDel's interval (RFC 8289)
    _ALERT_MS = 1000.0  # fitted: requests are turned away until none has waited so long for a second
    _PART = 0.2  # fitted: part of the SLO that a request may wait to be read

    def __init__(self) -> None:
        self._behind_from_ms = math.inf
        self._alert_until_ms = -math.inf
        self.turned_away = 0

    def check_wait(self, arrived_ms: float, slo_ms: float, now_ms: float) -> None:
        """Raise `HttpError` 429 for the next request that is read if it is to be turned away; see `record_wait`."""
        if self.record_wait(now_ms - arrived_ms, slo_ms, now_ms):
            reason = "more requests come than this gateway can read. Retry in a second."
            raise HttpError(429, reason, retry_after_s=1.0, details={"outcome": Outcome.REJECTED.word})

    def record_wait(self, lag_ms: float, slo_ms: float, now_ms: float) -> bool:
        """Note how long the next request waited to be read; return whether it is to be turned away.

        Args:
            lag_ms: since its bytes came.
            slo_ms: time it is allowed.
            now_ms: the clock.
        """
        if slo_ms <= 0.0 or slo_ms == math.inf:
            return False  # it had expired when it was sent, however soon it was read; or it never does
        if lag_ms <= self._PART * slo_ms:
            self._behind_from_ms = math.inf
            return False
        self._behind_from_ms = min(self._behind_from_ms, now_ms)
        if now_ms - self._behind_from_ms < self._INTERVAL_MS and now_ms > self._alert_until_ms:
            return False
        self._alert_until_ms = now_ms + self._ALERT_MS
        self.turned_away += 1
        return True
