"""What gpu-lets of models that generate carry: each is a share of one GPU, or of several of a node together.

A closed form says how many requests per second a gpu-let carries. While b sequences decode, a prompt is read every
(mean output / b) steps, so that a step takes in the mean

    T(b) = decode(b) + context + b / output * (what reading a prompt adds to a step),

and b / (output * T) requests are answered per second. When some more sequences than b decode, as arrivals have it, T
may not exceed the SLO's TPOT nor two of the longest steps its TTFT, and all have to fit into the memory beside the
weights (KV cache). Where too few may decode at once for that, requests wait for others to end (Erlang's formula). A
policy may try the same in virtual time instead. What the models do to each other beside their
shares is not known: no interference between them is counted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.arrivals.arrival_processes import usual_lengths
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.costs import ModelOnGpu, context_mib_of
from tenuto.placement.generates import Generates, Lengths, TokenSlo, quantiles_of
from tenuto.placement.program import Gpulet, Replica
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import Generation, Profiles, StepCost
from tenuto.profiles.generation import BLOCK_TOKENS, pairs_of

SPREADS = 4.0
"""fitted on 39 random models on shares, with the next: how many times the square root of b there may be more sequences.
Simulated at the rate that the closed form gives, 97 % of the requests are in time in the mean; with 3.3, 96 %."""
BUSY_PART = 0.75
"""fitted with the one before: the part of the highest rate that is planned; at 0.8, 95 % are in time in the mean."""
LATE_PART = 0.03
"""derived: the part of requests that may come too late by waiting where few decode at once, as with `SPREADS`."""
WHOLE = (100,)
"""format: the only share where CUDA MPS is off."""
SHARES = (30, 40, 50, 60, 70, 80, 90, 100)
"""derived: tens of percent, from the smallest share with measured step times."""
RATE_STEP = 1.1
"""fitted: the ratio of two rates that are told apart; a share may carry as much more than is planned."""
WORTH_TOGETHER = 1.5
"""fitted: GPUs run a model together where each carries so many times as much as alone: for models whose weights hardly
leave memory. The others lie beside each other, and no loss takes several GPUs from them."""
_MEMORY_PART = 0.9
"""derived: the part of its memory that a gpu-let uses, as the ledger leaves a tenth for workspaces."""
_DRAWN = 10_000
"""derived: requests of which is told how many are too long."""


@dataclass(frozen=True)
class ShareCapacity:
    """A share of a GPU for a model: the requests per second that it carries with so many sequences, and its memory.

    With `together` above 1, the model lies on that share of each of so many GPUs of one node, by tensor parallelism.
    `weights_mib` is then the part of the weights on one of them. A profile fitted to a log knows of memory only how
    many tokens a whole GPU held, or that they were never too many. Then there are no weights in MiB, and the share is
    a whole GPU.
    """

    spec: ModelSpec
    share_pct: float
    rate_rps: float
    sequences: int
    generation: Generation
    steps: StepCost
    kv_tokens: int
    weights_mib: float | None
    together: int = 1

    def tokens_in(self, room_mib: float) -> int:
        """Return how many tokens so much memory of each GPU holds beside the weights."""
        if self.weights_mib is None:
            return self.kv_tokens
        return int((room_mib - self.weights_mib) / self.mib_per_token)

    @property
    def mib_per_token(self) -> float:
        """The memory of one token's keys and values on each GPU; 0 where it is not known."""
        return (self.generation.kv_bytes_per_token or 0.0) / 2**20 / self.together

    @cached_property
    def tried(self) -> float:
        """What trials found that it carries, over what the closed form says; 1 where nothing was tried."""
        return round(self.rate_rps / (carried(self.spec, self.steps, self.kv_tokens)[0] or self.rate_rps), 6)

    @property
    def takes_pct(self) -> float:
        """The shares of all its GPUs together."""
        return self.share_pct * self.together


