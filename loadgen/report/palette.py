"""Colours of the report: one per model, the same in every chart, told apart by colour-blind readers and on paper.

Models take the Okabe-Ito colours in the order of the workload; from the ninth on the colours repeat, darker or
lighter and with another line pattern. Colours are CSS variables, so that the page can follow the reader's light or
dark setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Okabe and Ito's set (jfly.uni-koeln.de/color); yellow is darkened on white and black lightened on dark for contrast.
_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#000000", "#e69f00")
_DARK = ("#4aa3df", "#ff8a3d", "#2fd3a0", "#e39fc4", "#f0e442", "#8fd3ff", "#e6e6e6", "#ffc24d")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")

# Outcomes and stages differ in lightness too, and always carry a legend.
OUTCOME_COLOURS = {
    "ok": "--ok",
    "late": "--late",
    "expired": "--expired",
    "rejected": "--rejected",
    "failed": "--failed",
}
STAGE_COLOURS = {"batching": "--s0", "gpulet_queue": "--s1", "execution": "--s2", "front_door": "--s3"}
_OTHERS_LIGHT = {
    "--ok": "#2a7f8e",
    "--late": "#f2c14e",
    "--expired": "#e8743b",
    "--rejected": "#8e5bb5",
    "--failed": "#3b3b3b",
    "--s0": "#a6cee3",
    "--s1": "#fdbf6f",
    "--s2": "#1f5a8a",
    "--s3": "#b3b3b3",
}
_OTHERS_DARK = {
    "--ok": "#3fb0c2",
    "--late": "#f5d174",
    "--expired": "#f08a55",
    "--rejected": "#b48ad6",
    "--failed": "#c9c9c9",
    "--s0": "#bfe0ef",
    "--s1": "#ffcf8a",
    "--s2": "#4a90c9",
    "--s3": "#8c8c8c",
}


@dataclass(frozen=True)
class Style:
    """How one series is drawn: a CSS colour and a dash pattern."""

    colour: str
    dash: str = ""


def styles_for(names: Sequence[str]) -> dict[str, Style]:
    """Return the style of each name, by its place in the list."""
    return {name: _style(index) for index, name in enumerate(names)}


def _style(index: int) -> Style:
    turn, place = divmod(index, len(_LIGHT))
    colour = f"var(--m{place})"
    if turn:
        colour = f"color-mix(in srgb, {colour} 50%, var({'--text' if turn % 2 else '--back'}))"
    return Style(colour, _DASHES[turn % len(_DASHES)])


def colour_css(*, dark: bool) -> str:
    """Return the CSS declarations of every colour."""
    models = _DARK if dark else _LIGHT
    others = _OTHERS_DARK if dark else _OTHERS_LIGHT
    declared = {f"--m{index}": colour for index, colour in enumerate(models)} | others
    return "".join(f"{name}:{colour};" for name, colour in declared.items())
