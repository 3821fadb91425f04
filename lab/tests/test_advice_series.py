"""Advice over the time of a simulated run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tenuto.batching.core.system import Host, Model, ScheduledGpulet, System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto_lab.advice_series import advice_over_time
from tenuto_lab.autoscale import AutoscaleOptions
from tenuto_lab.verbs.advice import command
from tests.instruments.systems import everywhere_linear


def steady(gap_ms: float, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    times = np.arange(0.0, seconds * 1000.0, gap_ms)
    return times, np.zeros(len(times), dtype=np.int32)


def test_idle_gpus_are_offered_and_missing_ones_asked_for() -> None:
    system = everywhere_linear([("a", 0.001, 10.0, 12.0, None)], 4)  # hardly any batching pays: 100 batches/s per GPU
    calm = simulate(make_scheduler("eager", system), *steady(20.0, 10.0), duration_s=10.0)
    options = AutoscaleOptions(window_s=2.0, headroom=0.0)
    series = advice_over_time(calm, options)
    assert [advice.end_s for advice in series] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert all(advice.idle_fraction == pytest.approx(1 - 0.5 / 4, abs=0.01) for advice in series)
    assert all(advice.delta_gpus == -3 for advice in series)
    assert sum(advice.requests for advice in series) == 500
    lone = everywhere_linear([("a", 10.0, 0.001, 12.0, None)], 2)
    full = simulate(make_scheduler("eager", lone), *steady(2.5, 10.0), duration_s=10.0)
    busy = advice_over_time(full, options)
    assert all(advice.bad_rate == pytest.approx(0.5, abs=0.02) for advice in busy[1:])
    assert {advice.delta_gpus for advice in busy[1:]} <= {2, 3}


def test_gpulets_of_one_gpu_count_once() -> None:
    host = {0: Host((0.0, 10.0))}
    system = System((Model("a", 12.0),), (ScheduledGpulet("g/a", "g", host), ScheduledGpulet("g/b", "g", host)))
    result = simulate(make_scheduler("eager", system), *steady(5.0, 4.0), duration_s=4.0)
    assert {advice.gpus for advice in advice_over_time(result, AutoscaleOptions(window_s=1.0))} == {1}


def test_a_run_shorter_than_a_window_has_no_advice() -> None:
    system = everywhere_linear([("a", 1.0, 5.0, 20.0, None)], 1)
    assert (
        advice_over_time(
            simulate(make_scheduler("eager", system), *steady(50.0, 1.0), duration_s=1.0), AutoscaleOptions()
        )
        == []
    )


def test_the_verb_prints_it(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(
        "models: [{name: a, rate_rps: 20, slo_ms: 50, latency: {alpha_ms: 1, beta_ms: 5}}]\n"
    )
    arguments = [
        str(tmp_path / "w.yaml"),
        "--gpus",
        "v100:4",
        "--scheduler",
        "eager",
        "--duration-s",
        "10",
        "--window-s",
        "2",
    ]
    shown = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    assert [row["delta_gpus"] < 0 for row in json.loads(shown.stdout)["advice"]] == [True] * 5
    assert "GPUs to add" in CliRunner().invoke(command, arguments, catch_exceptions=False).stdout
    assert "x>0" in CliRunner().invoke(command, [*arguments[:-1], "-1"]).output
