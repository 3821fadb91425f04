"""What the sections of the pages are made of: figures, tables, and the charts that models and applications share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.loadgen.report.charts import Bar, Plot, legend, stacked_bars
from tenuto.loadgen.report.palette import OUTCOME_COLOURS, STAGE_COLOURS, Style

Styles = Mapping[str, Style]
STAGES = {
    "batching": "waiting for a batch",
    "gpulet_queue": "queue at the gpu-let",
    "execution": "execution",
    "front_door": "front door",
}
OFFERED = Style("var(--muted)")


def figure(heading: str, body: str, note: str = "", *, wide: bool = False) -> str:
    """Wrap a chart with its heading and a sentence of explanation."""
    under = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<figure{' class=wide' if wide else ''}><figcaption>{escape(heading)}</figcaption>{body}{under}</figure>"


def table(heads: Sequence[str], rows: Iterable[Iterable[str]], *, words: Collection[str] = ()) -> str:
    """Return a table that scrolls by itself; cells are HTML, and the columns `words` are aligned left."""
    kinds = [" class=word" if head in words else "" for head in heads]
    head = "".join(f"<th{kind}>{text}</th>" for kind, text in zip(kinds, heads, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, cells, strict=True)) + "</tr>"
        for cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def how_it_was_made(document: Mapping[str, Any], settings: Mapping[str, Any], **more: str) -> str:
    """Return the section with command, settings, machine and versions of a document, and what else there is to tell."""
    rows = {
        "command": " ".join(document.get("command", [])),
        "settings": listed(settings),
        **more,
        "hardware": ", ".join(f"{key} {value}" for key, value in (document.get("hardware") or {}).items() if value),
        "versions": listed(document.get("versions") or {}),
    }
    made = {key.replace("_", " "): f"<code>{escape(text)}</code>" for key, text in rows.items() if text}
    return f"<h2>How it was made</h2>{facts(made)}"


def facts(rows: Mapping[str, str]) -> str:
    """Return a table of names, each with its HTML beside it."""
    found = "".join(f"<tr><th>{escape(name)}</th><td>{text}</td></tr>" for name, text in rows.items())
    return f'<table class="left"><tbody>{found}</tbody></table>'


def listed(values: Mapping[str, Any]) -> str:
    """Return `key value, key value`, without what is None."""
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)


def swatch(style: Style) -> str:
    """Return a colour as HTML, to stand before a name."""
    return f'<i style="background:{style.colour}"></i>'


def number(value: float | None) -> str:
    """Return a number with one digit; a dash where there is none."""
    return "–" if value is None else f"{value:.1f}"


def in_time(attainment: float | None) -> str:
    """Return an attainment in percent; a dash where nothing was offered."""
    return "–" if attainment is None else f"{100 * attainment:.2f} %"


def outcome_bar(name: str, row: Mapping[str, Any], note: str) -> Bar:
    """Return how the requests of a model or an application ended, in percent of the offered ones."""
    total = row["offered"] or 1
    parts = [
        (100.0 * row[word] / total, Style(f"var({colour})"), f"{name}: {row[word]} {word}")
        for word, colour in OUTCOME_COLOURS.items()
    ]
    return Bar(name, parts, note)


def outcome_figure(heading: str, title: str, bars: Sequence[Bar]) -> str:
    """Return the chart of those bars."""
    words = legend([(word, Style(f"var({colour})")) for word, colour in OUTCOME_COLOURS.items()])
    return figure(heading, words + stacked_bars(bars, title, unit="percent of the offered requests", limit=100.0))


def stage_bars(
    models: Iterable[tuple[str, Mapping[str, float | None] | None]], stages: Mapping[str, str] = STAGES
) -> list[Bar]:
    """Return the 95th percentiles in ms of the stages, each with its words, of every model that has any."""
    bars = []
    for name, split in models:
        parts = [
            (value, Style(f"var({STAGE_COLOURS[key]})"), f"{name}: {words} {value:.1f} ms")
            for key, words in stages.items()
            if (value := (split or {}).get(key)) is not None
        ]
        if parts:
            bars.append(Bar(name, parts, " + ".join(f"{value:.1f}" for value, _, _ in parts)))
    return bars


def stage_figure(
    heading: str, title: str, bars: Sequence[Bar], note: str = "", stages: Mapping[str, str] = STAGES
) -> str:
    """Return the chart of those bars."""
    words = legend([(text, Style(f"var({STAGE_COLOURS[key]})")) for key, text in stages.items()])
    return figure(heading, words + stacked_bars(bars, title, unit="ms, 95th percentile of each stage"), note)


def latency_figure(
    heading: str,
    title: str,
    curves: Sequence[tuple[str, NDArray[np.float64], NDArray[np.float64]]],
    styles: Styles,
    note: str,
    *,
    by_slo: bool = True,
) -> str:
    """Return the chart of latency distributions: name, latencies (multiples of the SLO, or ms), shares of offered."""
    longest = max(float(x[-1]) for _, x, _ in curves)
    plot = Plot(
        (0.0, max(1.2, min(longest, 3.0)) if by_slo else longest),
        (0.0, 1.0),
        x_label="latency as a multiple of the SLO" if by_slo else "latency in ms",
        y_label="share of offered",
        percent_y=True,
    )
    for name, values, shares in curves:
        plot.line(np.append(0.0, values), np.append(0.0, shares), styles[name], name)
    if by_slo:
        plot.mark_x(1.0, "SLO")
    words = legend([(name, styles[name]) for name, _, _ in curves], is_line=True)
    return figure(heading, words + plot.svg(title), note)


def rate_figure(
    heading: str,
    title: str,
    at_s: NDArray[np.float64],
    offered_rps: NDArray[np.float64],
    ok_rps: NDArray[np.float64],
    style: Style,
    words: str,
    *,
    end_s: float,
    begin_s: float,
    height: int = 240,
) -> str:
    """Return the chart of the offered and the ok rate over time; `words` names the latter, `begin_s` ends warm-up."""
    top = float(max(offered_rps.max(initial=0.0), 1e-9)) * 1.08
    plot = Plot((0.0, end_s), (0.0, top), x_label="scheduled time in s", y_label="requests per second", height=height)
    plot.line(at_s, offered_rps, OFFERED, "offered", width=5.0)
    plot.line(at_s, ok_rps, style, "answered in time")
    if begin_s > 0:
        plot.mark_x(begin_s, "warm-up ends")
    return figure(heading, legend([("offered", OFFERED), (words, style)], is_line=True) + plot.svg(title))
