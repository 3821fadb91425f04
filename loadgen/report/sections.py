"""The charts of the report, drawn from a run. When there is nothing to draw, the figure says why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tenuto.loadgen.report.charts import Bar, BarPart, Bars, Figure, Plot
from tenuto.loadgen.report.palette import Style, Styles, named
from tenuto.loadgen.report.series import (
    Curve,
    Prediction,
    Timeline,
    batch_counts,
    bin_edges_ms,
    binned,
    cdf,
    timeline,
    waiting_and_under_way,
)
from tenuto.loadgen.run import Run
from tenuto.outcome import OUTCOMES

STAGES = {
    "batching": "waiting for a batch",
    "gpulet_queue": "queue at the gpu-let",
    "execution": "execution",
    "front_door": "front door",
}
_MOST_CHARTS = 16  # format: charts of one kind on a page
_OFFERED, _TEXT, _PREDICTED = Style("var(--muted)"), Style("var(--text)"), Style("var(--text)", "3 3")


def applications(run: Run, styles: Styles) -> Iterator[Figure]:
    """Draw the offered and the answered rate of each application."""
    for name in list(run.applications)[:_MOST_CHARTS]:
        mine = run.records.where(run.records.model == run.names.index(name))
        rates = timeline(run, mine.scheduled_ms, mine.outcome)
        plot = _rates(run, rates, Style(styles[name].colour), "in time, end to end", height=200)
        yield Figure(f"{name} over time", plot, f"Offered and answered rate of {name} over time")


def load(run: Run, styles: Styles) -> Iterator[Figure]:
    """Draw goodput, latency, where the time goes, and the load and the queue over time."""
    yield from _goodput(run, styles)
    if len(run.token_slos) < len(run.names):
        yield _latency_of_models(run, styles)
    yield where_the_time_goes(
        "Where the time goes",
        {name: model.get("split_p95_ms") for name, model in run.document["models"].items()},
        "The percentiles of the stages do not add up to that of the latency.",
    )
    rates = timeline(run, run.records.scheduled_ms, run.records.outcome)
    plot = _rates(run, rates, named("ok"), "answered in time")
    yield Figure("Load over time", plot, "Offered and answered rate over time")
    at_s, waiting, under_way = waiting_and_under_way(run)
    queue = _over_time(run, float(max(1.0, under_way.max(initial=0.0))) * 1.08, "requests")
    queue.line(at_s, under_way, _OFFERED, "not yet answered", width=2.5)
    queue.line(at_s, waiting, _TEXT, "not yet executing", width=1.5)
    yield Figure("Queue over time", queue, "Requests waiting over time")


def tokens(run: Run, styles: Styles) -> Iterator[Figure]:
    """Draw the distributions of TTFT and TPOT as multiples of their bounds, and the tokens over time."""
    written = {name: mine.where(mine.status == 200) for name, mine in run.by_name().items() if name in run.token_slos}
    offered = {name: len(mine) for name, mine in run.by_name().items()}
    for word, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        curves = []
        for name, mine in written.items():
            values, shares = cdf(getattr(mine, key), offered[name])
            curves.append((name, values / getattr(run.token_slos[name], key), shares))
        bounds = ", ".join(f"{name} {getattr(slo, key):g} ms" for name, slo in run.token_slos.items())
        yield _latency(word, curves, styles, f"Bounds: {bounds}.", f"No answer has a {word}.", of="bound")
    rates = {}
    edges = bin_edges_ms(run)
    for name, mine in written.items():
        ended, counts = mine.answered_ms, mine.output_tokens.astype(float)
        rates[name] = np.histogram(ended, edges, weights=counts)[0] / (np.diff(edges) / 1000.0)
    top = max((float(rate.max(initial=0.0)) for rate in rates.values()), default=0.0)
    if top:
        plot = _over_time(run, top * 1.08, "tokens per second", x_label="time at which answers ended in s")
        for name, rate in rates.items():
            plot.line((edges[:-1] + edges[1:]) / 2000.0, rate, styles[name], name)
        yield Figure("Tokens over time", plot, "Tokens of the answers that ended")


def _goodput(run: Run, styles: Styles) -> Iterator[Figure]:
    """Draw goodput stacked by model, beside the offered and the planned load; and every model's requests by outcome."""
    models = {**run.applications, **run.document["models"]}
    window_s = run.window_s

    def stack(label: str, values: Mapping[str, float], word: str) -> Bar:
        parts = [
            BarPart(name, value, styles[name], f"{name}: {value:.1f} rps {word}") for name, value in values.items()
        ]
        return Bar(label, parts, f"{sum(values.values()):.1f} rps")

    rows = [stack("offered (the ideal)", {n: m["offered"] / window_s for n, m in models.items()}, "offered")]
    if run.plan is not None and (expected := run.plan.expected.models):
        promised = {name: expected[name].goodput_rps for name in models if name in expected}
        rows += [stack("promised by the plan", promised, "promised")] if promised else []
    rows.append(stack("goodput", {n: m["ok"] / window_s for n, m in models.items()}, "answered in time"))
    yield Figure("Goodput", Bars(rows, unit="requests per second"), "Goodput against offered and promised load")
    shares = {name: model["attainment"] for name, model in models.items()}
    notes = {n: "nothing offered" if part is None else f"{100 * part:.2f} % in time" for n, part in shares.items()}
    yield Figure("What became of the requests", _outcomes(models, notes), "Outcome of every request by what it asked")
    by_size = {f"{name}, {_up_to(row)}": row for name, model in models.items() for row in model.get("by_size", ())}
    if by_size:
        notes = {label: f"{row['goodput_rps']:.1f} rps in time" for label, row in by_size.items()}
        yield Figure("By size class", _outcomes(by_size, notes), "Outcome of every request by size class")


