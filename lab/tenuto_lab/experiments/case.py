"""One point of an experiment: a policy's plan, run under one batching scheduler in virtual time, as plain figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.errors import InvalidInputError, first_line
from tenuto.loadgen.schedule import make_schedule
from tenuto.loadgen.simulated import simulated_records
from tenuto.placement import Cluster, ModelSpec, Plan, Policy, Replica, Workload, load_policy, solve
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.experiments.derived import DERIVED_FOR, DERIVED_OPTIONS, derivation
from tenuto_lab.experiments.emulation import Emulation, emulated_plan
from tenuto_lab.experiments.facts import data_ms_by_model, network_of
from tenuto_lab.experiments.figures import run_figures
from tenuto_lab.experiments.published import published_plan

PROFILE = "thesis-v100"
# Every pairing of these models weighs the same, and this reading of the tie gives the groups of section 6.2.1.
_TIE = {"grouping_ties": "float", "memory_metric": "mem_cap_pct"}
THESIS_READINGS: Mapping[str, Mapping[str, Any]] = {"usher": _TIE, "wao-usher": _TIE}
GPU_TYPE = "v100"
ROUTER = "thesis-router"
DEFERRED = "deferred"


@dataclass(frozen=True)
class Case:
    """What to plan and what to send.

    `rates_rps` are planned for; the clients send `sent_share` of them. `published` names a plan of the thesis that
    stands in for the policy's own (see `published`).
    """

    policy: str
    models: tuple[str, ...]
    rates_rps: tuple[float, ...]
    slo_ms: float
    gpus: int
    x: float  # where the point is in the figure: GPUs or total target rate
    sent_share: float
    duration_s: float
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    published: str | None = None

    @property
    def series(self) -> str:
        """The line of the figure the point belongs to."""
        return self.policy if self.published is None else f"{self.policy} (published plan)"

    @property
    def key(self) -> str:
        """A name that no other case of an experiment has."""
        return f"{self.series}|{self.slo_ms:g}|{self.x:g}"

    def workload(self) -> Workload:
        """Return what the policy plans for."""
        specs = zip(self.models, self.rates_rps, strict=True)
        return Workload(models=tuple(ModelSpec(name=n, rate_rps=r, slo_ms=self.slo_ms) for n, r in specs))


def profile_for(case: Case) -> Profile:
    """Return the profile of a case: the thesis' table A.1, or for policies of shares the profile derived from it."""
    if case.policy in DERIVED_FOR and case.published is None:
        return derivation().profile
    return load_shipped(PROFILE)


def plan_case(case: Case) -> Plan:
    """Return the plan of a case.

    Raises:
        InvalidInputError: the policy cannot plan for this profile; the message says what it lacks.
    """
    profiles = Profiles([profile_for(case)])
    cluster = Cluster.parse(f"{GPU_TYPE}:{case.gpus}")
    workload = case.workload()
    if case.published is not None:
        return published_plan(case.published, workload, cluster, profiles)
    return solve(_policy(case), workload, cluster, profiles)


def _policy(case: Case) -> Policy:
    options = {**DERIVED_OPTIONS.get(case.policy, {}), **THESIS_READINGS.get(case.policy, {}), **case.options}
    if case.policy == "tenuto":  # plans for the scheduler and budgets what that does
        network = network_of(case.models)
        options = {"network_ms": (network.ctrl_ms, network.data_ms_per_request, network.response_ms), **options}
    return load_policy(case.policy, options)


def gpus_needed(case: Case) -> int | None:
    """Return how many GPUs iGniter takes when their number is not limited; None for other policies.

    iGniter provisions GPUs for a workload, and the thesis prints how many it took.
    """
    if case.policy != "igniter" or case.published is not None:
        return None
    cluster = Cluster.parse(f"{GPU_TYPE}:{case.gpus}").model_copy(update={"elastic": True})
    return len(_policy(case).place(case.workload(), cluster, Profiles([profile_for(case)])).used_gpus)


