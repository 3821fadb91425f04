"""Small line pictures over time as SVG, panels above each other with one time axis; no plotting library needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Panel", "Series", "draw"]

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, GAP, BOTTOM = 860, 190, 70, 20, 48, 42, 46


@dataclass(frozen=True)
class Series:
    """One line: `steps` holds each value until its time (a window's end), `bars` draws from zero."""

    label: str
    times: Sequence[float]
    values: Sequence[float]
    colour: str
    steps: bool = False
    bars: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines on one scale."""

    title: str
    series: Sequence[Series]


def draw(title: str, panels: Sequence[Panel], time_label: str) -> str:
    """Return the picture as SVG text."""
    end = max(max(line.times) for panel in panels for line in panel.series)
    inner = WIDTH - LEFT - RIGHT
    height = TOP + len(panels) * PANEL_HEIGHT + (len(panels) - 1) * GAP + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        top = TOP + number * (PANEL_HEIGHT + GAP)
        parts += _panel(panel, top, end, inner)
    bottom = height - BOTTOM
    for tick in _ticks(0.0, end):
        x = LEFT + inner * tick / end
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{LEFT + inner / 2}" y="{bottom + 36}" text-anchor="middle">{escape(time_label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, top: float, end: float, inner: float) -> list[str]:
    values = [value for line in panel.series for value in line.values]
    ticks = _ticks(min(0.0, *values), max(max(values), 1e-9))
    low, high = min(ticks[0], 0.0), max(ticks[-1], max(values))

    def y(value: float) -> float:
        return top + PANEL_HEIGHT * (high - value) / (high - low)

    parts = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{escape(panel.title)}</text>']
    for tick in ticks:
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + inner}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for line in panel.series:
        parts.append(_line(line, y, end, inner))
    parts.append(f'<line x1="{LEFT}" x2="{LEFT + inner}" y1="{y(0):.1f}" y2="{y(0):.1f}" stroke="#555"/>')
    x = LEFT + inner
    for line in reversed(panel.series):
        parts.append(f'<text x="{x}" y="{top - 8}" text-anchor="end" fill="{line.colour}">{escape(line.label)}</text>')
        x -= 7 * len(line.label) + 16
    return parts


def _line(line: Series, y: object, end: float, inner: float) -> str:
    assert callable(y)
    points: list[tuple[float, float]] = []
    before = 0.0
    bars = []
    for time, value in zip(line.times, line.values, strict=True):
        left, right = LEFT + inner * before / end, LEFT + inner * time / end
        if line.bars:
            upper, lower = sorted((y(value), y(0.0)))
            bars.append(f"M{left + 1:.1f} {lower:.1f}V{upper:.1f}H{right - 1:.1f}V{lower:.1f}Z")
        if line.steps:
            points.append((left, y(value)))
        points.append((right, y(value)))
        before = time
    if line.bars:
        return f'<path d="{"".join(bars)}" fill="{line.colour}"/>'
    path = "L".join(f"{x:.1f} {height:.1f}" for x, height in points)
    return f'<path d="M{path}" fill="none" stroke="{line.colour}" stroke-width="1.8" stroke-linejoin="round"/>'


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round values from at or below `low` to at or below `high`."""
    span = max(high - low, 1e-9)
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first, last = math.floor(low / step + 1e-9), math.floor(high / step + 1e-9)
    return [round(step * number, 10) for number in range(first, last + 1)]
