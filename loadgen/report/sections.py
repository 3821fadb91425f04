"""The sections of the report with charts, each a function from a run to HTML; a section without data says why."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from tenuto.loadgen.report.blocks import (
    OFFERED,
    Styles,
    figure,
    latency_figure,
    outcome_bar,
    outcome_figure,
    rate_figure,
    stage_bars,
    stage_figure,
    swatch,
    table,
)
from tenuto.loadgen.report.charts import Bar, Plot, legend, stacked_bars
from tenuto.loadgen.report.palette import Style
from tenuto.loadgen.report.series import (
    Prediction,
    batch_counts,
    binned,
    cdf,
    predictions,
    timeline,
    waiting_and_under_way,
)
from tenuto.loadgen.run import Run

_MOST_CHARTS = 16  # limit: charts of one kind on a page
_TEXT = Style("var(--text)")
_PREDICTED = Style("var(--text)", "3 3")


def goodput(run: Run, styles: Styles) -> str:
    """Goodput stacked by model against what was offered and planned, and every model's requests by outcome."""
    models = run.document["models"]
    window_s = run.window_s

    def stack(label: str, values: Mapping[str, float], word: str) -> Bar:
        parts = [(value, styles[name], f"{name}: {value:.1f} rps {word}") for name, value in values.items()]
        return Bar(label, parts, f"{sum(values.values()):.1f} rps")

    rows = [stack("offered (the ideal)", {n: m["offered"] / window_s for n, m in models.items()}, "offered")]
    if run.plan is not None and run.plan.expected.models:
        expected = run.plan.expected.models
        rows.append(
            stack("promised by the plan", {n: expected[n].goodput_rps for n in models if n in expected}, "promised")
        )
    rows.append(stack("goodput", {n: m["ok"] / window_s for n, m in models.items()}, "answered in time"))
    first = stacked_bars(rows, "Goodput against offered and promised load", unit="requests per second")
    bars = []
    for name, model in models.items():
        share = "nothing offered" if model["attainment"] is None else f"{100 * model['attainment']:.2f} % in time"
        bars.append(outcome_bar(name, model, share))
    names = legend([(name, styles[name]) for name in models])
    ended = outcome_figure("What became of the requests", "Outcome of every request by model", bars)
    return figure("Goodput", names + first) + ended


def latency(run: Run, styles: Styles) -> str:
    """Latency distributions on one scale, as a multiple of each model's SLO."""
    records = run.measured
    slos = {name: run.slo_ms(name) for name in run.names}
    known = all(slos.values()) and bool(slos)
    curves = []
    for index, name in enumerate(run.names):
        mine = records.where(records.model == index)
        values, shares = cdf(mine.where(mine.status == 200).latency_ms, len(mine))
        if values.size:
            curves.append((name, values / (slos[name] or 1.0) if known else values, shares))
    if not curves:
        return figure("Latency", "<p>No request was answered.</p>")
    note = "Counted from the scheduled time. A curve ends below 100 % where requests were not answered."
    if known:
        note += " SLOs: " + ", ".join(f"{name} {round(slos[name] or 0.0, 1):g} ms" for name in run.names) + "."
    if known and run.applications:
        note += " Later stages of applications had what was left of the split, often more than that."
    return latency_figure("Latency", "Latency distribution", curves, styles, note, by_slo=known)


def stages(run: Run) -> str:
    """Where the time goes: the 95th percentile of every stage, by model."""
    rows = stage_bars((name, model.get("split_p95_ms")) for name, model in run.document["models"].items())
    if not rows:
        return figure("Where the time goes", "<p>The server reported no times.</p>")
    note = "The percentiles of the stages do not add up to that of the latency."
    return stage_figure("Where the time goes", "95th percentile of each stage by model", rows, note)


def load(run: Run) -> str:
    """Offered and ok rate over time, and how many requests were waiting."""
    line = timeline(run)
    rates = rate_figure(
        "Load over time",
        "Offered and answered rate over time",
        line.at_s,
        line.offered_rps,
        line.ok_rps,
        Style("var(--ok)"),
        "answered in time",
        end_s=run.end_ms / 1000.0,
        begin_s=run.begin_ms / 1000.0,
    )
    at_s, waiting, under_way = waiting_and_under_way(run)
    queue = Plot(
        (0.0, run.end_ms / 1000.0),
        (0.0, float(max(1.0, under_way.max(initial=0.0))) * 1.08),
        x_label="time in s",
        y_label="requests",
    )
    queue.line(at_s, under_way, OFFERED, "not yet answered", width=2.5)
    queue.line(at_s, waiting, _TEXT, "not yet executing", width=1.5)
    queued = legend([("not yet answered", OFFERED), ("not yet executing", _TEXT)], is_line=True)
    return rates + figure("Queue over time", queued + queue.svg("Requests waiting over time"))


def batches(run: Run, styles: Styles) -> str:
    """Batch sizes over time for all models, and a histogram for each."""
    records = run.measured
    largest = float(records.batch_size.max(initial=0))
    if largest <= 0:
        return figure("Batch sizes", "<p>The server reported no batch sizes.</p>")
    over_time = Plot((0.0, run.end_ms / 1000.0), (0.0, largest * 1.08), x_label="time in s", y_label="mean batch size")
    charts: list[str] = []
    for index, name in enumerate(run.names):
        mine = records.where((records.model == index) & (records.batch_size > 0))
        if not len(mine):
            continue
        at_s, mean = binned(run, mine.scheduled_ms, mine.batch_size.astype(float), 1.0 / mine.batch_size)
        over_time.line(at_s, mean, styles[name], name)
        if len(charts) < _MOST_CHARTS:
            charts.append(_histogram(run, name, styles[name], *batch_counts(mine)))
    names = legend([(name, styles[name]) for name in run.names], is_line=True)
    return figure("Batch sizes over time", names + over_time.svg("Mean batch size over time")) + "".join(charts)


