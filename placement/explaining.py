"""Explains why a plan is as it is and what would change it. Each figure is tried with the model by which plans promise.

To find what one GPU more brings, the same policy plans with it. To find what a replica is for, the plan is judged
without it. To find what breaks first, the rates are raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tenuto.errors import TenutoError, first_line
from tenuto.placement.application import online
from tenuto.placement.cluster import Cluster, Gpu, whole_of
from tenuto.placement.costs import costs_of
from tenuto.placement.deadline_split import savings
from tenuto.placement.expectation.outlook import IN_FULL, Outlooks, Traffic
from tenuto.placement.expectation.sharing import Sharing
from tenuto.placement.generation_capacity import with_lengths
from tenuto.placement.placement_constraints import is_at
from tenuto.placement.plan import Plan
from tenuto.placement.planner import PlanTask, enough_for_all, solve
from tenuto.placement.policy import load_policy
from tenuto.placement.program import Gpulet, Replica
from tenuto.profiles import Profiles

NARROW = 1.01  # limit: a search ends when its highest value is at most this many times its lowest
MOST = 1000.0  # limit: a search goes up to this many times the rate or the SLO of the plan
UNLIMITED_TOKENS = 1 << 40  # unit: tokens of memory that never run out
LESS_PCT = 10.0  # format: how much of a share is taken away, in points, to find out what it is for


@dataclass(frozen=True)
class ReplicaExplained:
    """One replica: where it is, which batches it runs at the plan's rates, and what it is for.

    `takes_ms` is the latency of such a batch beside its neighbours, `waits_ms` the time that the SLO then leaves a
    request to wait. `busy` is the part of the gpu-let's time that these batches take. `slowdown` is the factor while
    all neighbours run. `without_rps` is the goodput of the model without this replica. `less_share_rps` is the goodput
    with `LESS_PCT` points less of the share; it is None if the gpu-let has no share, or too small a one.
    """

    gpulet: str
    gpu: str
    gpu_type: str
    share_pct: float | None
    largest_batch: int
    batch: int
    takes_ms: float | None
    waits_ms: float | None
    carried_rps: float
    busy: float
    slowdown: float
    without_rps: float
    less_share_rps: float | None


@dataclass(frozen=True)
class ModelExplained:
    """One model: what the plan promises it, what it costs, and how far its rate and its SLO may change before a model
    that is promised in full no longer is.

    `cost_per_hour` is the model's part of the price of its GPUs, by share and busy time; idle time is split in the same
    proportion. It is None without prices. `most_rps` and `least_slo_ms` are None if the model is not promised in full.
    Then `enough_rps` and `enough_slo_ms` are the rate and the SLO with which it would be; None if there are none.
    `idle_rps` is given of a model that is offline, alone: what it would answer in largest batches with all the time
    that others leave; None if it generates.
    """

    name: str
    rate_rps: float
    slo_ms: float
    promised_rps: float
    why_below: str | None
    cost_per_hour: float | None
    most_rps: float | None
    least_slo_ms: float | None
    enough_rps: float | None
    enough_slo_ms: float | None
    replicas: tuple[ReplicaExplained, ...]
    is_offline: bool = False
    idle_rps: float | None = None

    @property
    def cost_per_million(self) -> float | None:
        """The price of a million requests in time."""
        if self.cost_per_hour is None or self.promised_rps <= 0.0:
            return None
        return self.cost_per_hour / (3600.0 * self.promised_rps) * 1e6


@dataclass(frozen=True)
class StageExplained:
    """One stage of an application: what it takes of the deadline and of the GPUs, and what a faster network would save.

    `budget_ms` is its part of the application's SLO, `takes_ms` the latency of a batch of its model on the slowest
    gpu-let. `gpus` is the GPU time of its requests, in whole GPUs, and `cost_per_hour` their part of the model's cost.
    `saves` is the part of the GPU time of all stages that would be saved if the model's batches took a tenth less and
    deadlines were split anew; None if no profile says it, or the model generates.
    """

    application: str
    stage: str
    model: str
    budget_ms: float
    takes_ms: float | None
    gpus: float
    cost_per_hour: float | None
    saves: float | None


@dataclass(frozen=True)
class OneMore:
    """What the same policy promises with one GPU more of a type, or why that is not known."""

    gpu_type: str
    goodput_rps: float
    cost_per_hour: float | None
    below: tuple[str, ...]  # models that are still not served as asked
    why_not: str | None = None


@dataclass(frozen=True)
class Explained:
    """A plan explained.

    When all rates grow by more than the factor `growth`, the models in `breaks` are no longer promised in full.
    `growth` is None if no model is promised in full, or if none ever breaks. `enough` says on how many GPUs of each
    type the same policy serves every model as asked, and `enough_cost` what they cost per hour. `enough` is None if
    this plan serves them already, or if no such number is known. `stages` are those of all applications.
    """

    models: tuple[ModelExplained, ...]
    growth: float | None
    breaks: tuple[str, ...]
    one_more: tuple[OneMore, ...]
    enough: Mapping[str, int] | None
    enough_cost: float | None
    stages: tuple[StageExplained, ...] = ()


def explain(plan: Plan, gpus: Sequence[Gpu], profiles: Profiles, names: Sequence[str] = ()) -> Explained:
    """Return why a plan is as it is and what would change it.

    Args:
        plan: a complete plan.
        gpus: the GPUs of its cluster, with memory and prices. GPUs that the plan has drained do not count.
        profiles: the profiles that the plan was made with.
        names: the models that are explained; default: all.
    """
    gpus = [gpu for gpu in gpus if not is_at(gpu, plan.drained)]
    trying = _Trying(plan, gpus, profiles)
    models = tuple(trying.model(spec.name) for spec in plan.models if not names or spec.name in names)
    growth, breaks = trying.growth()
    one_more = tuple(trying.one_more(kind) for kind in dict.fromkeys(gpu.type for gpu in gpus))
    return Explained(models, growth, breaks, one_more, *trying.enough(), trying.stages())


_ONE_MORE = {"id": "more/0", "uuid": None, "rack": None, "instance": None}


class _Trying:
    """Tries changes of one plan."""

    def __init__(self, plan: Plan, gpus: Sequence[Gpu], profiles: Profiles) -> None:
        plan = plan.model_copy(update={"models": tuple(map(with_lengths, plan.models))})
        self._plan, self._gpus, self._profiles = plan, gpus, profiles
        self._carries = load_policy(plan.policy.name, plan.policy.options).carries
        self._outlooks = Outlooks(carries=self._carries)
        self._outlook = self._outlooks.of(plan)
        self._promised = self._parts(plan)
        in_full = {name for name, part in self._promised.items() if part >= IN_FULL - 1e-3}
        self._in_full = in_full - {spec.name for spec in plan.models if spec.offline}  # nothing is promised to those
        self._cluster = Cluster.of(gpus)
        cluster = self._cluster.cut_as(plan.gpus)
        self._prices = {gpu.device: whole_of(gpu).price_per_hour for gpu in cluster.gpus}
        self._sharing = Sharing(costs_of(plan.workload, cluster, profiles), profiles, plan.streaming)
        self._costs = self._costs_per_hour()

    def _parts(self, plan: Plan, rates_rps: Mapping[str, float] | None = None) -> dict[str, float]:
        traffic = None if rates_rps is None else Traffic(rates_rps)
        parts = self._outlooks.promised(plan, traffic)[0]
        for spec in plan.models if plan.gpulets == self._plan.gpulets else ():
            promised = self._plan.expected.models.get(spec.name)
            is_same = spec.generates is not None and spec.slo == self._plan.model(spec.name).slo
            if promised is not None and is_same:  # it was tried for all gpu-lets of the model together
                rate_rps = spec.rate_rps if rates_rps is None else rates_rps[spec.name]
                parts[spec.name] = max(parts.get(spec.name, 0.0), min(1.0, promised.goodput_rps / rate_rps))
        return parts

    def _broken(self, plan: Plan, rates_rps: Mapping[str, float] | None = None) -> set[str]:
        """Return the models that the present plan promises in full, and that this plan at these rates would not."""
        parts = self._parts(plan, rates_rps)
        return {name for name in self._in_full if parts.get(name, 0.0) < IN_FULL - 1e-3}

    def growth(self) -> tuple[float | None, tuple[str, ...]]:
        """Return the factor by which all rates may grow, and the models that break beyond it."""

        def grown(factor: float) -> set[str]:
            return self._broken(self._plan, {s.name: factor * s.rate_rps for s in self._plan.models})

        if not self._in_full:
            return None, ()
        factor, beyond = _furthest(lambda factor: not grown(factor))
        return (None, ()) if beyond is None else (factor, tuple(sorted(grown(beyond))))

    def model(self, name: str) -> ModelExplained:
        """Return one model."""
        spec = self._plan.model(name)
        places = [place for place, gpulet in enumerate(self._plan.gpulets) if _hosts(gpulet, name)]
        replicas = tuple(self._replica(place, name) for place in places)
        cost = None if self._costs is None else self._costs.get(name, 0.0)
        why_below = self._plan.unserved_reasons.get(name)
        if spec.offline:
            idle_rps = None if spec.generates is not None else sum(self._idle_rps(place, name) for place in places)
            declared, limits = (name, spec.rate_rps, spec.slo_ms), (None, None, None, None)
            return ModelExplained(
                *declared, 0.0, why_below, cost, *limits, replicas, is_offline=True, idle_rps=idle_rps
            )
        rates = {other.name: other.rate_rps for other in self._plan.models}
        is_full = name in self._in_full

        def holds(plan: Plan, rates_rps: Mapping[str, float] | None = None) -> bool:
            parts = self._parts(plan, rates_rps)
            return parts.get(name, 0.0) >= IN_FULL - 1e-3 and not self._broken(plan, rates_rps)

        def at_rate(factor: float) -> bool:
            return holds(self._plan, rates | {name: factor * spec.rate_rps})

        def at_slo(factor: float) -> bool:
            changed = spec.with_slo_scaled(factor)
            models = tuple(changed if other.name == name else other for other in self._plan.models)
            return holds(self._plan.model_copy(update={"models": models}))

        more = _furthest(at_rate)[0] if is_full else None
        shorter = _furthest(lambda factor: at_slo(1.0 / factor))[0] if is_full else None
        less = _nearest(lambda factor: at_rate(1.0 / factor)) if not is_full else None
        longer = _nearest(at_slo) if not is_full else None
        return ModelExplained(
            name,
            spec.rate_rps,
            spec.slo_ms,
            self._promised.get(name, 0.0) * spec.rate_rps,
            why_below,
            cost,
            None if more is None else more * spec.rate_rps,
            None if shorter is None else spec.slo_ms / shorter,
            None if less is None else spec.rate_rps / less,
            None if longer is None else longer * spec.slo_ms,
            replicas,
        )

    def _idle_rps(self, place: int, name: str) -> float:
        """Return what a model would answer in largest batches on a gpu-let with the time that its models leave."""
        program = next(p for p in self._plan.gpulets[place].programs if name in p.models)
        if program.latency is None:
            return 0.0
        batch_ms = program.latency.at(program.batch_size) * program.slowdown
        return (1.0 - min(1.0, self._outlook.busy[place])) * 1000.0 * program.batch_size / batch_ms

    def _replica(self, place: int, name: str) -> ReplicaExplained:
        gpulet, spec = self._plan.gpulets[place], self._plan.model(name)
        program = next(p for p in gpulet.programs if name in p.models)
        batch = self._outlook.batches[place].get(program.name, program.batch_size)
        takes_ms = None if program.latency is None else program.latency.at(batch) * program.slowdown
        carried = self._outlook.carried[place].get(program.name, 0.0)
        busy = self._outlook.busy[place] * sum(self._work(place)[member] for member in program.models)
        replica = gpulet.models[0]
        if replica.steps is not None:
            batch, takes_ms, carried, busy = self._writing(replica)
        without = self._changed(place, gpulet.only([other.name for other in gpulet.models if other.name != name]))
        less = None
        if replica.steps is None and gpulet.share_pct is not None and gpulet.share_pct > LESS_PCT:
            smaller = gpulet.model_copy(update={"share_pct": gpulet.share_pct - LESS_PCT})
            less = self._parts(self._sharing.completed(self._changed(place, smaller)))[name] * spec.rate_rps
        return ReplicaExplained(
            gpulet.id,
            " + ".join(gpulet.gpus),
            next(gpu.type for gpu in self._plan.gpus if gpu.id == gpulet.gpu),
            gpulet.share_pct,
            program.batch_size,
            batch,
            takes_ms,
            None if takes_ms is None or replica.steps is not None else spec.slo_ms - takes_ms,
            carried,
            busy,
            program.slowdown,
            self._parts(without).get(name, 0.0) * spec.rate_rps,
            less,
        )

    def _writing(self, replica: Replica) -> tuple[int, float, float, float]:
        """Return of a gpu-let that generates, at its planned rate, the sequences that decode at once (by Little's law,
        of as many as it carries), how long a step of so many takes in ms, its rate, and the part of its most."""
        spec = self._plan.model(replica.name)
        steps, kv_tokens = replica.steps, UNLIMITED_TOKENS if replica.kv_tokens is None else replica.kv_tokens
        if steps is None or spec.generates is None or spec.generates.prompt_tokens is None:
            raise ValueError(f"{replica.name} does not generate, or its lengths are not known.")
        most, sequences = self._carries(spec, steps, kv_tokens)
        busy = min(1.0, (replica.rate_rps or 0.0) / most) if most else 1.0
        batch = max(1, round(busy * sequences))
        output = 0.0 if spec.generates.output_tokens is None else spec.generates.output_tokens.mean
        context = batch * (spec.generates.prompt_tokens.mean + output / 2.0)
        return batch, steps.ms(sequences=batch, context_tokens=context), replica.rate_rps or 0.0, busy

    def _changed(self, place: int, gpulet: Gpulet | None) -> Plan:
        """Return the plan with another gpu-let at a place, or with none."""
        gpulets = [*self._plan.gpulets]
        gpulets[place : place + 1] = [] if gpulet is None else [gpulet]
        return self._plan.model_copy(update={"gpulets": tuple(gpulets)})

    def _costs_per_hour(self) -> dict[str, float] | None:
        """Return each model's part of the price of the GPUs in use. The parts add up to that price."""
        costs = dict.fromkeys((spec.name for spec in self._plan.models), 0.0)
        places = {gpulet.id: place for place, gpulet in enumerate(self._plan.gpulets)}
        by_gpu, together = self._plan.by_gpu(), dict[str, list[tuple[Gpulet, float]]]()
        for gpu in self._plan.gpus:
            together.setdefault(gpu.device, []).extend((g, gpu.part * g.effective_share_pct) for g in by_gpu[gpu.id])
        for device, gpulets in together.items():
            price = self._prices.get(device)
            if gpulets and price is None:
                return None
            held = sum(share for _, share in gpulets)
            for gpulet, share in gpulets:
                for name, part in self._work(places[gpulet.id]).items():
                    costs[name] += (price or 0.0) * share / held * part
        return costs

    def _work(self, place: int) -> dict[str, float]:
        """Return each model's part of the work on a gpu-let. The parts add up to 1; without work they are equal."""
        work: dict[str, float] = {}
        for program in self._plan.gpulets[place].programs:
            carried = self._outlook.carried[place].get(program.name, 0.0)
            batch = self._outlook.batches[place].get(program.name, program.batch_size)
            each_ms = 0.0 if program.latency is None else program.latency.at(batch) / batch
            rates = {name: self._plan.model(name).rate_rps for name in program.models}
            for name, rate in rates.items():
                work[name] = carried * each_ms * rate / sum(rates.values())
        total = sum(work.values())
        return {name: part / total if total > 0.0 else 1.0 / len(work) for name, part in work.items()}

    def stages(self) -> tuple[StageExplained, ...]:
        """Return the stages of all applications that are not offline."""
        gpus = dict.fromkeys((spec.name for spec in self._plan.models), 0.0)
        part_of = {gpu.id: gpu.part for gpu in self._plan.gpus}
        for place, gpulet in enumerate(self._plan.gpulets):
            held = sum(part_of[gpu] for gpu in gpulet.gpus) * gpulet.effective_share_pct / 100.0
            for name, part in self._work(place).items():
                writing = [replica for replica in gpulet.models if replica.name == name and replica.steps is not None]
                busy = self._writing(writing[0])[-1] if writing else self._outlook.busy[place] * part
                gpus[name] += busy * held
        saves = savings(self._plan.workload, self._cluster.cut_as(self._plan.gpus), self._profiles)
        explained = []
        for app in online(self._plan.applications):
            for stage in app.stages:
                spec = self._plan.model(app.model_name(stage))
                part = app.rate_rps * stage.count / spec.rate_rps
                expected = self._plan.expected.models.get(spec.name)
                explained.append(
                    StageExplained(
                        app.name,
                        stage.label,
                        spec.name,
                        app.budget_ms(stage),
                        None if expected is None else expected.latency_ms,
                        part * gpus[spec.name],
                        None if self._costs is None else part * self._costs[spec.name],
                        saves.get(spec.name),
                    )
                )
        return tuple(explained)

    def one_more(self, kind: str) -> OneMore:
        """Return what the plan's policy promises with one GPU more of a type."""
        known = next(gpu for gpu in self._gpus if gpu.type == kind)
        cluster = Cluster.of([*self._gpus, known.model_copy(update=_ONE_MORE)])
        try:
            policy = load_policy(self._plan.policy.name, self._plan.policy.options)
            plan = solve(policy, self._plan.workload, cluster, self._profiles)
        except TenutoError as error:
            return OneMore(kind, 0.0, None, (), first_line(error))
        return OneMore(kind, plan.expected.goodput_rps, plan.expected.cost_per_hour, tuple(plan.unserved_reasons))

    def enough(self) -> tuple[Mapping[str, int] | None, float | None]:
        """Return on how many GPUs of each type the plan's policy serves every model as asked, and their price."""
        if not self._plan.unserved_reasons:
            return None, None
        try:
            policy = load_policy(self._plan.policy.name, self._plan.policy.options)
            plan = enough_for_all(PlanTask(policy, self._plan.workload, self._cluster, self._profiles))
        except TenutoError:
            return None, None
        used = Counter(gpu.type for gpu in plan.gpus if plan.on_gpu(gpu.id))
        return (None, None) if plan.unserved_reasons else (used, plan.expected.cost_per_hour)


def _hosts(gpulet: Gpulet, name: str) -> bool:
    return any(replica.name == name for replica in gpulet.models)


def _furthest(holds: Callable[[float], bool]) -> tuple[float, float | None]:
    """Return a factor that holds, and one at most 1 % above it that does not; `MOST` and None if no factor fails."""
    low, high = 1.0, 2.0
    while holds(high):
        low, high = high, 2.0 * high
        if low >= MOST:
            return MOST, None
    while high / low > NARROW:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def _nearest(holds: Callable[[float], bool]) -> float | None:
    """Return a factor that holds, such that one at most 1 % below does not; None if no factor up to `MOST` holds."""
    return _furthest(lambda factor: not holds(factor))[1]
