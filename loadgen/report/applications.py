"""The sections of the report about applications: how their requests ended end to end, beside the models' own rows."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import numpy as np

from tenuto.loadgen.report.charts import Bar, Plot, legend, stacked_bars
from tenuto.loadgen.report.palette import OUTCOME_COLOURS, Style
from tenuto.loadgen.report.sections import figure
from tenuto.loadgen.report.series import bin_edges_ms, cdf
from tenuto.loadgen.run import Run
from tenuto.outcome import Outcome

__all__ = ["application_table", "applications", "stage_note"]

Styles = Mapping[str, Style]
_OFFERED = Style("var(--muted)")
_JUDGED = (
    "A request of an application is in time when every answer of every stage was there within its SLO, counted from "
    "its scheduled time. That end-to-end criterion is the verdict's; stages are not judged by themselves."
)


def application_table(run: Run, styles: Styles) -> str:
    """Return the table of the applications with its heading; empty where there are none."""
    if not run.applications:
        return ""
    heads = ("application", "in time", "SLO ms", "p50 ms", "p90 ms", "p99 ms", "goodput rps", "offered", "ok", "late",
             "expired", "rejected", "failed")  # fmt: skip
    rows = []
    for name, row in run.applications.items():
        cells = [
            f'<i style="background:{styles[name].colour}"></i>{escape(name)}',
            "–" if row["attainment"] is None else f"{100 * row['attainment']:.2f} %",
            f"{row['slo_ms']:g}",
            *("–" if row[key] is None else f"{row[key]:.1f}" for key in ("p50_ms", "p90_ms", "p99_ms")),
            f"{row['goodput_rps']:.1f}",
            *(str(row[key]) for key in ("offered", "ok", "late", "expired", "rejected", "failed")),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{text}</th>" for text in heads)
    return (
        f'<h2>Applications</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="note">{_JUDGED}</p>'
    )


def stage_note(run: Run) -> str:
    """Return what the reader of the models' table must know about stages; empty where there are none."""
    if not run.applications:
        return ""
    return (
        '<p class="note">A stage has its own row: its requests are those that were due, and its SLO is the part of the '
        "application's deadline that a policy plans with. Each request really had what was left of the split when it "
        "was due, and is counted against that. A stage that was never due, because one before it was given up, counts "
        "in its application only. The heading of this page and the models' rows count every request to a model.</p>"
    )


def applications(run: Run, styles: Styles) -> str:
    """Return the charts of the applications with their heading; empty where there are none."""
    if not run.applications:
        return ""
    charts = _goodput(run) + _latency(run, styles) + _over_time(run, styles)
    return f'<h2>Applications, end to end</h2><div class="grid">{charts}</div>'


def _goodput(run: Run) -> str:
    rows = []
    for name, row in run.applications.items():
        offered = row["offered"] or 1
        parts = [
            (100.0 * row[word] / offered, Style(f"var({colour})"), f"{name}: {row[word]} {word}")
            for word, colour in OUTCOME_COLOURS.items()
        ]
        note = f"{row['goodput_rps']:.1f} of {row['offered'] / run.window_s:.1f} rps in time"
        rows.append(Bar(name, parts, note))
    words = legend([(word, Style(f"var({colour})")) for word, colour in OUTCOME_COLOURS.items()])
    chart = stacked_bars(
        rows, "Outcome of every request by application", unit="percent of the offered requests", limit=100.0
    )
    return figure("What became of the applications' requests", words + chart)


def _latency(run: Run, styles: Styles) -> str:
    curves = []
    for name, calls in run.calls.items():
        mine = calls.within(run.begin_ms, run.end_ms)
        values, shares = cdf(mine.latency_ms, len(mine))
        if values.size:
            curves.append((name, values / run.applications[name]["slo_ms"], shares))
    if not curves:
        return figure("Latency of the applications", "<p>No request of an application was answered.</p>")
    longest = max(float(x[-1]) for _, x, _ in curves)
    plot = Plot(
        (0.0, max(1.2, min(longest, 3.0))), (0.0, 1.0), x_label="latency as a multiple of the SLO",
        y_label="share of offered", percent_y=True,
    )  # fmt: skip
    for name, values, shares in curves:
        plot.line(np.append(0.0, values), np.append(0.0, shares), styles[name], name)
    plot.mark_x(1.0, "SLO")
    slos = ", ".join(f"{name} {row['slo_ms']:g} ms" for name, row in run.applications.items())
    note = f"To the last answer of the last stage, from the scheduled time. SLOs: {slos}."
    words = legend([(name, styles[name]) for name, _, _ in curves], is_line=True)
    return figure("Latency of the applications", words + plot.svg("Latency distribution of the applications"), note)


def _over_time(run: Run, styles: Styles) -> str:
    edges = bin_edges_ms(run)
    length_s = np.diff(edges) / 1000.0
    at_s = (edges[:-1] + edges[1:]) / 2000.0
    charts = []
    for name, calls in run.calls.items():
        offered = np.histogram(calls.at_ms, edges)[0] / length_s
        ok = np.histogram(calls.at_ms[calls.outcome == Outcome.OK], edges)[0] / length_s
        plot = Plot(
            (0.0, run.end_ms / 1000.0), (0.0, float(max(offered.max(initial=0.0), 1e-9)) * 1.08),
            x_label="scheduled time in s", y_label="requests per second", height=200,
        )  # fmt: skip
        style = Style(styles[name].colour)
        plot.line(at_s, offered, _OFFERED, "offered", width=5.0)
        plot.line(at_s, ok, style, "answered in time")
        if run.begin_ms > 0:
            plot.mark_x(run.begin_ms / 1000.0, "warm-up ends")
        words = legend([("offered", _OFFERED), ("in time, end to end", style)], is_line=True)
        charts.append(figure(f"{name} over time", words + plot.svg(f"Offered and answered rate of {name} over time")))
    return "".join(charts[:16])