def _histogram(run: Run, name: str, style: Style, sizes: Any, counts: Any) -> str:
    planned = _planned_batch(run, name)
    shares = counts / counts.sum()
    top = max(int(sizes.max()), planned or 0)
    plot = Plot(
        (0.0, top + 1.0),
        (0.0, float(shares.max()) * 1.2),
        x_label="batch size",
        y_label="share of batches",
        percent_y=True,
        height=200,
    )
    for size, share, count in zip(sizes.tolist(), shares.tolist(), counts.tolist(), strict=True):
        plot.column(size - 0.42, size + 0.42, 0.0, share, style, f"{name}: {count:.0f} batches of {size}")
    if planned:
        plot.mark_x(float(planned), f"planned {planned}")
    return figure(f"Batches of {name}", plot.svg(f"Histogram of the batch sizes of {name}"))


def _planned_batch(run: Run, name: str) -> int | None:
    if run.plan is None:
        return None
    return max((r.batch_size for g in run.plan.hosts_of(name) for r in g.models if r.name == name), default=None)


def executions(run: Run, styles: Styles) -> str:
    """Measured execution times over time per gpu-let beside the plan's prediction, and the table of errors."""
    found = predictions(run)
    ran = [p for p in found if p.measured_ms.size]
    if not ran:
        return figure(
            "Execution against the plan", "<p>There is no plan, or the server reported no execution times.</p>"
        )
    charts = []
    for gpulet in list(dict.fromkeys(p.gpulet for p in ran))[:_MOST_CHARTS]:
        charts.append(_execution_chart(run, [p for p in ran if p.gpulet == gpulet], styles))
    heads = ("gpu-let", "model", "planned batch", "batches", "predicted ms", "measured ms", "error")
    rows = table(heads, (_prediction_cells(p, styles) for p in found), words=("model",))
    note = "Medians, over the batches that ran; the prediction is that of the plan for those very batch sizes."
    left_out = len({p.gpulet for p in ran}) - len(charts)
    if left_out > 0:
        note += f" Charts of {left_out} more gpu-lets are left out; the table has all."
    return "".join(charts) + figure("Predicted and measured", rows, note, wide=True)


def _execution_chart(run: Run, replicas: list[Prediction], styles: Styles) -> str:
    curves = []
    for replica in replicas:
        at_s, measured = binned(run, replica.at_ms, replica.measured_ms, replica.weight)
        _, predicted = binned(run, replica.at_ms, replica.predicted_ms, replica.weight)
        curves.append((replica.model, at_s, measured, predicted))
    values = np.concatenate([np.concatenate([m, p]) for _, _, m, p in curves])
    top = float(np.nanmax(values)) * 1.12
    plot = Plot((0.0, run.end_ms / 1000.0), (0.0, top), x_label="time in s", y_label="execution in ms", height=200)
    for model, at_s, measured, predicted in curves:
        plot.line(at_s, measured, Style(styles[model].colour), f"{model}: measured", width=3.0)
        plot.line(at_s, predicted, _PREDICTED, f"{model}: predicted", width=1.2)
    entries = [(r.model, Style(styles[r.model].colour)) for r in replicas] + [("predicted", _PREDICTED)]
    return figure(
        f"Execution on {replicas[0].gpulet}", legend(entries, is_line=True) + plot.svg("Execution time over time")
    )


def _prediction_cells(entry: Prediction, styles: Styles) -> list[str]:
    cells = [escape(entry.gpulet), swatch(styles[entry.model]) + escape(entry.model), str(entry.batch_size)]
    if not entry.measured_ms.size:
        return [*cells, "0", "–", "–", "–"]
    predicted = entry.predicted_ms[~np.isnan(entry.predicted_ms)]
    error = entry.error
    return [
        *cells,
        f"{entry.weight.sum():.0f}",
        f"{np.median(predicted):.2f}" if predicted.size else "–",
        f"{np.median(entry.measured_ms):.2f}",
        "–" if error is None else f"{100 * error + 0.0:+.1f} %".replace("-0.0", "+0.0"),
    ]


def utilisation(run: Run) -> str:
    """How much of the measured window each gpu-let executed."""
    gpulets = run.document.get("gpulets") or {}
    planned = [g.id for g in run.plan.gpulets] if run.plan is not None else []
    ids = list(dict.fromkeys([*planned, *gpulets]))[:64]
    rows = []
    for name in ids:
        entry = gpulets.get(name, {"utilisation": 0.0, "batches": 0, "mean_batch": None})
        busy = 100.0 * float(entry["utilisation"])
        mean = entry["mean_batch"]
        note = f"{busy:.1f} %, {entry['batches']} batches" + (f" of {mean:.1f}" if mean else "")
        rows.append(Bar(name, [(busy, Style("var(--s2)"), f"{name}: executing {busy:.1f} % of the time")], note))
    if not rows:
        return figure("Utilisation", "<p>The server named no gpu-lets.</p>")
    chart = stacked_bars(
        rows, "Utilisation of the gpu-lets", unit="percent of the measured time spent executing", limit=100.0
    )
    return figure("Utilisation of the gpu-lets", chart)
