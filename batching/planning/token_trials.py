"""How many requests per second a share carries of a model that generates, tried step by step in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from tenuto.batching.core.deferred_steps import DeferredSteps
from tenuto.batching.core.step_scheduler import TRIES, StepLimits, emptiest
from tenuto.batching.core.system import INF
from tenuto.batching.virtual.virtual_steps import VirtualSteps
from tenuto.placement.generates import TokenSlo
from tenuto.placement.generation_capacity import RATE_STEP, GeneratingHost, carried
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import StepCost

STEADY_SLOS = 10.0
"""derived: times its SLO, as long as requests then wait no less than later, to a tenth."""
_REQUESTS = 3000
"""derived: requests of one trial, or more where more come in `STEADY_SLOS`; it takes a tenth of a second."""
_MOST_REQUESTS = 30_000
"""limit: requests of one trial; it takes a second."""
_FURTHEST = 20
"""limit: rates that are tried above the closed form's and below it, up to seven times it and down to a seventh."""
_STREAMS = 3
"""fitted: streams that have to be in time."""
_LOOKS = 12
"""pace: looks during a trial at how many requests can keep the SLO; each takes as long as a few requests."""


def carried_in_trial(
    spec: ModelSpec, cost: StepCost, kv_tokens: int, *, attainment: float, seed: int
) -> tuple[float, int]:
    """Return a rate at which this part of the requests is in time in several Poisson streams, and the sequences that
    the closed form expects there; (0, 0) where there is none. From the closed form's the rate goes up while a short
    stream is in time, and then down until all others are."""
    lengths = "" if spec.generates is None else spec.generates.model_dump_json()
    return _carried_once(_Question(lengths, spec.slo, spec), cost, kv_tokens, attainment, seed)


@dataclass(frozen=True)
class _Question:
    """A question to a share of a GPU. Models with the same lengths and SLO ask the same."""

    lengths: str
    slo: TokenSlo | None
    spec: ModelSpec = field(compare=False)


@lru_cache(maxsize=10_000)  # limit: shares, of a kilobyte each; a controller's plans ask for the same again and again
def _carried_once(
    question: _Question, cost: StepCost, kv_tokens: int, attainment: float, seed: int
) -> tuple[float, int]:
    spec = question.spec
    rate, sequences = carried(spec, cost, kv_tokens)
    if rate <= 0:
        return 0.0, 0
    aim = (1.0 + attainment) / 2.0  # half of the misses to spare: other arrivals are less kind

    def is_carried(steps: int, stream: int, part: int = 1) -> bool:
        tried_rps = rate * RATE_STEP**steps
        hosts = [GeneratingHost(cost, kv_tokens, 1.0)]
        requests = _enough(spec, tried_rps) // part
        return in_time(spec, hosts, tried_rps, (seed, stream), requests, floor=aim) >= aim

    steps, streams = 0, list(range(1, 1 + _STREAMS))
    while steps < _FURTHEST and is_carried(steps, 0, 3):  # derived: a look, which a whole trial confirms
        steps += 1
    while steps > -_FURTHEST:
        missed = next((stream for stream in streams if not is_carried(steps, stream)), None)
        if missed is None:
            break
        streams.remove(missed)
        streams.insert(0, missed)  # it is the likeliest to miss the next rate too
        steps -= 1
    return (0.0, 0) if steps == -_FURTHEST else (rate * RATE_STEP**steps, max(1, round(sequences * RATE_STEP**steps)))


def served_in_trial(spec: ModelSpec, hosts: Sequence[GeneratingHost], *, attainment: float, seed: int) -> float:
    """Return which part of a model's whole rate gpu-lets serve in time together, as they refuse what they cannot keep;
    1 where it is carried in several streams. A request goes to the emptiest for its rate, then to the next."""
    aim, part = (1.0 + attainment) / 2.0, 1.0
    for stream in range(1, 1 + _STREAMS):
        part = in_time(spec, hosts, spec.rate_rps, (seed, stream), _enough(spec, spec.rate_rps), refuses=True)
        if part < aim:
            return part
    return 1.0


def _enough(spec: ModelSpec, rate_rps: float) -> int:
    """Return how many requests a trial at a rate takes: in a shorter one a queue that only grows would not be late."""
    slo_s = 0.0 if spec.slo is None else spec.slo.ttft_ms / 1000.0
    return min(_MOST_REQUESTS, max(_REQUESTS, math.ceil(STEADY_SLOS * slo_s * rate_rps)))


def in_time(
    spec: ModelSpec,
    hosts: Sequence[GeneratingHost],
    rate_rps: float,
    seed: Sequence[int],
    requests: int = _REQUESTS,
    *,
    refuses: bool = False,
    floor: float = 0.0,
) -> float:
    """Return the part of a Poisson stream's requests that keeps both bounds of the SLO: when all are taken, or under
    the order of steps that serves, which `refuses` what it cannot keep. A stream of which less than the part `floor`
    can keep them any more ends early, with the most that could."""
    generates, slo = spec.generates, spec.slo
    if generates is None or slo is None or generates.prompt_tokens is None or generates.output_tokens is None:
        raise ValueError(f"{spec.name} does not generate, or its lengths are not known.")
    draws = np.random.default_rng(seed)
    arrivals = np.cumsum(draws.exponential(1000.0 / rate_rps, requests))
    prompts, outputs = (of.draw(requests, draws) for of in (generates.prompt_tokens, generates.output_tokens))
    most = generates.max_batch_tokens
    replicas = [
        VirtualSteps(
            StepLimits(generates.max_sequences, most, host.kv_tokens),
            host.steps,
            order=DeferredSteps(host.steps, most) if refuses else None,
        )
        for host in hosts
    ]
    bounds = (slo.ttft_ms, slo.tpot_ms) if refuses else (INF, INF)

    def part_kept(now_ms: float) -> float:
        """Return the part in time if every token that is missing came now."""
        first_ms, last_ms = np.full(requests, now_ms), np.full(requests, now_ms)
        for replica in replicas:
            first_ms[list(replica.first_ms)] = list(replica.first_ms.values())
            last_ms[list(replica.last_ms)] = list(replica.last_ms.values())
        tpot_ms = (last_ms - first_ms) / np.maximum(1, outputs - 1)
        return float(np.mean((first_ms - arrivals <= slo.ttft_ms) & (tpot_ms <= slo.tpot_ms)))

    pairs, every = list(zip(replicas, hosts, strict=True)), max(1, requests // _LOOKS)
    for request, (at, prompt, output) in enumerate(
        zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    ):
        for replica in replicas:
            replica.advance(at)
        left = pairs.copy()
        for _ in range(min(TRIES, len(left))):
            place = 0
            if len(left) > 1:
                place = emptiest((one.scheduler.sequences, host.rate_rps) for one, host in left)
            replica, _ = left.pop(place)
            if replica.add(at, request, prompt, output, at + bounds[0], bounds[1]) is None:
                break
        if floor and request % every == every - 1 and (part := part_kept(at)) < floor:
            return part
    for replica in replicas:
        while replica.due_ms < INF:
            replica.advance(replica.due_ms)
    return part_kept(np.nan)  # it never ran
