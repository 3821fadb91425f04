"""Step times: the fit finds curves it can express, cells left out too, and says what it cannot do."""

from __future__ import annotations

import itertools
import random

import pytest

from tenuto_lab.generation.step_times import Cell, Curve, StepTimes, by_model, errors, fit, left_out

TRUTH = StepTimes(
    prefill=Curve(((32, 12.0, 2.0), (128, 14.0, 6.0), (2048, 150.0, 100.0), (131072, 9600.0, 6500.0))),
    decode=Curve(((1, 11.0, 2.0), (64, 13.0, 2.5), (2048, 180.0, 150.0)), (0.0003, 0.0001)),
)


def cells(noise: float = 0.0) -> list[Cell]:
    """Cells of two models, each up to `noise` beside the truth; a decode too large for memory has no prefill."""
    draws = random.Random(3)
    found = []
    for model, share, batch, tokens in itertools.product(
        ("a", "b"), (30.0, 50.0, 80.0, 100.0), (1, 2, 8, 32, 64, 128, 256, 512, 1024), (32, 128, 512)
    ):
        slower = 1.0 if model == "a" else 2.5
        prefill = TRUTH.prefill_ms(batch * tokens, share) * slower * draws.uniform(1 - noise, 1 + noise)
        decode = TRUTH.decode_ms(batch, batch * tokens, share) * slower * draws.uniform(1 - noise, 1 + noise)
        found.append(Cell(model, 1, share, batch, tokens, prefill if batch * tokens < 2**17 else None, decode))
    return found


def test_what_the_curves_can_express_is_found() -> None:
    for of_model in by_model(cells()).values():
        found = errors(fit(of_model), of_model)
        assert max(found.both) < 0.03
        assert len(found.prefill) < len(found.decode)


def test_cells_left_out_of_the_fit_are_predicted_nearly_as_well_as_they_repeat() -> None:
    noisy = cells(noise=0.04)
    out = set(random.Random(5).sample(noisy, len(noisy) // 6))
    found = left_out(noisy, out.__contains__)
    assert len(found.decode) == len(out)
    assert sum(found.both) / len(found.both) < 0.04


def test_a_cell_that_something_else_held_up_bends_nothing() -> None:
    good = [cell for cell in cells() if cell.model == "a"]
    stray = Cell("a", 1, 50.0, 32, 128, 3 * TRUTH.prefill_ms(4096, 50.0), 40 * good[0].decode_ms)
    assert max(errors(fit([*good, stray]), good).both) < 0.06


def test_nothing_is_faster_on_a_smaller_share() -> None:
    times = fit([cell for cell in cells(0.04) if cell.model == "b"])
    for share in (30.0, 45.0, 90.0):
        assert times.decode_ms(16, 4096, share) >= times.decode_ms(16, 4096, 100.0)
        assert times.prefill_ms(4096, share) >= times.prefill_ms(4096, 100.0)


def test_a_model_without_a_measured_prefill_is_refused() -> None:
    with pytest.raises(ValueError, match="no measured prefill"):
        fit([Cell("a", 1, 50.0, 1, 32, None, 10.0)])
