"""Which sequences the next step of a program that generates works on: events go in, steps come out; no clock, no I/O.

The same object decides in virtual time and where requests are served. A step is decided by `decide` and ends by `done`.
Positions advance when a step is decided, so that an engine may decide on the next while one runs; memory and places of
sequences that end are free after `done`.

The order is that of vLLM (v1, chunked prefill): all sequences that decode, then prompts first come first served, cut
where the step is full. When no block is left for the keys and values of a sequence that decodes, the one that was
admitted last loses its own, and reads its prompt and what it had written again; no sequence is admitted in that step.

Sequences are counted, not walked through. All that decode advance together, so a common number of turns says how long
each context is, and a count for each place in a block says how many blocks the next turn takes. A step costs O(1), and
O(log n) for each sequence that begins or ends in it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from tenuto.profiles.generation import BLOCK_TOKENS, pairs_of

UNLIMITED = 1 << 40  # unit: tokens of memory that never run out


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of an engine: sequences at once, tokens of a step, tokens whose keys and values it holds (given out in
    blocks), and tokens of a prompt with its output (None: no limit of its own)."""

    max_sequences: int
    max_batch_tokens: int
    kv_tokens: int
    block_tokens: int = BLOCK_TOKENS
    longest_context: int | None = None


class Step:
    """What one step holds.

    `chunks` are (sequence, tokens, tokens of it read before) of prompts. `first` and `last` are the sequences that make
    their first and their last token in it. `preempted` lost their memory before it. `sequences` decode one token each,
    with `context_tokens` of context together.
    """

    __slots__ = (
        "attention_pairs",
        "chunks",
        "context_tokens",
        "first",
        "last",
        "preempted",
        "prompt_tokens",
        "sequences",
    )

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int, int]] = []
        self.first: list[int] = []
        self.last: list[int] = []
        self.preempted: list[int] = []
        self.prompt_tokens = 0
        self.attention_pairs = 0
        self.sequences = 0
        self.context_tokens = 0


_WAITING, _READING, _DECODING, _ENDING, _GONE = range(5)  # unit: the state of a sequence


class _Sequence:
    __slots__ = ("began", "blocks", "epoch", "name", "output", "prompt", "read", "state", "todo", "written")

    def __init__(self, name: int, prompt: int, output: int) -> None:
        self.name, self.prompt, self.output = name, prompt, output
        self.todo = prompt  # tokens to read before it decodes: the prompt, and what it wrote before it was preempted
        self.read = 0
        self.written = 0  # tokens before it began to decode
        self.began = 0  # the turn after which it decodes
        self.blocks = 0  # held while it reads or ends
        self.state = _WAITING
        self.epoch = 0  # times that it was preempted


