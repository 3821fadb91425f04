from tenuto.batching.core.build import everywhere_linear
from tenuto.batching.core.scheduler import Dispatch
from tenuto.batching.registry import make_scheduler


def test_a_cancelled_neighbour_leaves_the_rest_of_the_queue_due() -> None:
    """Cancelling between an arrival and the wake of the same instant once lost the model's timer."""
    system = everywhere_linear([("m", 1.0, 1.0, 3.0, None)], 1)
    scheduler = make_scheduler("deferred", system, {"release": "frontrun"})
    for request in (1, 2):
        scheduler.add_request(0.0, 0, request, 3.0)
    assert scheduler.cancel(0.0, 0, 2)
    decisions = scheduler.drain()
    while not decisions and scheduler.next_wake_ms < 3.0:
        scheduler.wake(scheduler.next_wake_ms)
        decisions = scheduler.drain()
    assert [list(d.request_ids) for d in decisions if isinstance(d, Dispatch)] == [[1]]
