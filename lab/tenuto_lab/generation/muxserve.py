"""MuxServe's placement of language models on GPUs (Duan et al., ICML 2024, arXiv 2404.02015, algorithms 1 and 2).

Each model gets a parallel candidate for each number of GPUs: the smallest share for its decoding steps, and the batch,
with which it serves its rate alone (algorithm 2). Nodes are cut into meshes of 1, 2, 4 and 8 GPUs in every way. For
each way, the model with the most computation comes first, and each goes to the mesh whose estimated throughput gains
most; the way with the highest throughput wins (algorithm 1). A unit's throughput is equation 3: a batch is answered
once in the time of every model's prefill and its own decoding steps, and no model serves more than its rate.

Details that the paper leaves open are those of the authors' experiment: shares of 30 to 90 % for decoding and of 80 to
100 % for prefill, which may exceed the GPU by 20 %; the memory beside the weights is split by rate and by the size of
keys and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from tenuto_lab.generation.step_times import Times

GPU_MIB = 80 * 1024
"""derived: an A100-80GB, the GPU of the experiment."""
RUNTIME_MIB = 7.6 * 1024
"""paper (its artefact): activations and two CUDA contexts of each model on each GPU."""
DECODE_SHARES = tuple(range(30, 100, 10))
"""paper: the shares of a decoding process."""
OVERSUBSCRIBED_PCT = 20.0
"""paper (its artefact): by how much the shares of a unit's decoding may exceed its GPUs."""
SPLITS = {
    8: (
        *((8,), (4, 4), (4, 2, 2), (4, 2, 1, 1), (4, 1, 1, 1, 1)),
        *((2, 2, 2, 2), (2, 2, 2, 1, 1), (2, 2, 1, 1, 1, 1), (2, 1, 1, 1, 1, 1, 1), (1,) * 8),
    ),
    4: ((4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)),
    2: ((2,), (1, 1)),
    1: ((1,),),
}
"""derived: the ways to cut a node's GPUs into meshes of powers of two."""


@dataclass(frozen=True)
class LanguageModel:
    """A model to place: its rate, mean lengths, memory, and step times by number of GPUs. `scale` is its size relative
    to the smallest, and `prefill_share` the share of its prefills in percent."""

    name: str
    rate_rps: float
    prompt_tokens: float
    output_tokens: float
    weights_mib: float
    kv_mib_per_token: float
    scale: float
    times: Mapping[int, Times] = field(hash=False)
    prefill_share: float = 100.0
    host_ms_per_sequence: float = 0.0

    @property
    def kv_mib(self) -> float:
        """The memory for keys and values of a request of mean length."""
        return self.kv_mib_per_token * (self.prompt_tokens + self.output_tokens)

    @property
    def computation(self) -> float:
        """The key by which models are sorted."""
        return self.rate_rps * self.scale

    def prefill_ms(self, gpus: int, batch: float) -> float:
        """Return how long a prefill of a batch of mean prompts takes."""
        return self.times[gpus].prefill_ms(batch * self.prompt_tokens, self.prefill_share)

    def decode_ms(self, gpus: int, share: float, batch: float) -> float:
        """Return how long one step of a batch takes whose outputs are half made."""
        context = batch * (self.prompt_tokens + self.output_tokens / 2)
        return self.times[gpus].decode_ms(batch, context, share) + self.host_ms_per_sequence * batch


@dataclass(frozen=True)
class Candidate:
    """What a model needs on so many GPUs: the share of its decoding steps, and their batch."""

    share: float
    batch: int


@dataclass(frozen=True)
class Mesh:
    """A unit: so many GPUs of a node, of so much memory each, and the models on them, each with the share of its
    decoding steps."""

    gpus: int
    models: tuple[tuple[LanguageModel, float], ...] = ()
    gpu_mib: float = GPU_MIB

    @property
    def kv_mib(self) -> float:
        """The memory that the weights and the processes leave, of all GPUs together."""
        taken = sum(model.weights_mib + RUNTIME_MIB * self.gpus for model, _ in self.models)
        return self.gpu_mib * self.gpus - taken

    @property
    def requests(self) -> tuple[int, ...]:
        """By model the requests of mean length that its part of the memory holds: it is split by rate and size of keys
        and values."""
        needs = sum(model.kv_mib * model.rate_rps for model, _ in self.models)
        return tuple(max(1, int(model.rate_rps * self.kv_mib / needs)) for model, _ in self.models)

    def with_model(self, model: LanguageModel, share: float) -> Mesh:
        """Return the mesh with one more model."""
        return replace(self, models=(*self.models, (model, share)))

    def is_possible(self) -> bool:
        """Return whether its shares and one request of each model fit."""
        shares = sum(share for _, share in self.models)
        return shares <= 100.0 + OVERSUBSCRIBED_PCT and self.kv_mib >= 2 * sum(m.kv_mib for m, _ in self.models)


