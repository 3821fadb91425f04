"""Least-squares fits of interference models from raw measurements.

iGniter does not print how its hardware coefficients were fitted. Our reading scales delays by the frequency, and
continues the power demand from the measurements below 0.98 of the cap. It was found by trying which reading gives the
published numbers. It agrees with them; that it is the authors' own is not known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tenuto.errors import refused


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return (slope, intercept) of the least-squares line.

    Raises:
        InvalidInputError: fewer than two different x, or lengths that differ.
    """
    if len(x) != len(y) or len(set(x)) < 2:
        rule = "a line needs two different x and a y for each"
        raise refused("measurements", f"{len(x)} x, {len(y)} y", rule, "Measure more points.")
    matrix = np.column_stack([np.asarray(x, dtype=float), np.ones(len(x))])
    solution = np.linalg.lstsq(matrix, np.asarray(y, dtype=float), rcond=None)[0]
    return float(solution[0]), float(solution[1])


def scheduling_line(delays_ms: Sequence[float], speeds: Sequence[float]) -> tuple[float, float]:
    """Return iGniter's alpha_sch and beta_sch in ms per kernel (eq. 6).

    Args:
        delays_ms: measured delay per kernel with 1, 2, 3, … residents; the line goes through the delays that further
            residents add.
        speeds: f/F of each measurement; a delay measured while throttled is longer by its inverse (eq. 4).
    """
    full = [delay * speed for delay, speed in zip(delays_ms, speeds, strict=True)]
    counts = [float(count) for count in range(2, len(full) + 1)]
    return fit_line(counts, [delay - full[0] for delay in full[1:]])


def demand_from_power(power_w: Sequence[float], cap_w: float, residents: int) -> float:
    """Return the power in W that equal residents ask for; a throttled GPU shows only the cap.

    The mean growth per resident of the unthrottled measurements is continued. These must come first in `power_w` (1, 2,
    3, … residents), and are those below 0.98 of the cap.

    Raises:
        InvalidInputError: fewer than two unthrottled measurements.
    """
    below = [power for power in power_w if power < 0.98 * cap_w]
    if len(below) < 2:
        raise refused("measurements", list(power_w), "needs two below the power cap", "Add some.")
    return below[0] + (residents - 1) * (below[-1] - below[0]) / (len(below) - 1)


def frequency_slope(demand_w: Sequence[float], frequency_mhz: Sequence[float], cap_w: float, top_mhz: float) -> float:
    """Return iGniter's alpha_f in MHz per W of demand above the cap (eq. 9), the line through (cap, top frequency).

    Raises:
        InvalidInputError: no measurement is above the cap.
    """
    pairs = [(w - cap_w, f - top_mhz) for w, f in zip(demand_w, frequency_mhz, strict=True) if w > cap_w]
    if not pairs:
        raise refused("measurements", list(demand_w), f"none above {cap_w:g} W", "Load it more.")
    return sum(w * f for w, f in pairs) / sum(w * w for w, _ in pairs)
