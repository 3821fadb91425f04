"""The readiness of a gpu-let as its dispatcher sees it, and what changes it, as one table."""

from __future__ import annotations

from enum import StrEnum

from tenuto.deployments.process.transitions import TransitionTable


class Readiness(StrEnum):
    """Batches go to a gpu-let that is connected and holds the plan's programs, and to no other."""

    AWAY = "away"
    CONNECTED = "connected"
    RESTING = "resting"
    HANGING = "hanging"
    CLOSING = "closing"


class GpuletEvent(StrEnum):
    """What happens to a gpu-let."""

    CONNECTED = "it connects: its process has started, or is reached again"
    LOST = "its connection ends, or it falls silent"
    FAILED = "it says that it cannot run a batch"
    RESTED = "its rest is over: 0.1 s, after each further failure twice as long, at most 5 s"
    OVERDUE = "a batch should have ended 1.5 s ago"
    ANSWERED = "it has answered all batches"
    CLOSES = "it says that it ends"


READINESS = TransitionTable(
    "a gpu-let",
    Readiness,
    {
        GpuletEvent.CONNECTED: {Readiness.AWAY: Readiness.CONNECTED},
        GpuletEvent.LOST: dict.fromkeys(Readiness, Readiness.AWAY),
        GpuletEvent.FAILED: {
            **dict.fromkeys((Readiness.CONNECTED, Readiness.RESTING), Readiness.RESTING),
            **{readiness: readiness for readiness in (Readiness.HANGING, Readiness.CLOSING)},
        },
        GpuletEvent.RESTED: {Readiness.RESTING: Readiness.CONNECTED},
        GpuletEvent.OVERDUE: dict.fromkeys((Readiness.CONNECTED, Readiness.RESTING), Readiness.HANGING),
        GpuletEvent.ANSWERED: {Readiness.HANGING: Readiness.CONNECTED},
        GpuletEvent.CLOSES: dict.fromkeys(set(Readiness) - {Readiness.AWAY}, Readiness.CLOSING),
    },
)
