"""What a plan serves: what its gpu-lets carry of each program within the deadlines, as a flow. The one model that plans
promise by, and by which the planner and the controller judge plans under other rates.

Requests of a model wait in one queue for all gpu-lets that host it. A batch is gathered for as long as its deadline
allows, so that its size follows from rate and SLO: the largest b with l(b) + (b - 1/2) / rate <= SLO, at most the
planned one (with b in place of b - 1/2 where a gpu-let is always busy: Symphony, section 3.3; with b - 1 where one is
always free). Gpu-lets that share programs, directly or through others, are one *component*, which serves what
fits into the time of its gpu-lets, less what waiting costs (`queueing`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from tenuto.placement.components import connected_components
from tenuto.placement.expectation.queueing import MeanBatch, Stream, blocked_part, lost_parts, used_part
from tenuto.placement.expectation.sharing import listed
from tenuto.placement.plan import Expected, ExpectedModel, Plan
from tenuto.placement.program import Gpulet, Program, slowest_ms
from tenuto.placement.solver import linear_program
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Latency

ROUNDS = 6  # limit: of adapting slowdowns to how busy neighbours are
IN_FULL = 0.99  # paper: Symphony counts what serves 99 % in time; of a promise near the limit so much is kept
# Load that a promise in full has to stand. Fitted on 102 plans for random workloads (`bench_promises.scenes` from seed
# 940000), with the formula of before: 4 of 285 models promised in full get less than 98 %; halved 7 of 338, doubled 0
# of 223, without 17 of 396.
MORE = 0.1
NOTHING = 1e-4  # limit: a part this small that is lost is below what formulas and measurements can tell


@dataclass
class _Kind:
    """Gpu-lets that are alike: the same programs at the same latencies beside the same neighbours."""

    programs: tuple[Program, ...]
    gpulets: list[int] = field(default_factory=list)
    busy: float = 1.0


@dataclass(frozen=True)
class _Asked:
    """What a program is asked for: the rate of all its models, and the strictest of their SLOs."""

    rate_rps: float
    slo_ms: float
    weight: float
    dispersion: float


@dataclass(frozen=True)
class Traffic:
    """Requests that models are offered: per second on average, and the index of dispersion of their number in a second
    (1 of Poisson arrivals, which is what a model has that is not named).

    `sigmas`: how many standard deviations more a second may bring; as rarely as requests may be lost.
    """

    mean_rps: Mapping[str, float]
    dispersion: Mapping[str, float] = field(default_factory=dict)
    sigmas: float = 0.0

    @property
    def burst_rps(self) -> dict[str, float]:
        """By how much a second may exceed the mean rate of each model."""
        return {
            name: self.sigmas * math.sqrt(self.dispersion.get(name, 1.0) * mean) for name, mean in self.mean_rps.items()
        }

    @property
    def upper_rps(self) -> dict[str, float]:
        """Mean and burst of every model, as each needs them where it has its gpu-lets for itself."""
        return {name: self.mean_rps[name] + burst for name, burst in self.burst_rps.items()}


@dataclass(frozen=True)
class Outlook:
    """What a plan is expected to serve.

    `parts` says how much of each model's requests is in time. `load` is the largest part of their time that gpu-lets
    which share programs would need for all requests; beyond 1 some are lost. By gpu-let, in the order of the plan:
    `busy` is the part of the time it runs batches, `carried` the rate it takes of each program in requests per second,
    `batches` the sizes that are gathered. A program that is not merged has the name of its model.
    """

    parts: Mapping[str, float]
    load: float
    busy: Sequence[float]
    carried: Sequence[Mapping[str, float]]
    batches: Sequence[Mapping[str, int]]


class Outlooks:
    """Outlooks of plans that have most of their gpu-lets in common, as the stages of a change: what gpu-lets that share
    programs serve is found out once."""

    def __init__(self, slowdowns: Mapping[str, float] | None = None) -> None:
        """Take what batches of a program really take over what plans say, where that is not 1."""
        self._slowdowns = {name: factor for name, factor in (slowdowns or {}).items() if factor != 1.0}
        self._known: dict[object, tuple[_ServedInTime, object]] = {}  # beside it the programs that its key identifies
        self._slowed: dict[tuple[int, float], tuple[Latency, Latency]] = {}  # by identity and factor: it, and it now

    def of(self, plan: Plan, traffic: Traffic | None = None, *, is_cautious: bool = False) -> Outlook:
        """Return what a plan is expected to serve.

        Args:
            plan: with latencies and slowdowns.
            traffic: of its models, which are not served where they have none; default: the rates it was made for.
            is_cautious: at `MORE` load, with requests that wait as if all neighbours always ran.
        """
        traffic = traffic or Traffic({spec.name: spec.rate_rps for spec in plan.models})
        more = 1.0 + MORE if is_cautious else 1.0
        specs = {
            spec.name: spec.model_copy(update={"rate_rps": more * traffic.mean_rps[spec.name]})
            for spec in plan.models
            if traffic.mean_rps.get(spec.name, 0.0) > 0.0
        }
        kinds = self._kinds(plan)
        asked = _asked(kinds, specs, traffic.dispersion)
        beside = _kinds_beside(plan, kinds)
        components = list(_connected_kinds(kinds))
        for _ in range(ROUNDS):
            change = 0.0
            found = [(each, self._served(each, asked, beside, plan.objective, is_cautious)) for each in components]
            for component, served in found:
                for kind, busy in zip(component, served.busy, strict=True):
                    change, kind.busy = max(change, abs(busy - kind.busy)), busy
            if change < 1e-3:
                break
        done = {name: rate for _, served in found for name, rate in served.done.items()}
        parts = {}
        for program in (program for kind in kinds for program in kind.programs):
            for name in program.models:
                if name in specs:
                    parts[name] = min(1.0, done[program.name] / asked[program.name].rate_rps)
        busy_of = [0.0] * len(plan.gpulets)
        carried: list[Mapping[str, float]] = [{}] * len(plan.gpulets)
        batches: list[Mapping[str, int]] = [{}] * len(plan.gpulets)
        for component, served in found:
            for k, kind in enumerate(component):
                takes = {name: flow / len(kind.gpulets) for (name, at), flow in served.flows.items() if at == k}
                for index in kind.gpulets:
                    busy_of[index], carried[index] = kind.busy, takes
                    batches[index] = {name: math.ceil(batch.size) for name, batch in served.batches[k].items()}
        load = max((served.load for _, served in found), default=0.0)
        return Outlook(parts, load, busy_of, carried, batches)

    def promised(self, plan: Plan, traffic: Traffic | None = None) -> tuple[dict[str, float], list[str]]:
        """Return which part of each model's requests a plan promises in time, and the models of which less is promised
        than the formulas give: those that would be late at a tenth more load, or if their neighbours always ran."""
        parts = dict(self.of(plan, traffic).parts)
        at_most = self.of(plan, traffic, is_cautious=True).parts
        near = [name for name, part in parts.items() if part >= IN_FULL and at_most[name] < IN_FULL]
        return parts | {name: IN_FULL * parts[name] - NOTHING for name in near}, near

    def kept(self, plan: Plan, traffic: Traffic, attainment: float) -> dict[str, float]:
        """Return of each model which part of `attainment` a plan promises of its requests, at most 1."""
        promised, _ = self.promised(plan, traffic)
        return {
            name: min(1.0, promised.get(name, 0.0) / attainment)
            for name, rate in traffic.mean_rps.items()
            if rate > 0.0
        }

    def _kinds(self, plan: Plan) -> list[_Kind]:
        """Return the gpu-lets of a plan by what they are alike in; thousands of them are of a few kinds."""
        found: dict[object, _Kind] = {}
        on_gpu = {gpu: tuple(told(g) for g in gpulets) for gpu, gpulets in plan.by_gpu().items()}
        for index, gpulet in enumerate(plan.gpulets):
            own = told(gpulet)
            key = (own, on_gpu[gpulet.gpu] if len(on_gpu[gpulet.gpu]) > 1 else None)
            if key not in found:
                found[key] = _Kind(tuple(self._now(p) for p in gpulet.programs if p.latency is not None))
            found[key].gpulets.append(index)
        return list(found.values())

    def _now(self, program: Program) -> Program:
        """Return a program with what its batches take now."""
        factor = self._slowdowns.get(program.name)
        if factor is None or program.latency is None:
            return program
        key = id(program.latency), factor
        if key not in self._slowed:
            self._slowed[key] = program.latency, program.latency.scaled(factor)
        return replace(program, latency=self._slowed[key][1])

    def _served(
        self,
        component: Sequence[_Kind],
        asked: Mapping[str, _Asked],
        beside: Mapping[int, list[_Kind]],
        objective: str,
        is_cautious: bool,
    ) -> _ServedInTime:
        names = list(dict.fromkeys(p.name for kind in component for p in kind.programs if p.name in asked))
        slowdowns = [[_mean_slowdown(p, beside[id(kind)]) for p in kind.programs] for kind in component]
        key = (
            tuple(
                (
                    len(kind.gpulets),
                    *(
                        (p.models, p.batch_size, id(p.latency), p.slowdown, s)
                        for p, s in zip(kind.programs, own, strict=True)
                    ),
                )
                for kind, own in zip(component, slowdowns, strict=True)
            ),
            tuple((name, asked[name]) for name in names),
            objective,
            is_cautious,
        )
        if key not in self._known:
            served = _served_in_time(names, component, asked, slowdowns, objective, is_cautious=is_cautious)
            self._known[key] = served, [kind.programs for kind in component]
        return self._known[key][0]


def expected_of(plan: Plan, *, with_margin: bool = True) -> Expected:
    """Return what a plan promises of each model, and the latency of its slowest replica's batch.

    Args:
        plan: with latencies and slowdowns.
        with_margin: promise less than in full where that is near what the gpu-lets can do.
    """
    outlooks, latency = Outlooks(), slowest_ms(plan.gpulets)
    parts, near = outlooks.promised(plan) if with_margin else (outlooks.of(plan).parts, [])
    models = {
        spec.name: ExpectedModel(goodput_rps=round(parts[spec.name] * spec.rate_rps, 6), latency_ms=latency[spec.name])
        for spec in plan.models
        if spec.name in parts
    }
    why = (
        f"promised {100 * (1 - IN_FULL):.0f} % less than the formulas give, because with {100 * MORE:.0f} % more "
        f"load, or if all neighbours always ran, some requests would be late: {listed(near)}"
    )
    return Expected(
        goodput_rps=round(sum(model.goodput_rps for model in models.values()), 6),
        models=models,
        assumptions=((why,) if near else ()) + _impatient(plan, outlooks.of(plan)),
    )


def _impatient(plan: Plan, outlook: Outlook) -> tuple[str, ...]:
    """Return a line on the models that can wait, on every gpu-let that hosts them, for less time than the mean batch of
    some neighbour takes; nothing where there are none."""
    slo_ms = {spec.name: spec.slo_ms for spec in plan.models}
    is_short: dict[str, bool] = {}
    for gpulet, sizes in zip(plan.gpulets, outlook.batches, strict=True):
        timed = [(program, program.latency) for program in gpulet.programs if program.latency is not None]
        batch_ms = {p.name: p.slowdown * latency.at(sizes[p.name]) for p, latency in timed if p.name in sizes}
        for program, latency in timed:
            longest_ms = max((ms for name, ms in batch_ms.items() if name != program.name), default=0.0)
            for model in program.models:
                waits_ms = slo_ms.get(model, math.inf) - program.slowdown * latency.at(1)
                is_short[model] = is_short.get(model, True) and waits_ms < longest_ms
    found = [model for model, is_it in is_short.items() if is_it]
    if not found:
        return ()
    return (
        "beside neighbours whose batches take longer than requests can wait on every gpu-let, so that some are lost "
        f"while all of these run: {listed(found)}",
    )


def told(gpulet: Gpulet) -> tuple[object, ...]:
    """Return what a gpu-let serves by, wherever it is; of one workload on GPUs of known types."""
    return (
        gpulet.share_pct,
        tuple((r.name, r.batch_size, r.slowdown, r.latency_ms) for r in gpulet.models),
        tuple(group.models for group in gpulet.merge),
    )


def _asked(
    kinds: Sequence[_Kind], specs: Mapping[str, ModelSpec], dispersion: Mapping[str, float]
) -> dict[str, _Asked]:
    found = {}
    for kind in kinds:
        for program in kind.programs:
            members = [specs[name] for name in program.models if name in specs]
            if members and program.name not in found:
                rate = sum(spec.rate_rps for spec in members)
                weight = sum(spec.weight * spec.rate_rps for spec in members) / rate
                spread = sum(dispersion.get(spec.name, 1.0) * spec.rate_rps for spec in members) / rate
                found[program.name] = _Asked(rate, min(spec.slo_ms for spec in members), weight, spread)
    return found


def _kinds_beside(plan: Plan, kinds: Sequence[_Kind]) -> dict[int, list[_Kind]]:
    """Return the kinds of the gpu-lets beside one of each kind."""
    kind_of = {index: kind for kind in kinds for index in kind.gpulets}
    at: dict[str, list[int]] = defaultdict(list)
    for index, gpulet in enumerate(plan.gpulets):
        at[gpulet.gpu].append(index)
    found = {}
    for kind in kinds:
        first = kind.gpulets[0]
        found[id(kind)] = [kind_of[other] for other in at[plan.gpulets[first].gpu] if other != first]
    return found


def _connected_kinds(kinds: Sequence[_Kind]) -> Iterable[list[_Kind]]:
    """Return the kinds that share programs, directly or through others."""
    components = connected_components([program.name for program in kind.programs] for kind in kinds)
    component_of = {name: index for index, names in enumerate(components) for name in names}
    by_component: dict[int, list[_Kind]] = defaultdict(list)
    for kind in kinds:
        if kind.programs:
            by_component[component_of[kind.programs[0].name]].append(kind)
    return by_component.values()


@dataclass(frozen=True)
class _ServedInTime:
    """What a component serves of every program in time, the time it would need for all, how busy its gpu-lets are, what
    they take of each program and in which batches, by kind."""

    load: float
    done: Mapping[str, float]
    busy: Sequence[float]
    flows: Mapping[tuple[str, int], float]
    batches: Sequence[Mapping[str, MeanBatch]]


def _served_in_time(
    names: Sequence[str],
    component: Sequence[_Kind],
    asked: Mapping[str, _Asked],
    slowdowns: Sequence[Sequence[float]],
    objective: str,
    *,
    is_cautious: bool,
) -> _ServedInTime:
    by_weight = objective == "weighted"
    batches: list[dict[str, MeanBatch]] = []
    for kind, own in zip(component, slowdowns, strict=True):
        gathered = {
            p.name: _gathered(p, asked[p.name], slowdown, is_alone=len(kind.programs) == 1, is_cautious=is_cautious)
            for p, slowdown in zip(kind.programs, own, strict=True)
            if p.name in asked
        }
        batches.append({name: batch for name, batch in gathered.items() if batch is not None})
    flows = _flows(names, component, batches, asked, objective, 1.0)
    gpulets = sum(len(kind.gpulets) for kind in component)
    best = {name: min((own[name] for own in batches if name in own), key=_time, default=None) for name in names}
    load = sum(flow * batches[k][name].time_s for (name, k), flow in flows.items()) / gpulets
    for name, batch in best.items():
        if batch is not None:
            left = asked[name].rate_rps - sum(flows.get((name, k), 0.0) for k in range(len(component)))
            load += max(0.0, left) * batch.time_s / gpulets
    streams = {
        name: Stream(
            asked[name].rate_rps,
            batch,
            asked[name].slo_ms,
            asked[name].weight if by_weight else 1.0,
            asked[name].dispersion,
        )
        for name, batch in best.items()
        if batch is not None
    }
    used = used_part(load, list(streams.values()), gpulets)
    lost = dict(zip(streams, lost_parts(list(streams.values()), (load - used) * gpulets), strict=True))
    if objective == "each" and load > 0.0:  # who lost most is served first
        lost = dict.fromkeys(streams, 1.0 - used / load)
    if load > 1.0:
        flows = _overloaded(names, component, batches, asked, objective, used, lost)
        lost = {}
    busy = []
    for k, kind in enumerate(component):
        time = sum(flows.get((name, k), 0.0) * batch.time_s for name, batch in batches[k].items())
        busy.append(min(1.0, time / len(kind.gpulets)))
    done = {}
    for name in names:
        flow = sum(flows.get((name, k), 0.0) for k in range(len(component)))
        blocked = _blocked(name, component, batches, asked[name], flows)
        kept = 1.0
        for part in (lost.get(name, 0.0), blocked):
            kept *= 1.0 - part if part > NOTHING else 1.0
        done[name] = kept * min(asked[name].rate_rps, flow)
    return _ServedInTime(load, done, busy, flows, batches)


def _overloaded(
    names: Sequence[str],
    component: Sequence[_Kind],
    batches: Sequence[Mapping[str, MeanBatch]],
    asked: Mapping[str, _Asked],
    objective: str,
    used: float,
    lost: Mapping[str, float],
) -> dict[tuple[str, int], float]:
    """Return the flows where not everything can be served: midway between the best by the objective and what is left of
    each program if all lose. A scheduler sees deadlines before costs, so that the truth lies between the two; midway
    errs least at worst."""
    best = _flows(names, component, batches, asked, objective, used)
    if objective == "each":
        return best
    fewer = {name: replace(asked[name], rate_rps=asked[name].rate_rps * (1.0 - lost.get(name, 0.0))) for name in names}
    all_lose = _flows(names, component, batches, fewer, objective, used)
    return {pair: (best.get(pair, 0.0) + all_lose.get(pair, 0.0)) / 2.0 for pair in best | all_lose}


def _time(batch: MeanBatch) -> float:
    return batch.time_s


def _blocked(
    name: str,
    component: Sequence[_Kind],
    batches: Sequence[Mapping[str, MeanBatch]],
    asked: _Asked,
    flows: Mapping[tuple[str, int], float],
) -> float:
    """Return the part of a program's requests that come behind batches of others that run for too long."""
    found, hosts = 1.0, False
    for k, kind in enumerate(component):
        own = next((p for p in kind.programs if p.name == name), None)
        if own is None or name not in batches[k] or own.latency is None:
            continue
        running = [
            (flows.get((other, k), 0.0) * batch.time_s / len(kind.gpulets), batch.latency_ms)
            for other, batch in batches[k].items()
            if other != name
        ]
        hosts = True
        found *= blocked_part(asked.slo_ms - own.latency.at(1) * own.slowdown, running, len(kind.gpulets))
    return found if hosts else 0.0


