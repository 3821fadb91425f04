"""The page and files of `tenuto lab curves`: attainment against rate scale, SLO scale and burstiness."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.batching.virtual.criterion import Goal
from tenuto.loadgen.report.charts import Figure, Plot
from tenuto.loadgen.report.palette import styles_for
from tenuto.loadgen.report.run_page import how_it_was_made
from tenuto.loadgen.result_folder import prepare_folder, write_files
from tenuto.pages import templates

_AXES = {
    "rate_scale": ("Rate", "factor on every rate"),
    "slo_scale": ("SLO", "factor on every SLO"),
    "cv": ("Burstiness", "coefficient of variation of the gaps (1: Poisson)"),
}
_FILES = ("result.json", "curves.html")


def prepare_curves_folder(folder: Path, *, force: bool) -> Path:
    """Create the folder; see `prepare_folder`."""
    return prepare_folder(folder, _FILES, "curves", force=force)


def render_curves(document: Mapping[str, Any]) -> str:
    """Return the page as text; `document` is the content of result.json."""
    worst = "worst model or application" if document.get("applications") else "worst model"
    required = Goal().attainment
    return (
        templates(__package__, "tenuto.loadgen.report")
        .get_template("curves.html")
        .render(
            document=document,
            worst=worst,
            charts=[_chart(curve, required, worst) for curve in document["curves"] if curve["points"]],
            made=how_it_was_made(document, document["settings"]),
        )
    )


def _chart(curve: Mapping[str, Any], required: float, worst: str) -> Figure:
    axis = curve["axis"]
    heading, label = _AXES[axis]
    points = [point for point in curve["points"] if point["invalid"] is None]
    styles = styles_for([worst, "all requests"])
    most = max(point[axis] for point in curve["points"])
    plot = Plot((0.0, most), (0.0, 1.02), x_label=label, y_label="in time", percent_y=True)
    xs = np.array([point[axis] for point in points])
    for name, key in (("all requests", "attainment"), (worst, "worst_attainment")):
        plot.line(xs, np.array([point[key] for point in points]), styles[name], name)
        for x, point in zip(xs.tolist(), points, strict=True):
            hover = f"{name} at {x:g}: {100 * point[key]:.2f} % in time, {point['goodput_rps']:.0f} r/s"
            plot.dot(x, point[key], styles[name], hover)
    good = [point[axis] for point in points if point["worst_attainment"] >= required]
    note = f"The {worst} never reaches {100 * required:g} %."
    if good:
        note = f"{100 * required:g} % of the {worst} from {min(good):.4g} to {max(good):.4g}."
    if len(points) < len(curve["points"]):
        note += f" {len(curve['points']) - len(points)} runs proved nothing and are left out."
    return Figure(heading, plot, f"Attainment against {label}", note)


def write_curves(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write result.json and the page; return the page's path.

    Raises:
        EnvironmentFaultError: a file cannot be written.
    """
    texts = (json.dumps(document, indent=1, allow_nan=False) + "\n", render_curves(document))
    write_files(folder, dict(zip(_FILES, texts, strict=True)))
    return folder / _FILES[1]
