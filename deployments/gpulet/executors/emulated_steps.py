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
from tenuto.profiles.networks.generating import Ending, Sampling, StepRan, blocks_of

_FIRST_LETTER, _LETTERS = 97, 26  # format: a to z in ASCII


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

    def __init__(self, blocks: int, block_tokens: int, vocabulary: int, step_ms: Callable[[int, int], float]) -> None:
        """Begin without sequences.

        Args:
            blocks: of the memory.
            block_tokens: tokens of one of them.
            vocabulary: the number of tokens that the model knows.
            step_ms: what a step takes that runs so many tokens, over sequences of so many in all that have run.
        """
        self.blocks, self.block_tokens = blocks, block_tokens
        self._vocabulary = vocabulary
        self._step_ms = step_ms
        self._open: dict[int, _Sequence] = {}
        self._held = 0

    @property
    def free_blocks(self) -> int:
        """The blocks that no sequence holds."""
        return self.blocks - self._held

    def add(self, sequence: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """Take a sequence."""
        drawn = zlib.crc32(array("q", prompt).tobytes())
        self._open[sequence] = _Sequence(len(prompt), len(prompt), 0, 0, sampling.max_tokens, drawn)

    def step(self, chunks: Sequence[tuple[int, int]]) -> StepRan:
        """Wait as long as the step takes."""
        begun_s = time.perf_counter()
        context = sum(self._open[sequence].run for sequence, _ in chunks)
        for sequence, tokens in chunks:
            each = self._open[sequence]
            before, each.run = each.run, each.run + tokens
            each.left = max(0, each.left - tokens)
            self._held += blocks_of(each.run, self.block_tokens) - blocks_of(before, self.block_tokens)
        if self._held > self.blocks:
            raise MemoryError("no block is free for a sequence of this step")
        wait_until(begun_s + self._step_ms(sum(tokens for _, tokens in chunks), context) / 1000.0)
        ran = StepRan((time.perf_counter() - begun_s) * 1000.0)
        for sequence, _ in chunks:
            each = self._open[sequence]
            if not each.left:
                ran.tokens[sequence] = (_FIRST_LETTER + (each.drawn + each.made) % _LETTERS) % self._vocabulary
                each.made += 1
                if each.made >= each.most:
                    ran.ended[sequence] = Ending.LENGTH
        for sequence in ran.ended:
            self.cancel(sequence)
        return ran

    def cancel(self, sequence: int) -> None:
        """Forget a sequence, and free its blocks at once."""
        each = self._open.pop(sequence, None)
        if each is not None:
            self._held -= blocks_of(each.run, self.block_tokens)

    def preempt(self, sequence: int) -> None:
        """Free a sequence's blocks at once; it stays open."""
        each = self._open[sequence]
        self._held -= blocks_of(each.run, self.block_tokens)
        each.left, each.run = each.prompt + each.made, 0

    def close(self) -> None:
        """Forget all sequences."""
        self._open.clear()
        self._held = 0
