"""MuxServe's placement as a policy: its units become gpu-lets on the plan's schema.

A unit's models lie on all of its GPUs, each with the share of its decoding steps and its part of the memory. What the
schema cannot say stands in the plan's notes: MuxServe runs prefills in processes with shares of their own, and moves
memory between the models of a unit while they run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tenuto.errors import MissingProfileError, refused
from tenuto.options import option
from tenuto.placement import Cluster, ModelSpec, Plan, Policy, Workload
from tenuto.placement.cluster import Gpu, node_of
from tenuto.placement.generation_capacity import GeneratingPlan
from tenuto.placement.policy import Abilities
from tenuto.placement.program import Gpulet, Replica
from tenuto.placement.workload import profile_of
from tenuto.profiles import Generation, Profiles, StepCost
from tenuto_lab.generation.muxserve import RUNTIME_MIB, SPLITS, LanguageModel, Mesh, place, served_rps


@dataclass(frozen=True)
class ProfileTimes:
    """Step times of a model on so many GPUs, from its profile."""

    generation: Generation
    gpus: int

    @cached_property
    def _costs(self) -> dict[float, StepCost]:
        return {}

    def _on(self, share_pct: float) -> StepCost:
        if share_pct not in self._costs:
            self._costs[share_pct] = self.generation.cost(share_pct, self.gpus)
        return self._costs[share_pct]

    def prefill_ms(self, tokens: float, share_pct: float) -> float:
        """Return how long a prefill of prompts with so many tokens together takes."""
        return self._on(share_pct).ms(prompt_tokens=max(1, round(tokens)))

    def decode_ms(self, batch: float, context_tokens: float, share_pct: float) -> float:
        """Return how long one step of `batch` sequences takes that have so many tokens of context together."""
        return self._on(share_pct).ms(sequences=max(1, round(batch)), context_tokens=context_tokens)


@dataclass(kw_only=True, eq=False)
class MuxServe(Policy):
    """MuxServe's greedy search over units of 1, 2, 4 and 8 GPUs.

    Options:
        prefill_share_pct: the share of prefills in the estimate of a unit's throughput.
    """

    name = "muxserve"
    summary = "units of 1 to 8 GPUs for models that generate, by a greedy search over the estimated throughput"
    source = "MuxServe (Duan et al., ICML 2024, arXiv 2404.02015), algorithms 1 and 2, equation 3"
    readings = "memory of a unit is split by rate and size of keys and values; SLOs play no part in it"

    abilities = Abilities(generation="alone")

    prefill_share_pct: float = option(100.0, above=0, maximum=100)

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Refuse models of fixed cost; `place_generating` plans the others.

        Raises:
            InvalidInputError: always.
        """
        del cluster, profiles
        names = ", ".join(spec.name for spec in workload.models)
        raise refused("models", names, "policy muxserve plans only models that generate", "Use --policy tenuto.")

    def place_generating(self, specs: Sequence[ModelSpec], cluster: Cluster, profiles: Profiles) -> GeneratingPlan:
        """Return the gpu-lets of the units that algorithm 1 finds, and what equation 3 says that they serve.

        Raises:
            InvalidInputError: the cluster is not of nodes with 1, 2, 4 or 8 equal GPUs, or a profile tells no memory.
        """
        per_node = Counter(node_of(gpu.id) for gpu in cluster.gpus)
        sizes, kinds = set(per_node.values()), set(cluster.gpu_types)
        if len(sizes) > 1 or len(kinds) > 1 or not sizes <= SPLITS.keys():
            shown = ", ".join(f"{node}: {count}" for node, count in per_node.items())
            rule = "muxserve cuts nodes that all have 1, 2, 4 or 8 GPUs of one type"
            raise refused("--gpus", shown, rule, "Give such nodes, or use --policy tenuto.")
        (each,), gpu = sizes, cluster.gpus[0]
        models = [_model(spec, gpu, profiles, self.prefill_share_pct) for spec in specs]
        least = min(model.weights_mib for model in models)
        models = [_scaled(model, least) for model in models]
        meshes = place(models, len(per_node), each, gpu.memory_mib)
        if not meshes:
            why = "the models do not all fit into any cut of the nodes"
            return GeneratingPlan(reasons={spec.name: why for spec in specs})
        return _plan(meshes, {spec.name: spec for spec in specs}, cluster, profiles)


