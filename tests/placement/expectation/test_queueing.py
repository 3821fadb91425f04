"""What random arrivals cost: limits that hold for any queue, and a queue that is known exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.placement.expectation.queueing import (
    MeanBatch,
    Stream,
    blocked_part,
    lost_parts,
    rate_with_bursts,
    used_part,
)

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


@given(st.floats(0.0, 1000.0), st.floats(0.0, 50.0), st.floats(0.1, 10.0))
def test_bursts_take_more_the_burstier_and_poisson_arrivals_nothing(
    rate: float, more: float, patience_s: float
) -> None:
    assert rate_with_bursts(rate, min(1.0, more), patience_s, 0.01) == pytest.approx(rate)
    bursty, burstier = (rate_with_bursts(rate, 1.0 + spread, patience_s, 0.01) for spread in (more, 2.0 * more))
    assert rate - 1e-2 <= bursty <= burstier + 1e-2


@pytest.mark.parametrize(("rate", "dispersion"), [(3.0, 10.0), (10.0, 7.0), (500.0, 16.0)])
def test_no_more_comes_beyond_it_than_of_poisson_arrivals_beyond_their_rate(rate: float, dispersion: float) -> None:
    """Groups of requests that come together, of a geometric size, in windows of two seconds."""
    draws, size = np.random.default_rng(4), (dispersion + 1.0) / 2.0
    groups = draws.poisson(2.0 * rate / size, 40_000)
    came = groups + np.array([draws.negative_binomial(n, 1.0 / size) if n else 0 for n in groups])
    assert came.var() / came.mean() == pytest.approx(dispersion, rel=0.1)
    served = 2.0 * rate_with_bursts(rate, dispersion, 2.0, 0.01)
    lost = np.maximum(0.0, came - served).sum() / came.sum()
    poisson = draws.poisson(2.0 * rate, 40_000)
    assert lost <= np.maximum(0.0, poisson - 2.0 * rate).sum() / poisson.sum()
    assert np.maximum(0.0, came - 2.0 * rate).sum() / came.sum() > lost
