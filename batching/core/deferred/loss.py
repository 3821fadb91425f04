"""Which share of a program's requests was lost lately, for the objective `each`."""

from __future__ import annotations

# Derived: the window of the offered rate, so that one batch hardly changes the share.
WINDOW_S = 5.0
LEAST = 200.0  # derived: requests over which it is taken at least, to be known to 1 %


class Loss:
    """The share of all requests of one program at first, later an exponentially weighted mean over them."""

    __slots__ = ("seen", "share", "step")

    def __init__(self) -> None:
        self.share = 0.0
        self.step = 0.0  # by which one request changes it
        self.seen = 0

    def follow(self, rps: float) -> None:
        """Take the mean over so many seconds of this rate."""
        self.step = 1.0 / max(LEAST, WINDOW_S * rps)

    def lose(self, count: int) -> None:
        """So many were lost."""
        self._approach(1.0, count)

    def serve(self, count: int) -> None:
        """So many were served."""
        self._approach(0.0, count)

    def _approach(self, share: float, count: int) -> None:
        self.seen += count
        self.share = share + (self.share - share) * min((1.0 - self.step) ** count, 1.0 - count / self.seen)
