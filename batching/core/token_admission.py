"""Whether a sequence can keep its SLO beside those that are there, by what steps cost; what cannot is refused before it
costs anything. It has no clock, and does no I/O.

Both estimates are lower bounds of what a first-come order of chunked prefills does, so that nothing is refused that
could be kept: other sequences may still come, and memory may still be short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tenuto.profiles.generation import StepCost, pairs_of


@dataclass(slots=True)
class TokenLoad:
    """The sequences that are there: how many make tokens, the tokens that these have, the tokens of prompts that have
    not run, and the least time for a token that any of them is promised, in ms."""

    decoding: int = 0
    context_tokens: int = 0
    unread_tokens: int = 0
    least_tpot_ms: float = math.inf


class TokenAdmission:
    """The estimates for one gpu-let."""

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

    def further_token_ms(self, prompt_tokens: int, load: TokenLoad) -> float:
        """Return how long a further token of a new sequence takes at least: a step in which all decode."""
        return self._cost.ms(0, load.decoding + 1, load.context_tokens + prompt_tokens)

    def refusal(self, prompt_tokens: int, first_in_ms: float, tpot_ms: float, load: TokenLoad) -> str | None:
        """Return why a new sequence must be refused; None where it can be kept.

        Args:
            prompt_tokens: of its prompt.
            first_in_ms: the time until its first token is due.
            tpot_ms: the mean time allowed for each further one.
            load: the sequences that are there.
        """
        first_ms = self.first_token_ms(prompt_tokens, load)
        if first_ms > first_in_ms:
            return (
                f"its first token would take {first_ms:.0f} ms and is due in {first_in_ms:.0f} ms; lower the rate, "
                "raise the SLO or add GPUs"
            )
        further_ms = self.further_token_ms(prompt_tokens, load)
        if further_ms > min(tpot_ms, load.least_tpot_ms):
            return (
                f"with it a token would take {further_ms:.1f} ms, and {min(tpot_ms, load.least_tpot_ms):.1f} ms are "
                "allowed; lower the rate, raise the SLO or add GPUs"
            )
        return None