Costs = Mapping[str, Mapping[str, ModelOnGpu]]
"""What each model costs, by name and GPU type."""
Carries = Callable[[ModelSpec, StepCost, int], tuple[float, int]]
"""How many requests per second steps of a cost carry with memory for so many tokens, and with how many sequences."""


class GeneratingHost(NamedTuple):
    """What steps cost on a gpu-let, the tokens it has memory for, and the requests per second that are planned for
    it."""

    steps: StepCost
    kv_tokens: int
    rate_rps: float


Serves = Callable[[ModelSpec, Sequence[GeneratingHost]], float]
"""Which part of a model's rate such gpu-lets serve in time together."""


@dataclass(frozen=True)
class GeneratingPlan:
    """The gpu-lets of models that generate, the requests per second in time that are expected, why a model has less
    than it asks for, and in words what was decided."""

    gpulets: tuple[Gpulet, ...] = ()
    goodput_rps: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bought: tuple[Gpu, ...] = ()
    overcommits: bool = False  # shares of a GPU add up to more than 100 % on purpose

    def and_then(self, other: GeneratingPlan) -> GeneratingPlan:
        """Return both as one; what the other says of a model counts."""
        return GeneratingPlan(
            (*self.gpulets, *other.gpulets),
            {**self.goodput_rps, **other.goodput_rps},
            {**{name: why for name, why in self.reasons.items() if name not in other.goodput_rps}, **other.reasons},
            (*self.notes, *other.notes),
            (*self.bought, *other.bought),
            self.overcommits or other.overcommits,
        )

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that they take."""
        return tuple(dict.fromkeys(gpu for gpulet in self.gpulets for gpu in gpulet.gpus))


def generating_problems(specs: Sequence[ModelSpec], cluster: Cluster, profiles: Profiles) -> list[Problem]:
    """Return what keeps models that generate from being planned on the cluster."""
    problems = []
    for spec in specs:
        where = f"models.{spec.name}"
        if spec.generates is not None and None in (spec.generates.prompt_tokens, spec.generates.output_tokens):
            rule = "has no lengths, and its arrivals come from no trace that has them"
            problems.append(Problem(f"{where}.generates", spec.name, rule, "Give `prompt_tokens` and `output_tokens`."))
        for kind in cluster.gpu_types:
            try:
                profile = profile_of(spec, kind, profiles)
            except InvalidInputError:
                continue  # no profile on a type: `check_inputs` says so where there is none at all
            if profile.generation is None:
                rule, cure = "its profile has no `generation`", "Name another row as `profile`, or measure its steps."
            elif profile.weights_mib is None and not (profile.generation.kv_tokens or _most_tokens(spec)):
                rule, cure = "its profile does not tell its memory", "Give its `generation` the key `kv_tokens`."
            else:
                continue
            problems.append(Problem(f"{where}.profile", f"{spec.profile_row} on {kind}", rule, cure))
    return problems


def shares_of(workload: Workload) -> Sequence[int]:
    """Return the shares that gpu-lets may have."""
    return WHOLE if workload.mps == "off" else SHARES


def with_lengths(spec: ModelSpec) -> ModelSpec:
    """Return the spec with lengths in place of those that it leaves to its arrivals.

    Raises:
        InvalidInputError: the trace cannot be read.
    """
    generates = spec.generates
    if generates is None:
        return spec
    names = ("prompt_tokens", "output_tokens")
    traced = dict(zip(names, usual_lengths(spec.name, spec.arrival), strict=True))
    lengths = {
        name: Lengths(quantiles=quantiles_of(tokens))
        for name, tokens in traced.items()
        if tokens is not None and getattr(generates, name) is None
    }
    return spec.model_copy(update={"generates": generates.model_copy(update=lengths)})


def carried(spec: ModelSpec, cost: StepCost, kv_tokens: int) -> tuple[float, int]:
    """Return how many requests per second steps of this cost carry within the SLO, and with how many sequences."""
    generates, slo, prompt, output = _asked_of(spec)
    room = min(generates.max_sequences, generates.max_batch_tokens - 1, int(kv_tokens / (prompt + output)))
    possible: list[tuple[float, int]] = []
    most_rps, sequences = 0.0, 1
    while sequences <= room:
        step_ms, _, _ = _step_ms(cost, sequences, prompt, output, generates.max_batch_tokens)
        rate = 1000.0 * sequences / (output * step_ms)
        most_rps = max(most_rps, rate)
        many = math.ceil(sequences + SPREADS * math.sqrt(sequences))
        if many <= room:
            worst_ms, longest, chunks = _step_ms(cost, many, prompt, output, generates.max_batch_tokens)
            if worst_ms <= slo.tpot_ms and (1 + chunks) * longest <= slo.ttft_ms:
                possible.append((rate, sequences))
        sequences += max(1, sequences // 16)  # derived: steps of a sixteenth, finer than `RATE_STEP`
    spared = max((each for each in possible if each[0] <= BUSY_PART * most_rps), default=(0.0, 0))
    return max(spared, _carried_by_few(cost, room, generates, slo, prompt, output)) if room > 0 else spared


def carried_by(spec: ModelSpec, replica: Replica, carries: Carries = carried) -> float:
    """Return how many requests per second a replica carries of its model, as `carries` judges: infinite where the
    lengths of requests are not known, 0 where it does not generate."""
    if spec.generates is None or replica.steps is None:
        return 0.0
    if spec.generates.prompt_tokens is None or spec.generates.output_tokens is None:
        return math.inf
    rate_rps, _ = carries(spec, replica.steps, replica.kv_tokens or sys.maxsize)
    # The closed form stands in for the trials of the policy that planned it.
    return rate_rps * (replica.tried if carries is carried else 1.0)


def with_planned_rates(gpulets: Sequence[Gpulet], specs: Iterable[ModelSpec]) -> tuple[Gpulet, ...]:
    """Return gpu-lets of which those that generate have as much of their model's rate as they carry of it. Dispatchers
    send by planned rates, also to gpu-lets that were planned for what others left, or for nothing."""
    known = {spec.name: spec for spec in specs if spec.generates is not None}
    carried_rps: dict[tuple[object, ...], float] = {}  # of alike replicas once
    rooms_rps, together_rps = dict[str, float](), dict.fromkeys(known, 0.0)
    for gpulet in gpulets:
        for replica in gpulet.models[:1]:  # a gpu-let that generates has one model
            if replica.name in known:
                key = replica.name, replica.steps, replica.kv_tokens, replica.tried
                if key not in carried_rps:
                    carried_rps[key] = carried_by(known[replica.name], replica)
                rooms_rps[gpulet.id] = carried_rps[key]
                together_rps[replica.name] += carried_rps[key]
    shared = []
    for gpulet in gpulets:
        name = gpulet.models[0].name if gpulet.models else ""
        if 0.0 < together_rps.get(name, 0.0) < math.inf:
            part = min(1.0, known[name].rate_rps / together_rps[name])
            replica = gpulet.models[0].model_copy(update={"rate_rps": round(part * rooms_rps[gpulet.id], 6)})
            gpulet = gpulet.model_copy(update={"models": (replica,)})
        shared.append(gpulet)
    return tuple(shared)


def _carried_by_few(
    cost: StepCost, room: int, generates: Generates, slo: TokenSlo, prompt: int, output: float
) -> tuple[float, int]:
    """Return the same where at most `room` sequences decode at once, and requests that come meanwhile wait.

    The wait for one of them to end is that of M/M/n (Erlang 1917): longer than t for C(n, a) · exp(-(n - a) · t / s) of
    the requests, with a sequences busy in the mean, each for s.
    """
    step_ms, longest, chunks = _step_ms(cost, room, prompt, output, generates.max_batch_tokens)
    patience_ms, each_ms = slo.ttft_ms - (1 + chunks) * longest, output * step_ms
    if step_ms > slo.tpot_ms or patience_ms < 0.0:
        return 0.0, 0
    busy = BUSY_PART * room
    while _waiting_part(room, busy) * math.exp(-(room - busy) * patience_ms / each_ms) > LATE_PART:
        busy *= 0.95  # derived: steps finer than `RATE_STEP`
    return 1000.0 * busy / each_ms, max(1, round(busy))


def _waiting_part(servers: int, busy: float) -> float:
    """Return Erlang's C: the part of arrivals that find all servers busy, of which `busy` are in the mean."""
    lost = 1.0
    for count in range(1, servers + 1):
        lost = busy * lost / (count + busy * lost)
    return lost / (1.0 - busy / servers * (1.0 - lost))


