"""What is kept of every deadline for the way back, and for delays that nobody planned.

Two parts. The *allowance* is for what happens beyond our socket, which the server cannot see: 8 % of the SLO, at most
2 ms, or what the operator says. The *margin* is for everything on this side of it: late timers, processes that wait for
a core, executions longer than planned. It is not measured as a delay but controlled by what it is for, the requests
that are lost: those that leave too late because it is small, and those that are refused because it is large.

One of the three loops of docs/reference/scheduling.md. Signal: answers that leave late. Figure: `margin_ms` in
the status.
"""

from __future__ import annotations

import functools

from tenuto.deployments.wire.status import MarginStatus

# Options: an operator who knows the way to the clients gives `allowance_ms` instead.
_ALLOWANCE_PART = 0.08  # derived: of an SLO of 25 ms the 2 ms below; part of the SLO
_MOST_ALLOWANCE_MS = 2.0  # limit: more is a slow network, of which the operator has to tell
# Derived: a quantile that is followed in steps scatters by the root of step times scale, here 0.3 ms where delays are
# of some 2 ms; and the first answers of a gateway are late by what its processes need to start.
_STEP_MS = 0.05
_START_MS = 2.0  # derived: that scatter and that start
# Derived: what waits longer than some slices of the processor's time is no tail, and no margin helps it.
_MOST_MS = 50.0
# Derived: batches grow in proportion to the time they have, half of which they wait: beyond capacity one ms less of
# margin serves this part of 1 / SLO more requests.
_MS_WORTH = 0.5
_MEMORY = 1e-3  # derived: of one request in shares that are known to a thousandth
_KEPT = 1.0 - _MEMORY  # derived: what is left of a share after each request


class Margin:
    """One gateway's margin. Invariant: at most half of what a lone request has to spare is ever kept, so that no margin
    can make the system refuse what it could serve alone.

    It follows a quantile of the delays: up by a step with every late answer that a margin could have brought home, down
    with every answer in time by as much as balances the steps where the accepted share is late. One that is late by
    more than is ever kept of such a deadline does not move it: after a standstill of the machine it would stand at its
    ceiling for nothing.

    The accepted share is a third of what the attainment leaves and, as a request refused is as lost as one late, the
    share that is refused for the margin, but at most 0.5 ms / SLO: beyond capacity every refusal looks as if it were
    for the margin, but a margin of one ms less serves no more than about that part more.
    """

    def __init__(self, attainment: float = 0.99) -> None:
        """Take the share of requests that should be in time."""
        self.configure(attainment, None)
        self.margin_ms = _START_MS
        self.late_share = 0.0
        self.refused = 0
        self._refused_share = 0.0

    def configure(self, attainment: float, allowance_ms: float | None) -> None:
        """Take the share of requests that should be in time, and a fixed allowance; keep what was learned."""
        self._allowance_ms = allowance_ms
        self._accepted = (1.0 - attainment) / 3.0  # the share of late answers that costs nobody his attainment

    def reserve_ms(self, slo_ms: float, alone_ms: float) -> float:
        """Return what is kept of a deadline.

        Args:
            slo_ms: time allowed from arrival to answer.
            alone_ms: what a batch of this one request takes.
        """
        allowance_ms, most_ms = _bounds(slo_ms, alone_ms, self._allowance_ms)
        return min(allowance_ms + self.margin_ms, most_ms)

    def allowance_ms(self, slo_ms: float, alone_ms: float) -> float:
        """Return what is kept of such a deadline for what happens beyond the socket."""
        return _bounds(slo_ms, alone_ms, self._allowance_ms)[0]

    def answered(self, left_ms: float, slo_ms: float, alone_ms: float, reserve_ms: float) -> None:
        """Take an executed request whose answer has just left.

        Args:
            left_ms: time to its deadline; negative where it has passed.
            slo_ms: time it was allowed.
            alone_ms: what a batch of this one request takes.
            reserve_ms: what was to be kept of its deadline; one of which nothing was says nothing.
        """
        if reserve_ms <= 0.0:
            return
        allowance_ms, most_ms = _bounds(slo_ms, alone_ms, self._allowance_ms)
        self._refused_share *= _KEPT
        self.late_share *= _KEPT
        if left_ms >= allowance_ms:
            refused, worth = self._refused_share, _MS_WORTH / slo_ms
            accepted = self._accepted + (refused if refused < worth else worth)
            self.margin_ms = max(0.0, self.margin_ms - _STEP_MS * accepted / (1.0 - accepted))
            return
        self.late_share += _MEMORY
        if reserve_ms + allowance_ms - left_ms <= most_ms:
            self.margin_ms += _STEP_MS

    def refused_for_it(self) -> None:
        """Count a request that was given up although it could have been executed by its deadline."""
        self.refused += 1
        self._refused_share = _KEPT * self._refused_share + _MEMORY

    def status(self) -> MarginStatus:
        """Return what it is, and what it costs."""
        return MarginStatus(self.margin_ms, self.late_share, self.refused)


@functools.lru_cache
def _bounds(slo_ms: float, alone_ms: float, given_ms: float | None) -> tuple[float, float]:
    """Return the allowance of such a deadline, and the most that both may be of it; most deadlines are of few kinds.

    Args:
        slo_ms: time allowed from arrival to answer.
        alone_ms: what a batch of this one request takes.
        given_ms: what the operator says of the allowance.
    """
    half_ms = max(0.0, (slo_ms - alone_ms) / 2.0)
    usual_ms = min(_MOST_ALLOWANCE_MS, max(0.0, slo_ms) * _ALLOWANCE_PART)
    allowance_ms = min(usual_ms if given_ms is None else given_ms, half_ms)
    return allowance_ms, min(half_ms, allowance_ms + _MOST_MS)
