"""What a plan serves: the flow of each program that its gpu-lets carry within the deadlines. Plans promise by this
model, and the planner and the controller judge plans by it.

A model's requests wait in one queue for all gpu-lets that host it. A batch is gathered for as long as its deadline
allows, so its size follows from rate and SLO: the largest b with l(b) + (b - 1/2) / rate <= SLO, at most the planned
one. (Symphony, section 3.3, has b in place of b - 1/2, for a gpu-let that is always busy; for one that is always free
it is b - 1.) Gpu-lets that share programs, directly or through others, form one *component*. It serves what fits into
the time of its gpu-lets, less what waiting costs (`queueing`).
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

from tenuto.placement.carrying import Carries, carried
from tenuto.placement.components import connected_components
from tenuto.placement.expectation.queueing import MeanBatch, Stream, blocked_part, lost_parts, used_part
from tenuto.placement.expectation.sharing import listed
from tenuto.placement.plan import Expected, ExpectedModel, Plan
from tenuto.placement.program import Gpulet, Program, slowest_ms
from tenuto.placement.solver import Rows, linear_program
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Latency

ROUNDS = 6  # limit: rounds of adapting slowdowns to how busy neighbours are
IN_FULL = 0.99  # paper: Symphony asks for 99 % in time; a promise near the limit keeps this part
# Additional load that a full promise has to stand. Fitted on 102 plans for random workloads (`bench_promises.scenes`
# from seed 940000), with an earlier formula: 4 of 285 models promised in full got less than 98 %; with the constant
# halved 7 of 338, doubled 0 of 223, at zero 17 of 396.
MORE = 0.1
# Fitted: the busy part of gpu-lets that just have room for equal parts of all rates. Requests beyond these are turned
# away, so none wait to fill gaps. At 0.99 the worst served model of ParvaGPU's S6 on two thirds of the GPUs gets 3
# points less than the mean.
EVENED_OUT = 0.97
NOTHING = 1e-4  # limit: formulas and measurements cannot tell a smaller lost part from none


@dataclass
class _Kind:
    """Gpu-lets that are alike: same programs, same latencies, same neighbours."""

    programs: tuple[Program, ...]
    gpulets: list[int] = field(default_factory=list)
    beside: list[_Kind] = field(default_factory=list)
    busy: float = 1.0


@dataclass(frozen=True)
class _Asked:
    """The demand for a model, or for a program: the rate of all its models and their strictest SLO."""

    rate_rps: float
    slo_ms: float
    weight: float
    dispersion: float


@dataclass(frozen=True)
class Traffic:
    """Requests that models are offered: the mean per second, and the index of dispersion of the number in a second (1
    for Poisson arrivals, the default).

    `sigmas`: how many standard deviations more a second may bring, as rarely as requests may be lost.
    """

    mean_rps: Mapping[str, float]
    dispersion: Mapping[str, float] = field(default_factory=dict)
    sigmas: float = 0.0

    @property
    def burst_rps(self) -> dict[str, float]:
        """How far a second may exceed the mean rate of each model."""
        return {
            name: self.sigmas * math.sqrt(self.dispersion.get(name, 1.0) * mean) for name, mean in self.mean_rps.items()
        }

    @property
    def upper_rps(self) -> dict[str, float]:
        """Mean and burst of every model: what each needs when it shares no gpu-lets."""
        return {name: self.mean_rps[name] + burst for name, burst in self.burst_rps.items()}


@dataclass(frozen=True)
class Outlook:
    """What a plan is expected to serve.

    `parts` is the part of each model's requests in time. `load` is the largest part of their time that gpu-lets which
    share programs would need for all requests; above 1 some are lost. By gpu-let, in the order of the plan: `busy` is
    the part of the time it runs batches, `carried` the rate of each program in requests per second, `batches` the
    gathered sizes. A program of one model has the model's name.
    """

    parts: Mapping[str, float]
    load: float
    busy: Sequence[float]
    carried: Sequence[Mapping[str, float]]
    batches: Sequence[Mapping[str, int]]


class Outlooks:
    """Outlooks of plans that have most gpu-lets in common, such as the stages of a change. What connected gpu-lets
    serve is computed once."""

    def __init__(self, slowdowns: Mapping[str, float] | None = None, carries: Carries = carried) -> None:
        """Take what batches of a program really take over what plans say, where that is not 1, and what judges a
        gpu-let that generates."""
        self._carries = carries
        self._slowdowns = {name: factor for name, factor in (slowdowns or {}).items() if factor != 1.0}
        self._known: dict[object, tuple[_ServedInTime, object]] = {}  # with the programs whose ids the key uses
        self._slowed: dict[tuple[int, float], tuple[Latency, Latency]] = {}  # by identity and factor: original, slowed
        self._told: dict[int, _Told] = {}  # by identity
        self._members: dict[object, tuple[object, dict[str, _Asked]]] = {}  # by identity of what stands with them
        self._islands: dict[object, _Island] = {}

    def of(self, plan: Plan, traffic: Traffic | None = None, *, is_cautious: bool = False) -> Outlook:
        """Return what a plan is expected to serve.

        Args:
            plan: has latencies and slowdowns.
            traffic: of its models; a model without any is not served. Default: the rates the plan was made for.
            is_cautious: at `MORE` more load, with neighbours that always run.
        """
        members = self._asked_of(plan.models, traffic, 1.0 + MORE if is_cautious else 1.0)
        islands = self._islands_of(plan, members, is_cautious)
        turns: list[_Turn] = []
        for count in range(1, ROUNDS + 1):
            turns = [island.turn(count) for island, _ in islands]
            if all(turn.change < 1e-3 for turn in turns):
                break
        parts: dict[int, Mapping[str, float]] = {}
        busy_of = [0.0] * len(plan.gpulets)
        carried: list[Mapping[str, float]] = [{}] * len(plan.gpulets)
        batches: list[Mapping[str, int]] = [{}] * len(plan.gpulets)
        for (_, places), turn in zip(islands, turns, strict=True):
            for shown in turn.shown:
                parts[places[shown.gpulets[0]]] = shown.parts
                for index in (places[own] for own in shown.gpulets):
                    busy_of[index], carried[index], batches[index] = shown.busy, shown.carried, shown.batches
        load = max((turn.load for turn in turns), default=0.0)
        in_order = {name: part for index in sorted(parts) for name, part in parts[index].items() if name in members}
        for name, room_rps in _room_to_generate(plan, self._carries).items():
            if name in members:  # what a share carries has its own margin
                rate_rps = members[name].rate_rps / (1.0 + MORE if is_cautious else 1.0)
                in_order[name] = min(1.0, room_rps / rate_rps)
                load = max(load, rate_rps / max(room_rps, 1e-9))
        if plan.objective == "each" and load > 1.0:  # a model's excess is turned away while others get less
            least = EVENED_OUT * min(in_order.values(), default=0.0)
            for name, room_rps in provided_rps(plan).items():
                if name in in_order:
                    in_order[name] = min(in_order[name], max(least, room_rps / members[name].rate_rps))
        return Outlook(in_order, load, busy_of, carried, batches)

    def promised(self, plan: Plan, traffic: Traffic | None = None) -> tuple[dict[str, float], list[str]]:
        """Return the part of each model's requests that a plan promises in time, and the models promised less than the
        formulas give. These would be late at a tenth more load, or if their neighbours always ran."""
        parts = dict(self.of(plan, traffic).parts)
        at_most = self.of(plan, traffic, is_cautious=True).parts
        near = [name for name, part in parts.items() if part >= IN_FULL and at_most[name] < IN_FULL]
        return parts | {name: IN_FULL * parts[name] - NOTHING for name in near}, near

    def kept(self, plan: Plan, traffic: Traffic, attainment: float) -> dict[str, float]:
        """Return for each model which part of `attainment` a plan promises, at most 1."""
        promised, _ = self.promised(plan, traffic)
        return {
            name: min(1.0, promised.get(name, 0.0) / attainment)
            for name, rate in traffic.mean_rps.items()
            if rate > 0.0
        }

    def _asked_of(self, models: tuple[ModelSpec, ...], traffic: Traffic | None, more: float) -> dict[str, _Asked]:
        """Return the demand for each model that has any."""
        key = id(models), id(traffic), more
        if key not in self._members:
            rates = {spec.name: spec.rate_rps for spec in models} if traffic is None else traffic.mean_rps
            dispersion: Mapping[str, float] = {} if traffic is None else traffic.dispersion
            found = {
                spec.name: _Asked(more * rate_rps, spec.slo_ms, spec.weight, dispersion.get(spec.name, 1.0))
                for spec in models
                if (rate_rps := rates.get(spec.name, 0.0)) > 0.0
            }
            self._members[key] = (models, traffic), found
        return self._members[key][1]

    def _islands_of(
        self, plan: Plan, members: Mapping[str, _Asked], is_cautious: bool
    ) -> list[tuple[_Island, list[int]]]:
        """Return the gpu-lets that share programs or GPUs, directly or through others, with their places in the
        plan."""
        told_of = [self._what_is_told(gpulet) for gpulet in plan.gpulets]
        alike = dict.fromkeys(told.models for told in told_of)  # most of thousands of gpu-lets hold the same
        groups = [
            (*((gpu,) for gpu in gpulet.gpus), *told.models[:1])
            for gpulet, told in zip(plan.gpulets, told_of, strict=True)
        ]
        together = connected_components([*groups, *alike])
        island_of = {member: index for index, each in enumerate(together) for member in each}
        places: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, gpulet in enumerate(plan.gpulets):
            for gpu in gpulet.gpus:
                places[island_of[gpu,]][gpu].append(index)
        asked = {names: tuple(map(members.get, names)) for names in alike}
        found = []
        for by_gpu in places.values():
            indices = sorted({index for there in by_gpu.values() for index in there})
            own_of = {index: own for own, index in enumerate(indices)}
            gpus = tuple(tuple(own_of[index] for index in there) for there in by_gpu.values())
            own_told = [told_of[index] for index in indices]
            held = tuple((names, asked[names]) for names in dict.fromkeys(told.models for told in own_told))
            key = tuple(told.exactly for told in own_told), gpus, held, plan.objective, is_cautious
            if key not in self._islands:
                served = partial(self._served, objective=plan.objective, is_cautious=is_cautious)
                self._islands[key] = _Island(own_told, gpus, members, served)
            found.append((self._islands[key], indices))
        return found

    def _what_is_told(self, gpulet: Gpulet) -> _Told:
        found = self._told.get(id(gpulet))
        if found is None:
            programs = tuple(self._now(p) for p in gpulet.programs if p.latency is not None)
            found = self._told[id(gpulet)] = _Told(gpulet, told(gpulet), programs)
        return found

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
        self, component: Sequence[_Kind], asked: Mapping[str, _Asked], *, objective: str, is_cautious: bool
    ) -> _ServedInTime:
        names = list(dict.fromkeys(p.name for kind in component for p in kind.programs if p.name in asked))
        slowdowns = [[_mean_slowdown(p, kind.beside) for p in kind.programs] for kind in component]
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


def _room_to_generate(plan: Plan, carries: Carries) -> dict[str, float]:
    """Return the requests per second that gpu-lets carry of models that generate, of lengths that the plan knows."""
    specs = {spec.name: spec for spec in plan.models if spec.generates is not None}
    found = dict.fromkeys(specs, 0.0)
    for replica in (replica for gpulet in plan.gpulets for replica in gpulet.models if replica.name in specs):
        spec = specs[replica.name]
        if spec.generates is None or replica.steps is None:
            continue
        if spec.generates.prompt_tokens is None or spec.generates.output_tokens is None:
            found[replica.name] = math.inf  # nothing is known against it
        else:
            found[replica.name] += carries(spec, replica.steps, replica.kv_tokens or sys.maxsize)[0]
    return found


def provided_rps(plan: Plan) -> dict[str, float]:
    """Return the requests per second for which a plan says it has room, for models with a higher planned rate."""
    said: dict[str, list[float | None]] = defaultdict(list)
    for gpulet in plan.gpulets:
        for replica in gpulet.models:
            said[replica.name].append(replica.rate_rps)
    rates = {spec.name: spec.rate_rps for spec in plan.models}
    room = {name: math.fsum(rps for rps in each if rps is not None) for name, each in said.items() if None not in each}
    return {name: rps for name, rps in room.items() if 0.0 < rps < IN_FULL * rates.get(name, 0.0)}


def expected_of(plan: Plan, *, with_margin: bool = True, carries: Carries = carried) -> Expected:
    """Return what a plan promises of each model, and the batch latency of its slowest replica.

    Args:
        plan: has latencies and slowdowns.
        with_margin: promise less than everything near the limit of the gpu-lets.
        carries: judges gpu-lets that generate.
    """
    outlooks, latency = Outlooks(carries=carries), slowest_ms(plan.gpulets)
    parts, near = outlooks.promised(plan) if with_margin else (outlooks.of(plan).parts, [])
    models = {
        spec.name: ExpectedModel(goodput_rps=round(parts[spec.name] * spec.rate_rps, 6), latency_ms=latency[spec.name])
        for spec in plan.models
        if spec.name in parts and spec.name in latency
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
    """Return a line on models whose requests can wait, on every gpu-let that hosts them, for less than the mean batch
    of some neighbour takes; empty when there are none."""
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
        "some requests are lost while, on every gpu-let of their model, a neighbour's batch runs longer than they can "
        f"wait: {listed(found)}",
    )


def told(gpulet: Gpulet) -> tuple[object, ...]:
    """Return all that decides what a gpu-let serves, wherever it is: for one workload on GPUs of known types."""
    return (
        gpulet.share_pct,
        tuple((r.name, r.batch_size, r.slowdown, r.latency_ms, r.kv_tokens) for r in gpulet.models),
        tuple(group.models for group in gpulet.merge),
        len(gpulet.gpus),
    )


@dataclass(frozen=True, eq=False)
class _Told:
    """What `told` returns for a gpu-let, and its programs with known latency."""

    gpulet: Gpulet
    told: tuple[object, ...]
    programs: tuple[Program, ...]

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The members of its programs."""
        return tuple(name for program in self.programs for name in program.models)

    @cached_property
    def exactly(self) -> tuple[object, ...]:
        """What is told, and the identities of its latencies: unique among gpu-lets of one plan."""
        return self.told, tuple(id(program.latency) for program in self.programs)


