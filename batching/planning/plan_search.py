"""The search of policy `tenuto`: one loop that takes candidates, has each judged, and keeps the best by one order.

On a fixed cluster the candidates are the plans of other policies and of its own starts, in the order of what is
expected of them, for one split of the applications' deadlines after the other. On an elastic one they are those and
then the plans of clusters that are bought: with more GPUs until a plan stands its trial, and from there on with GPUs
that cost less. GPUs that may be cut into MIG instances have candidates of their own.

The judge is what is expected of a plan, by the model that makes every plan's expectation, and trials in virtual time
under the scheduler that will serve it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, product

from tenuto.batching.core.deferred.deferring import DeferredOptions
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.judging import Judged, Worth, foreseen
from tenuto.batching.planning.sliced import ways_to_slice
from tenuto.batching.planning.starts import Balanced, Everywhere, TypesApart
from tenuto.batching.planning.trial import Trials
from tenuto.errors import TenutoError, first_line
from tenuto.options import option
from tenuto.outcome import ATTAINED
from tenuto.placement import Cluster, Plan, Policy, Workload, load_policy, solve
from tenuto.placement.cluster import GpuGroup, Node
from tenuto.placement.deadline_split import candidate_splits, least_price, shortened_splits
from tenuto.placement.planner.plan_order import PlanRank
from tenuto.placement.policies.parvagpu.parvagpu import ParvaGpu
from tenuto.placement.watch import PlanningWatch
from tenuto.placement.workload import Objective
from tenuto.profiles import Profiles

STARTS = ("symphony", "gpulet")  # the quickest first
WITH_NEIGHBOURS = ("gpulet",)  # policies that plan without an interference model or with one: both are starts
# Where a start differs from the published policy: symphony's moves and swaps come as near as its solver does in
# seconds; gpulet serves more on a full cluster (in 23 of 120 random workloads, never less).
STARTED_WITH = {"symphony": {"time_limit_s": "0"}, "gpulet": {"merge_without_free": "true"}}
LARGE = 40  # limit: models or GPUs of a plan that is tried; beyond, a trial takes minutes
# Derived: of its time, as the scheduler's `save_above`: a busiest gpu-let below it has headroom enough, and fewer
# processes are better.
ROOMY = DeferredOptions().save_above
# Fitted: times as many requests of other arrivals in a confirming trial. Of rare models the short trial sees a few
# hundred requests, whose misses come in clumps: of 193 models four had stood it and lose 1.2 to 2.6 % for good
# (lab/journal/benchmarks-placement.md).
CONFIRMING = 12
ROUNDS = 4  # limit: confirming trials of a plan of which it is not clear whether it keeps every model's attainment
MOST_MORE = 8  # limit: GPUs of a cluster beyond twice as many as a start has
NEAR = 3.0  # limit: times as many misses as there may be, up to which further splits of deadlines are tried
FREE = 1e-6  # derived: below every price: of a GPU that costs nothing, so that fewer of them are better
CLUSTERS = 40  # limit: clusters that are planned for one price
STEPS, REACH = 8, 4  # fitted: types are exchanged in steps of an eighth of all GPUs at first, up to four of them


def is_large(workload: Workload, cluster: Cluster) -> bool:
    """Return whether there are too many models or GPUs for trials."""
    return max(len(workload.models), len(cluster.gpus)) > LARGE


@dataclass(kw_only=True, eq=False)
class SearchOptions:
    """The options of a search, see `TenutoPolicy`."""

    scheduler: str = "deferred"
    starts: tuple[str, ...] = STARTS
    requests: int = option(8_000, minimum=1)
    attainment: float = option(ATTAINED, above=0, maximum=1)
    seed: int = option(0, minimum=0)
    network_ms: tuple[float, ...] = option((0.0, 0.0, 0.0), minimum=0)

    @property
    def aim(self) -> float:
        """The attainment that a short trial must show: half of the misses to spare, as other arrivals are less kind."""
        return (1.0 + self.attainment) / 2.0


@dataclass(frozen=True)
class JudgedPlan:
    """A completed plan, what made it, and what it serves: as expected, and where it was tried by its trial and by the
    longer ones that confirm it."""

    start: str
    plan: Plan
    foreseen: Judged
    trial: Judged | None = None
    confirmed: Judged | None = None

    @cached_property
    def bought(self) -> Counter[str]:
        """How many GPUs of each type the plan uses."""
        used = set(self.plan.used_gpus)
        return Counter(gpu.type for gpu in self.plan.gpus if gpu.id in used)

    @property
    def is_promised(self) -> bool:
        """Whether it promises every model in full, which is more than to be expected to: a tenth more load is stood."""
        return not self.plan.unserved_reasons

    @property
    def judged(self) -> Judged:
        """The longest trial, or what is expected where there was none."""
        return self.confirmed or self.trial or self.foreseen


def rank_of(each: JudgedPlan, judged: Judged, attainment: float | None, *, by_price: bool = False) -> PlanRank:
    """Return the rank of a candidate.

    First come those that keep every model's attainment: by price; or on GPUs that are given by headroom, that is by how
    busy the busiest gpu-let is. As busy to a tenth, or below half of its time, the one with the fewest gpu-lets comes
    first, as each is a process. Behind them stand the others by the value that they serve.

    Args:
        each: the candidate.
        judged: what it is compared by: what is expected of it, or a trial of the same arrivals as the others'.
        attainment: of every model; None: only the value counts.
        by_price: whether fewer GPUs are better than headroom.
    """
    if attainment is None or not judged.keeps(attainment):
        return PlanRank(misses_attainment=True, lacking_rps=-judged.value)
    if by_price:
        return PlanRank(price=each.plan.expected.price)
    load = float(judged.busy.max())
    return PlanRank(load_tenths=round(max(load, ROOMY), 1), gpulets=len(each.plan.gpulets), load=load)


class PlanSource:
    """Makes the candidates for one workload. `refused` says why policies cannot plan. `least_price` is a price that no
    cluster for applications goes below; 0 where none is known."""

    def __init__(
        self,
        options: SearchOptions,
        workload: Workload,
        cluster: Cluster,
        profiles: Profiles,
        watch: PlanningWatch,
        objective: Objective,
        tries_plans: bool = True,
    ) -> None:
        """`objective`: by which plans are compared. `tries_plans`: whether trials decide, unless plans are large."""
        self._options, self._cluster, self._profiles, self._watch = options, cluster, profiles, watch
        # Planned without merging: the planner chooses afterwards which models become one program.
        self._unsplit = workload.model_copy(update={"merge": "off"})
        self._more_splits = candidate_splits(self._unsplit, cluster, profiles)
        self._splits = [next(self._more_splits)]  # further ones are made when none of these serves all
        self._workload = workload = self._splits[0]
        self._objective, self.worth = objective, Worth(workload.models, objective, workload.applications)
        self.least_price = least_price(workload, cluster, profiles) if self.worth.applications else 0.0
        self.is_large = not tries_plans or is_large(workload, cluster)
        self.refused: dict[str, str] = {}

    def by_split(self, cluster: Cluster, *, is_one_enough: bool = False) -> Iterator[list[JudgedPlan]]:
        """Yield the plans `on` a cluster for each split of the applications' deadlines, the likeliest first."""
        yield from (self.on(cluster, is_one_enough=is_one_enough, split=split) for split in self._splits)
        for split in self._more_splits:
            self._splits.append(split)
            yield self.on(cluster, is_one_enough=is_one_enough, split=split)

    @cached_property
    def shortened(self) -> list[Workload]:
        """The workload with splits in which one stage has less than in the likeliest one."""
        return [*shortened_splits(self._unsplit, self._splits[0])]

    def on(self, cluster: Cluster, *, is_one_enough: bool = False, split: Workload | None = None) -> list[JudgedPlan]:
        """Return completed plans for a cluster in the order of what is expected of them.

        Args:
            cluster: to plan on.
            is_one_enough: end with the first plan that is expected to keep every model's attainment.
            split: the workload with a split of its applications' deadlines; default: the likeliest.
        """
        made: dict[tuple[float, int], JudgedPlan] = {}
        for name, policy in self._policies(cluster):
            if made and self._watch.is_stopped():
                break
            self._watch.say(f"planning with {name} on {len(cluster.gpus)} GPUs")
            candidate = self._planned(name, policy, cluster, split)
            if candidate is not None:
                made.setdefault((candidate.foreseen.value, len(candidate.plan.gpulets)), candidate)
                if is_one_enough and candidate.is_promised:
                    break
        return sorted(made.values(), key=lambda each: rank_of(each, each.foreseen, self._options.aim))

    def on_cut_gpus(self) -> Iterator[JudgedPlan]:
        """Yield plans on GPUs cut into MIG instances, on an elastic cluster those on the fewest GPUs first, and the
        plan of `parvagpu` behind those that take as many; none where no GPU may be cut, or nothing was measured in an
        instance."""
        if all(gpu.mig != "managed" for gpu in self._cluster.gpus):
            return
        published = self._planned(ParvaGpu.name, ParvaGpu(), self._cluster) if self._cluster.elastic else None
        for way in ways_to_slice(self._workload, self._cluster, self._profiles):
            if published is not None and way.gpus > published.plan.expected.gpus_used:
                yield published
                published = None
            self._watch.say(f"cutting {way.gpus} GPUs into MIG instances")
            candidate = self._planned(way.name, way, self._cluster)
            if candidate is not None:
                yield candidate
        if published is not None:
            yield published

    def _planned(self, name: str, policy: Policy, cluster: Cluster, split: Workload | None = None) -> JudgedPlan | None:
        """Return the plan of a policy; None where it cannot plan, or nothing runs by its plan."""
        try:
            plan = solve(policy, split or self._workload, cluster, self._profiles)
        except TenutoError as error:
            self.refused[name] = first_line(error)
            return None
        return JudgedPlan(name, plan, foreseen(plan, self.worth)) if plan.gpulets else None

    def _policies(self, cluster: Cluster) -> Iterator[tuple[str, Policy]]:
        """Yield the policies that make candidates, by name; for a cluster to be bought only those that plan at once."""
        if "symphony" in self._options.starts and len(cluster.gpu_types) > 1 and not cluster.elastic:
            yield TypesApart.name, TypesApart(by=load_policy("symphony", STARTED_WITH["symphony"]))
        for name in self._options.starts:
            if name in ("none", ""):
                continue
            started_with = STARTED_WITH.get(name, {})
            policy = load_policy(name, started_with)
            most, is_part = policy.abilities.most_models, self._cluster.elastic and not cluster.elastic
            if (most is not None and len(self._workload.models) > most) or (
                is_part and not policy.abilities.plans_at_once
            ):
                continue
            yield name, policy
            if name in WITH_NEIGHBOURS and not self.is_large:
                options = {**started_with, "interference": "contention"}
                yield f"{name}, with interference", load_policy(name, options)
        if self._objective == "each" and not cluster.elastic:
            yield Balanced.name, Balanced()
        if not self.is_large and not cluster.elastic:
            yield Everywhere.name, Everywhere()


