"""What a sender hands back for one request, whatever it speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["OnReply", "Reply"]


@dataclass(slots=True)
class Reply:
    """What came back: status 0 means that no answer came, and `error` says why.

    Durations are ms as the server measured them on its own clocks, NaN where it did not say.
    """

    status: int
    batching_ms: float = float("nan")
    gpulet_queue_ms: float = float("nan")
    execution_ms: float = float("nan")
    batch_size: int = 0
    gpulet: str = ""
    error: str = ""


# Called exactly once per request with the token it was sent with.
OnReply = Callable[[int, Reply], None]
