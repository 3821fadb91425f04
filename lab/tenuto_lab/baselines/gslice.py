"""GSLICE+: the baseline of iGniter's paper that tunes every model by itself from what it observes."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from tenuto.options import option
from tenuto.placement.cluster import Cluster
from tenuto.placement.costs import context_mib_of, memory_of
from tenuto.placement.interference.igniter_model import Load, inference_time_ms
from tenuto.placement.plan import Plan
from tenuto.placement.policy import Policy
from tenuto.placement.workload import Workload, profile_of
from tenuto.profiles import Profiles
from tenuto_lab.baselines.first_fit import lower_bounds
from tenuto_lab.baselines.igniter.igniter import beside
from tenuto_lab.baselines.igniter.packing import OpenGpu, Packed, igniter_plan, pack_cluster
from tenuto_lab.baselines.igniter.shares import ShareDemand


@dataclass(kw_only=True, eq=False)
class Gslice(Policy):
    """Tunes batch size and share of every model separately, towards half its SLO and its rate.

    When the latency misses half the SLO by some part, the batch grows or shrinks by that part. A share changes by the
    larger of the parts by which latency and throughput miss. Both are left alone within 10 % of the target. Nothing is
    predicted: each model reacts to the latency and throughput that it is observed to have beside the others, all at the
    same time. So shares may add up to more than a GPU (107.5 % in the paper's first example), and a latency that moves
    after the last round is not corrected. Here iGniter's analytic model computes the observations, beside all
    neighbours. It has no term for shares beyond 100 %, so latencies on such a GPU are too good. Nothing is guaranteed:
    the notes name the models that are expected to miss half their SLO or their rate.

    Readings of what the paper leaves open. GSLICE knows one GPU. On which GPU a model runs is taken from iGniter's own
    placement, which gives the published six GPUs for the twelve workloads (`placement=ffd+` is the other candidate).
    Rounds, start values and the target are those of the authors' published script. An observed throughput is at most
    the arrivals, so a share shrinks only when throughput has room (`observed=capacity`: it is what the batches could
    carry). With that reading the first example ends close to the published plan: AlexNet 32.5 % and batch 16 (published
    37.5 % and 18), ResNet-50 32.5 % and 8 (30 % and 8), VGG-19 40 % and 6 (the same). With the other reading AlexNet
    ends at 10 % and 4. The exact end depends on measurements that were not published. So does which three of twelve
    workloads violate their SLO in the paper, which it does not name; ours are four.

    Options:
        placement: `igniter`, or `ffd+` for first fit of the lower bounds.
        threshold: part of a target within which nothing is changed.
        share_rounds: rounds of batch tuning followed by one change of the shares.
        batch_rounds: changes of the batch sizes in one round at most.
        start_share_pct: the share all start with.
        max_batch: largest batch size.
        observed: `served` or `capacity`, see above.
        overcommit: whether shares of a GPU may add up to more than 100 %; otherwise the largest are cut.
    """

    name = "gslice"
    summary = "GSLICE+: tunes share and batch of each model by observation, without regard to interference"
    source = "the baseline GSLICE+ of iGniter (arXiv 2211.01713), section 5; Dhakal et al., GSLICE (SoCC 2020)"
    readings = (
        "what it observes is iGniter's model here, its GPUs are igniter's; rounds and start values of the "
        "authors' script"
    )

    placement: str = option("igniter", choices=("igniter", "ffd+"))
    threshold: float = option(0.1, above=0, below=1)
    share_rounds: int = option(5, minimum=1)
    batch_rounds: int = option(5, minimum=1)
    start_share_pct: float = option(30.0, above=0, maximum=100)
    max_batch: int = option(32, minimum=1)
    observed: str = option("served", choices=("served", "capacity"))
    overcommit: bool = True

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan.

        Raises:
            InvalidInputError: a model has iGniter's coefficients on no GPU type of the cluster.
        """
        packed = self.untuned(workload, cluster, profiles)
        settings = [self._settled(tuning) for tuning in self.tunings(packed, workload, profiles)]
        return self.tuned(packed, settings, workload, cluster, profiles)

    def untuned(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Packed:
        """Return which models share which GPU, before any share or batch is tuned.

        Raises:
            InvalidInputError: a model has iGniter's coefficients on no GPU type of the cluster.
        """
        attempt = beside if self.placement == "igniter" else lower_bounds
        return pack_cluster(workload, cluster, profiles, attempt, first=self.placement != "igniter")

    def tunings(self, packed: Packed, workload: Workload, profiles: Profiles) -> list[Tuning]:
        """Return the loops of every GPU."""
        return [
            Tuning(self, opened.demands, _Memory(self, opened, workload, profiles).largest_batch)
            for opened in packed.gpus
        ]

    def tuned(
        self,
        packed: Packed,
        settings: Sequence[Sequence[Setting]],
        workload: Workload,
        cluster: Cluster,
        profiles: Profiles,
    ) -> Plan:
        """Return the plan with these settings of the residents of every GPU."""
        refused, late = dict(packed.refused), list[str]()
        gpus = [
            _with_settings(opened, chosen, _Memory(self, opened, workload, profiles), refused, late)
            for opened, chosen in zip(packed.gpus, settings, strict=True)
        ]
        notes = []
        overcommits = any(sum(gpu.shares) > gpu.demands[0].most_units for gpu in gpus)
        if overcommits:
            notes.append("over-commits shares: each model's share is tuned by itself")
        if late:
            notes.append("expected to miss half their SLO or their rate beside their neighbours: " + ", ".join(late))
        return igniter_plan(self.name, workload, cluster, Packed(gpus, refused), notes, overcommits=overcommits)

    def _settled(self, tuning: Tuning) -> list[Setting]:
        """Return what the loops end with where iGniter's model stands in for measurements."""
        loop = tuning.loop()
        try:
            settings = next(loop)
            while True:
                settings = loop.send(_observed(tuning.demands, settings))
        except StopIteration as end:
            found: list[Setting] = end.value
            return found


class _Memory:
    """The memory that the residents of a GPU need."""

    def __init__(self, policy: Gslice, opened: OpenGpu, workload: Workload, profiles: Profiles) -> None:
        self._most, self._room_mib = policy.max_batch, opened.gpu.memory_mib
        self._costs = [profile_of(workload[d.spec.name], opened.gpu.type, profiles) for d in opened.demands]
        self._context_mib = context_mib_of(opened.gpu.type, profiles)

    def need_mib(self, index: int, size: int) -> float:
        """Return what a resident needs with batches of a size."""
        return (memory_of(self._costs[index], size) or 0.0) + self._context_mib

    def largest_batch(self, index: int, sizes: Sequence[int]) -> int:
        """Return the largest batch of a resident that fits beside the others' batches, at least 1."""
        others = sum(self.need_mib(other, size) for other, size in enumerate(sizes) if other != index)
        fitting = (b for b in range(self._most, 0, -1) if others + self.need_mib(index, b) <= self._room_mib)
        return next(fitting, 1)


def _with_settings(
    opened: OpenGpu, settings: Sequence[Setting], memory: _Memory, refused: dict[str, str], late: list[str]
) -> OpenGpu:
    """Return the GPU with batches and shares as tuned, each resident with the rate it then carries."""
    tuned: list[ShareDemand] = []
    seen = _observed(opened.demands, settings)
    for index, (demand, setting, one) in enumerate(zip(opened.demands, settings, seen, strict=True)):
        name, carried = demand.spec.name, min(demand.rate_rps, one.capacity_rps)
        if (carried < demand.rate_rps or one.latency_ms > demand.budget_ms) and name not in late:
            late.append(name)
        if carried < demand.rate_rps:
            refused.setdefault(name, "its tuned share and batch carry no more beside its neighbours")
        found = replace(demand, rate_rps=carried, memory_mib=memory.need_mib(index, setting.batch_size))
        found.batch_size = setting.batch_size
        tuned.append(found)
    return OpenGpu(opened.gpu, tuned, tuple(setting.units for setting in settings))


@dataclass(frozen=True)
class Setting:
    """The batch size and the share, in units, of one resident."""

    batch_size: int
    units: int


@dataclass(frozen=True)
class Observed:
    """Mean latency of a batch in ms, and the highest throughput in requests/s, beside the residents as they are."""

    latency_ms: float
    capacity_rps: float


Loop = Generator[list[Setting], list[Observed], list[Setting]]


def _observed(demands: Sequence[ShareDemand], settings: Sequence[Setting]) -> list[Observed]:
    """Return latency and throughput of every resident by iGniter's analytic model (eq. 1 to 11), in place of a
    measurement.

    Throughput is b / (t_gpu + t_feedback), because loading overlaps with computing (eq. 2).
    """
    loads = [
        Load.of(demand.model, setting.batch_size, setting.units * demand.hardware.share_unit_pct)
        for demand, setting in zip(demands, settings, strict=True)
    ]
    found = []
    for demand, own in zip(demands, loads, strict=True):
        time_ms = inference_time_ms(demand.model, own, loads, demand.hardware)
        load_ms = own.batch_size * demand.model.load_bytes / demand.hardware.pcie_bytes_per_ms
        found.append(Observed(time_ms, 1000.0 * own.batch_size / (time_ms - load_ms)))
    return found


class Tuning:
    """The loops on one GPU: they tune batch size and share of each resident by what was observed of it."""

    def __init__(
        self, policy: Gslice, demands: Sequence[ShareDemand], largest_batch: Callable[[int, Sequence[int]], int]
    ) -> None:
        """Prepare; `largest_batch` of the i-th resident is what memory allows beside these batch sizes."""
        self.demands = demands
        self._policy, self._largest_batch = policy, largest_batch

    def loop(self) -> Loop:
        """Yield settings to run with, receive what was observed of every resident, and return the settings with which
        the loops end.

        All residents start with batches of one and the same share. Up to `share_rounds` times the batch sizes are tuned
        and then, once, the shares; at the end the batch sizes again. Residents are observed together and changed at the
        same time, each by itself.
        """
        first = self.demands[0]
        start = max(1, round(self._policy.start_share_pct / first.hardware.share_unit_pct))
        settings = self._bounded([Setting(1, min(start, first.most_units)) for _ in self.demands])
        for _ in range(self._policy.share_rounds):
            settings = yield from self._with_batches(settings)
            seen = yield settings
            changed = self._bounded(
                [
                    Setting(setting.batch_size, self._next_units(demand, setting, one))
                    for demand, setting, one in zip(self.demands, settings, seen, strict=True)
                ]
            )
            if changed == settings:
                return settings
            settings = changed
        return (yield from self._with_batches(settings))

    def _with_batches(self, settings: Sequence[Setting]) -> Loop:
        now = list(settings)
        for _ in range(self._policy.batch_rounds):
            sizes = [setting.batch_size for setting in now]
            seen = yield now
            for index, (demand, one) in enumerate(zip(self.demands, seen, strict=True)):
                wanted = self._next_batch(demand, sizes[index], one)
                sizes[index] = min(wanted, max(1, self._largest_batch(index, sizes)))
            after = [Setting(size, setting.units) for size, setting in zip(sizes, now, strict=True)]
            if after == now:
                break
            now = after
        return now

    def _next_batch(self, demand: ShareDemand, size: int, seen: Observed) -> int:
        """Grow or shrink a batch by the part by which the latency misses its target, half the SLO."""
        slack_ms = demand.budget_ms - seen.latency_ms
        if 0 < slack_ms < self._policy.threshold * demand.budget_ms:
            return size
        return min(self._policy.max_batch, max(1, math.ceil(size * (1 + slack_ms / seen.latency_ms) - 1e-9)))

    def _next_units(self, demand: ShareDemand, setting: Setting, seen: Observed) -> int:
        """Grow a share that misses latency or throughput, shrink one that has more than enough of both."""
        throughput, near = seen.capacity_rps, self._policy.threshold
        if self._policy.observed == "served":  # never more than arrives
            throughput = min(throughput, demand.rate_rps)
        latency_slack = demand.budget_ms - seen.latency_ms
        rate_slack = throughput - demand.rate_rps
        if 0 < latency_slack < near * demand.budget_ms and 0 <= rate_slack < near * demand.rate_rps:
            return setting.units
        factor = max(abs(latency_slack) / seen.latency_ms, abs(rate_slack) / throughput)
        if latency_slack < 0 or rate_slack < 0:
            changed = setting.units * (1 + factor)
        elif latency_slack > 0 and rate_slack > 0:
            changed = setting.units * (1 - factor)
        else:
            return setting.units
        return min(demand.most_units, max(1, math.ceil(changed - 1e-9)))

    def _bounded(self, settings: list[Setting]) -> list[Setting]:
        """Cut the largest shares, one unit at a time, until all fit into the GPU, unless it may be over-committed."""
        if self._policy.overcommit:
            return settings
        units = [setting.units for setting in settings]
        while sum(units) > self.demands[0].most_units:
            units[units.index(max(units))] -= 1
        return [Setting(setting.batch_size, max(1, own)) for setting, own in zip(settings, units, strict=True)]
