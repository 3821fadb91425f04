"""The worked trace of Symphony §3.3 comes out exactly: l(b) = b + 5, SLO 12, three GPUs, R_i at 0.75 (i - 1)."""

from __future__ import annotations

import numpy as np
import pytest

from tenuto.batching.core.symphony import SymphonyOptions, SymphonyScheduler
from tenuto.batching.core.system import System
from tenuto.batching.virtual.simulator import simulate
from tenuto.outcome import Outcome

HEAD_FIRST = SymphonyOptions(gather="head-first")


def arrivals(count: int, missing: set[int]) -> tuple[np.ndarray, np.ndarray]:
    times = np.array([0.75 * (i - 1) for i in range(1, count + 1) if i not in missing])
    return times, np.zeros(len(times), dtype=np.int32)


def test_first_batch_has_four_requests_at_2_25_then_one_every_3(trace_system: System) -> None:
    result = simulate(SymphonyScheduler(trace_system, HEAD_FIRST), *arrivals(400, set()), warmup_s=0.0)
    order = np.argsort(result.batches.start_ms)
    starts = np.array(result.batches.start_ms)[order]
    sizes = np.array([len(result.batches.requests[i]) for i in order])
    assert (sizes == 4).all()
    assert starts.tolist() == [2.25 + 3.0 * k for k in range(100)]
    assert result.batches.requests[int(order[0])] == [0, 1, 2, 3]
    gpulets = np.array(result.batches.gpulet)[order]
    assert gpulets.tolist() == [k % 3 for k in range(100)]  # each GPU is taken again the moment it becomes free
    assert (result.outcome == Outcome.OK).all()


@pytest.mark.parametrize("options", [HEAD_FIRST, SymphonyOptions()])
def test_after_missing_arrivals_the_staggered_pattern_returns_and_nothing_is_dropped(
    trace_system: System, options: SymphonyOptions
) -> None:
    result = simulate(SymphonyScheduler(trace_system, options), *arrivals(400, {13, 14, 15}), warmup_s=0.0)
    assert (result.outcome == Outcome.OK).all()
    late_sizes = [
        len(ids) for ids, start in zip(result.batches.requests, result.batches.start_ms, strict=True) if start > 30
    ]
    assert set(late_sizes[:-1]) == {4}
