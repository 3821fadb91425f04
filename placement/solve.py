"""The way from policy to plan: check, decide, complete, promise, validate. Every plan is made here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import metadata

from tenuto.errors import InvalidInputError, Problem, one_of, raise_if_any
from tenuto.placement.carrying import GeneratingPlan, beside, generating_problems, place_generating, with_lengths
from tenuto.placement.cluster import Cluster, whole_of
from tenuto.placement.costs import ModelOnGpu, context_mib_of, costs_of
from tenuto.placement.expectation.outlook import expected_of
from tenuto.placement.expectation.sharing import Sharing
from tenuto.placement.ledger import unknown_memory, with_caps
from tenuto.placement.merging import apply_merging
from tenuto.placement.plan import Believed, ExpectedModel, Plan, PlannedGpu, PolicyUsed
from tenuto.placement.policy import Policy
from tenuto.placement.program import Gpulet
from tenuto.placement.rules import measured_otherwise, option_problems
from tenuto.placement.surviving import Scene, Trial, arranged, not_surviving, place_problems, with_losses
from tenuto.placement.watch import INTERRUPTED
from tenuto.placement.workload import ModelSpec, Workload, profile_of
from tenuto.profiles import ModelProfile, Profiles

MOST_ELASTIC_GPUS = 10_000  # limit: a rate that takes more is probably a typing error, and policies would take minutes
# paper: Symphony's goodput, the 99th percentile within the SLO; the plan names every model that stays below
ATTAINED = 0.99
_SERVED_WITH = frozenset({"torch", "onnxruntime"})  # packages that execute models
NEARLY = 0.97  # limit: from this part of the rate on, the reason says "little GPU time left" instead of "none"


def solve(
    policy: Policy, workload: Workload, cluster: Cluster, profiles: Profiles, *, trial: Trial | None = None
) -> Plan:
    """Return the completed and validated plan of a policy.

    When no GPU of the cluster can serve a model, the model is unserved with the reason, and the others are planned.

    Args:
        policy: the policy that decides.
        workload: all models.
        cluster: the GPUs.
        profiles: what the models cost.
        trial: tries the plan after each loss that models must survive; without it, formulas expect the result.

    Raises:
        InvalidInputError: the inputs contradict each other, or the plan breaks a rule; it lists all problems.
    """
    generating = tuple(spec for spec in workload.models if spec.generates is not None)
    if generating:
        return _with_generating(generating, policy, workload, cluster, profiles, trial)
    impossible = _impossible(check_inputs(workload, cluster, profiles), profiles)
    possible = tuple(spec for spec in workload.models if spec.name not in impossible)
    plan = _nothing(cluster)
    if possible:
        asked = workload.model_copy(update={"models": possible})
        plan = policy.place(asked, cluster, profiles)
    unserved = {*plan.unserved, *impossible}
    watch = getattr(policy, "watch", None)
    notes = (INTERRUPTED,) if watch is not None and watch.is_stopped() else ()
    plan = plan.model_copy(
        update={
            "notes": (*plan.notes, *notes),
            "unserved": tuple(spec.name for spec in workload.models if spec.name in unserved),
            "unserved_reasons": {**plan.unserved_reasons, **impossible},
        }
    )
    return complete(plan, policy, workload, cluster, profiles, trial=trial)


def _with_generating(
    generating: tuple[ModelSpec, ...],
    policy: Policy,
    workload: Workload,
    cluster: Cluster,
    profiles: Profiles,
    trial: Trial | None,
) -> Plan:
    """Return the plan of models that generate on GPUs of their own, and of the policy for all others on the rest."""
    check_inputs(workload, cluster, profiles)
    generating = tuple(map(with_lengths, generating))
    problems = generating_problems(generating, cluster, profiles)
    policy_carries = getattr(policy, "carries", None)
    if policy_carries is None:
        rule, cure = "this policy does not plan models that generate", "Use --policy tenuto."
        problems = [Problem(f"models.{spec.name}.generates", spec.name, rule, cure) for spec in generating]
    raise_if_any(problems)
    others = tuple(spec for spec in workload.models if spec.generates is None)
    at_most = max(1, len(cluster.gpus) - bool(others))
    own = place_generating(
        generating, cluster, profiles, most_gpus=at_most, fewest=bool(others), carries=policy_carries
    )
    taken = set(own.gpus)
    if len(taken) < len(cluster.gpus):
        rest = cluster.model_copy(update={"left_out": (*(cluster.left_out or ()), *taken)})
        plan = solve(policy, workload.model_copy(update={"models": others}), rest, profiles, trial=trial)
    else:
        plan = _nothing(cluster)
        why = dict.fromkeys((spec.name for spec in others), "the models that generate take all GPUs")
        plan = plan.model_copy(update={"unserved": tuple(why), "unserved_reasons": why})
    more = _beside_generating(plan, generating, policy, workload, cluster, profiles, taken)
    if more is not None:
        own, plan = more
    by_id = {gpu.id: gpu for gpu in plan.gpus}
    gpus = tuple(by_id.get(gpu.id, PlannedGpu.of(gpu)) for gpu in cluster.gpus)
    gpus += tuple(gpu for gpu in plan.gpus if gpu.id not in {known.id for known in gpus})
    goodput = dict(own.goodput_rps or {})
    models = plan.expected.models | {name: ExpectedModel(goodput_rps=rate) for name, rate in goodput.items()}
    prices = {gpu.type: whole_of(gpu).price_per_hour for gpu in cluster.gpus}
    own_costs = [prices.get(gpu.type) for gpu in cluster.gpus if gpu.id in taken]
    costs = [plan.expected.cost_per_hour, *own_costs] if plan.expected.gpus_used else own_costs
    expected = plan.expected.model_copy(
        update={
            "goodput_rps": round(plan.expected.goodput_rps + sum(goodput.values()), 6),
            "gpus_used": plan.expected.gpus_used + len(taken),
            "cost_per_hour": None if None in costs else round(sum(cost for cost in costs if cost is not None), 6),
            "models": {spec.name: models[spec.name] for spec in workload.models if spec.name in models},
        }
    )
    unserved = {*plan.unserved, *(spec.name for spec in generating if not goodput.get(spec.name))}
    whole = plan.model_copy(
        update={
            "policy": PolicyUsed(name=getattr(policy, "name", type(policy).__name__), options=_plain_options(policy)),
            "gpus": gpus,
            "gpulets": (*plan.gpulets, *own.gpulets),
            "models": workload.models,
            "mps": workload.mps,
            "expected": expected,
            "unserved": tuple(spec.name for spec in workload.models if spec.name in unserved),
            "unserved_reasons": {**plan.unserved_reasons, **(own.reasons or {})},
            "notes": (*plan.notes, *own.notes),
        }
    )
    check_plan(whole, cluster)
    return whole


def _beside_generating(
    plan: Plan,
    generating: tuple[ModelSpec, ...],
    policy: Policy,
    workload: Workload,
    cluster: Cluster,
    profiles: Profiles,
    taken: Collection[str],
) -> tuple[GeneratingPlan, Plan] | None:
    """Return both plans with the models that the plan serves below `ATTAINED` also on shares that models that generate
    leave on their GPUs; None where that serves no more.

    Raises:
        InvalidInputError: as `complete`.
    """
    held = {name: model.goodput_rps for name, model in plan.expected.models.items()}
    missing = {
        spec.name: spec.rate_rps - held.get(spec.name, 0.0)
        for spec in workload.models
        if spec.generates is None and held.get(spec.name, 0.0) < ATTAINED * spec.rate_rps
    }
    if not missing or workload.mps == "off":
        return None
    own = place_generating(
        generating,
        cluster,
        profiles,
        most_gpus=len(taken),
        fewest=True,
        carries=getattr(policy, "carries", None),
        leaves_memory=True,
    )
    gpulets = beside(missing, own, cluster, costs_of(workload, cluster, profiles), profiles)
    if not gpulets or set(own.gpus) != set(taken):
        return None
    lacking = tuple(
        spec.model_copy(update={"rate_rps": missing[spec.name]}) for spec in workload.models if spec.name in missing
    )
    on = {gpulet.gpu for gpulet in gpulets}
    hosted = {replica.name for gpulet in gpulets for replica in gpulet.models}
    bare = Plan(
        policy=PolicyUsed(name=""),
        gpus=tuple(PlannedGpu.of(gpu) for gpu in cluster.gpus if gpu.id in on),
        gpulets=gpulets,
        unserved=tuple(spec.name for spec in lacking if spec.name not in hosted),
    )
    asked = workload.model_copy(update={"models": lacking, "applications": (), "merge": "off"})
    added = complete(bare, policy, asked, cluster, profiles)
    gains = {name: model.goodput_rps for name, model in added.expected.models.items() if model.goodput_rps > 0}
    if not gains:
        return None
    models = dict(plan.expected.models)
    reasons = {name: why for name, why in plan.unserved_reasons.items() if name not in gains}
    for spec in lacking:
        if spec.name in gains:
            whole = round(held.get(spec.name, 0.0) + gains[spec.name], 6)
            models[spec.name] = ExpectedModel(goodput_rps=whole)
            rate = workload[spec.name].rate_rps
            if whole < ATTAINED * rate:
                reasons[spec.name] = f"{whole:.4g} of {rate:g} rps expected in time; no GPU time left on its gpu-lets"
    note = (
        f"{', '.join(gains)}: also on shares that models that generate leave on {', '.join(sorted(on))}; how they slow"
        " each other down beyond their shares is not known"
    )
    expected = plan.expected.model_copy(
        update={"models": models, "goodput_rps": round(plan.expected.goodput_rps + sum(gains.values()), 6)}
    )
    update = {
        "gpulets": (*plan.gpulets, *added.gpulets),
        "expected": expected,
        "unserved": tuple(name for name in plan.unserved if name not in gains),
        "unserved_reasons": reasons,
        "notes": (*plan.notes, note),
    }
    return own, plan.model_copy(update=update)


def enough_for_all(
    policy: Policy, workload: Workload, cluster: Cluster, profiles: Profiles, *, trial: Trial | None = None
) -> Plan:
    """Return the plan of a policy on as many GPUs of the cluster's types as it takes.

    When this plan does not serve a model as asked, the reason is not a lack of GPUs; the plan gives the reason.

    Raises:
        InvalidInputError: the policy does not plan on elastic clusters.
    """
    return solve(policy, workload, cluster.model_copy(update={"elastic": True}), profiles, trial=trial)


def solve_on_fewest(
    policy: Policy, workload: Workload, cluster: Cluster, profiles: Profiles, *, trial: Trial | None = None
) -> Plan:
    """Return a plan that serves every model as asked on as few GPUs of a fixed cluster as this search finds.

    The search leaves out many GPUs at a time and then fewer, the dearest type first. When not even all GPUs serve every
    model as asked, the plan is that of `solve`.

    Raises:
        InvalidInputError: `solve` raised it.
    """
    found = solve(policy, workload, cluster, profiles, trial=trial)
    prices, step = cluster.prices, len(cluster.gpus) // 2
    while step and not found.unserved_reasons and not policy.watch.is_stopped():
        held = {*found.devices(gpulet.gpu for gpulet in found.gpulets)}
        used = [gpu for gpu in cluster.gpus if gpu.device in held]
        for kind in sorted(prices, key=lambda kind: (-prices[kind], kind)):
            of_type = [gpu.id for gpu in used if gpu.type == kind]
            if step <= len(of_type) and step < len(used):
                kept = {gpu.id for gpu in used} - {*of_type[-step:]}
                left_out = tuple(gpu.id for gpu in cluster.gpus if gpu.id not in kept) + (cluster.left_out or ())
                some = cluster.model_copy(update={"left_out": left_out})
                fewer = solve(policy, workload, some, profiles, trial=trial)
                if not fewer.unserved_reasons:
                    found = fewer
                    break
        else:
            step //= 2
    there = cluster.cut_as((gpu.id, gpu.type, gpu.instance) for gpu in found.gpus)
    return found.model_copy(update={"gpus": tuple(PlannedGpu.of(gpu) for gpu in there.gpus)})


def _nothing(cluster: Cluster) -> Plan:
    gpus = () if cluster.elastic else cluster.gpus
    planned = tuple(PlannedGpu.of(gpu) for gpu in gpus)
    return Plan(policy=PolicyUsed(name=""), gpus=planned)


# --- before: the inputs -----------------------------------------------------------------------------------------


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
    found = {}
    for name, by_type in costs.items():
        fastest = min(by_type.values(), key=lambda on: on.steps()[1])
        if fastest.steps()[1] > fastest.slo_ms * (1 + 1e-9):
            found[name] = (
                f"SLO below batch 1: a single request takes {fastest.steps()[1]:.4g} ms on a {fastest.gpu.type}, its "
                f"SLO is {fastest.slo_ms:g} ms"
            )
            continue
        room = {kind: on.gpu.memory_mib - context_mib_of(kind, profiles) for kind, on in by_type.items()}
        largest = max(by_type.values(), key=lambda on: room[on.gpu.type])
        need = min((p.memory_mib for p in largest.profile.points if p.memory_mib is not None), default=0.0)
        if all((on.memory_mib(1) or 0.0) > room[kind] for kind, on in by_type.items()):
            found[name] = (
                f"memory: it needs {need:.0f} MiB even with its smallest measured batch, and the context of its "
                f"process leaves {room[largest.gpu.type]:.0f} MiB of a {largest.gpu.type}"
            )
    return found


# --- after: what follows from the decision ----------------------------------------------------------------------


def complete(
    plan: Plan,
    policy: Policy,
    workload: Workload,
    cluster: Cluster,
    profiles: Profiles,
    *,
    parts: Mapping[str, float] | None = None,
    at_most: int | None = None,
    trial: Trial | None = None,
) -> Plan:
    """Return the plan with everything that follows from the policy's decision, and check it.

    These follow: the latency on each share beside the neighbours, memory and its caps, merged programs, the expected
    goodput, the cost, and the workload's entries. The goodput that the policy itself states is kept as `believed`. With
    `parts`, all replicas stay, and at most `at_most` are added until the plan promises these parts (see `arranged`).
    `trial` is as in `solve`.

    Raises:
        InvalidInputError: the plan breaks a rule; it lists all problems.
    """
    expected = plan.expected
    believed = Believed(goodput_rps=expected.goodput_rps, models=expected.models) if expected.models else None
    cluster = cluster.cut_as((gpu.id, gpu.type, gpu.instance) for gpu in plan.gpus)
    known = {(gpu.id, gpu.type): gpu for gpu in cluster.gpus}
    gpus = tuple(PlannedGpu.of(known[key]) if (key := (gpu.id, gpu.type)) in known else gpu for gpu in plan.gpus)
    streaming = cluster.streams if workload.streaming is None else workload.streaming
    plan = plan.model_copy(
        update={
            "policy": PolicyUsed(name=getattr(policy, "name", type(policy).__name__), options=_plain_options(policy)),
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
    scene = Scene(workload, cluster, sharing, trial)
    plan = arranged(sharing.completed(plan), scene, parts=parts, at_most=at_most)
    if parts is not None:
        held = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
        without = tuple(spec.name for spec in workload.models if spec.name not in held)
        reasons = {name: plan.unserved_reasons.get(name, "no room was found for it") for name in without}
        plan = plan.model_copy(update={"unserved": without, "unserved_reasons": reasons})
    plan = apply_merging(plan, workload, profiles, sharing.completed)
    plan = with_caps(plan, cluster, scene.contexts_mib)
    notes = list(plan.notes)
    unknown = unknown_memory(plan)
    if unknown:
        notes.append(f"memory was not measured, so that the ledger cannot tell whether they fit: {', '.join(unknown)}")
    notes += _measured_otherwise_than_here(plan, profiles)
    notes += _estimated(plan, sharing.costs, getattr(policy, "compute_metric", None))
    follows = getattr(policy, "objectives", Policy.objectives)
    if plan.objective not in follows and (plan.objective == "each" or len({spec.weight for spec in plan.models}) > 1):
        notes.append(f"the policy plans by the objective '{follows[0]}'; '{plan.objective}' is for its scheduler alone")
    plan = plan.model_copy(update={"notes": tuple(notes)})
    plan = _with_expectation(plan, scene, is_tried=getattr(policy, "is_tried", False))
    check_plan(plan, cluster)
    return plan


def _measured_otherwise_than_here(plan: Plan, profiles: Profiles) -> list[str]:
    """Return a line for each GPU type whose profiles come from several devices, and a line for each package that is
    installed here in another version than the plan's profiles were measured with."""
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    devices: dict[str, dict[str, None]] = {}
    versions: dict[tuple[str, str], dict[str, None]] = {}
    specs = {spec.name: spec for spec in plan.models}
    for gpulet in plan.gpulets:
        kind = types.get(gpulet.gpu, "")
        for spec in (specs[replica.name] for replica in gpulet.models if replica.name in specs):
            measured = None if spec.latency is not None else profiles.measured(spec.profile_row, kind)
            if measured is not None:
                devices.setdefault(kind, {})[measured.hardware] = None
                for package in measured.versions.keys() & _SERVED_WITH:
                    versions.setdefault((package, measured.versions[package]), {})[spec.name] = None
    found = [
        f"profiles of {kind} come from several devices: {'; '.join(of)}" for kind, of in devices.items() if len(of) > 1
    ]
    for (package, version), names in versions.items():
        here = _installed(package)
        if here is not None and here.partition("+")[0] != version.partition("+")[0]:
            found.append(f"measured with {package} {version}, installed here is {here}: {', '.join(names)}")
    return found


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
    found: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
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
                found.setdefault((kind, what), {})[replica.name] = None
    return [
        f"estimated, not measured ({kind}): {', '.join(what)} of {', '.join(names)}"
        for (kind, what), names in found.items()
    ]


