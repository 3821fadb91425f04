"""Lines, files and arrows of the rooms that CONTRIBUTING gives marks, and the table that shows them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenuto_lab.house.lines import proper_lines
from tenuto_lab.house.sources import Source

_ROW = re.compile(r"^\| (?P<rooms>[^|]+) \| (?P<mark>[\d.]+) \| (?P<figures>[^|]*) \| (?P<why>.*) \|$", re.M)
_NEAR = 0.1  # the part of a figure by which it may be off


@dataclass(frozen=True)
class RoomFigures:
    """Lines of code proper, files, and arrows: imports from one file of these rooms to another."""

    lines: int
    files: int
    arrows: int

    def __str__(self) -> str:
        return f"{self.lines:,} / {self.files} / {self.arrows}"

    def is_near(self, text: str) -> bool:
        """Whether a cell of the table is as good as these figures: each within a tenth, or by three."""
        told = [int(part.replace(",", "")) for part in text.split(" / ")] if text.strip() else []
        own = (self.lines, self.files, self.arrows)
        return len(told) == len(own) and all(abs(a - b) <= max(3.0, _NEAR * b) for a, b in zip(told, own, strict=True))


def figures_of(sources: Iterable[Source]) -> RoomFigures:
    """Return the figures of some modules together."""
    modules = {_module(source.path): source for source in sources}
    arrows = sum(len((_imported(source.text) & modules.keys()) - {name}) for name, source in modules.items())
    return RoomFigures(sum(proper_lines(source.text) for source in modules.values()), len(modules), arrows)


def rooms_named(cell: str, sources: Sequence[Source]) -> list[Source]:
    """Return the modules of the rooms that a cell names: "`a/` root" is the files of a folder itself, "`a/b`, `c`" the
    rooms b and c of a folder.

    Raises:
        LookupError: a room has no module.
    """
    found: list[Source] = []
    folder = ""
    for name, root in re.findall(r"`?([\w/]+)`?( root)?", cell):
        place = Path(name if "/" in name or not folder else f"{folder}/{name}")
        folder = place.parts[0]
        own = [source for source in sources if source.path.is_relative_to(place)]
        if root:
            own = [source for source in own if source.path.parent == place]
        if not own:
            raise LookupError(f"CONTRIBUTING gives '{place}' a mark, and there is no such room")
        found += own
    return found


def with_figures(text: str, sources: Sequence[Source]) -> tuple[str, Mapping[str, RoomFigures]]:
    """Return CONTRIBUTING with present figures in the rows of its marks that are too far off, and these figures."""
    before, heading, marks = text.partition("\n## Marks\n")
    stale: dict[str, RoomFigures] = {}

    def renewed(row: re.Match[str]) -> str:
        figures = figures_of(rooms_named(row["rooms"], sources))
        if figures.is_near(row["figures"]):
            return row[0]
        stale[row["rooms"]] = figures
        return f"| {row['rooms']} | {row['mark']} | {figures} | {row['why']} |"

    return before + heading + _ROW.sub(renewed, marks), stale


def _module(path: Path) -> str:
    """Return the name by which a module is imported; those of the machine lie below `tenuto`."""
    parts = path.with_suffix("").parts
    inside = parts[1:] if parts[0] == "lab" else parts if parts[0] in ("tenuto", "tests") else ("tenuto", *parts)
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


def _imported(text: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found
