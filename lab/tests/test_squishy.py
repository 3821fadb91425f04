"""Squishy bin packing: Nexus's rules on small cases, and what every packing keeps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto_lab.squishy import Demand, full_batch, pack


def line(alpha: float, beta: float, largest: int = 60) -> list[float]:
    return [0.0, *(alpha * b + beta for b in range(1, largest + 1))]


RESNET50 = Demand(0, 4000.0, 25.0, line(1.053, 5.072))


def test_a_full_batch_takes_half_of_the_slo() -> None:
    assert full_batch(RESNET50) == 7  # table 2 of Symphony: batch without coordination
    assert full_batch(Demand(0, 1.0, 70.0, line(5.09, 18.368))) == 3
    assert full_batch(RESNET50, slack_ms=2.0) == 6
    assert full_batch(Demand(0, 1.0, 8.0, line(1.0, 5.0))) == 1


def test_whole_gpus_come_first_and_a_remainder_gets_a_duty_cycle() -> None:
    carries = 1000.0 * 7 / 12.443
    bins = pack([Demand(0, 2.5 * carries, 25.0, line(1.053, 5.072))])
    assert [b.parts[0].batch for b in bins[:2]] == [7, 7]
    assert len(bins) == 3
    assert bins[2].occupancy < 1.0
    part = bins[2].parts[0]
    assert (part.batch - 1) * 1000.0 / part.rate_rps + bins[2].busy_ms <= 25.0


def test_small_models_share_a_gpu_in_the_shorter_cycle() -> None:
    bins = pack([Demand(0, 20.0, 100.0, line(1.0, 5.0)), Demand(1, 30.0, 150.0, line(1.0, 5.0))])
    assert len(bins) == 1
    assert {part.model for part in bins[0].parts} == {0, 1}
    assert bins[0].busy_ms <= bins[0].duty_ms


def test_nothing_to_pack() -> None:
    assert pack([]) == []


demands = st.lists(
    st.tuples(st.floats(0.1, 5000.0), st.floats(1.1, 8.0), st.floats(0.1, 5.0), st.floats(0.0, 20.0)),
    min_size=1,
    max_size=8,
)


@given(demands)
def test_every_packing_carries_every_rate_within_slo_and_cycle(drawn: list[tuple[float, float, float, float]]) -> None:
    asked = [Demand(i, rate, 2 * slack * (a + b), line(a, b, 40)) for i, (rate, slack, a, b) in enumerate(drawn)]
    bins = pack(asked)
    for planned in bins:
        assert planned.busy_ms <= planned.duty_ms + 1e-9
        assert planned.busy_ms == pytest.approx(sum(asked[part.model].latency_ms[part.batch] for part in planned.parts))
        for part in planned.parts:
            demand = asked[part.model]
            assert planned.duty_ms + demand.latency_ms[part.batch] <= demand.slo_ms + 1e-6 or part.batch == 1
            if len(planned.parts) > 1:
                assert part.batch >= math.floor(planned.duty_ms * part.rate_rps / 1000.0)
    for demand in asked:
        given_rps = sum(part.rate_rps for b in bins for part in b.parts if part.model == demand.model)
        assert given_rps == pytest.approx(demand.rate_rps, rel=1e-6)


def test_a_packing_can_be_cut_off_after_the_gpus_there_are() -> None:
    asked = [Demand(0, 4000.0, 25.0, line(1.053, 5.072)), Demand(1, 20.0, 100.0, line(1.0, 5.0))]
    whole = pack(asked)
    for most in range(len(whole) + 2):
        assert pack(asked, most=most) == whole[:most]
    assert len(pack([Demand(0, 1e12, 25.0, line(1.053, 5.072))], most=4)) == 4
