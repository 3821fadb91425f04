"""The page of a run: one HTML file that opens without network, in light and dark, on a phone and on paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tenuto.batching.core.scheduler_status import SchedulerStatus, describe_schedulers
from tenuto.loadgen.report import sections
from tenuto.loadgen.report.palette import styles_for
from tenuto.loadgen.report.series import predictions
from tenuto.loadgen.result_folder import write_files
from tenuto.loadgen.run import Run, load_run
from tenuto.pages import templates
from tenuto.placement.shown.picture import draw


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
    document, plan = run.document, run.plan
    planned = [spec.name for spec in plan.models] if plan else []  # stages of applications among them
    styles = styles_for([*dict.fromkeys((*run.names, *planned))])
    predicted = predictions(run)
    schedulers = map(SchedulerStatus.of_data, document.get("schedulers", ()))
    return (
        templates(__package__)
        .get_template("report.html")
        .render(
            run=run,
            document=document,
            styles=styles,
            conditions=document["verdict"].get("conditions", {}),
            charts=sections,
            predictions=predicted,
            picture=plan
            and plan.gpulets
            and Markup(draw(plan, {name: style.colour for name, style in styles.items()})),
            made=how_it_was_made(
                document,
                document["options"],
                scheduler="; ".join(describe_schedulers(schedulers)),
                **{"schedule (SHA-256)": document.get("schedule_hash", "")},
                measured_window=f"{run.begin_ms / 1000:g} s to {run.end_ms / 1000:g} s",
                requests=str(document.get("requests", len(run.records))),
            ),
            remarks=[*document.get("schedule_notes", []), *(plan.notes if plan is not None else ())],
        )
    )


def how_it_was_made(document: Mapping[str, Any], settings: Mapping[str, Any], **more: str) -> dict[str, str]:
    """Return command, settings, machine and versions of a document in words, with the entries of `more`."""
    rows = {
        "command": " ".join(document.get("command", [])),
        "settings": _listed(settings),
        **more,
        "hardware": ", ".join(f"{key} {value}" for key, value in (document.get("hardware") or {}).items() if value),
        "versions": _listed(document.get("versions") or {}),
    }
    return {key.replace("_", " "): text for key, text in rows.items() if text}


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)