def _mean_slowdown(program: Program, neighbours: Sequence[_Kind]) -> float:
    """Return the slowdown with neighbours that run part of the time."""
    if not neighbours:
        return 1.0
    return 1.0 + (program.slowdown - 1.0) * sum(kind.busy for kind in neighbours) / len(neighbours)


def _gathered(
    program: Program, asked: _Asked, slowdown: float, *, is_alone: bool, is_cautious: bool
) -> MeanBatch | None:
    """Return the mean batch that is gathered in time; None: not even one request is.

    Also where a smaller one takes less time per request: a scheduler gathers as long as the deadline allows. Where no
    others take turns with it, it is a fraction: the deadline allows another request in some batches only. A batch that
    is as large as planned is so in the mean of what comes until it has to begin.
    """
    latency, largest = program.latency, program.batch_size
    assert latency is not None
    gap_ms = 1000.0 / asked.rate_rps
    if latency.at(1) * program.slowdown > asked.slo_ms:  # beside neighbours that are busy nothing is in time
        return None
    stated = program.slowdown if is_cautious else slowdown

    def over_ms(size: int) -> float:
        """Return by how much a batch that gathers so many is late; the more, the later."""
        return latency.at(size) * stated + (size - 0.5) * gap_ms - asked.slo_ms

    size = 1 + bisect_right(range(2, largest + 1), 0.0, key=over_ms)
    mean = float(size)
    if size == largest:
        mean = mean_of_capped(largest, max(0.0, asked.slo_ms - latency.at(largest) * stated) / gap_ms)
    elif is_alone and latency.at(size + 1) * stated <= asked.slo_ms:
        grows_ms = (latency.at(size + 1) - latency.at(size)) * stated
        mean += max(0.0, 1.0 - over_ms(size + 1) / (grows_ms + gap_ms))
    below = int(mean)
    ms = latency.at(below)
    if mean > below:
        ms += (mean - below) * (latency.at(below + 1) - ms)
    return MeanBatch(mean, ms * slowdown, ms * stated)


