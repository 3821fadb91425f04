"""A plan as an SVG picture: one bar per GPU, its gpu-lets side by side by share, one colour per model; models that run
as one merged program have one label over all their colours.

Self-contained and readable on light and dark pages; the colours can be told apart with every common colour-vision
deficiency, and every part is labelled as well or has a tooltip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

from tenuto.placement.copy_times import hidden_copies_ms
from tenuto.placement.plan import Plan
from tenuto.placement.program import Gpulet, Program
from tenuto.placement.shown.table import totals_of, why_unserved

# Okabe and Ito's palette without black, then three of Tol's muted set; with more models colours repeat, labels do not.
PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#0072B2", "#DDCC77", "#882255", "#44AA99")
LIGHT_TEXT_ON = {"#0072B2", "#882255"}  # the other colours carry dark text with a contrast above 5
MOST_SINGLE_BARS = 64  # above, GPUs with the same gpu-lets share one bar
MERGED = "#e7ebef"  # behind the label of a merged program, whose models' colours are a strip below it
STRIP = 6
WIDTH = 1120
MARGIN = 20
NAME_WIDTH = 92
CHARACTER = 0.58  # mean width of a character as a part of the font size, sans-serif

STYLE = """
svg{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}
.ink{fill:#1b1f24}.faint{fill:#57606a}.frame{fill:none;stroke:#8c959f}.grid{stroke:#8c959f;stroke-opacity:.35}
.let{stroke:#1b1f24;stroke-width:1.2}.free{stroke-dasharray:4 2}
@media (prefers-color-scheme:dark){.ink{fill:#e6edf3}.faint{fill:#9198a1}.frame{stroke:#6e7681}.let{stroke:#e6edf3}}
"""


@dataclass(frozen=True)
class _Bar:
    """One bar: a GPU, or several with the same gpu-lets."""

    label: str
    detail: str
    gpulets: tuple[Gpulet, ...]


def draw(plan: Plan, colours: Mapping[str, str] | None = None) -> str:
    """Return the picture as SVG text.

    Args:
        plan: what is drawn.
        colours: CSS colours by model, for pages whose charts have some already; shown as strips below the labels, as
            nothing is known of their contrast with text.
    """
    bars = _bars(plan)
    colours = _colours(plan) if colours is None else colours
    columns = 1 if len(bars) <= 16 else 2
    per_column = -(-len(bars) // columns) if bars else 0
    row_height = 44 if len(bars) <= 16 else 27
    column_width = (WIDTH - 2 * MARGIN - (columns - 1) * 28) / columns
    head = _head(plan)
    legend, legend_height = _legend(plan, colours, MARGIN, 58)
    top = 58 + legend_height + 24
    body: list[str] = []
    for column in range(columns):
        left = MARGIN + column * (column_width + 28)
        mine = bars[column * per_column : (column + 1) * per_column]
        if mine:
            body += _axis(left + NAME_WIDTH, column_width - NAME_WIDTH, top, top + len(mine) * row_height)
        for row, bar in enumerate(mine):
            body += _bar(bar, plan, colours, left, top + row * row_height, column_width, row_height)
    foot, height = _foot(plan, top + per_column * row_height + 26)
    summary = escape(_title(plan))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} '
            f'{height:g}" role="img" aria-label="{summary}">',
            f"<title>{summary}</title><style>{STYLE}</style>",
            *head,
            *legend,
            *body,
            *foot,
            "</svg>",
            "",
        ]
    )


def _bars(plan: Plan) -> list[_Bar]:
    by_gpu = plan.by_gpu()
    if len(plan.gpus) <= MOST_SINGLE_BARS:
        return [_Bar(gpu.id, gpu.type, tuple(by_gpu[gpu.id])) for gpu in plan.gpus]
    alike: dict[tuple[object, ...], list[str]] = {}
    for gpu in plan.gpus:
        key = (gpu.type, *((g.share_pct, tuple((p.name, p.batch_size) for p in g.programs)) for g in by_gpu[gpu.id]))
        alike.setdefault(key, []).append(gpu.id)
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    return [_Bar(f"{len(ids)} GPUs", f"{types[ids[0]]}, {ids[0]} …", tuple(by_gpu[ids[0]])) for ids in alike.values()]


def _colours(plan: Plan) -> dict[str, str]:
    names = [spec.name for spec in plan.models] or [r.name for g in plan.gpulets for r in g.models]
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(dict.fromkeys(names))}


def _title(plan: Plan) -> str:
    totals = totals_of(plan)
    cost = "" if totals.cost_per_hour is None else f" · {totals.cost_per_hour:,.2f} $/h"
    return (
        f"{plan.policy.name}: {totals.goodput_rps:,.1f} of {totals.offered_rps:,.1f} rps expected · "
        f"{totals.gpus_used} of {totals.gpus} GPUs used{cost}"
    )


def _head(plan: Plan) -> list[str]:
    return [_text(MARGIN, 34, _title(plan), 17, "ink", weight=600)]


def _legend(plan: Plan, colours: Mapping[str, str], left: float, top: float) -> tuple[list[str], float]:
    """Return one entry per served model with its expected requests per second, and the height used."""
    parts: list[str] = []
    x, y = left, top
    for name in (name for name in colours if name in plan.expected.models):
        label = f"{name}  {_rate(plan.expected.models[name].goodput_rps)} rps"
        width = 16 + len(label) * 11.5 * CHARACTER + 20
        if x + width > WIDTH - MARGIN and x > left:
            x, y = left, y + 19
        parts.append(f'<rect x="{x:g}" y="{y - 10:g}" width="12" height="12" rx="2" fill="{colours[name]}"/>')
        parts.append(_text(x + 17, y, label, 11.5, "ink"))
        x += width
    return parts, (y - top + 6) if parts else 0.0


def _axis(left: float, width: float, top: float, bottom: float) -> list[str]:
    parts = []
    for percent in (0, 25, 50, 75, 100):
        x = left + width * percent / 100
        parts.append(f'<line class="grid" x1="{x:g}" x2="{x:g}" y1="{top - 5:g}" y2="{bottom - 4:g}"/>')
        anchor = "start" if percent == 0 else "end" if percent == 100 else "middle"
        parts.append(_text(x, top - 9, f"{percent} %", 10, "faint", anchor=anchor))
    return parts


def _bar(
    bar: _Bar, plan: Plan, colours: Mapping[str, str], left: float, top: float, width: float, row_height: float
) -> list[str]:
    bar_left, bar_width, height = left + NAME_WIDTH, width - NAME_WIDTH, row_height - 8
    middle = top + height / 2
    two_lines = height >= 30
    label = _fitted(bar.label, NAME_WIDTH - 8, 12)
    parts = [_text(left, middle + (-2 if two_lines else 4), label, 12, "ink", weight=600)]
    if two_lines:
        parts.append(_text(left, middle + 13, _fitted(bar.detail, NAME_WIDTH - 8, 10), 10, "faint"))
    parts.append(f'<rect class="frame" x="{bar_left:g}" y="{top:g}" width="{bar_width:g}" height="{height:g}" rx="3"/>')
    if not bar.gpulets:
        parts.append(_text(bar_left + 10, middle + 4, "idle", 11, "faint"))
    x = bar_left
    for gpulet, part in zip(bar.gpulets, _widths(bar.gpulets), strict=True):
        parts += _gpulet(gpulet, plan, colours, x, top, bar_width * part, height)
        x += bar_width * part
    return parts


def _widths(gpulets: Sequence[Gpulet]) -> list[float]:
    """Return each gpu-let's part of the bar: its share; equal parts where gpu-lets are unrestricted or over-commit."""
    if len(gpulets) > 1 and any(gpulet.share_pct is None for gpulet in gpulets):
        return [1 / len(gpulets)] * len(gpulets)
    total = max(100.0, sum(gpulet.effective_share_pct for gpulet in gpulets))
    return [gpulet.effective_share_pct / total for gpulet in gpulets]


def _gpulet(
    gpulet: Gpulet, plan: Plan, colours: Mapping[str, str], x: float, top: float, width: float, height: float
) -> list[str]:
    parts = []
    each = width / max(1, len(gpulet.models))
    at = x
    for program in gpulet.programs:
        mine = each * len(program.members)
        parts += _program(gpulet, program, plan, colours, at, top, mine, height)
        at += mine
    free = " free" if gpulet.share_pct is None else ""
    parts.append(
        f'<rect class="let{free}" x="{x:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="3" fill="none"/>'
    )
    return parts


def _program(
    gpulet: Gpulet,
    program: Program,
    plan: Plan,
    colours: Mapping[str, str],
    x: float,
    top: float,
    width: float,
    height: float,
) -> list[str]:
    shown = [colours.get(replica.name, PALETTE[0]) for replica in program.members]
    has_strip = program.is_merged or shown[0] not in PALETTE
    colour = MERGED if has_strip else shown[0]
    ink = "#ffffff" if colour in LIGHT_TEXT_ON else "#1b1f24"
    parts = [
        f"<g><title>{escape(_tooltip(gpulet, program, plan))}</title>"
        f'<rect x="{x + 0.8:g}" y="{top + 0.8:g}" width="{max(0.5, width - 1.6):g}" height="{height - 1.6:g}" '
        f'rx="2" fill="{colour}"/>'
    ]
    if has_strip:
        parts += _strip(shown, x + 0.8, top + height - 0.8 - STRIP, max(0.5, width - 1.6))
        height -= STRIP - 2
    share = "" if gpulet.share_pct is None else f" · {gpulet.share_pct:.3g} %"
    batch = f"b{program.batch_size}"
    name, room = program.name, width - 10
    if height >= 30:
        lines = [_fitted(name, room, 12), _first_fitting((f"{batch}{share}", batch), room, 10.5)]
        sizes, baselines = (12.0, 10.5), (top + height / 2 - 3, top + height / 2 + 12)
    else:
        options = (f"{name} {batch}{share}", f"{name} {batch}", name, _fitted(name, room, 10))
        lines, sizes, baselines = [_first_fitting(options, room, 10), ""], (10.0, 10.0), (top + height / 2 + 3.5, 0.0)
    for line, size, baseline in zip(lines, sizes, baselines, strict=True):
        if line:
            at = f'x="{x + 6:g}" y="{baseline:g}" font-size="{size:g}"'
            parts.append(f'<text {at} fill="{ink}">{escape(line)}</text>')
    parts.append("</g>")
    return parts


def _strip(colours: Sequence[str], x: float, top: float, width: float) -> list[str]:
    """Return the colours of a merged program's models side by side."""
    each = width / len(colours)
    return [
        f'<rect x="{x + index * each:g}" y="{top:g}" width="{each:g}" height="{STRIP:g}" fill="{colour}"/>'
        for index, colour in enumerate(colours)
    ]


def _tooltip(gpulet: Gpulet, program: Program, plan: Plan) -> str:
    batch = (
        f"one merged program, joint batch {program.batch_size}"
        if program.is_merged
        else (f"batch {program.batch_size}")
    )
    facts = [f"{program.name} on {gpulet.id}: {batch}"]
    facts.append("unrestricted" if gpulet.share_pct is None else f"share {gpulet.share_pct:g} %")
    others = [other.name for other in gpulet.programs if other.name != program.name]
    if others:
        facts.append("takes turns with " + ", ".join(others))
    if program.latency_ms is not None:
        names = {replica.name for replica in program.members}
        slo_ms = min((spec.slo_ms for spec in plan.models if spec.name in names), default=None)
        facts.append(f"{program.latency_ms:.4g} ms" + ("" if slo_ms is None else f" of {slo_ms:g} ms SLO"))
    hidden_ms = 0.0 if program.is_merged else hidden_copies_ms(plan, program.members[0]) * program.batch_size
    if hidden_ms:
        facts.append(f"{hidden_ms:.4g} ms of it copies that overlap")
    if program.rate_rps is not None:
        facts.append(f"{program.rate_rps:.4g} rps")
    if program.memory_mib is not None:
        facts.append(f"{program.memory_mib:,.0f} MiB")
    return ", ".join(facts)


def _foot(plan: Plan, top: float) -> tuple[list[str], float]:
    """Return the list of unserved models with reasons, the explanation of dashes, and the height of the picture."""
    lines = [f"unserved: {name}: {reason}" for name, reason in why_unserved(plan)]
    if any(gpulet.share_pct is None for gpulet in plan.gpulets):
        turns = any(len(gpulet.programs) > 1 for gpulet in plan.gpulets)
        lines.append("dashed frame: unrestricted gpu-let" + ("; models in one frame take turns" if turns else ""))
    if any(gpulet.merge for gpulet in plan.gpulets):
        lines.append("several colours under one label: models that run as one merged program")
    if plan.streaming:
        lines.append("streaming: each gpu-let takes the next batch while one executes")
    letters = int((WIDTH - 2 * MARGIN) / (11 * CHARACTER))
    lines = [part for line in lines for part in wrap(line, letters, subsequent_indent="\u2003")]
    parts = [_text(MARGIN, top + index * 16, line, 11, "faint") for index, line in enumerate(lines)]
    return parts, top + len(lines) * 16 + 4


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _first_fitting(options: Sequence[str], room: float, size: float) -> str:
    return next((option for option in options if len(option) * size * CHARACTER <= room), "")


def _fitted(text: str, room: float, size: float) -> str:
    """Shorten a text with an ellipsis until it fits; empty when fewer than three characters would be left."""
    characters = int(room / (size * CHARACTER))
    if len(text) <= characters:
        return text
    return text[: characters - 1] + "…" if characters >= 4 else ""


def _text(x: float, y: float, text: str, size: float, kind: str, *, weight: int = 400, anchor: str = "start") -> str:
    bold = "" if weight == 400 else f' font-weight="{weight}"'
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size:g}"{bold}{at}>{escape(text)}</text>'
