"""The sequences of a replica that decode, and the memory of their keys and values, counted in blocks.

Sequences are counted, not walked through. All that decode advance together, so a common number of turns says how long
each context is, and a count for each place in a block says how many blocks the next turn takes. A turn costs O(1), and
O(log n) for each sequence that begins or ends in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush

WAITING, READING, DECODING, ENDING, GONE = range(5)  # unit: the state of a sequence


class KvBlocks:
    """The blocks of memory for keys and values: `free` of `total`, each for `size` tokens."""

    __slots__ = ("free", "size", "total")

    def __init__(self, tokens: int, size: int) -> None:
        self.size = size
        self.free = self.total = tokens // size

    def needed(self, tokens: int) -> int:
        """Return how many blocks so many tokens of one sequence take."""
        return -(-tokens // self.size)


@dataclass(slots=True, eq=False)
class TokenSequence:
    """A sequence of tokens: its prompt, and what it has written. Its first token is due at `first_by_ms`, each further
    one `tpot_ms` later in the mean."""

    name: int
    prompt: int
    output: int
    first_by_ms: float
    tpot_ms: float
    todo: int  # tokens to read before it decodes: the prompt, and what it wrote before it was preempted
    read: int = 0
    first_ms: float = math.inf  # when its first token comes, as far as the order knows
    written: int = 0  # tokens before it began to decode
    began: int = 0  # the turn after which it decodes
    blocks: int = 0  # held while it reads or ends
    state: int = WAITING
    epoch: int = 0  # times that it was preempted
    round: int = 0  # in which its client has its turn


class Decoding:
    """The sequences that decode, by name. `turn` counts the steps in which all of them advanced by one token; together
    they have `context_tokens`."""

    def __init__(self, blocks: KvBlocks) -> None:
        self.sequences: dict[int, TokenSequence] = {}
        self.turn = 0
        self.context_tokens = 0
        self._blocks = blocks
        self._due = [0] * blocks.size  # sequences that take a block, by turn modulo the block's size
        self._ends: list[tuple[int, int, int, TokenSequence]] = []  # heap of (turn of the last token, name, epoch, …)
        self._paces: list[tuple[float, int, int, TokenSequence]] = []  # heap by when tokens are due: see `due_ms`

    @property
    def next_blocks(self) -> int:
        """How many blocks the next turn takes."""
        return self._due[(self.turn + 1) % self._blocks.size]

    def add(self, one: TokenSequence) -> None:
        """Let a sequence decode whose `todo` tokens are read and whose next token has just been written."""
        one.state, one.began = DECODING, self.turn
        self.sequences[one.name] = one
        self._due[(one.began + 1 - one.todo) % self._blocks.size] += 1
        self.context_tokens += one.todo
        heappush(self._ends, (one.began + one.output - one.written, one.name, one.epoch, one))

    def remove(self, one: TokenSequence) -> None:
        """Let a sequence decode no longer; it still holds the blocks of its context."""
        del self.sequences[one.name]
        context = one.todo + self.turn - one.began
        self._due[(one.began + 1 - one.todo) % self._blocks.size] -= 1
        self.context_tokens -= context
        one.blocks = self._blocks.needed(context)

    def written(self, one: TokenSequence) -> int:
        """Return how many tokens a sequence that decodes has written."""
        return one.written + self.turn - one.began

    def advance(self) -> None:
        """Let all sequences decode one token, for which there are blocks."""
        self._blocks.free -= self.next_blocks
        self.turn += 1
        self.context_tokens += len(self.sequences)

    def pop_ended(self) -> TokenSequence | None:
        """Remove and return a sequence that has written its last token; None: there is none."""
        while (at := self._next_end()) is not None and at <= self.turn:
            one = heappop(self._ends)[3]
            self.remove(one)
            one.read = one.todo + self.turn - one.began
            return one
        return None

    def _next_end(self) -> int | None:
        """Return the turn in which the next sequence writes its last token."""
        ends = self._ends
        while ends and (ends[0][3].epoch != ends[0][2] or ends[0][3].state != DECODING):
            heappop(ends)
        return ends[0][0] if ends else None

    def pace(self, one: TokenSequence, ends_ms: float) -> None:
        """Note from when on the tokens of a sequence are due whose prompt was read in a step that ends then."""
        if one.first_ms == math.inf:  # it wrote the first elsewhere
            one.first_ms = ends_ms
        base_ms = one.first_ms + (one.written - one.began - 1) * one.tpot_ms
        heappush(self._paces, (base_ms, one.name, one.epoch, one))

    def due_ms(self) -> float:
        """Return when the next token of a sequence is due: its base and the time of a token for each turn. All tokens
        of a replica are promised the same time, so the smallest base is first at every turn."""
        heap = self._paces
        while heap and (heap[0][3].epoch != heap[0][2] or heap[0][3].state != DECODING):
            heappop(heap)
        return heap[0][0] + (self.turn + 1) * heap[0][3].tpot_ms if heap else math.inf

    def quiet_turns(self) -> int:
        """Return how many turns would follow in which no sequence ends and blocks suffice."""
        end, count = self._next_end(), len(self.sequences)
        # Of any block's size of turns, each sequence takes one block.
        return 0 if end is None else min(end - self.turn - 1, self._blocks.free // count * self._blocks.size)

    def repeat(self, turns: int) -> None:
        """Advance by so many quiet turns at once."""
        size, count = self._blocks.size, len(self.sequences)
        taken = turns // size * count
        for turn in range(self.turn + 1, self.turn + 1 + turns % size):
            taken += self._due[turn % size]
        self._blocks.free -= taken
        self.turn += turns
        self.context_tokens += turns * count