def run_case(
    case: Case,
    schedulers: Sequence[str] = (ROUTER, DEFERRED),
    run: Callable[[Case, Plan, str], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the figures of a case as plain data, the same for the same case except `wall_s`.

    A policy that cannot plan gives `{"error": why}` instead of runs.

    Args:
        case: the point.
        schedulers: it runs under each of these.
        run: runs a plan under a scheduler; default in virtual time.
    """
    run = run or _run
    started = time.perf_counter()
    figures, plan = describe_case(case)
    if plan is not None:
        figures["runs"] = {name: run(case, plan, name) for name in schedulers}
    return {**figures, "wall_s": round(time.perf_counter() - started, 3)}


def describe_case(case: Case) -> tuple[dict[str, Any], Plan | None]:
    """Return the row of a case without its runs, and the plan to emulate; None where the policy cannot plan."""
    figures: dict[str, Any] = {"case": asdict(case), "key": case.key, "series": case.series}
    try:
        plan = plan_case(case)
    except InvalidInputError as error:
        return {**figures, "error": _reason(error)}, None
    emulation = Emulation(load_shipped(PROFILE))
    emulated = emulated_plan(plan, emulation)
    stated = plan.believed or plan.expected  # what the published policy promises, which is what the thesis compares
    return {
        **figures,
        "profile": profile_for(case).name,
        "promised_rps": stated.goodput_rps,
        "plan_expected": {name: model.goodput_rps for name, model in stated.models.items()},
        "gpus_used": plan.expected.gpus_used,
        "gpus_needed": gpus_needed(case),
        "unserved": list(plan.unserved),
        "emulation": list(emulation.notes),
        "plan": emulated.to_data(),
    }, emulated


def _reason(error: InvalidInputError) -> str:
    """Return in one sentence what a policy lacked: the first rule of its error, without the list of values."""
    if not error.problems:
        return first_line(error)
    paths = len(error.problems)
    more = f" (and {paths - 1} more like it)" if paths > 1 else ""
    return f"{error.problems[0].path}: {error.problems[0].rule}{more}"


def _run(case: Case, plan: Plan, scheduler_name: str) -> dict[str, Any]:
    system = from_plan(plan, network_of(case.models), check_slos=False)
    scheduler = make_scheduler(scheduler_name, system)
    _plan_with_means(scheduler, plan)
    schedule = make_schedule(plan.models, case.duration_s, case.seed, case.sent_share)
    result = simulate(
        scheduler,
        schedule.times_ms,
        schedule.model_index,
        duration_s=case.duration_s,
        data_ms_by_model=data_ms_by_model(case.models),
    )
    return run_figures(
        plan, simulated_records(result), warmup_ms=1000.0 * result.warmup_s, duration_ms=1000.0 * result.duration_s
    )


def _plan_with_means(scheduler: Scheduler, plan: Plan) -> None:
    """Tell a scheduler how slow its gpu-lets are on average, as a running system would measure it.

    The system has the slowdown while every neighbour runs. The correction is the mean slowdown over that.
    """
    index = {program.name: position for position, program in enumerate(scheduler.system.programs)}
    means = mean_slowdowns(plan)
    for position, gpulet in enumerate(plan.gpulets):
        for replica in gpulet.models:
            if replica.slowdown > 1.0:
                mean = means[gpulet.id, replica.name]
                scheduler.update_latency(index[replica.name], position, mean / replica.slowdown)


def mean_slowdowns(plan: Plan) -> dict[tuple[str, str], float]:
    """Return the mean slowdown of each replica by (gpu-let, model). Neighbours run only a part of the time.

    A neighbour runs for the part of the time that its planned load has of its capacity, at most all of it.
    """
    planned = _planned_rates(plan)
    by_gpu = plan.by_gpu()
    means = {}
    for gpulet in plan.gpulets:
        others = [other for other in by_gpu[gpulet.gpu] if other.id != gpulet.id]
        busy = [min(1.0, sum(_busy(planned[other.id, r.name], r) for r in other.models)) for other in others]
        for replica in gpulet.models:
            part = sum(busy) / len(busy) if busy else 0.0
            means[gpulet.id, replica.name] = 1.0 + (replica.slowdown - 1.0) * part
    return means


def _busy(rate_rps: float, replica: Replica) -> float:
    """Return the part of the time a replica runs when its batches are full."""
    return rate_rps * (replica.latency_ms or 0.0) / replica.batch_size / 1000.0


def _planned_rates(plan: Plan) -> dict[tuple[str, str], float]:
    """Return the load of each replica by (gpu-let, model): the model's rate in proportion to the batch sizes."""
    sizes: dict[str, int] = {}
    for gpulet in plan.gpulets:
        for replica in gpulet.models:
            sizes[replica.name] = sizes.get(replica.name, 0) + replica.batch_size
    return {
        (gpulet.id, replica.name): plan.model(replica.name).rate_rps * replica.batch_size / sizes[replica.name]
        for gpulet in plan.gpulets
        for replica in gpulet.models
    }
