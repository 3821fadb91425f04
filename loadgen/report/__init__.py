"""Reports of runs: one HTML page from result.json and requests.parquet, or straight from what is in memory."""

from __future__ import annotations

from pathlib import Path

from tenuto.errors import EnvironmentFaultError
from tenuto.loadgen.report.page import render_page
from tenuto.loadgen.report.run import Run, load_document, load_run

__all__ = ["Run", "load_document", "load_run", "render_page", "write_report"]


def write_report(folder: str | Path, run: Run | None = None) -> Path:
    """Write report.html into a run's folder and return its path; without a run, read it from the folder.

    Raises:
        InvalidInputError: the folder holds no run.
        EnvironmentFaultError: the page cannot be written.
    """
    path = Path(folder) / "report.html"
    page = render_page(run if run is not None else load_run(folder))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFaultError(f"{path}: {error.strerror or error}. Free space or give another folder.") from error
    return path
