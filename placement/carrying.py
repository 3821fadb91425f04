"""Where models that generate lie: gpu-lets of their own, each with a share, on GPUs apart from all other models.

A closed form says how many requests per second a gpu-let carries. While b sequences decode, a prompt is read every
(mean output / b) steps, so that a step takes in the mean

    T(b) = decode(b) + context + b / output * (what reading a prompt adds to a step),

and b / (output * T) requests are answered per second. When some more sequences than b decode, as arrivals have it, T
may not exceed the SLO's TPOT nor two of the longest steps its TTFT, and all have to fit into the memory beside the
weights. A policy may try the same in virtual time instead. What the models do to each other beside their shares is not
known: no interference between them is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.arrivals.arrival_processes import trace_tokens
from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.costs import ModelOnGpu, context_mib_of
from tenuto.placement.generates import Lengths
from tenuto.placement.program import Gpulet, Replica
from tenuto.placement.workload import ModelSpec, profile_of
from tenuto.profiles import Generation, Profiles, StepCost
from tenuto.profiles.generation import BLOCK_TOKENS, pairs_of
from tenuto.profiles.share_latency import EVERY_RULE

SPREADS = 4.0
"""fitted on 39 random models on shares, with the next: how many times the square root of b there may be more sequences.
Simulated at the rate that the closed form gives, 97 % of the requests are in time in the mean; with 3.3, 96 %."""
BUSY_PART = 0.75
"""fitted with the one before: the part of the highest rate that is planned; at 0.8, 95 % are in time in the mean."""
SHARES = (30, 40, 50, 60, 70, 80, 90, 100)
"""derived: tens of percent, from the smallest share with measured step times."""
_MEMORY_PART = 0.9
"""limit: the part of its memory that a gpu-let uses, as the ledger leaves a tenth for workspaces."""
_LEAST_LEFT = 10.0
"""limit: the smallest share that is left to other models; below it one of the measured GPUs has a handful of SMs."""
_QUANTILE = 5
"""limit: percent between two quantiles of the lengths in a trace."""
_CLOSE = 1.01
"""limit: how near the highest load that fits is found."""


@dataclass(frozen=True)
class Carrying:
    """A share of a GPU for a model: the requests per second that it carries with so many sequences, and its memory.

    A profile fitted to a log knows of memory only how many tokens a whole GPU held, or that they were never too many.
    Then there are no weights in MiB, and the share is a whole GPU.
    """

    spec: ModelSpec
    share_pct: float
    rate_rps: float
    sequences: int
    generation: Generation
    steps: StepCost
    kv_tokens: int
    weights_mib: float | None
    kv_mib: float


Costs = Mapping[str, Mapping[str, ModelOnGpu]]
"""What each model costs, by name and GPU type."""
Carries = Callable[[ModelSpec, StepCost, int], tuple[float, int]]
"""How many requests per second steps of a cost carry with memory for so many tokens, and with how many sequences."""


@dataclass(frozen=True)
class GeneratingPlan:
    """The gpu-lets of models that generate, the requests per second in time that are expected, why a model has less
    than it asks for, and in words what was decided."""

    gpulets: tuple[Gpulet, ...] = ()
    goodput_rps: Mapping[str, float] | None = None
    reasons: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that they take."""
        return tuple(dict.fromkeys(gpulet.gpu for gpulet in self.gpulets))


def generating_problems(specs: Sequence[ModelSpec], cluster: Cluster, profiles: Profiles) -> list[Problem]:
    """Return what keeps models that generate from being planned on the cluster."""
    problems = []
    for spec in specs:
        where = f"models.{spec.name}"
        if cluster.elastic:
            rule = "generates, and such models are not planned on an elastic cluster"
            problems.append(Problem(where, spec.name, rule, "Give the number of GPUs, such as --gpus a100-80gb:4."))
        for key in ("spread", "survive", "only_on", "keep_off", "prefer"):
            if getattr(spec, key):
                rule = f"`{key}` is not planned for models that generate"
                problems.append(Problem(f"{where}.{key}", getattr(spec, key), rule, f"Leave `{key}` out."))
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


def with_lengths(spec: ModelSpec) -> ModelSpec:
    """Return the spec with lengths in place of those that it leaves to the trace of its arrivals.

    Raises:
        InvalidInputError: the trace cannot be read.
    """
    generates = spec.generates
    if generates is None or spec.arrival.process != "trace":
        return spec
    names = ("prompt_tokens", "output_tokens")
    traced = dict(zip(names, trace_tokens(spec.name, spec.arrival), strict=True))
    found = {
        name: Lengths(quantiles={p: float(np.percentile(tokens, p)) for p in range(0, 101, _QUANTILE)})
        for name, tokens in traced.items()
        if tokens is not None and getattr(generates, name) is None
    }
    return spec.model_copy(update={"generates": generates.model_copy(update=found)})