@cache
def mean_of_capped(largest: int, come: float) -> float:
    """Return the mean of min(largest, 1 + N), N from a Poisson distribution: what gathers until a batch must begin."""
    if come > 2.0 * largest + 50.0:
        return float(largest)
    mean, exactly, at_most = 1.0, math.exp(-come), 0.0
    for size in range(1, largest):
        at_most += exactly
        mean += max(0.0, 1.0 - at_most)
        exactly *= come / size
    return mean


def _flows(
    names: Sequence[str],
    component: Sequence[_Kind],
    batches: Sequence[Mapping[str, MeanBatch]],
    asked: Mapping[str, _Asked],
    objective: str,
    used: float,
) -> dict[tuple[str, int], float]:
    """Return how much of each program every kind of gpu-let serves: the best flow by the workload's objective.

    Args:
        names: of the programs.
        component: the kinds of gpu-lets.
        batches: by kind, those of the programs that can be in time there.
        asked: by program.
        objective: of the workload.
        used: the part of the gpu-lets' time that there is.
    """
    times = [{name: batch.time_s for name, batch in own.items()} for own in batches]
    if len(component) == 1:
        done = _in_one(names, times[0], asked, used * len(component[0].gpulets), objective)
        return {(name, 0): rate for name, rate in done.items()}
    gpulets = [used * len(kind.gpulets) for kind in component]
    if len(names) == 1:
        return _evenly(names[0], gpulets, times, asked[names[0]].rate_rps)
    return _best_flows(names, gpulets, times, asked, objective)


