"""What cannot keep its SLO beside those that are there is refused, and what can is not."""

import math

import pytest

from tenuto.batching.core.token_admission import TokenAdmission, TokenLoad
from tenuto.profiles.generation import StepCost

# A step takes 10 ms, 0.1 ms for each token of a prompt, 1 ms for each sequence, 0.01 ms for each token these have.
ADMISSION = TokenAdmission(StepCost.line(10.0, 0.1, 1.0, 0.01, 0.0), max_batch_tokens=100)


@pytest.mark.parametrize(
    ("prompt", "load", "first_ms", "further_ms"),
    [
        (50, TokenLoad(), 15.0, 11.5),
        (150, TokenLoad(), 35.0, 12.5),
        (50, TokenLoad(unread_tokens=100), 35.0, 11.5),
        (50, TokenLoad(decoding=20, context_tokens=1000), 45.0, 41.5),
    ],
)
def test_the_estimates_are_those_of_steps(prompt: int, load: TokenLoad, first_ms: float, further_ms: float) -> None:
    assert ADMISSION.first_token_ms(prompt, load) == pytest.approx(first_ms)
    assert ADMISSION.further_token_ms(prompt, load) == pytest.approx(further_ms)


def test_both_bounds_refuse_and_say_which() -> None:
    assert ADMISSION.refusal(50, 15.1, 11.6, TokenLoad()) is None
    assert "first token would take 15 ms" in str(ADMISSION.refusal(50, 14.9, math.inf, TokenLoad()))
    assert "11.5 ms, and 11.4 ms" in str(ADMISSION.refusal(50, math.inf, 11.4, TokenLoad()))


def test_a_sequence_that_would_make_another_late_is_refused() -> None:
    load = TokenLoad(decoding=1, context_tokens=100, least_tpot_ms=12.0)
    assert "12.0 ms are allowed" in str(ADMISSION.refusal(10, math.inf, math.inf, load))
