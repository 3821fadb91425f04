"""The first-fit baselines of iGniter's paper: its shares on the first GPU where they fit, and its lower bounds."""

from __future__ import annotations

from tenuto_lab.baselines.igniter.igniter import Igniter
from tenuto_lab.baselines.igniter.packing import OpenGpu
from tenuto_lab.baselines.igniter.shares import ShareDemand, Shares


def lower_bounds(gpu: OpenGpu, demand: ShareDemand) -> Shares | None:
    """Return the shares of a GPU with one more resident at its lower bound, the others as they are; or None."""
    shares = (*gpu.shares, demand.lower_units or demand.most_units)
    return shares if sum(shares) <= demand.most_units else None


class FirstFitPlusPlus(Igniter):
    """Places models, largest lower bound of the share first, on the first GPU where they fit; shares as iGniter's."""

    name = "ffd++"
    summary = "first-fit decreasing with iGniter's shares under interference"
    source = "the baseline FFD++ of iGniter (arXiv 2211.01713), section 5"
    readings = "as igniter"
    _first = True


class FirstFitPlus(Igniter):
    """Places models on the first GPU where they fit with the lower bound of their share (Theorem 1), as if alone."""

    name = "ffd+"
    summary = "first-fit decreasing with iGniter's lower bounds of the shares, without regard to interference"
    source = "the baseline FFD+ of iGniter (arXiv 2211.01713), section 5"
    readings = "as igniter; the latencies it believes in include interference, its shares do not"
    _first = True
    _notes = ("shares are lower bounds; the latencies the policy believes in include interference",)

    def _attempt(self, gpu: OpenGpu, demand: ShareDemand) -> Shares | None:
        return lower_bounds(gpu, demand)
