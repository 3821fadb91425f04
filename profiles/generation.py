"""What a program that generates text costs: the time of a step, and the memory of its sequences' keys and values.

A step reads prompt tokens, decodes one token for each of some sequences, or does both.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from tenuto.documents import Fault, StrictModel
from tenuto.errors import MissingProfileError
from tenuto.profiles.latency import between_shares

Knots = tuple[tuple[float, float], ...]
NotNegative = Annotated[float, Field(ge=0)]

BLOCK_TOKENS = 16
"""format: vLLM's default: tokens whose keys and values take one block of memory."""


def pairs_of(tokens: int, before: int) -> int:
    """Return the attention pairs of a chunk of prompt tokens: each token with itself and all tokens before it."""
    return tokens * before + tokens * (tokens + 1) // 2


class StepCost(StrictModel):
    """How long a step takes, in ms.

    `prefill_ms` is by the step's prompt tokens, `decode_ms` by its sequences that decode: lines between the knots
    (amount, ms), the first value below them, the last line beyond. With n prompt tokens and s sequences a step takes
    prefill(n + s) + decode(s) - prefill(s), as both kinds of tokens go through the same matrix products. To this come
    `context_token_ms` for each token of context of the sequences that decode, and `attention_pair_ms` for each pair of
    a prompt token and one at or before it.
    """

    prefill_ms: Annotated[Knots, Field(min_length=1)]
    decode_ms: Annotated[Knots, Field(min_length=1)]
    context_token_ms: NotNegative = 0.0
    attention_pair_ms: NotNegative = 0.0

    @field_validator("prefill_ms", "decode_ms")
    @classmethod
    def _rising(cls, knots: Knots) -> Knots:
        amounts = [amount for amount, _ in knots]
        if amounts != sorted(set(amounts)) or min(amounts) < 0 or min(ms for _, ms in knots) < 0:
            raise Fault("knots must be pairs (amount, ms), amounts rising, none below 0", "Correct them.")
        return knots

    @classmethod
    def line(
        cls, step_ms: float, prompt_token_ms: float, sequence_ms: float, context_token_ms: float, pair_ms: float
    ) -> StepCost:
        """Return the linear form: so long for each step, prompt token, sequence, token of context and attention
        pair."""
        return cls(
            prefill_ms=((0.0, step_ms), (1000.0, step_ms + 1000.0 * prompt_token_ms)),
            decode_ms=((0.0, step_ms), (1000.0, step_ms + 1000.0 * sequence_ms)),
            context_token_ms=context_token_ms,
            attention_pair_ms=pair_ms,
        )

    def ms(
        self, prompt_tokens: int = 0, sequences: int = 0, context_tokens: float = 0.0, attention_pairs: float = 0.0
    ) -> float:
        """Return how long a step takes."""
        time = self.context_token_ms * context_tokens + self.attention_pair_ms * attention_pairs
        if sequences:
            time += _at(self.decode_ms, sequences)
        if prompt_tokens:
            time += _at(self.prefill_ms, prompt_tokens + sequences)
            if sequences:
                time -= _at(self.prefill_ms, sequences)
        return time

    def mixed(self, other: StepCost, weight: float) -> StepCost:
        """Return the cost between this one (weight 0) and another (1), or beyond them; no number is below 0."""

        def between(mine: float, its: float) -> float:
            return max(0.0, mine + weight * (its - mine))

        def both(mine: Knots, its: Knots) -> Knots:
            amounts = sorted({amount for amount, _ in (*mine, *its)})
            return tuple((amount, between(_at(mine, amount), _at(its, amount))) for amount in amounts)

        return StepCost(
            prefill_ms=both(self.prefill_ms, other.prefill_ms),
            decode_ms=both(self.decode_ms, other.decode_ms),
            context_token_ms=between(self.context_token_ms, other.context_token_ms),
            attention_pair_ms=between(self.attention_pair_ms, other.attention_pair_ms),
        )


def _at(knots: Knots, amount: float) -> float:
    last = len(knots) - 1
    if amount <= knots[0][0] or not last:
        return knots[0][1]
    place = 1
    while place < last and knots[place][0] < amount:
        place += 1
    (low, low_ms), (high, high_ms) = knots[place - 1], knots[place]
    return low_ms + (high_ms - low_ms) * (amount - low) / (high - low)


class StepsAt(StepCost):
    """How long a step takes on a share of each of some GPUs that run the model together."""

    share_pct: Annotated[float, Field(gt=0, le=100)] = 100.0
    tensor_parallel: Annotated[int, Field(ge=1)] = 1

    @property
    def cost(self) -> StepCost:
        """The cost alone."""
        return StepCost.model_validate(self.model_dump(exclude={"share_pct", "tensor_parallel"}))


class Generation(StrictModel):
    """What it costs to generate with a model on one GPU type.

    `kv_tokens` is how many tokens' keys and values the whole device holds beside the weights. `decided_ahead`: the
    engine decides on a step while the one before it runs. `errors` says how far the figures are off, in percent, by
    what was compared.
    """

    kv_bytes_per_token: Annotated[float, Field(gt=0)] | None = None
    block_tokens: Annotated[int, Field(ge=1)] = BLOCK_TOKENS
    kv_tokens: Annotated[int, Field(ge=1)] | None = None
    longest_context: Annotated[int, Field(ge=1)] | None = None
    decided_ahead: bool = False
    steps: Annotated[tuple[StepsAt, ...], Field(min_length=1)]
    errors: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _each_once(self) -> Generation:
        places = [(step.share_pct, step.tensor_parallel) for step in self.steps]
        if len(set(places)) < len(places):
            raise Fault("two step costs are for one share and number of GPUs", "Keep one of them.")
        return self

    def cost(self, share_pct: float = 100.0, tensor_parallel: int = 1) -> StepCost:
        """Return the cost of steps on a share: between two known shares linear in 1/share.

        Raises:
            MissingProfileError: the share is outside the known ones, or the number of GPUs is not known.
        """
        known = {at.share_pct: at for at in self.steps if at.tensor_parallel == tensor_parallel}
        if not known:
            counts = sorted({at.tensor_parallel for at in self.steps})
            raise MissingProfileError(
                f"step times are not known for {tensor_parallel} GPUs together, only for {counts}. Profile that."
            )
        if share_pct in known:
            return known[share_pct].cost
        outside = f"the shares with step times, {sorted(known)}. Profile that share."
        low, high, weight = between_shares(known, share_pct, outside)
        return known[low].cost.mixed(known[high].cost, weight)

    def alone_on_one_gpu(self, factor: float) -> Generation | None:
        """Return what is known of a whole GPU alone, with steps that take `factor` times as long; None where nothing
        is."""
        steps = tuple(at for at in self.steps if (at.share_pct, at.tensor_parallel) == (100.0, 1))
        return self.model_copy(update={"steps": steps, "kv_tokens": None}).scaled(factor) if steps else None

    def scaled(self, factor: float) -> Generation:
        """Return the same when each step takes `factor` times as long."""

        def longer(knots: Knots) -> Knots:
            return tuple((amount, ms * factor) for amount, ms in knots)

        def slower(at: StepsAt) -> StepsAt:
            curves = {"prefill_ms": longer(at.prefill_ms), "decode_ms": longer(at.decode_ms)}
            per = {key: getattr(at, key) * factor for key in ("context_token_ms", "attention_pair_ms")}
            return at.model_copy(update=curves | per)

        return self.model_copy(update={"steps": tuple(slower(at) for at in self.steps)})
