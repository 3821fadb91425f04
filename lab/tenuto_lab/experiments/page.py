"""The page of an experiment: what was published, what came out, and the figures that show it, in one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from tenuto.loadgen.report.blocks import facts, figure, how_it_was_made, stage_bars, stage_figure, table
from tenuto.loadgen.report.charts import Bar, Plot, legend, stacked_bars
from tenuto.loadgen.report.page import html_document
from tenuto.loadgen.report.palette import Style, styles_for
from tenuto.placement import Plan
from tenuto.placement.shown.picture import draw
from tenuto_lab.experiments.case import DEFERRED, ROUTER
from tenuto_lab.experiments.experiment import THESIS_POLICIES, Detail, Experiment, Observation, Results
from tenuto_lab.experiments.facts import thesis_section

_IDEAL = Style("var(--muted)", "2 3")
_ORDER = (
    "usher",
    "ao-milp",
    "wsm-milp",
    "wao-usher",
    "igniter",
    "symphony",
    "tenuto",
    "gpulet",
    "sbp",
    "ffd",
    "ideal",
    "gpulets+",
    "ffd++",
    "gslice",
)
_STAGES = {
    "batching": "waiting for a batch",
    "gpulet_queue": "queue at the gpu-let and network",
    "execution": "execution",
    "front_door": "answer",
}
_WORDS = {ROUTER: "the thesis' router", DEFERRED: "deferred batching"}
_STATES = {
    "reproduced": ("yes", "✓ reproduced"),
    "not reproduced": ("no", "✗ not reproduced"),
    "not checked": ("open", "– not checked"),
}

_COEFFICIENTS = {
    "k1": "k1",
    "k2": "k2",
    "k3": "k3",
    "k4": "k4",
    "k5": "k5",
    "n_k": "kernels",
    "alpha_power": "W per r/s",
    "alpha_cacheutil": "% L2 per r/s",
    "alpha_cache": "growth per % L2",
}


def render_experiment(
    experiment: Experiment, results: Results, observations: Sequence[Observation], document: Mapping[str, Any]
) -> str:
    """Return the whole page as text; `document` is the content of result.json without its rows."""
    css = resources.files("tenuto_lab.experiments").joinpath("data/experiments.css").read_text(encoding="utf-8")
    counts = document["observations_summary"]
    parts = [
        f"<h1>Figure {escape(_figures(experiment))}: {escape(experiment.title)}</h1>",
        f'<p class="note">P. Elvinger, ETH Zurich master thesis 2024, section {escape(experiment.section)}, run again '
        f"{escape(document['how'])} · {escape(str(document['date']))}</p>",
        ""
        if document["complete"]
        else '<div class="verdict FAIL"><strong>Incomplete</strong>'
        "<p>The run was interrupted; the points that had finished are shown.</p></div>",
        f'<div class="verdict"><strong>{escape(reproduced_of(counts))}</strong>'
        f"<p>{escape(experiment.about)} {escape(document['load'])}</p></div>",
        _observations(experiment, observations),
        _goodput(experiment, results),
        _derived_note(document),
        _losses(results),
        _details(experiment, results),
        _stated(experiment),
        _derived(document),
        _absent(results),
        _provenance(results, document),
    ]
    return html_document(f"Figure {experiment.name} again · Tenuto", "".join(parts), css)


def reproduced_of(counts: Mapping[str, int]) -> str:
    """Return how many of the published observations were reproduced, in words."""
    checked = counts["reproduced"] + counts["not reproduced"]
    if not sum(counts.values()):
        return "No published observation to check"
    rest = f", {counts['not checked']} not checked" if counts["not checked"] else ""
    return f"{counts['reproduced']} of {checked} checked observations reproduced{rest}"


def _figures(experiment: Experiment) -> str:
    names = experiment.figures
    return names[0] if len(names) == 1 else f"{names[0]} (with {names[1]} to {names[-1]})"


def _place_of(experiment: Experiment, name: str) -> str:
    """Return the anchor of the figure that shows an observation."""
    if name.lower().startswith("goodput"):
        return "goodput"
    for number, detail in enumerate(experiment.details):
        if name in detail.caption:
            return f"point{number}"
    return "points"


def _observations(experiment: Experiment, observations: Sequence[Observation]) -> str:
    if not observations:
        return (
            "<h2>Published observations</h2><p>Among the published numbers kept here is none on this figure; its bars "
            "are not printed as numbers.</p>"
        )
    rows = []
    for seen in observations:
        kind, words = _STATES[seen.status]
        lines = [("published", seen.published), ("here", seen.ours)]
        if seen.why:
            lines.append(("why", seen.why))
        lines.append(("counts as reproduced", seen.tolerance))
        listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in lines)
        if seen.status != "not checked":
            place = _place_of(experiment, seen.figure)
            listed += f'<dt>shown in</dt><dd><a href="#{place}">{escape(seen.figure)}</a></dd>'
        rows.append(
            f'<div class="seen {kind}"><span class="state">{words}</span> · <b>{escape(seen.statement)}</b>'
            f"<dl>{listed}</dl></div>"
        )
    return f'<h2>Published observations</h2><div class="observations">{"".join(rows)}</div>'


def _styles(series: Sequence[str]) -> dict[str, Style]:
    """Return the style of each series: a policy's colour everywhere the same, a published plan's dashed."""
    policies = [*_ORDER, *sorted({name for name in series if name not in _ORDER and "(" not in name})]
    known = styles_for(policies)
    return {
        name: known[name] if name in known else Style(known.get(name.split(" ")[0], _IDEAL).colour, "1 4")
        for name in series
    }


def _goodput(experiment: Experiment, results: Results) -> str:
    """Goodput against x: per SLO, the thesis' policies and the others, under each scheduler, all on one scale."""
    lines = [name for name in results.series() if "(" not in name]
    ours = [name for name in THESIS_POLICIES if name in lines]
    others = [name for name in lines if name not in THESIS_POLICIES]
    parts = ['<h2 id="goodput">Goodput</h2>']
    for slo in results.slos():
        heading = f"SLO {slo:g} ms"
        if len(results.slos()) > 1:
            parts.append(f"<h3>{escape(heading)}</h3>")
        charts = [
            _chart(experiment, results, group, slo, scheduler, f"{what}, {_WORDS[scheduler]}")
            for group, what in ((ours, "the thesis' policies"), (others, "other policies"))
            for scheduler in experiment.schedulers
            if group
        ]
        parts.append(f'<div class="grid two">{"".join(charts)}</div>')
    return "".join(parts)


