"""Which batch size to measure next, and when the rest may be left to interpolation. Pure arithmetic.

The rule for each share: the smallest and the largest batch are measured first. Each other batch has two predictions:
the line through its measured neighbours, and the least-squares line through all points. The batch at which the two
disagree most is measured next. While there is no line through all points yet, it is the batch halfway between two
measured ones. When the predictions nowhere disagree by more than the tolerance, the rest is left out, because a profile
interpolates between neighbours anyhow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tenuto.profiles.measuring.timing import fit_line


def next_batch(sizes: Collection[int], measured_ms: Mapping[int, float], tolerance_pct: float) -> int | None:
    """Return the batch size to measure next, or None if predictions agree within the tolerance for all that are left.

    Args:
        sizes: batch sizes asked for, measured or not.
        measured_ms: latency in ms by batch size, of this share.
        tolerance_pct: largest disagreement in percent at which a batch is left out; 0 measures all, ascending.
    """
    left = sorted(set(sizes) - set(measured_ms))
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
