"""The page: one self-contained HTML file that opens without network, in light and dark, on a phone and on paper."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from tenuto.batching.core.told import SchedulerStatus, describe_schedulers
from tenuto.loadgen.report import sections
from tenuto.loadgen.report.applications import application_table, applications, stage_note
from tenuto.loadgen.report.blocks import how_it_was_made, in_time, number, swatch, table
from tenuto.loadgen.report.palette import Style, colour_css, styles_for
from tenuto.loadgen.result_folder import write_files
from tenuto.loadgen.run import Run, load_run
from tenuto.placement.shown.picture import draw

_LIGHT = "--back:#ffffff;--panel:#f6f7f9;--text:#1a1c20;--muted:#6a7078;--rule:#d9dde3;"
_DARK = "--back:#14161a;--panel:#1d2026;--text:#e8eaee;--muted:#9aa1ab;--rule:#363b44;"


def write_report(folder: str | Path, run: Run | None = None) -> Path:
    """Write report.html into a run's folder and return its path; without a run, read it from the folder.

    Raises:
        InvalidInputError: the folder holds no run.
        EnvironmentFaultError: the page cannot be written.
    """
    write_files(Path(folder), {"report.html": render_page(run if run is not None else load_run(folder))})
    return Path(folder) / "report.html"


def render_page(run: Run) -> str:
    """Return the whole page as text."""
    styles = styles_for([*run.names, *run.applications])
    document = run.document
    title = f"{document['verdict']['result']} · {document['goodput_rps']:.1f} rps goodput · Tenuto"
    charts = (
        applications(run, styles)
        + '<h2>Goodput and latency</h2><div class="grid">'
        + sections.goodput(run, styles)
        + sections.latency(run, styles)
        + sections.stages(run)
        + sections.load(run)
        + '</div><h2>Batches</h2><div class="grid">'
        + sections.batches(run, styles)
        + "</div>"
        + _placement(run, styles)
        + '<h2>Execution against the plan</h2><div class="grid">'
        + sections.executions(run, styles)
        + sections.utilisation(run)
        + "</div>"
    )
    body = (
        f"<h1>{escape(_headline(document))}</h1>{_application_headline(run)}"
        f"<p class=note>{escape(run.label)} · {escape(str(document.get('date', '')))}</p>"
        f"{_verdict(document)}{application_table(run, styles)}<h2>Models</h2>{_models(run, styles)}{stage_note(run)}"
        f"{charts}{_provenance(run)}"
    )
    return html_document(title, body)


def html_document(title: str, body: str, extra_css: str = "") -> str:
    """Return a self-contained HTML document with the report's look around a body that is HTML already."""
    look = resources.files("tenuto.loadgen").joinpath("data/report.css").read_text(encoding="utf-8") + extra_css
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>"
        f"<style>:root{{{_LIGHT}{colour_css(dark=False)}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}{colour_css(dark=True)}}}}}{look}</style>"
        f"</head><body>{body}</body></html>\n"
    )


def _headline(document: Mapping[str, Any]) -> str:
    share = "nothing offered" if document["attainment"] is None else f"{100 * document['attainment']:.2f} % in time"
    return f"{document['goodput_rps']:.1f} of {document['offered_rps']:.1f} requests per second, {share}"


def _application_headline(run: Run) -> str:
    parts = [
        f"{name} {row['goodput_rps']:.1f} of {row['offered'] / run.window_s:.1f} per second"
        + ("" if row["attainment"] is None else f", {100 * row['attainment']:.2f} % in time")
        for name, row in run.applications.items()
    ]
    return f"<p><strong>{escape('; '.join(parts))}</strong></p>" if parts else ""


def _verdict(document: Mapping[str, Any]) -> str:
    verdict = document["verdict"]
    reasons = [*verdict["reasons"], *(f"failures: {line}" for line in document.get("errors", []))]
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    conditions = verdict.get("conditions", {})
    lines = []
    is_live = document.get("kind") != "simulation"
    if is_live and "sent" in conditions:
        later = f", and {conditions['followed']} of later stages when they were due" if "followed" in conditions else ""
        lines.append(f"Sent {conditions['sent']} of {conditions['scheduled']} scheduled requests{later}.")
    if is_live and conditions.get("lateness_p99_ms") is not None:
        lines.append(
            f"The generator was late by {conditions['lateness_p99_ms']:.2f} ms at the 99th percentile; "
            f"{conditions['lateness_limit_ms']:.1f} ms are allowed."
        )
    share = f"{100 * conditions.get('target_attainment', 0.99):g} %"
    if document.get("applications"):
        lines.append(
            f"PASS needs {share} of every application's requests in time, end to end, and of those of every model that "
            "is no stage of one."
        )
    else:
        lines.append(f"PASS needs {share} of every model's requests in time.")
    return (
        f'<div class="verdict {escape(verdict["result"])}"><strong>{escape(verdict["result"])}</strong>'
        f"<ul>{listed}</ul><p class=note>{escape(' '.join(lines))}</p></div>"
    )


def _models(run: Run, styles: Mapping[str, Style]) -> str:
    heads = (
        "model",
        "in time",
        "SLO ms",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "offered",
        "ok",
        "late",
        "expired",
        "rejected",
        "failed",
        "mean batch",
    )
    rows = []
    for name, model in run.document["models"].items():
        slo = run.slo_ms(name)
        rows.append(
            [
                swatch(styles[name]) + escape(name) + _stage_of(model),
                in_time(model["attainment"]),
                "–" if slo is None else f"{round(slo, 1):g}",
                *(number(model[key]) for key in ("p50_ms", "p90_ms", "p99_ms")),
                *(str(model[key]) for key in ("offered", "ok", "late", "expired", "rejected", "failed")),
                number(model["mean_batch"]),
            ]
        )
    return f'{table(heads, rows)}<p class="note">p99 is given from 459 requests on.</p>'


def _stage_of(model: Mapping[str, Any]) -> str:
    return f' <span class="note">stage of {escape(model["stage_of"])}</span>' if "stage_of" in model else ""


def _placement(run: Run, styles: Mapping[str, Style]) -> str:
    if run.plan is None or not run.plan.gpulets:
        return ""
    picture = draw(run.plan, {name: style.colour for name, style in styles.items()})
    return f'<h2>Placement by {escape(run.plan.policy.name)}</h2><div class="scroll">{picture}</div>'


def _provenance(run: Run) -> str:
    document = run.document
    made = how_it_was_made(
        document,
        document["options"],
        scheduler="; ".join(describe_schedulers(map(SchedulerStatus.of_data, document.get("schedulers", ())))),
        **{"schedule (SHA-256)": document.get("schedule_hash", "")},
        measured_window=f"{run.begin_ms / 1000:g} s to {run.end_ms / 1000:g} s",
        requests=str(document.get("requests", len(run.records))),
    )
    remarks = [*document.get("schedule_notes", []), *(run.plan.notes if run.plan is not None else ())]
    notes = "".join(f"<li>{escape(note)}</li>" for note in remarks)
    return made + (f"<ul>{notes}</ul>" if notes else "")
