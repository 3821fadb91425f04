"""The open sequences of a gpu-let that generates: their steps run on its worker thread, and each step's tokens go to
the dispatchers that wait for them.

What a step holds, the scheduler decides, the one of virtual time. This module carries it out: it owns the clock and the
generator. A sequence whose dispatcher is gone, or whose client has left, is forgotten before the next step, with its
memory.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from tenuto.deployments.gpulet.channel import ArrivedSequence, LeftSequences, Peer
from tenuto.deployments.wire.messages import EndedSequence, Generated
from tenuto.errors import new_incident
from tenuto.outcome import Outcome
from tenuto.profiles.networks.generating import Generator

logger = logging.getLogger("ray.serve")

_LATER_S = 0.001  # limit: until the scheduler is asked again that had nothing to run
_GONE = "the plan has changed and the model left this gpu-let; send the request again"


class StepOrder(Protocol):
    """Decides what each step holds. Times are ms on one clock."""

    def add(
        self, now_ms: float, sequence: int, prompt_tokens: int, max_tokens: int, first_by_ms: float, tpot_ms: float
    ) -> str | None:
        """Take a sequence; return why it is refused, if it cannot be kept."""

    def next_step(self, now_ms: float) -> Sequence[tuple[int, int]]:
        """Return the next step: sequences, each with the number of its tokens; empty when nothing is to run now."""

    def drain_refused(self) -> Sequence[tuple[int, str]]:
        """Return the sequences that were given up since the last call, and why; they have made no token."""

    def step_done(self, now_ms: float, execution_ms: float, ended: Sequence[int]) -> None:
        """Take the end of a step, and the sequences that ended with it."""

    def cancel(self, now_ms: float, sequence: int) -> None:
        """Forget a sequence."""


class OpenSequences:
    """Invariant: every sequence that was taken is answered once as ended, unless its client or dispatcher has left."""

    def __init__(
        self,
        gpulet_id: str,
        program: str,
        generator: Generator,
        scheduler: StepOrder,
        failed: Callable[[Exception, str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without sequences.

        Args:
            gpulet_id: the id for answers and logs.
            program: the name of the model.
            generator: runs the steps.
            scheduler: decides them.
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
        self._open: dict[int, tuple[Peer, int]] = {}  # by our number: whose they are, and their number there
        self._numbers: dict[tuple[Peer, int], int] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def _now_ms(self) -> float:
        return self._clock() * 1000.0

    def take(self, arrived: ArrivedSequence) -> None:
        """Take a sequence, or answer that it cannot be kept."""
        message, peer = arrived.message, arrived.peer
        number, self._next = self._next, self._next + 1
        sampling = message.sampling
        first_by_ms = arrived.received_at * 1000.0 + message.first_in_ms
        why = self._scheduler.add(
            self._now_ms, number, len(message.prompt), sampling.max_tokens, first_by_ms, message.tpot_ms
        )
        if why is not None:
            self._refuse(peer, message.number, Outcome.REJECTED, why, retry_after_s=1.0)
            return
        self._open[number], self._numbers[peer, message.number] = (peer, message.number), number
        self.generator.add(number, message.prompt, sampling)

    def leave(self, left: LeftSequences) -> None:
        """Forget sequences of clients that have left, and free their memory."""
        for theirs in left.numbers:
            number = self._numbers.get((left.peer, theirs))
            if number is not None:
                self._forget(number)
        self._tell(left.peer, Generated([], [], self.generator.free_blocks))

    def step(self) -> float:
        """Run one step, if there is one; return for how many s nothing else needs to be done."""
        for peer in {peer for peer, _ in self._open.values()}:
            if not peer.is_obeyed():
                for number in [number for number, whose in self._open.items() if whose[0] is peer]:
                    self._forget(number)
        chunks = self._scheduler.next_step(self._now_ms)
        for number, why in self._scheduler.drain_refused():
            self._end(number, Outcome.EXPIRED, why, retry_after_s=1.0)
        if not chunks:
            return _LATER_S
        try:
            ran = self.generator.step(chunks)
        except Exception as error:
            self._give_up(chunks, error)
            return 0.0
        self._scheduler.step_done(self._now_ms, ran.execution_ms, list(ran.ended))
        tokens: defaultdict[Peer, list[tuple[int, int]]] = defaultdict(list)
        ended: defaultdict[Peer, list[EndedSequence]] = defaultdict(list)
        for number, token in ran.tokens.items():
            peer, theirs = self._open[number]
            tokens[peer].append((theirs, token))
        for number, finish in ran.ended.items():
            peer, theirs = self._open.pop(number)
            del self._numbers[peer, theirs]
            ended[peer].append(EndedSequence(theirs, finish.value, gpulet=self._id))
        free = self.generator.free_blocks
        for peer in tokens.keys() | ended.keys():
            self._tell(peer, Generated(tokens[peer], ended[peer], free))
        return 0.0

    def end_all(self, why: str = _GONE) -> None:
        """Answer every sequence that it cannot go on here."""
        for number in list(self._open):
            self._end(number, Outcome.FAILED, why, may_retry=True)

    def _give_up(self, chunks: Sequence[tuple[int, int]], error: Exception) -> None:
        """End the sequences of a step that failed; the others go on."""
        incident = new_incident()
        is_lost = self._failed(error, incident)
        is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        what = "there was not enough memory for a step" if is_memory else "a step failed"
        why = f"{what} of '{self.program}'; the log of gpu-let {self._id} says more under {incident}"
        for number in list(self._open) if is_lost else [number for number, _ in chunks]:
            self._end(number, Outcome.FAILED, why, may_retry=is_lost)

    def _forget(self, number: int) -> tuple[Peer, int]:
        peer, theirs = self._open.pop(number)
        del self._numbers[peer, theirs]
        self.generator.cancel(number)
        self._scheduler.cancel(self._now_ms, number)
        return peer, theirs

    def _end(self, number: int, outcome: Outcome, why: str, **more: float | bool | None) -> None:
        peer, theirs = self._forget(number)
        self._refuse(peer, theirs, outcome, why, **more)

    def _refuse(self, peer: Peer, theirs: int, outcome: Outcome, why: str, **more: float | bool | None) -> None:
        ended = EndedSequence(theirs, "", int(outcome), why, gpulet=self._id)._replace(**more)  # type: ignore[arg-type]
        self._tell(peer, Generated([], [ended], self.generator.free_blocks))

    def _tell(self, peer: Peer, generated: Generated) -> None:
        peer.connection.send(generated)
