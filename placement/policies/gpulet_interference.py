"""What a gpu-let's neighbours cost in gpulet's planning: the linear model of its paper, on one GPU of two gpu-lets.

Kept behind `Slowdown`, so that another model can take its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tenuto.errors import MissingProfileError
from tenuto.profiles import ModelProfile

__all__ = ["V100_PAIRS", "Linear", "Running", "Slowdown", "no_interference"]


@dataclass(frozen=True)
class Running:
    """A batch that runs on a share of a GPU."""

    model: ModelProfile
    batch_size: int
    share_pct: float


Slowdown = Callable[[Running, Running], float]
"""The factor (1.0: none, inf: unknown) by which the second batch slows down the first."""


def no_interference(own: Running, other: Running) -> float:  # noqa: ARG001
    """Return 1: gpu-lets do not disturb each other."""
    return 1.0


@dataclass(frozen=True)
class Linear:
    """factor = c1*l2_own + c2*l2_other + c3*dram_own + c4*dram_other + c5, at least 1 (Choi et al., section 4.3).

    Utilisations are fractions, measured alone on the share (the metrics `l2_util_pct` and `dram_util_pct` of the
    profile). A batch whose utilisation is unknown counts as unbearable, so that it never gets a neighbour unseen.
    """

    l2_own: float
    l2_other: float
    dram_own: float
    dram_other: float
    constant: float

    def __call__(self, own: Running, other: Running) -> float:
        try:
            factor = (
                self.l2_own * _fraction(own, "l2_util_pct") + self.l2_other * _fraction(other, "l2_util_pct")
                + self.dram_own * _fraction(own, "dram_util_pct") + self.dram_other * _fraction(other, "dram_util_pct")
                + self.constant
            )
        except MissingProfileError:
            return math.inf
        return max(1.0, factor)


def _fraction(running: Running, metric: str) -> float:
    return running.model.metric(metric, running.batch_size, running.share_pct) / 100.0


# Least squares over the 1,200 slowdowns of the 600 published V100 pair measurements (igniter repository, commit
# b1ff2ab). Fitted on 70 % of them and judged on the rest, the error is 2.8 % in the mean and 5.9 % at p90.
V100_PAIRS = Linear(-0.01678401, -0.00995225, -0.03668265, 0.12518395, 1.08423643)
