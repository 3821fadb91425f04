"""Shipped step times: what the profile says is what was fitted, on every share, and closed forms are met."""

from __future__ import annotations

import itertools

import pytest

from tenuto.profiles.shipped import load_shipped
from tenuto_lab.generation.shipped import distserve_a100, muxserve_a100
from tenuto_lab.generation.step_times import Cell, Curve, StepTimes, fit

TRUTH = StepTimes(
    prefill=Curve(((32, 12.0, 2.0), (128, 14.0, 6.0), (131072, 9600.0, 6500.0))),
    decode=Curve(((1, 11.0, 2.0), (64, 13.0, 2.5), (2048, 180.0, 150.0)), (0.0003, 0.0001)),
)
FORM = {
    "decoding_large_small_bs_threshold": 95,
    "prefill": [18.0, 0.1, 7e-06],
    "decoding_smallbs": [20.0, 0.0006, 0.04],
    "decoding_largebs": [7.0, 0.0006, 0.16],
}


def test_a_profile_of_fitted_cells_says_what_was_fitted_between_its_shares_too() -> None:
    cells = [
        Cell("llama-7b", gpus, share, batch, tokens, TRUTH.prefill_ms(batch * tokens, share), decode)
        for gpus, share, batch, tokens in itertools.product((1, 2), (30, 60, 100), (1, 32, 64, 256), (32, 128, 512))
        for decode in [TRUTH.decode_ms(batch, batch * tokens, share)]
    ]
    generation = muxserve_a100(cells).models["llama-7b"].generation
    assert generation is not None
    assert set(generation.errors) == {"prefill mean", "prefill p95", "decode mean", "decode p95"}
    fitted = fit([cell for cell in cells if cell.tensor_parallel == 2])
    for share in (30.0, 45.0, 100.0):
        cost = generation.cost(share, tensor_parallel=2)
        assert cost.ms(prompt_tokens=900) == pytest.approx(fitted.prefill_ms(900, share), rel=0.001)
        assert cost.ms(sequences=50, context_tokens=9000) == pytest.approx(fitted.decode_ms(50, 9000, share), rel=0.001)


def test_closed_forms_with_squares_of_prompts_and_two_kinds_of_batches_are_met() -> None:
    generation = distserve_a100({"distserve": {"facebook/opt-13b": {"1": FORM}}}).models["opt-13b"].generation
    assert generation is not None
    cost = generation.cost()
    for tokens in (64, 700, 1900):
        said = 18.0 + 0.1 * tokens + 7e-06 * tokens**2
        assert cost.ms(prompt_tokens=tokens, attention_pairs=tokens * (tokens + 1) // 2) == pytest.approx(
            said, rel=0.001
        )
    assert cost.ms(sequences=40, context_tokens=8000) == pytest.approx(20.0 + 0.0006 * 8000 + 0.04 * 40, rel=0.001)
    assert cost.ms(sequences=128, context_tokens=8000) == pytest.approx(7.0 + 0.0006 * 8000 + 0.16 * 128, rel=0.001)


@pytest.mark.parametrize(("name", "models"), [("muxserve-a100", 4), ("distserve-a100", 2)])
def test_shipped_step_times_grow_with_work_and_with_smaller_shares(name: str, models: int) -> None:
    profile = load_shipped(name)
    assert len(profile.models) == models
    for model in profile.models.values():
        generation = model.generation
        assert generation is not None
        assert generation.errors["decode mean"] < 6
        for gpus in {step.tensor_parallel for step in generation.steps}:
            whole = generation.cost(100.0, gpus)
            assert whole.ms(prompt_tokens=2000) > whole.ms(prompt_tokens=100) > 0
            assert whole.ms(sequences=64, context_tokens=30000) > whole.ms(sequences=64, context_tokens=3000)
            if any(step.share_pct < 100 for step in generation.steps):
                less = generation.cost(45.0, gpus)
                assert less.ms(prompt_tokens=2000) > whole.ms(prompt_tokens=2000)
                assert less.ms(sequences=256, context_tokens=9000) > whole.ms(sequences=256, context_tokens=9000)
