"""Plans models of fixed cost: checks the inputs, has the policy decide, and completes its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tenuto.errors import InvalidInputError, Problem, raise_if_any
from tenuto.placement.cluster import MOST_ELASTIC_GPUS, Cluster
from tenuto.placement.costs import ModelOnGpu, context_mib_of, costs_of
from tenuto.placement.deadline_split import split_deadlines
from tenuto.placement.placement_constraints import place_problems
from tenuto.placement.plan import Plan, PlannedGpu, PolicyUsed
from tenuto.placement.planner.completion import complete
from tenuto.placement.planner.task import PlanTask
from tenuto.placement.rules import measured_otherwise, option_problems
from tenuto.placement.watch import INTERRUPTED
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import ModelProfile, Profiles


def plan_fixed_cost(task: PlanTask) -> Plan:
    """Return the completed and checked plan of a policy for models of fixed cost.

    Raises:
        InvalidInputError: the inputs contradict each other, or the plan breaks a rule; it lists all problems.
    """
    policy, workload = task.policy, task.workload
    if workload.applications:
        workload = split_deadlines(workload, task.cluster, task.profiles)
    impossible = _impossible(check_inputs(workload, task.cluster, task.profiles), task.profiles)
    possible = tuple(spec for spec in workload.models if spec.name not in impossible)
    plan = nothing_on(task.cluster)
    if not impossible and policy.abilities.splits_deadlines:
        plan = policy.place(task.workload, task.cluster, task.profiles)
        workload = workload.with_budgets(plan.applications) if plan.applications else workload
    elif possible:
        plan = policy.place(workload.model_copy(update={"models": possible}), task.cluster, task.profiles)
    unserved = {*plan.unserved, *impossible}
    notes = (INTERRUPTED,) if policy.watch.is_stopped() else ()
    plan = plan.model_copy(
        update={
            "notes": (*plan.notes, *notes),
            "unserved": tuple(spec.name for spec in workload.models if spec.name in unserved),
            "unserved_reasons": {**plan.unserved_reasons, **impossible},
        }
    )
    return complete(plan, replace(task, workload=workload))


def nothing_on(cluster: Cluster) -> Plan:
    """Return a plan in which nothing runs yet."""
    gpus = () if cluster.elastic else cluster.gpus
    planned = tuple(PlannedGpu.of(gpu) for gpu in gpus)
    return Plan(policy=PolicyUsed(name=""), gpus=planned)


def check_inputs(workload: Workload, cluster: Cluster, profiles: Profiles) -> Mapping[str, Mapping[str, ModelOnGpu]]:
    """Check the inputs, and return what the models cost, as `costs_of` does.

    Raises:
        InvalidInputError: a model has no profile, a model cannot run with its options, or an elastic cluster would grow
            beyond `MOST_ELASTIC_GPUS`.
    """
    on_cpu = {spec.name for spec in workload.models} if set(cluster.gpu_types) == {"cpu"} else set[str]()
    problems = option_problems(workload.models, workload.merge if isinstance(workload.merge, tuple) else (), on_cpu)
    least_gpus: list[tuple[float, int, float]] = []
    most_rps: dict[int, float] = {}
    costs = costs_of(workload, cluster, profiles)
    for index, spec in enumerate(workload.models):
        by_type = costs[spec.name]
        if not by_type:
            missing = [problem for kind in cluster.gpu_types for problem in _missing(spec, kind, profiles)]
            problems += [Problem(f"models.{index}.profile", p.value, p.rule, p.cure) for p in missing]
        if spec.generates is None and any(not on.profile.points and on.profile.line is None for on in by_type.values()):
            rule = "its profile has only steps of a model that generates"
            problems.append(Problem(f"models.{index}.profile", spec.profile_row, rule, "Give `generates` and `slo`."))
        rates = []
        for on in by_type.values():
            if id(on.profile) not in most_rps:
                most_rps[id(on.profile)] = _most_rps(on.profile)
            rates.append(most_rps[id(on.profile)])
        if rates and max(rates) > 0:
            least_gpus.append((spec.rate_rps / max(rates), index, spec.rate_rps))
    needed = sum(gpus for gpus, _, _ in least_gpus)
    if cluster.elastic and needed > MOST_ELASTIC_GPUS:
        gpus, index, rate = max(least_gpus)
        rule = (
            f"takes at least {gpus:,.0f} GPUs, all models together {needed:,.0f}; an elastic cluster grows to "
            f"{MOST_ELASTIC_GPUS:,} at most"
        )
        cure = "Lower it (rates are in requests per second), or plan a part of the load at a time."
        problems.append(Problem(f"models.{index}.rate_rps", rate, rule, cure))
    raise_if_any([*problems, *place_problems(workload, cluster)])

    def known(spec: ModelSpec, gpu_type: str) -> ModelProfile | None:
        on = costs[spec.name].get(gpu_type)
        return None if on is None else on.profile

    raise_if_any(measured_otherwise(workload.models, cluster.gpu_types, known))
    return costs


def _missing(spec: ModelSpec, kind: str, profiles: Profiles) -> tuple[Problem, ...]:
    try:
        profile_of(spec, kind, profiles)
    except InvalidInputError as error:
        return error.problems or (Problem("profiles", spec.name, str(error), "Give another profile."),)
    return ()


def _most_rps(model: ModelProfile) -> float:
    """Return an upper bound for the requests per second of a GPU full of this model's replicas.

    It is the best throughput of a measured batch, divided by the share of the batch.
    """
    if model.line is not None:
        return 1000.0 / model.line.alpha_ms if model.line.alpha_ms > 0 else float("inf")
    rates = (model.throughput_rps(p.batch_size, p.share_pct) * 100.0 / p.share_pct for p in model.points)
    return max(rates, default=0.0)


def _impossible(costs: Mapping[str, Mapping[str, ModelOnGpu]], profiles: Profiles) -> dict[str, str]:
    """Return the models that no GPU of the cluster can serve, whatever a policy does, with the reasons."""
    reasons = {}
    for name, by_type in costs.items():
        fastest = min(by_type.values(), key=lambda on: on.steps()[1])
        if fastest.steps()[1] > fastest.slo_ms * (1 + 1e-9):
            reasons[name] = (
                f"SLO below batch 1: a single request takes {fastest.steps()[1]:.4g} ms on a {fastest.gpu.type}, its "
                f"SLO is {fastest.slo_ms:g} ms"
            )
            continue
        room = {kind: on.gpu.memory_mib - context_mib_of(kind, profiles) for kind, on in by_type.items()}
        largest = max(by_type.values(), key=lambda on: room[on.gpu.type])
        need = min((p.memory_mib for p in largest.profile.points if p.memory_mib is not None), default=0.0)
        if all((on.memory_mib(1) or 0.0) > room[kind] for kind, on in by_type.items()):
            reasons[name] = (
                f"memory: it needs {need:.0f} MiB even with its smallest measured batch, and the context of its "
                f"process leaves {room[largest.gpu.type]:.0f} MiB of a {largest.gpu.type}"
            )
    return reasons
