"""What random arrivals cost: limits that hold for any queue, and a queue that is known exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.placement.expectation.queueing import MeanBatch, Stream, blocked_part, lost_parts, used_part

streams = st.lists(
    st.builds(
        lambda rate, size, ms, slack: Stream(rate, MeanBatch(size, ms), ms * slack),
        st.floats(1, 500),
        st.integers(1, 64),
        st.floats(1, 100),
        st.floats(1.2, 20),
    ),
    min_size=1,
    max_size=5,
)


@given(streams, st.floats(0.05, 3.0), st.integers(1, 50))
def test_never_more_than_the_load_or_the_gpus_and_more_with_more_load_or_time_to_wait(
    asked: list[Stream], load: float, gpulets: int
) -> None:
    used = used_part(load, asked, gpulets)
    assert 0.0 <= used <= min(1.0, load)
    patient = [Stream(s.rate_rps, s.batch, s.slo_ms + 50.0) for s in asked]
    assert used_part(load, patient, gpulets) >= used - 1e-9
    assert used_part(load * 1.05, asked, gpulets) >= used - 1e-9


@given(streams, st.floats(0.0, 0.6))
def test_long_deadlines_and_many_gpulets_lose_nothing(asked: list[Stream], load: float) -> None:
    patient = [Stream(s.rate_rps, s.batch, 1000.0 * s.slo_ms) for s in asked]
    assert used_part(load, patient, 10) == pytest.approx(load, rel=1e-6)


@pytest.mark.parametrize(
    ("load", "services"), [(0.7, 4), (0.9, 8), (1.0, 5), (1.2, 10), (0.8, 0.3), (0.5, 1), (1.2, 0.05), (0.95, 2)]
)
def test_a_single_server_whose_requests_wait_for_some_services_at_most(load: float, services: float) -> None:
    """M/D/1 with unit service: a request that would wait for longer is turned away (Lindley's recursion)."""
    gaps = np.random.default_rng(int(services)).exponential(1.0 / load, 40_000)
    work, served = 0.0, 0
    for gap in gaps:
        work = max(0.0, work - gap)
        if work <= services:
            work += 1.0
            served += 1
    stream = Stream(load, MeanBatch(1, 1000.0), 1000.0 * (services + 1))
    assert used_part(load, [stream], 1) == pytest.approx(load * served / len(gaps), abs=0.025)


def test_nobody_is_blocked_by_batches_shorter_than_it_may_wait() -> None:
    assert blocked_part(50.0, [(0.6, 40.0), (0.3, 50.0)], 1) == 0.0
    assert blocked_part(10.0, [(0.5, 40.0)], 1) == pytest.approx(0.375)
    assert blocked_part(10.0, [(0.5, 40.0)], 3) == pytest.approx(0.375**3)


@given(streams, st.floats(0.0, 1.0))
def test_all_that_is_lost_falls_on_someone_and_most_on_what_serves_least(asked: list[Stream], part: float) -> None:
    lost = part * sum(stream.work for stream in asked)
    parts = lost_parts(asked, lost)
    assert all(0.0 <= each <= 1.0 + 1e-9 for each in parts)
    assert sum(p * s.work for p, s in zip(parts, asked, strict=True)) == pytest.approx(lost)
    heavy = Stream(50.0, MeanBatch(1, 20.0), 60.0)
    light, patient = Stream(50.0, MeanBatch(10, 20.0), 60.0), Stream(50.0, MeanBatch(1, 20.0), 600.0)
    first, second, third = lost_parts([heavy, light, patient], 0.1)
    assert first > max(second, third)
    assert lost_parts([heavy, Stream(50.0, MeanBatch(1, 20.0), 60.0, weight=2.0)], 0.1)[1] < first
