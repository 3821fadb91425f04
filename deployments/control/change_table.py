"""The states of a change and what moves it from one to the next, as one table. Whatever is not in it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Phase(StrEnum):
    """The state of the change of a deployment."""

    NONE = "none"
    UNDER_WAY = "under way"
    PROVING = "proving"
    GOING_BACK = "going back"


class ChangeEvent(StrEnum):
    """What happens to a change."""

    BEGUN = "another deployment is wanted"
    STAGE_READY = "the gpu-lets of a stage are ready, and it is not the last"
    REACHED = "the gpu-lets of the last stage are ready"
    FAILED = "a gpu-let cannot start or is late, or requests are lost since"
    START_FAILED = "the same, and nothing ran before"
    GPU_LOST = "a GPU in use is lost"
    WITHDRAWN = "a version is taken back"
    PROVED = "the time to prove it is over; in mode off at once"


TRANSITIONS: Mapping[tuple[Phase, ChangeEvent], Phase] = {
    (Phase.NONE, ChangeEvent.BEGUN): Phase.UNDER_WAY,
    (Phase.NONE, ChangeEvent.GPU_LOST): Phase.NONE,
    (Phase.NONE, ChangeEvent.WITHDRAWN): Phase.NONE,
    (Phase.UNDER_WAY, ChangeEvent.BEGUN): Phase.UNDER_WAY,
    (Phase.UNDER_WAY, ChangeEvent.STAGE_READY): Phase.UNDER_WAY,
    (Phase.UNDER_WAY, ChangeEvent.REACHED): Phase.PROVING,
    (Phase.UNDER_WAY, ChangeEvent.FAILED): Phase.GOING_BACK,
    (Phase.UNDER_WAY, ChangeEvent.START_FAILED): Phase.NONE,
    (Phase.UNDER_WAY, ChangeEvent.GPU_LOST): Phase.NONE,
    (Phase.UNDER_WAY, ChangeEvent.WITHDRAWN): Phase.UNDER_WAY,
    (Phase.PROVING, ChangeEvent.BEGUN): Phase.UNDER_WAY,
    (Phase.PROVING, ChangeEvent.PROVED): Phase.NONE,
    (Phase.PROVING, ChangeEvent.FAILED): Phase.GOING_BACK,
    (Phase.PROVING, ChangeEvent.GPU_LOST): Phase.NONE,
    (Phase.PROVING, ChangeEvent.WITHDRAWN): Phase.NONE,
    (Phase.GOING_BACK, ChangeEvent.BEGUN): Phase.UNDER_WAY,
    (Phase.GOING_BACK, ChangeEvent.STAGE_READY): Phase.GOING_BACK,
    (Phase.GOING_BACK, ChangeEvent.REACHED): Phase.NONE,
    (Phase.GOING_BACK, ChangeEvent.FAILED): Phase.NONE,
    (Phase.GOING_BACK, ChangeEvent.GPU_LOST): Phase.NONE,
    (Phase.GOING_BACK, ChangeEvent.WITHDRAWN): Phase.GOING_BACK,
}


def as_markdown() -> str:
    """Return the table as the documentation shows it: a row for every event, a column for every state."""
    rows = [("when", *Phase), ("---",) * (len(Phase) + 1)]
    rows += [(event, *(TRANSITIONS.get((phase, event), "refused") for phase in Phase)) for event in ChangeEvent]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- ", "|---").replace("--- |", "---|")
