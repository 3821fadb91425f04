"""What follows from a policy's decision: latencies beside the neighbours, memory, merged programs, the promise, and
what each loss leaves. Here are also the rules that hold for every plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

from tenuto.errors import Problem, one_of, raise_if_any
from tenuto.placement.cluster import Cluster, whole_of
from tenuto.placement.costs import ModelOnGpu, costs_of
from tenuto.placement.expectation.outlook import alike_key, expected_of
from tenuto.placement.expectation.sharing import Sharing
from tenuto.placement.ledger import unknown_memory, with_caps
from tenuto.placement.merging import apply_merging
from tenuto.placement.plan import Believed, Expected, Plan, PlannedGpu, PolicyUsed
from tenuto.placement.planner.fault_tolerance import Trial, not_surviving, with_losses
from tenuto.placement.planner.replica_placement import PlacementContext, arranged
from tenuto.placement.planner.task import PlanTask
from tenuto.placement.policy import Policy
from tenuto.placement.program import Gpulet
from tenuto.placement.rules import room_problems
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Profiles

# paper: Symphony's goodput, the 99th percentile within the SLO; the plan names every model that stays below
ATTAINED = 0.99
NEARLY = 0.97  # format: from this part of the rate on, the reason says "little GPU time left" instead of "none"
_SERVED_WITH = frozenset({"torch", "onnxruntime"})  # packages that execute models


def complete(
    plan: Plan, task: PlanTask, *, parts: Mapping[str, float] | None = None, at_most: int | None = None
) -> Plan:
    """Return the plan with everything that follows from the policy's decision, and check it.

    These follow: the latency on each share beside the neighbours, memory and its caps, merged programs, the expected
    goodput, the cost, and the workload's entries. The goodput that the policy itself states is kept as `believed`. With
    `parts`, all replicas stay, and at most `at_most` are added until the plan promises these parts (see `arranged`).
    By default that is so on an elastic cluster, with the parts that the task names.

    Raises:
        InvalidInputError: the plan breaks a rule; it lists all problems.
    """
    expected = plan.expected
    believed = Believed(goodput_rps=expected.goodput_rps, models=expected.models) if expected.models else None
    policy, workload, profiles = task.policy, task.workload, task.profiles
    cluster = task.cluster.cut_as(plan.gpus)
    known = {(gpu.id, gpu.type): gpu for gpu in cluster.gpus}
    gpus = tuple(PlannedGpu.of(known[key]) if (key := (gpu.id, gpu.type)) in known else gpu for gpu in plan.gpus)
    streaming = cluster.streams if workload.streaming is None else workload.streaming
    plan = plan.model_copy(
        update={
            "policy": policy_used(policy),
            "gpus": gpus,
            "believed": believed,
            "models": workload.models,
            "applications": workload.applications,
            "mps": workload.mps,
            "streaming": streaming,
            "objective": workload.objective,
        }
    )
    sharing = Sharing(costs_of(workload, cluster, profiles), profiles, streaming)
    attainment = None if policy.abilities.tries_plans else task.attainment
    scene = PlacementContext(workload, cluster, sharing, task.trial, traffic=task.traffic, attainment=attainment)
    tried = [alike_key(gpulet) for gpulet in plan.gpulets] if policy.abilities.tries_plans else None
    before = sharing.completed(plan)
    plan = arranged(before, scene, parts=parts, at_most=at_most)
    if parts is not None or (plan is not before and cluster.elastic):
        held = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
        without = tuple(spec.name for spec in workload.models if spec.name not in held)
        reasons = {name: plan.unserved_reasons.get(name, "no room was found for it") for name in without}
        plan = plan.model_copy(update={"unserved": without, "unserved_reasons": {**plan.unserved_reasons, **reasons}})
    plan = apply_merging(plan, workload, profiles, sharing.completed)
    plan = with_caps(plan, cluster, scene.contexts_mib)
    notes = list(plan.notes)
    unknown = unknown_memory(plan)
    if unknown:
        notes.append(f"memory was not measured, so that the ledger cannot tell whether they fit: {', '.join(unknown)}")
    notes += _measured_otherwise_than_here(plan, profiles)
    notes += _estimated(plan, sharing.costs, policy.compute_metric)
    follows = policy.abilities.objectives
    if plan.objective not in follows and (plan.objective == "each" or len({spec.weight for spec in plan.models}) > 1):
        notes.append(f"the policy plans by the objective '{follows[0]}'; '{plan.objective}' is for its scheduler alone")
    plan = plan.model_copy(update={"notes": tuple(notes)})
    plan = _with_expectation(plan, scene, tried)
    check_plan(plan, cluster)
    return plan


def complete_successor(
    plan: Plan, before: Plan, task: PlanTask, *, parts: Mapping[str, float], at_most: int | None
) -> Plan:
    """Return a plan that takes the place of another with everything that follows from it, see `complete`. Nothing more
    is merged.

    Raises:
        InvalidInputError: the plan breaks a rule; it lists all problems.
    """
    expected = Expected() if plan.believed is None else Expected(**plan.believed.model_dump())
    bare = plan.model_copy(update={"notes": (), "expected": expected})
    unmerged = replace(task, workload=task.workload.model_copy(update={"merge": "off"}))
    done = complete(bare, unmerged, parts=parts, at_most=at_most)
    # A gpu-let with the same models keeps its memory limit (or none): another limit is another process.
    limits_mib = {(g.id, frozenset(r.name for r in g.models)): g.memory_mib for g in before.gpulets}
    gpulets = []
    for gpulet in done.gpulets:
        key = gpulet.id, frozenset(replica.name for replica in gpulet.models)
        gpulets.append(gpulet.model_copy(update={"memory_mib": limits_mib.get(key, gpulet.memory_mib)}))
    return done.model_copy(update={"gpulets": tuple(gpulets)})


def _measured_otherwise_than_here(plan: Plan, profiles: Profiles) -> list[str]:
    """Return a line for each GPU type whose profiles come from several devices, and a line for each package that is
    installed here in another version than the plan's profiles were measured with."""
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    devices: dict[str, dict[str, None]] = {}
    versions: dict[tuple[str, str], dict[str, None]] = {}
    specs = {spec.name: spec for spec in plan.models}
    lies_on = ((types.get(g.gpu, ""), replica.name) for g in plan.gpulets for replica in g.models)
    for kind, spec in ((kind, specs[name]) for kind, name in dict.fromkeys(lies_on) if name in specs):
        measured = None if spec.latency is not None else profiles.measured(spec.profile_row, kind)
        if measured is not None:
            devices.setdefault(kind, {})[measured.hardware] = None
            for package in measured.versions.keys() & _SERVED_WITH:
                versions.setdefault((package, measured.versions[package]), {})[spec.name] = None
    lines = [
        f"profiles of {kind} come from several devices: {'; '.join(of)}" for kind, of in devices.items() if len(of) > 1
    ]
    for (package, version), names in versions.items():
        installed = _installed(package)
        if installed is not None and installed.partition("+")[0] != version.partition("+")[0]:
            lines.append(f"measured with {package} {version}, installed here is {installed}: {', '.join(names)}")
    return lines


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _estimated(plan: Plan, costs: Mapping[str, Mapping[str, ModelOnGpu]], compute_metric: str | None) -> list[str]:
    """Return, in a line per GPU type, which values of the plan's profiles were estimated and not measured.

    `compute_metric` is the metric from which the policy reads a model's compute requirement; None if it reads none.
    """
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    names_of: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for gpulet in plan.gpulets:
        kind = types.get(gpulet.gpu, "")
        for replica in gpulet.models:
            on = costs.get(replica.name, {}).get(kind)
            if on is None:
                continue
            what = on.profile.estimated
            if compute_metric not in (None, *what) and on.profile.estimates_occupancy(str(compute_metric)):
                what = (*what, str(compute_metric))
            if what:
                names_of.setdefault((kind, what), {})[replica.name] = None
    return [
        f"estimated, not measured ({kind}): {', '.join(what)} of {', '.join(names)}"
        for (kind, what), names in names_of.items()
    ]