@cache
def candidate(model: LanguageModel, gpus: int, gpu_mib: float = GPU_MIB) -> Candidate | None:
    """Return the smallest share, and with it the smallest batch, that serve the model's rate alone on so many GPUs; if
    none does, those that serve most. None: the model has no step times there, or no memory."""
    room = Mesh(gpus, ((model, 0.0),), gpu_mib).kv_mib
    if gpus not in model.times or room < 2 * model.kv_mib:
        return None
    most, best = 0.0, None
    largest = int(room / model.kv_mib)
    for share in DECODE_SHARES:
        for batch in _batches(largest):
            rate = (
                1000.0
                * batch
                / (model.prefill_ms(gpus, batch) + model.output_tokens * model.decode_ms(gpus, share, batch))
            )
            if rate >= model.rate_rps:
                return Candidate(share, batch)
            if rate > most:
                most, best = rate, Candidate(share, batch)
    return best


def throughput_rps(mesh: Mesh) -> float:
    """Return equation 3 for a unit, in requests/s."""
    return sum(served_rps(mesh))


@cache
def served_rps(mesh: Mesh) -> tuple[float, ...]:
    """Return by model the requests/s of equation 3: batches grow until each model serves its rate or its memory
    ends."""
    if not mesh.models:
        return ()
    limits, batches = mesh.requests, [1.0 for _ in mesh.models]
    best = tuple(0.0 for _ in mesh.models)
    while True:
        prefills = sum(m.prefill_ms(mesh.gpus, b) for (m, _), b in zip(mesh.models, batches, strict=True))
        rates = [
            1000.0 * b / (prefills + m.output_tokens * m.decode_ms(mesh.gpus, share, b))
            for (m, share), b in zip(mesh.models, batches, strict=True)
        ]
        served = tuple(min(r, m.rate_rps) for r, (m, _) in zip(rates, mesh.models, strict=True))
        best = max(best, served, key=sum)
        short = [
            (rate / model.rate_rps, i)
            for i, (rate, (model, _)) in enumerate(zip(rates, mesh.models, strict=True))
            if rate < model.rate_rps and batches[i] < limits[i]
        ]
        if not short:
            return best
        worst = min(short)[1]
        batches[worst] = min(limits[worst], batches[worst] + max(1.0, batches[worst] // 8))


def place(
    models: Sequence[LanguageModel], nodes: int, gpus_per_node: int, gpu_mib: float = GPU_MIB
) -> tuple[Mesh, ...]:
    """Return the units that algorithm 1 finds on nodes of equal GPUs; empty where the models do not fit.

    Raises:
        ValueError: nodes of another size than 1, 2, 4 or 8 GPUs.
    """
    if gpus_per_node not in SPLITS:
        raise ValueError(
            f"{gpus_per_node} GPUs per node: MuxServe cuts nodes of {', '.join(map(str, sorted(SPLITS)))}."
        )
    in_order = sorted(models, key=lambda model: (-model.computation, -model.scale, model.name))
    best = 0.0
    found: tuple[Mesh, ...] = ()
    for group in _groups(nodes, gpus_per_node, len(models)):
        placed = _placed(in_order, group, gpu_mib)
        if placed is not None and (total := sum(throughput_rps(mesh) for mesh in placed)) > best + 1e-9:
            best, found = total, placed
    return found


def _groups(nodes: int, gpus_per_node: int, most: int) -> Iterator[tuple[int, ...]]:
    seen = set()
    for ways in itertools.combinations_with_replacement(SPLITS[gpus_per_node], nodes):
        group = tuple(sorted(itertools.chain(*ways), reverse=True))
        if len(group) <= most and group not in seen:
            seen.add(group)
            yield group


def _placed(in_order: Sequence[LanguageModel], group: Sequence[int], gpu_mib: float) -> tuple[Mesh, ...] | None:
    meshes = [Mesh(gpus, (), gpu_mib) for gpus in group]
    for model in in_order:
        gains = []
        for i, mesh in enumerate(meshes):
            needs = candidate(model, mesh.gpus, gpu_mib)
            if needs is None:
                continue
            grown = mesh.with_model(model, needs.share)
            if grown.is_possible():
                gains.append((round(throughput_rps(grown) - throughput_rps(mesh), 6), -mesh.gpus, -i, grown))
        if not gains:
            return None
        _, _, at, grown = max(gains, key=lambda gain: gain[:3])
        meshes[-at] = grown
    return tuple(mesh for mesh in meshes if mesh.models)


def _batches(largest: int) -> Iterator[int]:
    batch = 1
    while batch < largest:
        yield batch
        batch += max(1, batch // 8)
    yield max(1, largest)