def carries_alone(spec: ModelSpec, cost: StepCost, kv_tokens: int) -> tuple[float, int]:
    """Return the same for one sequence at a time, of mean lengths, which no other delays."""
    generates, slo, prompt, output = _asked_of(spec)
    step_ms, longest, chunks = _step_ms(cost, 1, prompt, output, generates.max_batch_tokens)
    is_kept = step_ms <= slo.tpot_ms and chunks * longest <= slo.ttft_ms and prompt + output <= kv_tokens
    return (1000.0 / (output * step_ms), 1) if is_kept else (0.0, 0)


def _asked_of(spec: ModelSpec) -> tuple[Generates, TokenSlo, int, float]:
    """Return how a model generates, its SLO, and its mean lengths in tokens."""
    generates, slo = spec.generates, spec.slo
    if generates is None or generates.prompt_tokens is None or generates.output_tokens is None or slo is None:
        raise ValueError(f"{spec.name} does not generate, or its lengths are not known.")
    return generates, slo, round(generates.prompt_tokens.mean), max(1.0, generates.output_tokens.mean)


def _step_ms(cost: StepCost, sequences: int, prompt: int, output: float, tokens: int) -> tuple[float, float, int]:
    """Return the mean time of a step, the time of one that reads a prompt, and in how many such steps it is read."""
    chunks = math.ceil(prompt / (tokens - sequences))
    context = sequences * (prompt + output / 2.0)
    decoding = cost.ms(sequences=sequences, context_tokens=context)
    longest = cost.ms(min(prompt, tokens - sequences), sequences, context, pairs_of(prompt, 0) / chunks)
    return decoding + sequences / output * chunks * (longest - decoding), longest, chunks


