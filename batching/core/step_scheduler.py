"""Which sequences the next step of a program that generates works on, prefill or decode (continuous batching).

Events go in, steps come out; no clock, no I/O.

The same object decides in virtual time and where requests are served. A step is decided by `decide` and ends by `done`.
Positions advance when a step is decided, so that an engine may decide on the next while one runs; memory and places of
sequences that end are free after `done`.

An order (`StepOrder`) says which sequences are taken, whether those that decode do so in a step, and how many tokens of
prompts it reads at most; prompts are first come first served. Without one the order is that of vLLM (v1, chunked
prefill): all are taken and decode, then come prompts, cut where the step is full. When no block is left for the keys
and values of a sequence that decodes, the one that was admitted last loses its own (preemption), and reads its prompt
and what it had written again; no sequence is admitted in that step.

Sequences are counted, not walked through. All that decode advance together, so a common number of turns says how long
each context is, and a count for each place in a block says how many blocks the next turn takes. A step costs O(1), and
O(log n) for each sequence that begins or ends in it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from tenuto.outcome import Rule
from tenuto.profiles.generation import BLOCK_TOKENS, pairs_of

TRIES = 2  # derived: a dispatcher sends a generation that is refused once more
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


@dataclass(slots=True)
class TokenLoad:
    """The sequences that are there.

    `decoding` of all `sequences` make tokens, and have `context_tokens`; `unread_tokens` of prompts have not run. The
    least time for a token that any is promised, and when the next token of one that decodes is due, are in ms. The
    means are those of the last, about as many as run at once.
    """

    decoding: int = 0
    context_tokens: int = 0
    unread_tokens: int = 0
    least_tpot_ms: float = math.inf
    due_ms: float = math.inf
    sequences: int = 0
    mean_prompt: float = 0.0
    mean_output: float = 1.0


class Unkept(NamedTuple):
    """A sequence that is not taken: by which rule, and why."""

    rule: Rule
    why: str


class StepOrder(Protocol):
    """Decides what the sequences of a replica are taken for, and what a step holds."""

    def refusal(
        self, prompt_tokens: int, now_ms: float, first_by_ms: float, tpot_ms: float, load: TokenLoad
    ) -> Unkept | None:
        """Return why a new sequence must be refused; None where it is taken."""

    def latest_ms(self, prompt_tokens: int, now_ms: float, first_by_ms: float, load: TokenLoad) -> float:
        """Return the latest start of a prompt beside this load; it is not begun later."""

    def ends_ms(self, now_ms: float, step: Step) -> float:
        """Return when a step that begins now will end."""

    def choose(self, now_ms: float, steps: StepScheduler) -> tuple[bool, int]:
        """Return whether sequences decode in a step, and how many tokens of prompts it reads at most (no other prompt
        than the first is cut for that); asked where both are possible."""


_WAITING, _READING, _DECODING, _ENDING, _GONE = range(5)  # unit: the state of a sequence


class _Sequence:
    __slots__ = (
        "began",
        "blocks",
        "epoch",
        "first_by_ms",
        "first_ms",
        "name",
        "output",
        "prompt",
        "read",
        "state",
        "todo",
        "tpot_ms",
        "written",
    )

    def __init__(self, name: int, prompt: int, output: int, first_by_ms: float, tpot_ms: float) -> None:
        self.name, self.prompt, self.output = name, prompt, output
        self.first_by_ms, self.tpot_ms = first_by_ms, tpot_ms
        self.first_ms = math.inf  # when its first token comes, as far as the order knows
        self.todo = prompt  # tokens to read before it decodes: the prompt, and what it wrote before it was preempted
        self.read = 0
        self.written = 0  # tokens before it began to decode
        self.began = 0  # the turn after which it decodes
        self.blocks = 0  # held while it reads or ends
        self.state = _WAITING
        self.epoch = 0  # times that it was preempted


class _Lately:
    """The mean of the last figures, about `most`."""

    def __init__(self, most: int) -> None:
        self.mean, self._count, self._most = 0.0, 0, most

    def add(self, figure: float) -> None:
        self._count = min(self._count + 1, self._most)
        self.mean += (figure - self.mean) / self._count

    def correct(self, more: float) -> None:
        """Add so much to one of the figures."""
        self.mean += more / self._count


def emptiest(replicas: Iterable[tuple[int, float]]) -> int:
    """Return the place of the replica that takes a new sequence: the one that then has the fewest for its planned rate.
    A sequence takes about as long on each (Little's law: sequences = rate x time), so each is sent what is planned.

    Args:
        replicas: how many sequences each has, and the requests per second that are planned for it.
    """
    loads = [((count + 1) / rate if rate else math.inf, count) for count, rate in replicas]
    return loads.index(min(loads))


class StepScheduler:
    """The sequences of one replica. Invariant: blocks in use never exceed the limit."""

    def __init__(self, limits: StepLimits, order: StepOrder | None = None) -> None:
        self.limits = limits
        self._order = order
        self.expired: list[int] = []  # given up before they began, since the driver emptied it
        self._give_ups: list[tuple[float, int, _Sequence]] = []  # heap of (time, name, …) of those that wait
        self._paces: list[tuple[float, int, int, _Sequence]] = []  # heap by when tokens are due: see `_due_ms`
        self._unread = 0  # tokens of prompts
        self._tpot_ms = math.inf
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
        self._prompts = _Lately(limits.max_sequences)
        self._outputs = _Lately(limits.max_sequences)  # as asked; as written for those that have ended
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

    @property
    def load(self) -> TokenLoad:
        """What the sequences that are here ask for."""
        return TokenLoad(
            len(self._decoding),
            self._context,
            self._unread,
            self._tpot_ms,
            self._due_ms(),
            len(self._known),
            self._prompts.mean,
            max(1.0, self._outputs.mean),
        )

    @property
    def first_by_ms(self) -> tuple[float, int]:
        """When the first token of the prompt that is read next is due, and how many tokens it has still to read."""
        first = self._reading or self._head()
        return (math.inf, 0) if first is None else (first.first_by_ms, first.todo - first.read)

    def _head(self) -> _Sequence | None:
        """Return the first sequence that waits."""
        while self._queue and self._queue[0].state != _WAITING:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    @property
    def gives_up_ms(self) -> float:
        """When a sequence that has not begun is given up next."""
        heap = self._give_ups
        while heap and (heap[0][2].state != _WAITING or heap[0][2].epoch):
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def names(self) -> list[int]:
        """Return all sequences that are here, the oldest first."""
        return list(self._known)

    def add(
        self,
        sequence: int,
        prompt_tokens: int,
        output_tokens: int,
        now_ms: float = 0.0,
        first_by_ms: float = math.inf,
        tpot_ms: float = math.inf,
        *,
        has_begun: bool = False,
    ) -> Unkept | None:
        """Take a sequence that writes at most so many tokens; return why it cannot run, or None.

        Args:
            sequence: a number that no other sequence here has.
            prompt_tokens: of its prompt.
            output_tokens: that it writes at most.
            now_ms: the time, and below it, when its first token is due.
            first_by_ms: see above.
            tpot_ms: the mean time allowed for each further token.
            has_begun: it wrote tokens elsewhere, and the order does not turn it away.
        """
        why_not = self._too_long(prompt_tokens, output_tokens)
        if why_not is not None:
            return Unkept(Rule.LENGTH, f"{prompt_tokens} prompt and {output_tokens} output tokens{why_not}")
        order = self._order
        if order is not None and not has_begun:
            unkept = order.refusal(prompt_tokens, now_ms, first_by_ms, tpot_ms, self.load)
            if unkept is not None:
                return unkept
        if not self._known:
            self._tpot_ms = math.inf
        self._tpot_ms = min(self._tpot_ms, tpot_ms)
        taken = self._known[sequence] = _Sequence(sequence, prompt_tokens, output_tokens, first_by_ms, tpot_ms)
        self._unread += prompt_tokens
        self._prompts.add(prompt_tokens)
        self._outputs.add(output_tokens)
        if first_by_ms < math.inf:
            latest_ms = first_by_ms
            if order is not None:
                latest_ms = order.latest_ms(prompt_tokens, now_ms, first_by_ms, TokenLoad())
            heappush(self._give_ups, (latest_ms, sequence, taken))
        if not self._queued:
            self._is_blocked = False
        self._queue.append(taken)
        self._queued += 1
        return None

    def _too_long(self, prompt_tokens: int, output_tokens: int) -> str | None:
        """Return why so many tokens never run here; None if they do."""
        most, limits = prompt_tokens + output_tokens, self.limits
        if prompt_tokens < 1 or output_tokens < 1:
            return ": it takes at least one of each"
        if limits.longest_context is not None and most > limits.longest_context:
            return f" are more than the model's longest context ({limits.longest_context})"
        if self._blocks_of(most - 1) > self.blocks:
            return f" are more than the memory holds ({self.blocks * self._size})"
        return None

    def cancel(self, sequence: int) -> bool:
        """Forget a sequence and free its memory at once; False if there is none of that number."""
        one = self._known.pop(sequence, None)
        if one is None:
            return False
        if one.state in (_WAITING, _READING):
            self._unread -= one.todo - one.read
        if one.state == _WAITING:
            self._queued -= 1
            self._is_blocked = False
        elif one.state == _ENDING:
            self._ending -= 1
            self._give_back(one.blocks)
        else:
            if one.state == _DECODING:
                self._outputs.correct(one.written + self._turn - one.began - one.output)
            self._leave(one)
        one.state = _GONE
        return True

    def decide(self, now_ms: float = 0.0) -> Step | None:
        """Return what the next step holds, which begins now; None when no sequence can run. The caller runs every step
        it was given."""
        step, order = Step(), self._order
        decodes, most = True, self.limits.max_batch_tokens
        while self._give_ups and self.gives_up_ms <= now_ms:
            self._give_up(self._give_ups[0][1])
        if order is not None and self._decoding:
            if self._reading is None and not self._is_blocked:
                while (head := self._head()) is not None and not head.epoch:
                    if now_ms <= order.latest_ms(head.todo, now_ms, head.first_by_ms, self.load):
                        break
                    self._give_up(head.name)
            if self._reading is not None or (self._queued and not self._is_blocked):
                decodes, most = order.choose(now_ms, self)
        if decodes and self._decoding:
            self._decode(step)
        left = min(most, self.limits.max_batch_tokens - step.sequences)
        if self._reading is not None:
            self._read_on(step, self._reading, left)
        if self._queued and not step.preempted:
            self._admit(step, left - step.prompt_tokens, is_cut=most >= self.limits.max_batch_tokens)
        if not step.sequences and not step.chunks:
            # What the order held back alone could run: memory was short for prompts.
            if decodes:
                return None
            self._decode(step)
        if order is not None and step.chunks:
            self._pace(order.ends_ms(now_ms, step), step)
        return step

    def _give_up(self, sequence: int) -> None:
        self.cancel(sequence)
        self.expired.append(sequence)

    def _pace(self, ends_ms: float, step: Step) -> None:
        """Note from when on the tokens are due of the sequences that have read their prompts in a step."""
        for name in step.first:
            self._known[name].first_ms = ends_ms
        for name, _, _ in step.chunks:
            one = self._known[name]
            if one.state == _DECODING and one.tpot_ms < math.inf:
                if one.first_ms == math.inf:  # it wrote the first elsewhere
                    one.first_ms = ends_ms
                base_ms = one.first_ms + (one.written - one.began - 1) * one.tpot_ms
                heappush(self._paces, (base_ms, name, one.epoch, one))

    def _due_ms(self) -> float:
        """Return when the next token of a sequence that decodes is due: its base and the time of a token for each turn.
        All tokens of a replica are promised the same time, so the smallest base is first at every turn."""
        heap = self._paces
        while heap and (heap[0][3].epoch != heap[0][2] or heap[0][3].state != _DECODING):
            heappop(heap)
        return heap[0][0] + (self._turn + 1) * heap[0][3].tpot_ms if heap else math.inf

    def decoding(self, step: Step) -> list[int]:
        """Return the sequences that decode in the step that was decided last."""
        if not step.sequences:
            return []
        ended = [name for name in step.last if self._known[name].read > self._known[name].todo]
        return [name for name, one in self._decoding.items() if one.began < self._turn] + ended

    def done(self, step: Step, ended: tuple[int, ...] = ()) -> None:
        """Take note that a step has ended; `ended` are sequences that stop before their last token."""
        for name in step.last:
            one = self._known.get(name)
            if one is not None and one.state == _ENDING:
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

    def _read_on(self, step: Step, one: _Sequence, left: int) -> None:
        tokens = min(left, one.todo - one.read)
        need = self._blocks_of(one.read + tokens) - one.blocks
        if need > self.free_blocks:
            self._preempt(step)  # it was admitted last
        elif tokens > 0:
            self._read(step, one, tokens, need)

    def _admit(self, step: Step, left: int, *, is_cut: bool) -> None:
        while left > 0 and self._reading is None and (one := self._head()) is not None:
            if one.todo > left and step.chunks and not is_cut:
                break
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
        self._unread -= tokens
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
        self._unread -= one.todo - one.read
        one.todo = one.prompt + one.written
        self._unread += one.todo
        one.read = one.blocks = 0
        one.epoch += 1
        one.state = _WAITING
        self._queue.appendleft(one)
        self._queued += 1
        step.preempted.append(one.name)

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._size)