def _in_one(
    names: Sequence[str], times: Mapping[str, float], asked: Mapping[str, _Asked], gpulets: float, objective: str
) -> dict[str, float]:
    """Return what alike gpu-lets serve: everything, or the cheapest first, or all in the same proportion."""
    able = [name for name in names if name in times]
    load = sum(asked[name].rate_rps * times[name] for name in able)
    if load <= gpulets:
        return {name: asked[name].rate_rps for name in able}
    if objective == "each":
        return {name: asked[name].rate_rps * gpulets / load for name in able}
    left, done = gpulets, {}
    for name in sorted(able, key=lambda name: times[name] / (asked[name].weight if objective == "weighted" else 1.0)):
        done[name] = min(asked[name].rate_rps, left / times[name])
        left -= done[name] * times[name]
    return done


def _evenly(
    name: str, gpulets: Sequence[float], times: Sequence[Mapping[str, float]], rate_rps: float
) -> dict[tuple[str, int], float]:
    """Return what gpu-lets of one program serve: one queue keeps all of them equally busy."""
    able_rps = {k: gpulets[k] / own[name] for k, own in enumerate(times) if name in own}
    part = min(1.0, rate_rps / sum(able_rps.values())) if any(able_rps.values()) else 0.0
    return {(name, k): part * able for k, able in able_rps.items()}


