"""Which co-runs are measured."""

import pytest

from tenuto.errors import InvalidInputError
from tenuto_lab.interference.co_run import CoRunRequest
from tenuto_lab.interference.co_run_series import igniter_co_runs, pair_co_runs, resident_co_runs

OWN = "tests.instruments.own_models:scale"
ONE = CoRunRequest(OWN, 2, 50.0, device="cpu", options={"width": 8})


def test_the_co_runs_that_coefficients_need() -> None:
    assert [len(parts) for parts in igniter_co_runs(ONE)] == [1, 2]
    with pytest.raises(InvalidInputError, match="half of the device"):
        igniter_co_runs(CoRunRequest(OWN, 2, 60.0))
    pairs = pair_co_runs([ONE, CoRunRequest("alexnet", 1)], (1, 8), (20.0, 50.0, 80.0, 100.0))
    assert len(pairs) == 2 * (2 + 3 + 2)
    assert all(sum(part.share_pct for part in pair) == 100 for pair in pairs)
    assert pair_co_runs([ONE], (1,), (100.0,)) == []
    assert [len(parts) for parts in resident_co_runs(ONE)] == [1, 2, 3, 4, 5]
    assert resident_co_runs(ONE)[4][0].share_pct == 20
