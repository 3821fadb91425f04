"""The record of what a controller noticed, decided and did: an entry of a type of its own for each, and its words.

Entries carry figures; what people read of them is made here and nowhere else. Decisions rest on an entry's type and on
`reached`, never on words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from tenuto.deployments.control.planning import Proposal
from tenuto.deployments.wire.status import LogLine


class Reason(StrEnum):
    """Why to plan again."""

    LOST = "lost"
    CAME = "came"
    SLOW = "slow"
    SLO = "slo"
    OVERLOAD = "overload"
    UNDERUSED = "underused"
    RATE = "rate"
    STANDBY = "standby"
    WORKLOAD = "workload"
    STUCK = "stuck"


@dataclass(frozen=True)
class LogEntry:
    """One entry: `kind` is its name in logs and metrics.

    `reached`, of one that ends a change: whether that is where it was to go; None of all others.
    """

    at_s: float
    kind: ClassVar[str]
    reached: ClassVar[bool | None] = None

    @property
    def text(self) -> str:
        """What people read."""
        raise NotImplementedError

    @property
    def data(self) -> dict[str, Any]:
        """The figures it rests on, for files."""
        return {}

    @property
    def new_version(self) -> str | None:
        """Why what runs is another since this entry, for the history of versions; None where it is not."""
        return None

    def line(self, at_s: float) -> LogLine:
        """Return it as a line of the log, at a time since 1970."""
        return LogLine(at_s, self.kind, self.text, self.data, self.reached)


# --- planning ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoPlan(LogEntry):
    """The planner has none; `reasons` to ask it, by kind."""

    kind = "no plan"
    reasons: Mapping[Reason, str]
    fault: str

    @property
    def text(self) -> str:
        return f"{'; '.join(self.reasons.values())}: no plan: {self.fault}; what runs is kept"

    @property
    def data(self) -> dict[str, Any]:
        return {"reasons": {kind.value: why for kind, why in self.reasons.items()}}


@dataclass(frozen=True)
class _Weighed(LogEntry):
    """Something was proposed, for these reasons, after so much planning."""

    reasons: Mapping[Reason, str]
    proposal: Proposal
    planning_s: float

    @property
    def why(self) -> str:
        """All reasons."""
        return "; ".join(self.reasons.values())

    @property
    def data(self) -> dict[str, Any]:
        worth = self.proposal.worth
        return {
            "how": self.proposal.how,
            "reasons": {kind.value: why for kind, why in self.reasons.items()},
            "gained_requests": round(worth.gained_requests),
            "lost_requests": round(worth.lost_requests),
            "saved_gpu_s": round(worth.saved_rent),
            "spent_gpu_s": round(worth.spent_rent),
            "seconds": worth.seconds,
            "stages": worth.stages,
            "planning_s": round(self.planning_s, 3),
        }


@dataclass(frozen=True)
class Kept(_Weighed):
    """What runs is kept: nothing pays, or what would pay meets an `obstacle`."""

    kind = "kept"
    obstacle: str | None = None

    @property
    def text(self) -> str:
        worth = self.proposal.worth
        if self.obstacle is None:
            return f"{self.why}: what runs is kept, as {worth.why}"
        return f"{self.why}: {self.proposal.how} would pay, as {worth.why}, but {self.obstacle}"


@dataclass(frozen=True)
class Advised(_Weighed):
    """What would be done, were the controller to act."""

    kind = "advice"

    @property
    def text(self) -> str:
        return f"{self.why}: {self.proposal.how}, as {self.proposal.worth.why}"


@dataclass(frozen=True)
class Begun(Advised):
    """A change begins."""

    kind = "change"


@dataclass(frozen=True)
class RatesTold(_Weighed):
    """The same gpu-lets are meant for other rates: no change."""

    kind = "rates"

    @property
    def text(self) -> str:
        return f"{self.why}: {self.proposal.worth.why}"


@dataclass(frozen=True)
class GpusMissing(LogEntry):
    """So many more GPUs of each type would carry everything."""

    kind = "missing"
    short: Mapping[str, int]

    @property
    def text(self) -> str:
        return f"all rates would be carried with more GPUs: {listed(self.short)}"

    @property
    def data(self) -> dict[str, Any]:
        return {"gpus": dict(self.short)}


# --- standby ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnStandby(LogEntry):
    """These processes wait, with their shares of a GPU."""

    kind = "standby"
    why: str
    shares: Mapping[str, str]

    @property
    def text(self) -> str:
        return f"{self.why}: {listed(self.shares) or 'nothing'} on standby"

    @property
    def data(self) -> dict[str, Any]:
        return {"shares": dict(self.shares)}


@dataclass(frozen=True)
class TakenOver(LogEntry):
    """A change begins in which processes on standby take over."""

    kind = "change"
    why: str

    @property
    def text(self) -> str:
        return self.why


# --- changes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Abandoned(LogEntry):
    """The change under way stops where it is, as these GPUs are gone."""

    kind = "abandoned"
    gpus: Sequence[str]

    @property
    def text(self) -> str:
        return f"the change under way stops, as GPU {', '.join(self.gpus)} is gone"


@dataclass(frozen=True)
class Changed(LogEntry):
    """A change is done."""

    kind = "changed"
    reached = True
    why: str
    seconds: float

    @property
    def text(self) -> str:
        return f"{self.why}: done in {self.seconds:.0f} s"

    @property
    def data(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "why": self.why}

    @property
    def new_version(self) -> str:
        return self.why


@dataclass(frozen=True)
class TakenBack(LogEntry):
    """A change is taken back, and none begins for a while."""

    kind = "roll back"
    why: str
    wait_s: float

    @property
    def text(self) -> str:
        return f"{self.why}; no other change for {self.wait_s:.0f} s"

    @property
    def data(self) -> dict[str, Any]:
        return {"why": self.why}


@dataclass(frozen=True)
class RolledBack(LogEntry):
    """The plan before runs again."""

    kind = "rolled back"
    reached = False
    seconds: float

    @property
    def text(self) -> str:
        return f"to the plan before, in {self.seconds:.0f} s"

    @property
    def new_version(self) -> str:
        return self.text


@dataclass(frozen=True)
class Stuck(LogEntry):
    """Going back failed too."""

    kind = "stuck"
    reached = False
    why: str

    @property
    def text(self) -> str:
        return f"going back failed too: {self.why}"


# --- sub-clusters, and operators --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evening(LogEntry):
    """Models begin to change their sub-cluster; no plan is touched."""

    kind = "change"
    why: str

    @property
    def text(self) -> str:
        return self.why


@dataclass(frozen=True)
class Evened(LogEntry):
    """They have."""

    kind = "changed"
    why: str

    @property
    def text(self) -> str:
        return f"{self.why}: done"

    @property
    def new_version(self) -> str:
        return self.why


@dataclass(frozen=True)
class Paused(LogEntry):
    """An operator lets the controller only watch."""

    kind = "paused"

    @property
    def text(self) -> str:
        return "by an operator"


@dataclass(frozen=True)
class Resumed(Paused):
    """An operator lets it act again."""

    kind = "resumed"


def listed(values: Mapping[str, Any], form: str = "{}") -> str:
    """Return names with their values, each in a form."""
    return ", ".join(f"{name} {form.format(value)}" for name, value in sorted(values.items()))
