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

Offline sequences are in a scheduler of their own inside, with the same memory. They take part in a step after all
others and as far as the order leaves time, and lose memory and places as soon as another sequence needs them: they go
on later as preempted ones do. No other sequence is counted, refused or given up for them.

A step costs O(1), and O(log n) for each sequence that begins or ends in it: see `decoding.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from tenuto.batching.core.decoding import DECODING, ENDING, GONE, READING, WAITING, Decoding, KvBlocks, TokenSequence
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


@dataclass(slots=True, eq=False)
class Step:
    """What one step holds.

    `chunks` are (sequence, tokens, tokens of it read before) of prompts. `first` and `last` are the sequences that make
    their first and their last token in it. `preempted` lost their memory before it, and offline ones that `gave_way`
    likewise. `sequences` decode one token each, with `context_tokens` of context together; `offline` of them are
    offline. `others` has the amounts without offline sequences, where there are some.
    """

    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    gave_way: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    attention_pairs: int = 0
    sequences: int = 0
    context_tokens: int = 0
    offline: int = 0
    others: Step | None = None


@dataclass(slots=True)
class TokenLoad:
    """The sequences that are there.

    `decoding` of all `sequences` make tokens, and have `context_tokens`; `unread_tokens` of prompts have not run. The
    least time for a token that any is promised, and when the next token of one that decodes is due, are in ms. The
    means are those of the last, about as many as run at once, and `ttft_ms` and `tpot_ms` the least times that these
    allow.
    """

    decoding: int = 0
    context_tokens: int = 0
    unread_tokens: int = 0
    least_tpot_ms: float = math.inf
    due_ms: float = math.inf
    sequences: int = 0
    mean_prompt: float = 0.0
    mean_output: float = 1.0
    ttft_ms: float = math.inf
    tpot_ms: float = math.inf


class Unkept(NamedTuple):
    """A sequence that is not taken: by which rule, why, and in how long it might be; None: never here."""

    rule: Rule
    why: str
    wait_ms: float | None = None


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

    def longest_ms(self, now_ms: float, load: TokenLoad) -> float:
        """Return how long a step with offline sequences may take beside this load."""


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


class _LeastLately:
    """The least of the last figures, about `most`: it rises slowly."""

    def __init__(self, most: int) -> None:
        self.least, self._most = math.inf, most

    def add(self, figure: float) -> None:
        rises = figure > self.least and figure < math.inf
        self.least = self.least + (figure - self.least) / self._most if rises else min(figure, self.least)


class StepScheduler:
    """The sequences of one replica. Invariant: blocks in use never exceed the limit."""

    def __init__(self, limits: StepLimits, order: StepOrder | None = None, beside: StepScheduler | None = None) -> None:
        """Begin without sequences; `beside`: the scheduler of those whose memory and places these offline ones use."""
        self.limits = limits
        self._beside = beside
        self._offline: StepScheduler | None = None  # None until there is an offline sequence
        self._left = Step()  # has the offline ones that lost their memory since the last step
        self._ttfts, self._allowed_tpots = _LeastLately(limits.max_sequences), _LeastLately(limits.max_sequences)
        self._order = order
        self.expired: list[int] = []  # given up before they began, since the driver emptied it
        self._give_ups: list[tuple[float, int, TokenSequence]] = []  # heap of (time, name, …) of those that wait
        self._unread = 0  # tokens of prompts
        self._tpots: list[tuple[float, int, TokenSequence]] = []  # heap of (time for a token, name, …)
        self._blocks: KvBlocks = KvBlocks(limits.kv_tokens, limits.block_tokens) if beside is None else beside._blocks
        self._decoding = Decoding(self._blocks)
        self._known: dict[int, TokenSequence] = {}
        self._queue: deque[TokenSequence] = deque()
        self._queued = 0
        self._round, self._rounds = 0, dict[str, int]()  # of what began last, and of each client's newest
        self._running: dict[int, TokenSequence] = {}  # that read or decode, in order of admission
        self._reading: TokenSequence | None = None
        self._ending = 0
        self._prompts = _Lately(limits.max_sequences)
        self._outputs = _Lately(limits.max_sequences)  # as asked; as written for those that have ended
        self._is_blocked = False  # no memory or place for the first that waits, until one ends

    @property
    def blocks(self) -> int:
        """Blocks of memory for keys and values."""
        return self._blocks.total

    @property
    def free_blocks(self) -> int:
        """Blocks of memory that no sequence holds."""
        return self._blocks.free

    @property
    def kv_tokens(self) -> int:
        """Tokens of memory in use, in whole blocks."""
        return (self._blocks.total - self._blocks.free) * self._blocks.size

    @property
    def waiting(self) -> int:
        """Sequences that wait to be admitted."""
        return self._queued

    @property
    def waiting_offline(self) -> int:
        """Offline sequences that wait."""
        return 0 if self._offline is None else self._offline.waiting

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
            len(self._decoding.sequences),
            self._decoding.context_tokens,
            self._unread,
            self._least_tpot_ms(),
            self._decoding.due_ms(),
            len(self._known),
            self._prompts.mean,
            max(1.0, self._outputs.mean),
            self._ttfts.least,
            self._allowed_tpots.least,
        )

    def _least_tpot_ms(self) -> float:
        heap = self._tpots
        while heap and self._known.get(heap[0][1]) is not heap[0][2]:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    @property
    def first_by_ms(self) -> tuple[float, int]:
        """When the first token of the prompt that is read next is due, and how many tokens it has still to read."""
        first = self._reading or self._head()
        return (math.inf, 0) if first is None else (first.first_by_ms, first.todo - first.read)

    def _head(self) -> TokenSequence | None:
        """Return the first sequence that waits."""
        while self._queue and self._queue[0].state != WAITING:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    @property
    def gives_up_ms(self) -> float:
        """When a sequence that has not begun is given up next."""
        heap = self._give_ups
        while heap and (heap[0][2].state != WAITING or heap[0][2].epoch):
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def names(self) -> list[int]:
        """Return all sequences that are here, the oldest first, and then the offline ones."""
        return [*self._known, *(() if self._offline is None else self._offline._known)]

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
        offline: bool = False,
        client: str = "",
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
            offline: it takes only what no other sequence needs, and the order does not turn it away.
            client: who asks; clients of offline sequences take turns.
        """
        why_not = self._too_long(prompt_tokens, output_tokens)
        if why_not is not None:
            return Unkept(Rule.LENGTH, f"{prompt_tokens} prompt and {output_tokens} output tokens{why_not}")
        if offline:
            self._offline = self._offline or StepScheduler(self.limits, beside=self)
            return self._offline.add(
                sequence, prompt_tokens, output_tokens, now_ms, first_by_ms, tpot_ms, client=client
            )
        order = self._order
        self._ttfts.add(first_by_ms - now_ms)
        self._allowed_tpots.add(tpot_ms)
        if order is not None and not has_begun:
            unkept = order.refusal(prompt_tokens, now_ms, first_by_ms, tpot_ms, self.load)
            if unkept is not None:
                return unkept
        taken = self._known[sequence] = TokenSequence(
            sequence, prompt_tokens, output_tokens, first_by_ms, tpot_ms, todo=prompt_tokens
        )
        self._unread += prompt_tokens
        self._prompts.add(prompt_tokens)
        self._outputs.add(output_tokens)
        if tpot_ms < math.inf:
            heappush(self._tpots, (tpot_ms, sequence, taken))
        if first_by_ms < math.inf:
            latest_ms = first_by_ms
            if order is not None:
                latest_ms = order.latest_ms(prompt_tokens, now_ms, first_by_ms, TokenLoad())
            heappush(self._give_ups, (latest_ms, sequence, taken))
        if not self._queued:
            self._is_blocked = False
        if self._beside is None:
            self._queue.append(taken)
        else:
            self._queue_in_turn(taken, client)
        self._queued += 1
        return None

    def _queue_in_turn(self, taken: TokenSequence, client: str) -> None:
        """Queue a sequence so that each client begins one in every round."""
        if self._head() is None:
            self._rounds.clear()
        taken.round = self._rounds[client] = max(self._round, self._rounds.get(client, -1) + 1)
        place = len(self._queue)
        while place and self._queue[place - 1].round > taken.round:
            place -= 1
        self._queue.insert(place, taken)

    def _too_long(self, prompt_tokens: int, output_tokens: int) -> str | None:
        """Return why so many tokens never run here; None if they do."""
        most, limits = prompt_tokens + output_tokens, self.limits
        if prompt_tokens < 1 or output_tokens < 1:
            return ": it takes at least one of each"
        if limits.longest_context is not None and most > limits.longest_context:
            return f" are more than the model's longest context ({limits.longest_context})"
        if self._blocks.needed(most - 1) > self._blocks.total:
            return f" are more than the memory holds ({self._blocks.total * self._blocks.size})"
        return None

    def cancel(self, sequence: int) -> bool:
        """Forget a sequence and free its memory at once; False if there is none of that number."""
        one = self._known.pop(sequence, None)
        if one is None:
            return self._offline is not None and self._offline.cancel(sequence)
        if one.state in (WAITING, READING):
            self._unread -= one.todo - one.read
        if one.state == WAITING:
            self._queued -= 1
            self._is_blocked = False
        elif one.state == ENDING:
            self._ending -= 1
            self._give_back(one.blocks)
        else:
            if one.state == DECODING:
                self._outputs.correct(self._decoding.written(one) - one.output)
            self._stop(one)
        one.state = GONE
        return True

    def decide(self, now_ms: float = 0.0) -> Step | None:
        """Return what the next step holds, which begins now; None when no sequence can run. The caller runs every step
        it was given."""
        step, order = Step(), self._order
        decodes, most = True, self.limits.max_batch_tokens
        while self._give_ups and self.gives_up_ms <= now_ms:
            self._give_up(self._give_ups[0][1])
        if order is not None and self._decoding.sequences:
            if self._reading is None and not self._is_blocked:
                while (head := self._head()) is not None and not head.epoch:
                    if now_ms <= order.latest_ms(head.todo, now_ms, head.first_by_ms, self.load):
                        break
                    self._give_up(head.name)
            if self._reading is not None or (self._queued and not self._is_blocked):
                decodes, most = order.choose(now_ms, self)
        if decodes and self._decoding.sequences:
            self._decode(step)
        left = min(most, self.limits.max_batch_tokens - step.sequences)
        if self._reading is not None:
            self._read_on(step, self._reading, left)
        if self._queued and not step.preempted:
            self._admit(step, left - step.prompt_tokens, is_cut=most >= self.limits.max_batch_tokens)
        if not step.sequences and not step.chunks and not decodes:
            # What the order held back alone could run: memory was short for prompts.
            self._decode(step)
        if order is not None and step.chunks:
            self._pace(order.ends_ms(now_ms, step), step)
        if self._offline is not None and self._offline._known:
            self._take_offline(self._offline, step, now_ms)
        if decodes and not step.sequences and not step.chunks:
            return None
        step.gave_way, self._left.preempted = self._left.preempted, []
        return step

    def _take_offline(self, offline: StepScheduler, step: Step, now_ms: float) -> None:
        """Let offline sequences decode in a step, and read prompts in one that reads no others, as far as the order
        leaves time. When those that decode are too many for that, the last one leaves."""
        while offline._give_ups and offline.gives_up_ms <= now_ms:
            offline._give_up(offline._give_ups[0][1])
        self.expired += offline.expired
        offline.expired.clear()
        longest_ms = math.inf if self._order is None else self._order.longest_ms(now_ms, self.load)
        step.others = Step(prompt_tokens=step.prompt_tokens, attention_pairs=step.attention_pairs)
        step.others.sequences, step.others.context_tokens = step.sequences, step.context_tokens
        reads = not step.chunks and not self._queued
        if offline._decoding.sequences:
            beside = offline._decoding
            context = step.context_tokens + beside.context_tokens + len(beside.sequences)
            room = self.limits.max_batch_tokens - step.prompt_tokens - step.sequences
            if len(beside.sequences) <= room and self._is_within(
                longest_ms, now_ms, step, 0, len(beside.sequences), context
            ):
                offline._decode(step)
            elif reads and len(beside.sequences) > 1:
                offline._preempt(self._left)
        most = min(self.limits.max_batch_tokens - step.sequences, offline._unread) if reads else 0
        if self._left.preempted:
            return
        while most > 0 and not self._is_within(longest_ms, now_ms, step, most, 0, step.context_tokens):
            most //= 2
        if most and offline._reading is not None:
            offline._read_on(step, offline._reading, most)
        if most and offline._queued and not self._left.preempted:
            offline._admit(step, most - step.prompt_tokens, is_cut=True)

    def _is_within(
        self, longest_ms: float, now_ms: float, step: Step, tokens: int, sequences: int, context_tokens: int
    ) -> bool:
        """Return whether a step with so much more takes no longer."""
        if self._order is None:
            return True
        more = Step(prompt_tokens=step.prompt_tokens + tokens, attention_pairs=step.attention_pairs)
        more.sequences, more.context_tokens = step.sequences + sequences, context_tokens
        return self._order.ends_ms(now_ms, more) - now_ms <= longest_ms

    def _give_up(self, sequence: int) -> None:
        self.cancel(sequence)
        self.expired.append(sequence)

    def _pace(self, ends_ms: float, step: Step) -> None:
        """Note from when on the tokens are due of the sequences that have read their prompts in a step."""
        for name in step.first:
            self._known[name].first_ms = ends_ms
        for name, _, _ in step.chunks:
            one = self._known[name]
            if one.state == DECODING and one.tpot_ms < math.inf:
                self._decoding.pace(one, ends_ms)

    def decoding(self, step: Step) -> list[int]:
        """Return the sequences that decode in the step that was decided last."""
        names = [] if self._offline is None or not step.offline else self._offline._decoded(step)
        return names + self._decoded(step) if step.sequences > step.offline else names

    def _decoded(self, step: Step) -> list[int]:
        known = [(name, self._known[name]) for name in step.last if name in self._known]
        ended = [name for name, one in known if one.read > one.todo]
        turn = self._decoding.turn
        return [name for name, one in self._decoding.sequences.items() if one.began < turn] + ended

    def done(self, step: Step, ended: tuple[int, ...] = ()) -> None:
        """Take note that a step has ended; `ended` are sequences that stop before their last token."""
        for name in step.last:
            one = self._known.get(name)
            if one is not None and one.state == ENDING:
                self.cancel(name)
        if self._offline is not None:
            self._offline.done(step)
        for name in ended:
            self.cancel(name)

    def quiet_steps(self) -> int:
        """Return how many steps would now follow in which the same sequences decode and nothing else happens."""
        if self._reading is not None or (self._queued and not self._is_blocked):
            return 0
        if self._offline is not None and self._offline._known:
            return 0
        return self._decoding.quiet_turns()

    def repeat(self, steps: int) -> None:
        """Decide so many of `quiet_steps` at once."""
        self._decoding.repeat(steps)

    # --- parts of a step ----------------------------------------------------------------------------------------------

    def _decode(self, step: Step) -> None:
        decoding = self._decoding
        while not self._make_room(decoding.next_blocks):
            self._preempt(step if self._beside is None else self._beside._left)
        if not decoding.sequences:
            return
        decoding.advance()
        step.sequences += len(decoding.sequences)
        step.context_tokens += decoding.context_tokens
        step.offline += 0 if self._beside is None else len(decoding.sequences)
        while (one := decoding.pop_ended()) is not None:
            del self._running[one.name]
            self._end(step, one)

    def _read_on(self, step: Step, one: TokenSequence, left: int) -> None:
        tokens = min(left, one.todo - one.read)
        need = self._blocks.needed(one.read + tokens) - one.blocks
        if not self._make_room(need):
            self._preempt(step if self._beside is None else self._beside._left)  # it was admitted last
        elif tokens > 0:
            self._read(step, one, tokens, need)

    def _admit(self, step: Step, left: int, *, is_cut: bool) -> None:
        while left > 0 and self._reading is None and (one := self._head()) is not None:
            if one.todo > left and step.chunks and not is_cut:
                break
            if not self._make_place() or not self._make_room(self._blocks.needed(one.todo)):
                self._is_blocked = True
                return
            self._queue.popleft()
            self._queued -= 1
            self._round = max(self._round, one.round)
            self._running[one.name] = one
            one.state = READING
            tokens = min(left, one.todo)
            self._read(step, one, tokens, self._blocks.needed(tokens))
            left -= tokens
        self._is_blocked = False

    def _make_place(self) -> bool:
        """Make a place for one more sequence, for which an offline one leaves; return whether there is one."""
        offline, most = self._offline, self.limits.max_sequences
        if self._beside is not None:
            return self.running + self._beside.running < most
        if offline is not None and offline._running and self.running + offline.running >= most:
            offline._preempt(self._left)
        return self.running + (0 if offline is None else offline.running) < most

    def _make_room(self, blocks: int) -> bool:
        """Make room for so many blocks: offline sequences leave, the last one first. Return whether they are free."""
        offline = self._offline
        while blocks > self._blocks.free and offline is not None and offline._running:
            offline._preempt(self._left)
        return blocks <= self._blocks.free

    def _read(self, step: Step, one: TokenSequence, tokens: int, need: int) -> None:
        """Let a sequence read so many tokens in the step, for which it takes `need` blocks."""
        step.chunks.append((one.name, tokens, one.read))
        step.prompt_tokens += tokens
        step.attention_pairs += pairs_of(tokens, one.read)
        one.read += tokens
        self._unread -= tokens
        one.blocks += need
        self._blocks.free -= need
        self._reading = None if one.read == one.todo else one
        if one.read < one.todo:
            return
        if not one.written:
            step.first.append(one.name)
        one.written += 1
        if one.written < one.output:
            self._decoding.add(one)
            return
        del self._running[one.name]
        one.blocks = self._blocks.needed(one.read)
        self._end(step, one)

    def _end(self, step: Step, one: TokenSequence) -> None:
        one.state = ENDING
        self._ending += 1
        step.last.append(one.name)

    def _stop(self, one: TokenSequence) -> None:
        """Take a sequence out of those that run, and free its memory."""
        del self._running[one.name]
        if one.state == DECODING:
            self._decoding.remove(one)
        elif self._reading is one:
            self._reading = None
        self._give_back(one.blocks)

    def _give_back(self, blocks: int) -> None:
        self._blocks.free += blocks
        self._is_blocked = False

    def _preempt(self, step: Step) -> None:
        one = self._running[next(reversed(self._running))]
        if one.state == DECODING:
            one.written = self._decoding.written(one)
        self._stop(one)
        self._unread -= one.todo - one.read
        one.todo = one.prompt + one.written
        self._unread += one.todo
        one.read = one.blocks = 0
        one.epoch += 1
        one.state = WAITING
        self._queue.appendleft(one)
        self._queued += 1
        step.preempted.append(one.name)
