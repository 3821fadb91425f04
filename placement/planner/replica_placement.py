"""Where replicas lie, whatever policy made the plan: on GPUs that they may use, apart from each other, and so many that
the loss of a GPU, a node or a rack leaves each model what its `survive` asks for.

A finished plan is changed in three steps. First, GPUs of one type exchange what they hold. Second, replicas that still
lie where they must not are removed. Third, replicas are added one at a time, each where it makes up for most of a loss.
How much that is follows first from the formulas of every expectation, and then from trials, when the caller has given a
function that tries plans.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from operator import attrgetter

from tenuto.placement.cluster import Cluster, Gpu
from tenuto.placement.components import connected_components, connected_with
from tenuto.placement.costs import context_mib_of
from tenuto.placement.expectation.outlook import IN_FULL, Outlooks, Traffic, alike_key
from tenuto.placement.expectation.sharing import Sharing
from tenuto.placement.generation_capacity import (
    Carries,
    PlacedShare,
    ShareCapacity,
    carried,
    gpulets_of,
    options_of,
    shares_of,
    with_planned_rates,
)
from tenuto.placement.placement_constraints import asks, domain_of, may_lie, prefers
from tenuto.placement.plan import Plan, PlannedGpu
from tenuto.placement.planner.fault_tolerance import (
    SLIGHT,
    FailureDomain,
    Trial,
    failure_domains,
    least_parts,
    shared_parts,
)
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import free_gpulet_id, gpulet_id
from tenuto.placement.program import Gpulet, Replica, total_mib
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles.share_latency import EVERY_RULE

TRIED = 8  # limit: places for one more replica that are judged: those with the least busy gpu-lets
_MOST_SEARCHED_TWICE = 50  # limit: models of a plan whose replicas are chosen twice
STAYS = 1e-6  # derived: the worth of a GPU keeping what it holds; decides only where preferences are equal
LEAST_MEMORY = 0.25  # fitted: of the memory of its share, with less of which a gpu-let that generates is not tried


@dataclass(frozen=True)
class PlacementContext:
    """What a plan is made for and with. On an elastic cluster further GPUs can be had. `sharing` knows what models cost
    and fills in the latencies of a plan with other gpu-lets; `trial` tries what a loss leaves; `carries` judges a
    gpu-let that generates. On an elastic cluster a new plan is to promise the part `attainment` of the traffic (None:
    of the declared rates) in time, unless that is None, or the policy may cut GPUs: then it decides alone."""

    workload: Workload
    cluster: Cluster
    sharing: Sharing
    trial: Trial | None = None
    carries: Carries = carried
    traffic: Traffic | None = None
    attainment: float | None = None

    @property
    def least_parts(self) -> Mapping[str, float]:
        """The part of each model's requests that a new plan is to promise; empty where that is the policy's alone."""
        is_cut = any(gpu.mig == "managed" for gpu in self.cluster.gpus)
        if self.attainment is None or is_cut or not self.cluster.elastic:
            return {}
        return dict.fromkeys((self.traffic or Traffic.declared(self.workload.models)).mean_rps, self.attainment)

    @cached_property
    def contexts_mib(self) -> dict[str, float]:
        """The memory of a process's CUDA context, by GPU type."""
        return {kind: context_mib_of(kind, self.sharing.profiles) for kind in self.cluster.gpu_types}


def arranged(
    plan: Plan, scene: PlacementContext, *, parts: Mapping[str, float] | None = None, at_most: int | None = None
) -> Plan:
    """Return a plan of any policy with its replicas where the models ask; the plan itself when no model asks. Its
    gpu-lets that generate share their models' rates anew.

    On a fixed cluster some wishes cannot be met. They are left unmet, and `not_surviving` names them.

    Args:
        plan: with latencies.
        scene: what it is made for.
        parts: what is placed stays, and replicas are added until the plan promises this part of each model's requests;
            None: the plan is a new one, which serves enough or is to promise what the scene says.
        at_most: replicas that may be added.
    """
    parts = parts if parts is not None else scene.least_parts or None
    constrained = [spec for spec in scene.workload.models if asks(spec) or spec.prefer is not None]
    is_fixed = not scene.cluster.elastic
    if parts is None:
        if not constrained or not plan.gpulets:
            return plan
        outlooks = Outlooks(carries=scene.carries)
        aims = outlooks.of(plan.model_copy(update={"models": scene.workload.models})).parts
        plan = _with_replicas(_apart(plan, constrained) if is_fixed else plan, scene, aims)
    else:
        if is_fixed and constrained:
            plan = plan.model_copy(update={"gpulets": tuple(_allowed(plan.gpulets, plan.gpus, constrained))})
        if at_most != 0:
            plan = _with_replicas(plan, scene, parts, at_most, promises=True)
    if not any(map(attrgetter("generates"), scene.workload.models)):
        return plan
    return plan.model_copy(update={"gpulets": with_planned_rates(plan.gpulets, scene.workload.models)})