def _chart(
    experiment: Experiment, results: Results, group: Sequence[str], slo: float, scheduler: str, what: str
) -> str:
    at = sorted({float(row["case"]["x"]) for row in results.rows if float(row["case"]["slo_ms"]) == slo})
    sent = {
        float(row["case"]["x"]): row["runs"][scheduler]["offered_rps"]
        for row in results.rows
        if "runs" in row and float(row["case"]["slo_ms"]) == slo
    }
    top = max(sent.values(), default=1.0) * 1.08
    plot = Plot((min(at), max(at)), (0.0, top), x_label=experiment.x_label, y_label="goodput, r/s")
    xs = np.array(at)
    plot.line(xs, np.array([sent.get(x, np.nan) for x in at]), _IDEAL, "sent", width=1.5)
    styles = _styles(group)
    for name in group:
        rows = [results.find(name, x, slo) for x in at]
        values = [np.nan if row is None else row["runs"][scheduler]["goodput_rps"] for row in rows]
        plot.line(xs, np.array(values), styles[name], name, width=2.5)
        for x, value in zip(at, values, strict=True):
            if not np.isnan(value):
                plot.dot(x, value, styles[name], f"{name} at {x:g}: {value:.0f} r/s")
    words = legend([(name, styles[name]) for name in group] + [("sent", _IDEAL)], is_line=True)
    return figure(f"{what[0].upper()}{what[1:]}", words + plot.svg(f"Goodput of {what} at an SLO of {slo:g} ms"))