class _Island:
    """Gpu-lets that share programs or GPUs, directly or through others. What they serve depends on no other gpu-let.

    How busy neighbours are decides how slow they are, and the other way round: hence the turns.
    """

    def __init__(
        self,
        gpulets: Sequence[_Told],
        by_gpu: Iterable[Sequence[int]],
        members: Mapping[str, _Asked],
        served: Callable[[Sequence[_Kind], Mapping[str, _Asked]], _ServedInTime],
    ) -> None:
        self.gpulets, self._served, self._turns = gpulets, served, list[_Turn]()
        on_gpu = {own: tuple(there) for there in by_gpu for own in there}
        kinds: dict[object, _Kind] = {}
        kind_of = []
        for own, each in enumerate(gpulets):
            beside = tuple(gpulets[other].told for other in on_gpu[own]) if len(on_gpu[own]) > 1 else None
            kind = kinds.setdefault((each.told, beside), _Kind(each.programs))
            kind.gpulets.append(own)
            kind_of.append(kind)
        for kind in kinds.values():
            first = kind.gpulets[0]
            kind.beside = [kind_of[other] for other in on_gpu[first] if other != first]
        self._asked = _asked(kinds.values(), members)
        self._components = list(_connected_kinds(kinds.values()))

    def turn(self, count: int) -> _Turn:
        """Return what the gpu-lets serve after so many turns; at first all count as always busy."""
        while len(self._turns) < count:
            found = [(component, self._served(component, self._asked)) for component in self._components]
            change = 0.0
            for component, served in found:
                for kind, busy in zip(component, served.busy, strict=True):
                    change, kind.busy = max(change, abs(busy - kind.busy)), busy
            self._turns.append(_Turn(self._asked, found, change))
        return self._turns[count - 1]


