"""The sections of the report about applications: how their requests ended end to end, beside the models' own rows."""

from __future__ import annotations

from html import escape

import numpy as np

from tenuto.loadgen.report.blocks import (
    Styles,
    figure,
    in_time,
    latency_figure,
    number,
    outcome_bar,
    outcome_figure,
    rate_figure,
    swatch,
    table,
)
from tenuto.loadgen.report.palette import Style
from tenuto.loadgen.report.series import bin_edges_ms, cdf
from tenuto.loadgen.run import Run
from tenuto.outcome import Outcome

_JUDGED = (
    "A request of an application is in time when every answer of every stage was there within its SLO, counted from "
    "its scheduled time. That end-to-end criterion is the verdict's; stages are not judged by themselves."
)


def application_table(run: Run, styles: Styles) -> str:
    """Return the table of the applications with its heading; empty where there are none."""
    if not run.applications:
        return ""
    heads = (
        "application",
        "in time",
        "SLO ms",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "goodput rps",
        "offered",
        "ok",
        "late",
        "expired",
        "rejected",
        "failed",
    )
    rows = (
        [
            swatch(styles[name]) + escape(name),
            in_time(row["attainment"]),
            f"{row['slo_ms']:g}",
            *(number(row[key]) for key in ("p50_ms", "p90_ms", "p99_ms", "goodput_rps")),
            *(str(row[key]) for key in ("offered", "ok", "late", "expired", "rejected", "failed")),
        ]
        for name, row in run.applications.items()
    )
    return f'<h2>Applications</h2>{table(heads, rows)}<p class="note">{_JUDGED}</p>'


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
    bars = []
    for name, row in run.applications.items():
        note = f"{row['goodput_rps']:.1f} of {row['offered'] / run.window_s:.1f} rps in time"
        bars.append(outcome_bar(name, row, note))
    title = "Outcome of every request by application"
    return outcome_figure("What became of the applications' requests", title, bars)


def _latency(run: Run, styles: Styles) -> str:
    curves = []
    for name, calls in run.calls.items():
        mine = calls.within(run.begin_ms, run.end_ms)
        values, shares = cdf(mine.latency_ms, len(mine))
        if values.size:
            curves.append((name, values / run.applications[name]["slo_ms"], shares))
    if not curves:
        return figure("Latency of the applications", "<p>No request of an application was answered.</p>")
    slos = ", ".join(f"{name} {row['slo_ms']:g} ms" for name, row in run.applications.items())
    note = f"To the last answer of the last stage, from the scheduled time. SLOs: {slos}."
    title = "Latency distribution of the applications"
    return latency_figure("Latency of the applications", title, curves, styles, note)


def _over_time(run: Run, styles: Styles) -> str:
    edges = bin_edges_ms(run)
    length_s = np.diff(edges) / 1000.0
    at_s = (edges[:-1] + edges[1:]) / 2000.0
    charts = []
    for name, calls in run.calls.items():
        offered = np.histogram(calls.at_ms, edges)[0] / length_s
        ok = np.histogram(calls.at_ms[calls.outcome == Outcome.OK], edges)[0] / length_s
        charts.append(
            rate_figure(
                f"{name} over time",
                f"Offered and answered rate of {name} over time",
                at_s,
                offered,
                ok,
                Style(styles[name].colour),
                "in time, end to end",
                end_s=run.end_ms / 1000.0,
                begin_s=run.begin_ms / 1000.0,
                height=200,
            )
        )
    return "".join(charts[:16])
