"""The time that is kept of every deadline: for the way back to the client, and for delays that nobody planned.

It has two parts. The *allowance* is for delays beyond our socket, which the server cannot see. It is 8 % of the SLO and
at most 2 ms, or what the operator gives. The *margin* is for delays on this side: late timers, processes that wait for
a core, executions that take longer than planned. The margin is controlled by the requests that are lost. When answers
leave late, it grows, as it was too small. When requests are refused because of it, more late answers are accepted.

This is one of the loops of docs/reference/scheduling.md. Its signal is answers that leave late. Its figure in
the status is `margin_ms`.
"""

from __future__ import annotations

import functools

from tenuto.deployments.wire.status import MarginStatus
from tenuto.outcome import ATTAINED

# An operator who knows how long answers take to the clients gives `allowance_ms` instead.
_ALLOWANCE_PART = 0.08  # derived: of an SLO of 25 ms the 2 ms below; part of the SLO
_MOST_ALLOWANCE_MS = 2.0  # fitted: only a slow network takes more, and the operator has to say so
# Derived: a quantile that is followed in steps scatters by the root of step times scale. That is 0.3 ms when delays are
# about 2 ms. The first answers of a gateway are late, because its processes still start.
_STEP_MS = 0.05
_START_MS = 2.0  # derived: that scatter and that start
# Derived: a delay of more than a few time slices of the processor is a standstill, and no margin makes up for it.
_MOST_MS = 50.0
# Derived: batches grow in proportion to the time they have, and they wait for half of that time. So beyond capacity a
# margin that is one ms smaller serves this part of 1 / SLO more requests.
_MS_WORTH = 0.5
_MEMORY = 1e-3  # derived: the weight of one request in shares that are known to a thousandth
_KEPT = 1.0 - _MEMORY  # derived: what is left of a share after each request


class Margin:
    """One gateway's margin. Invariant: at most half of the time that a lone request has to spare is kept, so the margin
    never makes the system refuse a request that it could serve alone.

    The margin follows a quantile of the delays. When an answer is late and a larger margin would have helped, the
    margin grows by a step. With every answer in time it shrinks a little, so that growth and shrinking balance when the
    accepted share of the answers is late. When an answer is later than any margin could make up for, the margin stays:
    otherwise a standstill of the machine would drive it to its ceiling for nothing.

    The accepted share is the sum of two parts. One is a third of the share that the attainment allows to be lost. The
    other is the share of requests that are refused because of the margin, as a refused request is lost like a late
    one. Refusals count at most 0.5 ms / SLO: beyond capacity every refusal looks as if the margin caused it, but a
    margin that is one ms smaller would serve no more than that.
    """

    def __init__(self, attainment: float = ATTAINED) -> None:
        """Take the share of requests that should be in time."""
        self.configure(attainment, None)
        self.margin_ms = _START_MS
        self.late_share = 0.0
        self.refused = 0
        self._refused_share = 0.0

    def configure(self, attainment: float, allowance_ms: float | None) -> None:
        """Take the share of requests that should be in time, and a fixed allowance; keep what was learned."""
        self._allowance_ms = allowance_ms
        self._accepted = (1.0 - attainment) / 3.0  # fitted: the share of late answers that costs nobody his attainment

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
            reserve_ms: what was to be kept of its deadline; 0 or less: nothing, and the answer is not counted.
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
        """Return the margin, and the share of requests that it costs."""
        return MarginStatus(self.margin_ms, self.late_share, self.refused)


@functools.lru_cache
def _bounds(slo_ms: float, alone_ms: float, given_ms: float | None) -> tuple[float, float]:
    """Return the allowance of such a deadline, and the most that allowance and margin together may take of it.

    The results are remembered, as most deadlines are of few kinds.

    Args:
        slo_ms: time allowed from arrival to answer.
        alone_ms: what a batch of this one request takes.
        given_ms: what the operator says of the allowance.
    """
    half_ms = max(0.0, (slo_ms - alone_ms) / 2.0)
    usual_ms = min(_MOST_ALLOWANCE_MS, max(0.0, slo_ms) * _ALLOWANCE_PART)
    allowance_ms = min(usual_ms if given_ms is None else given_ms, half_ms)
    return allowance_ms, min(half_ms, allowance_ms + _MOST_MS)
