"""A scheduler's settings and their last change, for operators; see `Scheduler.status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SchedulerStatus:
    """The settings that one scheduler uses, and what their last change should gain.

    `hold`: part of Symphony's holding time that batches are held; `defend`: part of the staggered batch for which heads
    are given up. `losing`: programs that lost requests lately, for which gpu-lets are kept free; None when it keeps no
    account of them. The other fields are None when it does not rehearse. `rehearsals`: replays so far; `expected_gain`:
    share of the requests that the last change should save; `expected_spared`: share of the GPU time that it should
    save; `rehearsal_cpu_s`: processor time of all replays.
    """

    hold: float
    defend: float
    losing: int | None = None
    rehearsals: int | None = None
    expected_gain: float | None = None
    expected_spared: float | None = None
    rehearsal_cpu_s: float | None = None

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> SchedulerStatus:
        """Read what `to_data` returned."""
        return cls(**data)

    def to_data(self) -> dict[str, Any]:
        """Return plain data for files and JSON, without the fields that are None."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def describe_schedulers(schedulers: Iterable[SchedulerStatus]) -> list[str]:
    """Return a line for each scheduler that rehearses: its settings and what they should save."""
    return [
        f"hold {status.hold:g}, defend {status.defend:g} after {status.rehearsals} rehearsals; "
        f"expected of the last change: requests lost {_change(status.expected_gain, 1)}, "
        f"GPU time {_change(status.expected_spared, 0)}"
        for status in schedulers
        if status.rehearsals is not None
    ]


def _change(saved: float | None, digits: int) -> str:
    """Return what a change saves as a change in percent."""
    return f"{round(-100.0 * (saved or 0.0), digits) + 0.0:+.{digits}f} %"
