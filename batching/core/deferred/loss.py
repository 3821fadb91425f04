"""Which share of a program's requests was lost lately, for the objective `each`."""

from __future__ import annotations

# Derived: the window of the offered rate, so that one batch hardly changes the share.
WINDOW_S = 5.0
LEAST = 200.0  # derived: requests over which it is taken at least, to be known to 1 %


class Loss:
    """An exponentially weighted mean over the requests of one program."""

    __slots__ = ("share", "step")

    def __init__(self) -> None:
        self.share = 0.0
        self.step = 0.0  # by which one request changes it

    def follow(self, rps: float) -> None:
        """Take the mean over so many seconds of this rate."""
        self.step = 1.0 / max(LEAST, WINDOW_S * rps)

    def lose(self, count: int) -> None:
        """So many were lost."""
        self.share = 1.0 - (1.0 - self.share) * (1.0 - self.step) ** count

    def serve(self, count: int) -> None:
        """So many were served."""
        self.share *= (1.0 - self.step) ** count
