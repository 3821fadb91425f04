"""When a batch is due, and what is cut, by themselves: against what the rules say, worked out without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.core.deferred.cut import Cutter
from tenuto.batching.core.deferred.due import Holding
from tenuto.batching.core.deferred.waiting import WaitingPool, WaitingQueue
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.system import NetworkDelay
from tests.instruments.systems import everywhere_linear

NOW = 1000.0
SLO_MS = 100.0
EXACT = 1e-6  # ms: beside times in whole ms and factors in tenths


class Case(NamedTuple):
    """A model of 2 ms a request and 5 ms a batch on one gpu-let, and what waits for it."""

    queue: WaitingQueue
    pool: WaitingPool
    gpulets: Gpulets[WaitingPool]

    @property
    def run(self) -> list[float]:
        return self.pool.run[0]

    def ends(self, size: int, now: float) -> float:
        """Return when a batch of so many ends that is sent now."""
        gpulets = self.gpulets
        return now + gpulets.ctrl_ms + gpulets.data_ms * size + gpulets.factor(0, 0) * self.run[size]


def waiting(left_ms: Sequence[int], factor: float = 1.0, ctrl_ms: float = 0.0, data_ms: float = 0.0) -> Case:
    """Return requests that have so many ms left of 100; batches take `factor` times as long as planned."""
    network = NetworkDelay(ctrl_ms=ctrl_ms, data_ms_per_request=data_ms)
    system = everywhere_linear([("m", 2.0, 5.0, SLO_MS, None)], 1, network)
    gpulets = Gpulets(system, WaitingPool)
    gpulets.correct(0, 0, factor)
    pool = gpulets.pools[0]
    queue = WaitingQueue(0, [pool], system.models[0], worth=1.0)
    for request_id, left in enumerate(left_ms):
        queue.insert(NOW + left, request_id, NOW + left - SLO_MS)
    queue.oldest = min(queue.arrived)
    queue.adopt_costs(gpulets, SLO_MS, SLO_MS)
    return Case(queue, pool, gpulets)


CASES = st.builds(
    waiting,
    st.lists(st.integers(0, int(SLO_MS)), min_size=1, max_size=12).map(sorted),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0.0, 1.5]),
    st.sampled_from([0.0, 0.25]),
)


@given(CASES, st.integers(1, 12))
def test_a_batch_is_what_can_end_in_time_and_the_front_is_given_up_where_it_keeps_it_short(
    case: Case, defend: int
) -> None:
    queue, gpulets = case.queue, case.gpulets
    queue.costs.defend = defend
    Cutter(gpulets, Holding(gpulets, 1.0, 1.0, 0.0), evens_out=False).cut(queue, case.pool, 0, NOW)
    batch, deadlines = queue.batch, queue.deadlines
    every = min(len(deadlines), queue.costs.longest)
    if case.ends(every, NOW) <= deadlines[0] - EXACT:
        assert batch.size == every
        assert case.ends(batch.size, batch.latest) == pytest.approx(deadlines[0])
        assert batch.cut_until == pytest.approx(batch.latest)
    else:
        assert batch.due == NOW
        lengths = range(1, len(deadlines) + 1)
        kept = [size for size in lengths if size <= defend and case.ends(size, NOW) <= deadlines[-size] + EXACT]
        if not kept:
            assert batch.size == 1  # on its first pool it is lined up, and expires there
        else:
            end = case.ends(max(kept), NOW)
            left = [deadline for deadline in deadlines if deadline >= end - EXACT]
            assert batch.size == max(n for n in range(1, len(left) + 1) if case.ends(n, NOW) <= left[0] + EXACT)
            assert case.ends(batch.size, batch.latest) == pytest.approx(left[0])
    assert batch.density == pytest.approx(batch.size / (gpulets.factor(0, 0) * case.run[batch.size]))


@given(CASES, st.sampled_from([0.0, 0.25, 1.0]))
def test_a_batch_is_held_for_a_part_of_the_time_until_one_more_request_would_be_late(case: Case, hold: float) -> None:
    """Held in full it goes at Symphony's frontrun: when a batch with one more request would just end in time."""
    queue, gpulets = case.queue, case.gpulets
    size = len(queue.deadlines)
    due = Holding(gpulets, hold, 1.0, 0.0).due_ms(queue, case.run, size, NOW)
    if size >= queue.costs.longest:
        assert due == NOW
        return
    first = queue.deadlines[0]
    frontrun = first - (case.ends(size + 1, NOW) - NOW)
    arrived = first - SLO_MS
    assert due == pytest.approx(arrived + hold * (frontrun - arrived))


@given(CASES, st.integers(0, 50))
def test_nothing_is_held_for_longer_than_is_asked_for(case: Case, longest_ms: int) -> None:
    queue = case.queue
    queue.hold.most_ms, queue.hold.is_bounded = float(longest_ms), True
    holding = Holding(case.gpulets, 1.0, 1.0, 0.0)
    if len(queue.deadlines) < queue.costs.longest:
        assert holding.due_ms(queue, case.run, len(queue.deadlines), NOW) <= queue.oldest + longest_ms


def test_under_light_load_nothing_is_held_unless_requests_were_lost() -> None:
    case = waiting([90, 95])
    queue = case.queue
    queue.hold.is_light = queue.hold.is_bounded = True
    holding = Holding(case.gpulets, 1.0, 1.0, save_above=0.5)
    assert holding.due_ms(queue, case.run, 2, NOW) == queue.oldest
    holding.also_light_until = NOW + 1.0
    assert holding.due_ms(queue, case.run, 2, NOW) > NOW