def _up_to(row: Mapping[str, Any]) -> str:
    if row["sizes"] is None:
        return "larger"
    return ", ".join(f"{name} up to {size}" for name, size in row["sizes"].items())


def _outcomes(rows: Mapping[str, Mapping[str, Any]], notes: Mapping[str, str]) -> Bars:
    """Return how the requests of models or applications ended, in percent of the offered ones."""
    bars = []
    for name, row in rows.items():
        total = row["offered"] or 1
        parts = [
            BarPart(word, 100.0 * row[word] / total, named(word), f"{name}: {row[word]} {word}") for word in OUTCOMES
        ]
        bars.append(Bar(name, parts, notes[name]))
    return Bars(bars, unit="percent of the offered requests", limit=100.0)


def _latency_of_models(run: Run, styles: Styles) -> Figure:
    """Draw latency distributions on one scale, as multiples of the SLOs. Models that generate have figures of their
    own."""
    slos = {name: run.slos_ms[name] for name in run.names if name not in run.token_slos}
    curves = []
    for name, mine in run.by_name().items():
        if name not in slos:
            continue
        values, shares = cdf(mine.where(mine.status == 200).latency_ms, len(mine))
        curves.append((name, values / slos[name], shares))
    note = "Counted from the scheduled time. A curve ends below 100 % where requests were not answered."
    note += " SLOs: " + ", ".join(f"{name} {round(slo, 1):g} ms" for name, slo in slos.items()) + "."
    return _latency("Latency", curves, styles, note, "No request was answered.")


def _latency(
    heading: str, curves: Iterable[Curve], styles: Styles, note: str, if_none: str, *, of: str = "SLO"
) -> Figure:
    """Draw names with their latencies and the shares of the offered requests. `of`: what the latencies are multiples
    of."""
    shown = [curve for curve in curves if curve[1].size]
    if not shown:
        return Figure(heading, if_none)
    longest = max(float(x[-1]) for _, x, _ in shown)
    plot = Plot(
        (0.0, max(1.2, min(longest, 3.0))),
        (0.0, 1.0),
        x_label=f"{'latency' if of == 'SLO' else heading} as a multiple of the {of}",
        y_label="share of offered",
        percent_y=True,
    )
    for name, values, shares in shown:
        plot.line(np.append(0.0, values), np.append(0.0, shares), styles[name], name)
    plot.mark_x(1.0, of)
    return Figure(heading, plot, f"Distribution of {heading}" if of != "SLO" else "Latency distribution", note)


def where_the_time_goes(
    heading: str,
    split_ms: Mapping[str, Mapping[str, float | None] | None],
    note: str = "",
    stages: Mapping[str, str] = STAGES,
) -> Figure:
    """Draw the 95th percentiles in ms of the stages of every model that has any; `stages` names them."""
    bars = []
    for name, split in split_ms.items():
        known = {key: value for key in stages if (value := (split or {}).get(key)) is not None}
        parts = [
            BarPart(stages[key], value, named(key), f"{name}: {stages[key]} {value:.1f} ms")
            for key, value in known.items()
        ]
        if parts:
            bars.append(Bar(name, parts, " + ".join(f"{value:.1f}" for value in known.values())))
    drawing = Bars(bars, unit="ms, 95th percentile of each stage")
    return Figure(heading, drawing or "The server reported no times.", "95th percentile of each stage by model", note)


def _over_time(run: Run, top: float, y_label: str, height: int = 240, x_label: str = "time in s") -> Plot:
    return Plot((0.0, run.end_ms / 1000.0), (0.0, top), x_label=x_label, y_label=y_label, height=height)


def _rates(run: Run, rates: Timeline, style: Style, words: str, height: int = 240) -> Plot:
    """Draw the offered and the ok rate over time; `words` names the ok rate."""
    top = float(max(rates.offered_rps.max(initial=0.0), 1e-9)) * 1.08
    plot = _over_time(run, top, "requests per second", height, "scheduled time in s")
    plot.line(rates.at_s, rates.offered_rps, _OFFERED, "offered", width=5.0)
    plot.line(rates.at_s, rates.ok_rps, style, words)
    if run.begin_ms > 0:
        plot.mark_x(run.begin_ms / 1000.0, "warm-up ends")
    return plot


