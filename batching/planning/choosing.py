"""The choice among plans: those of other policies, each model on every GPU, and trials in virtual time of the ones that
are expected to serve most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from tenuto.batching.core.deferred.deferring import DeferredOptions
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.judging import Judged, Worth, foreseen
from tenuto.batching.planning.sliced import ways_to_slice
from tenuto.batching.planning.starts import Balanced, Everywhere
from tenuto.batching.planning.trial import Trials
from tenuto.errors import TenutoError, first_line
from tenuto.options import option
from tenuto.outcome import ATTAINED
from tenuto.placement import Cluster, Plan, Policy, Workload, load_policy, solve
from tenuto.placement.cluster import Gpu, GpuGroup, Node
from tenuto.placement.policies.parvagpu.parvagpu import ParvaGpu
from tenuto.placement.watch import PlanningWatch
from tenuto.placement.workload import Objective
from tenuto.profiles import Profiles

STARTS = ("symphony", "igniter", "gpulet", "usher", "wao-usher")  # the quickest first
SEARCHING = ("usher", "wao-usher", "ao-milp", "wsm-milp", "ideal")  # policies that may take seconds
WITH_NEIGHBOURS = ("gpulet",)  # policies that plan without an interference model or with one: both are starts
# Where a start differs from the published policy: symphony's moves and swaps come as near as its solver does in
# seconds; gpulet serves more on a full cluster (in 23 of 120 random workloads, never less).
STARTED_WITH = {"symphony": {"time_limit_s": "0"}, "gpulet": {"merge_without_free": "true"}}
LARGE = 40  # limit: models or GPUs; beyond, a trial takes minutes
# Fitted: starts that take minutes for more models than this, or seconds and serve half of what the others do.
SLOW = {"ideal": LARGE, "gpulet": 500, "usher": 500, "wao-usher": 500}
# Derived: of its time, as the scheduler's `save_above`: a busiest gpu-let below it has headroom enough, and fewer
# processes are better.
ROOMY = DeferredOptions.save_above
# Fitted: times as many requests of other arrivals before a plan is bought, and where it is neither clear that a loss is
# borne nor that it is not. Of rare models the trial sees a few hundred, whose misses come in clumps: of 193 models four
# had stood it and lose 1.2 to 2.6 % for good (lab/journal/benchmarks-placement.md).
CONFIRMING = 12
ROUNDS = 4  # limit: trials as long where it is not clear yet whether a plan keeps every model's attainment


@dataclass(kw_only=True, eq=False)
class ChoosingOptions:
    """The options of a choice, see `TenutoPolicy`."""

    scheduler: str = "deferred"
    starts: tuple[str, ...] = STARTS
    requests: int = option(8_000, minimum=1)
    attainment: float = option(ATTAINED, above=0, maximum=1)
    seed: int = option(0, minimum=0)
    network_ms: tuple[float, ...] = option((0.0, 0.0, 0.0), minimum=0)


@dataclass(frozen=True)
class Candidate:
    """A completed plan, what made it, and what it serves: as expected, and where it was tried by its trial."""

    start: str
    plan: Plan
    foreseen: Judged
    trial: Judged | None = None

    @cached_property
    def bought(self) -> Counter[str]:
        """How many GPUs of each type the plan uses."""
        used = set(self.plan.used_gpus)
        return Counter(gpu.type for gpu in self.plan.gpus if gpu.id in used)

    @property
    def price(self) -> float:
        """What its GPUs cost an hour, or how many they are where no prices are known."""
        expected = self.plan.expected
        return float(expected.gpus_used) if expected.cost_per_hour is None else expected.cost_per_hour

    @property
    def judged(self) -> Judged:
        """The trial, or what is expected where there was none."""
        return self.foreseen if self.trial is None else self.trial

    def rank(self, aim: float) -> tuple[float, ...]:
        """Return what candidates are sorted by: of those that serve everything the one with most headroom, whose
        busiest gpu-let is the least busy (as busy to a tenth, or below half of its time: the one with the fewest
        gpu-lets, as each is a process); behind them whoever serves most."""
        if not self.foreseen.keeps(aim):
            return 1.0, -self.foreseen.value
        busiest = float(self.foreseen.busy.max())
        return 0.0, round(max(busiest, ROOMY), 1), len(self.plan.gpulets), busiest


class Chooser:
    """The choice for one workload. `refused` says why policies cannot plan, `count` how many plans were tried."""

    def __init__(
        self,
        options: ChoosingOptions,
        workload: Workload,
        cluster: Cluster,
        profiles: Profiles,
        watch: PlanningWatch | None = None,
        trials: Callable[..., Trials] = Trials,
        compares_by: Objective | None = None,
    ) -> None:
        """`trials`: makes what runs plans, given as `Trials` is. `compares_by`: the objective by which plans are
        compared, if not the workload's, by which they are served."""
        self._options, self._cluster, self._profiles = options, cluster, profiles
        self._workload = workload.model_copy(update={"merge": "off"})  # what becomes one program is found afterwards
        self.watch = watch or PlanningWatch()
        self.aim = (1.0 + options.attainment) / 2.0  # half of the misses to spare: other arrivals are less kind
        self.is_large = max(len(workload.models), len(cluster.gpus)) > LARGE
        self._objective = compares_by or workload.objective
        self.worth = Worth(workload.models, self._objective)
        self._trials = partial(
            trials,
            workload.models,
            scheduler=options.scheduler,
            objective=self._objective,
            network=NetworkDelay(*options.network_ms),
        )
        self.trials = self._trials(requests=options.requests, seed=options.seed)
        self._longer: list[Trials] = []
        self.count = 0
        self.refused: dict[str, str] = {}

    def best(self, found: Sequence[Candidate]) -> Candidate | None:
        """Return the candidate that serves most, of several the cheapest; None where there is none.

        The first that serves everything in its trial, and in longer ones too, is taken. Where none does, the one that
        serves most promises what it serves in a longer trial. Of more than `LARGE` models or GPUs what is expected
        decides.
        """
        if not found or self.is_large:
            return found[0] if found else None
        best, longer = found[0], None
        for each in found:
            if self.watch.is_stopped():
                return longer or best
            tried = self.tried(each, floor=0.0 if best.trial is None else best.trial.value)
            if tried is None:
                continue
            confirmed = self.confirmed(tried) if tried.judged.keeps(self.aim) else None
            if confirmed is not None and confirmed.judged.surely_keeps(self._options.attainment):
                return confirmed
            if best.trial is None or (tried.judged.value, -tried.price) > (best.judged.value, -best.price):
                best, longer = tried, confirmed
        return longer or self.confirmed(best)

    def sliced(self) -> Candidate | None:
        """Return the plan on GPUs cut into MIG instances that is expected to keep every model's attainment, on an
        elastic cluster on the fewest GPUs on which one stands its trial, or else to serve most; None where no GPU may
        be cut, or nothing was measured in an instance."""
        best, least = None, self._options.attainment
        for name, plan in self._cut_plans():
            found = Candidate(name, plan, foreseen(plan, self.worth))
            if found.foreseen.keeps(least) and (safe := self.safe(found)) is not None:
                return safe
            if best is None or found.rank(least) < best.rank(least):
                best = found
            if self.watch.is_stopped():
                break
        return None if best is None else self.confirmed(best)

    def _cut_plans(self) -> Iterator[tuple[str, Plan]]:
        """Yield plans on GPUs cut into MIG instances by their names, on an elastic cluster those on the fewest GPUs
        first, and the plan of `parvagpu` behind those that take as many."""
        is_bought = self._cluster.elastic and any(gpu.mig == "managed" for gpu in self._cluster.gpus)
        published = self._planned(ParvaGpu.name, ParvaGpu(), self._cluster) if is_bought else None
        for each in ways_to_slice(self._workload, self._cluster, self._profiles):
            if published is not None and each.gpus > published.expected.gpus_used:
                yield ParvaGpu.name, published
                published = None
            self.watch.say(f"cutting {each.gpus} GPUs into MIG instances")
            plan = self._planned(each.name, each, self._cluster)
            if plan is not None:
                yield each.name, plan
        if published is not None:
            yield ParvaGpu.name, published

    def _planned(self, name: str, policy: Policy, cluster: Cluster) -> Plan | None:
        """Return the plan of a start; None where it cannot plan, or nothing runs by its plan."""
        try:
            plan = solve(policy, self._workload, cluster, self._profiles)
        except TenutoError as error:
            self.refused[name] = first_line(error)
            return None
        return plan if plan.gpulets else None

    def candidates(self, cluster: Cluster, *, is_one_enough: bool = False) -> list[Candidate]:
        """Return completed plans for a cluster, those that are expected to serve everything first, then by what they
        serve.

        Args:
            cluster: to plan on.
            is_one_enough: end with the first plan that is expected to keep every model's attainment.
        """
        found: dict[tuple[float, int], Candidate] = {}
        for start, policy in self._policies(cluster):
            if found and self.watch.is_stopped():
                break
            self.watch.say(f"planning with {start} on {len(cluster.gpus)} GPUs")
            plan = self._planned(start, policy, cluster)
            if plan is not None:
                judged = foreseen(plan, self.worth)
                found.setdefault((judged.value, len(plan.gpulets)), Candidate(start, plan, judged))
                if is_one_enough and judged.keeps(self._options.attainment):
                    break
        return sorted(found.values(), key=lambda each: each.rank(self.aim))

    def _policies(self, cluster: Cluster) -> Iterator[tuple[str, Policy]]:
        """Return what makes plans, by its name; on a part of what could be bought those that always plan at once."""
        for name in self._options.starts:
            is_part = self._cluster.elastic and not cluster.elastic
            if name in ("none", "") or (name in SEARCHING and is_part):
                continue
            if len(self._workload.models) > SLOW.get(name, len(self._workload.models)):
                continue
            started_with = STARTED_WITH.get(name, {})
            yield name, load_policy(name, started_with)
            if name in WITH_NEIGHBOURS and not self.is_large:
                options = {**started_with, "interference": "contention"}
                yield f"{name}, with interference", load_policy(name, options)
        if self._objective == "each" and not cluster.elastic:
            yield Balanced.name, Balanced()
        if not self.is_large and not cluster.elastic:
            yield Everywhere.name, Everywhere()

    def on(self, gpus: Sequence[Gpu]) -> list[Candidate]:
        """Return the plans of these GPUs as `candidates`; of many models the first that is enough."""
        return self.candidates(_as_cluster(gpus), is_one_enough=self.is_large)

    def tried(self, each: Candidate, *, floor: float = 0.0) -> Candidate | None:
        """Return it with its trial; None where that ended early, because it cannot reach the value `floor` any more."""
        self._says(each)
        trial = self.trials.run(each.plan, floor=floor)
        return None if trial.value < 0.0 else replace(each, trial=trial)

    def safe(self, each: Candidate) -> Candidate | None:
        """Return it with its confirming trials if it may be bought, as every model surely keeps its attainment, or else
        None. Of many models what is expected is believed."""
        least = self._options.attainment
        if self.is_large:
            return each if each.foreseen.keeps(least) else None
        self._says(each)
        # Who misses half as much again as it may need not go on.
        longer = self.confirmed(each, attainment=2.0 * least - self.aim)
        return longer if longer.judged.surely_keeps(least) else None

    def confirmed(self, each: Candidate, *, attainment: float = 0.0) -> Candidate:
        """Return it with longer trials of other arrivals, one after the other until it is clear whether every model
        keeps its attainment; of many models without one. One ends early where a model cannot keep `attainment`."""
        if self.is_large:
            return each
        least, found = self._options.attainment, self._confirming(0).run(each.plan, attainment=attainment)
        for more in map(self._confirming, range(1, ROUNDS)):
            if found.surely_keeps(least) or found.surely_misses(least):
                break
            found = found.and_then(more.run(each.plan, attainment=attainment))
        return replace(each, trial=found)

    def _confirming(self, index: int) -> Trials:
        """Return the longer trials of other arrivals, those of one round."""
        if index == len(self._longer):
            seed = self._options.seed + 1 + index
            self._longer.append(self._trials(requests=CONFIRMING * self._options.requests, seed=seed))
        return self._longer[index]

    def _says(self, each: Candidate) -> None:
        self.count += 1
        self.watch.say(f"trial {self.count} in virtual time: the plan of {each.start}")


def _as_cluster(gpus: Sequence[Gpu]) -> Cluster:
    counts = Counter((gpu.type, gpu.memory_mib, gpu.price_per_hour) for gpu in gpus)
    groups = tuple(
        GpuGroup(type=kind, count=count, memory_mib=memory_mib, price_per_hour=price)
        for (kind, memory_mib, price), count in counts.items()
    )
    return Cluster(nodes=(Node(name="n0", gpus=groups),))