@dataclass(frozen=True)
class _Shown:
    """What gpu-lets of one kind are expected to do; see `Outlook`."""

    gpulets: Sequence[int]
    parts: Mapping[str, float]
    busy: float
    carried: Mapping[str, float]
    batches: Mapping[str, int]


@dataclass(frozen=True)
class _Turn:
    """What the components of an island serve, and the largest change of any gpu-let's busy part in this turn."""

    asked: Mapping[str, _Asked]
    served: Sequence[tuple[Sequence[_Kind], _ServedInTime]]
    change: float

    @property
    def load(self) -> float:
        """The largest load of a component."""
        return max((served.load for _, served in self.served), default=0.0)

    @cached_property
    def shown(self) -> list[_Shown]:
        """The figures of each kind."""
        found = []
        for component, served in self.served:
            for k, kind in enumerate(component):
                parts = {
                    name: min(1.0, served.done[program.name] / self.asked[program.name].rate_rps)
                    for program in kind.programs
                    if program.name in self.asked
                    for name in program.models
                }
                takes = {name: flow / len(kind.gpulets) for (name, at), flow in served.flows.items() if at == k}
                batches = {name: math.ceil(batch.size) for name, batch in served.batches[k].items()}
                found.append(_Shown(kind.gpulets, parts, served.busy[k], takes, batches))
        return found


