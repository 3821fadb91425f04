"""What cannot keep its SLO beside those that are there is refused, and what can is not."""

import math
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.core.deferred_steps import DeferredSteps
from tenuto.batching.core.step_scheduler import Step, StepLimits, StepScheduler, TokenLoad
from tenuto.batching.virtual.virtual_steps import VirtualSteps
from tenuto.outcome import Rule
from tenuto.placement.generation_capacity import carried
from tenuto.placement.workload import ModelSpec
from tenuto.profiles.generation import StepCost
from tests.instruments.seeds import seeds

# A step takes 10 ms, 0.1 ms for each token of a prompt, 1 ms for each sequence, 0.01 ms for each token these have.
ORDER = DeferredSteps(StepCost.line(10.0, 0.1, 1.0, 0.01, 0.0), max_batch_tokens=100)


@pytest.mark.parametrize(
    ("prompt", "load", "first_ms"),
    [
        (50, TokenLoad(), 15.0),
        (150, TokenLoad(), 35.0),
        (50, TokenLoad(unread_tokens=100), 35.0),
        (50, TokenLoad(decoding=20, context_tokens=1000), 45.0),
    ],
)
def test_a_first_token_comes_after_the_steps_before_it(prompt: int, load: TokenLoad, first_ms: float) -> None:
    assert ORDER.first_token_ms(prompt, load) == pytest.approx(first_ms)


@pytest.mark.parametrize(
    ("sequences", "context", "load", "further_ms", "chance_ms"),
    [
        (1, 50, TokenLoad(), 11.5, 0.0),
        (2, 150, TokenLoad(mean_prompt=100, mean_output=10), 13.5 + 1.0, 1.0),
        (17, 1000, TokenLoad(mean_prompt=30, mean_output=40), 37.0 + 1.2, 0.3),
    ],
)
def test_a_mean_step_reads_prompts_in_place_of_sequences_that_end(
    sequences: int, context: int, load: TokenLoad, further_ms: float, chance_ms: float
) -> None:
    assert ORDER.further_token_ms(sequences, context, load) == pytest.approx((further_ms, chance_ms))


@given(st.integers(1, 80), st.integers(0, 64), st.integers(0, 60_000), st.floats(1.0, 100.0))
def test_nothing_is_refused_where_a_token_takes_a_tenth_of_what_is_allowed(
    prompt: int, sequences: int, context: int, knot_ms: float
) -> None:
    """Prompts below the first knot of a profile take no longer than a step without them, up to rounding."""
    cost = StepCost(prefill_ms=((90.0, knot_ms), (1000.0, 11.3 * knot_ms)), decode_ms=((1.0, 9.7), (64.0, 13.1)))
    order = DeferredSteps(cost, max_batch_tokens=2048)
    mean_ms, chance_ms = order.further_token_ms(
        sequences + 1, context + prompt, TokenLoad(mean_prompt=prompt, mean_output=37.0)
    )
    assert chance_ms >= 0.0
    load = TokenLoad(sequences, context, sequences=sequences, mean_prompt=prompt, mean_output=37.0)
    assert order.refusal(prompt, 0.0, math.inf, 10.0 * mean_ms, load) is None


def test_both_bounds_refuse_and_say_which() -> None:
    assert ORDER.refusal(50, 5.0, 20.1, 11.6, TokenLoad()) is None
    for bounds, rule, says in (
        ((19.9, math.inf), Rule.FIRST_TOKEN, "first token would take 15 ms"),
        ((math.inf, 11.4), Rule.FURTHER_TOKENS, "11.5 ms, and 11.4 ms"),
    ):
        unkept = ORDER.refusal(50, 5.0, *bounds, TokenLoad())
        assert unkept is not None
        assert unkept.rule is rule
        assert says in unkept.why


def test_a_refusal_names_figures_that_explain_it() -> None:
    """Where the mean is within what is allowed, it says how many are expected to keep that."""
    draw, seen = random.Random(0), set()
    for _ in range(2000):
        sequences = draw.randint(0, 40)
        load = TokenLoad(sequences, 50 * sequences, sequences=sequences, mean_prompt=100, mean_output=50.0)
        unkept = ORDER.refusal(50, 0.0, math.inf, draw.uniform(11.0, 90.0), load)
        if unkept is None:
            continue
        numbers = re.search(
            r"take (\S+) ms, and (\S+) ms are allowed(?:: (\S+) of \d+ .*, and (\S+) of \d+)?", unkept.why
        )
        assert numbers is not None
        takes, allowed, with_it, without = (float(each or "nan") for each in numbers.groups())
        assert takes >= allowed or with_it <= without
        seen.add(takes > allowed)
    assert seen == {True, False}


