from tenuto.batching.core.scheduler import Dispatch
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tests.instruments.systems import everywhere_linear


def test_small_delays_of_a_live_gpulet_do_not_add_up_unseen() -> None:
    """Batches sent ahead start when the one before has really ended; estimates follow, so nothing feasible ends
    late."""
    system = everywhere_linear([("m", 4.0, 20.0, 100.0, None)], 1, NetworkDelay(ctrl_ms=1.0))
    scheduler = make_scheduler("deferred", system, {})
    now, drag_ms, request = 0.0, 0.8, 0
    deadlines: dict[int, float] = {}
    running: list[Dispatch] = []
    ends: list[float] = []
    late = served = 0
    arrivals = iter([i * 3.0 for i in range(2000)])
    arrival = next(arrivals)
    while arrival is not None:
        end = ends[0] if ends else float("inf")
        now = max(now, min(arrival, end, scheduler.next_wake_ms))
        if end <= now:
            ends.pop(0)
            done = running.pop(0)
            late += sum(deadlines[i] + 2 * drag_ms + 0.01 < now for i in done.request_ids)
            served += len(done.request_ids)
            scheduler.batch_done(now, 0)
            if running:
                ends.append(max(now, running[0].start_ms) + running[0].finish_ms - running[0].start_ms + drag_ms)
        elif arrival <= now:
            deadlines[request] = now + 100.0
            scheduler.add_request(now, 0, request, now + 100.0)
            request += 1
            arrival = next(arrivals, None)  # type: ignore[arg-type]
        else:
            scheduler.wake(now)
        for decision in scheduler.drain():
            if isinstance(decision, Dispatch):
                running.append(decision)
                if len(running) == 1:
                    ends.append(decision.finish_ms + drag_ms)
    assert served > 500
    assert late == 0