class PlanSearch:
    """The search for one workload. `count` says how many plans were tried."""

    def __init__(
        self,
        options: SearchOptions,
        workload: Workload,
        cluster: Cluster,
        profiles: Profiles,
        watch: PlanningWatch | None = None,
        trials: Callable[..., Trials] = Trials,
        compares_by: Objective | None = None,
        tries_plans: bool = True,
    ) -> None:
        """`trials`: makes what runs plans, given as `Trials` is. `compares_by`: the objective by which plans are
        compared, if not the workload's, by which they are served. `tries_plans`: whether trials decide at all."""
        self._options, self._cluster, self._watch = options, cluster, watch or PlanningWatch()
        objective = compares_by or workload.objective
        self.candidates = PlanSource(options, workload, cluster, profiles, self._watch, objective, tries_plans)
        self._is_large = self.candidates.is_large
        self._make_trials = partial(
            trials,
            self.candidates.worth.models,
            scheduler=options.scheduler,
            objective=objective,
            network=NetworkDelay(*options.network_ms),
            applications=self.candidates.worth.applications,
        )
        self._trials = self._make_trials(requests=options.requests, seed=options.seed)
        self._longer: list[Trials] = []
        self._was_near = False  # whether a trial on the present GPUs nearly kept the attainment
        self.count = 0

    def best(self) -> JudgedPlan | None:
        """Return the best plan of all candidates; None where there is none.

        GPUs that may be cut are cut; where that leaves a model out, or other GPUs are there too, the plan on GPUs as
        they are is looked for as well.
        """
        cut = self._on_cut_gpus()
        if cut is not None and not cut.plan.unserved and all(gpu.mig == "managed" for gpu in self._cluster.gpus):
            return cut
        uncut = self._cheapest() if self._cluster.elastic else self._on_given_gpus()
        both, least = (each for each in (cut, uncut) if each is not None), self._options.attainment
        return min(both, key=lambda each: rank_of(each, each.judged, least, by_price=True), default=None)

    def _first_enough(
        self,
        candidates: Iterable[JudgedPlan],
        judge: Callable[[JudgedPlan, JudgedPlan | None], JudgedPlan | None],
        rank: Callable[[JudgedPlan], PlanRank],
    ) -> JudgedPlan | None:
        """Return the first candidate that is enough once it is judged; where none is, the one of the best rank.

        Args:
            candidates: to be judged one after the other, until the watch stops the search.
            judge: returns a candidate, with its trials where it was tried, or None if it is not to be had. It gets the
                best so far.
            rank: of a judged candidate.
        """
        best: JudgedPlan | None = None
        for candidate in candidates:
            if best is not None and self._watch.is_stopped():
                break
            judged = judge(candidate, best)
            if judged is not None and self._is_enough(judged):
                return judged
            if judged is not None and (best is None or rank(judged) < rank(best)):
                best = judged
        return best

    def _is_enough(self, each: JudgedPlan) -> bool:
        """Whether confirming trials, or of many models what is expected, say that every model keeps its attainment."""
        least = self._options.attainment
        if self._is_large:
            return each.is_promised
        return each.confirmed is not None and each.confirmed.surely_keeps(least)

    # Three searches by that loop -------------------------------------------------------------------------------------

    def _on_given_gpus(self, starts: Iterable[list[JudgedPlan]] | None = None) -> JudgedPlan | None:
        """Return the candidate that serves most on a fixed cluster, of several the cheapest.

        The first that serves everything in its trial, and in longer ones too, is taken. Where none does, the one that
        serves most promises what it serves in longer trials. Of many models or GPUs what is expected decides.
        """
        groups = (each for each in starts or self._by_split(self._cluster) if each)
        first = next(groups, None)
        if first is None or self._watch.is_stopped():
            return first[0] if first else None
        if self._is_large:
            heads = (group[0] for group in chain([first], groups))
            return self._first_enough(
                heads, lambda each, _best: each, lambda each: rank_of(each, each.foreseen, self._options.aim)
            )

        def judge(each: JudgedPlan, best: JudgedPlan | None) -> JudgedPlan | None:
            tried = self._tried(each, floor=0.0 if best is None or best.trial is None else best.trial.value)
            return self._confirmed(tried) if tried is not None and tried.judged.keeps(self._options.aim) else tried

        def rank(each: JudgedPlan) -> PlanRank:
            return rank_of(each, each.trial or each.foreseen, None)._replace(price=each.plan.expected.price)

        best = self._first_enough(chain(first, chain.from_iterable(groups)), judge, rank) or first[0]
        return best if self._watch.is_stopped() else self._confirmed(best)

    def _on_cut_gpus(self) -> JudgedPlan | None:
        """Return the plan on GPUs cut into MIG instances that is expected to keep every model's attainment, on an
        elastic cluster on the fewest GPUs on which one stands its trial, or else to serve most."""
        least = self._options.attainment

        def judge(each: JudgedPlan, _best: JudgedPlan | None) -> JudgedPlan:
            return (self.safe(each) if each.foreseen.keeps(least) else None) or each

        best = self._first_enough(
            self.candidates.on_cut_gpus(), judge, lambda each: rank_of(each, each.foreseen, least)
        )
        return None if best is None else self._confirmed(best)

    def _cheapest(self) -> JudgedPlan | None:
        """Return the cheapest plan found that stands its trial, or else the start that serves most, with what it
        served.

        The search begins with the cheapest start that stands its trial; where none does, GPUs are added to the one that
        serves most. From there on it looks at clusters that cost less, each with as many GPUs as that price allows,
        those most like the present one first. A cluster that fails rules out all clusters within it.
        """
        starts = next((each for each in self._by_split(self._cluster) if each), None)
        if starts is None:
            return None
        purchase = _Purchase(self._cluster)
        by_price = sorted(starts, key=lambda each: purchase.price(each.bought))
        best = self._first_safe(chain(by_price, self._with_more_gpus(purchase, starts[0])))
        if best is None:
            return self._on_given_gpus([starts])
        failed: list[Mapping[str, int]] = []
        step, in_vain = max(1, sum(best.bought.values()) // STEPS), 0.0
        while step and not self._watch.is_stopped():
            if purchase.price(best.bought) <= self.candidates.least_price * (1.0 + FREE):
                break
            # Half of what its GPUs idle is saved at first; what fails halves that, down to any lower price.
            price = purchase.price(best.bought)
            saved = (price - max(in_vain, price * float(best.foreseen.busy.mean()))) / 2.0
            most = price - (saved if saved > min(purchase.prices.values()) else FREE / 2.0)
            clusters = (
                each
                for each in purchase.below(most, best.bought, step)
                if purchase.price(each) >= self.candidates.least_price * (1.0 - FREE) and not _is_within(each, failed)
            )
            for counts in islice(clusters, CLUSTERS):
                cheaper = self._first_safe(self._on_counts(purchase, counts))
                if cheaper is not None:
                    best = cheaper
                    break
                failed.append(counts)
            else:
                in_vain = most
                step //= 2 if most > price - FREE else 1
        return best

    def _first_safe(self, candidates: Iterable[JudgedPlan]) -> JudgedPlan | None:
        """Return the first candidate that stands its trial."""
        return self._first_enough(candidates, lambda each, _best: self.safe(each), lambda _: PlanRank())

    def _with_more_gpus(self, purchase: _Purchase, start: JudgedPlan) -> Iterator[JudgedPlan]:
        """Yield plans with one GPU of any type more, and with more again of the type that serves most for its price, or
        leaves most headroom, as long as they are not too many."""
        present, most = start, 2 * sum(start.bought.values()) + MOST_MORE
        while sum(present.bought.values()) < most and not self._watch.is_stopped():
            gains = []
            for kind, price in sorted(purchase.prices.items()):
                planned = [*self._on_counts(purchase, {**present.bought, kind: present.bought.get(kind, 0) + 1})]
                yield from planned
                for each in planned[:1]:
                    gain = (present.foreseen.value - each.foreseen.value) / price
                    gains.append((gain, rank_of(each, each.foreseen, 1.0), each))
            before, present = present, min(gains, key=lambda each: each[:2])[2] if gains else present
            if sum(present.bought.values()) <= sum(before.bought.values()):
                return

    def _on_counts(self, purchase: _Purchase, counts: Mapping[str, int]) -> Iterator[JudgedPlan]:
        """Yield the candidates on so many GPUs of each type; of many models the first that is enough. Where one nearly
        kept the attainment and none did, further splits are tried."""
        self._was_near, cluster = False, purchase.cluster(counts)
        yield from chain.from_iterable(self._by_split(cluster))
        for split in self.candidates.shortened if self._was_near else ():
            yield from self.candidates.on(cluster, split=split)

    def _by_split(self, cluster: Cluster) -> Iterator[list[JudgedPlan]]:
        return self.candidates.by_split(cluster, is_one_enough=self._is_large)

    # The judge -------------------------------------------------------------------------------------------------------

    def _tried(self, each: JudgedPlan, *, floor: float) -> JudgedPlan | None:
        """Return a candidate with its trial; None where that ended early, because it cannot reach the value `floor` any
        more."""
        self._count_trial(each)
        trial = self._trials.run(each.plan, floor=floor)
        return None if trial.value < 0.0 else replace(each, trial=trial)

    def safe(self, each: JudgedPlan) -> JudgedPlan | None:
        """Return a candidate with its confirming trials if every model surely keeps its attainment, or else None. Of
        many models what is expected is believed."""
        if not self._is_large:
            self._count_trial(each)
            # A plan that misses half as much again as it may need not be tried to the end.
            each = self._confirmed(each, attainment=2.0 * self._options.attainment - self._options.aim)
            least = 1.0 - NEAR * (1.0 - self._options.attainment)
            self._was_near |= bool(each.judged.attainment.min() >= least)
        return each if self._is_enough(each) else None

    def _confirmed(self, each: JudgedPlan, *, attainment: float = 0.0) -> JudgedPlan:
        """Return a candidate with longer trials of other arrivals, one after the other until it is clear whether every
        model keeps its attainment; of many models without one. A trial ends early where a model cannot keep
        `attainment`."""
        if self._is_large or each.confirmed is not None:
            return each
        least = self._options.attainment
        judged: Judged | None = None
        for index in range(ROUNDS):
            if judged is not None and (judged.surely_keeps(least) or judged.surely_misses(least)):
                break
            if index == len(self._longer):
                requests, seed = CONFIRMING * self._options.requests, self._options.seed + 1 + index
                self._longer.append(self._make_trials(requests=requests, seed=seed))
            run = self._longer[index].run(each.plan, attainment=attainment)
            judged = run if judged is None else judged.and_then(run)
        return replace(each, confirmed=judged)

    def _count_trial(self, each: JudgedPlan) -> None:
        self.count += 1
        self._watch.say(f"trial {self.count} in virtual time: the plan of {each.start}")


class _Purchase:
    """What can be bought: GPU types with their prices. `prices` are per hour, by type."""

    def __init__(self, cluster: Cluster) -> None:
        self._of_type = cluster.one_of_each
        self.prices = {kind: max(FREE, price) for kind, price in cluster.prices.items()}

    def price(self, counts: Mapping[str, int]) -> float:
        """Return what so many GPUs of each type cost an hour."""
        return sum(self.prices[kind] * count for kind, count in counts.items())

    def cluster(self, counts: Mapping[str, int]) -> Cluster:
        """Return the fixed cluster of so many GPUs of each type."""
        groups = tuple(
            GpuGroup(type=kind, count=counts[kind], memory_mib=gpu.memory_mib, price_per_hour=gpu.price_per_hour)
            for kind, gpu in sorted(self._of_type.items())
            if counts.get(kind)
        )
        return Cluster(nodes=(Node(name="n0", gpus=groups),))

    def below(self, price: float, present: Mapping[str, int], step: int) -> list[dict[str, int]]:
        """Return clusters of at most this price to which no GPU can be added, those with most in common with the
        present one first; of all types but the cheapest up to `REACH` steps more or fewer GPUs."""
        *dear, last = sorted(self.prices, key=lambda kind: (-self.prices[kind], kind))
        clusters = []
        for steps in product(range(-REACH, REACH + 1), repeat=len(dear)):
            cluster = {kind: max(0, present.get(kind, 0) + n * step) for kind, n in zip(dear, steps, strict=True)}
            left = price - self.price(cluster)
            if left >= 0.0:
                cluster[last] = min(int(left / self.prices[last]), 2 * sum(present.values()) + MOST_MORE)
                if any(cluster.values()) and cluster not in clusters:
                    clusters.append(cluster)

        def changed(each: Mapping[str, int]) -> float:
            return sum(self.prices[kind] * abs(n - present.get(kind, 0)) for kind, n in each.items())

        return sorted(clusters, key=changed)


def _is_within(counts: Mapping[str, int], others: Iterable[Mapping[str, int]]) -> bool:
    """Whether some other cluster has at least as many GPUs of each type."""
    return any(not Counter(counts) - Counter(other) for other in others)
