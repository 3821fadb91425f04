"""A generative model on an emulated GPU: occupies its worker thread for each step's time, and makes up its tokens.

Memory is counted as on a real one. The tokens are letters that depend on the prompt alone, so that they look like text
to a tokenizer of bytes, and the same prompt is answered the same.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenuto.deployments.gpulet.executors.busy_wait import wait_until
from tenuto.profiles.generation import pairs_of
from tenuto.profiles.networks.generating import Ending, Sampling, StepRan, blocks_of

_FIRST_LETTER, _LETTERS = 97, 26  # format: a to z in ASCII
_MADE_UP = "cannot be kept on an emulated GPU, which makes up its tokens. Leave it out"
_MOST_BETWEEN_S = 0.005  # limit: between two steps; more is no part of a step, such as a pause of the machine


@dataclass(slots=True)
class _Sequence:
    """A sequence: tokens of its prompt, tokens to be run before the next one, tokens that have run, tokens made, and
    the most to be made."""

    prompt: int
    left: int
    run: int
    made: int
    most: int
    drawn: int


class EmulatedGenerator:
    """See `tenuto.profiles.networks.generating.Generator`."""

    def __init__(self, blocks: int, block_tokens: int, step_ms: Callable[[int, int, int, int], float]) -> None:
        """Begin without sequences.

        Args:
            blocks: of the memory.
            block_tokens: tokens of one of them.
            step_ms: what a step takes by its prompt tokens, its sequences that decode, the tokens that these have, and
                its attention pairs; see `tenuto.profiles.generation.StepCost`.
        """
        self.blocks, self.block_tokens = blocks, block_tokens
        # Its texts never end by themselves, so that `min_tokens` and `ignore_eos` are kept anyway.
        self.refuses = dict.fromkeys(("logprobs", "logit_bias", "response_format"), _MADE_UP)
        self._step_ms = step_ms
        self._open: dict[int, _Sequence] = {}
        self._held = 0
        self._ended_s: float | None = None  # when the last step ended, if sequences were open then

    @property
    def free_blocks(self) -> int:
        """The blocks that no sequence holds."""
        return self.blocks - self._held

    def add(self, sequence: int, prompt: Sequence[int], sampling: Sampling, made: Sequence[int] = ()) -> None:
        """Take a sequence."""
        drawn, left = zlib.crc32(array("q", prompt).tobytes()), len(prompt) + len(made)
        self._open[sequence] = _Sequence(len(prompt), left, 0, len(made), sampling.max_tokens, drawn)

    def step(self, chunks: Sequence[tuple[int, int]]) -> StepRan:
        """Wait as long as the step takes. It begins where the one before ended, if sequences were open then: profiles
        measure from one end to the next, with what the engine does in between."""
        begun_s = now_s = time.perf_counter()
        if self._ended_s is not None:
            begun_s = max(self._ended_s, now_s - _MOST_BETWEEN_S)
        prompt_tokens = sequences = context_tokens = pairs = 0
        for sequence, tokens in chunks:
            each = self._open[sequence]
            before, each.run = each.run, each.run + tokens
            if each.left:
                prompt_tokens += tokens
                pairs += pairs_of(tokens, before)
            else:
                sequences += 1
                context_tokens += each.run
            each.left = max(0, each.left - tokens)
            self._held += blocks_of(each.run, self.block_tokens) - blocks_of(before, self.block_tokens)
        if self._held > self.blocks:
            raise MemoryError("no block is free for a sequence of this step")
        wait_until(begun_s + self._step_ms(prompt_tokens, sequences, context_tokens, pairs) / 1000.0)
        ran = StepRan((time.perf_counter() - begun_s) * 1000.0)
        for sequence, _ in chunks:
            each = self._open[sequence]
            if not each.left:
                ran.tokens[sequence] = _FIRST_LETTER + (each.drawn + each.made) % _LETTERS
                each.made += 1
                if each.made >= each.most:
                    ran.ended[sequence] = Ending.LENGTH
        for sequence in ran.ended:
            self.cancel(sequence)
        self._ended_s = time.perf_counter() if self._open else None
        return ran

    def cancel(self, sequence: int) -> None:
        """Forget a sequence, and free its blocks at once."""
        each = self._open.pop(sequence, None)
        if each is not None:
            self._held -= blocks_of(each.run, self.block_tokens)
        if not self._open:
            self._ended_s = None

    def preempt(self, sequence: int) -> None:
        """Free a sequence's blocks at once; it stays open."""
        each = self._open[sequence]
        self._held -= blocks_of(each.run, self.block_tokens)
        each.left, each.run = each.prompt + each.made, 0

    def close(self) -> None:
        """Forget all sequences."""
        self._open.clear()
        self._held = 0
