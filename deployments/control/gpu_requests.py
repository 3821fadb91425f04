"""Keeps what was asked of the autoscaler and has not come, and gives up a type that does not come in time."""

from __future__ import annotations

from collections.abc import Mapping

from tenuto.deployments.control.estimates import FOLLOW
from tenuto.deployments.control.settings import ControlSettings

_REST = 10.0  # pace: a type that did not come is left alone for so many times as long as it was waited for
_LONGEST_S = 86_400.0  # limit: a type that never comes is asked for again at least once a day


class GpuRequests:
    """Invariant: a type is in `missing` only while fewer of its GPUs are present than were asked for.

    `given_up` says until when, on the controller's clock, no more GPUs of a type are counted on. `come_s` is how long
    GPUs took to come lately.
    """

    def __init__(self, settings: ControlSettings) -> None:
        """Begin with nothing asked for. A type is given up after `change.come_s`, for ten times as long, and twice as
        long as that each time; until one has come, all are taken to come then."""
        self._bounds, self._come_s = settings.gpus, settings.change.come_s
        self.come_s, self._seen = self._come_s, dict[str, int]()
        self._totals: dict[str, int] | None = None
        self._is_known = False  # the autoscaler was asked for `_totals`
        self._present: dict[str, int] = {}  # when they were asked for
        self._since_s: dict[str, float] = {}  # since when GPUs are missing, or more are asked for
        self._failures: dict[str, int] = {}
        self.given_up: dict[str, float] = {}
        self.missing: dict[str, int] = {}

    def update_totals(
        self, now_s: float, needed: Mapping[str, int], present: Mapping[str, int]
    ) -> dict[str, int] | None:
        """Note how many GPUs of each type would carry everything. Return the totals to ask for; None when they are
        asked for already and no GPU has gone since, or the cluster does not grow."""
        totals = {
            kind: max(bound.min, min(bound.max, needed.get(kind, 0)))
            for kind, bound in self._bounds.items()
            if kind not in self.given_up
        }
        has_shrunk = any(present.get(kind, 0) < count for kind, count in self._present.items())
        if not self._bounds or (totals == self._totals and self._is_known and not has_shrunk):
            return None
        self._is_known = True
        before, self._totals, self._present = self._totals or {}, totals, dict(present)
        for kind, count in totals.items():
            if count > before.get(kind, 0):
                self._since_s[kind] = now_s
        self.give_up_late(now_s, present)
        return totals

    def give_up_late(self, now_s: float, present: Mapping[str, int]) -> dict[str, int]:
        """Compare with what is present. Return the types that are given up now, with how many GPUs are missing."""
        totals, before = self._totals or {}, self.missing
        for kind in before:
            if present.get(kind, 0) > self._seen.get(kind, 0):
                self.come_s += FOLLOW * (now_s - self._since_s[kind] - self.come_s)
        self._seen = dict(present)
        self.missing = {kind: n - present.get(kind, 0) for kind, n in totals.items() if n > present.get(kind, 0)}
        self._since_s |= dict.fromkeys(self.missing.keys() - before.keys(), now_s)
        for kind in totals.keys() - self.missing.keys():
            if totals[kind]:
                self._failures.pop(kind, None)  # it comes after all
        for kind in [kind for kind, until_s in self.given_up.items() if until_s <= now_s]:
            del self.given_up[kind]
        late = {kind: n for kind, n in self.missing.items() if now_s - self._since_s[kind] >= self._come_s}
        for kind in late:
            self._failures[kind] = self._failures.get(kind, 0) + 1
            self.given_up[kind] = now_s + min(_LONGEST_S, _REST * self._come_s * 2.0 ** (self._failures[kind] - 1))
            del self.missing[kind]
        if late:  # what was asked for is asked for no more
            self._is_known = False
            self._totals = {kind: n for kind, n in totals.items() if kind not in late}
        return late
