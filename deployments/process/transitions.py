"""States and events as one table that prints itself: what each event makes of each state. What it lacks is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT", bound=StrEnum)


@dataclass(frozen=True)
class TransitionTable(Generic[StateT, EventT]):
    """`transitions`: for every event, the state after it by the state before. `subject`: what has the states."""

    subject: str
    states: type[StateT]
    transitions: Mapping[EventT, Mapping[StateT, StateT]]

    def after(self, state: StateT, event: EventT) -> StateT:
        """Return the state after an event; raise `ValueError` when the table does not have it."""
        if state not in self.transitions[event]:
            raise ValueError(f"{self.subject} that is '{state}' cannot go on when {event}")
        return self.transitions[event][state]

    def as_markdown(self) -> str:
        """Return the table as the documentation shows it: a row for every event, a column for every state."""
        rows = [("when", *self.states), ("---",) * (len(self.states) + 1)]
        rows += [(event, *(after.get(s, "refused") for s in self.states)) for event, after in self.transitions.items()]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- ", "|---").replace("--- |", "---|")
