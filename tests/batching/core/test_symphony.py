"""The published rule, event by event."""

from __future__ import annotations

import math

import pytest

from tenuto.batching.core.scheduler import Dispatch, Drop
from tenuto.batching.core.symphony import SymphonyOptions, SymphonyScheduler
from tenuto.batching.core.system import Host, Model, NetworkDelay, ScheduledGpulet, System
from tests.instruments.systems import everywhere_linear


def host(alpha: float, beta: float, largest: int, slowdown: float = 1.0) -> Host:
    return Host((0.0, *(alpha * b + beta for b in range(1, largest + 1))), slowdown)


def test_a_lone_request_is_held_until_one_more_would_no_longer_fit(one_gpu: System) -> None:
    core = SymphonyScheduler(one_gpu)
    core.add_request(0.0, 0, 7, 20.0)
    assert core.drain() == []
    assert core.next_wake_ms == pytest.approx(20.0 - 7.0)  # d - l(2)
    core.wake(core.next_wake_ms)
    assert core.drain() == [Dispatch(0, 0, [7], 13.0, 19.0)]
    assert core.next_wake_ms == math.inf


def test_each_arrival_moves_frontrun_forward(one_gpu: System) -> None:
    core = SymphonyScheduler(one_gpu)
    for request, at in enumerate((0.0, 1.0, 2.0)):
        core.add_request(at, 0, request, at + 20.0)
    assert core.next_wake_ms == pytest.approx(20.0 - 9.0)  # d - l(4)


def test_a_freed_gpulet_goes_to_the_most_urgent_waiting_model() -> None:
    system = everywhere_linear(
        [("a", 1.0, 5.0, 30.0, None), ("b", 1.0, 5.0, 30.0, None), ("c", 1.0, 5.0, 30.0, None)], 1
    )
    core = SymphonyScheduler(system)
    core.add_request(0.0, 0, 0, 8.0)
    core.wake(1.0)
    assert [d.program for d in core.drain()] == [0]
    core.add_request(1.0, 1, 1, 13.8)
    core.add_request(1.0, 2, 2, 13.5)
    while core.next_wake_ms <= 7.0:
        core.wake(core.next_wake_ms)
    assert core.drain() == []
    core.batch_done(7.0, 0)
    dispatched = core.drain()
    assert [d.program for d in dispatched if isinstance(d, Dispatch)][:1] == [2]


def test_the_smallest_idle_gpulet_is_taken() -> None:
    core = SymphonyScheduler(everywhere_linear([("a", 1.0, 5.0, 20.0, None)], 4))
    taken = []
    for request in range(3):
        core.add_request(0.0, 0, request, 6.0)
        core.wake(0.0)
        taken += [d.gpulet for d in core.drain() if isinstance(d, Dispatch)]
    assert taken == [0, 1, 2]
    core.batch_done(6.0, 1)
    core.add_request(6.0, 0, 9, 12.0)
    core.wake(6.0)
    assert [d.gpulet for d in core.drain()] == [1]


def test_a_deadline_in_the_past_is_dropped_at_once(one_gpu: System) -> None:
    core = SymphonyScheduler(one_gpu)
    core.add_request(10.0, 0, 3, 9.0)
    assert core.next_wake_ms <= 10.0
    core.wake(10.0)
    assert core.drain() == [Drop(0, [3])]
    assert core.queued(0) == 0


def test_a_queued_request_is_dropped_when_it_can_no_longer_make_it(one_gpu: System) -> None:
    core = SymphonyScheduler(one_gpu)
    core.add_request(0.0, 0, 0, 6.0)
    core.wake(0.0)
    core.drain()
    core.add_request(0.0, 0, 1, 9.0)  # latest start 3, the gpu-let is busy until 6
    at = 0.0
    while not core.decisions:
        at = max(at, core.next_wake_ms)
        assert at < 3.1
        core.wake(at)
    assert core.drain() == [Drop(0, [1])]


def test_requests_with_their_own_deadlines_are_served_in_deadline_order(one_gpu: System) -> None:
    core = SymphonyScheduler(one_gpu, SymphonyOptions(gather="head-first"))
    core.add_request(0.0, 0, 0, 30.0)
    core.add_request(0.0, 0, 1, 8.0)
    core.add_request(0.0, 0, 2, 20.0)
    core.wake(core.next_wake_ms)
    first = core.drain()[0]
    assert isinstance(first, Dispatch)
    assert list(first.request_ids) == [1, 2, 0]


