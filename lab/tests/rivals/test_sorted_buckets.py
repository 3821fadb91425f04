"""The rival that sorts requests by size and pads neighbours."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given

from tenuto.batching.core.scheduler import Dispatch
from tenuto.batching.virtual.simulator import simulate
from tenuto.outcome import Outcome
from tenuto_lab.rivals.sorted_buckets import SortedBucketsScheduler
from tests.batching.checked_run import CheckedRun
from tests.batching.core.contract import Drawn
from tests.batching.core.test_joining import sized_scenarios, system


@given(sized_scenarios(faults=False))
def test_every_request_has_one_outcome_and_no_promise_is_broken(scenario: Drawn) -> None:
    sized, events = scenario
    assume(len(sized.models[0].sizes) == 1)
    run = CheckedRun(SortedBucketsScheduler(sized))
    out = run.run(events)
    assert {*out.served, *out.dropped, *out.cancelled} == {event.ref for event in events if event.kind == "add"}
    assert not run.queued


def test_neighbours_share_a_bucket_where_all_then_takes_less_time() -> None:
    core = SortedBucketsScheduler(system())
    core.gpulet_lost(0.0, 0)
    for number, model in enumerate((0, 1, 2)):
        core.add_request(0.0, model, number, 60.0)
    core.gpulet_back(0.0, 0)
    (batch,) = [decision for decision in core.drain() if isinstance(decision, Dispatch)]
    # 2 + 0.02 * 64 * 2 for the two smaller ones; the large one would cost both of them 3.84 ms more.
    assert (batch.program, sorted(batch.request_ids)) == (1, [0, 1])


def test_below_capacity_all_are_in_time() -> None:
    rng = np.random.default_rng(0)
    times, sizes = np.cumsum(rng.exponential(20.0, 1000)), rng.integers(1, 257, (1000, 1))
    result = simulate(SortedBucketsScheduler(system()), times, np.zeros(1000, dtype=np.int32), sizes=sizes)
    counts = result.counts()[0]
    assert counts[Outcome.OK] > 0.99 * counts.sum()
