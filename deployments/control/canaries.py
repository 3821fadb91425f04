"""Finds canaries that are worse than the version that takes the rest, by what both lost in the same looks.

The rule is a bet that is fair when both versions are equally good. Take the looks in which both versions ended
requests. The difference is the part that the canary lost, less the part that the other version lost. When both are
equally good, the difference is as likely to be above zero as below.

A player stakes a part s of the stock on the difference. After each look the stock is 1 + s (difference) times as large.
On average it never grows. The stock is spread evenly over all stakes from 0 to 1. Then the probability that it ever
exceeds 1 / (1 - confidence) is at most 1 - confidence, however many looks there are (Ville's inequality; Waudby-Smith
and Ramdas, "Estimating means of bounded random variables by betting", 2023). After look n a part 1 / (n + 1)^2 of the
stock is spread evenly again. The bound still holds, and a canary that was better for long and then fails is found soon
too.

Requests of one batch are lost together, so the rule assumes nothing about how requests within a look depend on each
other. When both versions suffer alike from overload, that counts against neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tenuto.deployments.control.interface import ModelSeen
from tenuto.placement.versions import by_model, taking_the_rest
from tenuto.placement.workload import ModelSpec

_STAKES = np.arange(100) / 100.0  # derived: the best of 100 gains within 1 % of the best stake there is


@dataclass
class _Bet:
    """A bet on one canary against one other version: the stock by stake, the number of looks, and the requests (ended,
    lost) of both versions."""

    stock: NDArray[np.float64] = field(default_factory=lambda: np.ones_like(_STAKES))
    looks: int = 0
    canary: tuple[int, int] = (0, 0)
    rest: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class WorseCanary:
    """A canary that loses more than the version beside it; `ended` and `lost` (not in time) count requests."""

    name: str
    rest: str
    ended: int
    lost: int
    rest_ended: int
    rest_lost: int


class Canaries:
    """Judges the canaries of the running plan."""

    def __init__(self, confidence: float) -> None:
        """`confidence`: probability that a canary as good as the other version is never found worse."""
        self._enough = 1.0 / (1.0 - confidence)
        self._bets: dict[tuple[str, str], _Bet] = {}

    def observe(self, models: Sequence[ModelSpec], seen: Mapping[str, ModelSeen]) -> list[WorseCanary]:
        """Take one look at the models of the plan; return the canaries that are worse than the version beside them."""
        before, self._bets = self._bets, {}
        worse_ones = []
        for versions in by_model(models).values():
            rest = taking_the_rest(versions)
            if rest is None:
                continue
            for spec in versions:
                if spec is not rest and spec.share_pct and not spec.shadow:
                    key = spec.name, rest.name
                    bet = self._bets[key] = before.get(key) or _Bet()
                    worse = self._judge(key, bet, seen.get(spec.name), seen.get(rest.name))
                    worse_ones += [] if worse is None else [worse]
        return worse_ones

    def _judge(
        self, key: tuple[str, str], bet: _Bet, canary: ModelSeen | None, rest: ModelSeen | None
    ) -> WorseCanary | None:
        if canary is None or rest is None or not (canary.good + canary.bad) or not (rest.good + rest.bad):
            return None
        ended, rest_ended = canary.good + canary.bad, rest.good + rest.bad
        bet.canary = bet.canary[0] + ended, bet.canary[1] + canary.bad
        bet.rest = bet.rest[0] + rest_ended, bet.rest[1] + rest.bad
        bet.looks += 1
        bet.stock *= 1.0 + _STAKES * (canary.bad / ended - rest.bad / rest_ended)
        whole = bet.stock.mean()
        bet.stock += (whole - bet.stock) / (bet.looks + 1) ** 2
        if whole < self._enough:
            return None
        return WorseCanary(*key, *bet.canary, *bet.rest)
