"""The generations that a dispatcher has open: each is sent to one gpu-let at once, which decides its steps and refuses
what it cannot keep; its tokens are passed on as they come.

A generation goes to the gpu-let with the most memory that no other one has claimed. One that has made no token yet goes
to another gpu-let, once, when its own is gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial

from tenuto.deployments.dispatch.accounts import Accounts
from tenuto.deployments.dispatch.charge import Charge
from tenuto.deployments.dispatch.fleet import AttachedGpulet
from tenuto.deployments.dispatch.in_flight import OpenGeneration, TokenAsker
from tenuto.deployments.wire.answers import Refused, Rule
from tenuto.deployments.wire.messages import EndedSequence, Generated, StopGenerating
from tenuto.outcome import Outcome
from tenuto.profiles.networks.generating import Sampling

_DIED = "the gpu-let that generated this died; send the request again"
_NONE = "no gpu-let of '{}' is ready. Retry in a few seconds."


class Generations:
    """Invariant: a generation is open, and among those of one gpu-let, from its admission until it has ended."""

    def __init__(self, accounts: Accounts, charge: Charge, clock_ms: Callable[[], float]) -> None:
        """Begin without any.

        Args:
            accounts: count them.
            charge: says when gpu-lets may be sent something.
            clock_ms: monotonic ms.
        """
        self._accounts = accounts
        self._charge = charge
        self._clock_ms = clock_ms
        self._numbers = itertools.count()
        self._open: dict[int, OpenGeneration] = {}
        self._at: dict[int, AttachedGpulet] = {}
        self._gpulets: Callable[[], Iterable[AttachedGpulet]] = lambda: ()

    def follow(self, gpulets: Callable[[], Iterable[AttachedGpulet]], models: Iterable[str]) -> None:
        """Take the gpu-lets and the models of a new plan; generations of other models fail."""
        self._gpulets = gpulets
        known = set(models)
        for generation in list(self._open.values()):
            if generation.name not in known:
                self._stop(generation)
                self._fail(generation, Refused(Outcome.FAILED, f"'{generation.name}' was removed from the plan"))

    def begin(
        self,
        model: str,
        asker: TokenAsker,
        prompt: list[int],
        sampling: Sampling,
        *,
        arrived_ms: float,
        ttft_ms: float,
        tpot_ms: float,
        client_id: str = "",
    ) -> OpenGeneration:
        """Send a generation to a gpu-let. When there is none, `asker` is told so before this returns."""
        generation = OpenGeneration(
            next(self._numbers), model, arrived_ms, arrived_ms + ttft_ms, tpot_ms, client_id, prompt, sampling, asker
        )
        self._accounts.counters[model].submitted += 1
        self._send(generation)
        return generation

    def _send(self, generation: OpenGeneration) -> None:
        now_ms = self._clock_ms()
        if generation.first_by_ms <= now_ms:
            reason = "the deadline of its first token has passed. Raise the SLO or add GPUs"
            self._fail(generation, Refused(Outcome.EXPIRED, reason, 1.0, rule=Rule.TOO_LATE))
            return
        name = generation.name
        able = [each for each in self._gpulets() if each.is_ready and any(name in p.models for p in each.programs)]
        if not able:
            self._fail(generation, Refused(Outcome.FAILED, _NONE.format(name), 2.0))
            return
        gpulet = min(able, key=lambda each: self._claimed(each) / _room(each, name))
        generation.gpulet = gpulet.id
        self._open[generation.number], self._at[generation.number] = generation, gpulet
        gpulet.generating.add(generation.number)
        self._charge.once_obeyed(partial(self._send_now, generation))

    def _claimed(self, gpulet: AttachedGpulet) -> int:
        """Return the tokens that those at a gpu-let may come to have."""
        return sum(self._open[number].most_tokens for number in gpulet.generating)

    def _send_now(self, generation: OpenGeneration) -> None:
        gpulet = self._at.get(generation.number)
        if gpulet is not None:
            gpulet.connection.send(generation.message(self._clock_ms()))

    def leave(self, generation: OpenGeneration, *, is_answered: bool = False) -> None:
        """Forget a generation whose client went away, or that has brought all that was wanted; its gpu-let frees its
        memory before the next step."""
        if generation.number not in self._open:
            return
        if is_answered:
            self._accounts.generated(generation, self._clock_ms())
        else:
            self._accounts.counters[generation.name].cancelled += 1
        self._stop(generation)

    def _stop(self, generation: OpenGeneration) -> None:
        self._forget(generation.number).connection.send(StopGenerating([generation.number]))

    def _forget(self, number: int) -> AttachedGpulet:
        """Return the gpu-let of a generation that is open no more."""
        del self._open[number]
        gpulet = self._at.pop(number)
        gpulet.generating.discard(number)
        return gpulet

    def came(self, gpulet: AttachedGpulet, generated: Generated) -> None:
        """Pass on what a step of a gpu-let brought."""
        now_ms = self._clock_ms()
        gpulet.free_blocks = generated.free_blocks
        if generated.execution_ms:
            gpulet.busy_ms += generated.execution_ms
            gpulet.batches += 1
            self._accounts.advice.executed(gpulet.id, generated.execution_ms)
        for number, token in generated.tokens:
            generation = self._open.get(number)
            if generation is not None:
                generation.tokens += 1
                generation.last_ms = now_ms
                if generation.tokens == 1:
                    generation.first_ms = now_ms
                generation.asker.wrote(token)
        for ended in generated.ended:
            generation = self._open.get(ended.number)
            if generation is not None:
                self._forget(ended.number)
                self._end(generation, ended, now_ms)

    def _end(self, generation: OpenGeneration, ended: EndedSequence, now_ms: float) -> None:
        if ended.may_retry and not generation.tokens and not generation.was_retried:
            generation.was_retried = True
            self._send(generation)
            return
        if ended.finish:
            self._accounts.generated(generation, now_ms)
        else:
            self._accounts.generation_refused(generation, ended.refused(), now_ms)
        generation.told(ended)

    def lost(self, gpulet: AttachedGpulet, reason: str) -> None:
        """Ask another gpu-let for what one had that is gone and made no token of; the rest fails."""
        for number in list(gpulet.generating):
            generation = self._open[number]
            self._forget(number)
            died = EndedSequence(number, "", int(Outcome.FAILED), f"{_DIED} ({reason})", 1.0, gpulet.id, True)
            self._end(generation, died, self._clock_ms())

    def _fail(self, generation: OpenGeneration, refused: Refused) -> None:
        self._accounts.generation_refused(generation, refused, self._clock_ms())
        generation.asker.refused(generation, refused)

    def running(self) -> dict[str, int]:
        """Return how many are open, by model."""
        found: dict[str, int] = {}
        for generation in self._open.values():
            found[generation.name] = found.get(generation.name, 0) + 1
        return found

    def close(self) -> None:
        """Refuse everything that is open."""
        for generation in list(self._open.values()):
            self._stop(generation)
            self._fail(generation, Refused(Outcome.FAILED, "the server is shutting down; send the request again"))


def _room(gpulet: AttachedGpulet, model: str) -> int:
    """Return the tokens that a gpu-let's memory holds, as it said."""
    state = gpulet.connection.state
    signature = None if state is None else state.signatures.get(model)
    limits = None if signature is None else signature.generates
    return 1 if limits is None else limits.longest
