"""The thesis' router: when batches leave, and which replica gets which part of the load."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from tenuto.batching.core.scheduler import Dispatch, Drop
from tenuto.batching.core.system import Host, Model, NetworkDelay, ScheduledGpulet, System
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.errors import InvalidInputError
from tenuto.loadgen.schedule import make_schedule
from tenuto.outcome import Outcome
from tenuto.placement import ModelSpec
from tenuto_lab.rivals.thesis_router import ThesisRouterScheduler

pytestmark = pytest.mark.unit


def router(*sizes: int, network: NetworkDelay | None = None, **options: object) -> ThesisRouterScheduler:
    """Return a router over one gpu-let per size, all with one model of 1 ms a request."""
    gpulets = tuple(
        ScheduledGpulet(f"g{n}", f"g{n}", {0: Host(tuple(float(b) for b in range(size + 1)))})
        for n, size in enumerate(sizes)
    )
    system = System((Model("m", 1000.0),), gpulets, network or NetworkDelay())
    made = make_scheduler("thesis-router", system, options)
    assert isinstance(made, ThesisRouterScheduler)
    return made


def send(scheduler: ThesisRouterScheduler, *times: float) -> list[Dispatch]:
    """Add one request at each time and return what was dispatched, timers included."""
    sent: list[Dispatch] = []
    for request, at in enumerate(times):
        while scheduler.next_wake_ms <= at:
            scheduler.wake(scheduler.next_wake_ms)
        scheduler.add_request(at, 0, request, at + 1000.0)
        sent += [d for d in scheduler.drain() if isinstance(d, Dispatch)]
    return sent


def test_a_full_batch_leaves_at_once() -> None:
    sent = send(router(3), 0.0, 1.0, 2.0)
    assert [list(d.request_ids) for d in sent] == [[0, 1, 2]]


def test_an_unfilled_batch_leaves_100_ms_after_its_first_request() -> None:
    scheduler = router(3)
    assert send(scheduler, 5.0, 60.0) == []
    assert scheduler.next_wake_ms == 105.0
    scheduler.wake(105.0)
    (batch,) = scheduler.drain()
    assert isinstance(batch, Dispatch)
    assert list(batch.request_ids) == [0, 1]
    assert scheduler.next_wake_ms == float("inf")


def test_the_wait_of_a_new_batch_starts_with_its_own_first_request() -> None:
    scheduler = router(2)
    send(scheduler, 0.0, 10.0, 20.0)
    scheduler.wake(100.0)
    assert scheduler.drain() == []
    assert scheduler.next_wake_ms == 120.0


def test_batches_are_built_for_one_replica_after_the_other() -> None:
    sent = send(router(2, 1), *(float(t) for t in range(6)))
    assert [(d.gpulet, list(d.request_ids)) for d in sent] == [(0, [0, 1]), (1, [2]), (0, [3, 4]), (1, [5])]


@pytest.mark.parametrize("spread", ["in-turn", "interleaved"])
def test_the_load_is_shared_in_proportion_to_batch_sizes(spread: str) -> None:
    """9/24 and 5/24, as the thesis states for iGniter's replicas of efficientnet_b7."""
    sent = send(router(9, 5, 5, 5, spread=spread), *(0.01 * t for t in range(2400)))
    load = [sum(len(d.request_ids) for d in sent if d.gpulet == g) for g in range(4)]
    assert load == [900, 500, 500, 500]


def test_interleaved_fills_all_replicas_at_once() -> None:
    scheduler = router(2, 2, spread="interleaved")
    sent = send(scheduler, 0.0, 1.0, 2.0, 3.0)
    assert [list(d.request_ids) for d in sent] == [[0, 2], [1, 3]]


def test_nothing_is_given_up_however_late() -> None:
    schedule = make_schedule([ModelSpec(name="m", rate_rps=2000.0, slo_ms=50.0)], 1.0, 0)
    system = System((Model("m", 50.0),), router(4).system.gpulets)
    result = simulate(make_scheduler("thesis-router", system), schedule.times_ms, schedule.model_index, warmup_s=0.0)
    assert set(result.outcome.tolist()) == {Outcome.OK, Outcome.LATE}
    assert (result.outcome == Outcome.LATE).sum() > 500  # a request per ms is served, two arrive


def test_the_way_over_the_network_overlaps_with_execution() -> None:
    scheduler = router(2, network=NetworkDelay(3.0, 0.5, 1.0))
    result = simulate(scheduler, np.zeros(4), np.zeros(4, np.int32), duration_s=1.0)
    # Both batches are on their way from 0 to 4 ms; the second waits for the first to end, not for the network.
    assert result.start_ms.tolist() == [4.0, 4.0, 6.0, 6.0]


def test_data_delays_by_model_replace_the_budgeted_one() -> None:
    scheduler = router(1, network=NetworkDelay(0.0, 8.0, 0.0))
    result = simulate(scheduler, np.zeros(1), np.zeros(1, np.int32), duration_s=1.0, data_ms_by_model=[2.0])
    assert result.start_ms.tolist() == [2.0]


def test_a_cancelled_request_leaves_the_batch_being_built() -> None:
    scheduler = router(2)
    send(scheduler, 0.0)
    assert scheduler.cancel(1.0, 0, 0)
    assert not scheduler.cancel(1.0, 0, 0)
    assert scheduler.queued(0) == 0
    scheduler.wake(100.0)
    assert scheduler.drain() == []


def test_requests_of_a_lost_replica_go_to_the_others() -> None:
    scheduler = router(3, 3)
    send(scheduler, 0.0, 1.0)
    scheduler.gpulet_lost(2.0, 0)
    scheduler.add_request(3.0, 0, 9, 1000.0)
    (batch,) = scheduler.drain()
    assert isinstance(batch, Dispatch)
    assert (batch.gpulet, list(batch.request_ids)) == (1, [0, 1, 9])
    scheduler.gpulet_lost(4.0, 1)
    scheduler.add_request(5.0, 0, 10, 1000.0)
    assert scheduler.drain() == [Drop(0, [10])]
    scheduler.gpulet_back(6.0, 1)
    scheduler.add_request(7.0, 0, 11, 1000.0)
    assert scheduler.queued(0) == 1


def test_every_request_comes_out_once() -> None:
    scheduler = router(5, 3)
    ids = count()
    seen: list[int] = []
    for at in range(500):
        scheduler.add_request(float(at), 0, next(ids), at + (-1.0 if at % 50 == 0 else 100.0))
        scheduler.wake(float(at))
        seen += [request for d in scheduler.drain() for request in d.request_ids]  # type: ignore[union-attr]
    while scheduler.next_wake_ms < float("inf"):
        scheduler.wake(scheduler.next_wake_ms)
    seen += [request for d in scheduler.drain() for request in d.request_ids]  # type: ignore[union-attr]
    assert sorted(seen) == list(range(500))


def test_bad_options_name_their_bounds() -> None:
    with pytest.raises(InvalidInputError, match="wait_ms"):
        router(1, wait_ms=-1)
    with pytest.raises(InvalidInputError, match="in-turn, interleaved"):
        router(1, spread="random")
