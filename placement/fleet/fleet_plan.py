"""The plan of a fleet: a spread of the traffic over cells, and a plan of the one planner for each cell whose load left
its band. Cells are planned in parallel processes. What runs is the start of everything."""

from __future__ import annotations

import gc
import math
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tenuto.errors import InvalidInputError, Problem, raise_if_any
from tenuto.placement.application import Application
from tenuto.placement.cluster import Cluster
from tenuto.placement.demand import HEADROOM, Kind, ModelGroup, fluid_of, group_models, kind_of, room_of
from tenuto.placement.expectation.component import NOTHING
from tenuto.placement.expectation.outlook import IN_FULL, Traffic
from tenuto.placement.fleet.traffic_spread import CellRoom, Shares, Spread, spread_traffic
from tenuto.placement.placement_constraints import bearable, is_at, names_of
from tenuto.placement.placement_constraints import without as cluster_without
from tenuto.placement.plan import Plan, PolicyUsed
from tenuto.placement.plan_edits import drained, with_the_rest
from tenuto.placement.planner import PlanTask, RunningPlan, in_turns, make_plan, plan_on_fewest
from tenuto.placement.planner.fault_tolerance import SLIGHT
from tenuto.placement.planner.minimal_change import formula_rps
from tenuto.placement.policy import load_policy
from tenuto.placement.workload import ModelSpec, Workload, lacking
from tenuto.profiles import Profiles

_ROUNDS = 3  # limit: spreads, each with the room that the plans before it had


@dataclass(frozen=True)
class CellState:
    """A cell as the fleet is planned with it: its GPUs, the rates that models have there now, and what returns the plan
    that runs, which is asked for only where it is needed."""

    name: str
    cluster: Cluster
    rates_rps: Mapping[str, float] = field(default_factory=dict)
    running: Callable[[], Plan | None] = lambda: None


@dataclass(frozen=True)
class FleetTask:
    """One question: a workload for some cells. `at_most` is which part of all GPU time may move to other cells;
    `workers` processes plan cells."""

    workload: Workload
    cells: Sequence[CellState]
    policy: PolicyUsed
    profiles: Profiles
    at_most: float = 1.0
    workers: int = 1


@dataclass(frozen=True)
class FleetPlan:
    """The spread, and the plans of the cells that change. `traffic` is which part of the requests to each model and
    application, as clients name them, goes to which cell. `before` has the plans that run in the cells, where one
    does."""

    spread: Spread
    traffic: Shares
    plans: Mapping[str, Plan]
    before: Mapping[str, Plan]


def plan_fleet(task: FleetTask) -> FleetPlan:
    """Return the spread and the changed plans of a fleet.

    Raises:
        InvalidInputError: no cell can hold a model, or a cell's planner refuses its part; it lists all problems.
    """
    joint = Cluster.of(gpu for cell in task.cells for gpu in cell.cluster.gpus)
    groups = group_models(task.workload, joint, task.profiles)
    before = {cell.name: _running_plan(cell) for cell in task.cells}
    rooms = [_room(cell, before[cell.name]) for cell in task.cells]
    raise_if_any(_unplaceable(task.workload, groups, rooms))
    total: dict[Kind, float] = defaultdict(float)
    for room in rooms:
        for kind, count in room.gpus.items():
            total[kind] += count / HEADROOM  # the rest is for a tenth more load
    fluid, running = fluid_of(groups, total), running_shares(groups, task.cells)
    done: dict[str, tuple[Workload, Plan | None]] = {}
    spread = spread_traffic(groups, rooms, fluid, running, at_most=task.at_most)
    for left in reversed(range(_ROUNDS)):
        parts = [*_parts_of(task.workload, groups, spread.planned, task.cells)]
        jobs = [
            _Job(cell, before[cell.name], part, spread.used[cell.name])
            for cell, part in zip(task.cells, parts, strict=True)
            if cell.name not in done or not _goes_on(part, *done[cell.name])
        ]
        done |= {job.cell.name: (job.workload, None) for job in jobs}
        jobs = [job for job in jobs if not job.stays]
        for job, plan in zip(jobs, _planned(jobs, task), strict=True):
            done[job.cell.name] = job.workload, plan
        short = {name: plan for name, (_, plan) in done.items() if plan is not None and _is_short(plan)}
        if not left or not short or len(short) == len(rooms):
            break  # no traffic goes where no plan was made for it
        rooms = [_with_less(room, spread.used[room.name], short.get(room.name)) for room in rooms]
        again = spread_traffic(groups, rooms, fluid, running or spread.traffic, at_most=task.at_most)
        if again.traffic == spread.traffic:
            break
        spread = again
    spread = replace(spread, unmet={**spread.unmet, **_nothing_survives(parts, task.cells)})
    if not running:  # the spreads before were none that runs
        spread = replace(spread, moved=0.0, givers=frozenset())
    changed = {name: plan for name, (_, plan) in done.items() if plan is not None}
    ran = {name: plan for name, plan in before.items() if plan is not None}
    traffic = {
        name: spread.traffic[group.name]
        for group in groups
        for name in (*(spec.model for spec in group.models), *(app.name for app in group.applications))
    }
    return FleetPlan(spread, traffic, changed, ran)


