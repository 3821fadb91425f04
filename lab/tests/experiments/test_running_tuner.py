"""GSLICE+ tuning while it serves: the workloads are the published ones, the loops keep their bounds whatever they are
told, and what comes out on the two GPUs that the paper looks at."""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from lab.tests.baselines.igniter.cases import FACTS, placed, profiles, together, twelve
from tenuto.placement import Cluster, solve
from tenuto_lab.baselines.gslice import Gslice, Observed
from tenuto_lab.baselines.igniter.igniter import Igniter
from tenuto_lab.experiments.running_tuner import FIGURES, run_figure, workload_of
from tenuto_lab.verbs.experiment import command


def test_the_workloads_are_the_published_ones_and_share_the_published_gpus() -> None:
    stated = {row["id"]: (row["model"], row["slo_ms"], row["rate_rps"]) for row in FACTS["table3_workloads"]}
    assert {name: stated[name] for rows in FIGURES.values() for name, *_ in rows} == {
        name: tuple(row) for rows in FIGURES.values() for name, *row in rows
    }
    assert [{name for name, *_ in rows} for rows in FIGURES.values()] == [
        set(row[:-1]) for row in FACTS["plan_facts_stated"]["colocated"]
    ]


def test_igniters_plan_for_a_gpu_is_its_part_of_the_plan_for_all_twelve() -> None:
    whole = Igniter().place(twelve(), Cluster.parse("v100", elastic=True), profiles())  # without replicas for promises
    for figure in FIGURES:
        own = solve(Igniter(), workload_of(figure, profiles()), Cluster.parse("v100:1"), profiles())
        assert together(own)[0] in together(whole)
        assert placed(own).items() <= placed(whole).items()


@pytest.mark.parametrize("overcommit", [True, False])
def test_the_loops_keep_their_bounds_and_end_whatever_is_observed(overcommit: bool) -> None:
    random = np.random.default_rng(28041)
    gslice = Gslice(overcommit=overcommit)
    workload = workload_of("igniter-16", profiles())
    packed = gslice.untuned(workload, Cluster.parse("v100:1"), profiles())
    (tuning,) = gslice.tunings(packed, workload, profiles())
    most = tuning.demands[0].most_units
    for _ in range(50):
        loop = tuning.loop()
        settings, observations = next(loop), 0
        try:
            while True:
                assert all(1 <= s.batch_size <= gslice.max_batch and 1 <= s.units <= most for s in settings)
                assert overcommit or sum(s.units for s in settings) <= most
                observations += 1
                latency_ms, capacity_rps = 10 ** random.uniform(-1, 3, 3), 10 ** random.uniform(0, 4, 3)
                settings = loop.send([Observed(*one) for one in zip(latency_ms, capacity_rps, strict=True)])
        except StopIteration:
            pass
        assert observations <= gslice.share_rounds * (gslice.batch_rounds + 1) + gslice.batch_rounds


def test_a_loop_that_is_told_what_it_aims_at_changes_nothing_more() -> None:
    workload = workload_of("igniter-15", profiles())
    (tuning,) = Gslice().tunings(Gslice().untuned(workload, Cluster.parse("v100:1"), profiles()), workload, profiles())
    loop = tuning.loop()
    first = next(loop)
    content = [Observed(0.95 * demand.budget_ms, 1.05 * demand.rate_rps) for demand in tuning.demands]
    assert loop.send(content) == first
    with pytest.raises(StopIteration) as end:
        loop.send(content)
    assert end.value.value == first


def test_igniters_plan_holds_from_the_first_second_and_gslice_only_after_it_was_tuned() -> None:
    igniter, gslice, _ = run_figure("igniter-15", duration_s=150, seed=0)
    assert igniter.changes == 0
    assert gslice.changes > 3
    for name, _, slo_ms, _ in FIGURES["igniter-15"]:
        assert all(moment.good == moment.ended > 0 for moment in igniter.series[name])
        first, last = gslice.series[name][5], gslice.series[name][-1]
        assert first.good < 0.2 * first.ended
        assert last.good == last.ended > 0
        assert (first.share_pct, first.batch_size) == (30.0, 1)
        assert last.latency_ms is not None
        assert last.latency_ms < slo_ms / 2


def test_the_command_writes_both_files_and_says_what_it_does_not_take(tmp_path: Path) -> None:
    how = ["igniter-15", "--duration-s", "25", "-o", str(tmp_path)]
    ran = CliRunner().invoke(command, how, standalone_mode=False)
    assert ran.exception is None
    assert ran.return_value == 0
    folder = tmp_path / "figure-igniter-15"
    document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert [len(one["series"]["W9"]) for one in document["series"]] == [25, 25, 25]
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == 8
    assert "<script" not in page
    refused = CliRunner().invoke(command, ["igniter-15", "--live"], standalone_mode=False).exception
    assert isinstance(refused, click.UsageError)
    assert "--live" in str(refused)
