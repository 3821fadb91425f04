"""Attainment curves: which loads are tried, and the verb with its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tenuto.errors import InvalidInputError
from tenuto.loadgen.endpoint_trials import EndpointTrial
from tenuto_lab.curves import Factors, curves
from tenuto_lab.experiments.curves_page import prepare_curves_folder
from tenuto_lab.verbs.lab import command


def up_to_three(load: Factors) -> EndpointTrial:
    attained = 1.0 if load.rate_scale <= 3.0 else 0.9
    return EndpointTrial(load.rate_scale, 100.0, 100.0 * attained, attained, attained, "m")


def test_each_value_runs_once_in_order_at_the_base_rate() -> None:
    drawn = {
        curve.axis: curve.points
        for curve in curves(up_to_three, {"rate_scale": (2.0, 0.5, 0.5), "cv": (2.0,)}, base_rate_scale=3.0)
    }
    assert [(load.rate_scale, trial.worst_attainment) for load, trial in drawn["rate_scale"]] == [
        (1.5, 1.0),
        (6.0, 0.9),
    ]
    assert drawn["cv"][0][0] == Factors(rate_scale=3.0, cv=2.0)


@pytest.mark.parametrize("axes", [{"slo": (1.0,)}, {"cv": (0.0,)}, {"cv": (float("nan"),)}])
def test_unknown_axes_and_impossible_values_are_refused(axes: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(InvalidInputError, match="--curve"):
        list(curves(up_to_three, axes))


def test_the_verb_draws_curves_on_a_page(tmp_path: Path) -> None:
    workload, folder = tmp_path / "workload.yaml", tmp_path / "out"
    workload.write_text("models:\n  - {name: m, rate_rps: 100, slo_ms: 50, latency: {alpha_ms: 1, beta_ms: 5}}\n")
    arguments = ["curves", str(workload), "--gpus", "v100:1", "--duration-s", "10", "--json", "-o", str(folder)]
    ran = CliRunner().invoke(command, [*arguments, "--curve", "slo_scale=0.1,1", "--curve", "cv=0.2,8"])

    assert ran.exit_code == 0, ran.output
    slo, cv = (curve["points"] for curve in json.loads(ran.stdout)["curves"])
    assert "m" in slo[0]["invalid"]  # 5 ms: no batch can meet it
    assert slo[1]["worst_attainment"] >= 0.99
    assert cv[0]["worst_attainment"] >= cv[1]["worst_attainment"]
    page = (folder / "curves.html").read_text(encoding="utf-8")
    assert "1 runs proved nothing" in page
    assert len(json.loads((folder / "result.json").read_text(encoding="utf-8"))["curves"]) == 2
    with pytest.raises(InvalidInputError, match="--force"):
        prepare_curves_folder(folder, force=False)
