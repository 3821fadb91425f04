"""Places of replicas, whatever policy made the plan: on GPUs that they may use, apart from each other, and so many that
the loss of a GPU, a node or a rack leaves each model what its `survive` asks for.

A finished plan is changed in three steps. First, GPUs of one type exchange what they hold. Second, replicas that still
lie where they must not are removed. Third, replicas are added one at a time, each where it makes up for most of a loss.
How much that is follows first from the formulas of every expectation, and then from trials, when the caller has given a
function that tries plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from tenuto.errors import Problem, refused
from tenuto.placement.cluster import Cluster, Gpu, node_of
from tenuto.placement.components import connected_components
from tenuto.placement.costs import context_mib_of
from tenuto.placement.expectation.outlook import IN_FULL, Outlooks
from tenuto.placement.expectation.sharing import Sharing
from tenuto.placement.generation_capacity import (
    Carries,
    PlacedShare,
    ShareCapacity,
    carried,
    gpulets_of,
    options_of,
    shares_of,
)
from tenuto.placement.placement_constraints import domain_of, is_at, may_lie, names_of, prefers
from tenuto.placement.plan import ExpectedLoss, Plan, PlannedGpu
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import gpulet_id
from tenuto.placement.program import Gpulet, Replica
from tenuto.placement.workload import ModelSpec, Workload
from tenuto.profiles.share_latency import EVERY_RULE

TRIED = 8  # limit: places for one more replica that are judged: those with the least busy gpu-lets
UNTRIED = "what losses leave follows from the formulas, and was not tried"
STAYS = 1e-6  # derived: the worth of a GPU keeping what it holds; decides only where preferences are equal
LEAST_MEMORY = 0.25  # fitted: of the memory of its share, with less of which a gpu-let that generates is not tried
SLIGHT = 1e-4  # derived: a part of a rate this small is below what the expectation can tell

Trial = Callable[[Plan], Mapping[str, float] | None]
"""Tries a plan: returns the part of each model's requests that is served in time, or 1 if that is at least `IN_FULL`.
None: the plan is too large to be tried."""


def without(cluster: Cluster, places: Sequence[str]) -> Cluster:
    """Return what is left of a cluster without some nodes, racks or GPUs.

    Raises:
        InvalidInputError: it has no such place, or nothing is left.
    """
    known = sorted(names_of(cluster.gpus))
    for name in places:
        if name not in known:
            raise refused("node", name, "no such place in the cluster", f"Name one of {', '.join(known[:12])}.")
    gone = tuple(gpu.id for gpu in cluster.gpus if is_at(gpu, places))
    if len(gone) == len(cluster.gpus):
        raise refused(
            "node",
            ", ".join(places),
            "no GPU would be left",
            "Leave one (`tenuto undrain`, where it is drained), or add a node first.",
        )
    return cluster.model_copy(update={"left_out": (*(cluster.left_out or ()), *gone)}) if gone else cluster


def drained(plan: Plan, cluster: Cluster, places: Sequence[str]) -> Plan:
    """Return a plan that was made without some places of a cluster, with their names and their GPUs added."""
    known = {gpu.id for gpu in plan.gpus}
    aside = tuple(PlannedGpu.of(gpu) for gpu in cluster.gpus if is_at(gpu, places) and gpu.id not in known)
    return plan.model_copy(update={"gpus": (*plan.gpus, *aside), "drained": tuple(places)})


def preferences_missed(plan: Plan) -> dict[str, str]:
    """Return which models lie elsewhere than where they prefer, in whole or in part, and why."""
    gpus, found = {gpu.id: gpu for gpu in plan.gpus}, {}
    for spec in plan.models:
        held = [gpus[gpu] for gpulet in plan.hosts_of(spec.name) for gpu in gpulet.gpus]
        away = [gpu for gpu in held if spec.prefer is not None and not prefers(spec, gpu)]
        if away:
            here = {gpu.type for gpu in plan.gpus if prefers(spec, gpu) and not is_at(gpu, plan.drained)}
            missing = sorted({gpu.type for gpu in away} - here)
            why = "no exchange of what whole GPUs hold brings it there at no cost"
            if missing:
                why = f"no {' and no '.join(missing)} there may hold anything"
            ids = ", ".join(dict.fromkeys(gpu.id for gpu in away))
            found[spec.name] = f"{len(away)} of {len(held)} replicas on {ids}, not on {spec.prefer}: {why}"
    return found


def place_problems(workload: Workload, cluster: Cluster) -> Iterator[Problem]:
    """Yield what no plan can obey: unknown places, models that may lie nowhere, and losses that nothing can survive."""
    gpus, known = cluster.gpus, names_of(cluster.gpus)
    aside = {name for gpu in cluster.left_out or () for name in (gpu, node_of(gpu))}
    cure = f"Name nodes, racks or GPU ids: {', '.join(sorted(known)[:12])}."
    for index, spec in enumerate(workload.models):
        at = f"models.{index}"
        for key in ("only_on", "keep_off"):
            unknown = [name for name in getattr(spec, key) if name not in known]
            if unknown:
                yield Problem(f"{at}.{key}", unknown[0], "no such place in the cluster", cure)
        named = bool(spec.only_on or spec.keep_off)
        if cluster.elastic and (named or spec.spread in ("node", "rack")):
            key = "spread" if spec.spread in ("node", "rack") else "only_on" if spec.only_on else "keep_off"
            rule = "an elastic cluster does not say on which node a GPU will be"
            yield Problem(f"{at}.{key}", getattr(spec, key), rule, "Plan on a fixed cluster, or use spread: gpu.")
        elif not (allowed := [gpu for gpu in gpus if may_lie(spec, gpu)]):
            key = "keep_off" if spec.keep_off else "only_on"
            if known.issuperset((*spec.only_on, *spec.keep_off)):
                yield Problem(f"{at}.{key}", getattr(spec, key), "leaves the model no GPU", "Allow it another one.")
        elif spec.prefer is not None and not cluster.elastic and spec.prefer not in known | aside:
            yield Problem(f"{at}.prefer", spec.prefer, "no such place in the cluster", cure)
        elif spec.prefer in known and not cluster.elastic and not any(prefers(spec, gpu) for gpu in allowed):
            rule = "is where the model must not lie, by its only_on and keep_off"
            yield Problem(f"{at}.prefer", spec.prefer, rule, "Leave one of them out.")
        elif spec.survive is not None and not cluster.elastic:
            kind = spec.spread or "gpu"
            if len({domain_of(gpu, kind) for gpu in allowed}) < 2:
                rule = f"the model may use one {kind} only, and nothing survives its loss"
                yield Problem(f"{at}.survive", spec.survive, rule, f"Give the cluster a second {kind}.")


def asks(spec: ModelSpec) -> bool:
    """Return whether a model says where its replicas are to lie."""
    return bool(spec.spread or spec.survive or spec.only_on or spec.keep_off)


def bearable(workload: Workload, gpus: Sequence[Gpu]) -> Workload:
    """Return the part of a workload that the GPUs that are left can obey.

    Left out are places that are gone, `survive` of models that nothing could survive any more, and models that may lie
    on none of these GPUs.
    """
    known = names_of(gpus)
    models = []
    for spec in workload.models:
        allowed = [gpu for gpu in gpus if may_lie(spec, gpu)]
        here = {key: tuple(name for name in getattr(spec, key) if name in known) for key in ("only_on", "keep_off")}
        is_alone = len({domain_of(gpu, spec.spread or "gpu") for gpu in allowed}) < 2
        if allowed:
            liked = spec.prefer if any(prefers(spec, gpu) for gpu in allowed) else None
            update = {**here, "survive": None if is_alone else spec.survive, "prefer": liked}
            models.append(spec.model_copy(update=update))
    return workload.model_copy(update={"models": tuple(models)})


def with_the_rest(plan: Plan, workload: Workload) -> Plan:
    """Return a plan that was made for the `bearable` part of a workload as one for all of it. The other models are
    unserved."""
    made_for = {spec.name for spec in plan.models}
    rest = tuple(spec.name for spec in workload.models if spec.name not in made_for)
    reasons = plan.unserved_reasons | dict.fromkeys(rest, "no GPU that it may be on is left")
    told = {"unserved": (*plan.unserved, *rest), "unserved_reasons": reasons}
    return plan.model_copy(update={"models": workload.models, **told})


def unmet(plan: Plan) -> dict[str, str]:
    """Return by model which wish for its places the plan does not meet. `expected` must be that of this plan."""
    specs, gpus = {spec.name: spec for spec in plan.models}, {gpu.id: gpu for gpu in plan.gpus}
    held = [(r.name, gpu) for g in plan.gpulets for gpu in g.gpus for r in g.models if r.name in specs]
    wrong = {name: f"it lies on {gpu}" for name, gpu in held if not may_lie(specs[name], gpus[gpu])}
    return not_surviving(plan) | wrong


def with_losses(plan: Plan, trial: Trial | None = None) -> Plan:
    """Return a plan with its promises after each loss of a domain that holds a model with `spread` or `survive`.

    When a trial of the loss serves less than the formulas give, the plan promises that. When there is no trial, the
    last assumption of the plan says so.
    """
    asked = [spec for spec in plan.models if spec.spread is not None or spec.survive is not None]
    outlooks, found, is_tried = Outlooks(), [], True
    for domain in _domains(plan, asked):
        left = domain.without(plan)
        served = trial(left) if trial is not None else None
        is_tried = is_tried and served is not None
        parts = _at_most(served, left, _whoever_loses(left, outlooks.promised(left)[0]))
        rates = {s.name: round(parts.get(s.name, 0.0) * s.rate_rps, 6) for s in asked if s.name in domain.models}
        found.append(ExpectedLoss(domain=domain.name, goodput_rps=rates))
    others = tuple(line for line in plan.expected.assumptions if line != UNTRIED)
    update = {"losses": tuple(found), "assumptions": others if is_tried else (*others, UNTRIED)}
    return plan.model_copy(update={"expected": plan.expected.model_copy(update=update)})


def _whoever_loses(plan: Plan, parts: Mapping[str, float]) -> dict[str, float]:
    """Return for each model the least part that is left to any model with which it shares gpu-lets, directly or through
    others. The scheduler decides which of these models an overload falls on, so that no more can be promised."""
    together = connected_components([replica.name for replica in gpulet.models] for gpulet in plan.gpulets)
    return {name: min(parts.get(other, 0.0) for other in names) for names in together for name in names}


def _at_most(served: Mapping[str, float] | None, left: Plan, parts: Mapping[str, float]) -> Mapping[str, float]:
    """Return for each model the part of its requests that the rest of a plan is expected to serve. When a trial served
    less, that counts."""
    if served is None:
        return parts
    least = _whoever_loses(left, served)
    return {name: min(part, least.get(name, 0.0)) for name, part in parts.items()}


def not_surviving(plan: Plan) -> dict[str, str]:
    """Return by model why it keeps less than its `survive` asks for: the loss that leaves it least."""
    found: dict[str, tuple[float, str]] = {}
    for loss, spec in product(plan.expected.losses, plan.models):
        promised = plan.expected.models.get(spec.name)
        left = loss.goodput_rps.get(spec.name)
        if spec.survive is None or promised is None or left is None or promised.goodput_rps <= 0.0:
            continue
        part = left / promised.goodput_rps
        if part < IN_FULL * spec.survive - SLIGHT and part < found.get(spec.name, (1.0, ""))[0]:
            why = f"the loss of {loss.domain} leaves it {left:.4g} of {promised.goodput_rps:.4g} rps"
            found[spec.name] = part, f"{why}, and {100 * spec.survive:g} % of it are to survive"
    return {name: why for name, (_, why) in found.items()}


@dataclass(frozen=True)
class _Domain:
    """A domain: GPUs that are lost at once, and the models that care for this loss."""

    name: str
    gpus: frozenset[str]
    models: frozenset[str]

    def without(self, plan: Plan) -> Plan:
        """Return the plan that runs after the loss."""
        return plan.model_copy(update={"gpulets": tuple(g for g in plan.gpulets if self.gpus.isdisjoint(g.gpus))})


def _domains(plan: Plan, asked: Sequence[ModelSpec]) -> list[_Domain]:
    """Return the domains whose loss takes a replica of a model that names their kind."""
    by_gpu = plan.by_gpu()
    found = []
    for kind in ("gpu", "node", "rack"):
        names = {spec.name for spec in asked if (spec.spread or "gpu") == kind}
        if not names:
            continue
        together: dict[str, set[str]] = defaultdict(set)
        for gpu in plan.gpus:
            together[domain_of(gpu, kind)].add(gpu.id)
        for domain, gpus in together.items():
            held = {replica.name for gpu in gpus for gpulet in by_gpu[gpu] for replica in gpulet.models}
            if held & names:
                found.append(_Domain(f"{kind} {domain}", frozenset(gpus), frozenset(held & names)))
    return found


@dataclass(frozen=True)
class PlacementContext:
    """What a plan is made for and with. On an elastic cluster further GPUs can be had. `sharing` knows what models cost
    and fills in the latencies of a plan with other gpu-lets; `trial` tries what a loss leaves; `carries` judges a
    gpu-let that generates."""

    workload: Workload
    cluster: Cluster
    sharing: Sharing
    trial: Trial | None = None
    carries: Carries = carried

    @cached_property
    def contexts_mib(self) -> dict[str, float]:
        """The memory of a process's CUDA context, by GPU type."""
        return {kind: context_mib_of(kind, self.sharing.profiles) for kind in self.cluster.gpu_types}