def too_long(specs: Iterable[ModelSpec], gpulets: Iterable[Gpulet]) -> list[str]:
    """Return a line for each model some of whose requests have more tokens than any of its gpu-lets takes."""
    most: dict[str, int] = {}
    for replica in (replica for gpulet in gpulets for replica in gpulet.models):
        if replica.kv_tokens is not None:
            takes = min(replica.kv_tokens, replica.longest_context or replica.kv_tokens)
            most[replica.name] = max(most.get(replica.name, 0), takes)
    lines = []
    for spec in (with_lengths(spec) for spec in specs if spec.name in most):
        if spec.generates is not None and spec.generates.prompt_tokens and spec.generates.output_tokens:
            draws, takes = np.random.default_rng(0), most[spec.name]
            prompts, outputs = (
                lengths.draw(_DRAWN, draws) for lengths in (spec.generates.prompt_tokens, spec.generates.output_tokens)
            )
            part = float((prompts + outputs > takes).mean())
            if part:
                lines.append(f"{spec.name}: {100 * part:.2g} % of its requests have more than {takes} tokens: refused")
    return lines


@dataclass(frozen=True)
class PlacedShare:
    """A share for a model, and the GPUs of one node that it is a share of."""

    option: ShareCapacity
    gpus: tuple[Gpu, ...]


