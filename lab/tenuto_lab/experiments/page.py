"""The page of an experiment: published statements, our results, and figures of both, in one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from tenuto.loadgen.report.charts import Bar, BarPart, Bars, Figure, Plot
from tenuto.loadgen.report.palette import Style, styles_for
from tenuto.loadgen.report.run_page import how_it_was_made
from tenuto.loadgen.report.sections import where_the_time_goes
from tenuto.pages import templates
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
    entry = thesis_section(experiment.section)
    stated = {key: entry[key] for key in ("same_as", "difference", "observations") if key in entry}
    points = f"{len(results.rows)} in {document['wall_s']:.1f} s"
    page = templates(__package__, "tenuto.loadgen.report").get_template("experiment.html")
    return page.render(
        experiment=experiment,
        figures_of_it=_figures(experiment),
        document=document,
        reproduced=reproduced_of(document["observations_summary"]),
        observations=[(seen, *_STATES[seen.status], _place_of(experiment, seen.figure)) for seen in observations],
        slos=results.slos(),
        charts_at=lambda slo: _charts(experiment, results, slo),
        losses=list(_losses(results)),
        details=[point for number, it in enumerate(experiment.details) if (point := _detail(number, it, results))],
        stated=dict(_flat(stated)),
        coefficients=_COEFFICIENTS,
        absent=results.errors(),
        made=how_it_was_made(
            document, document["settings"], profile=document["profile"], network=document["network"], points=points
        ),
        emulated=sorted({note for row in results.rows for note in row.get("emulation", ())}),
    )


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


def _styles(series: Sequence[str]) -> dict[str, Style]:
    """Return the style of each series: a policy's colour everywhere the same, a published plan's dashed."""
    policies = [*_ORDER, *sorted({name for name in series if name not in _ORDER and "(" not in name})]
    known = styles_for(policies)
    return {
        name: known[name] if name in known else Style(known.get(name.split(" ")[0], _IDEAL).colour, "1 4")
        for name in series
    }


def _charts(experiment: Experiment, results: Results, slo: float) -> Iterator[Figure]:
    """Goodput against x: the thesis' policies and the others, under each scheduler, all on one scale."""
    lines = [name for name in results.series() if "(" not in name]
    ours = [name for name in THESIS_POLICIES if name in lines]
    others = [name for name in lines if name not in THESIS_POLICIES]
    for group, what in ((ours, "the thesis' policies"), (others, "other policies")):
        for scheduler in experiment.schedulers if group else ():
            yield _chart(experiment, results, group, slo, scheduler, f"{what}, {_WORDS[scheduler]}")


def _chart(
    experiment: Experiment, results: Results, group: Sequence[str], slo: float, scheduler: str, what: str
) -> Figure:
    at = sorted({float(row["case"]["x"]) for row in results.rows if float(row["case"]["slo_ms"]) == slo})
    sent = {
        float(row["case"]["x"]): row["runs"][scheduler]["offered_rps"]
        for row in results.rows
        if "runs" in row and float(row["case"]["slo_ms"]) == slo
    }
    top = max(sent.values(), default=1.0) * 1.08
    plot = Plot((min(at), max(at)), (0.0, top), x_label=experiment.x_label, y_label="goodput, r/s")
    xs = np.array(at)
    styles = _styles(group)
    for name in group:
        rows = [results.find(name, x, slo) for x in at]
        values = [np.nan if row is None else row["runs"][scheduler]["goodput_rps"] for row in rows]
        plot.line(xs, np.array(values), styles[name], name, width=2.5)
        for x, value in zip(at, values, strict=True):
            if not np.isnan(value):
                plot.dot(x, value, styles[name], f"{name} at {x:g}: {value:.0f} r/s")
    plot.line(xs, np.array([sent.get(x, np.nan) for x in at]), _IDEAL, "sent", width=1.5)
    return Figure(f"{what[0].upper()}{what[1:]}", plot, f"Goodput of {what} at an SLO of {slo:g} ms")


def _losses(results: Results) -> Iterator[tuple[str, ...]]:
    """Draw what plans promise, and what each scheduler reaches of it, summed over the points of a series."""
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
        yield name, str(len(mine)), *means, *kept


def _detail(number: int, detail: Detail, results: Results) -> dict[str, Any]:
    """Return what the template shows of a point; nothing if the point did not run."""
    row = results.find(detail.series, detail.x, detail.slo_ms)
    if row is None:
        return {}
    plan = Plan.from_data(row["plan"])
    styles = styles_for([spec.name for spec in plan.models])
    bars = [_bar("sent", row, styles, "offered_rps", ROUTER)]
    bars += [_bar(f"in time, {_WORDS[s]}", row, styles, "goodput_rps", s) for s in row["runs"]]
    goodput = Bars(bars, unit="requests per second")
    return {
        "anchor": f"point{number}",
        "caption": detail.caption,
        "picture": Markup(draw(plan, {name: style.colour for name, style in styles.items()})),
        "stated": [note for note in plan.notes if note.startswith("stated in")],
        "figures": [
            Figure("Goodput by model", goodput, f"Goodput by model: {detail.caption}"),
            *(_stage_chart(run, f"Where the time goes, {_WORDS[s]}") for s, run in row["runs"].items()),
        ],
        "replicas": [
            (name, replica, _WORDS[scheduler])
            for scheduler, run in row["runs"].items()
            for name, model in run["models"].items()
            for replica in model["replicas"]
        ],
    }


def _bar(label: str, row: Mapping[str, Any], styles: Mapping[str, Style], key: str, scheduler: str) -> Bar:
    models = row["runs"][scheduler]["models"]
    parts = [BarPart(name, model[key], styles[name], f"{name}: {model[key]:.0f} r/s") for name, model in models.items()]
    return Bar(label, parts, f"{sum(part.value for part in parts):.0f} r/s")


def _stage_chart(run: Mapping[str, Any], heading: str) -> Figure:
    split = {name: model["p95_ms"] for name, model in run["models"].items()}
    return where_the_time_goes(heading, split, stages=_STAGES)


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
