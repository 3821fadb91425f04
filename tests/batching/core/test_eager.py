"""Eager batching: the contract of the core, and what it decides on small cases one can follow by hand."""

from __future__ import annotations

import heapq
from typing import Any

import pytest

from tenuto.batching.core.scheduler import Dispatch, Drop
from tenuto.batching.core.system import System
from tenuto.batching.registry import make_scheduler
from tenuto.errors import InvalidInputError
from tests.batching.core import contract
from tests.batching.core.contract import Chosen
from tests.instruments.systems import everywhere_linear

CHOICES: list[tuple[str, dict[str, Any]]] = [("eager", {})]


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_overload_leaves_nothing_late(chosen: Chosen) -> None:
    contract.overload_leaves_nothing_late(chosen)


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_corrected_latencies_and_delays_are_planned_with(chosen: Chosen) -> None:
    contract.corrected_latencies_and_delays_are_planned_with(chosen)


@pytest.mark.parametrize(("name", "options"), [("eager", {"gather": "x"})])
def test_wrong_options_name_the_cure(one_gpu: System, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        make_scheduler(name, one_gpu, options)


def test_eager_falls_out_of_the_staggered_pattern_as_published(trace_system: System) -> None:
    """Symphony §3.3: R13 to R15 stay away; GPUs 1 to 3 run four each from 2.25, 5.25 and 8.25 on, deferred."""
    core = make_scheduler("eager", trace_system)
    for gpulet in range(3):
        core.gpulet_lost(0.0, gpulet)
    events: list[tuple[float, int, int, str]] = [(2.25 + 3.0 * g, 1, g, "back") for g in range(3)]
    events += [(0.75 * (i - 1), 0, i, "add") for i in range(1, 40) if i not in (13, 14, 15)]
    heapq.heapify(events)
    batches: dict[float, tuple[int, list[int]]] = {}
    dropped: list[int] = []
    while events and events[0][0] <= 34.25:
        at, _, index, kind = heapq.heappop(events)
        core.wake(at)
        if kind == "add":
            core.add_request(at, 0, index, at + 12.0)
        elif kind == "back":
            core.gpulet_back(at, index)
        else:
            core.batch_done(at, index)
        if core.next_wake_ms <= at:
            core.wake(at)
        for decision in core.drain():
            if isinstance(decision, Dispatch):
                batches[at] = (decision.gpulet + 1, list(decision.request_ids))
                heapq.heappush(events, (decision.finish_ms, 1, decision.gpulet, "done"))
            elif isinstance(decision, Drop):
                dropped += decision.request_ids
    assert batches[2.25] == (1, [1, 2, 3, 4])
    assert batches[11.25] == (1, [16])
    assert batches[18.0][1] == [25]
    assert batches[23.25] == (2, [26, 27])  # seven wait, two fit
    assert dropped == [35, 37, 38]


def test_eager_runs_at_once_and_then_what_has_gathered(one_gpu: System) -> None:
    core = make_scheduler("eager", one_gpu)
    core.add_request(0.0, 0, 0, 20.0)
    core.wake(0.0)
    assert core.drain() == [Dispatch(0, 0, [0], 0.0, 6.0)]
    for request in (1, 2, 3):
        core.add_request(float(request), 0, request, request + 20.0)
    assert core.drain() == []
    core.batch_done(6.0, 0)
    assert [len(d.request_ids) for d in core.drain() if isinstance(d, Dispatch)] == [3]


def test_eager_makes_one_batch_of_what_comes_together(one_gpu: System) -> None:
    core = make_scheduler("eager", one_gpu)
    for request in range(3):
        core.add_request(0.0, 0, request, 20.0)
    core.wake(core.next_wake_ms)
    assert core.drain() == [Dispatch(0, 0, [0, 1, 2], 0.0, 8.0)]
    core.add_request(1.0, 0, 3, 21.0)
    assert core.drain() == []


def test_eager_gives_each_idle_gpulet_its_part_of_what_comes_together() -> None:
    core = make_scheduler("eager", everywhere_linear([(name, 1.0, 5.0, 30.0, None) for name in "ab"], 2))
    for model, request, deadline in ((0, 0, 30.0), (1, 1, 20.0), (0, 2, 30.0)):
        core.add_request(0.0, model, request, deadline)
    core.wake(core.next_wake_ms)
    batches = [(d.program, list(d.request_ids)) for d in core.drain() if isinstance(d, Dispatch)]
    assert batches == [(1, [1]), (0, [0, 2])]


def test_eager_serves_the_most_urgent_model_first() -> None:
    core = make_scheduler("eager", everywhere_linear([(name, 1.0, 5.0, 30.0, None) for name in "abc"], 1))
    core.add_request(0.0, 0, 0, 30.0)
    core.wake(0.0)
    core.drain()
    core.add_request(1.0, 1, 1, 20.0)
    core.add_request(1.0, 2, 2, 19.0)
    core.batch_done(6.0, 0)
    assert [d.program for d in core.drain() if isinstance(d, Dispatch)] == [2]
