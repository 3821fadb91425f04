"""A plan or a workload in virtual time: arrivals, the run, and its result. The result has the form of a measured run,
so that the same verdict, report and comparison serve both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tenuto.batching.core.build import everywhere, from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay, System
from tenuto.batching.registry import check_offline, make_scheduler
from tenuto.batching.virtual.application_load import ApplicationLoad, Joins
from tenuto.batching.virtual.criterion import Goal, HostedModels, JudgedRequests, Stop, Trial, never, try_load
from tenuto.batching.virtual.offline_backlog import OfflineApplication, OfflineBacklog
from tenuto.batching.virtual.result import SimulationResult
from tenuto.batching.virtual.simulator import simulate
from tenuto.documents import SCHEMA
from tenuto.errors import Problem, one_of, refused
from tenuto.loadgen.records import Records, merge, unsent
from tenuto.loadgen.result_folder import provenance
from tenuto.loadgen.schedule import Schedule, make_client_schedule, make_load
from tenuto.loadgen.verdict import add_size_classes, judge, summarise
from tenuto.outcome import WARM_UP, Outcome
from tenuto.placement import Cluster, ModelSpec, Plan, Workload
from tenuto.placement.application import Application, online
from tenuto.placement.deadline_split import split_deadlines
from tenuto.placement.workload import client_targets, offline_names
from tenuto.profiles import Profiles

_Arriving = TypeVar("_Arriving", ModelSpec, Application)
NO_DELAY = NetworkDelay()


@dataclass(frozen=True)
class Simulation:
    """All settings of a run but the rate. `plan` is None when every GPU hosts every model. `losses` are (seconds, ids
    of GPUs), ascending: when GPUs are lost for good. `offline`: how many offline requests of a model wait from the
    beginning on; inf: more than can run."""

    models: tuple[ModelSpec, ...]
    applications: tuple[Application, ...]
    system: System
    plan: Plan | None = None
    scheduler_name: str = "deferred"
    options: Mapping[str, Any] = field(default_factory=dict)
    duration_s: float = 60.0
    warmup_s: float | None = None
    seed: int = 0
    losses: tuple[tuple[float, frozenset[str]], ...] = ()
    offline: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_plan(cls, plan: Plan, network: NetworkDelay = NO_DELAY, slo_scale: float = 1.0, **how: Any) -> Simulation:
        """Return the simulation of a plan, with every SLO multiplied by `slo_scale`; `how` are fields of the class.

        A model may be late on its gpu-lets even with batches of one. It is simulated all the same, and all its requests
        are late. Policies that calculate with whole-GPU latencies make such plans (`always_late` names these models).

        Raises:
            InvalidInputError: the plan cannot be scheduled.
        """
        for gpulet in plan.gpulets:
            if len(gpulet.models) > 1 and any(replica.steps is not None for replica in gpulet.models):
                rule = "a model that generates cannot be simulated beside others on its gpu-let"
                raise refused(f"gpulets.{gpulet.id}", None, rule, "Give it a gpu-let of its own.")
        plan = plan.model_copy(update={"models": _with_slos(plan.models, slo_scale)})
        applications = tuple(app.with_slo_scaled(slo_scale) for app in plan.applications)
        return cls(plan.models, applications, from_plan(plan, network, check_slos=False), plan, **how)

    @classmethod
    def of_workload(
        cls,
        workload: Workload,
        cluster: Cluster,
        profiles: Profiles,
        network: NetworkDelay = NO_DELAY,
        slo_scale: float = 1.0,
        *,
        folder: Path = Path(),
        **how: Any,
    ) -> Simulation:
        """Return the simulation of a workload on a cluster in which every GPU hosts every model. Deadlines of
        applications are split as the planner splits them.

        Args:
            workload: a workload with at least one model; its settings for merging are ignored.
            cluster: the GPUs.
            profiles: latencies of the models on these GPUs.
            network: delays.
            slo_scale: factor on every SLO.
            folder: folder of the workload's file, for traces beside it.
            how: fields of the class.

        Raises:
            InvalidInputError: no GPU can serve a model, for example because no batch can meet its SLO.
        """
        workload = split_deadlines(workload, cluster, profiles)
        workload = workload.model_copy(update={"models": _with_slos(workload.models, slo_scale)})
        system = everywhere(workload, cluster, profiles, network)
        applications = tuple(app.with_slo_scaled(slo_scale) for app in beside(workload.applications, folder))
        return cls(beside(workload.models, folder), applications, system, **how)

    def with_offline(self, offline: Mapping[str, float]) -> Simulation:
        """Return the same with so many offline requests, by model.

        Raises:
            InvalidInputError: a model that nothing runs, or a scheduler that runs no offline work.
        """
        served = {self.system.reported[place].name for place in self.system.reported_served}
        for name in offline:
            if name not in served:
                raise refused("--offline", name, "no gpu-let runs this model", one_of(name, sorted(served)))
        if offline:
            check_offline(self.scheduler_name, [*offline])
        return replace(self, offline=offline)

    def always_late(self) -> list[Problem]:
        """Return a problem for every hosted model of which no request can be in time."""
        return self.system.unserveable()

    def scheduler(self) -> Scheduler:
        """Return a fresh scheduler."""
        return make_scheduler(self.scheduler_name, self.system, self.options)

    def run(self, rate_scale: float = 1.0) -> SimulatedRun:
        """Run all requests at a rate scale."""
        return self.serve(self._sent(rate_scale))

    def serve(self, sent: Schedule) -> SimulatedRun:
        """Run what clients send, whose names are those of `client_targets`."""
        schedule, offline = offline_apart(sent, self.models)
        load = make_load(self.models, schedule, self.seed)
        joins = Joins(load)
        return SimulatedRun(self._simulate(load, joins, offline), schedule, load, joins)

    def try_rate(self, rate_scale: float, goal: Goal) -> Trial:
        """Run a rate scale until it is over or hopeless, and judge it."""
        schedule, offline = offline_apart(self._sent(rate_scale), self.models)
        load = make_load(self.models, schedule, self.seed)
        begin_ms = 1000.0 * (WARM_UP * self.duration_s if self.warmup_s is None else self.warmup_s)
        joins = Joins(load, counted_from_ms=begin_ms)
        judged: JudgedRequests = HostedModels(self.system, load.times_ms, load.model_index, begin_ms)
        if load.applications:
            judged = _WithApplications(load, self.system, joins, begin_ms)
        return try_load(lambda stop: self._simulate(load, joins, offline, stop), judged, goal)

    def _sent(self, rate_scale: float) -> Schedule:
        targets = client_targets(self.models, self.applications)
        return make_client_schedule(targets, self.applications, self.duration_s, self.seed, rate_scale)

    def _simulate(
        self, load: ApplicationLoad, joins: Joins, arriving: Schedule, stop: Stop = never
    ) -> SimulationResult:
        return simulate(
            self.scheduler(),
            load.times_ms,
            load.model_index,
            duration_s=self.duration_s,
            warmup_s=self.warmup_s,
            stop=stop,
            deadlines_ms=load.deadlines_ms if load.applications else None,
            follows=joins if load.applications else None,
            losses=[
                (1000.0 * at_s, [n for n, gpulet in enumerate(self.system.gpulets) if not gpus.isdisjoint(gpulet.gpus)])
                for at_s, gpus in self.losses
            ],
            tokens=load.tokens,
            sizes=load.sizes,
            offline=make_backlog(self.models, arriving, self.seed, self.scheduler_name, self.offline),
            slos={index: spec.slo for index, spec in enumerate(self.models) if spec.slo is not None},
        )


class _WithApplications:
    """The requests by which a load with applications is judged: those of applications, end to end, and those of models
    that clients ask by themselves. Models and applications that the plan does not host are left out.
    """

    def __init__(self, load: ApplicationLoad, system: System, joins: Joins, begin_ms: float) -> None:
        self._load, self._joins, self._begin_ms = load, joins, begin_ms
        place = {model.name: index for index, model in enumerate(system.reported)}
        stages = {app.name: {place[app.model_name(stage)] for stage in app.stages} for app in online(load.applications)}
        hosted = system.reported_served
        self._complete = [name for name, parts in stages.items() if parts <= hosted]
        is_alone = load.owner < 0
        sent_alone = load.model_index[is_alone & (load.times_ms >= begin_ms)]
        alone = np.bincount(sent_alone, minlength=len(system.reported)).tolist()
        self._alone = {system.reported[m].name: (m, alone[m]) for m in sorted({*load.model_index[is_alone]} & hosted)}

    def offered(self) -> dict[str, int]:
        """Return how many requests arrive after the warm-up."""
        counted = Counter(app for app, at_ms in self._load.calls.values() if at_ms >= self._begin_ms)
        calls = {app.name: counted[place] for place, app in enumerate(self._load.applications)}
        alone = {name: count for name, (_, count) in self._alone.items()}
        return alone | {name: calls[name] for name in self._complete}

    def lost(self, lost_by_model: Sequence[int]) -> dict[str, int]:
        """Return how many of these requests have missed their deadline so far. Losses of models have those of stages,
        too."""
        del lost_by_model
        calls, alone = self._joins.lost(), {name: self._joins.lost_alone[m] for name, (m, _) in self._alone.items()}
        return alone | {name: calls[name] for name in self._complete}

    def ended(self, result: SimulationResult) -> dict[str, tuple[int, int]]:
        """Return how many requests of a run were in time, and how many arrived."""
        calls = self._joins.counts()
        ended = {name: (calls[name][Outcome.OK], sum(calls[name])) for name in self._complete}
        is_mine = result.measured & (self._load.owner[: len(result.measured)] < 0)
        for name, (model, _) in self._alone.items():
            outcome = result.outcome[is_mine & (result.model == model)]
            ended[name] = int((outcome == Outcome.OK).sum()), len(outcome)
        return ended


@dataclass(frozen=True)
class SimulatedRun:
    """A run in virtual time and its requests; `joins` if some are those of applications."""

    result: SimulationResult
    schedule: Schedule
    load: ApplicationLoad
    joins: Joins

    @property
    def _offline(self) -> list[str]:
        """What is asked nothing but offline requests, which are in no figure but those of `offline`."""
        return self.result.offline_alone

    def summary(self) -> dict[str, Any]:
        """Return the figures of `simulate --json`, with those of applications if there were any."""
        summary = self.result.summary()
        for name in self._offline:
            summary["models"].pop(name, None)
        if self.load.applications:
            figures = self._summarise(self.records())
            del figures["gpulets"]  # the simulator saw the batches
            summary |= figures
        return summary

    def records(self) -> Records:
        """Return one row for each request of clients but to offline models, which have no number; one to an application
        has no batch of its own."""
        records = simulated_records(self.result, self.load)
        if self.load.applications:
            records = _records_of_clients(records, self.schedule, self.load, self.joins)
        names = self.schedule.names
        return records.without_models([place for place, name in enumerate(names) if name in self._offline])

    def _summarise(self, records: Records) -> dict[str, Any]:
        result = self.result
        names = [model.name for model in result.system.reported]
        generating = [names[result.system.reported_of[gpulet.model]] for gpulet in result.system.generating]
        return summarise(
            records,
            [name for name in self.schedule.names if name not in self._offline],
            warmup_ms=1000.0 * result.warmup_s,
            duration_ms=1000.0 * result.duration_s,
            applications=self.load.applications,
            generating=generating,
        )

    def describe(
        self, plan: Plan | None, *, options: Mapping[str, Any], command: Sequence[str]
    ) -> tuple[dict[str, Any], Records]:
        """Return the result document and the records, in the form of a measured run.

        Args:
            plan: the simulated plan; None when every GPU hosts every model.
            options: settings to keep, such as seed, rate_scale and scheduler; the duration is added.
            command: the command line of the run.
        """
        result = self.result
        records = self.records()
        summary = self._summarise(records)
        slos = {model.name: model.slo_ms for model in result.system.reported if model.name in summary["models"]}
        names = [model.name for model in result.system.reported]
        if plan is not None:
            add_size_classes(summary, records, plan)
        verdict = judge(records, summary, [*slos.values(), *(app.slo_ms for app in self.load.applications)])
        # Where both have a figure, the simulator's is kept: it saw every batch, not only the answered requests.
        seen = {key: value for key, value in self.summary().items() if key != "models"}
        document = {
            "schema": SCHEMA,
            "kind": "simulation",
            "emulated": True,
            **summary,
            **seen,
            "verdict": {"result": verdict.result, "reasons": list(verdict.reasons), "conditions": verdict.conditions},
            "errors": [],
            "slos_ms": slos,
            "token_slos": {names[index]: slo.model_dump() for index, slo in result.token_slos.items()}
            | {
                app.name: slo.model_dump()
                for app, slo in zip(self.load.applications, self.load.slos, strict=True)
                if slo is not None
            },
            "schedule_hash": self.schedule.hash,
            "schedule_notes": list(self.schedule.notes),
            "options": {**options, "duration_s": result.duration_s, "warmup_s": result.warmup_s},
            **provenance(command),
            "plan": None if plan is None else plan.to_data(),
        }
        return document, records


def offline_apart(schedule: Schedule, models: Sequence[ModelSpec]) -> tuple[Schedule, Schedule]:
    """Return the part of a schedule that goes to models and applications that are not offline, and the rest."""
    offline = offline_names(models, schedule.applications)
    places = [place for place, name in enumerate(schedule.names) if name in offline]
    is_offline = np.isin(schedule.model_index, places)
    return schedule.part(np.flatnonzero(~is_offline)), schedule.part(np.flatnonzero(is_offline))


def make_backlog(
    models: Sequence[ModelSpec], arriving: Schedule, seed: int, scheduler: str, more: Mapping[str, float]
) -> OfflineBacklog | None:
    """Return the offline requests of a run, by the place of their model: those that come as scheduled, and so many
    `more` that are there from the beginning; None where no model is offline and there are no more.

    Raises:
        InvalidInputError: a model is offline, and the scheduler runs no offline work.
    """
    generator = np.random.default_rng([seed, len(models)])

    def lengths(model: int) -> tuple[int, int]:
        generates = models[model].generates
        both = () if generates is None else (generates.prompt_tokens, generates.output_tokens)
        prompt, output = [1 if one is None else int(one.draw(1, generator)[0]) for one in both]
        return prompt, output

    place = {spec.name: index for index, spec in enumerate(models)}
    targets: dict[str, int | OfflineApplication] = {**place}
    targets |= {each.name: OfflineApplication(each, place, seed) for each in arriving.applications if each.offline}
    arrivals = [
        (at_ms, targets[arriving.names[index]])
        for at_ms, index in zip(arriving.times_ms.tolist(), arriving.model_index.tolist(), strict=True)
    ]
    offline = offline_names(models, arriving.applications)
    check_offline(scheduler, offline)
    asked_alone = [name for name in offline if name in place and name in arriving.names]
    left = {place[name]: more.get(name, 0.0) for name in (*asked_alone, *more)}
    return OfflineBacklog(left, lengths, arrivals) if left or offline else None


def simulated_records(result: SimulationResult, load: ApplicationLoad | None = None) -> Records:
    """Return one row per request to a model. It was sent when scheduled; its status is what a server would have
    answered.

    Args:
        result: the simulator's result.
        load: the load, if requests have sizes.
    """
    ids = np.array([gpulet.id for gpulet in result.system.gpulets] + [""], dtype=object)
    answered = ~np.isnan(result.answered_ms)
    status = np.where(answered, Outcome.OK.http_status, Outcome.EXPIRED.http_status).astype(np.int32)
    status[result.outcome == Outcome.REJECTED] = Outcome.REJECTED.http_status
    records = Records(
        request=np.arange(len(result.arrival_ms), dtype=np.int64),
        model=result.model,
        scheduled_ms=result.arrival_ms,
        sent_ms=result.arrival_ms,
        answered_ms=result.answered_ms,
        status=status,
        outcome=result.outcome,
        batching_ms=result.dispatched_ms - result.arrival_ms,
        gpulet_queue_ms=result.start_ms - result.dispatched_ms,
        execution_ms=result.finish_ms - result.start_ms,
        batch_size=result.batch_size.copy(),
        gpulet=ids[result.gpulet],
        sizes=np.zeros((len(result.arrival_ms), 0), np.int64) if load is None or load.sizes is None else load.sizes,
    )
    if result.writing is not None:
        written, tokens = result.writing.requests, result.writing.tokens
        records.first_token_ms[written] = result.writing.first_ms[written] + result.system.network.response_ms
        records.output_tokens[written] = tokens.output[written]
        records.prompt_tokens = tokens.prompt
        records.batch_size[written] = 0  # as in a live run: a stream has no batch of its own
        for column in (records.batching_ms, records.gpulet_queue_ms, records.execution_ms):
            column[written] = np.nan
    return records


def _records_of_clients(records: Records, schedule: Schedule, load: ApplicationLoad, joins: Joins) -> Records:
    """Return the rows of clients' requests from those of the requests to models and the ends of calls."""
    is_call = schedule.model_index >= len(schedule.names) - len(load.applications)
    alone = records.where(load.owner < 0)
    alone.request, alone.model = np.flatnonzero(~is_call), schedule.model_index[~is_call]
    calls = unsent(schedule.times_ms, schedule.model_index, except_requests=alone.request, sizes=schedule.sizes)
    calls.sent_ms, calls.answered_ms = calls.scheduled_ms, joins.answered_ms
    calls.outcome, calls.stage_ms = joins.outcome, joins.stage_ms
    calls.first_token_ms, calls.output_tokens = joins.first_ms, joins.tokens
    calls.status = np.array([outcome.http_status for outcome in Outcome], np.int32)[joins.outcome]
    return merge([alone, calls])


def _with_slos(models: tuple[ModelSpec, ...], scale: float) -> tuple[ModelSpec, ...]:
    return tuple(spec.with_slo_scaled(scale) for spec in models)


def beside(arriving: tuple[_Arriving, ...], folder: Path) -> tuple[_Arriving, ...]:
    """Resolve relative paths of traces against a folder, if the file is there and not in the current folder."""
    resolved = []
    for spec in arriving:
        path = spec.arrival.path
        if path is not None and not Path(path).is_absolute() and not Path(path).exists() and (folder / path).exists():
            arrival = spec.arrival.model_copy(update={"path": str(folder / path)})
            resolved.append(spec.model_copy(update={"arrival": arrival}))
        else:
            resolved.append(spec)
    return tuple(resolved)