def _asked(kinds: Iterable[_Kind], models: Mapping[str, _Asked]) -> dict[str, _Asked]:
    found = {}
    for kind in kinds:
        for program in kind.programs:
            members = [models[name] for name in program.models if name in models]
            if members and program.name not in found:
                rate = sum(each.rate_rps for each in members)
                weight = sum(each.weight * each.rate_rps for each in members) / rate
                spread = sum(each.dispersion * each.rate_rps for each in members) / rate
                found[program.name] = _Asked(rate, min(each.slo_ms for each in members), weight, spread)
    return found


def _connected_kinds(kinds: Collection[_Kind]) -> Iterable[list[_Kind]]:
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
    """What a component serves of every program in time, the time it would need for everything, and by kind: how busy
    its gpu-lets are, what they take of each program and in which batches."""

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
    if objective == "each" and load > 0.0:  # the model that lost most is served first
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
    """Return the flows under overload: midway between the best flow by the objective and equal losses of all programs.
    A scheduler sees deadlines before costs, so the truth lies between; the middle has the least worst-case error."""
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
    """Return the part of a program's requests that come behind another program's batch that runs too long."""
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
    """Return the slowdown beside neighbours that run part of the time."""
    if not neighbours:
        return 1.0
    return 1.0 + (program.slowdown - 1.0) * sum(kind.busy for kind in neighbours) / len(neighbours)


