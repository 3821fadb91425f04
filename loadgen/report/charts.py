"""Small charts as inline SVG: lines, stacked bars and steps with axes, drawn without any library or script.

Every chart is 420 units wide, so that its 12-unit text stays readable on a phone. What is drawn carries a `<title>`,
which browsers show on hovering and screen readers read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from tenuto.loadgen.report.palette import Style

WIDTH = 420  # unit: pixels of a drawing
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 14, 44  # unit: margins for the labels
_MOST_POINTS = 400  # limit: points of a line; a screen shows no more


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`, about as many as asked."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"


def legend(entries: Sequence[tuple[str, Style]], *, is_line: bool = False) -> str:
    """Return a legend as HTML; every entry has a swatch and its name."""
    parts = []
    for name, style in entries:
        if is_line:
            dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
            line = f'<line x1="1" y1="5" x2="25" y2="5" stroke="{style.colour}" stroke-width="3"{dash}/>'
            mark = f'<svg width="26" height="10">{line}</svg>'
        else:
            mark = f'<svg width="12" height="12"><rect width="12" height="12" rx="2" fill="{style.colour}"/></svg>'
        parts.append(f"<span>{mark}{escape(name)}</span>")
    return f'<div class="legend">{"".join(parts)}</div>'


class Plot:
    """A chart with linear axes. Series are clipped to the ranges; the y axis starts at `y_range[0]`."""

    def __init__(
        self,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        *,
        x_label: str,
        y_label: str,
        height: int = 240,
        percent_y: bool = False,
    ) -> None:
        """Take the ranges of the axes in data units; `percent_y` labels 0.5 as 50 %."""
        self._x0, self._x1 = x_range[0], x_range[1] if x_range[1] > x_range[0] else x_range[0] + 1.0
        self._y0, self._y1 = y_range[0], y_range[1] if y_range[1] > y_range[0] else y_range[0] + 1.0
        self._height = height
        self._labels = (x_label, y_label)
        self._percent_y = percent_y
        self._parts: list[str] = []

    def _x(self, value: float) -> float:
        share = (min(max(value, self._x0), self._x1) - self._x0) / (self._x1 - self._x0)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        share = (min(max(value, self._y0), self._y1) - self._y0) / (self._y1 - self._y0)
        return self._height - _BOTTOM - share * (self._height - _TOP - _BOTTOM)

    def line(
        self, x: NDArray[np.float64], y: NDArray[np.float64], style: Style, name: str, *, width: float = 2.0
    ) -> None:
        """Draw a line; NaN interrupts it. More than 400 points are thinned out evenly."""
        step = max(1, math.ceil(len(x) / _MOST_POINTS))
        path, is_open = [], False
        for px, py in zip(x[::step].tolist(), y[::step].tolist(), strict=True):
            if math.isnan(py):
                is_open = False
                continue
            path.append(f"{'L' if is_open else 'M'}{self._x(px):.1f} {self._y(py):.1f}")
            is_open = True
        dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
        self._parts.append(
            f'<path d="{"".join(path)}" fill="none" stroke="{style.colour}" '
            f'stroke-width="{width:g}" stroke-linejoin="round"'
            f"{dash}><title>{escape(name)}</title></path>"
        )

    def dot(self, x: float, y: float, style: Style, name: str) -> None:
        """Draw a point."""
        self._parts.append(
            f'<circle cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="3.2" fill="{style.colour}">'
            f"<title>{escape(name)}</title></circle>"
        )

    def column(self, x_from: float, x_to: float, y_from: float, y_to: float, style: Style, name: str) -> None:
        """Draw a filled box."""
        left, right, top, bottom = self._x(x_from), self._x(x_to), self._y(y_to), self._y(y_from)
        self._parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(0.5, right - left):.1f}" '
            f'height="{max(0.0, bottom - top):.1f}" '
            f'fill="{style.colour}"><title>{escape(name)}</title></rect>'
        )

    def mark_x(self, x: float, label: str) -> None:
        """Draw a labelled vertical line."""
        at = self._x(x)
        anchor, shift = ("end", -4) if at > WIDTH * 0.6 else ("start", 4)
        self._parts.append(
            f'<line class="mark" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{self._height - _BOTTOM}"/>'
            f'<text class="marked" x="{at + shift:.1f}" y="{_TOP + 10}" text-anchor="{anchor}">{escape(label)}</text>'
        )

    def svg(self, title: str) -> str:
        """Return the chart; `title` is what a screen reader says."""
        grid = []
        bottom = self._height - _BOTTOM
        for value in ticks(self._y0, self._y1):
            at = self._y(value)
            text = f"{100 * value:g} %" if self._percent_y else _short(value)
            grid.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{WIDTH - _RIGHT}" y2="{at:.1f}"/>')
            grid.append(f'<text x="{_LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
        for value in ticks(self._x0, self._x1):
            at = self._x(value)
            grid.append(f'<line class="axis" x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 4}"/>')
            label = _short(value)
            within = min(at, WIDTH - 1 - 3.6 * len(label))  # the last label must not leave the picture
            grid.append(f'<text x="{within:.1f}" y="{bottom + 17}" text-anchor="middle">{label}</text>')
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        labels = (
            f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{WIDTH - _RIGHT}" y2="{bottom}"/>'
            f'<text x="{middle:.0f}" y="{self._height - 8}" text-anchor="middle">{escape(self._labels[0])}</text>'
            f'<text transform="translate(12 {(bottom + _TOP) / 2:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(self._labels[1])}</text>"
        )
        return (
            f'<svg class="chart" viewBox="0 0 {WIDTH} {self._height}" role="img" aria-label="{escape(title)}">'
            f"{''.join(grid)}{''.join(self._parts)}{labels}</svg>"
        )


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart: label, parts as (value, style, text on hovering), and what is written behind it."""

    label: str
    parts: Sequence[tuple[float, Style, str]]
    note: str = ""


def stacked_bars(rows: Sequence[Bar], title: str, *, unit: str, limit: float | None = None) -> str:
    """Return horizontal bars, one row each, with a common scale from 0 to `limit` (default: the longest bar)."""
    longest = limit if limit is not None else max((sum(p[0] for p in row.parts) for row in rows), default=0.0)
    longest = longest if longest > 0 else 1.0
    row_height, gap = 20, 22
    height = len(rows) * (row_height + gap) + 30
    span = WIDTH - 24
    parts = []
    for index, row in enumerate(rows):
        top = index * (row_height + gap) + 20
        parts.append(f'<text class="name" x="12" y="{top - 5}">{escape(row.label)}</text>')
        parts.append(f'<text x="{WIDTH - 12}" y="{top - 5}" text-anchor="end">{escape(row.note)}</text>')
        parts.append(f'<rect class="track" x="12" y="{top}" width="{span}" height="{row_height}"/>')
        left = 12.0
        for value, style, text in row.parts:
            width = max(0.0, value) / longest * span
            if width <= 0:
                continue
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{row_height}" fill="{style.colour}">'
                f"<title>{escape(text)}</title></rect>"
            )
            left += width
    axis = height - 24
    for value in ticks(0.0, longest, 4):
        at = 12 + value / longest * span
        anchor = "start" if at < 20 else "end" if at > WIDTH - 20 else "middle"
        parts.append(f'<text x="{at:.1f}" y="{axis + 16}" text-anchor="{anchor}">{_short(value)}</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
        f'<p class="unit">{escape(unit)}</p>'
    )