def _running_plan(cell: CellState) -> Plan | None:
    with _naming(cell):
        return cell.running()


def _room(cell: CellState, running: Plan | None) -> CellRoom:
    """Return the room of a cell, and what its running plan leaves of it; GPUs of drained places are no part of it."""
    if running is None:
        return CellRoom.of(cell.name, cell.cluster, room_of(cell.cluster))
    usable, used = cluster_without(cell.cluster, running.drained), {*running.used_gpus}
    prices = usable.prices
    idle = Counter(kind_of(gpu, prices) for gpu in usable.gpus if gpu.id not in used)
    return CellRoom.of(cell.name, cell.cluster, room_of(usable), idle)  # drained places may be named still


def running_shares(groups: Sequence[ModelGroup], cells: Sequence[CellState]) -> dict[str, dict[str, float]]:
    """Return which rate each cell has now of the first model of each group that runs."""
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for cell in cells:
        for name, rate in cell.rates_rps.items():
            rates[name][cell.name] = rate
    runs = {group.name: next((rates[n] for n in group.gpus if n in rates), {}) for group in groups}
    return {name: shares for name, shares in runs.items() if shares}


def _unplaceable(workload: Workload, groups: Sequence[ModelGroup], rooms: Sequence[CellRoom]) -> list[Problem]:
    index = {spec.name: place for place, spec in enumerate(workload.models)}
    known = {place for room in rooms for place in room.places}
    problems = []
    for group in groups:
        for spec in group.models:
            for key, names in (("only_on", spec.only_on), ("keep_off", spec.keep_off)):
                if unknown := [name for name in names if name not in known]:
                    cure = f"Name cells, or nodes, racks or GPUs of cells: {', '.join(r.name for r in rooms[:12])}."
                    problems.append(Problem(f"models.{index[spec.name]}.{key}", unknown[0], "no such place", cure))
        if not any(room.may_hold(group) for room in rooms):
            types = {kind for room in rooms for kind, _ in room.gpus}
            why = group.unserved_by(types)
            rule = (
                f"no cell can hold it: no GPU of the fleet serves {', '.join(why)} within its SLO"
                if why
                else (f"no cell can hold {', '.join(group.gpus)} together, by GPU types, only_on and keep_off")
            )
            cure = "Give a longer SLO, a profile for these GPU types, or another cell."
            problems.append(Problem(f"models.{index[group.name]}", group.name, rule, cure))
    return problems


def _parts_of(
    workload: Workload, groups: Sequence[ModelGroup], planned: Shares, cells: Sequence[CellState]
) -> Iterator[Workload]:
    """Yield the part of a workload that each cell is planned for."""
    laid: dict[str, list[tuple[ModelGroup, float]]] = defaultdict(list)
    for group in groups:
        for cell, share in planned[group.name].items():
            if share > 0.0:
                laid[cell].append((group, share))
    yield from (_part_of(workload, laid[cell.name], cell) for cell in cells)


def _part_of(workload: Workload, laid: Sequence[tuple[ModelGroup, float]], cell: CellState) -> Workload:
    """Return the part of a workload that is laid on a cell. What models say of cells is done with."""
    models, applications = dict[str, ModelSpec](), list[Application]()
    for group, share in laid:
        specs, apps = group.part(share)
        models |= {spec.name: spec for spec in specs}
        applications += apps
    known = names_of(cell.cluster.gpus) if any(s.only_on or s.keep_off or s.prefer for s in models.values()) else set()
    specs = []
    for spec in (models[each.name] for each in workload.models if each.name in models):
        places = {key: tuple(n for n in getattr(spec, key) if n in known) for key in ("only_on", "keep_off")}
        if cell.name in spec.only_on:
            places["only_on"] = ()
        update = {**places, "prefer": spec.prefer if spec.prefer in known else None}
        if spec.spread == "cell":
            update |= {"spread": None, "survive": None}
        specs.append(spec.model_copy(update=update))
    merge = workload.merge
    if isinstance(merge, tuple):
        merge = tuple(names for names in merge if models.keys() >= {*names}) or "off"
    update = {"models": tuple(specs), "applications": tuple(applications), "merge": merge}
    return workload.model_copy(update=update)


