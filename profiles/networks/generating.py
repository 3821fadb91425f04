"""What runs a generative model step by step: the protocol of its executors, and what goes in and comes out. No torch.

A step holds decodes (one further token of a sequence) and chunks of prefills (so many tokens of a prompt; the last one
makes the first token). Somebody else decides what each step holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol


class Sampling(NamedTuple):
    """How the tokens of one sequence are chosen, and what is reported of them. With a `temperature` of 0 the likeliest
    one is; otherwise one is drawn with the sequence's own `seed` among the likeliest that have `top_p` of the
    probability.

    `logit_bias` is added to the scores of these tokens. With `schema` the text is JSON that keeps this JSON schema;
    "" is any text. The end-of-text token cannot come before there are `min_tokens`, and with `ignores_end` it is a
    token as any other. With `logprobs` the log probability of each token is reported, and those of so many of the
    likeliest; with `prompt_logprobs` also those of the prompt's tokens.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    ignores_end: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    schema: str = ""
    logprobs: int | None = None
    prompt_logprobs: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether only the first four fields are asked for."""
        return self == Sampling(*self[:4])


class TokenScores(NamedTuple):
    """What the model thought of a token: its log probability, before anything of `Sampling` changed it, and the
    `likeliest` tokens at its place with theirs, the likeliest first."""

    logprob: float
    likeliest: list[tuple[int, float]]


class Ending(StrEnum):
    """Why a sequence ended by itself, as OpenAI's interface calls it."""

    STOP = "stop"  # the model's end-of-text token, which is not among the tokens
    LENGTH = "length"  # its `max_tokens`


@dataclass(slots=True)
class StepRan:
    """A step that ran: at most one new token by sequence, and the sequences that ended with it.

    `scores` are those of the new tokens, for sequences that ask for them; before those of the first token are those of
    the prompt, from its second token on. `failed` are sequences that cannot go on, though the step ran, and why; they
    are forgotten.
    """

    execution_ms: float
    tokens: dict[int, int] = field(default_factory=dict)
    ended: dict[int, Ending] = field(default_factory=dict)
    scores: dict[int, list[TokenScores]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class Generator(Protocol):
    """Runs one generative model. Every method is called on one thread, never on an event loop.

    A sequence holds a block of memory for each begun `block_tokens` of its tokens that have run. It has them from the
    step that needs them until it ends or is cancelled.
    """

    block_tokens: int
    blocks: int  # all that there are
    refuses: dict[str, str]  # fields of requests that cannot be kept, by OpenAI's names, and why, as a sentence's end

    @property
    def free_blocks(self) -> int:
        """The blocks that no sequence holds."""

    def add(self, sequence: int, prompt: Sequence[int], sampling: Sampling, made: Sequence[int] = ()) -> None:
        """Take a sequence with a number that no open one has. Its prompt has at least one token; none of it runs
        yet. `made` are tokens that it has from elsewhere: steps run them with its prompt, and `max_tokens` counts
        them. What is made of it then is what would have been made there.

        Raises:
            ValueError: it asks for what this generator `refuses`.
        """

    def step(self, chunks: Sequence[tuple[int, int]]) -> StepRan:
        """Run one step over these sequences, with so many tokens of each: those of its prompt that have not run, or
        1 for a decode.

        Raises:
            Exception: it failed. Sequences of the step are in no known state then: cancel them.
        """

    def cancel(self, sequence: int) -> None:
        """Forget a sequence, and free its blocks at once; does nothing for one that has ended."""

    def preempt(self, sequence: int) -> None:
        """Free a sequence's blocks at once. It stays open: steps run its prompt and the tokens it has so far again."""

    def close(self) -> None:
        """Release the model and all memory."""


def longest_sequence(config: Any) -> int | None:
    """Return how many tokens a model's positions reach, by its configuration; None when they have no end."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return None if longest is None else int(longest)


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Return the blocks that so many tokens need."""
    return -(-tokens // block_tokens)
