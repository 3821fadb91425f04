"""Rules for the deadlines of applications' stages, on random graphs in virtual time: goodput and wasted GPU time.

`ours` is what is planned and served. Its split is one of the planner's candidates, or that of Nexus for which the
cluster was drawn: the one that answers most in a trial with other arrivals. Fixed splits (`static`: by the latency of a
batch of 4; `even`; `nexus split`) run on our scheduler without what it knows of stages; `nexus` on Nexus' own,
`clipper` drops only what is late, `pard` is `tenuto_lab.applications.pard`. Whatever the rule, requests of a lost call
that wait are withdrawn. Runs of a few SLOs show little but how empty queues fill, so that each lasts for 20 at least.

    python lab/benchmarks/bench_application_deadlines.py --first-seed 0 --cases 100 [--calls 1000] [--rules ours,nexus]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tenuto.batching.applications.application_graph import ApplicationGraph
from tenuto.batching.applications.application_run import ApplicationRun
from tenuto.batching.applications.stage_times import StageTimes
from tenuto.batching.core.build import with_stages
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.application_load import Joins
from tenuto.batching.virtual.simulator import simulate
from tenuto.loadgen.schedule import make_client_schedule, make_load
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, ModelSpec
from tenuto.placement.application import Application
from tenuto.placement.deadline_split import candidate_splits
from tenuto.placement.workload import client_targets
from tenuto.profiles import Profiles
from tenuto_lab.applications.pard import PardEstimates, PardRun, PardScheduler
from tenuto_lab.applications.random_graphs import Case, draw_case, nexus_split, with_budgets

WARM_UP = 0.1
TRIAL = 10_000_000  # added to the seed of a case for the arrivals of a trial


class SplitRun(ApplicationRun):
    """A fixed split: every stage must be complete at its place of the whole deadline. Nothing is given up early."""

    def __init__(self, graph: ApplicationGraph, arrived_ms: float, deadline_ms: float, times: StageTimes) -> None:
        super().__init__(graph, arrived_ms, deadline_ms, times)
        behind = graph.longest_behind([stage.budget_ms for stage in graph.stages])
        self._complete_by_ms = [deadline_ms - ms for ms in behind]

    def deadline_ms(self, stage: int, now: float) -> float:
        return self._complete_by_ms[stage]

    def cannot_end(self, stage: int, now: float) -> bool:
        return False


class ReactiveRun(ApplicationRun):
    """One deadline for every stage, the application's: only what is late is dropped."""

    def deadline_ms(self, stage: int, now: float) -> float:
        return self.arrived_ms + self.graph.slo_ms

    def cannot_end(self, stage: int, now: float) -> bool:
        return False


@dataclass(frozen=True)
class Figures:
    """Of one rule on one case: calls answered in time over all, GPU time of calls that failed over all GPU time."""

    attainment: float
    wasted: float
    busy: float


def latency_split(app: Application, case: Case) -> dict[str, float]:
    """Return budgets in proportion to the latency of a batch of 4."""
    return {s.label: case.latency[app.model_name(s)].at(4) for s in app.stages}


def even_split(app: Application, case: Case) -> dict[str, float]:
    """Return equal budgets."""
    return {s.label: 1.0 for s in app.stages}


def fixed(split: Callable[[Application, Case], dict[str, float]], case: Case) -> list[tuple[Application, ...]]:
    """Return the applications with the budgets of a split, as the only candidate."""
    return [tuple(with_budgets(app, split(app, case)) for app in case.applications)]


def planned(case: Case) -> list[tuple[Application, ...]]:
    """Return the applications with Nexus' split, for which the cluster was drawn, and with the planner's candidates."""
    cluster = Cluster.parse(f"v100:{len(case.hosted)}")
    return fixed(nexus_split, case) + [
        tuple(work.applications) for work in candidate_splits(case.workload, cluster, Profiles(()))
    ]


Splits = Callable[[Case], list[tuple[Application, ...]]]
# Name: splits, run, scheduler, part of a budget that a batch may take.
RULES: dict[str, tuple[Splits, type[ApplicationRun], str, float]] = {
    "ours": (planned, ApplicationRun, "deferred", 0.0),
    "static": (partial(fixed, latency_split), SplitRun, "deferred", 0.0),
    "even": (partial(fixed, even_split), SplitRun, "deferred", 0.0),
    "nexus split": (partial(fixed, nexus_split), SplitRun, "deferred", 0.0),
    "nexus": (partial(fixed, nexus_split), SplitRun, "nexus", 1.0),
    "clipper": (partial(fixed, nexus_split), ReactiveRun, "eager", 0.5),
    "pard": (partial(fixed, nexus_split), ApplicationRun, "pard", 0.5),
}


def try_rule(case: Case, rule: str, calls: int, slos: float = 0.0) -> Figures:
    """Serve so many calls of a case by a rule, and for at least so many times the longest SLO; the first tenth of the
    time is not counted. Of several splits that is taken which answers most in a trial as long."""
    splits, trial = RULES[rule][0](case), replace(case, seed=case.seed + TRIAL)
    best = max(splits, key=lambda apps: _serve(trial, apps, rule, calls, slos).attainment) if splits[1:] else splits[0]
    return _serve(case, best, rule, calls, slos)