def arranged(
    plan: Plan, scene: PlacementContext, *, parts: Mapping[str, float] | None = None, at_most: int | None = None
) -> Plan:
    """Return a plan of any policy with its replicas where the models ask; the plan itself when no model asks.

    On a fixed cluster some wishes cannot be met. They are left unmet, and `not_surviving` names them.

    Args:
        plan: with latencies.
        scene: what it is made for.
        parts: what is placed stays, and replicas are added until the plan promises this part of each model's requests;
            None: the plan is a new one, which serves enough.
        at_most: replicas that may be added.
    """
    asked = [spec for spec in scene.workload.models if asks(spec) or spec.prefer is not None]
    is_fixed = not scene.cluster.elastic
    if parts is None:
        if not asked or not plan.gpulets:
            return plan
        outlooks = Outlooks(carries=scene.carries)
        wanted = outlooks.of(plan.model_copy(update={"models": scene.workload.models})).parts
        return _ReplicaAdder(_apart(plan, asked) if is_fixed else plan, scene, wanted).done()
    if is_fixed:
        plan = plan.model_copy(update={"gpulets": tuple(_allowed(plan.gpulets, plan.gpus, asked))})
    return _ReplicaAdder(plan, scene, parts, at_most, promises=True).done()


def _allowed(gpulets: Iterable[Gpulet], gpus: Sequence[PlannedGpu], asked: Sequence[ModelSpec]) -> Iterator[Gpulet]:
    """Yield gpu-lets without the replicas that lie where they must not."""
    there, specs = {gpu.id: gpu for gpu in gpus}, {spec.name: spec for spec in asked}
    for gpulet in gpulets:
        names = [
            r.name
            for r in gpulet.models
            if r.name not in specs or all(may_lie(specs[r.name], there[gpu]) for gpu in gpulet.gpus)
        ]
        if left := gpulet.only(names):
            yield left