def test_cancel_frees_the_place(one_gpu: System) -> None:
    core = SymphonyScheduler(one_gpu)
    core.add_request(0.0, 0, 0, 20.0)
    core.add_request(1.0, 0, 1, 21.0)
    assert core.cancel(1.5, 0, 0)
    assert not core.cancel(1.5, 0, 0)
    assert not core.cancel(1.5, 0, 99)
    core.wake(core.next_wake_ms)
    while not core.decisions:
        core.wake(core.next_wake_ms)
    assert core.drain() == [Dispatch(0, 0, [1], 14.0, 20.0)]


def test_cancel_of_the_only_waiting_request_leaves_no_timer(one_gpu: System) -> None:
    core = SymphonyScheduler(one_gpu)
    core.add_request(0.0, 0, 0, 6.0)
    core.wake(0.0)
    core.add_request(0.0, 0, 1, 13.0)
    core.wake(6.0 - 1e-6)
    core.drain()
    assert core.cancel(6.0, 0, 1)
    core.wake(6.0)
    core.batch_done(6.0, 0)
    assert core.drain() == []
    assert core.next_wake_ms == math.inf


def test_a_lost_gpulet_is_not_used_until_it_is_back() -> None:
    core = SymphonyScheduler(everywhere_linear([("a", 1.0, 5.0, 20.0, None)], 2))
    core.gpulet_lost(0.0, 0)
    core.add_request(0.0, 0, 0, 6.0)
    core.wake(0.0)
    assert [d.gpulet for d in core.drain()] == [1]
    core.add_request(0.0, 0, 1, 12.0)
    core.wake(5.0)  # frontrun: nothing is free
    assert core.drain() == []
    core.gpulet_back(5.5, 0)
    assert [d.gpulet for d in core.drain()] == [0]


def test_a_lost_gpulet_may_report_late_or_never(one_gpu: System) -> None:
    core = SymphonyScheduler(one_gpu)
    core.add_request(0.0, 0, 0, 6.0)
    core.wake(0.0)
    core.drain()
    core.gpulet_lost(1.0, 0)
    core.batch_done(6.0, 0)
    core.gpulet_back(7.0, 0)
    core.add_request(7.0, 0, 1, 13.0)
    core.wake(7.0)
    assert [type(d) for d in core.drain()] == [Dispatch]
    core.batch_done(13.0, 0)
    core.add_request(13.0, 0, 2, 19.0)
    core.wake(13.0)
    assert [type(d) for d in core.drain()] == [Dispatch]


def test_network_delays_are_budgeted() -> None:
    network = NetworkDelay(ctrl_ms=0.5, data_ms_per_request=0.25, response_ms=1.0)
    core = SymphonyScheduler(everywhere_linear([("a", 1.0, 5.0, 20.0, None)], 1, network))
    core.add_request(0.0, 0, 0, 20.0)
    assert core.next_wake_ms == pytest.approx(20.0 - 1.0 - 7.0 - 0.5 - 2 * 0.25)  # d - d_resp - l(2) - delay(2)
    core.wake(core.next_wake_ms)
    (dispatch,) = core.drain()
    assert isinstance(dispatch, Dispatch)
    assert dispatch.start_ms == pytest.approx(11.0 + 0.75)
    assert dispatch.finish_ms + 1.0 <= 20.0


def test_with_a_network_delay_the_next_batch_is_sent_before_the_gpulet_is_free() -> None:
    network = NetworkDelay(ctrl_ms=1.0)
    core = SymphonyScheduler(everywhere_linear([("a", 1.0, 5.0, 20.0, None)], 1, network))
    core.add_request(0.0, 0, 0, 7.0)
    core.wake(0.0)
    (first,) = core.drain()
    assert isinstance(first, Dispatch)
    assert first.finish_ms == 7.0
    core.add_request(1.0, 0, 1, 13.0)
    sent_at = 1.0
    while not core.decisions:
        sent_at = max(sent_at, core.next_wake_ms)
        core.wake(sent_at)
    (second,) = core.drain()
    assert isinstance(second, Dispatch)
    assert sent_at == pytest.approx(6.0)
    assert (second.start_ms, second.finish_ms) == (7.0, 13.0)


def test_a_corrected_latency_moves_frontrun(one_gpu: System) -> None:
    core = SymphonyScheduler(one_gpu)
    core.update_latency(0, 0, 1.5)
    core.add_request(0.0, 0, 0, 20.0)
    assert core.next_wake_ms == pytest.approx(20.0 - 1.5 * 7.0)
    core.wake(core.next_wake_ms)
    (dispatch,) = core.drain()
    assert isinstance(dispatch, Dispatch)
    assert dispatch.finish_ms - dispatch.start_ms == pytest.approx(9.0)
    core.update_latency(0, 0, 1.0)
    core.batch_done(20.0, 0)
    core.add_request(20.0, 0, 1, 40.0)
    assert core.next_wake_ms == pytest.approx(33.0)