def _serve(case: Case, apps: tuple[Application, ...], rule: str, calls: int, slos: float) -> Figures:
    _, run, scheduler_name, part = RULES[rule]
    budgets: dict[str, float] = {}
    longest: dict[str, float] = {}
    for app in apps:
        for stage in app.stages:
            model = app.model_name(stage)
            budgets[model] = min(budgets.get(model, np.inf), app.budget_ms(stage))
            longest[model] = max(longest.get(model, 0.0), app.slo_ms)
    if part:
        longest = {model: part * budgets[model] for model in budgets}
    system = case.system(budgets, longest)
    if rule == "ours":
        system = with_stages(system, apps)
    models = [ModelSpec(name=m.name, rate_rps=m.rate_rps, slo_ms=m.slo_ms) for m in system.models]
    total_rps = sum(app.rate_rps for app in apps)
    duration_s = max(calls / total_rps, slos * max(app.slo_ms for app in apps) / 1000.0)
    schedule = make_client_schedule(client_targets(models, apps), apps, duration_s, case.seed)
    load = make_load(models, schedule, case.seed)
    begin_ms = WARM_UP * duration_s * 1000.0
    make_run: Callable[[ApplicationGraph, float, float, StageTimes], ApplicationRun] = run
    if rule == "pard":
        duration = {m: case.latency[m].at(case.largest_within(m, longest[m])) for m in longest}
        make_run = partial(PardRun, estimates=PardEstimates(duration))
    joins = Joins(load, counted_from_ms=begin_ms, make_run=make_run)
    scheduler: Scheduler
    scheduler = PardScheduler(system) if scheduler_name == "pard" else make_scheduler(scheduler_name, system)
    result = simulate(
        scheduler,
        load.times_ms,
        load.model_index,
        duration_s=duration_s,
        warmup_s=begin_ms / 1000.0,
        deadlines_ms=load.deadlines_ms,
        follows=joins,
    )
    ended = np.sum(list(joins.counts().values()), axis=0)
    offered = sum(at >= begin_ms for _, at in load.calls.values())
    log, is_ok = result.batches, joins.outcome == Outcome.OK
    lost_ms = all_ms = 0.0
    for ids, start, finish in zip(log.requests, log.start_ms, log.finish_ms, strict=True):
        took = finish - start
        all_ms += took
        lost_ms += took * (1.0 - float(is_ok[load.owner[ids]].mean()))
    return Figures(
        float(ended[Outcome.OK]) / offered, lost_ms / max(all_ms, 1e-9), all_ms / 1000 / duration_s / len(case.hosted)
    )


def main() -> int:
    """Print a row for each case, in time and (wasted) in percent, and how the first rule stands beside the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first-seed", type=int, default=0, help="of the cases")
    parser.add_argument("--cases", type=int, default=20, help="how many")
    parser.add_argument("--calls", type=int, default=1000, help="requests of applications, about, in each run")
    parser.add_argument(
        "--slos", type=float, default=20.0, help="the least length of each run, as a multiple of the longest SLO"
    )
    parser.add_argument("--rules", default=",".join(RULES), help="names, with commas between them")
    options = parser.parse_args()
    rules = options.rules.split(",")
    print("| seed | graphs | load | gpus | fluid | " + " | ".join(rules) + " |")
    print("|---|---|---|---|---|" + "---|" * len(rules))
    rows: list[tuple[Case, dict[str, Figures]]] = []
    for seed in range(options.first_seed, options.first_seed + options.cases):
        case = draw_case(seed)
        figures = {rule: try_rule(case, rule, options.calls, options.slos) for rule in rules}
        rows.append((case, figures))
        cells = " | ".join(f"{100 * f.attainment:.1f} ({100 * f.wasted:.0f})" for f in figures.values())
        where = f"{len(case.hosted)}{'' if case.hosted[0] is None else ' alone'}"
        row = f"| {seed} | {case.shape} | {case.load:.2f} | {where} | {100 * case.bound():.1f} | {cells} |"
        print(row, flush=True)
    summarise(rows, rules)
    return 0


def summarise(rows: list[tuple[Case, dict[str, Figures]]], rules: list[str]) -> None:
    """Print how the first rule stands beside the others."""
    ours = rules[0]
    behind = np.array([100 * (max(f.attainment for f in fs.values()) - fs[ours].attainment) for _, fs in rows])
    within = [f"{points} in {100 * (behind <= points).mean():.0f} %" for points in (1, 2, 5)]
    print(f"\n{ours} is within points of the best: {', '.join(within)}; at worst {behind.max():.1f} behind")
    for name, part in (("all", rows), ("models alone", [r for r in rows if r[0].hosted[0] is not None])):
        over = [fs for case, fs in part if case.load > 1]
        print(f"\n| rule, {name} | in time % | wasted % | beyond capacity ({len(over)}): {ours} over it | it wastes |")
        print("|---|---|---|---|---|")
        for rule in rules:
            good = np.median([fs[ours].attainment / max(fs[rule].attainment, 1e-9) for fs in over])
            waste = np.median([fs[rule].wasted / max(fs[ours].wasted, 1e-6) for fs in over])
            mine = [fs[rule] for _, fs in part]
            means = (100 * np.mean([f.attainment for f in mine]), 100 * np.mean([f.wasted for f in mine]))
            print(f"| {rule} | {means[0]:.1f} | {means[1]:.1f} | {good:.2f} x | {waste:.1f} x |")
        fluid = np.median([fs[ours].attainment / case.bound() for case, fs in part if case.load > 1])
        print(f"| a fluid | {100 * np.mean([case.bound() for case, _ in part]):.1f} | | {fluid:.2f} x | |")


if __name__ == "__main__":
    sys.exit(main())