def _nothing_survives(parts: Iterable[Workload], cells: Iterable[CellState]) -> dict[str, str]:
    """Return by model why it will not survive as it asks in a cell of which too little is left."""
    unmet = {}
    for part, cell in zip(parts, cells, strict=True):
        asking = [spec for spec in part.models if spec.survive is not None]
        survive = {spec.name: spec.survive for spec in bearable(part, cell.cluster.gpus).models} if asking else {}
        for spec in asking:
            if survive.get(spec.name) is None:
                unmet[spec.name] = f"{cell.name} has no second {spec.spread or 'gpu'} that it may be on"
    return unmet


def _is_short(plan: Plan) -> bool:
    """Return whether a plan serves too little though it uses each GPU that it may, by more than promises are exact
    to."""
    is_full = {*plan.used_gpus} >= {gpu.id for gpu in plan.gpus if not is_at(gpu, plan.drained)}
    return bool(plan.unserved_reasons) and is_full and _promised_part(plan) < 1.0 - NOTHING


def _promised_part(plan: Plan) -> float:
    """Return how much a plan promises of what it was made for."""
    return plan.expected.goodput_rps / max(1e-9, sum(spec.rate_rps for spec in plan.models))


def _with_less(room: CellRoom, used: Mapping[Kind, float], short: Plan | None) -> CellRoom:
    """Return the room of a cell whose plan serves too little: as much as the plan promises of what it was made for, and
    none for newcomers."""
    if short is None:
        return room
    part = _promised_part(short)
    gpus = {kind: min(count, part * used.get(kind, 0.0)) for kind, count in room.gpus.items()}
    return replace(room, gpus=gpus, is_short=True)


# --- cells ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """A cell with the plan that runs there, the part of the workload that it gets, and about how many GPUs of each kind
    that takes."""

    cell: CellState
    before: Plan | None
    workload: Workload
    used: Mapping[Kind, float]

    @property
    def stays(self) -> bool:
        """Whether what runs goes on, as no GPU of it is lost, or nothing runs and nothing is to run."""
        if self.before is not None and _is_in_band(self.before, self.workload):
            present = {gpu.device for gpu in self.cell.cluster.gpus}
            return present.issuperset(self.before.devices(self.before.used_gpus))
        return not self.workload.models and (self.before is None or not self.before.gpulets)

    @property
    def newcomers(self) -> int:
        """How many models come to the cell, which is what takes the planner longest."""
        held = () if self.before is None else self.before.models
        return len({spec.name for spec in self.workload.models} - {spec.name for spec in held})


_work: tuple[Sequence[_Job], FleetTask] | None = None  # of a worker process, which inherits it


def _begin(jobs: Sequence[_Job], task: FleetTask) -> None:
    global _work
    _work = jobs, task
    gc.freeze()  # what is inherited stays, so that the collector need not look at it each time


def _work_on(index: int) -> Plan:
    if _work is None:
        raise RuntimeError("the worker has no task")
    return _plan_cell(_work[0][index], _work[1])


def _planned(jobs: Sequence[_Job], task: FleetTask) -> list[Plan]:
    """Return by job the plan that takes the place of what runs."""
    if task.workers < 2 or len(jobs) < 2:
        return [_plan_cell(job, task) for job in jobs]
    context = multiprocessing.get_context("fork")  # so that workers have the profiles and plans without copying them
    # The longest come first, so that no process waits for another one's last.
    order = sorted(range(len(jobs)), key=lambda index: -jobs[index].newcomers)
    with ProcessPoolExecutor(min(task.workers, len(jobs)), context, _begin, (jobs, task)) as pool:
        plans = dict(zip(order, pool.map(_work_on, order), strict=True))
    return [plans[index] for index in range(len(jobs))]


@contextmanager
def _naming(cell: CellState) -> Iterator[None]:
    """Have problems name the cell."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError([f"cell {cell.name}: {line}" for line in str(error).splitlines()]) from error


