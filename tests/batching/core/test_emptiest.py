"""Which replica takes a new sequence: each has as many as its planned rate says."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.core.step_scheduler import emptiest

RATES = st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.5, 7.0, 1000.0]), min_size=1, max_size=6)


@given(RATES, st.integers(0, 200))
def test_each_has_its_part_of_all_sequences_but_for_one(rates: list[float], sequences: int) -> None:
    counts = [0] * len(rates)
    for _ in range(sequences):
        counts[emptiest(zip(counts, rates, strict=True))] += 1
    planned = sum(rates)
    for count, rate in zip(counts, rates, strict=True):
        if planned:
            assert count >= math.floor(sequences * rate / planned * (1.0 - 1e-9))
            assert rate or not count
        else:
            assert count >= sequences // len(rates)
