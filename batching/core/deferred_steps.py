"""The order of steps that serves: what cannot be kept is refused before it costs anything, and each piece of work has a
latest start. It has no clock, and does no I/O.

A new sequence is taken when more of those that are there then keep the time for a token, by what is expected. So what
was taken is kept, however much is asked for.

Work goes together where it can, as a step costs less than its parts, and prompts are never held back: that puts off
work and saves none. There are two exceptions. Prompts wait for the next step when the first of them would be late with
them. The decoding waits when more prompts come in time without it, and no token is late by it: each is due one promised
time after the one before, counted from the first. A prompt whose first token would be late even so is not begun.
"""

from __future__ import annotations

import math

from tenuto.batching.core.step_scheduler import UNLIMITED, Step, StepScheduler, TokenLoad, Unkept
from tenuto.outcome import Rule
from tenuto.profiles.generation import StepCost, pairs_of

# Derived: standard deviations, of prompts that are read beside those that are expected: 2 % of the time there are more.
_CHANCE = 2.0
_RESIDUAL = (
    0.5  # derived: a prompt meets half of such a step in the mean, and as much is left for those that come with it
)
_CURE = "lower the rate, raise the SLO or add GPUs"


class DeferredSteps:
    """See `tenuto.batching.core.step_scheduler.StepOrder`."""

    def __init__(self, cost: StepCost, max_batch_tokens: int) -> None:
        """Take what steps cost, and the most tokens of one."""
        self._cost = cost
        self._max_batch_tokens = max_batch_tokens

    def first_token_ms(self, prompt_tokens: int, load: TokenLoad) -> float:
        """Return how long the first token of a new sequence takes at least: all prompts before it, in full steps that
        also decode for those who make tokens."""
        room = max(1, self._max_batch_tokens - load.decoding)
        full, rest = divmod(load.unread_tokens + prompt_tokens, room)
        step_ms = self._cost.ms(room, load.decoding, load.context_tokens, 0) if full else 0.0
        last_ms = self._cost.ms(rest, load.decoding, load.context_tokens, 0) if rest else 0.0
        pairs_ms = self._cost.attention_pair_ms * pairs_of(prompt_tokens, 0)
        return full * step_ms + last_ms + pairs_ms

    def further_token_ms(self, sequences: int, context_tokens: float, load: TokenLoad) -> tuple[float, float]:
        """Return how long a further token takes when so many sequences decode, and by how much that differs by chance
        (standard deviation).

        In place of each of the others a prompt is read after `mean_output` steps, as in
        `placement.generation_capacity`. In so many steps as many prompts are read as there are others, by chance some
        more or fewer (Poisson).
        """
        others, prompt = sequences - 1, round(load.mean_prompt)
        decoding_ms = self._cost.ms(0, sequences, context_tokens)
        reading_ms = self._cost.ms(prompt, sequences, context_tokens, pairs_of(prompt, 0)) - decoding_ms
        each_ms = max(0.0, reading_ms) / load.mean_output  # a short prompt takes nothing, up to rounding
        return decoding_ms + others * each_ms, math.sqrt(others) * each_ms

    def _kept(self, sequences: int, context_tokens: float, load: TokenLoad, allowed_ms: float) -> float:
        """Return how many of so many sequences are expected to keep the time for a token."""
        if not sequences:
            return 0.0
        mean_ms, chance_ms = self.further_token_ms(sequences, context_tokens, load)
        if not chance_ms:
            return sequences * float(mean_ms <= allowed_ms)
        return sequences * 0.5 * math.erfc((mean_ms - allowed_ms) / (math.sqrt(2.0) * chance_ms))

    def refusal(
        self, prompt_tokens: int, now_ms: float, first_by_ms: float, tpot_ms: float, load: TokenLoad
    ) -> Unkept | None:
        """Return why a new sequence would be late, or make others late; None where it is taken.

        Args:
            prompt_tokens: of its prompt.
            now_ms: the time.
            first_by_ms: when its first token is due.
            tpot_ms: the mean time allowed for each further one.
            load: the sequences that are there.
        """
        first_in_ms, first_ms = first_by_ms - now_ms, self._at_best_ms(prompt_tokens, now_ms, load)
        if first_ms > first_in_ms:
            why = f"its first token would take {first_ms:.0f} ms and is due in {first_in_ms:.0f} ms; {_CURE}"
            passes = self.first_token_ms(prompt_tokens, TokenLoad()) <= first_in_ms
            return Unkept(Rule.FIRST_TOKEN, why, first_ms - first_in_ms if passes else None)
        allowed_ms, present = min(tpot_ms, load.least_tpot_ms), load.sequences
        # Sequences that began together have short contexts now, and long ones later: at least those of half an answer.
        context, each = load.context_tokens + load.unread_tokens, load.mean_prompt + load.mean_output / 2.0
        beside = present + 1, max(context + prompt_tokens, (present + 1) * each), load
        with_it = self._kept(*beside, allowed_ms)
        without = self._kept(present, max(context, present * each), load, allowed_ms)
        if with_it <= without:
            further_ms, _ = self.further_token_ms(*beside)
            why = f"with it a token would take {further_ms:.1f} ms, and {allowed_ms:.1f} ms are allowed"
            if further_ms <= allowed_ms:  # in the mean, and too often longer
                why += f": {with_it:.1f} of {present + 1} sequences would keep that, and "
                why += f"{without:.1f} of {present} without it"
            passes = self._kept(1, max(prompt_tokens, each), load, tpot_ms) > 0.0
            return Unkept(Rule.FURTHER_TOKENS, f"{why}; {_CURE}", self._next_end_ms(load) if passes else None)
        return None

    def _next_end_ms(self, load: TokenLoad) -> float:
        """Return in how long one of the present sequences ends, in the mean: each is amid an answer of usual length."""
        step_ms = self._cost.ms(0, load.decoding, load.context_tokens)
        return load.mean_output * step_ms / max(1, load.sequences)

    def latest_ms(self, prompt_tokens: int, now_ms: float, first_by_ms: float, load: TokenLoad) -> float:
        """Return the latest start of a prompt beside those that decode, without them where they can wait for it."""
        beside = TokenLoad(load.decoding, load.context_tokens, due_ms=load.due_ms)
        return first_by_ms - self._at_best_ms(prompt_tokens, now_ms, beside)

    def _at_best_ms(self, prompt_tokens: int, now_ms: float, load: TokenLoad) -> float:
        """Return how long a first token takes at least; the decoding may wait for it."""
        alone_ms = self.first_token_ms(prompt_tokens, TokenLoad(unread_tokens=load.unread_tokens))
        return alone_ms if self._can_wait(now_ms, alone_ms, load) else self.first_token_ms(prompt_tokens, load)

    def ends_ms(self, now_ms: float, step: Step) -> float:
        """Return when a step that begins now will end."""
        return now_ms + self._cost.ms(step.prompt_tokens, step.sequences, step.context_tokens, step.attention_pairs)

    def choose(self, now_ms: float, steps: StepScheduler) -> tuple[bool, int]:
        """Return whether sequences decode in a step, and how many tokens of prompts it reads at most."""
        load = steps.load
        first_by_ms, rest = steps.first_by_ms
        left_ms, room, unread = first_by_ms - now_ms, self._max_batch_tokens, load.unread_tokens
        most = min(room - load.decoding, unread)
        beside = self._most_tokens(rest, most, left_ms, load)
        if beside == most:
            return True, UNLIMITED
        alone = self._most_tokens(rest, min(room, unread), left_ms, TokenLoad())
        if alone > beside and self._can_wait(now_ms, self._cost.ms(alone), load):
            return False, alone
        return True, beside or rest

    def longest_ms(self, now_ms: float, load: TokenLoad) -> float:
        """Return how long a step with offline sequences may take.

        A token has spare time: what it is allowed, less what it takes with prompts that are read meanwhile. Of that,
        offline sequences get the square of the spare part, as the load rises and falls, and a step ends before the next
        token is due. A prompt that comes when the step begins must still be in time behind it.
        """
        first_ms = load.ttft_ms - self.first_token_ms(max(1, round(load.mean_prompt)), load)
        if not load.sequences:
            return _RESIDUAL * first_ms
        allowed_ms, context = min(load.tpot_ms, load.least_tpot_ms), load.context_tokens + load.unread_tokens
        decoding_ms = self._cost.ms(0, load.decoding, load.context_tokens)
        further_ms, chance_ms = self.further_token_ms(load.sequences, context, load)
        idle = max(0.0, 1.0 - (further_ms + _CHANCE * chance_ms) / allowed_ms) if allowed_ms else 0.0
        if not idle:
            return 0.0
        spare_ms = min(idle * allowed_ms, load.due_ms - now_ms - decoding_ms)
        return min(decoding_ms + idle * idle * spare_ms, _RESIDUAL * idle * first_ms)

    def _most_tokens(self, rest: int, most: int, left_ms: float, beside: TokenLoad) -> int:
        """Return how many tokens of prompts a step reads at most in so many ms, at least the rest of the first; 0 where
        that takes longer."""
        low, high = min(rest, most) - 1, most
        while low < high:
            middle = (low + high + 1) // 2 if high < most else most
            if self._cost.ms(middle, beside.decoding, beside.context_tokens) <= left_ms:
                low = middle
            else:
                high = middle - 1
        return low if low >= min(rest, most) else 0

    def _can_wait(self, now_ms: float, takes_ms: float, load: TokenLoad) -> bool:
        """Return whether no token is late when a step of so long comes before the one that decodes."""
        decode_ms = self._cost.ms(0, load.decoding, load.context_tokens + load.decoding)
        return now_ms + takes_ms + decode_ms <= load.due_ms