def test_a_sequence_that_would_make_another_late_is_refused() -> None:
    load = TokenLoad(decoding=1, context_tokens=100, least_tpot_ms=12.0)
    assert "12.0 ms are allowed" in str(ORDER.refusal(10, 0.0, math.inf, math.inf, load))


@pytest.mark.parametrize(
    ("prompt", "bounds", "load", "wait_ms"),
    [
        (50, (14.0, math.inf), TokenLoad(), None),  # it takes 15 ms alone
        (50, (20.0, math.inf), TokenLoad(unread_tokens=100), 15.0),  # 35 ms with the prompts before it
        (50, (math.inf, 11.4), TokenLoad(), None),  # 11.5 ms alone
        # One of two sequences ends in 30 tokens / 2 of 13 ms each.
        (10, (math.inf, 13.0), TokenLoad(2, 100, sequences=2, mean_output=30.0), 195.0),
    ],
)
def test_a_refusal_says_in_how_long_it_may_pass(
    prompt: int, bounds: tuple[float, float], load: TokenLoad, wait_ms: float | None
) -> None:
    unkept = ORDER.refusal(prompt, 0.0, *bounds, load)
    assert unkept is not None
    assert unkept.wait_ms == (None if wait_ms is None else pytest.approx(wait_ms))


def test_the_least_time_for_a_token_is_that_of_the_sequences_that_are_there() -> None:
    steps = StepScheduler(StepLimits(8, 100, 10_000), ORDER)
    for name, tpot_ms in enumerate((30.0, 12.0, 20.0, math.inf)):
        assert steps.add(name, 10, 20, tpot_ms=tpot_ms, has_begun=True) is None
    seen = []
    for name in (1, 0, 2, 3):
        seen.append(steps.load.least_tpot_ms)
        steps.cancel(name)
    assert [*seen, steps.load.least_tpot_ms] == [12.0, 20.0, 20.0, math.inf, math.inf]


def test_outputs_count_as_they_were_asked_until_they_have_ended() -> None:
    steps = StepScheduler(StepLimits(8, 100, 10_000), ORDER)
    for name in range(4):
        assert steps.add(name, 10, 200) is None
    assert steps.load.mean_output == 200
    decided(steps, 0.0)
    step = steps.decide(10.0)
    assert step is not None
    steps.done(step, ended=(0, 1))  # after two tokens
    assert steps.load.mean_output == (2 + 2 + 200 + 200) / 4


def kept_rps(load: float, seed: int) -> float:
    """Return the goodput of a random model, in parts of the rate that the closed form gives."""
    rng = random.Random(seed)
    cost = StepCost.line(
        rng.uniform(5.0, 30.0), rng.uniform(0.02, 0.2), rng.uniform(0.05, 1.0), rng.uniform(0.0, 1e-4), 0.0
    )
    prompt, output = rng.randint(20, 600), rng.randint(20, 300)
    spec = ModelSpec.model_validate(
        {
            "name": "m",
            "rate_rps": 1,
            "slo": {
                "ttft_ms": rng.uniform(3.0, 8.0) * cost.ms(prompt),
                "tpot_ms": rng.uniform(2.0, 4.0) * cost.ms(0, 1, prompt + output),
            },
            "generates": {
                "prompt_tokens": {"lognormal": {"median": prompt, "sigma": rng.uniform(0.0, 0.8), "most": 6 * prompt}},
                "output_tokens": {"lognormal": {"median": output, "sigma": rng.uniform(0.0, 0.8), "most": 6 * output}},
            },
        }
    )
    kv_tokens = 100 * (prompt + output)
    capacity_rps, _ = carried(spec, cost, kv_tokens)
    slo, generates = spec.slo, spec.generates
    assert slo is not None
    assert generates is not None
    assert generates.prompt_tokens is not None
    assert generates.output_tokens is not None
    assert capacity_rps > 0
    draws = np.random.default_rng(seed)
    prompts = generates.prompt_tokens.draw(1500, draws).tolist()
    outputs = generates.output_tokens.draw(1500, draws).tolist()
    replica = VirtualSteps(StepLimits(256, 2048, kv_tokens), cost, order=DeferredSteps(cost, 2048))
    at_ms, arrived = 0.0, []
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        at_ms += rng.expovariate(load * capacity_rps / 1000.0)
        arrived.append(at_ms)
        replica.advance(at_ms)
        replica.add(at_ms, number, prompt, output, at_ms + slo.ttft_ms, slo.tpot_ms)
    while replica.due_ms < math.inf:
        replica.advance(replica.due_ms)
    kept = sum(
        replica.first_ms[number] - arrived[number] <= slo.ttft_ms + 1e-6
        and last_ms - replica.first_ms[number] <= slo.tpot_ms * (outputs[number] - 1) + 1e-6
        for number, last_ms in replica.last_ms.items()
    )
    return load * kept / len(arrived)


