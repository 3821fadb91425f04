"""The files of an experiment: result.json with every point, the page, and the profile that was derived for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tenuto.loadgen.result_folder import prepare_folder, provenance, write_files
from tenuto_lab.experiments.case import PROFILE
from tenuto_lab.experiments.derived import DERIVED, derivation
from tenuto_lab.experiments.experiment import Experiment, Observation, Results, Settings
from tenuto_lab.experiments.facts import network_of
from tenuto_lab.experiments.page import render_experiment

FILES = ("result.json", "index.html", "derived-profile.yaml")
_LOADS = {
    "thesis": "Sent is what the thesis' clients reached (section 6.2.1, table 4.1), not their target.",
    "exact": "Sent are the target rates; the thesis' clients fell 8 to 19 % short of them.",
}


def prepare_experiment_folder(folder: Path, *, force: bool) -> Path:
    """Create the folder of one experiment; see `prepare_folder`."""
    return prepare_folder(folder, FILES, "experiment", force=force)


def describe_experiment(
    experiment: Experiment,
    results: Results,
    observations: Sequence[Observation],
    settings: Settings,
    *,
    is_whole: bool,
    wall_s: float,
    command: Sequence[str],
    how: str = "in virtual time",
) -> dict[str, Any]:
    """Return the result document: settings, observations, and every point with its plan and figures."""
    network = network_of(next((tuple(row["case"]["models"]) for row in results.rows), ()))
    states = ("reproduced", "not reproduced", "not checked")
    return {
        "kind": "experiment",
        "name": experiment.name,
        "figures": list(experiment.figures),
        "section": experiment.section,
        "title": experiment.title,
        "how": how,
        "emulated": True,
        "complete": is_whole,
        "load": _LOADS[settings.clients],
        "settings": asdict(settings),
        "profile": PROFILE,
        "derived": _derived(results),
        "network": f"{network.ctrl_ms:g} ms to a gpu-let and as much back, {network.data_ms_per_request:.3f} ms per "
        "image (figure 4.5's printed point)",
        "observations_summary": {state: sum(seen.status == state for seen in observations) for state in states},
        "observations": [asdict(seen) for seen in observations],
        "not_planned": results.errors(),
        "wall_s": wall_s,
        **provenance(command),
        "points": results.rows,
    }


def _derived(results: Results) -> dict[str, Any] | None:
    """Return which policies planned with derived numbers, with the sources of these; None if none did."""
    policies = [row["series"] for row in results.rows if row.get("profile") == DERIVED]
    if not policies:
        return None
    models = next(row["case"]["models"] for row in results.rows)
    data = derivation().to_data()
    kept = {key: {name: data[key][name] for name in models} for key in ("errors_pct", "coefficients")}
    return {"policies": list(dict.fromkeys(policies)), **data, **kept}


def write_experiment(
    folder: Path,
    experiment: Experiment,
    results: Results,
    observations: Sequence[Observation],
    document: Mapping[str, Any],
) -> Path:
    """Write result.json, the page and, where a policy planned with it, the derived profile; return the page's path.

    Raises:
        EnvironmentFaultError: a file cannot be written.
    """
    texts: dict[str, str | Callable[[Path], None]] = {
        "result.json": json.dumps(document, indent=1, allow_nan=False) + "\n",
        "index.html": render_experiment(experiment, results, observations, document),
    }
    if document["derived"] is not None:
        texts["derived-profile.yaml"] = derivation().profile.dump()
    write_files(folder, texts)
    return folder / "index.html"
