"""What replays found about each value of a knob, and which of two values is better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from tenuto.batching.core.system import System
from tenuto.batching.rehearsal.replay import Replayed

MEMORY = 0.8  # fitted: the weight that earlier findings keep with each replay
FEW = 10.0  # derived: a program with fewer requests does not count among those served worst
WORST_PART = 0.25  # fitted: the part of the programs that judges `each`; a single worst program would mostly be chance
NOISE = 0.5  # fitted: times the square root of what two values lost: the smallest difference that is not chance


class Seen(NamedTuple):
    """The memory of one value: requests offered and met, by program, and how long gpu-lets were busy."""

    offered: tuple[float, ...]
    met: tuple[float, ...]
    busy_ms: float

    def then(self, replayed: Replayed) -> Seen:
        """Return the memory after one more replay."""
        return Seen(
            tuple([MEMORY * before + count for before, count in zip(self.offered, replayed.offered, strict=True)]),
            tuple([MEMORY * before + count for before, count in zip(self.met, replayed.met, strict=True)]),
            MEMORY * self.busy_ms + replayed.busy_ms,
        )

    def missed(self) -> list[float]:
        """Return how many requests of each program were not met."""
        return [offered - met for offered, met in zip(self.offered, self.met, strict=True)]

    def lost(self) -> float:
        """Return how many requests were not met."""
        return sum(self.missed(), 0.0)

    def share(self, program: int) -> float:
        """Return the share of the requests of a program that were not met."""
        return 1.0 - self.met[program] / self.offered[program]

    def variance(self, program: int) -> float:
        """Return the variance of that share, if requests are lost by chance."""
        return self.share(program) / self.offered[program]


class Judge:
    """Says how much a value lost, in the terms of the objective."""

    def __init__(self, system: System) -> None:
        self._is_each = system.objective == "each"
        # A request of the next higher priority counts ten times.
        self._worth = [
            (offered.weight if system.objective == "weighted" else 1.0) * 10.0**offered.priority
            for offered in system.offered
        ]
        self.nothing = Seen((0.0,) * len(self._worth), (0.0,) * len(self._worth), 0.0)

    def loss(self, seen: Seen) -> float:
        """Return the share of worth that was lost. With `each`, return the mean share lost by the quarter of the
        programs that lost most."""
        if self._is_each:
            worst = self._worst(seen)
            return sum(map(seen.share, worst), 0.0) / len(worst) if worst else 0.0
        total = sum([w * o for w, o in zip(self._worth, seen.offered, strict=True)], 0.0)
        met = sum([w * m for w, m in zip(self._worth, seen.met, strict=True)], 0.0)
        return 1.0 - met / total if total else 0.0

    def chance(self, one: Seen, other: Seen) -> float:
        """Return how much the losses of two values may differ by chance."""
        if one is other:
            return 0.0
        if self._is_each:
            first, second = self._worst(one), self._worst(other)
            variance = sum(map(one.variance, first), 0.0) + sum(map(other.variance, second), 0.0)
            return NOISE * math.sqrt(variance) / max(1, len(first))
        return NOISE * math.sqrt(one.lost() + other.lost()) / max(1.0, sum(one.offered, 0.0))

    def doubt(self, one: Seen, other: Seen) -> float:
        """Return the margin that a value must keep when it is taken to save GPU time. With `each` it is `chance`, so
        that the models served worst are not risked; otherwise 0."""
        return self.chance(one, other) if self._is_each else 0.0

    def harmless(self, seen_by_value: Mapping[float, Seen], slack: float) -> list[float]:
        """Return the values that spare every program: none of it loses more than `slack` of its requests beyond what it
        loses with another value. Where each value does, return those at whose cost the fewest requests are lost, to
        chance."""
        fewest = [min(missed) for missed in zip(*(seen.missed() for seen in seen_by_value.values()), strict=True)]
        harm = {
            value: sum(
                [
                    max(0.0, missed - least - slack * offered)
                    for missed, least, offered in zip(seen.missed(), fewest, seen.offered, strict=True)
                ],
                0.0,
            )
            / max(1.0, sum(seen.offered))
            for value, seen in seen_by_value.items()
        }
        best = min(harm, key=lambda value: harm[value])
        return [
            value
            for value in seen_by_value
            if harm[value] - harm[best] <= self.chance(seen_by_value[value], seen_by_value[best])
        ]

    def _worst(self, seen: Seen) -> list[int]:
        """Return the programs by which `each` is judged."""
        programs = [program for program, offered in enumerate(seen.offered) if offered >= FEW]
        programs.sort(key=seen.share, reverse=True)
        return programs[: math.ceil(WORST_PART * len(programs))]