def batches(run: Run, styles: Styles) -> Iterator[Figure]:
    """Draw batch sizes over time for all models, and a histogram for each."""
    largest = float(run.measured.batch_size.max(initial=0))
    if largest <= 0:
        yield Figure("Batch sizes", "The server reported no batch sizes.")
        return
    over_time = _over_time(run, largest * 1.08, "mean batch size")
    ran = {name: mine.where(mine.batch_size > 0) for name, mine in run.by_name().items()}
    ran = {name: mine for name, mine in ran.items() if len(mine)}
    for name, mine in ran.items():
        at_s, mean = binned(run, mine.scheduled_ms, mine.batch_size.astype(float), 1.0 / mine.batch_size)
        over_time.line(at_s, mean, styles[name], name)
    yield Figure("Batch sizes over time", over_time, "Mean batch size over time")
    for name, mine in list(ran.items())[:_MOST_CHARTS]:
        plot = _histogram(run, name, styles[name], *batch_counts(mine))
        yield Figure(f"Batches of {name}", plot, f"Histogram of the batch sizes of {name}")


def _histogram(run: Run, name: str, style: Style, sizes: Any, counts: Any) -> Plot:
    hosts = [] if run.plan is None else run.plan.hosts_of(name)
    planned = max((r.batch_size for host in hosts for r in host.models if r.name == name), default=0)
    shares = counts / counts.sum()
    plot = Plot(
        (0.0, max(int(sizes.max()), planned) + 1.0),
        (0.0, float(shares.max()) * 1.2),
        x_label="batch size",
        y_label="share of batches",
        percent_y=True,
        height=200,
    )
    for size, share, count in zip(sizes.tolist(), shares.tolist(), counts.tolist(), strict=True):
        plot.column(size - 0.42, size + 0.42, share, style, f"{name}: {count:.0f} batches of {size}")
    if planned:
        plot.mark_x(float(planned), f"planned {planned}")
    return plot


def executions(run: Run, styles: Styles, predictions: Iterable[Prediction]) -> Iterator[Figure]:
    """Draw measured execution times over time per gpu-let beside the plan's prediction."""
    by_gpulet: dict[str, list[Prediction]] = {}
    for each in predictions:
        if each.measured_ms.size:
            by_gpulet.setdefault(each.gpulet, []).append(each)
    if not by_gpulet:
        why = "There is no plan, or the server reported no execution times."
        yield Figure("Execution against the plan", why)
    for gpulet, replicas in list(by_gpulet.items())[:_MOST_CHARTS]:
        curves = []
        for replica in replicas:
            at_s, measured = binned(run, replica.at_ms, replica.measured_ms, replica.weight)
            _, predicted = binned(run, replica.at_ms, replica.predicted_ms, replica.weight)
            curves.append((replica.model, at_s, measured, predicted))
        top = float(np.nanmax(np.concatenate([np.concatenate([m, p]) for _, _, m, p in curves]))) * 1.12
        plot = _over_time(run, top, "execution in ms", 200)
        for model, at_s, measured, _ in curves:
            plot.line(at_s, measured, Style(styles[model].colour), model, width=3.0, hover=f"{model}: measured")
        for model, at_s, _, predicted in curves:
            plot.line(at_s, predicted, _PREDICTED, "predicted", width=1.2, hover=f"{model}: predicted")
        yield Figure(f"Execution on {gpulet}", plot, "Execution time over time")


def left_out(predictions: Iterable[Prediction]) -> int:
    """Return how many gpu-lets `executions` does not draw, because there are too many."""
    return max(0, len({each.gpulet for each in predictions if each.measured_ms.size}) - _MOST_CHARTS)


def utilisation(run: Run) -> Figure:
    """Draw how much of the measured window each gpu-let executed."""
    gpulets = run.document.get("gpulets") or {}
    planned = [gpulet.id for gpulet in run.plan.gpulets] if run.plan is not None else []
    bars = []
    for name in list(dict.fromkeys([*planned, *gpulets]))[:64]:
        entry = gpulets.get(name, {"utilisation": 0.0, "batches": 0, "mean_batch": None})
        busy = 100.0 * float(entry["utilisation"])
        note = f"{busy:.1f} %, {entry['batches']} batches"
        note += f" of {entry['mean_batch']:.1f}" if entry["mean_batch"] else ""
        bars.append(
            Bar(name, [BarPart("", busy, named("execution"), f"{name}: executing {busy:.1f} % of the time")], note)
        )
    drawing = Bars(bars, unit="percent of the measured time spent executing", limit=100.0)
    return Figure(
        "Utilisation of the gpu-lets", drawing or "The server named no gpu-lets.", "Utilisation of the gpu-lets"
    )
