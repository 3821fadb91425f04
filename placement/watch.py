"""What watches a long planning: is told how far it is, and may ask it to stop with the best plan so far."""

from __future__ import annotations

INTERRUPTED = "planning was interrupted; this is the best plan found until then"


class PlanningWatch:
    """Told by a policy how far it is. This one hears nothing and lets it finish."""

    def say(self, progress: str) -> None:
        """Hear of progress, in a few words; called as often as a policy likes."""

    def is_stopped(self) -> bool:
        """Say whether the policy is to return the best plan it has, soon."""
        return False