def _with_expectation(plan: Plan, scene: Scene, *, is_tried: bool) -> Plan:
    """Return the plan with what it promises, and with a reason for every model that it serves below `ATTAINED`.

    When a model stayed below `ATTAINED` in a trial, the plan promises the goodput of the trial.
    """
    used = {gpulet.gpu for gpulet in plan.gpulets}
    prices = {gpu.type: whole_of(gpu).price_per_hour for gpu in scene.cluster.gpus}
    costs = {gpu.device: prices.get(gpu.type) for gpu in plan.gpus if gpu.id in used}
    cost = None if None in costs.values() else round(sum(c for c in costs.values() if c is not None), 6)
    expected = expected_of(plan)
    assumptions = (*scene.sharing.assumptions(plan), *expected.assumptions)
    reasons = {name: plan.unserved_reasons.get(name, "the policy gave no reason") for name in plan.unserved}
    believed = {n: m.goodput_rps for n, m in plan.believed.models.items()} if plan.believed is not None else {}
    models = dict(expected.models)
    for spec in plan.models if is_tried else ():
        if spec.name in models and believed.get(spec.name, spec.rate_rps) < ATTAINED * spec.rate_rps:
            models[spec.name] = models[spec.name].model_copy(update={"goodput_rps": believed[spec.name]})
    total_rps = round(sum(model.goodput_rps for model in models.values()), 6)
    update = {"gpus_used": len(costs), "cost_per_hour": cost, "assumptions": assumptions}
    expected = expected.model_copy(update=update | {"models": models, "goodput_rps": total_rps})
    fastest = _fastest(plan)
    for spec in plan.models:
        if spec.name in expected.models:
            part = expected.models[spec.name].goodput_rps / spec.rate_rps
            if part < ATTAINED:
                reasons[spec.name] = _why_below(plan, spec, part, believed, fastest.get(spec.name))
    plan = with_losses(plan.model_copy(update={"expected": expected}), scene.trial)
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
        if believed.get(spec.name, 0.0) > 1.001 * part * spec.rate_rps:
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
    found: dict[str, tuple[float, Gpulet]] = {}
    for gpulet in plan.gpulets:
        for program in gpulet.programs:
            if program.latency is not None:
                takes_ms = program.latency.at(1) * program.slowdown
                for name in program.models:
                    if name not in found or takes_ms < found[name][0]:
                        found[name] = takes_ms, gpulet
    return found


def _plain_options(policy: Policy) -> dict[str, object]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in getattr(policy, "options", {}).items()}


def check_plan(plan: Plan, cluster: Cluster) -> None:
    """Raise `InvalidInputError` when a plan breaks a rule that holds for every policy.

    The rules: Ids are consistent. Models exist. The gpu-lets of a GPU fit into its memory. The shares of a GPU sum to
    at most 100 %, unless the plan says that it over-commits. Shares below 100 % need CUDA MPS. Every model is served or
    listed as unserved.
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
        need = sum(gpulet.memory_mib or gpulet.held_mib or 0.0 for gpulet in gpulets)
        if gpu.type in memory and need > memory[gpu.type] + 1e-3 * len(gpulets):
            rule = f"more memory than the GPU has ({memory[gpu.type]:.0f} MiB)"
            cure = "Use smaller batches, fewer models per GPU, or a larger GPU type."
            problems.append(Problem(f"gpus.{gpu.id}", f"{need:.0f} MiB", rule, cure))
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
