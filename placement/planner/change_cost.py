"""Weighs a change of plan: the requests and GPU time that it gains over a horizon, against those it costs.

Requests come first. A plan that carries less of the traffic is never applied. A plan that carries more is applied when
no requests are lost on the way, or fewer than it gains at the expected rates. Among plans that carry the same, one on
fewer GPUs is applied when it saves more than old and new gpu-lets occupy together during the change, and no request is
lost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tenuto.placement.cluster import Gpu, node_of
from tenuto.placement.expectation.component import NOTHING
from tenuto.placement.expectation.outlook import Outlooks, Traffic
from tenuto.placement.expectation.sharing import listed
from tenuto.placement.plan import Plan
from tenuto.placement.plan_edits import on_gpus
from tenuto.placement.planner.change_stages import made_anew, stages
from tenuto.placement.planner.task import CHANCE, RunningPlan


@dataclass(frozen=True)
class Rent:
    """What occupied GPUs cost: whole GPUs on a cluster that can grow, else the shares held. A MIG instance is worth its
    part of the GPU.

    `price` is per hour by GPU type, with what losses of spot GPUs cost, for clusters of several types; a type without
    one counts 1. `beside`: the GPUs that
    come and go together with a GPU, by GPU.
    """

    by_gpu: bool
    price: Mapping[str, float]
    beside: Mapping[str, Collection[str]] = field(default_factory=dict)

    @classmethod
    def on(cls, gpus: Sequence[Gpu], *, by_gpu: bool, by_node: Collection[str] = ()) -> Rent:
        """Return what these GPUs cost, those of types in `by_node` with all of their node. Prices count when there are
        several types; GPUs of one type cost the same."""
        prices = {gpu.type: gpu.weighed_price for gpu in gpus}
        price = {k: price for k, price in prices.items() if price is not None} if len(prices) > 1 else {}
        together: dict[str, list[str]] = defaultdict(list)
        for gpu in gpus:
            if by_gpu and gpu.whole_type in by_node:
                together[node_of(gpu.id)].append(gpu.device)
        return cls(by_gpu, price, {name: set(names) for names in together.values() for name in names})

    def of(self, plan: Plan) -> float:
        """Return what a plan occupies, in GPUs (times their price when they have one)."""
        held: dict[str, float] = defaultdict(float)
        for gpulet in plan.gpulets:
            for gpu in gpulet.gpus:
                held[gpu] += gpulet.effective_share_pct / 100.0
        on: dict[str, float] = defaultdict(float)  # by GPU
        kinds = {}
        for place in plan.gpus:
            if place.id in held:
                kinds[place.device] = place.whole_type
                for device in self.beside.get(place.device, ()):
                    kinds.setdefault(device, place.whole_type)
                    on.setdefault(device, 0.0)
                on[place.device] += held[place.id] if place.cut_as is None else min(1.0, held[place.id]) * place.part
        return sum(self.price.get(kinds[gpu], 1.0) * (1.0 if self.by_gpu else part) for gpu, part in on.items())


@dataclass(frozen=True)
class ChangeWorth:
    """A weighed change. Requests are weighted and over the horizon; rent is in GPU-seconds (times price)."""

    pays: bool
    why: str
    carried_rps: float = 0.0  # of the traffic to carry
    gained_requests: float = 0.0
    lost_requests: float = 0.0
    saved_rent: float = 0.0
    spent_rent: float = 0.0
    seconds: float = 0.0
    stages: int = 0
    only_saves: bool = False  # it carries no more, and gives GPUs up


class ChangeScale:
    """Weighs changes from one running plan, whose figures are computed once."""

    def __init__(self, running: RunningPlan, gpus: Sequence[Gpu], rent: Rent, to_come: Collection[Gpu] = ()) -> None:
        """Take what runs, on which terms it may change, and what GPUs cost. A plan that promises a model a smaller part
        of its requests than `attainment` carries less of the model. GPUs `to_come` are paid beside the running plan
        until the last of them is there."""
        if running.terms is None:
            raise ValueError("Nothing says what a change of the running plan may cost.")
        self._running, self._terms, self._rent = running, running.terms, rent
        self._gpus, self._to_come = (*gpus, *to_come), to_come
        self._expected = Traffic(running.terms.expected_rps)
        self._outlooks = Outlooks(running.slowdowns)
        self._carried_now = self._carried(running.plan, running.traffic), self._carried(running.plan, self._expected)
        self._rent_now = rent.of(running.plan)

    def weigh(self, target: Plan, relieved: int = 0) -> ChangeWorth:
        """Weigh going to a plan in which `relieved` more models lie as they ask (`planner.fault_tolerance`)."""
        terms, traffic, running = self._terms, self._running.traffic, self._running.plan
        weights = {spec.name: spec.weight for spec in (*running.models, *target.models)}

        def total(rates_rps: Mapping[str, float]) -> float:
            return sum(weights.get(name, 1.0) * rate for name, rate in rates_rps.items())

        offered_rps = total(traffic.mean_rps)
        slight_rps = NOTHING * offered_rps
        needs_before, before_rps = map(total, self._carried_now)
        carried = self._carried(target, self._expected)
        needs_after, after_rps = total(self._carried(target, traffic)), total(carried)
        if needs_after < needs_before - slight_rps or after_rps < before_rps - slight_rps:
            return ChangeWorth(False, f"the new plan carries {needs_after:.0f} r/s, the running one {needs_before:.0f}")
        carries_more = needs_after > needs_before + slight_rps
        if relieved < 0 and not carries_more:
            return ChangeWorth(False, "fewer models would survive a loss, or lie where they ask", needs_after)
        gains = carries_more or relieved > 0
        rent_before, rent_after = self._rent_now, self._rent.of(target)
        if not gains and rent_after >= rent_before:  # whatever the change costs
            why = f"the new plan carries no more and needs {rent_after:.2f} GPUs, the running one {rent_before:.2f}"
            return ChangeWorth(False, why, needs_after)
        seconds = lost = 0.0
        waiting = self._rent.of(on_gpus(target, self._to_come)) if self._to_come else 0.0
        spent = waiting * terms.come_s if waiting else 0.0
        way = stages(running, target, self._gpus, terms.expected_rps)
        for stage in way:
            lasts_s = stage.lasts_s(terms.durations)
            seconds += lasts_s
            spent += max(0.0, self._rent.of(stage.plan) - rent_before) * lasts_s
            if lasts_s:
                serving = tuple(gpulet for gpulet in stage.plan.gpulets if gpulet.id in stage.ready)
                meanwhile = self._carried(stage.plan.model_copy(update={"gpulets": serving}), self._expected)
                lost += max(0.0, before_rps - total(meanwhile)) * lasts_s
        left_s = max(0.0, terms.horizon_s - seconds)
        chance_rps = self._chance_rps(carried, weights)
        gained, saved = (after_rps - before_rps - chance_rps) * left_s, (rent_before - rent_after) * left_s
        is_free = lost <= slight_rps * seconds
        cut = _cut(running, target)
        if cut:
            cut += f" takes {seconds:.0f} s and loses {lost:.0f} requests"
        most = 1.0 + terms.hysteresis
        figures = (needs_after, gained, lost, saved, spent, seconds, len(way))
        if gains:
            if (is_free and not chance_rps) or gained > most * lost:
                why = f"the new plan carries {needs_after:.0f} of {offered_rps:.0f} r/s"
                why += f", the running one {needs_before:.0f}"
                if not carries_more:
                    why = f"{relieved} more models survive a loss, or lie where they ask"
                return ChangeWorth(True, why + cut, *figures)
            return ChangeWorth(False, f"the change would lose {lost:.0f} requests and gain {gained:.0f}", *figures)
        if saved <= most * spent or saved <= 0.0:
            return ChangeWorth(False, f"the change would save {saved:.0f} GPU-seconds and cost {spent:.0f}", *figures)
        if not is_free:
            return ChangeWorth(False, f"the change only saves GPUs, and would lose {lost:.0f} requests", *figures)
        why = f"the new plan needs {rent_after:.2f} GPUs, the running one {rent_before:.2f}{cut}"
        return ChangeWorth(True, why, *figures, only_saves=True)

    def _chance_rps(self, carried: Mapping[str, float], weights: Mapping[str, float]) -> float:
        """Return how much more a plan may seem to carry by chance, as it carries less of some model for the sake of
        others; 0 when it carries less of none."""
        rates_rps, before = self._expected.mean_rps, self._carried_now[1]
        gives = {name: carried.get(name, 0.0) - before.get(name, 0.0) for name in carried.keys() | before.keys()}
        if all(more >= -NOTHING * rates_rps[name] for name, more in gives.items()):
            return 0.0
        spread = self._running.traffic.dispersion
        variances = (
            (weights.get(name, 1.0) * more) ** 2 * max(1.0, spread.get(name, 1.0)) / max(rates_rps[name], NOTHING)
            for name, more in gives.items()
        )
        return CHANCE * math.sqrt(sum(variances) / (2.0 * self._terms.average_s))

    def _carried(self, plan: Plan, traffic: Traffic) -> dict[str, float]:
        """Return the requests per second of each model that a plan carries."""
        parts = self._outlooks.attained_parts(plan, traffic, self._running.attainment)
        return {name: part * traffic.mean_rps[name] for name, part in parts.items()}


def _cut(running: Plan, target: Plan) -> str:
    """Say which GPUs are cut; empty when none is."""
    gpus = list(dict.fromkeys(gpu.device for gpu in made_anew(running, target)))
    return f"; cutting {'GPU' if len(gpus) == 1 else 'GPUs'} {listed(gpus)}" if gpus else ""
