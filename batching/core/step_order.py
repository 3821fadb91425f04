"""The order of steps of a generative model alone in its gpu-let: every step decodes all sequences that have begun, and
the rest of its tokens goes to prompts in the order of their deadlines (chunked prefills, Sarathi-Serve, OSDI 2024).

A sequence is begun once there is memory for all of it, so none is ever preempted. It has no clock, and does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenuto.profiles.networks.generating import blocks_of


@dataclass(slots=True)
class _Sequence:
    """A sequence; `left`: tokens of its prompt that have not run; `blocks`: those of all its tokens."""

    left: int
    blocks: int
    first_by_ms: float


class ChunkedSteps:
    """Invariant: the blocks of all sequences that have begun fit into the memory."""

    def __init__(self, blocks: int, block_tokens: int, max_sequences: int, max_batch_tokens: int) -> None:
        """Begin without sequences.

        Args:
            blocks: of the memory, each of `block_tokens` tokens.
            block_tokens: tokens of one block.
            max_sequences: the most that have begun at a time.
            max_batch_tokens: the most tokens of a step.
        """
        self._blocks, self._block_tokens = blocks, block_tokens
        self._max_sequences, self._max_batch_tokens = max_sequences, max_batch_tokens
        self._begun: dict[int, _Sequence] = {}
        self._waiting: dict[int, _Sequence] = {}
        self._refused: list[tuple[int, str]] = []

    def add(
        self, now_ms: float, sequence: int, prompt_tokens: int, max_tokens: int, first_by_ms: float, tpot_ms: float
    ) -> str | None:
        """Take a sequence; return why it is refused, if it cannot be kept."""
        del tpot_ms
        if first_by_ms <= now_ms:
            return "its first token is due already; raise the SLO or add GPUs"
        blocks = blocks_of(prompt_tokens + max_tokens, self._block_tokens)
        if blocks > self._blocks:
            return f"it needs {blocks} blocks of memory and there are {self._blocks}; ask for fewer tokens"
        self._waiting[sequence] = _Sequence(prompt_tokens, blocks, first_by_ms)
        return None

    def next_step(self, now_ms: float) -> Sequence[tuple[int, int]]:
        """Return the next step: sequences, each with the number of its tokens; empty when nothing is to run now."""
        for number, waiting in list(self._waiting.items()):
            if waiting.first_by_ms <= now_ms:
                del self._waiting[number]
                self._refused.append((number, "its first token could not be made in time; raise the SLO or add GPUs"))
        self._begin()
        chunks = [(number, 1) for number, each in self._begun.items() if not each.left][: self._max_batch_tokens]
        room = self._max_batch_tokens - len(chunks)
        reading = [(each.first_by_ms, number) for number, each in self._begun.items() if each.left]
        for _, number in sorted(reading):
            taken = min(room, self._begun[number].left)
            if taken:
                self._begun[number].left -= taken
                chunks.append((number, taken))
                room -= taken
        return chunks

    def _begin(self) -> None:
        """Begin with sequences that wait, the one that is due first before the others."""
        free = self._blocks - sum(each.blocks for each in self._begun.values())
        for number, each in sorted(self._waiting.items(), key=lambda item: item[1].first_by_ms):
            if each.blocks > free or len(self._begun) >= self._max_sequences:
                return
            self._begun[number] = self._waiting.pop(number)
            free -= each.blocks

    def drain_refused(self) -> Sequence[tuple[int, str]]:
        """Return the sequences that were given up since the last call, and why; they have made no token."""
        refused, self._refused = self._refused, []
        return refused

    def step_done(self, now_ms: float, execution_ms: float, ended: Sequence[int]) -> None:
        """Take the end of a step, and the sequences that ended with it."""
        del execution_ms
        for sequence in ended:
            self.cancel(now_ms, sequence)

    def cancel(self, now_ms: float, sequence: int) -> None:
        """Forget a sequence."""
        del now_ms
        self._begun.pop(sequence, None)
        self._waiting.pop(sequence, None)
