"""The generations that a dispatcher has open: each is sent to one gpu-let at once, which decides its steps and refuses
what it cannot keep; its tokens are passed on as they come.

A generation goes to the emptiest gpu-let for its planned rate (load balancing), as in virtual time. When that gpu-let
closes, dies or has no place for it any more, another one goes on behind the tokens that it has. There is one rule
against a generation that kills what runs it: two losses without a token in between end it.
"""

from __future__ import annotations

import itertools
from functools import partial

from tenuto.batching.core.step_scheduler import emptiest
from tenuto.deployments.dispatch.core_time import CoreTime
from tenuto.deployments.dispatch.counters import Counters
from tenuto.deployments.dispatch.fleet import AttachedGpulet, Fleet
from tenuto.deployments.dispatch.in_flight import OpenGeneration
from tenuto.deployments.dispatch.leadership import Leadership
from tenuto.deployments.dispatch.open_requests import FULL_S
from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.messages import EndedSequence, Generated, StopGenerating
from tenuto.outcome import Outcome, Rule

_DIED = "the gpu-let that generated this died"
_NONE = "no gpu-let of '{}' is ready. Retry in a few seconds."


class Generations:
    """Invariant: a generation is open, and among those of one gpu-let, from its admission until it has ended."""

    def __init__(self, fleet: Fleet, accounts: Counters, leadership: Leadership, time: CoreTime) -> None:
        """Begin without any.

        Args:
            fleet: the gpu-lets.
            accounts: count them.
            leadership: says when gpu-lets may be sent something.
            time: monotonic.
        """
        self._fleet = fleet
        self._accounts = accounts
        self._leadership = leadership
        self._time = time
        self._numbers = itertools.count()
        self._open: dict[int, OpenGeneration] = {}
        self._at: dict[int, AttachedGpulet] = {}

    def begin(self, generation: OpenGeneration, most_offline: int) -> None:
        """Send a generation to a gpu-let. When there is none, or `most_offline` of the model are open and it is one
        more, its asker is told so before this returns."""
        self._accounts.generation_submitted(generation)
        if generation.offline and self.count_offline(generation.name) >= most_offline:
            reason = f"{most_offline} offline requests of '{generation.name}' are open; retry in {FULL_S:g} s"
            self._fail(generation, Refused(Outcome.REJECTED, reason, FULL_S, rule=Rule.FULL))
        else:
            self._send(generation)

    def count_offline(self, model: str) -> int:
        """Return how many offline generations of a model are open."""
        return sum(gpulet.offline.get(model, 0) for gpulet in self._fleet)

    def _send(self, generation: OpenGeneration, last: AttachedGpulet | None = None, why: str = "") -> None:
        """Send a generation to a gpu-let, to another than the `last` one if there is one. `why` it is not there any
        more."""
        name = generation.name
        if not generation.made and generation.first_by_ms <= self._time.clock_ms:
            reason = "the deadline of its first token has passed. Raise the SLO or add GPUs"
            self._fail(generation, Refused(Outcome.EXPIRED, reason, 1.0, rule=Rule.TOO_LATE))
            return
        able = self._fleet.ready_for(name)
        able = [each for each in able if each is not last] or able
        if not able:
            none = _NONE.format(name)
            rule = Rule.LOST if why else Rule.NONE
            self._fail(generation, Refused(Outcome.FAILED, f"{why}, and {none}" if why else none, 2.0, rule=rule))
            return
        if generation.offline:
            gpulet = min(able, key=lambda each: each.offline[name])
            gpulet.offline[name] += 1
        else:
            gpulet = able[
                emptiest((len(each.generating) - each.offline.total(), each.planned_rps(name)) for each in able)
            ]
        # A new number at each gpu-let: what comes late from the last one is nobody's.
        number = generation.number = next(self._numbers)
        generation.gpulet = gpulet.id
        self._open[number], self._at[number] = generation, gpulet
        gpulet.generating.add(number)
        self._leadership.once_obeyed(partial(self._send_now, number))

    def _send_now(self, number: int) -> None:
        if (generation := self._open.get(number)) is not None:
            self._at[number].connection.send(generation.message(self._time.clock_ms))

    def leave(self, generation: OpenGeneration, *, is_answered: bool = False) -> None:
        """Forget a generation whose client went away, or that has brought all that was wanted; its gpu-let frees its
        memory before the next step."""
        if generation.number not in self._open:
            return
        if is_answered:
            self._accounts.generated(generation, self._time.clock_ms)
        else:
            self._accounts.of(generation).cancelled += 1
        self._stop(generation)

    def _stop(self, generation: OpenGeneration) -> None:
        self._forget(generation.number).connection.send(StopGenerating([generation.number]))

    def _forget(self, number: int) -> AttachedGpulet:
        """Return the gpu-let of a generation that is open no more."""
        generation, gpulet = self._open.pop(number), self._at.pop(number)
        gpulet.generating.discard(number)
        gpulet.offline[generation.name] -= generation.offline
        return gpulet

    def came(self, gpulet: AttachedGpulet, generated: Generated) -> None:
        """Pass on what a step of a gpu-let brought."""
        now_ms = self._time.clock_ms
        gpulet.held = generated.held
        if generated.execution_ms:
            gpulet.busy_ms += generated.execution_ms
            gpulet.batches += 1
            if gpulet.offline.total() > 0:
                self._accounts.offline_ran(gpulet.offline, len(gpulet.generating), generated.execution_ms)
        for number, scores in generated.scores:
            if (generation := self._open.get(number)) is not None:
                generation.asker.scored(scores)
        for number, token in generated.tokens:
            if (generation := self._open.get(number)) is not None:
                self._accounts.token_came(generation, now_ms)
                generation.add_token(token, now_ms)
        for ended in generated.ended:
            if (generation := self._open.get(ended.number)) is not None:
                self._forget(ended.number)
                self._end(generation, gpulet, ended, now_ms)

    def _end(self, generation: OpenGeneration, gpulet: AttachedGpulet, ended: EndedSequence, now_ms: float) -> None:
        if ended.may_retry and not generation.was_retried:
            generation.was_retried = True
            self._send(generation, gpulet, ended.reason)
            return
        if ended.finish:
            if not generation.tokens:
                generation.note_time(now_ms)
            self._accounts.generated(generation, now_ms)
        else:
            self._accounts.generation_refused(generation, ended.refused(), now_ms)
        generation.tell_end(ended)

    def leaves(self, gpulet: AttachedGpulet) -> None:
        """Let the generations of a gpu-let that closes go on elsewhere; without another gpu-let they go on there, for
        as long as it lives."""
        for number in list(gpulet.generating):
            # An asker that is refused may take its other generations away.
            generation = self._open.get(number)
            if generation is not None and self._fleet.ready_for(generation.name):
                self._stop(generation)
                self._send(generation)

    def lost(self, gpulet: AttachedGpulet, reason: str) -> None:
        """Let the generations of a gpu-let that is gone go on elsewhere."""
        for number in list(gpulet.generating):
            if (generation := self._open.get(number)) is None:
                continue  # its asker left as another of its generations was refused
            self._forget(number)
            died = Refused(Outcome.FAILED, f"{_DIED} ({reason})", 1.0, gpulet.id, Rule.LOST)
            self._end(generation, gpulet, EndedSequence.failed(number, died, may_retry=True), self._time.clock_ms)

    def _fail(self, generation: OpenGeneration, refused: Refused) -> None:
        self._accounts.generation_refused(generation, refused, self._time.clock_ms)
        generation.asker.refused(generation, refused)

    @property
    def is_open(self) -> bool:
        """Whether a generation is open."""
        return bool(self._open)

    def close(self) -> None:
        """Refuse everything that is open."""
        refused = Refused(Outcome.FAILED, "the server is shutting down; send the request again", 1.0)
        for number, generation in list(self._open.items()):
            if number in self._open:
                self._stop(generation)
                self._fail(generation, refused)