def usage_of(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Return how many GPUs hold gpu-lets and what they cost per hour, as fields of `Expected`. Each counts once, and
    whole when only an instance of it is used. Those that a plan buys are none of the cluster's, even where they have
    the id of one of another type, and cost as the first of their type."""
    taken, prices = set(plan.used_gpus), dict[object, float | None]()
    for gpu in cluster.gpus:
        for key in (gpu.type, (gpu.device, gpu.whole_type)):
            prices.setdefault(key, whole_of(gpu).price_per_hour)
    used = {
        gpu.device: prices.get((gpu.device, gpu.whole_type), prices.get(gpu.type))
        for gpu in plan.gpus
        if gpu.id in taken
    }
    cost = None if None in used.values() else round(sum(price or 0.0 for price in used.values()), 6)
    return {"gpus_used": len(used), "cost_per_hour": cost}


def _with_expectation(plan: Plan, scene: PlacementContext, tried: Sequence[object] | None) -> Plan:
    """Return the plan with what it promises, and with a reason for every model that it serves below `ATTAINED`.

    `tried`: the gpu-lets that the policy tried, by their `alike_key`; None if it tries nothing. The plan promises what
    its trial served. When gpu-lets were added or merged since the trial, only a model that stayed below `ATTAINED` in
    the trial gets that promise; the others get what the formulas give.
    """
    believed = {n: m.goodput_rps for n, m in plan.believed.models.items()} if plan.believed is not None else {}
    is_as_tried = tried == [alike_key(gpulet) for gpulet in plan.gpulets]
    rates = {spec.name: spec.rate_rps for spec in plan.models}
    served_rps = {
        name: rps
        for name, rps in (believed if tried is not None else {}).items()
        if is_as_tried or rps < ATTAINED * rates[name]
    }
    expected = expected_of(plan, with_margin=not served_rps.keys() >= {*rates} - {*plan.unserved})
    assumptions = (*scene.sharing.assumptions(plan), *expected.assumptions)
    reasons = {name: plan.unserved_reasons.get(name, "the policy gave no reason") for name in plan.unserved}
    models = {
        name: model.model_copy(update={"goodput_rps": served_rps.get(name, model.goodput_rps)})
        for name, model in expected.models.items()
    }
    total_rps = round(sum(model.goodput_rps for model in models.values()), 6)
    update = usage_of(plan, scene.cluster) | {"assumptions": assumptions}
    expected = expected.model_copy(update=update | {"models": models, "goodput_rps": total_rps})
    fastest = _fastest(plan)
    for spec in plan.models:
        if spec.name in expected.models:
            part = expected.models[spec.name].goodput_rps / spec.rate_rps
            if part < ATTAINED:
                reasons[spec.name] = _why_below(plan, spec, part, believed, fastest.get(spec.name))
    return with_losses_said(plan.model_copy(update={"expected": expected, "unserved_reasons": reasons}), scene.trial)


def with_losses_said(plan: Plan, trial: Trial | None) -> Plan:
    """Return the plan with what each loss leaves, and with a reason for every model that keeps less than it asks
    for."""
    if not plan.expected.losses and all(spec.spread is None and spec.survive is None for spec in plan.models):
        return plan
    plan, reasons = with_losses(plan, trial), dict(plan.unserved_reasons)
    for name, why in not_surviving(plan).items():
        reasons[name] = f"{reasons[name]}; {why}" if name in reasons else why
    return plan.model_copy(update={"unserved_reasons": reasons})


def _why_below(
    plan: Plan, spec: ModelSpec, part: float, believed: Mapping[str, float], fastest: tuple[float, Gpulet] | None
) -> str:
    """Return in words how much of a model's rate is served in time, and why it is not all."""
    why = plan.unserved_reasons.get(spec.name)
    if fastest is not None and fastest[0] > spec.slo_ms:
        why = (
            f"SLO below batch 1: {_circumstances(plan, [fastest[1]])}a request takes {fastest[0]:.4g} ms, its SLO is "
            f"{spec.slo_ms:g} ms"
        )
    if why is None:
        why = "no GPU time left on its gpu-lets" if part < NEARLY else "little GPU time left, a few percent may be late"
        if believed.get(spec.name, 0.0) > 1.001 * part * spec.rate_rps:  # derived: above rounding
            hosts = _circumstances(plan, plan.hosts_of(spec.name))
            why = f"no GPU time left: {hosts}it carries less than the policy believed"
    return f"{part * spec.rate_rps:.4g} of {spec.rate_rps:g} rps expected in time ({100 * part:.3g} %); {why}"


def _circumstances(plan: Plan, gpulets: Sequence[Gpulet]) -> str:
    """Return the beginning of a sentence: why a request takes longer on these gpu-lets than alone on a whole GPU."""
    by_gpu = plan.by_gpu()
    share = "on its share " if any(gpulet.effective_share_pct < 100.0 for gpulet in gpulets) else ""
    beside = "beside its neighbours " if any(len(by_gpu[gpulet.gpu]) > 1 for gpulet in gpulets) else ""
    return share + beside


def _fastest(plan: Plan) -> dict[str, tuple[float, Gpulet]]:
    """Return, for each model, the gpu-let where a request takes the shortest time, and that time in ms."""
    fastest: dict[str, tuple[float, Gpulet]] = {}
    different: dict[tuple[int, int], Gpulet] = {}
    for gpulet in plan.gpulets:
        different.setdefault((id(gpulet.models), id(gpulet.merge)), gpulet)
    for gpulet in different.values():
        for program in gpulet.programs:
            if program.latency is not None:
                takes_ms = program.latency.at(1) * program.slowdown
                for name in program.models:
                    if name not in fastest or takes_ms < fastest[name][0]:
                        fastest[name] = takes_ms, gpulet
    return fastest


def policy_used(policy: Policy) -> PolicyUsed:
    """Return a policy's name and options as a plan has them."""
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in policy.options.items()}
    return PolicyUsed(name=policy.name, options=options)


