"""What a scheduler tells operators of its own choices; see `Scheduler.status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SchedulerStatus:
    """What one scheduler chose lately, and what it expects of that.

    `hold`: part of the time they have for which batches are held; `defend`: part of the staggered batch for which heads
    are given up. The others are None where it does not rehearse: how many replays there were, which share of the
    requests the last change was expected to lose less and which share of the GPU time to spare, and what all replays
    took of a processor.
    """

    hold: float
    defend: float
    rehearsals: int | None = None
    expected_gain: float | None = None
    expected_spared: float | None = None
    rehearsal_cpu_s: float | None = None

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> SchedulerStatus:
        """Read what `to_data` returned."""
        return cls(**data)

    def to_data(self) -> dict[str, Any]:
        """Return plain data, for files and JSON, without what is not known."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def describe_schedulers(schedulers: Iterable[SchedulerStatus]) -> list[str]:
    """Return a line for each scheduler that rehearses: what it chose and what that should save."""
    return [
        f"hold {told.hold:g}, defend {told.defend:g} after {told.rehearsals} rehearsals; expected of the last change: "
        f"{told.expected_gain or 0.0:.1%} fewer lost, GPU time {0.0 - (told.expected_spared or 0.0):+.0%}"
        for told in schedulers
        if told.rehearsals is not None
    ]
