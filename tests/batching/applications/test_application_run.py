"""Runs of applications: which stages are due when, what ends a run, and by when each request must be answered."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.applications.application_graph import ApplicationGraph, GraphStage
from tenuto.batching.applications.application_run import ApplicationRun
from tenuto.batching.applications.stage_times import StageTimes
from tenuto.batching.core.build import everywhere
from tenuto.batching.core.system import NetworkDelay
from tenuto.placement import Cluster
from tenuto.profiles import Profiles
from tests.instruments.fan_out import traffic, workload

SLO_MS = 100.0


def graph_of(*before: tuple[int, ...], **changes: Any) -> ApplicationGraph:
    """A graph whose stages wait for these; each asks a model of its own and has a budget of 10 ms."""
    stages = tuple(
        GraphStage(f"s{place}", f"m{place}", mine, tuple(i for i, o in enumerate(before) if place in o), 1.0, 10.0)
        for place, mine in enumerate(before)
    )
    return ApplicationGraph("app", SLO_MS, tuple(replace(stage, **changes) for stage in stages))


CHAIN = graph_of((), (0,), (1,))
FORK = graph_of((), (0,), (0,), (1, 2))


def run_of(graph: ApplicationGraph, least_ms: dict[str, float] | None = None) -> ApplicationRun:
    return ApplicationRun(graph, 0.0, SLO_MS, StageTimes(least_ms))


# --- semantics against brute force -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """What becomes of a call: by stage, how long each of its requests takes; None is lost after 1 ms."""

    graph: ApplicationGraph
    requests: tuple[tuple[float | None, ...], ...]


@st.composite
def fates(draw: st.DrawFn) -> Fate:
    count = draw(st.integers(1, 6))
    before = [tuple(sorted(draw(st.sets(st.integers(0, place - 1))) if place else ())) for place in range(count)]
    graph = graph_of(*before)
    may_miss = [draw(st.booleans()) for _ in before]
    stages = tuple(replace(s, allow_missing=m) for s, m in zip(graph.stages, may_miss, strict=True))
    length = st.one_of(st.none(), st.integers(2, 30).map(float)) if draw(st.booleans()) else st.integers(2, 30)
    requests = tuple(tuple(draw(st.lists(length, max_size=4))) for _ in before)
    return Fate(replace(graph, stages=stages), requests)


def brute_force(fate: Fate) -> tuple[list[float | None], float | None]:
    """Return when each stage is due, unless the run is over before, and when the run is lost."""
    due_ms: list[float] = []
    ends_ms: list[float] = []
    lost_ms: list[float] = []
    for stage, requests in zip(fate.graph.stages, fate.requests, strict=True):
        due = max((ends_ms[b] for b in stage.before), default=0.0)
        due_ms.append(due)
        ends_ms.append(due + max((1.0 if r is None else r for r in requests), default=0.0))
        lost_ms += [due + 1.0 for request in requests if request is None and not stage.allow_missing]
    over = min(lost_ms, default=None)
    return [due if over is None or due < over else None for due in due_ms], over


@dataclass
class Driven:
    """A run under a clock of its own."""

    due_ms: dict[int, float] = field(default_factory=dict)
    lost_at_ms: float | None = None


def drive(fate: Fate, times: StageTimes | None = None) -> tuple[Driven, ApplicationRun]:
    run = ApplicationRun(fate.graph, 0.0, SLO_MS, times or StageTimes())
    seen, events = Driven(), list[tuple[float, bool, int]]()

    def send(stages: list[int], now: float) -> None:
        for stage in stages:
            seen.due_ms[stage] = now
            requests = fate.requests[stage]
            for takes_ms in requests:
                # An answer of an instant comes before a loss of the same instant, as brute force has it.
                heappush(events, (now + (takes_ms or 1.0), takes_ms is None, stage))
            send(run.expand(stage, len(requests), now), now)

    send(run.begin(0.0), 0.0)
    while events:
        now, is_lost, stage = heappop(events)
        if not is_lost:
            send(run.answered(stage, now), now)
        elif run.lost(stage, now):
            seen.lost_at_ms = now if seen.lost_at_ms is None else seen.lost_at_ms
        else:
            send(run.due(), now)
    return seen, run


@given(fates())
def test_a_run_does_what_brute_force_does(fate: Fate) -> None:
    due_ms, lost_ms = brute_force(fate)
    seen, run = drive(fate)

    assert run.is_over
    assert run.is_complete is (lost_ms is None)
    assert seen.lost_at_ms == lost_ms
    for stage, at in enumerate(due_ms):
        if at is not None:
            assert seen.due_ms[stage] == at
        elif stage in seen.due_ms:  # the stage was due at the very instant of the loss
            assert seen.due_ms[stage] == lost_ms


# --- what ends a run ----------------------------------------------------------------------------------------------


def test_a_lost_request_ends_the_run_and_nothing_more_becomes_due() -> None:
    run = run_of(FORK)
    assert run.begin(0.0) == [0]
    run.expand(0, 2, 0.0)
    assert run.answered(0, 5.0) == []
    assert run.lost(0, 6.0)
    assert run.is_over
    assert not run.is_complete
    assert run.answered(0, 7.0) == []


def test_a_stage_that_may_be_missing_completes_with_its_last_request() -> None:
    run = run_of(graph_of((), (0,), allow_missing=True))
    run.begin(0.0)
    run.expand(0, 2, 0.0)
    assert run.answered(0, 5.0) == []
    assert not run.lost(0, 6.0)
    assert run.due() == [1]


def test_a_run_is_complete_when_its_last_request_is_lost_and_may_be_missing() -> None:
    run = run_of(graph_of((), allow_missing=True))
    run.begin(0.0)
    run.expand(0, 2, 0.0)
    run.answered(0, 5.0)
    assert not run.lost(0, 6.0)
    assert run.is_complete


def test_stages_without_requests_are_complete_at_once() -> None:
    run = run_of(CHAIN)
    assert [run.begin(0.0), run.expand(0, 0, 0.0), run.expand(1, 0, 0.0), run.expand(2, 0, 0.0)] == [[0], [1], [2], []]
    assert run.is_complete
    assert run.is_over


def test_a_run_that_is_given_up_is_over_without_an_answer() -> None:
    run = run_of(CHAIN)
    run.begin(0.0)
    run.expand(0, 1, 0.0)
    run.give_up(1.0)
    assert run.is_over
    assert not run.is_complete
    assert run.answered(0, 2.0) == []


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_the_next_stage_has_what_an_early_one_leaves_and_all_share_what_it_lacks() -> None:
    run = run_of(graph_of((), (0,), (1,), (2,), budget_ms=25.0))
    assert [run.deadline_ms(0, 0.0), run.deadline_ms(1, 10.0), run.deadline_ms(3, 60.0)] == [25.0, 50.0, 100.0]
    assert run.deadline_ms(1, 40.0) == 60.0  # a third of what is left, as the plan has it


def end_stages(graph: ApplicationGraph, times: StageTimes, at_ms: float, *took_ms: float) -> ApplicationRun:
    """Begin a run at a time, and end its first stages one after another; each took so long."""
    run, now = ApplicationRun(graph, at_ms, at_ms + SLO_MS, times), at_ms
    run.begin(now)
    for stage, ms in enumerate(took_ms):
        run.expand(stage, 1, now)
        now += ms
        run.answered(stage, now)
    return run


def test_a_stage_has_the_time_that_those_behind_it_took_less_lately_until_one_of_them_is_late() -> None:
    times, graph = StageTimes(), graph_of((), (0,), (1,), budget_ms=30.0)

    def left_ms(stage: int) -> float:
        return end_stages(graph, times, 0.0, 5.0).deadline_ms(stage, 0.0)

    first = run_of(graph).deadline_ms(0, 0.0)
    for place in range(200):
        end_stages(graph, times, place * SLO_MS, 5.0, 10.0, 5.0)
    assert first == 40.0  # of 100 ms, 60 are planned for those behind it
    assert left_ms(0) == pytest.approx(SLO_MS - 15.0, abs=0.1)  # those behind it took 15 ms
    end_stages(graph, times, 200 * SLO_MS, 5.0, 20.0, 5.0)
    assert left_ms(1) == pytest.approx(SLO_MS - 5.0, abs=0.1)
    assert left_ms(0) == pytest.approx(SLO_MS - 25.0, abs=0.1)
    lost = end_stages(graph, times, 0.0, 5.0)
    lost.expand(1, 1, 5.0)
    assert lost.lost(1, 6.0)
    assert left_ms(0) == pytest.approx(first, abs=1e-5)
    times.follow(everywhere(workload(traffic()), Cluster.parse("v100:1"), Profiles(())))  # a new plan
    for stage in (0, 1):
        assert left_ms(stage) == run_of(graph).deadline_ms(stage, 0.0)


def test_longer_times_fade_within_about_an_slo_however_many_requests_are_answered() -> None:
    times, graph = StageTimes(), graph_of((), (0,), budget_ms=50.0)
    for count in (1, 100):
        for _ in range(count):
            end_stages(graph, times, 0.0, 5.0, 10.0)
        assert end_stages(graph, times, 0.0).deadline_ms(0, 0.0) == 50.0
    end_stages(graph, times, SLO_MS, 5.0, 10.0)
    kept_ms = 10.0 + 40.0 / math.e
    assert end_stages(graph, times, 0.0).deadline_ms(0, 0.0) == pytest.approx(SLO_MS - kept_ms)


def test_a_loss_concerns_only_the_stages_ahead_of_it() -> None:
    times, graph = StageTimes(), graph_of((), (0,), (0,), (1,), budget_ms=30.0)
    for place in range(200):
        run = end_stages(graph, times, place * SLO_MS, 5.0)
        now = place * SLO_MS + 5.0
        for stage in (1, 2, 3):
            run.expand(stage, 1, now)
            run.answered(stage, now + 5.0 * (stage == 3))
    shortest = end_stages(graph, times, 0.0).deadline_ms(1, 0.0)
    run = end_stages(graph, times, 0.0, 5.0, 5.0)
    run.expand(2, 1, 10.0)
    assert run.lost(2, 20.0)
    assert end_stages(graph, times, 0.0).deadline_ms(1, 0.0) == shortest == pytest.approx(SLO_MS - 5.0, abs=0.1)
    assert end_stages(graph, times, 0.0).deadline_ms(0, 0.0) == pytest.approx(40.0)


@given(st.lists(fates(), max_size=8), fates(), st.floats(0.0, 99.0))
def test_whatever_was_a_stage_has_its_planned_part_and_leaves_what_those_behind_it_need(
    history: list[Fate], fate: Fate, now: float
) -> None:
    needs, times = {f"m{place}": 2.0 for place in range(6)}, StageTimes({f"m{place}": 2.0 for place in range(6)})
    for past in history:
        drive(replace(past, graph=fate.graph, requests=(past.requests * 6)[: len(fate.requests)]), times)
    fresh, run = run_of(fate.graph, needs), ApplicationRun(fate.graph, 0.0, SLO_MS, times)
    for place in range(len(fate.graph.stages)):
        assert run.deadline_ms(place, now) >= fresh.deadline_ms(place, now) - 1e-6
        behind_ms = fate.graph.longest_behind([0.0 if s.allow_missing else 2.0 for s in fate.graph.stages])[place]
        assert run.deadline_ms(place, now) <= max(SLO_MS - behind_ms, now + 2.0) + 1e-6


def test_a_stage_leaves_what_those_behind_it_need() -> None:
    run = run_of(CHAIN, {"m0": 5.0, "m1": 80.0, "m2": 5.0})
    assert run.deadline_ms(0, 0.0) == 15.0
    assert run.deadline_ms(1, 13.0) == 93.0  # half of what is left is less than its model needs


@given(fates(), st.floats(0.0, 120.0), st.lists(st.floats(0.0, 60.0), min_size=6, max_size=6))
def test_what_can_end_has_deadlines_that_can_be_kept(fate: Fate, now: float, least: list[float]) -> None:
    needs = {f"m{place}": ms for place, ms in enumerate(least)}
    run, stages = run_of(fate.graph, needs), fate.graph.stages
    for place, stage in enumerate(stages):
        deadline = run.deadline_ms(place, now)
        assert deadline >= now + needs[stage.model]
        if not stage.allow_missing and not run.cannot_end(place, now):
            assert deadline <= SLO_MS + 1e-6
            assert all(stages[later].allow_missing or not run.cannot_end(later, deadline) for later in stage.later)


def test_a_run_cannot_end_when_its_longest_path_takes_longer_than_is_left() -> None:
    run = run_of(FORK, {"m0": 10.0, "m1": 20.0, "m2": 50.0, "m3": 10.0})
    assert [run.cannot_end(0, 30.0), run.cannot_end(0, 30.1)] == [False, True]
    assert [run.cannot_end(1, 70.0), run.cannot_end(2, 70.0)] == [False, True]


# --- what a run is made from ------------------------------------------------------------------------------------------


def test_a_graph_has_the_stages_of_the_workload() -> None:
    graph = ApplicationGraph.of(workload(traffic()).applications[0])
    assert [stage.model for stage in graph.stages] == ["traffic.ssd", "traffic.a", "traffic.b", "traffic.end"]
    assert [stage.before for stage in graph.stages] == [(), (0,), (0,), (1, 2)]
    assert [stage.later for stage in graph.stages] == [(1, 2), (3,), (3,), ()]
    assert [stage.count for stage in graph.stages] == [1, 3, 1, 1]
    assert [stage.budget_ms for stage in graph.stages] == [60.0, 30.0, 30.0, 30.0]


def test_the_least_time_of_a_model_is_that_of_a_lone_request_on_its_way() -> None:
    times = StageTimes()
    assert times.least_ms("traffic.a") == 0.0
    network = NetworkDelay(ctrl_ms=1.0, data_ms_per_request=0.5, response_ms=2.0)
    times.follow(everywhere(workload(traffic()), Cluster.parse("v100:1"), Profiles(()), network))
    assert times.least_ms("traffic.a") == pytest.approx(8.5)
