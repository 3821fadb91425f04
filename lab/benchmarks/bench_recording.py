"""What recording a request costs in the serving path (wanted: under 50 µs).

Calls, in a loop, everything that the gateway, the dispatcher and the gpu-let do only to record: the log of ended
requests, the counters, the meters of network and execution, the row of the batch, the times in
the response's parameters and headers. Batches of one, so that nothing is shared. Printed are the median and the largest
of several rounds of processor time; other processes on the machine do not count into that.

Run: python lab/benchmarks/bench_recording.py [--quick]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from serving import heading, synthetic_plan

from tenuto.deployments.dispatch.counters import Counters
from tenuto.deployments.dispatch.in_flight import Batch, Request
from tenuto.deployments.dispatch.measured_times import LatencyRatios, WayMeter
from tenuto.deployments.entry.service.infer_call import Shown
from tenuto.deployments.wire.answers import Executed

MODEL, GPULET = "m", "n0/0/a"
WANTED_US = 50.0


def _parts() -> dict[str, Callable[[int], Any]]:
    """Return what is done per request, by name; each takes the number of the request."""
    executed = Executed(
        1,
        GPULET,
        True,
        sent_ms=103.2,
        started_ms=103.7,
        gpulet_queue_ms=0.4,
        execution_ms=9.1,
        rows=1,
        outputs=(),
        data=(),
    )
    asker: Any = None  # who asked is told elsewhere
    requests = [Request(0, MODEL, 0, 100.0, 200.0, asker, 2.0, "r-0")]
    batch = Batch(0, 0, MODEL, requests, 0, 103.2, 103.7, 112.8)
    accounts, way, ratios = Counters(), WayMeter(), LatencyRatios()
    plan = synthetic_plan(1.0, 1.0, 100.0, 100.0, 1, 1)
    accounts.counters[MODEL].follow(plan.models[0], {})
    recent: deque[dict[str, Any]] = deque(maxlen=1024)

    def meters(number: int) -> None:
        accounts.batch_sent(batch, None)
        way.record_way(0.8 + 0.001 * (number % 7))
        ratios.record(0, 0, 1.0 + 0.001 * (number % 5), 0.01 * number)

    def row_of_the_batch(number: int) -> None:
        recent.append({"model": MODEL, "batch_size": 1, "requests": [f"r-{number}"], "started_s": 1.0, "ended_s": 1.1})

    def parameters_and_headers(_number: int) -> None:
        Shown(executed).told(requests[0], executed)

    return {
        "counters, log of ended": lambda _number: accounts.executed(requests, executed, 112.9),
        "counters, meters of its batch": meters,
        "row of its batch": row_of_the_batch,
        "parameters and headers": parameters_and_headers,
    }


def _cost_us(work: Callable[[int], Any], calls: int) -> float:
    began_s = time.process_time()
    for number in range(calls):
        work(number)
    return 1e6 * (time.process_time() - began_s) / calls


def main() -> int:
    """Print each part and the sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds, calls = (3, 20_000) if parser.parse_args().quick else (9, 100_000)
    heading(f"recording per request, batches of one, {rounds} rounds of {calls:,} requests")
    print(f"{'':36s} {'median':>9s} {'largest':>9s}")
    total = most = 0.0
    for name, work in _parts().items():
        costs = [_cost_us(work, calls) for _ in range(rounds)]
        total, most = total + median(costs), most + max(costs)
        print(f"{name:36s} {median(costs):6.2f} µs {max(costs):6.2f} µs")
    print(f"{'together':36s} {total:6.2f} µs {most:6.2f} µs   wanted: under {WANTED_US:g} µs")
    print(f"load average {os.getloadavg()[0]:.1f}")
    return 0 if most < WANTED_US else 1


if __name__ == "__main__":
    sys.exit(main())
