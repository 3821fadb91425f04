"""What recording a request costs in the serving path (issue 5 asks for under 50 µs).

Calls, in a loop, everything that the gateway, the dispatcher and the gpu-let do only to record: the log of ended
requests, the counters, the autoscale advice, the meters of network and execution, the row of the batch, the times in
the response's parameters and headers. Batches of one, so that nothing is shared. Printed are the median and the largest
of several rounds of processor time; other processes on the machine do not count into that.

Run: python tests/benchmarks/bench_recording.py [--quick]
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

from tenuto.deployments.dispatch.accounts import ModelCounters
from tenuto.deployments.dispatch.advice import LiveAdvice
from tenuto.deployments.dispatch.measured_times import LatencyRatios, NetworkMeter
from tenuto.deployments.dispatch.request_log import RequestLog
from tenuto.deployments.entry.gateway import _split
from tenuto.deployments.wire.answers import Answer
from tenuto.outcome import Outcome

GPULET = "n0/0/a"
WANTED_US = 50.0


def _parts() -> dict[str, Callable[[int], Any]]:
    """Return what is done per request, by name; each takes the number of the request."""
    answer = Answer(Outcome.OK, [], 1, GPULET, 3.2, 0.4, 9.1, True, start_ms=3.7)
    log, counters, advice = RequestLog(), ModelCounters(), LiveAdvice()
    advice.follow(synthetic_plan(1.0, 1.0, 100.0, 100.0, 1, 1), 0.0)
    network, ratios = NetworkMeter(1.0), LatencyRatios()
    recent: deque[dict[str, Any]] = deque(maxlen=1024)

    def per_batch(number: int) -> None:
        counters.execution_ms.append(9.1)
        advice.executed(GPULET, 9.1)
        network.record(0.8 + 0.001 * (number % 7), 1)
        ratios.record(0, 0, 1.0 + 0.001 * (number % 5))
        network.news()  # sorts what it has every 64 batches

    def row_of_the_batch(number: int) -> None:
        recent.append({"model": "m", "batch_size": 1, "requests": [f"r-{number}"], "started_s": 1.0, "ended_s": 1.1})

    return {
        "log of ended requests": lambda number: log.add(f"r-{number}", "m", answer, 12.9, in_time=True),
        "counters": lambda _number: counters.count(answer.outcome, in_time=True),
        "advice": lambda _number: advice.ended(in_time=True),
        "meters and counters of its batch": per_batch,
        "row of its batch": row_of_the_batch,
        "time of the answer": lambda _number: network.record_answer(0.3),
        "parameters and headers": lambda number: _split([answer], f"r-{number}"),
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