def _gathered(
    program: Program, asked: _Asked, slowdown: float, *, is_alone: bool, is_cautious: bool
) -> MeanBatch | None:
    """Return the mean batch that is gathered in time; None when not even one request is.

    A scheduler gathers as long as the deadline allows, even when a smaller batch takes less time per request. A batch
    that shares its gpu-let with no other has a fractional mean, as the deadline allows one more request in some batches
    only. A batch limited by its planned size has the mean of what comes until it must begin.
    """
    latency, largest = program.latency, program.batch_size
    assert latency is not None
    gap_ms = 1000.0 / asked.rate_rps
    if latency.at(1) * program.slowdown > asked.slo_ms:  # nothing is in time beside busy neighbours
        return None
    stated = program.slowdown if is_cautious else slowdown

    def over_ms(size: int) -> float:
        """Return by how much a batch of so many is late; it grows with the size."""
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
    """Return the mean of min(largest, 1 + N) with N from a Poisson distribution of mean `come`: the requests gathered
    until a batch must begin."""
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
    """Return how much of each program every kind of gpu-let serves: the best flow by the objective.

    Args:
        names: the programs.
        component: the kinds of gpu-lets.
        batches: by kind, of the programs that can be in time there.
        asked: the demand by program.
        objective: the workload's.
        used: the usable part of the gpu-lets' time.
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
    """Return what gpu-lets of one kind serve: everything, or the cheapest first, or all in proportion."""
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
    """Return what gpu-lets of one program serve: its queue keeps all of them equally busy."""
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
    """Return the same for gpu-lets that differ, by a linear program."""
    pairs = [(name, k) for k, own in enumerate(times) for name in own]
    if not pairs:
        return {}
    rows, columns = Rows(), defaultdict[str, list[int]](list)
    for column, (name, _) in enumerate(pairs):
        columns[name].append(column)
    for name in names:
        rows.add(columns[name], [1.0] * len(columns[name]), asked[name].rate_rps)
    first = 0
    for own, most in zip(times, gpulets, strict=True):
        rows.add(range(first, first + len(own)), own.values(), most)
        first += len(own)
    total = sum(asked[name].rate_rps for name in names)
    worth = [-(asked[name].weight if objective == "weighted" else 1.0) / total for name, _ in pairs]
    limits = [math.inf] * len(pairs)
    if objective == "each":  # first the least part of any rate, then the sum
        for name in names:
            if columns[name]:
                values = [-1.0] * len(columns[name])
                rows.add([*columns[name], len(pairs)], [*values, asked[name].rate_rps], 0.0)
        worth, limits = [*(1e-4 * value for value in worth), -1.0], [*limits, 1.0]
    solved = linear_program(worth, rows, limits).x
    return {} if solved is None else dict(zip(pairs, solved.tolist(), strict=False))
