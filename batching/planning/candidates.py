"""Candidates of policy `tenuto`: the plans of other policies, of its own starts, and of GPUs cut into MIG instances.

They are compared in one order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tenuto.batching.core.deferred.deferring import DeferredOptions
from tenuto.batching.planning.judging import Judged, Worth, foreseen
from tenuto.batching.planning.sliced import ways_to_slice
from tenuto.batching.planning.starts import Balanced, Everywhere
from tenuto.errors import TenutoError, first_line
from tenuto.options import option
from tenuto.outcome import ATTAINED
from tenuto.placement import Cluster, Plan, Policy, Workload, load_policy, solve
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
LARGE = 40  # limit: models or GPUs of a plan that is tried; beyond, a trial takes minutes
# Fitted: models of a start; with more it takes minutes, or seconds and serves half of what the others do.
SLOW = {"ideal": LARGE, "gpulet": 500, "usher": 500, "wao-usher": 500}
# Derived: of its time, as the scheduler's `save_above`: a busiest gpu-let below it has headroom enough, and fewer
# processes are better.
ROOMY = DeferredOptions.save_above


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
class Candidate:
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
    def price(self) -> float:
        """What its GPUs cost an hour, or how many they are where no prices are known."""
        expected = self.plan.expected
        return float(expected.gpus_used) if expected.cost_per_hour is None else expected.cost_per_hour

    @property
    def judged(self) -> Judged:
        """The longest trial, or what is expected where there was none."""
        return self.confirmed or self.trial or self.foreseen

    @property
    def is_tried(self) -> bool:
        """Whether it was tried in virtual time."""
        return self.judged is not self.foreseen


def order(each: Candidate, judged: Judged, attainment: float | None, *, by_price: bool = False) -> tuple[float, ...]:
    """Return the place of a candidate among others, the best first.

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
        return 1.0, -judged.value
    busiest = float(judged.busy.max())
    headroom = round(max(busiest, ROOMY), 1), len(each.plan.gpulets), busiest
    return 0.0, *((each.price,) if by_price else headroom)


class Candidates:
    """Makes the candidates for one workload. `refused` says why policies cannot plan."""

    def __init__(
        self,
        options: SearchOptions,
        workload: Workload,
        cluster: Cluster,
        profiles: Profiles,
        watch: PlanningWatch,
        objective: Objective,
    ) -> None:
        """`objective`: by which plans are compared."""
        self._options, self._cluster, self._profiles, self._watch = options, cluster, profiles, watch
        # Planned without merging: the planner chooses afterwards which models become one program.
        self._workload = workload.model_copy(update={"merge": "off"})
        self._objective, self.worth = objective, Worth(workload.models, objective)
        self.is_large = max(len(workload.models), len(cluster.gpus)) > LARGE
        self.refused: dict[str, str] = {}

    def on(self, cluster: Cluster, *, is_one_enough: bool = False) -> list[Candidate]:
        """Return completed plans for a cluster in the order of what is expected of them.

        Args:
            cluster: to plan on.
            is_one_enough: end with the first plan that is expected to keep every model's attainment.
        """
        made: dict[tuple[float, int], Candidate] = {}
        for name, policy in self._policies(cluster):
            if made and self._watch.is_stopped():
                break
            self._watch.say(f"planning with {name} on {len(cluster.gpus)} GPUs")
            candidate = self._planned(name, policy, cluster)
            if candidate is not None:
                made.setdefault((candidate.foreseen.value, len(candidate.plan.gpulets)), candidate)
                if is_one_enough and candidate.foreseen.keeps(self._options.attainment):
                    break
        return sorted(made.values(), key=lambda each: order(each, each.foreseen, self._options.aim))

    def on_cut_gpus(self) -> Iterator[Candidate]:
        """Yield plans on GPUs cut into MIG instances, on an elastic cluster those on the fewest GPUs first, and the
        plan of `parvagpu` behind those that take as many; none where no GPU may be cut, or nothing was measured in an
        instance."""
        is_bought = self._cluster.elastic and any(gpu.mig == "managed" for gpu in self._cluster.gpus)
        published = self._planned(ParvaGpu.name, ParvaGpu(), self._cluster) if is_bought else None
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

    def _planned(self, name: str, policy: Policy, cluster: Cluster) -> Candidate | None:
        """Return the plan of a policy; None where it cannot plan, or nothing runs by its plan."""
        try:
            plan = solve(policy, self._workload, cluster, self._profiles)
        except TenutoError as error:
            self.refused[name] = first_line(error)
            return None
        return Candidate(name, plan, foreseen(plan, self.worth)) if plan.gpulets else None

    def _policies(self, cluster: Cluster) -> Iterator[tuple[str, Policy]]:
        """Yield what makes plans, by its name; on a part of what could be bought those that always plan at once."""
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