def _model(spec: ModelSpec, gpu: Gpu, profiles: Profiles, prefill_share_pct: float) -> LanguageModel:
    profile = profile_of(spec, gpu.type, profiles)
    generation, generates = profile.generation, spec.generates
    if generation is None or profile.weights_mib is None or generation.kv_bytes_per_token is None:
        rule = "muxserve needs the weights and the memory of a token"
        raise refused(f"models.{spec.name}.profile", spec.profile_row, rule, "Use a profile such as muxserve-a100.")
    if generates is None or generates.prompt_tokens is None or generates.output_tokens is None:
        raise MissingProfileError(f"{spec.name} does not generate, or its lengths are not known.")
    counts = sorted({at.tensor_parallel for at in generation.steps})
    return LanguageModel(
        name=spec.name,
        rate_rps=spec.rate_rps,
        prompt_tokens=generates.prompt_tokens.mean,
        output_tokens=generates.output_tokens.mean,
        weights_mib=profile.weights_mib,
        kv_mib_per_token=generation.kv_bytes_per_token / 2**20,
        scale=1.0,
        times={count: ProfileTimes(generation, count) for count in counts},
        prefill_share=prefill_share_pct,
    )


def _scaled(model: LanguageModel, least_mib: float) -> LanguageModel:
    """Return a model with its size relative to the smallest one."""
    return replace(model, scale=model.weights_mib / least_mib)


def _plan(meshes: Sequence[Mesh], specs: dict[str, ModelSpec], cluster: Cluster, profiles: Profiles) -> GeneratingPlan:
    free: dict[str, list[Gpu]] = {}
    for gpu in cluster.gpus:
        free.setdefault(node_of(gpu.id), []).append(gpu)
    gpulets: list[Gpulet] = []
    goodput: dict[str, float] = {}
    overcommits = False
    for mesh in sorted(meshes, key=lambda mesh: -mesh.gpus):
        there = next(gpus for gpus in free.values() if len(gpus) >= mesh.gpus)
        mine, there[: mesh.gpus] = there[: mesh.gpus], []
        overcommits = overcommits or sum(share for _, share in mesh.models) > 100.0
        for (model, share), requests, rate in zip(mesh.models, mesh.requests, served_rps(mesh), strict=True):
            spec = specs[model.name]
            generation = profile_of(spec, mine[0].type, profiles).generation
            if generation is None or spec.generates is None:
                continue
            kv_tokens = max(1, int(requests * (model.prompt_tokens + model.output_tokens)))
            held_mib = (model.weights_mib + kv_tokens * model.kv_mib_per_token) / mesh.gpus
            goodput[model.name] = round(rate, 6)
            replica = Replica(
                name=model.name,
                batch_size=spec.generates.max_sequences,
                rate_rps=model.rate_rps,
                memory_mib=round(held_mib, 3),
                weights_mib=round(model.weights_mib / mesh.gpus, 3),
                steps=generation.cost(share, mesh.gpus),
                kv_tokens=kv_tokens,
                block_tokens=generation.block_tokens,
                longest_context=generation.longest_context,
                decided_ahead=generation.decided_ahead,
            )
            gpulets.append(
                Gpulet(
                    id=f"generating-{len(gpulets)}",
                    gpu=mine[0].id,
                    also_on=tuple(gpu.id for gpu in mine[1:]),
                    share_pct=float(share),
                    memory_mib=round(held_mib + RUNTIME_MIB, 3),
                    models=(replica,),
                )
            )
    notes = [
        "shares are those of decoding steps; MuxServe runs prefills with shares of their own, which plans do not have:"
        " here a prompt is read at the share of its model",
        "memory is split once; MuxServe moves blocks between the models of a unit by need",
    ]
    if overcommits:
        notes.append("shares exceed some GPUs by up to 20 %, as published; what that costs is not simulated")
    reasons = {
        name: f"equation 3 gives it {goodput[name]:.4g} of {specs[name].rate_rps:g} requests/s"
        for name in goodput
        if goodput[name] < specs[name].rate_rps * (1.0 - 1e-6)
    }
    return GeneratingPlan(tuple(gpulets), goodput, reasons, tuple(notes), overcommits=overcommits)