def _allowed(
    gpulets: Iterable[Gpulet], gpus: Sequence[PlannedGpu], constrained: Sequence[ModelSpec]
) -> Iterator[Gpulet]:
    """Yield gpu-lets without the replicas that lie where they must not."""
    gpu_of, specs = {gpu.id: gpu for gpu in gpus}, {spec.name: spec for spec in constrained}
    for gpulet in gpulets:
        names = [
            r.name
            for r in gpulet.models
            if r.name not in specs or all(may_lie(specs[r.name], gpu_of[gpu]) for gpu in gpulet.gpus)
        ]
        if left := gpulet.only(names):
            yield left


# --- what GPUs hold changes places ----------------------------------------------------------------------------------


def _apart(plan: Plan, constrained: Sequence[ModelSpec]) -> Plan:
    """Return the plan after GPUs of one type have exchanged what they hold.

    An exchange is made when it brings models to places that they may use, or further apart. When it changes neither, it
    is made if it brings models to places that they prefer. Replicas that still lie where they must not are removed.
    """
    gpus = {gpu.id: gpu for gpu in plan.gpus}
    specs = {spec.name: spec for spec in constrained}
    held: dict[str, dict[str, float]] = {}  # by GPU: what it carries of each of these models
    for name, gpulets in plan.by_gpu().items():
        carried: dict[str, float] = defaultdict(float)
        for replica in (replica for gpulet in gpulets for replica in gpulet.models if replica.name in specs):
            carried[replica.name] += replica.rate_rps or 1.0
        held[name] = carried
    lies_on = {name: name for name in gpus}  # what was on the key is now on the value
    # What lies on several GPUs at once stays there: its place was chosen among the GPUs of its node.
    fixed = {gpu for gpulet in plan.gpulets if gpulet.also_on for gpu in gpulet.gpus}

    def crowded(name: str, at: Mapping[str, str]) -> float:
        """Return how badly a model lies: its part where it must not be, and its part in the fullest domain."""
        spec, wrong, by_domain = specs[name], 0.0, defaultdict[str, float](float)
        for was, rates in held.items():
            if name in rates:
                gpu = gpus[at[was]]
                wrong += 0.0 if may_lie(spec, gpu) else rates[name]
                by_domain[domain_of(gpu, spec.spread or "gpu")] += rates[name]
        whole = sum(by_domain.values())
        is_apart = spec.spread or spec.survive
        return (len(specs) * 2.0 * wrong + (max(by_domain.values()) if is_apart else 0.0)) / whole if whole else 0.0

    liked = {name: {gpu.id for gpu in plan.gpus if prefers(spec, gpu)} for name, spec in specs.items()}
    whole = {name: sum(rates.get(name, 0.0) for rates in held.values()) for name in specs}

    def preferred(was: str, at: str) -> float:
        """Return the parts of models on a GPU that would lie where they prefer to if it were another one."""
        return sum(rate / whole[name] for name, rate in held[was].items() if at in liked[name])

    is_better = any(map(asks, constrained))
    if not is_better:  # nothing but preferences: the best exchange is an assignment
        lies_on |= _best_places([gpu for gpu in plan.gpus if gpu.id not in fixed], preferred)
    while is_better:
        is_better = False
        for first, second in product([name for name in gpus if held[name]], gpus):
            if gpus[first].type != gpus[second].type or held[first] == held[second] or {first, second} & fixed:
                continue
            other = lies_on | {first: lies_on[second], second: lies_on[first]}
            moved = [name for name in held[first].keys() | held[second].keys() if asks(specs[name])]
            gain = sum(crowded(name, lies_on) - crowded(name, other) for name in moved)
            nicer = sum(preferred(was, other[was]) - preferred(was, lies_on[was]) for was in (first, second))
            if gain > 1e-9 or (gain > -1e-9 and nicer > 1e-9):
                lies_on, is_better = other, True
    gpulets = []
    taken: dict[str, int] = defaultdict(int)
    order = {name: place for place, name in enumerate(gpus)}
    exchanged = [gpulet.model_copy(update={"gpu": lies_on[gpulet.gpu]}) for gpulet in plan.gpulets]
    for gpulet in _allowed(sorted(exchanged, key=lambda g: order[g.gpu]), plan.gpus, constrained):
        gpulets.append(gpulet.model_copy(update={"id": gpulet_id(gpulet.gpu, taken[gpulet.gpu])}))
        taken[gpulet.gpu] += 1
    return plan.model_copy(update={"gpulets": tuple(gpulets)})


