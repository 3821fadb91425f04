"""One point of an experiment: a policy's plan, run under one batching scheduler in virtual time, as plain figures."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tenuto.batching.interface import Scheduler
from tenuto.batching.registry import make_scheduler
from tenuto.batching.result import SimulationResult
from tenuto.batching.setup import from_plan
from tenuto.batching.simulator import simulate
from tenuto.errors import InvalidInputError
from tenuto.loadgen.experiments.emulation import Emulation, emulated_plan
from tenuto.loadgen.experiments.facts import data_ms_by_model, network_of
from tenuto.loadgen.experiments.published import published_plan
from tenuto.loadgen.schedule import make_schedule
from tenuto.loadgen.simulated import simulated_records
from tenuto.loadgen.verdict import summarise
from tenuto.placement import Cluster, ModelSpec, Plan, Workload, load_policy, solve
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

__all__ = ["DEFERRED", "PROFILE", "ROUTER", "Case", "plan_case", "run_case"]

PROFILE = "thesis-v100"
GPU_TYPE = "v100"
ROUTER = "thesis-router"
DEFERRED = "deferred"
STAGES = ("batching", "gpulet_queue", "execution", "front_door")


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


def plan_case(case: Case) -> Plan:
    """Return the plan of a case.

    Raises:
        InvalidInputError: the policy cannot plan for this profile; the message says what it lacks.
    """
    profiles = Profiles([load_shipped(PROFILE)])
    cluster = Cluster.parse(f"{GPU_TYPE}:{case.gpus}")
    workload = case.workload()
    if case.published is not None:
        return published_plan(case.published, workload, cluster, profiles)
    return solve(load_policy(case.policy, case.options), workload, cluster, profiles)


def run_case(case: Case, schedulers: Sequence[str] = (ROUTER, DEFERRED)) -> dict[str, Any]:
    """Return the figures of a case as plain data, the same for the same case except `wall_s`.

    A policy that cannot plan gives `{"error": why}` instead of runs.
    """
    started = time.perf_counter()
    figures: dict[str, Any] = {"case": asdict(case), "key": case.key, "series": case.series}
    try:
        plan = plan_case(case)
    except InvalidInputError as error:
        return {**figures, "error": _reason(error)}
    emulation = Emulation(load_shipped(PROFILE))
    emulated = emulated_plan(plan, emulation)
    figures["promised_rps"] = plan.expected.goodput_rps
    figures["plan_expected"] = {name: model.goodput_rps for name, model in plan.expected.models.items()}
    figures["gpus_used"] = plan.expected.gpus_used
    figures["unserved"] = list(plan.unserved)
    figures["emulation"] = list(emulation.notes)
    figures["plan"] = emulated.to_data()
    figures["runs"] = {name: _run(case, emulated, name) for name in schedulers}
    return {**figures, "wall_s": round(time.perf_counter() - started, 3)}


def _reason(error: InvalidInputError) -> str:
    """Return what a policy lacked in one sentence: the rule it named first, without the list of values."""
    if not error.problems:
        return str(error).splitlines()[0]
    paths = len(error.problems)
    more = f" (and {paths - 1} more like it)" if paths > 1 else ""
    return f"{error.problems[0].path}: {error.problems[0].rule}{more}"


def _run(case: Case, plan: Plan, scheduler_name: str) -> dict[str, Any]:
    setup = from_plan(plan, network_of(case.models), check_slos=False)
    scheduler = make_scheduler(scheduler_name, setup)
    _plan_with_means(scheduler, plan)
    schedule = make_schedule(plan.models, case.duration_s, case.seed, case.sent_share)
    result = simulate(
        scheduler,
        schedule.times_ms,
        schedule.model_index,
        duration_s=case.duration_s,
        data_ms_by_model=data_ms_by_model(case.models),
    )
    return _figures(plan, result)


def _plan_with_means(scheduler: Scheduler, plan: Plan) -> None:
    """Tell a scheduler how slow its gpu-lets are on average, as a running system would measure it.

    A set-up's slowdown is that with every neighbour running; the average neighbour runs only part of the time. The
    correction is the ratio of the two: the neighbours' busy time is their planned rate over their capacity.
    """
    setup = scheduler.setup
    index = {spec.name: position for position, spec in enumerate(setup.models)}
    planned = _planned_rates(plan)
    by_gpu = plan.by_gpu()
    for position, gpulet in enumerate(plan.gpulets):
        others = [other for other in by_gpu[gpulet.gpu] if other.id != gpulet.id]
        if not others:
            continue
        busy = [
            min(
                1.0,
                sum(planned[other.id, r.name] * (r.latency_ms or 0.0) / r.batch_size / 1000.0 for r in other.models),
            )
            for other in others
        ]
        for replica in gpulet.models:
            mean = 1.0 + (replica.slowdown - 1.0) * sum(busy) / len(busy)
            if replica.slowdown > 1.0:
                scheduler.update_latency(index[replica.name], position, mean / replica.slowdown)


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


def _figures(plan: Plan, result: SimulationResult) -> dict[str, Any]:
    """Return the figures of one run. Throughput counts every answer within the measured window, late ones too."""
    names = [spec.name for spec in plan.models]
    records = simulated_records(result)
    begin_ms, end_ms = 1000.0 * result.warmup_s, 1000.0 * result.duration_s
    summary = summarise(records, names, warmup_ms=begin_ms, duration_ms=end_ms)
    window_s = result.window_s
    answered = (result.answered_ms >= begin_ms) & (result.answered_ms < end_ms)
    models = {}
    for index, name in enumerate(names):
        mine = summary["models"][name]
        models[name] = {
            "offered_rps": mine["offered"] / window_s,
            "goodput_rps": mine["ok"] / window_s,
            "throughput_rps": float((answered & (result.model == index)).sum()) / window_s,
            "attainment": mine["attainment"],
            "p95_ms": mine.get("split_p95_ms"),
            "mean_batch": mine["mean_batch"],
            "replicas": _replicas(plan, result, index, name),
        }
    return {
        "offered_rps": summary["offered_rps"],
        "goodput_rps": summary["goodput_rps"],
        "throughput_rps": sum(model["throughput_rps"] for model in models.values()),
        "requests": len(result.arrival_ms),
        "models": models,
    }


def _replicas(plan: Plan, result: SimulationResult, index: int, name: str) -> list[dict[str, Any]]:
    """Return, for each replica of a model, its part of the load, its batches, and how many of them were full."""
    log = result.batches
    chosen = np.array(log.model, dtype=np.int64) == index
    where = np.array(log.gpulet, dtype=np.int64)[chosen]
    sizes = np.array([len(ids) for ids in log.requests], dtype=np.int64)[chosen]
    took = (np.array(log.finish_ms) - np.array(log.start_ms))[chosen]
    total = int(sizes.sum())
    rows = []
    for position, gpulet in enumerate(plan.gpulets):
        for replica in gpulet.models:
            if replica.name != name:
                continue
            mine = where == position
            count = int(mine.sum())
            rows.append(
                {
                    "gpulet": gpulet.id,
                    "gpu": gpulet.gpu,
                    "batch_size": replica.batch_size,
                    "load_share": float(sizes[mine].sum()) / total if total else None,
                    "batches": count,
                    "full_share": float((sizes[mine] >= replica.batch_size).mean()) if count else None,
                    "mean_batch": float(sizes[mine].mean()) if count else None,
                    "execution_ms": float(took[mine].mean()) if count else None,
                }
            )
    return rows
