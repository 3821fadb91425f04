"""The style of a series: one colour per model, the same in every chart. Colour-blind readers can tell the colours
apart.

Models take the colours in the order of the workload; from the ninth on the colours repeat, darker or lighter and with
another line pattern. `templates/colours.css` has the colours themselves, in a light and a dark set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_COLOURS = 8  # format: number of colours in colours.css


@dataclass(frozen=True)
class Style:
    """How one series is drawn: a CSS colour and a dash pattern."""

    colour: str
    dash: str = ""


Styles = Mapping[str, Style]


def named(word: str) -> Style:
    """Return the style of an outcome or of a stage of a request; colours.css has a colour of that name."""
    return Style(f"var(--{word})")


def styles_for(names: Sequence[str]) -> dict[str, Style]:
    """Return the style of each name, by its place in the list."""
    return {name: _style(index) for index, name in enumerate(names)}


def _style(index: int) -> Style:
    turn, place = divmod(index, _COLOURS)
    colour = f"var(--m{place})"
    if turn:
        colour = f"color-mix(in srgb, {colour} 50%, var({'--text' if turn % 2 else '--back'}))"
    return Style(colour, _DASHES[turn % len(_DASHES)])
