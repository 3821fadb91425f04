"""What holds for every scheduler, Tenuto's own and those of the laboratory; the last two where none looks ahead."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay, System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.outcome import Outcome
from tests.batching.checked_run import CheckedRun, Event
from tests.instruments.systems import everywhere_linear

__all__ = [
    "a_lone_request_that_can_be_met_is_served",
    "corrected_latencies_and_delays_are_planned_with",
    "every_request_has_one_outcome_and_no_promise_is_broken",
    "overload_leaves_nothing_late",
    "the_same_events_give_the_same_batches",
]

Chosen = tuple[str, dict[str, Any]]
Drawn = tuple[System, list[Event]]


def build(system: System, chosen: Chosen) -> Scheduler:
    return make_scheduler(chosen[0], system, chosen[1])


def every_request_has_one_outcome_and_no_promise_is_broken(scenario: Drawn, chosen: Chosen) -> None:
    """Each request ends in exactly one outcome, an expired one by its deadline; the driver checks the batches."""
    system, events = scenario
    run = CheckedRun(build(system, chosen))
    out = run.run(events)
    arrived = {event.ref: event.at for event in events if event.kind == "add"}
    groups = [set(out.served), set(out.dropped), out.cancelled, out.failed]
    assert set().union(*groups) == set(arrived)
    assert sum(map(len, groups)) == len(arrived)
    assert not run.queued
    for request, at in out.dropped.items():
        assert at <= max(run.deadline[request], arrived[request]) + 0.01


def the_same_events_give_the_same_batches(scenario: Drawn, chosen: Chosen) -> None:
    system, events = scenario
    assert CheckedRun(build(system, chosen)).run(events) == CheckedRun(build(system, chosen)).run(events)


def a_lone_request_that_can_be_met_is_served(scenario: Drawn, chosen: Chosen) -> None:
    system, events = scenario
    network = system.network
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


def overload_leaves_nothing_late(chosen: Chosen) -> None:
    system = everywhere_linear([("a", 1.0, 5.0, 25.0, None), ("b", 2.0, 6.0, 60.0, None)], 3)
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(0.5, 4000))
    models = rng.integers(0, 2, len(times)).astype(np.int32)
    result = simulate(build(system, chosen), times, models)
    assert result.counts()[:, Outcome.LATE].sum() == 0
    assert result.counts()[:, Outcome.OK].sum() > 0.1 * len(times)


def corrected_latencies_and_delays_are_planned_with(chosen: Chosen) -> None:
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
    found = core.drain()
    while core.next_wake_ms < math.inf:
        core.wake(core.next_wake_ms)
        found += core.drain()
    assert [type(decision).__name__ for decision in found] == ["Drop"]
