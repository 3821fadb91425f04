"""The page and files of `tenuto goodput`: attainment against rate scale, SLO scale and burstiness."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.loadgen.report.blocks import figure, how_it_was_made, in_time, table
from tenuto.loadgen.report.charts import Plot, legend
from tenuto.loadgen.report.page import html_document
from tenuto.loadgen.report.palette import styles_for
from tenuto.loadgen.result_folder import prepare_folder, write_files

_AXES = {
    "rate_scale": ("Rate", "factor on every rate"),
    "slo_scale": ("SLO", "factor on every SLO"),
    "cv": ("Burstiness", "coefficient of variation of the gaps (1: Poisson)"),
}
_FILES = ("result.json", "goodput.html")


def prepare_goodput_folder(folder: Path, *, force: bool) -> Path:
    """Create the folder; see `prepare_folder`."""
    return prepare_folder(folder, _FILES, "goodput", force=force)


def render_goodput(document: Mapping[str, Any]) -> str:
    """Return the page as text; `document` is the content of result.json."""
    if document["rate_scale"]:
        rps, scale = document["goodput_rps"], document["rate_scale"]
        head = f"{rps:,.0f} requests per second in time, {scale:.3g} times the rate"
    else:
        head = "No rate that was tried is in time"
    parts = [
        f"<h1>{escape(head)}</h1>",
        f'<p class="note">{escape(document["source"])} · {escape(document["how"])} · '
        f"{escape(str(document['date']))}</p>",
        f'<div class="verdict"><strong>{escape(_bracket(document))}</strong>'
        f"<p>{_criterion(document)} keeps {100 * document['required_attainment']:g} % of its requests in time up to "
        "there.</p></div>",
    ]
    worst = "worst model or application" if document.get("applications") else "worst model"
    charts = [_chart(curve, document["required_attainment"], worst) for curve in document["curves"] if curve["points"]]
    if charts:
        at = f"At {document['curves_rate_scale']:.4g} times the rate, one thing changed at a time."
        parts.append(f'<h2>Attainment</h2><p class="note">{at}</p><div class="grid">{"".join(charts)}</div>')
    parts += [_table("Runs of the search", document["trials"], worst), how_it_was_made(document, document["settings"])]
    return html_document("Goodput · Tenuto", "".join(parts))


def _criterion(document: Mapping[str, Any]) -> str:
    if not document.get("applications"):
        return "Every model"
    return (
        f"Every application ({escape(', '.join(document['applications']))}), end to end, and every model that is no "
        "stage of one"
    )


def _bracket(document: Mapping[str, Any]) -> str:
    upper = "no upper bound found" if document["upper_scale"] is None else f"not at {document['upper_scale']:.4g}"
    return f"In time at {document['rate_scale']:.4g}, {upper} ({document['ended']})"


def _chart(curve: Mapping[str, Any], required: float, worst: str) -> str:
    heading, label = _AXES[curve["axis"]]
    points = [point for point in curve["points"] if point["invalid"] is None]
    styles = styles_for([worst, "all requests"])
    plot = Plot(
        (0.0, max(point[curve["axis"]] for point in curve["points"])),
        (0.0, 1.02),
        x_label=label,
        y_label="in time",
        percent_y=True,
    )
    xs = np.array([point[curve["axis"]] for point in points])
    for name, key in (("all requests", "attainment"), (worst, "worst_attainment")):
        plot.line(xs, np.array([point[key] for point in points]), styles[name], name)
        for x, point in zip(xs.tolist(), points, strict=True):
            note = f"{name} at {x:g}: {100 * point[key]:.2f} % in time, {point['goodput_rps']:.0f} r/s"
            plot.dot(x, point[key], styles[name], note)
    good = [point[curve["axis"]] for point in points if point["worst_attainment"] >= required]
    left_out = len(curve["points"]) - len(points)
    note = (
        f"{100 * required:g} % of the {worst} from {min(good):.4g} to {max(good):.4g}."
        if good
        else f"The {worst} never reaches {100 * required:g} %."
    )
    if left_out:
        note += f" {left_out} runs proved nothing and are left out."
    return figure(heading, legend(list(styles.items()), is_line=True) + plot.svg(f"Attainment against {label}"), note)


def _table(heading: str, runs: list[dict[str, Any]], worst: str) -> str:
    heads = ("rate scale", "offered r/s", "goodput r/s", "in time", worst, "which", "remark")
    rows = (
        map(
            escape,
            (
                f"{run['rate_scale']:.4g}",
                f"{run['offered_rps']:,.1f}",
                f"{run['goodput_rps']:,.1f}",
                in_time(run["attainment"]),
                in_time(run["worst_attainment"]),
                run["worst_model"] or "–",
                run["remark"] or "",
            ),
        )
        for run in runs
    )
    return f"<h2>{escape(heading)}</h2>{table(heads, rows)}"


def write_goodput(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write result.json and the page; return the page's path.

    Raises:
        EnvironmentFaultError: a file cannot be written.
    """
    texts = (json.dumps(document, indent=1, allow_nan=False) + "\n", render_goodput(document))
    write_files(folder, dict(zip(_FILES, texts, strict=True)))
    return folder / _FILES[1]