def _losses(results: Results) -> str:
    """What each plan promises, and what is left of it under each scheduler, summed over the points of a series."""
    rows = []
    for name in results.series():
        mine = [row for row in results.rows if row["series"] == name and "runs" in row]
        if not mine or "(published plan)" in name:
            continue
        promised = sum(min(row["promised_rps"], row["runs"][ROUTER]["offered_rps"]) for row in mine)
        router, deferred = (sum(row["runs"][s]["goodput_rps"] for row in mine) for s in (ROUTER, DEFERRED))
        if promised <= 0:
            continue
        means = (f"{value / len(mine):.0f}" for value in (promised, router, deferred))
        kept = (f"{100 * value / promised:.0f} %" for value in (router, deferred))
        rows.append([escape(name), str(len(mine)), *means, *kept])
    if not rows:
        return ""
    heads = ("policy", "points", "promised r/s", "router r/s", "deferred r/s", "router keeps", "deferred keeps")
    return (
        f"<h2>What placement loses to batching</h2>{table(heads, rows)}"
        '<p class="note">Means over the points of each policy. Promised: the goodput the policy expects, at most what '
        "was sent. The same plans and the same requests under both; the rest is lost to waiting for batches, to "
        "neighbours the plan did not count, and to serving requests that are already late.</p>"
    )


def _details(experiment: Experiment, results: Results) -> str:
    parts = [_detail(number, detail, results) for number, detail in enumerate(experiment.details)]
    shown = "".join(part for part in parts if part)
    return f'<h2 id="points">Points in detail</h2>{shown}' if shown else ""


def _detail(number: int, detail: Detail, results: Results) -> str:
    row = results.find(detail.series, detail.x, detail.slo_ms)
    if row is None:
        return ""
    plan = Plan.from_data(row["plan"])
    styles = styles_for([spec.name for spec in plan.models])
    charts = []
    for scheduler, run in row["runs"].items():
        charts.append(_stage_chart(run, f"Where the time goes, {_WORDS[scheduler]}"))
    names = legend([(name, style) for name, style in styles.items()])
    bars = [_bar("sent", row, styles, "offered_rps", ROUTER)]
    bars += [_bar(f"in time, {_WORDS[s]}", row, styles, "goodput_rps", s) for s in row["runs"]]
    stacked = stacked_bars(bars, f"Goodput by model: {detail.caption}", unit="requests per second")
    notes = [note for note in plan.notes if note.startswith("stated in")]
    stated = "".join(f'<p class="note">The plan is {escape(note)}.</p>' for note in notes)
    picture = draw(plan, {name: style.colour for name, style in styles.items()})
    return (
        f'<div class="pair" id="point{number}"><h3>{escape(detail.caption)}</h3>'
        f'<div class="scroll">{picture}</div>{stated}'
        f'<div class="grid">{figure("Goodput by model", names + stacked)}{"".join(charts)}</div>{_replicas(row)}</div>'
    )


def _bar(label: str, row: Mapping[str, Any], styles: Mapping[str, Style], key: str, scheduler: str) -> Bar:
    models = row["runs"][scheduler]["models"]
    parts = [(model[key], styles[name], f"{name}: {model[key]:.0f} r/s") for name, model in models.items()]
    return Bar(label, parts, f"{sum(value for value, _, _ in parts):.0f} r/s")


def _stage_chart(run: Mapping[str, Any], heading: str) -> str:
    rows = stage_bars(((name, model["p95_ms"]) for name, model in run["models"].items()), _STAGES)
    return stage_figure(heading, heading, rows, stages=_STAGES)


