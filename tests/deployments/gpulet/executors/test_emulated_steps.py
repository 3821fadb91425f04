"""Steps on an emulated GPU: memory is counted, tokens are made up from the prompt, and steps take the plan's time."""

import pytest

from tenuto.deployments.gpulet.executors.emulated_steps import EmulatedGenerator
from tenuto.profiles.networks.generating import Ending, Sampling


def generator(asked: list[tuple[int, ...]] | None = None) -> EmulatedGenerator:
    def step_ms(*amounts: int) -> float:
        if asked is not None:
            asked.append(amounts)
        return 0.01

    return EmulatedGenerator(8, 16, step_ms)


def test_a_step_costs_by_its_tokens_and_by_what_has_run() -> None:
    asked: list[tuple[int, ...]] = []
    made = generator(asked)
    made.add(0, [1] * 20, Sampling(3))
    made.add(1, [1] * 5, Sampling(9))
    assert made.step([(0, 16), (1, 5)]).tokens.keys() == {1}
    assert made.step([(0, 4), (1, 1)]).tokens.keys() == {0, 1}
    made.step([(0, 1)])
    ran = made.step([(0, 1), (1, 1)])
    assert ran.ended == {0: Ending.LENGTH}
    # Prompt tokens, sequences that decode and the tokens they have, attention pairs.
    assert asked == [(21, 0, 0, 136 + 15), (4, 1, 6, 16 * 4 + 10), (0, 1, 21, 0), (0, 2, 22 + 7, 0)]
    assert ran.execution_ms >= 0.01


def test_memory_is_held_for_what_has_run() -> None:
    made = generator()
    made.add(0, [1] * 20, Sampling(3))
    assert made.free_blocks == 8
    made.step([(0, 16)])
    assert made.free_blocks == 7
    made.step([(0, 4)])
    assert made.free_blocks == 6
    made.preempt(0)
    assert made.free_blocks == 8
    assert made.step([(0, 20)]).tokens == {}
    assert made.step([(0, 1)]).tokens.keys() == {0}
    made.cancel(0)
    made.cancel(0)
    assert made.free_blocks == 8


def test_a_step_beyond_the_memory_fails_and_is_survived() -> None:
    made = generator()
    made.add(0, [1] * 120, Sampling(3))
    made.add(1, [1] * 20, Sampling(3))
    made.step([(0, 120)])
    with pytest.raises(MemoryError):
        made.step([(1, 20)])
    made.cancel(1)
    made.cancel(0)
    assert made.free_blocks == 8


def test_the_same_prompt_is_answered_the_same() -> None:
    def answered(prompt: list[int]) -> list[int]:
        made = generator()
        made.add(0, prompt, Sampling(4))
        return [made.step([(0, tokens)]).tokens[0] for tokens in (len(prompt), 1, 1, 1)]

    assert answered([1, 2, 3]) == answered([1, 2, 3]) != answered([1, 2, 4])
    assert bytes(answered([1, 2, 3])).isalpha()
