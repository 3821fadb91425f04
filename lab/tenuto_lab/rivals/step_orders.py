"""Published orders of the steps of a model that generates, each as a scheduler by name. None of them refuses anything.

vLLM's own, chunked prefills beside all that decode, is what `eager` and all other schedulers take that name no order.
"""

from __future__ import annotations

import math

from tenuto.batching.core.eager import EagerScheduler
from tenuto.batching.core.step_scheduler import UNLIMITED, Step, StepOrder, StepScheduler, TokenLoad, Unkept
from tenuto.batching.core.system import GeneratingGpulet
from tenuto.profiles import StepCost


class PrefillFirst:
    """Prompts first come first served, before all that decode (Orca; vLLM before chunked prefills)."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost

    def refusal(
        self, prompt_tokens: int, now_ms: float, first_by_ms: float, tpot_ms: float, load: TokenLoad
    ) -> Unkept | None:
        """Refuse nothing."""
        del prompt_tokens, now_ms, first_by_ms, tpot_ms, load
        return None

    def latest_ms(self, prompt_tokens: int, now_ms: float, first_by_ms: float, load: TokenLoad) -> float:
        """Give up nothing."""
        del prompt_tokens, now_ms, first_by_ms, load
        return math.inf

    def ends_ms(self, now_ms: float, step: Step) -> float:
        """Return when a step that begins now will end."""
        cost = self.cost
        return now_ms + cost.ms(step.prompt_tokens, step.sequences, step.context_tokens, step.attention_pairs)

    def longest_ms(self, now_ms: float, load: TokenLoad) -> float:
        """Let offline sequences take any time."""
        del now_ms, load
        return math.inf

    def choose(self, now_ms: float, steps: StepScheduler) -> tuple[bool, int]:
        """Read prompts."""
        del now_ms, steps
        return False, UNLIMITED


class DecodeFirst(PrefillFirst):
    """No prompt is read before all that decode have ended (FasterTransformer)."""

    def choose(self, now_ms: float, steps: StepScheduler) -> tuple[bool, int]:
        """Decode."""
        del now_ms, steps
        return True, 0


class RoundRobin(PrefillFirst):
    """Prompts and decoding in turn, as MuxServe's scheduler does within a model."""

    _has_read = False

    def choose(self, now_ms: float, steps: StepScheduler) -> tuple[bool, int]:
        """Do what was not done in the step before."""
        del now_ms, steps
        self._has_read = not self._has_read
        return (False, UNLIMITED) if self._has_read else (True, 0)


class LeastSlack(PrefillFirst):
    """Prompts or decoding, whichever has less time left beyond what it takes."""

    def choose(self, now_ms: float, steps: StepScheduler) -> tuple[bool, int]:
        """Compare the first prompt with the token that is due first."""
        del now_ms
        load = steps.load
        first_by_ms, tokens = steps.first_by_ms
        decode_ms = self.cost.ms(0, load.decoding, load.context_tokens + load.decoding)
        is_prompt = first_by_ms - self.cost.ms(tokens) < load.due_ms - decode_ms
        return (False, UNLIMITED) if is_prompt else (True, 0)


class PrefillFirstScheduler(EagerScheduler):
    """See `PrefillFirst`; networks of fixed cost run as under `eager`."""

    name = "prefill-first"
    summary = "models that generate: prompts before all that decode, as Orca"

    def step_order(self, gpulet: GeneratingGpulet) -> StepOrder | None:
        return PrefillFirst(gpulet.cost)


class DecodeFirstScheduler(EagerScheduler):
    """See `DecodeFirst`."""

    name = "decode-first"
    summary = "models that generate: no prompt before all that decode have ended, as FasterTransformer"

    def step_order(self, gpulet: GeneratingGpulet) -> StepOrder | None:
        return DecodeFirst(gpulet.cost)


class RoundRobinScheduler(EagerScheduler):
    """See `RoundRobin`."""

    name = "round-robin"
    summary = "models that generate: prompts and decoding in turn, as MuxServe"

    def step_order(self, gpulet: GeneratingGpulet) -> StepOrder | None:
        return RoundRobin(gpulet.cost)


class LeastSlackScheduler(EagerScheduler):
    """See `LeastSlack`."""

    name = "least-slack"
    summary = "models that generate: prompts or decoding, whichever has less slack"

    def step_order(self, gpulet: GeneratingGpulet) -> StepOrder | None:
        return LeastSlack(gpulet.cost)
