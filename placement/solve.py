"""The one path from policy to plan: decide, complete, validate. Every policy's plan goes through here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from tenuto.errors import InvalidInputError, Problem, raise_if_any
from tenuto.placement.cluster import Cluster
from tenuto.placement.copy_times import copy_ms_per_request
from tenuto.placement.merging import apply_merging
from tenuto.placement.plan import Expected, ExpectedModel, Gpulet, Plan, PolicyUsed
from tenuto.placement.policy import Policy
from tenuto.placement.rules import measured_otherwise, option_problems
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import LatencyTable, LinearLatency, ModelProfile, Profiles

__all__ = ["MOST_ELASTIC_GPUS", "check_inputs", "check_plan", "complete", "latency_curve", "solve"]

MOST_ELASTIC_GPUS = 10_000  # a rate that takes more is a slip of the pen; policies would open GPUs for minutes


def solve(policy: Policy, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
    """Return the completed, validated plan of a policy.

    Raises:
        InvalidInputError: the inputs contradict each other, or the policy's plan breaks a rule; all problems at once.
    """
    check_inputs(workload, cluster, profiles)
    plan = complete(policy.place(workload, cluster, profiles), policy, workload, cluster, profiles)
    plan = apply_merging(plan, workload, profiles)
    check_plan(plan, cluster)
    return plan


def check_inputs(workload: Workload, cluster: Cluster, profiles: Profiles) -> None:
    """Raise `InvalidInputError` for models without a profile, SLOs that not even a batch of one can meet, options
    that they cannot be run with, and rates for which an elastic cluster would grow beyond `MOST_ELASTIC_GPUS`."""
    on_cpu = {spec.name for spec in workload.models} if set(cluster.gpu_types) == {"cpu"} else set[str]()
    problems = option_problems(workload.models, workload.merge if isinstance(workload.merge, tuple) else (), on_cpu)
    least_gpus: list[tuple[float, int, float]] = []
    sizes = {gpu.type: gpu.memory_mib for gpu in cluster.gpus}
    for index, spec in enumerate(workload.models):
        fastest, most_rps = float("inf"), 0.0
        missing: list[Problem] = []
        memory: list[tuple[float, float]] = []
        for gpu_type in cluster.gpu_types:
            try:
                model = profile_of(spec, gpu_type, profiles)
                largest_share = max(model.shares())
                fastest = min(fastest, model.latency_ms(1, largest_share))
                most_rps = max(most_rps, _most_rps(model))
            except InvalidInputError as error:
                missing += error.problems or (Problem("profiles", spec.name, str(error), "Give another profile."),)
                continue
            need = min((p.memory_mib for p in model.points if p.memory_mib is not None), default=0.0)
            memory.append((need, sizes[gpu_type]))
        if most_rps:
            least_gpus.append((spec.rate_rps / most_rps, index, spec.rate_rps))
        if fastest == float("inf"):
            problems += [Problem(f"models.{index}.profile", p.value, p.rule, p.cure) for p in missing]
        elif spec.slo_ms < fastest:
            problems.append(
                Problem(
                    f"models.{index}.slo_ms",
                    spec.slo_ms,
                    f"below the latency of a single request of '{spec.name}', {fastest:.4g} ms on the fastest GPU",
                    f"Give an SLO above {fastest:.4g} ms, better twice that, or a faster GPU type.",
                )
            )
        if memory and all(need > size for need, size in memory):
            need, size = min(memory, key=lambda pair: pair[0] - pair[1])
            problems.append(
                Problem(
                    f"models.{index}",
                    spec.name,
                    f"needs {need:.0f} MiB even with its smallest measured batch, "
                    f"more than the {size:.0f} MiB of the GPU",
                    "Use a GPU type with more memory, or profile smaller batches.",
                )
            )
    needed = sum(gpus for gpus, _, _ in least_gpus)
    if cluster.elastic and needed > MOST_ELASTIC_GPUS:
        gpus, index, rate = max(least_gpus)
        problems.append(
            Problem(
                f"models.{index}.rate_rps", rate,
                f"takes at least {gpus:,.0f} GPUs, all models together {needed:,.0f}; an elastic cluster grows to "
                f"{MOST_ELASTIC_GPUS:,} at most",
                "Lower it (rates are in requests per second), or plan a part of the load at a time.",
            )
        )
    raise_if_any(problems)

    def known(spec: ModelSpec, gpu_type: str) -> ModelProfile | None:
        with suppress(InvalidInputError):
            return profile_of(spec, gpu_type, profiles)
        return None

    raise_if_any(measured_otherwise(workload.models, cluster.gpu_types, known))


def _most_rps(model: ModelProfile) -> float:
    """Return what no GPU full of replicas of this model can exceed: the throughput of a measured batch, per share."""
    if model.line is not None:
        return 1000.0 / model.line.alpha_ms if model.line.alpha_ms > 0 else float("inf")
    rates = (model.throughput_rps(p.batch_size, p.share_pct) * 100.0 / p.share_pct for p in model.points)
    return max(rates, default=0.0)


def complete(plan: Plan, policy: Policy, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
    """Fill in what follows from the decision: GPUs used, latencies per replica, expected goodput, cost, the workload
    entries.

    What a policy states itself (latency with interference, planned rate, goodput) is kept.
    """
    used = {gpulet.gpu for gpulet in plan.gpulets}
    types = {gpu.id: gpu.type for gpu in cluster.gpus} | {gpu.id: gpu.type for gpu in plan.gpus}
    tables = {kind: _known(workload, kind, profiles) for kind in sorted({types[g] for g in used if g in types})}
    gpulets = tuple(
        _completed(gpulet, tables[types[gpulet.gpu]], with_copies=workload.streaming) if gpulet.gpu in types else gpulet
        for gpulet in plan.gpulets
    )
    expected = plan.expected
    if not expected.models:
        expected = _expected(gpulets, workload)
    prices = {gpu.type: gpu.price_per_hour for gpu in cluster.gpus}
    addresses = {gpu.id: gpu.address for gpu in cluster.gpus}
    gpus = tuple(gpu.model_copy(update={"address": gpu.address or addresses.get(gpu.id)}) for gpu in plan.gpus)
    costs = [prices.get(gpu.type) for gpu in plan.gpus if gpu.id in used]
    cost = None if None in costs else round(sum(c for c in costs if c is not None), 6)
    expected = expected.model_copy(update={"gpus_used": len(used), "cost_per_hour": cost})
    reasons = {name: plan.unserved_reasons.get(name, "the policy gave no reason") for name in plan.unserved}
    return plan.model_copy(
        update={
            "policy": PolicyUsed(name=getattr(policy, "name", type(policy).__name__), options=_plain_options(policy)),
            "gpus": gpus,
            "gpulets": gpulets,
            "expected": expected,
            "unserved_reasons": reasons,
            "models": workload.models,
            "applications": workload.applications,
            "mps": workload.mps,
            "streaming": workload.streaming,
            "objective": workload.objective,
        }
    )


def _known(workload: Workload, gpu_type: str, profiles: Profiles) -> dict[str, ModelProfile]:
    """Return the profiles of the models that were measured on a GPU type; others cannot have been placed there."""
    found = {}
    for spec in workload.models:
        with suppress(InvalidInputError):
            found[spec.name] = profile_of(spec, gpu_type, profiles)
    return found


def _plain_options(policy: Policy) -> dict[str, object]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in getattr(policy, "options", {}).items()}


def _completed(gpulet: Gpulet, profiles: Mapping[str, ModelProfile], *, with_copies: bool) -> Gpulet:
    replicas = []
    for replica in gpulet.models:
        model: ModelProfile | None = profiles.get(replica.name)
        if model is None:
            replicas.append(replica)
            continue
        latency = replica.latency or latency_curve(model, gpulet.effective_share_pct, replica.batch_size)
        update: dict[str, object] = {"latency": latency}
        if replica.latency_ms is None:
            update["latency_ms"] = round(latency.at(replica.batch_size) * replica.slowdown, 6)
        if replica.memory_mib is None:
            update["memory_mib"] = model.memory_mib(replica.batch_size, gpulet.effective_share_pct)
        if with_copies:
            into_ms, out_ms = copy_ms_per_request(model, replica.batch_size, gpulet.effective_share_pct)
            update |= {"copy_in_ms": into_ms, "copy_out_ms": out_ms}
        replicas.append(replica.model_copy(update=update))
    return gpulet.model_copy(update={"models": tuple(replicas)})


def latency_curve(model: ModelProfile, share_pct: float, batch_size: int) -> LatencyTable | LinearLatency:
    """Return l(b) up to the planned batch size, as short as the measured points allow."""
    latency = model.latency(share_pct)
    if isinstance(latency, LinearLatency):
        return latency
    points = {b: ms for b, ms in latency.points.items() if b < batch_size}
    points[batch_size] = latency.at(batch_size)
    return LatencyTable(points={b: round(ms, 6) for b, ms in points.items()})


def _expected(gpulets: tuple[Gpulet, ...], workload: Workload) -> Expected:
    models: dict[str, ExpectedModel] = {}
    for spec in workload.models:
        capacity, latency = 0.0, None
        for gpulet in gpulets:
            for replica in gpulet.models:
                if replica.name == spec.name and replica.latency_ms is not None:
                    full = 1000.0 * replica.batch_size / replica.latency_ms / len(gpulet.models)
                    capacity += replica.rate_rps if replica.rate_rps is not None else full
                    latency = max(latency or 0.0, replica.latency_ms)
        if latency is not None:
            models[spec.name] = ExpectedModel(goodput_rps=round(min(spec.rate_rps, capacity), 6), latency_ms=latency)
    return Expected(goodput_rps=round(sum(m.goodput_rps for m in models.values()), 6), models=models)


def check_plan(plan: Plan, cluster: Cluster) -> None:
    """Raise `InvalidInputError` when a plan breaks a rule that holds for every policy.

    Rules: ids are consistent; models exist; memory of the gpu-lets of a GPU fits; shares sum to at most 100 % unless
    the plan says that it over-commits; shares below 100 % need CUDA MPS; every model is served or listed as unserved.
    """
    plan.check_references()
    problems: list[Problem] = []
    memory = {gpu.type: gpu.memory_mib for gpu in cluster.gpus}
    known = {spec.name for spec in plan.models}
    by_gpu = plan.by_gpu()
    for gpu in plan.gpus:
        gpulets = by_gpu[gpu.id]
        share = sum(g.effective_share_pct for g in gpulets)
        if share > 100.0 + 1e-6 and not plan.overcommits:
            problems.append(Problem(f"gpus.{gpu.id}", share, "shares sum to more than 100 %", "Make the plan again."))
        need = sum(_need(gpulet) for gpulet in gpulets)
        if gpu.type in memory and need > memory[gpu.type] + 1e-6:
            problems.append(
                Problem(
                    f"gpus.{gpu.id}",
                    f"{need:.0f} MiB",
                    f"more memory than the GPU has ({memory[gpu.type]:.0f} MiB)",
                    "Use smaller batches, fewer models per GPU, or a larger GPU type.",
                )
            )
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    for gpulet in plan.gpulets:
        if plan.mps == "off" and gpulet.effective_share_pct < 100.0 and types[gpulet.gpu] != "cpu":
            problems.append(
                Problem(
                    f"gpulets.{gpulet.id}.share_pct",
                    gpulet.share_pct,
                    "a share needs CUDA MPS, which the workload turns off (mps: off)",
                    "Use mps: auto, or a policy without shares, such as ffd or symphony.",
                )
            )
        for replica in gpulet.models:
            if replica.name not in known:
                problems.append(
                    Problem(
                        f"gpulets.{gpulet.id}.models",
                        replica.name,
                        "not a model of the workload",
                        f"Known models: {', '.join(sorted(known))}.",
                    )
                )
    served = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
    for name in sorted(known - served - set(plan.unserved)):
        problems.append(
            Problem("unserved", name, "neither served nor listed as unserved", "This is a fault of the policy.")
        )
    raise_if_any(problems)


def _need(gpulet: Gpulet) -> float:
    """Return the memory a gpu-let needs in MiB: its cap, or what its programs are known to need."""
    if gpulet.memory_mib is not None:
        return gpulet.memory_mib
    return sum(program.memory_mib or 0.0 for program in gpulet.programs)
