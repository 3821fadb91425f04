"""The knee of the rate-share curve: the share of a GPU beyond which more compute pays less (gpulet, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

FLAT = 1e-9  # derived: a smaller gain in rate per share is rounding

Curve = Sequence[tuple[float, float]]  # (share in percent, highest rate it carries), ascending in share


def knee_by_curvature(curve: Curve) -> float:
    """Return the share at which the curve bends down most, or the largest share of a curve that never does.

    Curvature |r''| / (1 + r'^2)^1.5 from the second differences of the curve, both axes scaled to 1; only points where
    the gain per share becomes smaller count. This is the published rule. Ends of the curve have no curvature.
    """
    points = _scaled(curve)
    best, share = FLAT, curve[-1][0]
    for (x0, y0), (x1, y1), (x2, y2), (candidate, _) in zip(points, points[1:], points[2:], curve[1:], strict=False):
        before, after = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
        slope = (before + after) / 2
        bend = (before - after) / ((x2 - x0) / 2) / (1 + slope * slope) ** 1.5
        if bend > best:
            best, share = bend, candidate
    return share


def knee_by_chord(curve: Curve) -> float:
    """Return the share furthest above the straight line from the first to the last point, or the largest share.

    This other usual reading of "knee" (Satopää et al., 2011) depends less on noise at single shares.
    """
    points = _scaled(curve)
    (x0, y0), (x1, y1) = points[0], points[-1]
    best, share = FLAT, curve[-1][0]
    for (x, y), (candidate, _) in zip(points[1:-1], curve[1:-1], strict=True):
        above = y - (y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        if above > best:
            best, share = above, candidate
    return share


KNEES = {"curvature": knee_by_curvature, "chord": knee_by_chord}


def _scaled(curve: Curve) -> list[tuple[float, float]]:
    width, height = curve[-1][0], max(rate for _, rate in curve)
    return [(share / width, rate / height) for share, rate in curve]
