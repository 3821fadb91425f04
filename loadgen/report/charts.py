"""Small charts: lines, stacked bars and columns with axes. `templates/charts.html` draws them as inline SVG.

Every chart is 420 units wide, so that its 12-unit text stays readable on a phone. Every drawn part has a `<title>`,
which browsers show on hovering and screen readers read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.loadgen.report.palette import Style

_WIDTH = 420  # unit: width of the drawing
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 14, 44  # unit: margins for the labels
_MOST_POINTS = 400  # format: points of a line; a screen shows no more
_EVERY_BAR = 42  # unit: height of a bar with its label


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
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


class Plot:
    """A chart with linear axes. Series are clipped to the ranges; the y axis starts at `y_range[0]`.

    `columns`, `lines`, `dots` and `marks` list the drawn parts by kind, in the form that the template needs.
    """

    kind = "plot"
    width, left, right, top = _WIDTH, _LEFT, _WIDTH - _RIGHT, _TOP

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
        self.height, self.bottom = height, height - _BOTTOM
        self.x_label, self.y_label = x_label, y_label
        self._percent_y = percent_y
        self.columns: list[tuple[Any, ...]] = []
        self.lines: list[tuple[Any, ...]] = []
        self.dots: list[tuple[Any, ...]] = []
        self.marks: list[tuple[Any, ...]] = []
        self.legend: dict[str, Style] = {}

    def _x(self, value: float) -> float:
        share = (min(max(value, self._x0), self._x1) - self._x0) / (self._x1 - self._x0)
        return round(self.left + share * (self.right - self.left), 1)

    def _y(self, value: float) -> float:
        share = (min(max(value, self._y0), self._y1) - self._y0) / (self._y1 - self._y0)
        return round(self.bottom - share * (self.bottom - self.top), 1)

    def line(
        self,
        x: NDArray[np.float64],
        y: NDArray[np.float64],
        style: Style,
        name: str,
        *,
        width: float = 2.0,
        hover: str = "",
    ) -> None:
        """Draw a line with its name in the legend; NaN interrupts it. More than 400 points are thinned out evenly."""
        step = max(1, math.ceil(len(x) / _MOST_POINTS))
        path, is_open = [], False
        for px, py in zip(x[::step].tolist(), y[::step].tolist(), strict=True):
            if not math.isnan(py):
                path.append(f"{'L' if is_open else 'M'}{self._x(px)} {self._y(py)}")
            is_open = not math.isnan(py)
        self.lines.append(("".join(path), style, width, hover or name))
        self.legend[name] = style

    def dot(self, x: float, y: float, style: Style, hover: str) -> None:
        """Draw a point."""
        self.dots.append((self._x(x), self._y(y), style, hover))

    def column(self, x_from: float, x_to: float, y: float, style: Style, hover: str) -> None:
        """Draw a box from the axis up to `y`."""
        left, top = self._x(x_from), self._y(y)
        width, height = max(0.5, self._x(x_to) - left), max(0.0, self.bottom - top)
        self.columns.append((left, top, round(width, 1), round(height, 1), style, hover))

    def mark_x(self, x: float, label: str) -> None:
        """Draw a labelled vertical line."""
        at = self._x(x)
        self.marks.append((at, *((at - 4, "end") if at > _WIDTH * 0.6 else (at + 4, "start")), label))

    def y_ticks(self) -> list[tuple[float, str]]:
        """Return heights with their labels."""
        values = ticks(self._y0, self._y1)
        return [(self._y(value), f"{100 * value:g} %" if self._percent_y else _short(value)) for value in values]

    def x_ticks(self) -> list[tuple[float, float, str]]:
        """Return places, where the label is centred, and the labels; the last label stays in the picture."""
        marks = [(self._x(value), _short(value)) for value in ticks(self._x0, self._x1)]
        return [(at, min(at, round(_WIDTH - 1 - 3.6 * len(label), 1)), label) for at, label in marks]


@dataclass(frozen=True)
class BarPart:
    """A part of a bar. Its name stands in the legend, unless it is empty; `hover` is shown on hovering."""

    name: str
    value: float
    style: Style
    hover: str


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart: a label, parts, and a note behind the bar."""

    label: str
    parts: Sequence[BarPart]
    note: str = ""


class Bars:
    """Horizontal stacked bars, one row each, with a common scale from 0 to `limit` (default: the longest bar)."""

    kind = "bars"
    width, left, span = _WIDTH, 12, _WIDTH - 24

    def __init__(self, rows: Iterable[Bar], *, unit: str, limit: float | None = None) -> None:
        """`unit` stands below the scale."""
        self._rows, self.unit = tuple(rows), unit
        longest = max((sum(part.value for part in row.parts) for row in self._rows), default=0.0)
        self._limit = (longest if limit is None else limit) or 1.0
        self.height = len(self._rows) * _EVERY_BAR + 30
        self.legend = {part.name: part.style for row in self._rows for part in row.parts if part.name}

    def __bool__(self) -> bool:
        return any(row.parts for row in self._rows)

    def rows(self) -> list[tuple[int, Bar, list[tuple[float, float, BarPart]]]]:
        """Return for every row: its top, the bar, and left side and width of each part."""
        table_rows = []
        for index, row in enumerate(self._rows):
            left, placed = float(self.left), []
            for part in row.parts:
                width = max(0.0, part.value) / self._limit * self.span
                if width > 0:
                    placed.append((round(left, 1), round(width, 1), part))
                left += width
            table_rows.append((index * _EVERY_BAR + 20, row, placed))
        return table_rows

    def x_ticks(self) -> list[tuple[float, str, str]]:
        """Return places, the anchors of labels, and the labels."""
        marks = []
        for value in ticks(0.0, self._limit, 4):
            at = round(self.left + value / self._limit * self.span, 1)
            anchor = "start" if at < 20 else "end" if at > _WIDTH - 20 else "middle"
            marks.append((at, anchor, _short(value)))
        return marks


@dataclass(frozen=True)
class Figure:
    """A chart with a heading and a note below; or a sentence that says why there is no chart.

    `title` is the text for screen readers.
    """

    heading: str
    drawing: Plot | Bars | str
    title: str = ""
    note: str = ""
