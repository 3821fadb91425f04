"""What holds for every rival: the contract of a scheduler, under generated scenarios, and unchanged by the fast
driver."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay, System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tests.batching.checked_run import CheckedRun, Event
from tests.batching.core.test_properties import check_outcomes, scenarios
from tests.instruments.systems import everywhere_linear

CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("eager", {}),
    ("timeout", {}),
    ("timeout", {"batch_size": 3, "wait_ms": 2.0}),
    ("clockwork", {}),
    ("clockwork", {"order": "latest"}),
    ("clockwork", {"sizes": "all"}),
    ("nexus", {}),
    ("nexus", {"plan": "epochs", "epoch_s": 1.0, "early_epoch_s": 1.0, "rate_window_s": 1.0}),
    ("shepherd", {}),
    ("shepherd", {"preempt_ratio": 0.0}),
    ("shepherd", {"preempt_ratio": 1.5}),
]
rivals = st.sampled_from(CHOICES)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def build(system: System, chosen: tuple[str, dict[str, Any]]) -> Scheduler:
    return make_scheduler(chosen[0], system, chosen[1])


@FEW
@given(scenarios(), rivals)
def test_every_request_has_one_outcome_and_no_promise_is_broken(
    scenario: tuple[System, list[Event]], chosen: tuple[str, dict[str, Any]]
) -> None:
    system, events = scenario
    run = CheckedRun(build(system, chosen))
    check_outcomes(events, run.run(events), run)


@FEW
@given(scenarios(), rivals)
def test_an_expired_request_is_answered_by_its_deadline(
    scenario: tuple[System, list[Event]], chosen: tuple[str, dict[str, Any]]
) -> None:
    system, events = scenario
    run = CheckedRun(build(system, chosen))
    out = run.run(events)
    arrived = {event.ref: event.at for event in events if event.kind == "add"}
    for request, at in out.dropped.items():
        assert at <= max(run.deadline[request], arrived[request]) + 0.01


@FEW
@given(scenarios(faults=False), rivals)
def test_the_same_events_give_the_same_batches(
    scenario: tuple[System, list[Event]], chosen: tuple[str, dict[str, Any]]
) -> None:
    system, events = scenario
    assert CheckedRun(build(system, chosen)).run(events) == CheckedRun(build(system, chosen)).run(events)


@FEW
@given(scenarios(faults=False), rivals)
def test_a_lone_request_that_can_be_met_is_served(
    scenario: tuple[System, list[Event]], chosen: tuple[str, dict[str, Any]]
) -> None:
    system, events = scenario
    network = system.network
    if chosen[0] in ("nexus", "timeout"):
        return  # these bind a request to one gpu-let, or wait by the clock and not by its deadline
    spaced = [
        Event(1000.0 * n, "add", e.index, e.ref, e.slo_ms) for n, e in enumerate(e for e in events if e.slo_ms > 0)
    ]
    out = CheckedRun(build(system, chosen)).run(spaced)
    for event in spaced:
        best = min(
            (g.hosts[event.index].planned_ms()[1] for g in system.gpulets if event.index in g.hosts), default=math.inf
        )
        if best + network.ctrl_ms + network.data_ms_per_request + network.response_ms <= event.slo_ms:
            assert event.ref in out.served


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_overload_leaves_nothing_late(chosen: tuple[str, dict[str, Any]]) -> None:
    system = everywhere_linear([("a", 1.0, 5.0, 25.0, None), ("b", 2.0, 6.0, 60.0, None)], 3)
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(0.5, 4000))
    models = rng.integers(0, 2, len(times)).astype(np.int32)
    result = simulate(build(system, chosen), times, models)
    assert result.counts()[:, Outcome.LATE].sum() == 0
    assert result.counts()[:, Outcome.OK].sum() > 0.1 * len(times)


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_corrected_latencies_and_delays_are_planned_with(chosen: tuple[str, dict[str, Any]]) -> None:
    system = everywhere_linear([("a", 1.0, 5.0, 30.0, 100.0)], 1)
    core = build(system, chosen)
    core.update_latency(0, 0, 2.0)
    core.update_network(NetworkDelay(0.5, 0.25, 1.0))
    core.add_request(0.0, 0, 0, 30.0)
    decisions = core.drain()
    while not decisions:
        core.wake(core.next_wake_ms)
        decisions = core.drain()
    (dispatch,) = decisions
    assert dispatch.finish_ms - dispatch.start_ms == pytest.approx(12.0)  # type: ignore[union-attr]
    core.add_request(1.0, 0, 1, 1.0 + 13.0)  # 12 + 0.75 + 1 does not fit
    assert [type(d).__name__ for d in core.drain()] == ["Drop"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eager", {"gather": "x"}),
        ("timeout", {"batch_size": -1}),
        ("timeout", {"drop": "never"}),
        ("clockwork", {"size": 1}),
        ("nexus", {"epoch_s": "nan"}),
        ("shepherd", {"preempt_ratio": -1}),
    ],
)
def test_wrong_options_name_the_cure(one_gpu: System, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        make_scheduler(name, one_gpu, options)