def _best_flows(
    names: Sequence[str],
    gpulets: Sequence[float],
    times: Sequence[Mapping[str, float]],
    asked: Mapping[str, _Asked],
    objective: str,
) -> dict[tuple[str, int], float]:
    """Return the same for gpu-lets that differ, as a linear program."""
    # A third of what it takes to import this package, which every gpu-let's process does and none asks this.
    from scipy.sparse import coo_array

    pairs = [(name, k) for k, own in enumerate(times) for name in own]
    if not pairs:
        return {}
    place = {name: row for row, name in enumerate(names)}
    rows = [place[name] for name, _ in pairs] + [len(names) + k for _, k in pairs]
    columns = [*range(len(pairs))] * 2
    values = [1.0] * len(pairs) + [times[k][name] for name, k in pairs]
    upper = [asked[name].rate_rps for name in names] + list(gpulets)
    total = sum(asked[name].rate_rps for name in names)
    worth = [-(asked[name].weight if objective == "weighted" else 1.0) / total for name, _ in pairs]
    if objective == "each":  # the least part of any rate first, then as much as possible on top
        able = {name for name, _ in pairs}
        for name in able:
            rows.append(len(upper))
            values.append(asked[name].rate_rps)
            columns.append(len(pairs))
            for column in (column for column, (other, _) in enumerate(pairs) if other == name):
                rows.append(len(upper))
                columns.append(column)
                values.append(-1.0)
            upper.append(0.0)
        worth = [*(1e-4 * value for value in worth), -1.0]
    matrix = coo_array((values, (rows, columns)), shape=(len(upper), len(worth))).tocsr()
    most = [math.inf] * len(pairs) + [1.0] * (len(worth) - len(pairs))
    solved = linear_program(worth, matrix, upper, most).x
    return {} if solved is None else dict(zip(pairs, solved.tolist(), strict=False))
