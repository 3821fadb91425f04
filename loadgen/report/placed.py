"""The placement of a plan as a picture: every GPU a bar, its gpu-lets as wide as their share, their models inside;
models that run as one merged program are one line with the colours of all."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from tenuto.loadgen.report.charts import WIDTH
from tenuto.loadgen.report.palette import Style
from tenuto.placement import Gpulet, Plan
from tenuto.placement.program import Program

__all__ = ["placement_picture"]

_MOST_GPUS = 48
_ROW = 16
_SPAN = WIDTH - 24


def placement_picture(plan: Plan, styles: Mapping[str, Style]) -> str:
    """Return one SVG per GPU that hosts something, and one line about the rest."""
    used = [gpu for gpu in plan.gpus if plan.on_gpu(gpu.id)]
    pictures = [_gpu(f"{gpu.id} ({gpu.type})", plan.on_gpu(gpu.id), styles) for gpu in used[:_MOST_GPUS]]
    idle = len(plan.gpus) - len(used)
    rest = []
    if idle:
        rest.append(f"{idle} GPU{'s' if idle > 1 else ''} without a gpu-let.")
    if len(used) > _MOST_GPUS:
        rest.append(f"{len(used) - _MOST_GPUS} more GPUs are not drawn.")
    if plan.unserved:
        rest.append(f"Unserved: {', '.join(plan.unserved)}.")
    if any(gpulet.merge for gpulet in plan.gpulets):
        rest.append("Several colours before one name: models that run as one merged program.")
    if plan.streaming:
        rest.append("Streaming: each gpu-let takes the next batch while one executes.")
    under = f'<p class="note">{escape(" ".join(rest))}</p>' if rest else ""
    return f'<div class="gpus">{"".join(pictures)}</div>{under}'


def _gpu(title: str, gpulets: tuple[Gpulet, ...], styles: Mapping[str, Style]) -> str:
    programs = {gpulet.id: gpulet.programs for gpulet in gpulets}
    rows = max(map(len, programs.values()))
    height = 22 + rows * _ROW + 20
    free = max(0.0, 100.0 - sum(g.share_pct or 0.0 for g in gpulets))
    unrestricted = [g for g in gpulets if g.share_pct is None]
    # Unrestricted gpu-lets have no share of their own: they divide what is left, and say so.
    widths = {g.id: g.share_pct if g.share_pct is not None else free / len(unrestricted) for g in gpulets}
    scale = _SPAN / max(100.0, sum(widths.values()))
    parts = [
        f'<text class="name" x="12" y="14">{escape(title)}</text>',
        f'<rect class="track" x="12" y="20" width="{_SPAN}" height="{rows * _ROW + 18}"/>',
    ]
    left = 12.0
    for gpulet in gpulets:
        width = max(2.0, widths[gpulet.id] * scale)
        share = "unrestricted" if gpulet.share_pct is None else f"{gpulet.share_pct:g} %"
        parts.append(
            f"<g><title>{escape(gpulet.id)}: {share}</title>"
            f'<rect class="gpulet" x="{left + 0.5:.1f}" y="20.5" width="{width - 1:.1f}" height="{rows * _ROW + 17}"/>'
        )
        parts.append(_fitting(share, left + 5, 33, width - 8, "shared"))
        for index, program in enumerate(programs[gpulet.id]):
            top = 37 + index * _ROW
            parts += _colours(program, styles, left + 3, top)
            parts.append(_fitting(f"{program.name} ×{program.batch_size}", left + 12, top + 11, width - 15, "hosted"))
        parts.append("</g>")
        left += width
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return f"{head}{''.join(parts)}</svg>"


def _colours(program: Program, styles: Mapping[str, Style], x: float, top: float) -> list[str]:
    """Return the colours of a program's models, one above the other."""
    each = (_ROW - 3) / len(program.members)
    shown = [styles.get(replica.name, Style("var(--muted)")).colour for replica in program.members]
    return [
        f'<rect x="{x:.1f}" y="{top + index * each:g}" width="5" height="{each:g}" fill="{colour}"/>'
        for index, colour in enumerate(shown)
    ]


def _fitting(text: str, x: float, y: float, room: float, kind: str) -> str:
    """Return the text cut to the room there is, at 6.1 units a letter; the whole of it shows on hovering."""
    letters = int(room / 6.1)
    if letters < 2:
        return f"<title>{escape(text)}</title>"
    shown = text if len(text) <= letters else text[: letters - 1] + "…"
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(shown)}<title>{escape(text)}</title></text>'
