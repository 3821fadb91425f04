"""Which batch size to measure next, and when the rest may be left to interpolation. Pure arithmetic.

The rule, per share: the smallest and the largest batch first; then always the batch at which the two ways to predict it
from what is measured disagree most, namely the line through its measured neighbours and the least-squares line through
all points; halfway in size between two measured ones where no line through all is known yet. When they disagree nowhere
by more than the tolerance, the rest is left out: looking it up interpolates between the neighbours anyhow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tenuto.profiles.measuring.timing import fit_line


def next_batch(wanted: Collection[int], measured_ms: Mapping[int, float], tolerance_pct: float) -> int | None:
    """Return the batch size to measure next, or None when nothing is left that would teach more than the tolerance.

    Args:
        wanted: batch sizes asked for, measured or not.
        measured_ms: latency in ms by batch size, of this share.
        tolerance_pct: largest disagreement in percent at which a batch is left out; 0 measures all, ascending.
    """
    left = sorted(set(wanted) - set(measured_ms))
    if not left or tolerance_pct <= 0:
        return left[0] if left else None
    if not measured_ms or left[0] < min(measured_ms):
        return left[0]
    if left[-1] > max(measured_ms):
        return left[-1]
    if len(measured_ms) < 3:
        low, high = min(measured_ms), max(measured_ms)
        return min(left, key=lambda size: (abs(size - (low * high) ** 0.5), size))
    line = fit_line(list(measured_ms.items()))
    if line is None:
        return left[0]
    alpha, beta = line[:2]

    def disagreement_pct(size: int) -> float:
        low = max(b for b in measured_ms if b < size)
        high = min(b for b in measured_ms if b > size)
        between = measured_ms[low] + (measured_ms[high] - measured_ms[low]) * (size - low) / (high - low)
        return 100.0 * abs(alpha * size + beta - between) / between

    worst = max(left, key=lambda size: (disagreement_pct(size), -size))
    return worst if disagreement_pct(worst) > tolerance_pct else None
