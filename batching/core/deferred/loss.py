"""Which share of a program's requests was lost lately, for the objective `each`."""

from __future__ import annotations

from tenuto.batching.core.staggered import ArrivalRate

WINDOW_S = ArrivalRate.WINDOW_MS / 1000.0  # derived: so that one batch hardly changes the share
LEAST = 200.0  # derived: the fewest requests the share is taken over, so that it is known to 1 %


class Loss:
    """The share of requests that one program lost: of all requests at first, later an exponentially weighted mean."""

    __slots__ = ("seen", "share", "step")

    def __init__(self) -> None:
        self.share = 0.0
        self.step = 0.0  # the weight of one request
        self.seen = 0

    def follow(self, rps: float) -> None:
        """Set the weight of a request so that the mean is over `WINDOW_S` at this rate."""
        self.step = 1.0 / max(LEAST, WINDOW_S * rps)

    def lose(self, count: int) -> None:
        """Note that `count` requests were lost."""
        self._approach(1.0, count)

    def serve(self, count: int) -> None:
        """Note that `count` requests were served."""
        self._approach(0.0, count)

    def _approach(self, share: float, count: int) -> None:
        self.seen += count
        self.share = share + (self.share - share) * min((1.0 - self.step) ** count, 1.0 - count / self.seen)