def _best_places(gpus: Sequence[PlannedGpu], worth: Callable[[str, str], float]) -> dict[str, str]:
    """Return for each GPU the GPU of its type that gets what it holds, so that the worth is highest. When staying is
    worth as much, it stays."""
    from scipy.optimize import linear_sum_assignment

    places: dict[str, str] = {}
    for kind in dict.fromkeys(gpu.type for gpu in gpus):
        names = [gpu.id for gpu in gpus if gpu.type == kind]
        values = [[worth(was, at) + STAYS * (was == at) for at in names] for was in names]
        pairs = zip(*linear_sum_assignment(values, maximize=True), strict=True)
        places |= {names[was]: names[at] for was, at in pairs}
    return places


# --- replicas are added ---------------------------------------------------------------------------------------------


def _with_replicas(
    plan: Plan,
    scene: PlacementContext,
    aims: Mapping[str, float],
    at_most: int | None = None,
    *,
    promises: bool = False,
) -> Plan:
    """Return a plan with the replicas that it lacks (see `_ReplicaAdder`).

    Where GPUs are bought, this is done a second time, in search of a cheaper plan: models get replicas on GPUs that are
    there as long as any of them is helped by one, and those bought are the cheapest for what they make up for. Such a
    plan may cost more in the end, or lack what no single replica makes up for; then the first one is taken. The second
    search takes longer than the first, so that workloads of many models do without it.
    """
    few = _ReplicaAdder(plan, scene, aims, at_most, promises=promises)
    with_few = few.done()
    if not few.price or len(plan.models) > _MOST_SEARCHED_TWICE:
        return with_few
    below = few.price if not few.lacking_rps else math.inf
    cheap = _ReplicaAdder(plan, scene, aims, at_most, promises=promises, below=below)
    with_cheap = cheap.done()
    return with_cheap if (cheap.lacking_rps, cheap.price) < (few.lacking_rps, few.price) else with_few


