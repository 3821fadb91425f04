"""The open sequences of a gpu-let that generates: their steps run on its worker thread, and each step's tokens go to
the dispatchers that wait for them.

What a step holds, the scheduler decides, the one of virtual time. This module carries it out: it owns the clock and the
generator. A sequence whose dispatcher is gone, or whose client has left, is forgotten before the next step, with its
memory.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenuto.batching.core.step_scheduler import StepScheduler
from tenuto.deployments.gpulet.channel import ArrivedSequence, LeftSequences, Peer
from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.messages import EndedSequence, Generated, HeldBlocks
from tenuto.errors import is_lack_of_memory, new_incident
from tenuto.outcome import Outcome, Rule
from tenuto.profiles.networks.generating import Generator, StepRan, TokenScores

_LATER_S = 0.001  # pace: until the scheduler is asked again that had nothing to run
_DUE = "its first token could not be made in time; lower the rate, raise the SLO or add GPUs"
_GONE = "the plan has changed and the model left this gpu-let; send the request again"


@dataclass(slots=True)
class _Open:
    """An open sequence: whose it is, and its number there."""

    peer: Peer
    number: int


class OpenSequences:
    """Invariant: every sequence that was taken is answered once as ended, unless its client or dispatcher has left."""

    def __init__(
        self,
        gpulet_id: str,
        program: str,
        generator: Generator,
        scheduler: StepScheduler,
        failed: Callable[[BaseException, str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without sequences.

        Args:
            gpulet_id: the id for answers and logs.
            program: the name of the model.
            generator: runs the steps.
            scheduler: decides them, and which sequences can keep their SLO.
            failed: logs a step that failed, under an incident; returns whether nothing can run here any more.
            clock: monotonic seconds.
        """
        self._id = gpulet_id
        self.program = program
        self.generator = generator
        self._scheduler = scheduler
        self._failed = failed
        self._clock = clock
        self._next = 0
        self._preempted = 0
        self._open: dict[int, _Open] = {}  # by our number
        self._numbers: dict[tuple[Peer, int], int] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def _now_ms(self) -> float:
        return self._clock() * 1000.0

    @property
    def _held(self) -> HeldBlocks:
        blocks = self.generator.blocks
        free = self.generator.free_blocks if self._open else blocks
        return HeldBlocks(free, blocks, self._scheduler.waiting, self._preempted)

    def add(self, arrived: ArrivedSequence) -> None:
        """Take a sequence, or answer that it cannot be kept."""
        message, peer = arrived.message, arrived.peer
        prompt, sampling, made = message.prompt, message.sampling, message.made
        first_by_ms = arrived.received_at * 1000.0 + message.first_in_ms
        now_ms = self._now_ms
        number, self._next = self._next, self._next + 1
        if first_by_ms <= now_ms:
            self._refuse(peer, message.number, self._due(Rule.TOO_LATE))
            return
        lengths = len(prompt) + len(made), sampling.max_tokens - len(made)
        bounds = now_ms, first_by_ms, message.tpot_ms
        unkept = self._scheduler.add(
            number, *lengths, *bounds, has_begun=bool(made), offline=message.offline, client=message.client
        )
        if unkept is not None:
            wait_s = None if unkept.wait_ms is None else unkept.wait_ms / 1000.0
            rejected = Refused(Outcome.REJECTED, unkept.why, wait_s, self._id, unkept.rule)
            self._refuse(peer, message.number, rejected)
            return
        self._open[number] = _Open(peer, message.number)
        self._numbers[peer, message.number] = number
        try:
            self.generator.add(number, prompt, sampling, made)
        except ValueError as error:  # another gpu-let of the model would have kept it
            self._end(number, self._unkept(str(error)))

    def forget_left(self, left: LeftSequences) -> None:
        """Forget sequences of clients that have left, and free their memory."""
        numbers = [number for theirs in left.numbers if (number := self._numbers.get((left.peer, theirs))) is not None]
        for number in numbers:
            self._forget(number)
        if numbers:
            self._tell(left.peer, Generated([], [], self._held))

    def step(self) -> float:
        """Run one step, if there is one; return for how many s nothing else needs to be done."""
        for peer in {each.peer for each in self._open.values()}:
            if not peer.is_obeyed():
                for number in [number for number, each in self._open.items() if each.peer is peer]:
                    self._forget(number)
        step = self._scheduler.decide(self._now_ms)
        expired, self._scheduler.expired = self._scheduler.expired, []
        for number in expired:
            self._end(number, self._due(Rule.CUT))
        if step is None:
            return _LATER_S
        self._preempted += len(step.preempted)
        for number in (*step.preempted, *step.gave_way):
            self.generator.preempt(number)
        chunks = [(number, tokens) for number, tokens, _ in step.chunks]
        chunks += [(number, 1) for number in self._scheduler.decoding(step)]
        try:
            ran = self.generator.step(chunks)
        except BaseException as error:  # see `WorkerThread._run`
            self._scheduler.done(step)
            self._give_up(chunks, error)
            return 0.0
        self._scheduler.done(step, tuple(ran.ended))
        self._send(ran)
        for number, why in ran.failed.items():
            self._end(number, self._unkept(why))
        return 0.0

    def _unkept(self, why: str) -> Refused:
        return Refused(Outcome.FAILED, f"this answer cannot go on: {why}", None, self._id, Rule.RAISED)

    def _send(self, ran: StepRan) -> None:
        """Send each dispatcher the tokens and the ends of its sequences, in one message."""
        tokens: defaultdict[Peer, list[tuple[int, int]]] = defaultdict(list)
        ended: defaultdict[Peer, list[EndedSequence]] = defaultdict(list)
        scores: defaultdict[Peer, list[tuple[int, list[TokenScores]]]] = defaultdict(list)
        for number, token in ran.tokens.items():
            each = self._open[number]
            tokens[each.peer].append((each.number, token))
        for number, token_scores in ran.scores.items():
            each = self._open[number]
            scores[each.peer].append((each.number, token_scores))
        for number, finish in ran.ended.items():
            each = self._open.pop(number)
            del self._numbers[each.peer, each.number]
            ended[each.peer].append(EndedSequence(each.number, finish.value, gpulet=self._id))
        held, execution_ms = self._held, ran.execution_ms
        for peer in tokens.keys() | ended.keys():
            self._tell(peer, Generated(tokens[peer], ended[peer], held, execution_ms, scores[peer]))
            execution_ms = 0.0  # it is counted once

    def end_all(self) -> None:
        """Answer every sequence that it cannot go on here. The generator may be closed already."""
        refused = Refused(Outcome.FAILED, _GONE, 1.0, self._id, Rule.LOST)
        for each in [self._forget(number) for number in list(self._open)]:
            self._refuse(each.peer, each.number, refused, may_retry=True)

    def _give_up(self, chunks: Sequence[tuple[int, int]], error: BaseException) -> None:
        """End the sequences of a step that failed; the others go on."""
        incident = new_incident()
        is_lost = self._failed(error, incident)
        what = "there was not enough memory for a step" if is_lack_of_memory(error) else "a step failed"
        why = f"{what} of '{self.program}'; the log of gpu-let {self._id} says more under {incident}"
        # Which sequence of several is at fault, nobody knows.
        rule = Rule.LOST if is_lost else Rule.RAISED if len(chunks) == 1 else Rule.NONE
        failed = Refused(Outcome.FAILED, why, None if rule is Rule.RAISED else 1.0, self._id, rule)
        for number in list(self._open) if is_lost else [number for number, _ in chunks]:
            self._end(number, failed, may_retry=is_lost)

    def _forget(self, number: int) -> _Open:
        each = self._open.pop(number)
        del self._numbers[each.peer, each.number]
        self.generator.cancel(number)
        self._scheduler.cancel(number)
        return each

    def _due(self, rule: Rule) -> Refused:
        return Refused(Outcome.EXPIRED, _DUE, 1.0, self._id, rule)

    def _end(self, number: int, refused: Refused, *, may_retry: bool = False) -> None:
        each = self._forget(number)
        self._refuse(each.peer, each.number, refused, may_retry=may_retry)

    def _refuse(self, peer: Peer, theirs: int, refused: Refused, *, may_retry: bool = False) -> None:
        ended = EndedSequence.failed(theirs, refused, may_retry=may_retry)
        self._tell(peer, Generated([], [ended], self._held))

    def _tell(self, peer: Peer, generated: Generated) -> None:
        peer.connection.send(generated)
