"""Squishy bin packing on a fixed number of GPUs."""

import pytest

from lab.tests.test_squishy import RESNET50, line
from tenuto_lab.rivals.squishy_filling import fill
from tenuto_lab.squishy import Demand, pack


def test_filling_one_model_gives_every_gpu_its_full_batch() -> None:
    scale, bins = fill([RESNET50], 8, slack_ms=2.0)
    assert len(bins) == 8
    assert scale * 4000.0 == pytest.approx(8 * 6000.0 / (1.053 * 6 + 5.072), rel=0.01)


def test_more_models_than_fit_are_still_all_placed() -> None:
    scale, bins = fill([Demand(i, 1.0, 12.0, line(0.1, 5.0)) for i in range(9)], 2)
    assert scale == 0.0
    assert len(bins) == 2
    assert {part.model for b in bins for part in b.parts} == set(range(9))


def test_nothing_to_fill() -> None:
    assert fill([], 3) == (0.0, [])


def test_what_fits_is_not_scaled() -> None:
    asked = [Demand(i, 20.0 * i + 1.0, 60.0, line(0.5, 3.0)) for i in range(6)]
    assert fill(asked, len(pack(asked)), largest_scale=1.0)[0] == 1.0