def plan_of(
    specs: Sequence[ModelSpec],
    laid: Sequence[PlacedShare],
    profiles: Profiles,
    serves: Serves | None = None,
    memory: Mapping[str, float] | None = None,
) -> GeneratingPlan:
    """Return gpu-lets as they are laid on GPUs. `memory` is by GPU the part of its memory that they get, if not all of
    it. `serves` says what a model has in time that asks for more than its gpu-lets carry, each by itself."""
    together = {spec.name: 0.0 for spec in specs}
    hosts: dict[str, list[GeneratingHost]] = {spec.name: [] for spec in specs}
    for option in (each.option for each in laid):
        together[option.spec.name] += option.rate_rps
        hosts[option.spec.name].append(GeneratingHost(option.steps, option.kv_tokens, option.rate_rps))
    for spec in specs:
        if serves is not None and hosts[spec.name] and together[spec.name] < spec.rate_rps * (1.0 - 1e-6):
            served = serves(spec, hosts[spec.name]) * spec.rate_rps
            together[spec.name] = max(together[spec.name], served)
    goodput = {spec.name: round(min(spec.rate_rps, together[spec.name]), 6) for spec in specs}
    reasons = {
        spec.name: f"{goodput[spec.name]:.4g} of {spec.rate_rps:g} rps expected in time; more requests would be late"
        for spec in specs
        if together[spec.name] < spec.rate_rps * (1.0 - 1e-6)
    }
    return GeneratingPlan(with_planned_rates(gpulets_of(laid, profiles, memory or {}), specs), goodput, reasons)


def options_of(
    spec: ModelSpec,
    gpu: Gpu,
    profiles: Profiles,
    carries: Carries,
    most_together: int = 1,
    shares: Sequence[int] = SHARES,
) -> list[ShareCapacity]:
    """Return what the model carries on each share of a GPU, with the memory in proportion; without those that carry
    nothing. So also of several GPUs of a node, up to `most_together`, where they carry `WORTH_TOGETHER` times as much
    for each GPU as fewer do, or these nothing."""
    try:
        profile = profile_of(spec, gpu.type, profiles)
    except InvalidInputError:
        return []
    generation = profile.generation
    if generation is None:
        return []
    options: list[ShareCapacity] = []
    best = 0.0
    for together in sorted({at.tensor_parallel for at in generation.steps}):
        if together > most_together:
            break
        more = _options_on(spec, gpu, profiles, carries, together, shares)
        each = max((option.rate_rps / option.takes_pct for option in more), default=0.0)
        if each < WORTH_TOGETHER * best:
            break
        options, best = options + more, each
    return options


def _options_on(
    spec: ModelSpec, gpu: Gpu, profiles: Profiles, carries: Carries, together: int, shares: Sequence[int]
) -> list[ShareCapacity]:
    """Return the same of so many GPUs together."""
    profile = profile_of(spec, gpu.type, profiles)
    generation = profile.generation
    if generation is None:
        return []
    weights_mib, kv_bytes = profile.weights_mib, generation.kv_bytes_per_token
    known = [at.share_pct for at in generation.steps if at.tensor_parallel == together]
    if weights_mib is None or kv_bytes is None:
        if 100 not in known or together > 1:
            return []
        cost, kv_tokens = generation.cost(100.0), generation.kv_tokens or _most_tokens(spec)
        rate, sequences = carries(spec, cost, kv_tokens) if kv_tokens else (0.0, 0)
        whole = ShareCapacity(spec, 100.0, rate, sequences, generation, cost, kv_tokens, None)
        return [whole] if rate > 0 else []
    options = []
    for share in shares:
        if min(known) <= share <= max(known):
            on_each = weights_mib / together
            kv_tokens = int((room_mib(gpu, share / 100.0, profiles) - on_each) * together * 2**20 / kv_bytes)
            cost = generation.cost(share, together)
            rate, sequences = carries(spec, cost, kv_tokens) if kv_tokens > 0 else (0.0, 0)
            if rate > 0:
                options.append(
                    ShareCapacity(spec, share, rate, sequences, generation, cost, kv_tokens, on_each, together)
                )
    return options


