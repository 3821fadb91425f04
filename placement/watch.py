"""Watches a policy that plans for long: the policy reports its progress, and the watch can ask it to stop."""

from __future__ import annotations

INTERRUPTED = "planning was interrupted; this is the best plan found until then"


class PlanningWatch:
    """Receives the progress of a policy. This class ignores it and lets the policy finish."""

    def say(self, progress: str) -> None:
        """Receive the progress in a few words. A policy may call this as often as it likes."""

    def is_stopped(self) -> bool:
        """Return whether the policy must soon stop and return the best plan that it has."""
        return False
