"""The steps of one replica that generates, in virtual time.

Steps in which nothing but decoding happens are not run one by one: their times have a closed form, up to the next
arrival or end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.step_scheduler import Step, StepLimits, StepOrder, StepScheduler, Unkept
from tenuto.batching.core.system import INF
from tenuto.batching.virtual.offline_backlog import FIRST_OFFLINE, online_of
from tenuto.profiles import StepCost


@dataclass(frozen=True)
class RequestTokens:
    """The tokens of each request's prompt and output; 0 where its model does not generate."""

    prompt: NDArray[np.int64]
    output: NDArray[np.int64]

    def of(self, requests: NDArray[np.int64] | slice) -> RequestTokens:
        """Return those of some requests, in this order."""
        return RequestTokens(self.prompt[requests], self.output[requests])


class VirtualSteps:
    """One replica. `due_ms` is when something ends next; INF when it is idle.

    `first_ms` and `last_ms` have the times of each sequence's first and last token; `ended` those that ended since the
    caller emptied it. `busy` has (begin, end) of the times without a pause that are over. `steps` and `worked` count
    the steps, and the sequences in all of them; `preempted` how often a sequence lost its memory. Offline sequences are
    in none of these but `busy` and `steps`: `busy_offline` has the part that they added to steps, `offline_tokens` the
    tokens that they read and made in them.
    """

    def __init__(
        self, limits: StepLimits, cost: StepCost, *, decided_ahead: bool = False, order: StepOrder | None = None
    ) -> None:
        self.scheduler = StepScheduler(limits, order)
        self.due_ms = INF
        self.first_ms: dict[int, float] = {}
        self.last_ms: dict[int, float] = {}
        self.ended: list[int] = []
        self.steps = self.worked = self.preempted = 0
        self.busy: list[tuple[float, float]] = []
        self.busy_offline: list[tuple[float, float]] = []
        self.offline_tokens = 0
        self._offline_ended: list[int] = []
        self._busy_from = 0.0
        self._ahead = decided_ahead
        self._current: Step | None = None
        self._next: Step | None = None  # decided while the current one runs
        self._start_ms = self._takes_ms = 0.0  # of the current step
        self._repeats, self._more_ms = 0, 0.0  # steps that follow it alike, each so much longer than the one before
        most = np.arange(max(limits.max_batch_tokens, limits.max_sequences) + 1, dtype=np.float64)
        self._prefill_ms = curve(cost.prefill_ms, most).tolist()
        self._decode_ms = curve(cost.decode_ms, most).tolist()
        self._token_ms, self._pair_ms = cost.context_token_ms, cost.attention_pair_ms

    def add(
        self,
        now_ms: float,
        sequence: int,
        prompt_tokens: int,
        output_tokens: int,
        first_by_ms: float = INF,
        tpot_ms: float = INF,
        *,
        offline: bool = False,
    ) -> Unkept | None:
        """Let a sequence arrive, after all that was due; return why it cannot run, or None."""
        self._cut(now_ms)
        # It is taken at the end of the step that runs, as by a gpu-let.
        begins_ms = now_ms if self.due_ms == INF else self.due_ms
        bounds = begins_ms, first_by_ms, tpot_ms
        refusal = self.scheduler.add(sequence, prompt_tokens, output_tokens, *bounds, offline=offline)
        if refusal is None and self._current is None:
            self._busy_from = now_ms
            self._begin(now_ms)
        return refusal

    def cancel(self, now_ms: float, sequence: int) -> bool:
        """Forget a sequence, after all that was due; False if there is none of that number."""
        self._cut(now_ms)
        for step in (self._current, self._next):
            for names in () if step is None else (step.first, step.last):
                if sequence in names:
                    names.remove(sequence)
        self.first_ms.pop(sequence, None)
        return self.scheduler.cancel(sequence)

    def stop(self, now_ms: float) -> list[int]:
        """End at once; return the sequences that were here."""
        if self.due_ms < INF:
            self.busy.append((self._busy_from, now_ms))
        self.due_ms, self._current, self._next, self._repeats = INF, None, None, 0
        left = self.scheduler.names()
        for sequence in left:
            self.scheduler.cancel(sequence)
            self.first_ms.pop(sequence, None)
        return left

    def advance(self, until_ms: float) -> None:
        """Run all steps that end up to and including this time."""
        while self.due_ms <= until_ms:
            self._finish(self.due_ms)

    def _begin(self, now_ms: float) -> None:
        step = self._current
        if step is None:
            step = self._current = self.scheduler.decide(now_ms)
            if step is None:
                self.due_ms = INF
                self.busy.append((self._busy_from, now_ms))
                return
        self.steps += 1
        self.worked += step.sequences + len(step.chunks)
        self.preempted += len(step.preempted)
        count, tokens, takes = step.sequences, step.prompt_tokens, self._cost_ms(step)
        if step.others is not None:
            self.worked = self.worked - step.offline
            self.offline_tokens += step.offline + tokens - step.others.prompt_tokens
            more_ms = takes - self._cost_ms(step.others)
            if more_ms > 0.0:
                self.busy_offline.append((now_ms + takes - more_ms, now_ms + takes))
        self._start_ms, self._takes_ms, self._repeats = now_ms, takes, 0
        if not tokens and not step.last:
            self._repeats = max(0, self.scheduler.quiet_steps() - self._ahead)
            if self._repeats:
                self._more_ms = self._token_ms * count
                gives_up_ms = self.scheduler.gives_up_ms
                if gives_up_ms <= self._end_of(self._repeats):
                    self._repeats = self._begun_by(gives_up_ms)
        if not self._repeats:
            self.due_ms = now_ms + takes
            if self._ahead:
                self._next = self.scheduler.decide(self.due_ms)
        else:
            self.due_ms = self._end_of(self._repeats)

    def _cost_ms(self, step: Step) -> float:
        """Return how long a step takes."""
        count, tokens = step.sequences, step.prompt_tokens
        takes = self._token_ms * step.context_tokens + self._pair_ms * step.attention_pairs
        if count:
            takes += self._decode_ms[count]
        if tokens:
            takes += self._prefill_ms[tokens + count] - (self._prefill_ms[count] if count else 0.0)
        return takes

    def busy_online(self) -> list[tuple[float, float]]:
        """Return `busy` without what offline sequences added."""
        begins = sorted([begin for begin, _ in self.busy] + [end for _, end in self.busy_offline])
        ends = sorted([end for _, end in self.busy] + [begin for begin, _ in self.busy_offline])
        return [(begin, max(begin, end)) for begin, end in zip(begins, ends, strict=False)]

    @property
    def waiting_offline(self) -> int:
        """Offline sequences that have not begun."""
        return self.scheduler.waiting_offline

    def take_offline_ended(self) -> list[int]:
        """Return the offline sequences that have ended since the last call."""
        ended, self._offline_ended = self._offline_ended, []
        return ended

    def _end_of(self, repeats: int) -> float:
        """Return when the current step and so many like it have ended."""
        return self._start_ms + (repeats + 1) * self._takes_ms + 0.5 * repeats * (repeats + 1) * self._more_ms

    def _cut(self, now_ms: float) -> None:
        """Cut a run of equal steps short: keep those that were decided before now, and end with the one that runs."""
        if self._repeats:
            self._repeats = self._begun_by(now_ms)
            self.due_ms = self._end_of(self._repeats)
            self._settle_repeats()

    def _begun_by(self, now_ms: float) -> int:
        """Return how many of the steps that follow alike were decided before now."""
        # (n + 1) takes + n (n + 1) / 2 more = now - start, and then the first whole n that is later
        half, gone = 0.5 * self._more_ms, now_ms - self._start_ms
        linear = self._takes_ms + half
        # Derived: the quadratic above.
        root = math.sqrt(max(0.0, linear * linear - 4.0 * half * (self._takes_ms - gone)))
        repeats = int(max(0.0, 2.0 * (gone - self._takes_ms) / (linear + root)))
        while repeats and self._end_of(repeats - 1) > now_ms:
            repeats -= 1
        while repeats < self._repeats and self._end_of(repeats) <= now_ms:
            repeats += 1
        return repeats

    def _settle_repeats(self) -> None:
        self.scheduler.repeat(self._repeats)
        self.steps += self._repeats
        self.worked += self._repeats * (0 if self._current is None else self._current.sequences)
        self._repeats = 0
        if self._ahead:
            self._next = self.scheduler.decide(self.due_ms)

    def _finish(self, now_ms: float) -> None:
        if self._repeats:
            self._settle_repeats()
        step = self._current
        if step is None:
            return
        for sequence in step.first:
            if sequence < FIRST_OFFLINE:
                self.first_ms[sequence] = now_ms
        if step.last:
            ended = online_of(step.last)
            for sequence in ended:
                self.last_ms[sequence] = now_ms
            self.ended += ended
            self._offline_ended += [sequence for sequence in step.last if sequence >= FIRST_OFFLINE]
            self.scheduler.done(step)
        self._current, self._next = self._next, None
        self._begin(now_ms)