class _ReplicaAdder:
    """Adds replicas until each model keeps what it asks for after every loss, and after the removal of replicas from
    places that are not allowed."""

    def __init__(
        self,
        plan: Plan,
        scene: PlacementContext,
        aims: Mapping[str, float],
        at_most: int | None = None,
        *,
        promises: bool = False,
        below: float | None = None,
    ) -> None:
        """`aims`: the part of each model's requests that the plan is to serve, or to promise, while nothing is lost;
        `at_most`: replicas that may be added. `below`: GPUs are bought only where no other replica helps, the cheapest
        for what they make up for, until they cost so much; None: one that makes up for all comes first."""
        self._left, self._promises = float("inf") if at_most is None else at_most, promises
        self.price = 0.0  # of the GPUs that were bought, per hour
        self._below, self._lacking_rps = below, dict[str, float]()
        self._plan = scene.sharing.completed(plan.model_copy(update={"models": scene.workload.models}))
        self._specs = {spec.name: spec for spec in scene.workload.models}
        self._scene, self._aims = scene, aims
        self._trial: Trial | None = None
        self._nothing = FailureDomain("", frozenset(), frozenset(aims))
        self._memory_mib = {kind: gpu.memory_mib for kind, gpu in scene.cluster.one_of_each.items()}
        self._prices = scene.cluster.prices
        self._outlooks = Outlooks(carries=scene.carries)
        self._options: dict[tuple[str, str], list[ShareCapacity]] = {}  # of models that generate, by GPU type
        self._pool = GpuPool(scene.cluster)
        for gpu in plan.gpus:
            self._pool.named_gpu(gpu.id, gpu.type)
        types = scene.cluster.gpu_types if scene.cluster.elastic else ()
        self._buyable = {kind: bought for kind in types if (bought := self._pool.next_gpu(kind))}

    def done(self) -> Plan:
        """Return the plan with all that could be added: first by what is expected, then by trials of the losses."""
        hopeless: set[tuple[str, str]] = set()
        for trial in dict.fromkeys((None, self._scene.trial)):
            self._trial, before = trial, None
            while self._plan is not before and self._left > 0:  # what is added for one loss may be lost with another
                before = self._plan
                for domain in self._losses():
                    self._add_for(domain, hopeless)
        return self._plan

    @property
    def lacking_rps(self) -> float:
        """What models lack in all cases together, once all is done."""
        return math.fsum(self._lacking_rps.values())

    def _add_for(self, domain: FailureDomain, hopeless: set[tuple[str, str]]) -> None:
        """Add replicas until models keep enough after a loss, and remember for which ones nothing helps."""
        short = self._short(self._plan, domain)
        stuck = set[str]()  # models that no replica helps where nothing is bought
        while True:
            self._lacking_rps[domain.name] = math.fsum(short.values())
            able = {name: missing for name, missing in short.items() if (domain.name, name) not in hopeless}
            if not able or self._left <= 0 or (self._below is not None and self.price >= self._below - SLIGHT):
                return
            name = max(able.keys() - stuck or able, key=lambda name: (able[name], name))
            is_bought = None if self._below is None else name in stuck
            names = [*able] if is_bought else [name]
            better = self._with_one_more(domain, names, short, is_bought=is_bought)
            if better is not None:
                if len(better[0].gpus) > len(self._plan.gpus):
                    stuck.clear()
                self._plan, short = better
                self._left -= 1
            elif is_bought is False:
                stuck.add(name)
            else:
                hopeless |= {(domain.name, name) for name in names}

    def _losses(self) -> Iterator[FailureDomain]:
        """Yield the cases in which models must keep their part: no loss (None), then each loss."""
        yield self._nothing
        yield from failure_domains(self._plan, [spec for spec in self._specs.values() if spec.survive])

    def _short(self, plan: Plan, domain: FailureDomain, *, is_sure: bool = True) -> dict[str, float]:
        """Return by how many requests per second models fall short of what they are to keep after a loss; unless it is
        to be sure, of what the formulas give, of which plans promise no more."""
        if domain.gpus:
            left = domain.without(plan)
            expected = shared_parts(left, self._outlooks.of(left, is_cautious=True).parts)
            parts = least_parts(self._trial(left) if self._trial is not None else None, left, expected)
        else:
            traffic = self._scene.traffic
            parts = self._outlooks.of(plan, traffic if self._promises else None).parts
            if is_sure and self._promises:
                parts = self._outlooks.with_margin(plan, parts, traffic)[0]
        short = {}
        for name in domain.models:
            spec = self._specs[name]
            # What is promised in full is so with caution, see `Outlooks.promised`.
            survives = IN_FULL * (spec.survive or 1.0) if domain.gpus else 1.0
            missing = survives * self._aims.get(name, 0.0) - parts.get(name, 0.0)
            if missing > SLIGHT:
                short[name] = missing * spec.rate_rps
        return short

    def _short_with(self, place: _Place, plan: Plan, short: Mapping[str, float], *, is_sure: bool) -> dict[str, float]:
        """Return what `_short` does, while nothing is lost, of the plan with a place taken. `short` is that without it:
        what the place does not connect serves what it did."""
        changed = plan.model_copy(update={"gpulets": connected_with([place.gpulet], plan.gpulets)})
        connected = {replica.name for gpulet in changed.gpulets for replica in gpulet.models}
        own = self._short(changed, replace(self._nothing, models=self._nothing.models & connected), is_sure=is_sure)
        return {name: missing for name, missing in short.items() if name not in connected} | own

    def _with_one_more(
        self, domain: FailureDomain, names: Sequence[str], short: Mapping[str, float], *, is_bought: bool | None
    ) -> tuple[Plan, dict[str, float]] | None:
        """Return the plan with one more replica of one of these models outside a domain, to make up for the domain's
        loss, and what models are then short of.

        The cheapest replica that makes up for all of the loss is taken; if there is none, the one that makes up for
        most. With a price to stay `below`, that comes after the price for a request that is made up for. None: no
        replica helps.

        Args:
            domain: that is lost.
            names: of the models.
            short: what models are short of after the loss, in requests per second.
            is_bought: whether it is on a GPU that is bought; None: on any.
        """
        before = math.fsum(short.values())
        lacking = math.fsum(self._short(self._plan, self._nothing).values()) if domain.gpus else 0.0
        best: tuple[tuple[float, ...], _Place, Plan, dict[str, float]] | None = None
        now = self._outlooks.of(self._plan, self._scene.traffic)
        busy = dict(zip((g.id for g in self._plan.gpulets), now.busy, strict=True))
        added = ((name, other) for name in names for other in self._to_add(domain, name, now.parts))
        places = ((name, place) for name, other in added for place in self._least_busy(domain, other, busy))
        is_whole = bool(domain.gpus) or self._plan.objective == "each"  # where all models are judged together
        by_gpu, judged = self._plan.by_gpu(), set[object]()
        passes = (False, True) if self._promises and not domain.gpus else (True,)
        worst: tuple[float, ...] = (math.inf,)  # of a place that helps nobody
        for name, place in places:
            if is_bought is not None and bool(place.price) != is_bought:
                continue
            others = by_gpu.get(place.gpu.id, ()) if place.beside is None else place.beside
            beside = tuple(alike_key(gpulet) for gpulet in others if gpulet.id != place.gpulet.id)
            alike = (name, place.gpu.type, place.price, alike_key(place.gpulet), beside)
            if alike in judged:  # most of a hundred idle GPUs are one and the same place
                continue
            judged.add(alike)
            dear = place.price if self._below is not None else 0.0
            if best is not None and (dear / before, 0.0, *place.cost) > best[0]:
                continue  # even if it made up for all
            plan = self._with(place)
            limit = worst if best is None else best[0]
            for is_sure in passes:
                if is_whole:
                    left = self._short(plan, domain, is_sure=is_sure)
                else:
                    left = self._short_with(place, plan, short, is_sure=is_sure)
                after = math.fsum(left.values())
                order = (1.0, after, *place.cost) if name in left else (0.0, *place.cost, after)
                rank = (dear / (before - after), *order) if after < before - SLIGHT else worst
                if rank >= limit:
                    break
            if rank >= limit:
                continue
            if domain.gpus and math.fsum(self._short(plan, self._nothing).values()) > lacking + SLIGHT:
                continue  # what is safe after a loss is no gain where it costs every day
            best = rank, place, plan, left
            if self._trial is not None and name not in left:
                break  # a trial takes long, and places come in order of their price
        if best is None:
            return None
        _, place, plan, left = best
        bought = self._pool.next_gpu(place.gpu.type) if place.price else None
        if bought is not None:
            self.price += place.price
            self._buyable[place.gpu.type] = bought
        return plan, left

    def _to_add(self, domain: FailureDomain, name: str, parts: Mapping[str, float]) -> Iterator[str]:
        """Yield the models whose replicas may help a model: itself, and of the models with which it shares gpu-lets the
        one that loses most. `parts` is what is served when nothing is lost."""
        yield name
        left = domain.without(self._plan)
        if domain.gpus:
            parts = self._outlooks.of(left, is_cautious=True).parts
        for names in connected_components([replica.name for replica in g.models] for g in left.gpulets):
            loser = min(sorted(names), key=lambda other: parts.get(other, 1.0))
            if name in names and loser != name:
                yield loser

    def _least_busy(self, domain: FailureDomain, name: str, busy: Mapping[str, float]) -> list[_Place]:
        places = sorted(self._places(domain, name), key=lambda place: (place.price, busy.get(place.gpulet.id, 0.0)))
        return [*places[:TRIED], *(place for place in places[TRIED:] if place.price)]

    def _places(self, domain: FailureDomain, name: str) -> Iterator[_Place]:
        """Yield where one more replica of a model could be: with others on a gpu-let, on what is left of a GPU's share,
        on a GPU that holds nothing, on one that is bought. A model that generates gets gpu-lets of its own."""
        by_gpu = self._plan.by_gpu()
        generates = self._specs[name].generates is not None
        for gpu in self._plan.gpus:
            if gpu.id in domain.gpus or not may_lie(self._specs[name], gpu):
                continue
            gpulets = by_gpu[gpu.id]
            if generates:
                yield from self._generating_places(name, gpu, gpulets)
                continue
            for gpulet in gpulets:
                if any(replica.steps is not None for replica in gpulet.models):
                    continue
                if not gpulet.joint_models and all(replica.name != name for replica in gpulet.models):
                    yield from self._place(name, gpu, gpulet, gpulets)
            left_pct = int(100.0 - sum(gpulet.effective_share_pct for gpulet in gpulets) + 1e-6)
            if left_pct > 0:
                opens = 0.0 if gpulets else 1.0
                new = free_gpulet_id(gpu.id, {gpulet.id for gpulet in gpulets})
                share_pct = float(left_pct) if gpulets else None
                empty = Gpulet(id=new, gpu=gpu.id, share_pct=share_pct, models=())
                yield from self._place(name, gpu, empty, gpulets, opens)
        for kind, bought in self._buyable.items():
            gpu = PlannedGpu.of(bought)
            if generates:
                yield from self._generating_places(name, gpu, (), self._prices[kind])
                continue
            new_one = Gpulet(id=gpulet_id(gpu.id, 0), gpu=gpu.id, models=())
            yield from self._place(name, gpu, new_one, (), 1.0, self._prices[kind])

    def _place(
        self,
        name: str,
        gpu: PlannedGpu,
        gpulet: Gpulet,
        others: Sequence[Gpulet],
        opens: float = 0.0,
        price: float = 0.0,
    ) -> Iterator[_Place]:
        """Yield a gpu-let with one more replica, if a request would be in time there and the memory suffices."""
        on = self._scene.sharing.costs[name].get(gpu.type)
        if on is None or not on.knows(gpulet.effective_share_pct, EVERY_RULE):
            return
        # Half of the SLO, as a batch waits while another one runs; the scheduler runs smaller ones where it must.
        size = on.largest_batch(on.slo_ms / 2.0, gpulet.effective_share_pct) or 1
        size = on.batches_in_memory(self._room_mib(gpu, gpulet, others), size)
        if size and on.steps(gpulet.effective_share_pct)[1] <= on.slo_ms:
            rate_rps = None if self._promises else 0.0  # a spare one, while nothing is lost
            models = (*gpulet.models, Replica(name=name, batch_size=size, rate_rps=rate_rps))
            # Rounds of a fixed length have no place for one more: whichever batch is due runs.
            grown = gpulet.model_copy(update={"models": models, "duty_cycle_ms": None, "memory_mib": None})
            yield _Place(gpu, grown, price, (price, opens, 0.0 if gpulet.models else 1.0))

    def _generating_places(
        self, name: str, gpu: PlannedGpu, others: Sequence[Gpulet], price: float = 0.0
    ) -> Iterator[_Place]:
        """Yield a GPU with one more gpu-let of a model that generates, as large as those that it has, or else of any
        share. It shares the memory that others leave with the gpu-lets that generate there, by their shares."""
        left_pct = 100.0 - sum(gpulet.effective_share_pct for gpulet in others) + 1e-6
        if any(replica.name == name for gpulet in others for replica in gpulet.models) or any(
            g.also_on for g in others
        ):
            return
        has = {g.effective_share_pct for g in self._plan.hosts_of(name)}
        known = self._scene.cluster.one_of_each[gpu.type]
        beside = [gpulet for gpulet in others if gpulet.models[0].steps is None]
        fixed_mib = total_mib(beside)
        writing = [gpulet for gpulet in others if gpulet.models[0].steps is not None]
        unit = [self._option(g.models[0].name, g.effective_share_pct, known) for g in writing]
        for option in self._options_of(name, known):
            if option.share_pct > left_pct or (has and option.share_pct not in has):
                continue
            if option.weights_mib is None and others:
                continue
            together = [*(each for each in unit if each is not None), option]
            if len(together) <= len(unit):
                continue  # what lies there is not known
            part = 1.0 - fixed_mib / known.memory_mib
            laid = [PlacedShare(each, (known,)) for each in together]
            *grown, new = gpulets_of(laid, self._scene.sharing.profiles, {known.id: part})
            holds = [g.models[0].kv_tokens or 0 for g in (*grown, new)]
            if any(held < LEAST_MEMORY * o.kv_tokens for held, o in zip(holds, together, strict=True)):
                continue
            smaller = [
                g.model_copy(update={"id": was.id, "gpu": gpu.id}) for g, was in zip(grown, writing, strict=True)
            ]
            one = new.model_copy(update={"id": free_gpulet_id(gpu.id, {g.id for g in others}), "gpu": gpu.id})
            opens = 0.0 if others else 1.0
            yield _Place(gpu, one, price, (price, opens, option.share_pct), (*beside, *smaller))

    def _options_of(self, name: str, gpu: Gpu) -> list[ShareCapacity]:
        key = name, gpu.type
        if key not in self._options:
            spec, profiles = self._specs[name], self._scene.sharing.profiles
            shares = shares_of(self._scene.workload)
            self._options[key] = options_of(spec, gpu, profiles, self._scene.carries, shares=shares)
        return self._options[key]

    def _option(self, name: str, share_pct: float, gpu: Gpu) -> ShareCapacity | None:
        return next((each for each in self._options_of(name, gpu) if each.share_pct == share_pct), None)

    def _room_mib(self, gpu: PlannedGpu, gpulet: Gpulet, others: Sequence[Gpulet]) -> float:
        """Return the memory of a GPU that none of its gpu-lets needs, or may take."""
        context_mib = self._scene.contexts_mib[gpu.type]
        taken = gpulet.held_mib or 0.0 if gpulet.models else 0.0
        for other in others:
            if other.id != gpulet.id:
                taken += other.memory_mib or (other.held_mib or 0.0) + context_mib
        return self._memory_mib[gpu.type] - taken - context_mib

    def _with(self, place: _Place) -> Plan:
        """Return the plan with a gpu-let as it is there."""
        beside = self._plan.on_gpu(place.gpu.id) if place.beside is None else place.beside
        on_gpu = [place.gpulet if g.id == place.gpulet.id else g for g in beside]
        on_gpu += [] if place.gpulet in on_gpu else [place.gpulet]
        gpus = self._plan.gpus if place.gpu in self._plan.gpus else (*self._plan.gpus, place.gpu)
        alone = self._plan.model_copy(update={"gpus": (place.gpu,), "gpulets": tuple(on_gpu)})
        done = self._scene.sharing.completed(alone).gpulets
        order = {gpu.id: index for index, gpu in enumerate(gpus)}
        others = (gpulet for gpulet in self._plan.gpulets if place.gpu.id not in gpulet.gpus)
        gpulets = sorted((*others, *done), key=lambda gpulet: order[gpulet.gpu])
        return self._plan.model_copy(update={"gpus": gpus, "gpulets": tuple(gpulets)})


@dataclass(frozen=True)
class _Place:
    """A gpu-let with one more replica on it. `price` is that of its GPU per hour, if the GPU is bought for it. `cost`
    orders places: by the price, then by whether the GPU was idle, then by whether the gpu-let is new. `beside` are the
    other gpu-lets of the GPU where they change."""

    gpu: PlannedGpu
    gpulet: Gpulet
    price: float
    cost: tuple[float, float, float]
    beside: tuple[Gpulet, ...] | None = None
