"""The states of a change and what moves it from one to the next, as one table. Whatever is not in it is refused."""

from __future__ import annotations

from enum import StrEnum

from tenuto.deployments.process.transitions import TransitionTable


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


TRANSITIONS = TransitionTable(
    "a change",
    Phase,
    {
        ChangeEvent.BEGUN: dict.fromkeys(Phase, Phase.UNDER_WAY),
        ChangeEvent.STAGE_READY: {Phase.UNDER_WAY: Phase.UNDER_WAY, Phase.GOING_BACK: Phase.GOING_BACK},
        ChangeEvent.REACHED: {Phase.UNDER_WAY: Phase.PROVING, Phase.GOING_BACK: Phase.NONE},
        ChangeEvent.FAILED: {
            **dict.fromkeys((Phase.UNDER_WAY, Phase.PROVING), Phase.GOING_BACK),
            Phase.GOING_BACK: Phase.NONE,
        },
        ChangeEvent.START_FAILED: {Phase.UNDER_WAY: Phase.NONE},
        ChangeEvent.GPU_LOST: dict.fromkeys(Phase, Phase.NONE),
        ChangeEvent.WITHDRAWN: {**{phase: phase for phase in Phase}, Phase.PROVING: Phase.NONE},
        ChangeEvent.PROVED: {Phase.PROVING: Phase.NONE},
    },
)