def curve(knots: Sequence[tuple[float, float]], amounts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a cost in ms at many amounts: `StepCost`'s lines between knots."""
    x, y = np.array(knots, dtype=np.float64).T
    costs: NDArray[np.float64] = np.interp(amounts, x, y)
    if len(x) > 1:
        beyond = amounts > x[-1]
        costs[beyond] = y[-1] + (y[-1] - y[-2]) / (x[-1] - x[-2]) * (amounts[beyond] - x[-1])
    return costs


def run_log(
    arrival_ms: Sequence[float],
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    replica: VirtualSteps,
    *,
    until: int | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Let requests arrive at one replica alone; return the times of their first and last tokens, NaN where refused.

    The run is over when the first `until` requests have ended; what is not known then is NaN.
    """
    count = len(arrival_ms)
    awaited = count if until is None else until
    refused = 0
    for sequence, (at, prompt, output) in enumerate(zip(arrival_ms, prompt_tokens, output_tokens, strict=True)):
        replica.advance(at)
        refused += replica.add(at, sequence, prompt, output) is not None and sequence < awaited
    left = set(range(awaited)).difference(replica.last_ms)
    replica.ended.clear()
    while replica.due_ms < INF and len(left) > refused:
        replica.advance(replica.due_ms)
        left.difference_update(replica.ended)
        replica.ended.clear()
    nan = float("nan")
    return (
        np.array([replica.first_ms.get(place, nan) for place in range(count)]),
        np.array([replica.last_ms.get(place, nan) for place in range(count)]),
    )