class StepScheduler:
    """The sequences of one replica. Invariant: blocks in use never exceed the limit."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self._size = limits.block_tokens
        self.blocks = limits.kv_tokens // limits.block_tokens
        self.free_blocks = self.blocks
        self._turn = 0  # steps so far in which all that decode advanced by one token
        self._due = [0] * self._size  # sequences that take a block, by turn modulo the block's size
        self._context = 0  # tokens of all that decode
        self._known: dict[int, _Sequence] = {}
        self._queue: deque[_Sequence] = deque()
        self._queued = 0
        self._running: dict[int, _Sequence] = {}  # that read or decode, in order of admission
        self._decoding: dict[int, _Sequence] = {}
        self._reading: _Sequence | None = None
        self._ending = 0
        self._ends: list[tuple[int, int, int, _Sequence]] = []  # heap of (turn of the last token, name, epoch, …)
        self._is_blocked = False  # no memory or place for the first that waits, until one ends

    @property
    def kv_tokens(self) -> int:
        """Tokens of memory in use, in whole blocks."""
        return (self.blocks - self.free_blocks) * self._size

    @property
    def waiting(self) -> int:
        """Sequences that wait to be admitted."""
        return self._queued

    @property
    def running(self) -> int:
        """Sequences that read or decode, with those whose last step runs."""
        return len(self._running) + self._ending

    @property
    def sequences(self) -> int:
        """All sequences that are here."""
        return len(self._known)

    def add(self, sequence: int, prompt_tokens: int, output_tokens: int) -> str | None:
        """Take a sequence that writes at most so many tokens; return why it can never run, or None.

        The driver chooses its number, which no other sequence here has.
        """
        most, limits = prompt_tokens + output_tokens, self.limits
        if prompt_tokens < 1 or output_tokens < 1:
            return f"{prompt_tokens} prompt and {output_tokens} output tokens: it takes at least one of each"
        if limits.longest_context is not None and most > limits.longest_context:
            return (
                f"{prompt_tokens} prompt and {output_tokens} output tokens are more than the model's longest context "
                f"({limits.longest_context})"
            )
        if self._blocks_of(most - 1) > self.blocks:
            held = self.blocks * self._size
            return f"{prompt_tokens} prompt and {output_tokens} output tokens are more than the memory holds ({held})"
        found = self._known[sequence] = _Sequence(sequence, prompt_tokens, output_tokens)
        if not self._queued:
            self._is_blocked = False
        self._queue.append(found)
        self._queued += 1
        return None

    def cancel(self, sequence: int) -> bool:
        """Forget a sequence and free its memory at once; False if there is none of that number."""
        found = self._known.pop(sequence, None)
        if found is None:
            return False
        if found.state == _WAITING:
            self._queued -= 1
            self._is_blocked = False
        elif found.state == _ENDING:
            self._ending -= 1
            self._give_back(found.blocks)
        else:
            self._leave(found)
        found.state = _GONE
        return True

    def decide(self) -> Step | None:
        """Return what the next step holds; None when no sequence can run. The caller runs every step it was given."""
        step = Step()
        self._decode(step)
        self._read_on(step)
        if not step.preempted:
            self._admit(step)
        return step if step.sequences or step.chunks else None

    def decoding(self, step: Step) -> list[int]:
        """Return the sequences that decode in the step that was decided last."""
        ended = [name for name in step.last if self._known[name].read > self._known[name].todo]
        return [name for name, one in self._decoding.items() if one.began < self._turn] + ended

    def done(self, step: Step, ended: tuple[int, ...] = ()) -> None:
        """Take note that a step has ended; `ended` are sequences that stop before their last token."""
        for name in step.last:
            found = self._known.get(name)
            if found is not None and found.state == _ENDING:
                self.cancel(name)
        for name in ended:
            self.cancel(name)

    def quiet_steps(self) -> int:
        """Return how many steps would now follow in which the same sequences decode and nothing else happens."""
        count = len(self._decoding)
        if not count or self._reading is not None or (self._queued and not self._is_blocked):
            return 0
        ends = self._ends
        while ends[0][3].epoch != ends[0][2] or ends[0][3].state != _DECODING:
            heappop(ends)
        # Of any block's size of turns, each sequence takes one block.
        return min(ends[0][0] - self._turn - 1, self.free_blocks // count * self._size)

    def repeat(self, steps: int) -> None:
        """Decide so many of `quiet_steps` at once."""
        count, rest = len(self._decoding), steps % self._size
        taken = steps // self._size * count
        for turn in range(self._turn + 1, self._turn + 1 + rest):
            taken += self._due[turn % self._size]
        self.free_blocks -= taken
        self._turn += steps
        self._context += steps * count

    # --- parts of a step ----------------------------------------------------------------------------------------------

    def _decode(self, step: Step) -> None:
        turn = self._turn + 1
        place = turn % self._size
        while self._due[place] > self.free_blocks:
            self._preempt(step)
        count = len(self._decoding)
        if not count:
            return
        self.free_blocks -= self._due[place]
        self._turn = turn
        self._context += count
        step.sequences, step.context_tokens = count, self._context
        ends = self._ends
        while ends and ends[0][0] <= turn:
            _, name, epoch, one = heappop(ends)
            if one.epoch == epoch and one.state == _DECODING:
                one.read = one.todo + turn - one.began
                self._leave(one, gives_back=False)
                self._end(step, name, one)

    def _read_on(self, step: Step) -> None:
        one = self._reading
        if one is None:
            return
        tokens = min(self.limits.max_batch_tokens - step.sequences, one.todo - one.read)
        need = self._blocks_of(one.read + tokens) - one.blocks
        if need > self.free_blocks:
            self._preempt(step)  # it was admitted last
        elif tokens > 0:
            self._read(step, one, tokens, need)

    def _admit(self, step: Step) -> None:
        left = self.limits.max_batch_tokens - step.sequences - step.prompt_tokens
        while self._queued and left > 0 and self._reading is None:
            one = self._queue[0]
            if one.state != _WAITING:
                self._queue.popleft()
                continue
            if self.running >= self.limits.max_sequences or self._blocks_of(one.todo) > self.free_blocks:
                self._is_blocked = True
                return
            self._queue.popleft()
            self._queued -= 1
            self._running[one.name] = one
            one.state = _READING
            tokens = min(left, one.todo)
            self._read(step, one, tokens, self._blocks_of(tokens))
            left -= tokens
        self._is_blocked = False

    def _read(self, step: Step, one: _Sequence, tokens: int, need: int) -> None:
        """Let a sequence read so many tokens in the step, for which it takes `need` blocks."""
        step.chunks.append((one.name, tokens, one.read))
        step.prompt_tokens += tokens
        step.attention_pairs += pairs_of(tokens, one.read)
        one.read += tokens
        one.blocks += need
        self.free_blocks -= need
        self._reading = None if one.read == one.todo else one
        if one.read < one.todo:
            return
        if not one.written:
            step.first.append(one.name)
        one.written += 1
        one.began = self._turn
        if one.written == one.output:
            del self._running[one.name]
            self._end(step, one.name, one)
            return
        one.state = _DECODING
        self._decoding[one.name] = one
        self._due[(one.began + 1 - one.todo) % self._size] += 1
        self._context += one.todo
        heappush(self._ends, (one.began + one.output - one.written, one.name, one.epoch, one))

    def _end(self, step: Step, name: int, one: _Sequence) -> None:
        one.blocks = self._blocks_of(one.read)
        one.state = _ENDING
        self._ending += 1
        step.last.append(name)

    def _leave(self, one: _Sequence, *, gives_back: bool = True) -> None:
        """Take a sequence out of those that run."""
        del self._running[one.name]
        if one.state == _DECODING:
            del self._decoding[one.name]
            context = one.todo + self._turn - one.began
            self._due[(one.began + 1 - one.todo) % self._size] -= 1
            self._context -= context
            one.blocks = self._blocks_of(context)
        elif self._reading is one:
            self._reading = None
        if gives_back:
            self._give_back(one.blocks)

    def _give_back(self, blocks: int) -> None:
        self.free_blocks += blocks
        self._is_blocked = False

    def _preempt(self, step: Step) -> None:
        one = self._running[next(reversed(self._running))]
        if one.state == _DECODING:
            one.written += self._turn - one.began
        self._leave(one)
        one.todo = one.prompt + one.written
        one.read = one.blocks = 0
        one.epoch += 1
        one.state = _WAITING
        self._queue.appendleft(one)
        self._queued += 1
        step.preempted.append(one.name)

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._size)