def _plan_cell(job: _Job, task: FleetTask) -> Plan:
    before = job.before
    places = () if before is None else before.drained
    with _naming(job.cell):
        cluster = cluster_without(job.cell.cluster, places)
        workload = bearable(job.workload, cluster.gpus)  # of racks that are lost one may be left
        # The plans on few and on many GPUs of a cell are compared.
        policy = load_policy(task.policy.name, task.policy.options).for_parts_of(workload, cluster)
        question = PlanTask(policy, workload, cluster, task.profiles)
        if before is None or not before.gpulets or not workload.models:
            plan = plan_on_fewest(question, _first_gpus(cluster, workload, job.used))
        else:
            plan = make_plan(replace(question, running=_runs(before, workload, len(cluster.gpus))))
        plan = plan if workload == job.workload else with_the_rest(plan, job.workload)
        return drained(plan, job.cell.cluster, places) if places else plan


def _runs(before: Plan, workload: Workload, gpus: int) -> RunningPlan:
    """Return what runs, and what takes its place. What is no longer needed ends only where the whole load fell below
    the band."""
    runs = RunningPlan(before, Traffic.declared(workload.models))
    if _has_fallen(before, workload):
        return runs
    return replace(runs, most_changes=gpus * len(workload.models), promises="larger")


def _is_in_band(plan: Plan, workload: Workload) -> bool:
    """Return whether a plan goes on for a workload: for the same models on the same terms, none of which is asked for
    more than its promise stands, and all together for no less than that."""
    planned = {app.name: app for app in plan.applications}
    apps = tuple(_as_planned(app, planned.get(app.name)) for app in workload.applications)
    now = {spec.name: spec for spec in workload.with_budgets(apps).models}
    then = {spec.name: spec.rate_rps for spec in plan.models}
    if now.keys() != then.keys() or lacking(plan.models, now) or apps != plan.applications:
        return False
    ratios = [spec.rate_rps / then[name] for name, spec in now.items()]
    most = HEADROOM if max(ratios, default=1.0) > 1.0 and _has_margin(plan) else 1.0
    return all(ratio <= most + 1e-9 for ratio in ratios) and not _has_fallen(plan, workload)


def _has_fallen(plan: Plan, workload: Workload) -> bool:
    """Return whether a workload needs so few of the GPUs that a plan has for its models that the plan is too large."""
    now = {spec.name: spec.rate_rps for spec in workload.models}
    parts = {spec.name: min(1.0, now.get(spec.name, 0.0) / spec.rate_rps) for spec in plan.models}
    held = needed = 0.0
    for gpulet in plan.gpulets:
        of_models = [parts.get(replica.name, 1.0) for replica in gpulet.models]
        if of_models:
            takes_pct = gpulet.effective_share_pct * len(gpulet.gpus)
            held += takes_pct
            needed += takes_pct * sum(of_models) / len(of_models)
    return needed < held / HEADROOM


def _has_margin(plan: Plan) -> bool:
    """Return whether a plan stands a tenth more load: not at the limit of its GPUs, nor where only trials promise it.
    A policy that states nothing leaves all promises to the formulas."""
    if plan.unserved_reasons:
        return False
    if plan.believed is None:
        return True
    by_formulas = formula_rps(plan)
    return all(by_formulas.get(spec.name, 0.0) >= (IN_FULL - SLIGHT) * spec.rate_rps for spec in plan.models)


def _goes_on(part: Workload, done: Workload, plan: Plan | None) -> bool:
    """Return whether what a spread before made of a cell does for another spread, too."""
    return part == done or (plan is not None and not plan.unserved_reasons and _is_in_band(plan, part))


def _as_planned(app: Application, planned: Application | None) -> Application:
    """Return the planned application where it differs in nothing but the rate, and the parts of its deadline."""
    if planned is None:
        return app
    same_rate = app.model_copy(update={"rate_rps": planned.rate_rps})
    return planned if same_rate.without_budgets() == planned.without_budgets() else app


def _first_gpus(cluster: Cluster, workload: Workload, used: Mapping[Kind, float]) -> set[str]:
    """Return as many GPUs of a cell as a fluid takes, which makes no replicas and so takes the fewest."""
    prices, by_kind = cluster.prices, defaultdict[Kind, list[str]](list)
    for gpu in in_turns(cluster.gpus, workload):
        by_kind[kind_of(gpu, prices)].append(gpu.id)
    return {gpu for kind, ids in by_kind.items() for gpu in ids[: math.ceil(used.get(kind, 0.0) - 1e-6)]}