def _most_tokens(spec: ModelSpec) -> int:
    """Return the tokens of as many of the longest requests as run at once; 0 where no length is the longest."""
    generates = spec.generates
    if generates is None or generates.prompt_tokens is None or generates.output_tokens is None:
        return 0
    each = generates.prompt_tokens.most + generates.output_tokens.most
    return 0 if math.isinf(each) else math.ceil(each / BLOCK_TOKENS) * BLOCK_TOKENS * generates.max_sequences


def room_mib(gpu: Gpu, part: float, profiles: Profiles) -> float:
    """Return the memory in MiB that a process may use that has such a part of a GPU's."""
    return _MEMORY_PART * part * (gpu.memory_mib or 0.0) - context_mib_of(gpu.type, profiles)


def gpulets_of(laid: Sequence[PlacedShare], profiles: Profiles, memory: Mapping[str, float]) -> list[Gpulet]:
    """Return the gpu-lets, each planned for all that its share carries. Those on a GPU get its memory, or such a part
    of it, in proportion to their shares. Their ids are numbered."""
    taken: dict[str, float] = {}
    for each in laid:
        for gpu in each.gpus:
            taken[gpu.id] = taken.get(gpu.id, 0.0) + each.option.share_pct
    gpulets: list[Gpulet] = []
    for number, each in enumerate(laid):
        option, (first, *others) = each.option, each.gpus
        part = min(memory.get(gpu.id, 1.0) * option.share_pct / taken[gpu.id] for gpu in each.gpus)
        spec, kv_tokens, used_mib = option.spec, option.kv_tokens, None
        if option.weights_mib is not None:
            kv_tokens = option.tokens_in(room_mib(first, part, profiles))
            if spec.generates is not None and (longest := option.generation.longest_context) is not None:
                # More than as many of the longest sequences as run at once would lie idle.
                blocks = math.ceil(longest / BLOCK_TOKENS) * spec.generates.max_sequences
                kv_tokens = min(kv_tokens, blocks * BLOCK_TOKENS)
            if first.type == "cpu" and (most := _most_tokens(spec)):  # everything else on the machine has this memory
                kv_tokens = min(kv_tokens, max(most, option.generation.longest_context or 0))
            used_mib = round(option.weights_mib + kv_tokens * option.mib_per_token, 3)
        replica = Replica(
            name=spec.name,
            batch_size=1 if spec.generates is None else spec.generates.max_sequences,
            rate_rps=round(option.rate_rps, 6),
            memory_mib=used_mib,
            weights_mib=option.weights_mib,
            steps=option.steps,
            kv_tokens=max(1, kv_tokens),
            block_tokens=option.generation.block_tokens,
            longest_context=option.generation.longest_context,
            decided_ahead=option.generation.decided_ahead,
            tried=option.tried,
        )
        gpulets.append(
            Gpulet(
                id=f"generating-{number}",
                gpu=first.id,
                also_on=tuple(other.id for other in others),
                share_pct=None if option.share_pct == 100 else float(option.share_pct),
                memory_mib=None if used_mib is None else round(part * (first.memory_mib or 0.0), 3),
                models=(replica,),
            )
        )
    return gpulets


def in_proportion(gpulet: Gpulet, gpu: Gpu, profiles: Profiles) -> Gpulet:
    """Return a gpu-let with no larger part of its GPU's memory than its share, where it generates. What it carries was
    judged with that much, and others have room beside it."""
    part, (replica, *others) = gpulet.effective_share_pct / 100.0, gpulet.models
    room, weights_mib, held_mib = room_mib(gpu, part, profiles), replica.weights_mib, replica.memory_mib
    if others or replica.kv_tokens is None or weights_mib is None or held_mib is None or held_mib <= room:
        return gpulet
    kv_tokens = int((room - weights_mib) * replica.kv_tokens / (held_mib - weights_mib))
    used_mib = weights_mib + kv_tokens * (held_mib - weights_mib) / replica.kv_tokens
    less = replica.model_copy(update={"kv_tokens": kv_tokens, "memory_mib": round(used_mib, 3)})
    return gpulet.model_copy(update={"memory_mib": round(part * (gpu.memory_mib or 0.0), 3), "models": (less,)})