@pytest.mark.parametrize("seed", seeds(3, 6))
def test_goodput_does_not_fall_beyond_capacity(seed: int) -> None:
    planned, *beyond = [kept_rps(load, seed) for load in (1.0, 1.5, 2.5, 5.0)]
    assert min(beyond) >= 0.95 * planned, beyond


def decided(steps: StepScheduler, now_ms: float) -> Step:
    """Decide on a step and end it."""
    step = steps.decide(now_ms)
    assert step is not None
    steps.done(step)
    return step


def ten_that_decode() -> StepScheduler:
    """Return ten sequences whose first tokens came at 20 ms, and whose second ones are due at 120 ms."""
    steps = StepScheduler(StepLimits(20, 100, 10_000), ORDER)
    for name in range(10):
        assert steps.add(name, 10, 50, 0.0, 20.0, 100.0) is None
    assert decided(steps, 0.0).first == list(range(10))
    return steps


def test_decoding_waits_for_a_first_token_that_comes_in_time_only_without_it() -> None:
    steps = ten_that_decode()
    assert steps.add(10, 50, 50, 20.0, 45.2, 100.0) is None  # 25.1 ms beside ten that decode and 15 ms alone
    assert steps.add(11, 50, 50, 20.0, 60.0, 100.0) is None
    step = decided(steps, 24.0)
    assert (step.sequences, step.first) == (0, [10, 11])
    assert decided(steps, 44.0).sequences == 12


def test_decoding_does_not_wait_when_a_token_would_be_late() -> None:
    steps = ten_that_decode()
    assert steps.add(10, 50, 50, 20.0, 110.0, 100.0) is None
    step = decided(steps, 90.0)  # after a step without them their tokens came at 126 ms, and are due at 120 ms
    assert (step.sequences, step.first, steps.expired) == (10, [], [10])


def test_what_waits_is_given_up_when_it_would_be_late_alone() -> None:
    steps = StepScheduler(StepLimits(1, 100, 10_000), ORDER)
    assert steps.add(0, 10, 50, 0.0, 100.0) is None
    assert steps.add(1, 50, 50, 0.0, 100.0) is None
    decided(steps, 0.0)
    decided(steps, 84.9)
    assert steps.expired == []
    decided(steps, 85.1)
    assert steps.expired == [1]
    assert steps.waiting == 0


def test_what_began_elsewhere_is_not_turned_away() -> None:
    steps = StepScheduler(StepLimits(8, 100, 10_000), ORDER)
    assert "would take 15 ms" in str(steps.add(0, 50, 50, 10.0, 10.1, 1.0))
    assert steps.add(0, 50, 50, 10.0, math.inf, 1.0, has_begun=True) is None


def test_sequences_that_begin_together_do_not_all_grow_too_long_together() -> None:
    """Short prompts and answers of one length, at four times the load: contexts grow with every token, all at once."""
    cost = StepCost(
        prefill_ms=((40.0, 30.0), (1000.0, 200.0)), decode_ms=((1.0, 20.0), (256.0, 80.0)), context_token_ms=0.01
    )
    steps = VirtualSteps(StepLimits(256, 2048, 1 << 20), cost, order=DeferredSteps(cost, 2048))
    arrivals = np.cumsum(np.random.default_rng(5).exponential(12.0, 4000)).tolist()
    for request, at_ms in enumerate(arrivals):
        steps.advance(at_ms)
        steps.add(at_ms, request, 20, 160, at_ms + 500.0, 50.0)
    while steps.due_ms < math.inf:
        steps.advance(steps.due_ms)
    kept = sum((last - steps.first_ms[name]) / 159 <= 50.0 for name, last in steps.last_ms.items())
    assert len(steps.last_ms) > 100
    assert kept > 0.95 * len(steps.last_ms)