# --- what GPUs hold changes places ----------------------------------------------------------------------------------


def _apart(plan: Plan, asked: Sequence[ModelSpec]) -> Plan:
    """Return the plan after GPUs of one type have exchanged what they hold.

    An exchange is made when it brings models to places that they may use, or further apart. When it changes neither, it
    is made if it brings models to places that they prefer. Replicas that still lie where they must not are removed.
    """
    gpus = {gpu.id: gpu for gpu in plan.gpus}
    specs = {spec.name: spec for spec in asked}
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

    is_better = any(map(asks, asked))
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
    there = [gpulet.model_copy(update={"gpu": lies_on[gpulet.gpu]}) for gpulet in plan.gpulets]
    for gpulet in _allowed(sorted(there, key=lambda g: order[g.gpu]), plan.gpus, asked):
        gpulets.append(gpulet.model_copy(update={"id": gpulet_id(gpulet.gpu, taken[gpulet.gpu])}))
        taken[gpulet.gpu] += 1
    return plan.model_copy(update={"gpulets": tuple(gpulets)})


def _best_places(gpus: Sequence[PlannedGpu], worth: Callable[[str, str], float]) -> dict[str, str]:
    """Return for each GPU the GPU of its type that gets what it holds, so that the worth is highest. When staying is
    worth as much, it stays."""
    from scipy.optimize import linear_sum_assignment

    found: dict[str, str] = {}
    for kind in dict.fromkeys(gpu.type for gpu in gpus):
        names = [gpu.id for gpu in gpus if gpu.type == kind]
        values = [[worth(was, at) + STAYS * (was == at) for at in names] for was in names]
        found |= {names[was]: names[at] for was, at in zip(*linear_sum_assignment(values, maximize=True), strict=True)}
    return found