def carried(spec: ModelSpec, cost: StepCost, kv_tokens: int) -> tuple[float, int]:
    """Return how many requests per second steps of this cost carry within the SLO, and with how many sequences."""
    generates, slo = spec.generates, spec.slo
    if generates is None or generates.prompt_tokens is None or generates.output_tokens is None or slo is None:
        raise ValueError(f"{spec.name} does not generate, or its lengths are not known.")
    prompt, output = round(generates.prompt_tokens.mean), max(1.0, generates.output_tokens.mean)
    room = min(generates.max_sequences, generates.max_batch_tokens - 1, int(kv_tokens / (prompt + output)))
    kept: list[tuple[float, int]] = []
    most_rps, sequences = 0.0, 1
    while sequences <= room:
        step_ms, _, _ = _step_ms(cost, sequences, prompt, output, generates.max_batch_tokens)
        rate = 1000.0 * sequences / (output * step_ms)
        most_rps = max(most_rps, rate)
        many = math.ceil(sequences + SPREADS * math.sqrt(sequences))
        if many <= room:
            worst_ms, longest, chunks = _step_ms(cost, many, prompt, output, generates.max_batch_tokens)
            if worst_ms <= slo.tpot_ms and (1 + chunks) * longest <= slo.ttft_ms:
                kept.append((rate, sequences))
        sequences += max(1, sequences // 16)
    return max((each for each in kept if each[0] <= BUSY_PART * most_rps), default=(0.0, 0))


def _step_ms(cost: StepCost, sequences: int, prompt: int, output: float, tokens: int) -> tuple[float, float, int]:
    """Return the mean time of a step, the time of one that reads a prompt, and in how many such steps it is read."""
    chunks = math.ceil(prompt / (tokens - sequences))
    context = sequences * (prompt + output / 2.0)
    decoding = cost.ms(sequences=sequences, context_tokens=context)
    longest = cost.ms(min(prompt, tokens - sequences), sequences, context, pairs_of(prompt, 0) / chunks)
    return decoding + sequences / output * chunks * (longest - decoding), longest, chunks


def place_generating(
    specs: Sequence[ModelSpec],
    cluster: Cluster,
    profiles: Profiles,
    *,
    most_gpus: int,
    fewest: bool,
    carries: Carries | None = None,
    leaves_memory: bool = False,
) -> GeneratingPlan:
    """Return gpu-lets for models that generate, on at most so many GPUs of the type that carries most of their load.

    With `fewest`, they take no more GPUs than their load asks for; otherwise what is left is headroom. `carries` judges
    a share in place of the closed form (`carried`). With `leaves_memory`, shares that are left have memory.
    """
    by_type = [[gpu for gpu in cluster.gpus if gpu.type == kind and gpu.instance is None] for kind in cluster.gpu_types]
    found = [
        _on_type(specs, gpus[:most_gpus], profiles, carries or carried, fewest=fewest, leaves_memory=leaves_memory)
        for gpus in by_type
        if gpus
    ]
    nothing = GeneratingPlan(reasons={spec.name: "no whole GPU is left for it" for spec in specs})
    return max(found, key=lambda each: each[0], default=(0.0, nothing))[1]


def _on_type(
    specs: Sequence[ModelSpec],
    gpus: Sequence[Gpu],
    profiles: Profiles,
    carries: Carries,
    *,
    fewest: bool,
    leaves_memory: bool,
) -> tuple[float, GeneratingPlan]:
    """Return how many times the load is carried, and the plan."""
    options = {spec.name: _options(spec, gpus[0], profiles, carries) for spec in specs}
    reasons = {name: _why_none(gpus[0]) for name, of in options.items() if not of}
    able = [spec for spec in specs if options[spec.name]]
    low, high = 1e-3, 1.0 if fewest else 1e3
    while able and not _units(able, options, low, len(gpus)):
        least = max(able, key=lambda spec: (-spec.priority, min(o.share_pct for o in options[spec.name])))
        able.remove(least)
        reasons[least.name] = "the GPUs have no room for it beside the other models that generate"
    if not able:
        return 0.0, GeneratingPlan(reasons=reasons)
    units = _units(able, options, low, len(gpus))
    if found := _units(able, options, high, len(gpus)):
        low, units = high, found
    while high / low > _CLOSE:
        times = math.sqrt(low * high)
        if found := _units(able, options, times, len(gpus)):
            low, units = times, found
        else:
            high = times
    goodput = {spec.name: round(min(1.0, low) * spec.rate_rps, 6) for spec in able}
    for spec in able if low < 1.0 else ():
        reasons[spec.name] = (
            f"{goodput[spec.name]:.4g} of {spec.rate_rps:g} rps expected in time; no GPU time is left for more"
        )
    numbers = count()
    gpulets = tuple(
        gpulet
        for gpu, unit in zip(gpus, units, strict=False)
        for gpulet in _gpulets(unit, gpu, profiles, min(1.0, 1.0 / low), numbers, leaves_memory=leaves_memory)
    )
    return low, GeneratingPlan(gpulets, goodput, reasons, tuple(_notes(units, options, low)))


def _options(spec: ModelSpec, gpu: Gpu, profiles: Profiles, carries: Carries) -> list[Carrying]:
    """Return what the model carries on each share of a GPU, with the memory in proportion; without those that carry
    nothing."""
    try:
        profile = profile_of(spec, gpu.type, profiles)
    except InvalidInputError:
        return []
    generation = profile.generation
    if generation is None or all(at.tensor_parallel != 1 for at in generation.steps):
        return []  # a gpu-let lies on one GPU
    weights_mib, kv_bytes = profile.weights_mib, generation.kv_bytes_per_token
    shares = [at.share_pct for at in generation.steps if at.tensor_parallel == 1]
    if weights_mib is None or kv_bytes is None:
        if 100 not in shares:
            return []
        cost, kv_tokens = generation.cost(100.0), generation.kv_tokens or _most_tokens(spec)
        rate, sequences = carries(spec, cost, kv_tokens) if kv_tokens else (0.0, 0)
        whole = Carrying(spec, 100.0, rate, sequences, generation, cost, kv_tokens, None, 0.0)
        return [whole] if rate > 0 else []
    found = []
    for share in SHARES:
        if min(shares) <= share <= max(shares):
            room_mib = _room_mib(gpu, share / 100.0, profiles) - weights_mib
            kv_tokens = int(room_mib * 2**20 / kv_bytes)
            cost = generation.cost(share)
            rate, sequences = carries(spec, cost, kv_tokens) if kv_tokens > 0 else (0.0, 0)
            if rate > 0:
                found.append(Carrying(spec, share, rate, sequences, generation, cost, kv_tokens, weights_mib, room_mib))
    return found


def _most_tokens(spec: ModelSpec) -> int:
    """Return the tokens of as many of the longest requests as run at once; 0 where no length is the longest."""
    generates = spec.generates
    if generates is None or generates.prompt_tokens is None or generates.output_tokens is None:
        return 0
    each = generates.prompt_tokens.most + generates.output_tokens.most
    return 0 if math.isinf(each) else math.ceil(each / BLOCK_TOKENS) * BLOCK_TOKENS * generates.max_sequences


def _room_mib(gpu: Gpu, part: float, profiles: Profiles) -> float:
    return _MEMORY_PART * part * (gpu.memory_mib or 0.0) - context_mib_of(gpu.type, profiles)


def _units(
    specs: Sequence[ModelSpec], options: Mapping[str, Sequence[Carrying]], times: float, most: int
) -> list[list[Carrying]]:
    """Return GPUs with what lies on them, so that so many times each rate is carried; none where it takes more than
    `most`. A model has as many whole GPUs as it fills and a share for the rest of its rate; the largest shares come
    first, each onto the first GPU that has it left."""
    wanted: list[Carrying] = []
    for spec in specs:
        largest = max(options[spec.name], key=lambda option: option.rate_rps)
        full = int(times * spec.rate_rps / largest.rate_rps)
        if full > most:
            return []
        rest = times * spec.rate_rps - full * largest.rate_rps
        enough = (option for option in options[spec.name] if option.rate_rps >= rest)
        wanted += [largest] * full + [min(enough, key=lambda option: option.share_pct)] * (rest > 1e-9)
    units: list[list[Carrying]] = []
    for option in sorted(wanted, key=lambda option: (-option.share_pct, option.spec.name)):
        for unit in units:
            if sum(other.share_pct for other in unit) + option.share_pct <= 100 and all(
                other.spec.name != option.spec.name for other in unit
            ):
                unit.append(option)
                break
        else:
            units.append([option])
    return units if len(units) <= most else []


def _gpulets(
    unit: Sequence[Carrying], gpu: Gpu, profiles: Profiles, part: float, numbers: count[int], *, leaves_memory: bool
) -> list[Gpulet]:
    """Return a GPU's gpu-lets. What shares leave of its memory they get too, in proportion; alone, a model gets all of
    the GPU's compute as well."""
    taken = 100.0 if leaves_memory else sum(option.share_pct for option in unit)
    found = []
    for option in unit:
        memory = option.share_pct / taken
        spec, kv_tokens, used_mib = option.spec, option.kv_tokens, None
        if option.weights_mib is not None:
            kv_mib = _room_mib(gpu, memory, profiles) - option.weights_mib
            mib_per_token = option.kv_mib / kv_tokens
            kv_tokens = int(kv_mib / mib_per_token)
            if spec.generates is not None and (longest := option.generation.longest_context) is not None:
                # More than as many of the longest sequences as run at once would lie idle.
                blocks = math.ceil(longest / BLOCK_TOKENS) * spec.generates.max_sequences
                kv_tokens = min(kv_tokens, blocks * BLOCK_TOKENS)
            used_mib = round(option.weights_mib + kv_tokens * mib_per_token, 3)
        replica = Replica(
            name=spec.name,
            batch_size=1 if spec.generates is None else spec.generates.max_sequences,
            rate_rps=round(option.rate_rps * part, 6),
            memory_mib=used_mib,
            weights_mib=option.weights_mib,
            steps=option.steps,
            kv_tokens=kv_tokens,
            block_tokens=option.generation.block_tokens,
            longest_context=option.generation.longest_context,
            decided_ahead=option.generation.decided_ahead,
        )
        share = None if option.share_pct == 100 else float(option.share_pct)
        cap = None if used_mib is None else round(memory * (gpu.memory_mib or 0.0), 3)
        name = f"generating-{next(numbers)}"
        found.append(Gpulet(id=name, gpu=gpu.id, share_pct=share, memory_mib=cap, models=(replica,)))
    return found


def beside(
    missing: Mapping[str, float], own: GeneratingPlan, cluster: Cluster, costs: Costs, profiles: Profiles
) -> tuple[Gpulet, ...]:
    """Return gpu-lets for models of fixed cost on the shares that models that generate leave: one on each such GPU, in
    which they take turns.

    A batch may take its part of the SLO when each of the models runs one and the request waits for one more.

    Args:
        missing: the requests per second that each model lacks.
        own: with memory left beside its gpu-lets.
        costs: of the models, by name and GPU type.
    """
    found: list[Gpulet] = []
    by_id = {gpu.id: gpu for gpu in cluster.gpus}
    for gpu_id in own.gpus:
        gpu = by_id[gpu_id]
        left = 100.0 - sum(gpulet.effective_share_pct for gpulet in own.gpulets if gpulet.gpu == gpu_id)
        if left < _LEAST_LEFT:
            continue
        room_mib = _room_mib(gpu, left / 100.0, profiles)
        replicas = []
        for name, rate in missing.items():
            on = costs[name].get(gpu.type)
            if on is None or not on.knows(left, EVERY_RULE):
                continue
            batch = on.batches_in_memory(room_mib, on.largest_batch(on.slo_ms / (1 + len(missing)), left))
            if batch > 0:
                room_mib -= on.memory_mib(batch) or 0.0
                replicas.append(Replica(name=name, batch_size=batch, rate_rps=rate))
        if replicas:
            cap = round(left / 100.0 * (gpu.memory_mib or 0.0), 3)
            name = f"beside-{len(found)}"
            found.append(Gpulet(id=name, gpu=gpu_id, share_pct=left, memory_mib=cap, models=tuple(replicas)))
    return tuple(found)


def _why_none(gpu: Gpu) -> str:
    return (
        f"no share of a {gpu.type} carries it: on one GPU its weights leave no memory for a request, or a step alone "
        f"takes longer than its SLO, or its profile has step times only for several GPUs together"
    )


def _notes(units: Sequence[Sequence[Carrying]], options: Mapping[str, Sequence[Carrying]], times: float) -> list[str]:
    """Say what the models that generate take, and why some share no GPU."""
    notes = [
        f"models that generate take {len(units)} of the GPUs, which carry {times:.3g} times their load; no interference"
        " between gpu-lets is counted for them"
    ]
    alone: dict[str, str] = {}
    for unit in units:
        if len(unit) == 1:
            name = unit[0].spec.name
            if unit[0].share_pct == 100:
                shares = [option.share_pct for option in options[name]]
                alone[name] = (
                    "its load fills a GPU" if min(shares) < 100 else "only a whole GPU keeps its SLO and memory"
                )
            else:
                left = 100 - unit[0].share_pct
                alone.setdefault(name, f"no other model that generates takes the {left:g} % that it leaves")
    return notes + [f"{name} shares no GPU: {why}" for name, why in sorted(alone.items())]