def _replicas(row: Mapping[str, Any]) -> str:
    rows = []
    for scheduler, run in row["runs"].items():
        for name, model in run["models"].items():
            for replica in model["replicas"]:
                cells = [
                    name,
                    replica["gpulet"],
                    _WORDS[scheduler],
                    str(replica["batch_size"]),
                    _number(replica["mean_batch"], 1),
                    _percent(replica["full_share"]),
                    _percent(replica["load_share"]),
                    _number(replica["execution_ms"], 1),
                ]
                rows.append(map(escape, cells))
    heads = ("model", "gpu-let", "scheduler", "target batch", "mean batch", "full", "of the load", "execution ms")
    return f"<details><summary>Batches and load of every replica</summary>{table(heads, rows)}</details>"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _stated(experiment: Experiment) -> str:
    """Every number and placement the thesis states on the experiment, those no observation line uses among them."""
    entry = thesis_section(experiment.section)
    stated = {key: entry[key] for key in ("same_as", "difference", "observations") if key in entry}
    rows = {key: escape(value) for key, value in _flat(stated)}
    return (
        "<h2>What the thesis states</h2><details><summary>All numbers and placements in the text of section "
        f"{escape(experiment.section)}</summary>{facts(rows)}</details>"
    )


def _flat(facts: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    """Return (path, value) of every leaf, the outermost key `observations` left out of the path."""
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        here = f"{path} {key}".strip().replace("_", " ") if key != "observations" else path
        if isinstance(value, Mapping):
            rows += _flat(value, here)
        else:
            rows.append((here, ", ".join(str(part) for part in value) if isinstance(value, list) else str(value)))
    return rows


def _derived_note(document: Mapping[str, Any]) -> str:
    if document["derived"] is None:
        return ""
    names = escape(", ".join(document["derived"]["policies"]))
    return f'<p class="note">{names}: planned with <a href="#derived">derived coefficients</a>, not published ones.</p>'


def _derived(document: Mapping[str, Any]) -> str:
    """Who planned with derived numbers, how far these are off, and what is assumed."""
    derived = document["derived"]
    if derived is None:
        return ""
    rows = []
    for name, (mean, most, where) in derived["errors_pct"].items():
        values = derived["coefficients"][name]
        cells = [name, f"{mean:.1f} %", f"{most:.1f} % ({where})"]
        cells += [f"{values[key]:.4g}" for key in _COEFFICIENTS]
        rows.append(map(escape, cells))
    heads = ("model", "mean error", "largest error", *_COEFFICIENTS.values())
    plain, stand_in = derived["pair_errors_pct"]
    listed = "".join(f"<li>{escape(text)}</li>" for text in derived["assumptions"])
    return (
        f'<h2 id="derived">Derived coefficients, not published</h2><p>{escape(", ".join(derived["policies"]))} plan '
        "with latencies on shares and coefficients that no one published: they are derived from what was. "
        f"<code>derived-profile.yaml</code> beside this page has them all.</p>{table(heads, rows)}"
        '<p class="note">Errors: of iGniter\'s formula against the latencies alone it is fitted to. On the measured '
        f"pairs of models its slowdowns are off by {plain:.1f} % with published coefficients, and by {stand_in:.1f} % "
        "if each network in turn gets derived ones instead.</p>"
        f"<details><summary>What is assumed</summary><ul>{listed}</ul></details>"
    )


def _absent(results: Results) -> str:
    errors = results.errors()
    if not errors:
        return ""
    rows = {name: escape(why) for name, why in errors.items()}
    return f"<h2>Policies that cannot plan from the thesis' profile</h2>{facts(rows)}"


def _provenance(results: Results, document: Mapping[str, Any]) -> str:
    used = dict.fromkeys(note for row in results.rows for note in row.get("emulation", ()))
    made = how_it_was_made(
        document,
        document["settings"],
        profile=document["profile"],
        network=document["network"],
        points=f"{len(results.rows)} in {document['wall_s']:.1f} s",
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in sorted(used))
    return f"{made}<details><summary>Where the emulated costs of sharing come from</summary><ul>{notes}</ul></details>"