# --- replicas are added ---------------------------------------------------------------------------------------------


class _ReplicaAdder:
    """Adds replicas until each model keeps what it asks for after every loss, and after the removal of replicas from
    places that are not allowed."""

    def __init__(
        self,
        plan: Plan,
        scene: PlacementContext,
        wanted: Mapping[str, float],
        at_most: int | None = None,
        *,
        promises: bool = False,
    ) -> None:
        """`wanted`: the part of each model's requests that the plan is to serve, or to promise, while nothing is lost;
        `at_most`: replicas that may be added."""
        self._left, self._promises = float("inf") if at_most is None else at_most, promises
        self._plan = scene.sharing.completed(plan.model_copy(update={"models": scene.workload.models}))
        self._specs = {spec.name: spec for spec in scene.workload.models}
        self._scene, self._wanted = scene, wanted
        self._trial: Trial | None = None
        self._nothing = _Domain("", frozenset(), frozenset(wanted))
        self._memory_mib = {kind: gpu.memory_mib for kind, gpu in scene.cluster.one_of_each.items()}
        self._prices = scene.cluster.prices
        self._outlooks = Outlooks(carries=scene.carries)
        self._options: dict[tuple[str, str], list[ShareCapacity]] = {}  # of models that generate, by GPU type
        self._pool = GpuPool(scene.cluster)
        for gpu in plan.gpus:
            self._pool.take_named(gpu.id, gpu.type)
        types = scene.cluster.gpu_types if scene.cluster.elastic else ()
        self._buyable = {kind: bought for kind in types if (bought := self._pool.take(kind))}

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

    def _add_for(self, domain: _Domain, hopeless: set[tuple[str, str]]) -> None:
        """Add replicas until models keep enough after a loss, and remember for which ones nothing helps."""
        while self._left > 0:
            short = self._short(self._plan, domain)
            able = {name: missing for name, missing in short.items() if (domain.name, name) not in hopeless}
            if not able:
                return
            name = max(able, key=lambda name: (able[name], name))
            better = self._with_one_more(domain, name, sum(short.values()))
            if better is None:
                hopeless.add((domain.name, name))
            else:
                self._plan = better
                self._left -= 1

    def _losses(self) -> Iterator[_Domain]:
        """Yield the cases in which models must keep their part: no loss (None), then each loss."""
        yield self._nothing
        yield from _domains(self._plan, [spec for spec in self._specs.values() if spec.survive])

    def _short(self, plan: Plan, domain: _Domain) -> dict[str, float]:
        """Return by how many requests per second models fall short of what they are to keep after a loss."""
        if domain.gpus:
            left = domain.without(plan)
            expected = _whoever_loses(left, self._outlooks.of(left, is_cautious=True).parts)
            parts = _at_most(self._trial(left) if self._trial is not None else None, left, expected)
        else:
            parts = self._outlooks.promised(plan)[0] if self._promises else self._outlooks.of(plan).parts
        found = {}
        for name in domain.models:
            spec = self._specs[name]
            # What is promised in full is so with caution, see `Outlooks.promised`.
            kept = IN_FULL * (spec.survive or 1.0) if domain.gpus else 1.0
            missing = kept * self._wanted.get(name, 0.0) - parts.get(name, 0.0)
            if missing > SLIGHT:
                found[name] = missing * spec.rate_rps
        return found

    def _with_one_more(self, domain: _Domain, name: str, before: float) -> Plan | None:
        """Return the plan with one more replica of a model outside a domain, to make up for the domain's loss.

        The cheapest replica that makes up for all of the loss is taken; if there is none, the one that makes up for
        most. None: no replica helps.

        Args:
            domain: that is lost.
            name: of the model.
            before: what all models are short of after the loss, in requests per second.
        """
        lacking = sum(self._short(self._plan, self._nothing).values())
        best: tuple[tuple[float, ...], _Place, Plan] | None = None
        busy = dict(zip((g.id for g in self._plan.gpulets), self._outlooks.of(self._plan).busy, strict=True))
        for place in (place for model in self._to_add(domain, name) for place in self._least_busy(domain, model, busy)):
            plan = self._with(place)
            left = self._short(plan, domain)
            after = sum(left.values())
            rank = (1.0, after, *place.cost) if name in left else (0.0, *place.cost, after)
            if after >= before - SLIGHT or (best is not None and rank >= best[0]):
                continue
            if domain.gpus and sum(self._short(plan, self._nothing).values()) > lacking + SLIGHT:
                continue  # what is safe after a loss is no gain where it costs every day
            best = rank, place, plan
            if self._trial is not None and name not in left:
                break  # a trial takes long, and places come in order of their price
        if best is None:
            return None
        _, place, plan = best
        bought = self._pool.take(place.gpu.type) if place.price else None
        if bought is not None:
            self._buyable[place.gpu.type] = bought
        return plan

    def _to_add(self, domain: _Domain, name: str) -> Iterator[str]:
        """Yield the models whose replicas may help a model: itself, and of the models with which it shares gpu-lets the
        one that loses most."""
        yield name
        left = domain.without(self._plan)
        parts = self._outlooks.of(left, is_cautious=bool(domain.gpus)).parts
        for names in connected_components([replica.name for replica in g.models] for g in left.gpulets):
            loser = min(sorted(names), key=lambda other: parts.get(other, 1.0))
            if name in names and loser != name:
                yield loser

    def _least_busy(self, domain: _Domain, name: str, busy: Mapping[str, float]) -> list[_Place]:
        places = sorted(self._places(domain, name), key=lambda place: (place.price, busy.get(place.gpulet.id, 0.0)))
        return [*places[:TRIED], *(place for place in places[TRIED:] if place.price)]

    def _places(self, domain: _Domain, name: str) -> Iterator[_Place]:
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
                names = {gpulet.id for gpulet in gpulets}
                new = next(new for i in range(len(names) + 1) if (new := gpulet_id(gpu.id, i)) not in names)
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
        there: Sequence[Gpulet],
        opens: float = 0.0,
        price: float = 0.0,
    ) -> Iterator[_Place]:
        """Yield a gpu-let with one more replica, if a request would be in time there and the memory suffices."""
        on = self._scene.sharing.costs[name].get(gpu.type)
        if on is None or not on.knows(gpulet.effective_share_pct, EVERY_RULE):
            return
        # Half of the SLO, as a batch waits while another one runs; the scheduler runs smaller ones where it must.
        size = on.largest_batch(on.slo_ms / 2.0, gpulet.effective_share_pct) or 1
        size = on.batches_in_memory(self._room_mib(gpu, gpulet, there), size)
        if size and on.steps(gpulet.effective_share_pct)[1] <= on.slo_ms:
            rate_rps = None if self._promises else 0.0  # a spare one, while nothing is lost
            models = (*gpulet.models, Replica(name=name, batch_size=size, rate_rps=rate_rps))
            # Rounds of a fixed length have no place for one more: whichever batch is due runs.
            grown = gpulet.model_copy(update={"models": models, "duty_cycle_ms": None, "memory_mib": None})
            yield _Place(gpu, grown, price, (price, opens, 0.0 if gpulet.models else 1.0))

    def _generating_places(
        self, name: str, gpu: PlannedGpu, there: Sequence[Gpulet], price: float = 0.0
    ) -> Iterator[_Place]:
        """Yield a GPU with one more gpu-let of a model that generates, as large as those that it has, or else of any
        share. It shares the memory that others leave with the gpu-lets that generate there, by their shares."""
        left_pct = 100.0 - sum(gpulet.effective_share_pct for gpulet in there) + 1e-6
        if any(replica.name == name for gpulet in there for replica in gpulet.models) or any(g.also_on for g in there):
            return
        has = {g.effective_share_pct for g in self._plan.hosts_of(name)}
        known = self._scene.cluster.one_of_each[gpu.type]
        beside = [gpulet for gpulet in there if gpulet.models[0].steps is None]
        fixed_mib = sum(other.memory_mib or other.held_mib or 0.0 for other in beside)
        writing = [gpulet for gpulet in there if gpulet.models[0].steps is not None]
        unit = [self._option(g.models[0].name, g.effective_share_pct, known) for g in writing]
        for option in self._options_of(name, known):
            if option.share_pct > left_pct or (has and option.share_pct not in has):
                continue
            if option.weights_mib is None and there:
                continue
            together = [*(each for each in unit if each is not None), option]
            rates = [*(g.models[0].rate_rps or 0.0 for g in writing), 0.0]
            if len(together) <= len(unit):
                continue  # what lies there is not known
            part = 1.0 - fixed_mib / known.memory_mib
            laid = [PlacedShare(each, (known,)) for each in together]
            *grown, new = gpulets_of(laid, self._scene.sharing.profiles, rates, {known.id: part})
            holds = [g.models[0].kv_tokens or 0 for g in (*grown, new)]
            if any(held < LEAST_MEMORY * o.kv_tokens for held, o in zip(holds, together, strict=True)):
                continue
            names = {gpulet.id for gpulet in there}
            free = next(free for i in range(len(names) + 1) if (free := gpulet_id(gpu.id, i)) not in names)
            kept = [g.model_copy(update={"id": was.id, "gpu": gpu.id}) for g, was in zip(grown, writing, strict=True)]
            one = new.model_copy(update={"id": free, "gpu": gpu.id})
            opens = 0.0 if there else 1.0
            yield _Place(gpu, one, price, (price, opens, option.share_pct), (*beside, *kept))

    def _options_of(self, name: str, gpu: Gpu) -> list[ShareCapacity]:
        key = name, gpu.type
        if key not in self._options:
            spec, profiles = self._specs[name], self._scene.sharing.profiles
            shares = shares_of(self._scene.workload)
            self._options[key] = options_of(spec, gpu, profiles, self._scene.carries, shares=shares)
        return self._options[key]

    def _option(self, name: str, share_pct: float, gpu: Gpu) -> ShareCapacity | None:
        return next((each for each in self._options_of(name, gpu) if each.share_pct == share_pct), None)

    def _room_mib(self, gpu: PlannedGpu, gpulet: Gpulet, there: Sequence[Gpulet]) -> float:
        """Return the memory of a GPU that none of its gpu-lets needs, or may take."""
        context_mib = self._scene.contexts_mib[gpu.type]
        taken = gpulet.held_mib or 0.0 if gpulet.models else 0.0
        for other in there:
            if other.id != gpulet.id:
                taken += other.memory_mib or (other.held_mib or 0.0) + context_mib
        return self._memory_mib[gpu.type] - taken - context_mib

    def _with(self, place: _Place) -> Plan:
        """Return the plan with a gpu-let as it is there."""
        there = self._plan.on_gpu(place.gpu.id) if place.beside is None else place.beside
        on_gpu = [place.gpulet if g.id == place.gpulet.id else g for g in there]
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