def check_plan(plan: Plan, cluster: Cluster) -> None:
    """Raise `InvalidInputError` when a plan breaks a rule that holds for every policy.

    The rules: Ids are consistent. Models exist. The gpu-lets of a GPU fit into its memory. The shares of a GPU sum to
    at most 100 %, unless the plan says that it over-commits. Shares below 100 % need CUDA MPS. Every model is served or
    listed as unserved.
    """
    plan.check_references()
    of_type = {kind: gpu.memory_mib for kind, gpu in cluster.one_of_each.items()}
    memory = {gpu.id: of_type.get(gpu.type) for gpu in plan.gpus}
    problems = room_problems(plan.by_gpu(), memory, overcommits=plan.overcommits, unrestricted_pct=100.0)
    known = {spec.name for spec in plan.models}
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    for gpulet in plan.gpulets:
        if plan.mps == "off" and gpulet.effective_share_pct < 100.0 and types[gpulet.gpu] != "cpu":
            rule = "a share needs CUDA MPS, which the workload turns off (mps: off)"
            cure = "Use mps: auto, or a policy without shares, such as symphony."
            problems.append(Problem(f"gpulets.{gpulet.id}.share_pct", gpulet.share_pct, rule, cure))
        for replica in gpulet.models:
            if replica.name not in known:
                cure = one_of(replica.name, sorted(known))
                problems.append(
                    Problem(f"gpulets.{gpulet.id}.models", replica.name, "not a model of the workload", cure)
                )
    served = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
    for name in sorted(known - served - set(plan.unserved)):
        problems.append(
            Problem("unserved", name, "neither served nor listed as unserved", "This is a fault of the policy.")
        )
    raise_if_any(problems)