def test_a_measured_network_delay_moves_frontrun(one_gpu: System) -> None:
    core = SymphonyScheduler(one_gpu)
    core.update_network(NetworkDelay(ctrl_ms=2.0, response_ms=1.0))
    core.add_request(0.0, 0, 0, 20.0)
    assert core.next_wake_ms == pytest.approx(20.0 - 1.0 - 7.0 - 2.0)


def test_gpulets_serve_only_the_models_they_hold() -> None:
    models = (Model("a", 20.0), Model("b", 20.0))
    system = System(
        models, (ScheduledGpulet("g0/a", "g0", {0: host(1, 5, 8)}), ScheduledGpulet("g1/a", "g1", {1: host(1, 5, 8)}))
    )
    core = SymphonyScheduler(system)
    core.add_request(0.0, 1, 0, 6.0)
    core.add_request(0.0, 1, 1, 13.0)
    core.add_request(0.0, 0, 2, 6.0)
    core.wake(0.0)
    assert sorted((d.program, d.gpulet) for d in core.drain() if isinstance(d, Dispatch)) == [(0, 0), (1, 1)]
    assert core.queued(1) == 1


def test_a_request_only_the_fast_gpulet_can_meet_is_left_to_it() -> None:
    system = System(
        (Model("a", 30.0),),
        (ScheduledGpulet("g0/slow", "g0", {0: host(2, 10, 8)}), ScheduledGpulet("g1/fast", "g1", {0: host(1, 5, 8)})),
    )
    core = SymphonyScheduler(system)
    core.add_request(0.0, 0, 0, 6.0)  # only the fast one can
    core.wake(0.0)
    assert [d.gpulet for d in core.drain()] == [1]
    core.add_request(0.0, 0, 1, 12.5)  # the slow one could not finish two, and one only from 0.5 on
    core.add_request(0.0, 0, 2, 13.0)
    core.wake(0.0)
    served = [r for d in core.drain() if isinstance(d, Dispatch) for r in d.request_ids]
    assert served in ([1], [2])


def test_no_batch_exceeds_what_the_gpulet_may_run() -> None:
    system = System((Model("a", 100.0),), (ScheduledGpulet("g", "g", {0: host(1, 5, 3)}),))
    core = SymphonyScheduler(system, SymphonyOptions())
    for request in range(10):
        core.add_request(0.0, 0, request, 100.0)
    core.wake(0.0)
    (first,) = core.drain()
    assert isinstance(first, Dispatch)
    assert list(first.request_ids) == [0, 1, 2]


def test_a_model_without_host_is_dropped() -> None:
    system = System((Model("a", 20.0), Model("b", 20.0)), (ScheduledGpulet("g", "g", {0: host(1, 5, 8)}),))
    core = SymphonyScheduler(system)
    core.add_request(0.0, 1, 4, 20.0)
    core.wake(0.0)
    assert core.drain() == [Drop(1, [4])]


def test_a_cancelled_neighbour_leaves_the_rest_of_the_queue_due() -> None:
    """Cancelling between an arrival and the wake of the same instant once lost the model's timer."""
    core = SymphonyScheduler(everywhere_linear([("m", 1.0, 1.0, 3.0, None)], 1))
    for request in (1, 2):
        core.add_request(0.0, 0, request, 3.0)
    assert core.cancel(0.0, 0, 2)
    decisions = core.drain()
    while not decisions and core.next_wake_ms < 3.0:
        core.wake(core.next_wake_ms)
        decisions = core.drain()
    assert [list(d.request_ids) for d in decisions if isinstance(d, Dispatch)] == [[1]]


def test_the_target_may_release_a_batch_before_frontrun(one_gpu: System) -> None:
    core = SymphonyScheduler(one_gpu, SymphonyOptions(release="target"))
    for request in range(5):  # two batches of five would fit
        core.add_request(0.0, 0, request, 20.0)
        core.wake(0.0)
    assert [len(d.request_ids) for d in core.drain() if isinstance(d, Dispatch)] == [5]


def test_what_no_gpulet_can_meet_in_time_sets_no_timer_for_this_instant() -> None:
    """With a delay and gpu-lets of two speeds the GPU timer once fired at one moment for ever."""
    hosts = ({0: host(1, 5, 8)}, {0: host(3, 15, 8)})
    gpulets = tuple(ScheduledGpulet(f"g{i}", f"g{i}", held) for i, held in enumerate(hosts))
    core = SymphonyScheduler(System((Model("a", 12.0),), gpulets, NetworkDelay(ctrl_ms=0.5)))
    now = 0.0
    for request in range(8):
        core.add_request(now, 0, request, now + 12.0)
        for _ in range(50):
            if core.next_wake_ms > now:
                break
            core.wake(now)
        assert core.next_wake_ms > now
        now += 0.25
