"""Random graphs of applications, and PARD on them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tenuto.batching.applications.application_graph import ApplicationGraph
from tenuto.batching.applications.stage_times import StageTimes
from tenuto.batching.virtual.application_load import Joins
from tenuto.batching.virtual.simulator import simulate
from tenuto.loadgen.schedule import make_client_schedule, make_load
from tenuto.outcome import Outcome
from tenuto.placement import ModelSpec
from tenuto.placement.workload import client_targets
from tenuto_lab.applications.pard import PardEstimates, PardRun, PardScheduler
from tenuto_lab.applications.random_graphs import Case, draw_case, nexus_split, with_budgets


@pytest.mark.parametrize("seed", range(8))
def test_a_case_is_drawn_from_its_seed_and_nexus_splits_every_path_of_it(seed: int) -> None:
    case = draw_case(seed)
    assert draw_case(seed) == case
    assert 0.0 < case.bound() <= 1.0 + 1e-9
    assert 0.6 <= case.load <= 3.0
    for app in case.applications:
        budgets = nexus_split(app, case)
        graph = ApplicationGraph.of(with_budgets(app, budgets))
        own = [budgets[stage.label] for stage in graph.stages]
        firsts = [place for place, stage in enumerate(graph.stages) if not stage.before]
        longest = max(own[place] + graph.longest_behind(own)[place] for place in firsts)
        assert longest <= app.slo_ms + 1e-6 or longest == pytest.approx(app.slo_ms)


def test_beyond_capacity_a_fluid_answers_a_part() -> None:
    cases = [draw_case(seed) for seed in range(30)]
    assert all(case.bound() == pytest.approx(1.0) for case in cases if case.load < 0.9)
    assert all(case.bound() < 1.0 for case in cases if case.load > 2.5)


def served(case: Case) -> tuple[Joins, float]:
    apps = tuple(with_budgets(app, nexus_split(app, case)) for app in case.applications)
    budgets = {app.model_name(stage): app.budget_ms(stage) for app in apps for stage in app.stages}
    halves = {name: ms / 2.0 for name, ms in budgets.items()}
    system = case.system(budgets, halves)
    models = [ModelSpec(name=m.name, rate_rps=m.rate_rps or 1.0, slo_ms=m.slo_ms) for m in system.models]
    duration_s = 300 / sum(app.rate_rps for app in apps)
    load = make_load(models, make_client_schedule(client_targets(models, apps), apps, duration_s, 0), 0)
    durations = {name: case.latency[name].at(case.largest_within(name, ms)) for name, ms in halves.items()}
    joins = Joins(load, make_run=partial(PardRun, estimates=PardEstimates(durations)))
    result = simulate(
        PardScheduler(system), load.times_ms, load.model_index, deadlines_ms=load.deadlines_ms, follows=joins
    )
    assert not np.any(result.outcome == Outcome.LATE)
    return joins, len(load.calls)


@pytest.mark.parametrize("seed", [4, 8, 11, 21])
def test_pard_answers_calls_in_time_or_drops_them(seed: int) -> None:
    case = draw_case(seed)
    joins, calls = served(case)
    ended = np.sum(list(joins.counts().values()), axis=0)
    assert ended.sum() == calls
    assert ended[Outcome.LATE] == 0
    assert ended[Outcome.OK] > (0.95 if case.load < 0.9 else 0.2) * calls


def test_pard_reckons_with_what_waits_behind_a_module() -> None:
    case = draw_case(11)  # a chain of two
    graph = ApplicationGraph.of(case.applications[0])
    first, last = (stage.model for stage in graph.stages)
    estimates = PardEstimates({first: 10.0, last: 20.0})
    assert estimates.behind_ms(graph, 1) == 0.0
    assert estimates.behind_ms(graph, 0) == pytest.approx(20.0 + 2.0, rel=0.05)  # a duration and a tenth of it
    estimates.note(last, 70.0, 1000.0)  # 40 ms beyond its duration and half of another
    assert estimates.behind_ms(graph, 0) == pytest.approx(62.0, rel=0.05)
    estimates.note(last, 30.0, 7000.0)
    assert estimates.behind_ms(graph, 0) == pytest.approx(22.0, rel=0.05)
    run = PardRun(graph, 0.0, 100.0, StageTimes(), estimates)
    assert run.deadline_ms(0, 5.0) == pytest.approx(78.0, rel=0.05)
