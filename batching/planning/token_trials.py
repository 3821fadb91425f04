"""How many requests per second a share carries of a model that generates, tried step by step in virtual time."""

from __future__ import annotations

import numpy as np

from tenuto.batching.core.step_scheduler import StepLimits, StepScheduler
from tenuto.placement.carrying import carried
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import StepCost

_REQUESTS = 3000
"""limit: requests of one trial; it takes a tenth of a second."""
_SHRINK = 0.85
"""limit: by how much a rate is lowered that was too high; a share may carry as much more than is planned."""
_TRIES = 12
"""limit: rates that are tried, down to a sixth of the closed form's."""


def carried_in_trial(
    spec: ModelSpec, cost: StepCost, kv_tokens: int, *, attainment: float, seed: int
) -> tuple[float, int]:
    """Return the highest rate tried, from the closed form's down, at which this part of the requests is in time in a
    Poisson stream, and the sequences that the closed form expects there; (0, 0) where none is."""
    rate, sequences = carried(spec, cost, kv_tokens)
    aim = (1.0 + attainment) / 2.0  # half of the misses to spare: other arrivals are less kind
    for _ in range(_TRIES if rate > 0 else 0):
        if in_time(spec, cost, kv_tokens, rate, seed) >= aim:
            return rate, max(1, round(sequences))
        rate, sequences = rate * _SHRINK, round(sequences * _SHRINK)
    return 0.0, 0


def in_time(spec: ModelSpec, cost: StepCost, kv_tokens: int, rate_rps: float, seed: int) -> float:
    """Return the part of a Poisson stream's requests that keeps both bounds of the SLO, under the order of steps that
    serves."""
    generates, slo = spec.generates, spec.slo
    if generates is None or slo is None or generates.prompt_tokens is None or generates.output_tokens is None:
        raise ValueError(f"{spec.name} does not generate, or its lengths are not known.")
    draws = np.random.default_rng(seed)
    arrivals = np.cumsum(draws.exponential(1000.0 / rate_rps, _REQUESTS)).tolist()
    prompts = generates.prompt_tokens.draw(_REQUESTS, draws).tolist()
    outputs = generates.output_tokens.draw(_REQUESTS, draws).tolist()
    steps = StepScheduler(StepLimits(generates.max_sequences, generates.max_batch_tokens, kv_tokens))
    first_ms: dict[int, float] = {}
    now_ms, arrived, ended, kept = 0.0, 0, 0, 0
    while ended < _REQUESTS:
        while arrived < _REQUESTS and arrivals[arrived] <= now_ms:
            ended += steps.add(arrived, prompts[arrived], outputs[arrived]) is not None
            arrived += 1
        step = steps.decide()
        if step is None:
            if arrived == _REQUESTS:
                break
            now_ms = max(now_ms, arrivals[arrived])
            continue
        now_ms += cost.ms(step.prompt_tokens, step.sequences, step.context_tokens, step.attention_pairs)
        for sequence in step.first:
            first_ms.setdefault(sequence, now_ms)
        for sequence in step.last:
            ttft_ms = first_ms[sequence] - arrivals[sequence]
            tpot_ms = (now_ms - first_ms.pop(sequence)) / max(1, outputs[sequence] - 1)
            kept += ttft_ms <= slo.ttft_ms and tpot_ms <= slo.tpot_ms
            ended += 1
        steps.done(step)
    return kept / _REQUESTS
