"""What steps of a model that generates cost on a device: prefills and decoding steps, timed by themselves."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count, zip_longest

from tenuto.profiles.generation import Knots, StepCost
from tenuto.profiles.networks.generating import Generator, Sampling, blocks_of

_SHORT = 16
"""derived: tokens of a prompt whose attention is negligible, one block."""
_FEWEST = 5
"""derived: runs of a step, whose median counts; the first one more is not counted."""

_NOISY_PART = 0.2
"""limit: the middle half of the times of one kind of step spreads more than this where other work disturbs it."""


class StepTimer:
    """Times steps of a model on whose device nothing else runs."""

    def __init__(
        self, model: Generator, *, budget_s: float, on_step: Callable[[str, float], None] = lambda _what, _ms: None
    ) -> None:
        """Args:
        model: with no open sequence.
        budget_s: time for the repetitions of one kind of step.
        on_step: takes what was timed, and its median in ms.
        """
        self._model = model
        self._budget_s = budget_s
        self._on_step = on_step
        self._numbers = count()
        self.disturbed: list[str] = []  # what was timed beside other work

    def prefill_ms(self, tokens: int, longest: int) -> float:
        """Return the median time of a step that reads so many prompt tokens, of prompts of up to `longest`."""
        lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)

        def run() -> float:
            opened = self._opened(lengths)
            ran_ms = self._model.step(list(zip(opened, lengths, strict=True))).execution_ms
            self._cancel(opened)
            return ran_ms

        return self._median(f"{tokens} prompt tokens", run)

    def decode_ms(self, sequences: int, context: int, most_tokens: int) -> float:
        """Return the median time of a step that decodes so many sequences, each with about so many tokens of context.

        Their prompts are read before, in steps of at most `most_tokens`.
        """
        opened = self._read(sequences, context, most_tokens)

        def run() -> float:
            ran = self._model.step([(sequence, 1) for sequence in opened])
            for sequence in ran.ended:  # by the model's own end of text: another takes its place
                opened.remove(sequence)
            opened.extend(self._read(sequences - len(opened), context, most_tokens))
            return ran.execution_ms

        median = self._median(f"{sequences} sequences of {context} tokens", run, at_most=_SHORT)
        self._cancel(opened)
        return median

    def _read(self, sequences: int, context: int, most_tokens: int) -> list[int]:
        """Return so many sequences whose prompts have been read and that go on."""
        opened: list[int] = []
        while len(opened) < sequences:
            (sequence,) = self._opened([context])
            ended = False
            for before in range(0, context, most_tokens):
                ended = bool(self._model.step([(sequence, min(most_tokens, context - before))]).ended)
            opened += [] if ended else [sequence]
        return opened

    def _opened(self, lengths: Sequence[int]) -> list[int]:
        opened = []
        for length in lengths:
            opened.append(next(self._numbers))
            self._model.add(opened[-1], [0] * length, Sampling(2 * _SHORT, temperature=1.0, seed=opened[-1]))
        return opened

    def _cancel(self, opened: Sequence[int]) -> None:
        for sequence in opened:
            self._model.cancel(sequence)

    def _median(self, what: str, run: Callable[[], float], at_most: int = 1000) -> float:
        run()
        began_s, times = time.perf_counter(), [run() for _ in range(_FEWEST)]
        while time.perf_counter() - began_s < self._budget_s and len(times) < at_most - 1:
            times.append(run())
        first, median, third = statistics.quantiles(times, n=4)
        if third - first > _NOISY_PART * median:
            self.disturbed.append(what)
        self._on_step(what, median)
        return median


def measure_steps(
    timer: StepTimer,
    *,
    max_sequences: int,
    max_batch_tokens: int,
    longest: int,
    on_cost: Callable[[StepCost], None] = lambda _cost: None,
) -> StepCost:
    """Return what steps cost, by prompt tokens and by sequences that decode, each at powers of two up to the limits.

    Args:
        timer: times them.
        max_sequences: the most sequences of a step.
        max_batch_tokens: the most tokens of a step.
        longest: the most tokens of a sequence.
        on_cost: takes what is known so far, each time that more is.
    """
    most = max(_SHORT, min(longest, max_batch_tokens) - 2 * _SHORT)
    prefill_ms: dict[int, float] = {}
    decode_ms: dict[int, float] = {}

    def cost(context_token_ms: float = 0.0) -> StepCost:
        prefill, decode = _rising(prefill_ms), _rising(decode_ms)
        return StepCost(prefill_ms=prefill, decode_ms=decode, context_token_ms=context_token_ms)

    for tokens, sequences in zip_longest(_powers(_SHORT, max_batch_tokens), _powers(1, max_sequences)):
        if tokens is not None:
            prefill_ms[tokens] = timer.prefill_ms(tokens, most)
        if sequences is not None:
            decode_ms[sequences] = timer.decode_ms(sequences, _SHORT, max_batch_tokens)
        on_cost(cost())
    # Derived: sequences whose attention is well above a step's noise.
    few, long = max(1, min(8, max_sequences)), max(_SHORT + 1, longest - 2 * _SHORT)
    more_ms = timer.decode_ms(few, long, max_batch_tokens) - dict(_rising(decode_ms))[few]
    return cost(max(0.0, more_ms) / (few * (long - _SHORT)))


def _rising(measured_ms: Mapping[int, float]) -> Knots:
    """Return times by amount of which none is above that of a larger amount: more takes at least as long, and other
    work only makes a time longer."""
    least, knots = math.inf, []
    for amount, ms in sorted(measured_ms.items(), reverse=True):
        least = min(least, ms)
        knots.append((float(amount), round(least, 4)))
    return tuple(reversed(knots))


def blocks_needed(*, max_sequences: int, max_batch_tokens: int, longest: int, block_tokens: int) -> int:
    """Return the blocks of memory with which `measure_steps` can run."""
    widest = max_sequences * blocks_of(3 * _SHORT, block_tokens)  # derived: a prompt, its tokens and a block begun
    # Derived: the sequences above.
    return max(widest, 8 * blocks_of(longest, block_tokens), 2 * blocks_of(max_batch_tokens, block_tokens)) + 1


def _powers(first: int, last: int) -> list[int]:
    """Return first, its doubles below last, and last."""
    powers = [first]
    while powers[-1] * 2 < last:
        powers.append(powers[-1] * 2)
    return powers if powers[-1] >= last else [*powers, last]
