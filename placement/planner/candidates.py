"""The plans that may take the place of a running one.

What is placed stays in the plans that are `kept`, `extended` (the policy plans what is missing beside it), `trimmed`
(gpu-lets that are not needed end) and `arranged` (replicas are added beside others: until models lie as they ask, or,
where GPUs lack, as long as one more carries more). Beside them stand the policy's plan for everything (`planned anew`)
and, on GPUs that plans may cut into MIG instances, one with other layouts (`cut anew`). On a cluster that can grow what
lies on a dear GPU may move to cheaper ones (`swapped`), of which some may have to be had first.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from tenuto.errors import InvalidInputError
from tenuto.placement.cluster import Cluster, Gpu, GpuGroup, MigUse, Node, node_of
from tenuto.placement.components import connected_components, members_of
from tenuto.placement.expectation.outlook import Outlooks, Traffic, expected_of
from tenuto.placement.generation_capacity import in_proportion
from tenuto.placement.placement_constraints import ANYWHERE, asks, bearable, may_lie, prefers
from tenuto.placement.plan import Plan, PlannedGpu
from tenuto.placement.plan_edits import for_workload, with_gpulets, with_the_rest
from tenuto.placement.planner.batch_growth import enlarge_batches
from tenuto.placement.planner.change_stages import fits, made_anew
from tenuto.placement.planner.completion import complete_successor, usage_of
from tenuto.placement.planner.fault_tolerance import unmet, with_losses
from tenuto.placement.planner.gpu_matching import fresh_id, gpus_of, match_to_running
from tenuto.placement.planner.mixed_workloads import plan_anew
from tenuto.placement.planner.task import PlanTask
from tenuto.placement.program import Gpulet
from tenuto.placement.workload import Workload
from tenuto.profiles import ModelProfile, Profile, Profiles

_NOTHING = Traffic({})  # is carried by every plan
_MOST_EMPTIED = 4  # limit: nodes that are looked at, each with a plan of its own
SLIGHT = 1e-3  # derived: of attainment; ten times `expectation.outlook.NOTHING`, the noise of promises


class Candidate(NamedTuple):
    """A plan, and how it was made."""

    how: str
    plan: Plan


class Candidates:
    """The candidates of one task. `faults` says why some of them are missing. `needed_gpus` is how many GPUs of each
    type would carry everything; None: the policy could not tell. `to_come` are GPUs of plans that are not there yet, by
    id. `models_to_add` are those that no gpu-let of what runs holds; without gpu-lets there are none."""

    def __init__(self, task: PlanTask) -> None:
        """Take a task with a running plan. Its cluster has the GPUs that are present."""
        self._task = task
        self.workload, self.running, self.gpus = task.workload, task.replaced, task.cluster.gpus
        self._slowdowns = {name: factor for name, factor in self.running.slowdowns.items() if factor != 1.0}
        self._outlooks = Outlooks(self._slowdowns)
        self._uncut = task.cluster.uncut.gpus
        self.asks_for_places = any(map(asks, task.workload.models))
        self.faults: list[str] = []
        self.needed_gpus: Mapping[str, int] | None = None
        self.to_come: dict[str, Gpu] = {}
        held = {replica.name for gpulet in self.running.plan.gpulets for replica in gpulet.models}
        self.models_to_add = {spec.name for spec in self.workload.models} - held if held else set[str]()

    def additions(self) -> list[Candidate]:
        """Return the candidates that add `models_to_add` to what runs, where nothing else is missing in it and it has
        room for them. The policy need not plan everything for them."""
        plans: list[Candidate] = []
        with self._faults_noted():
            if self._uncut or self.running.growth:
                plans = list(self._with_models_that_came())
        if plans:
            self.needed_gpus = gpus_used(plans[0].plan)
        return plans

    def all(self) -> list[Candidate]:
        """Return all candidates but those additions."""
        present = Counter(gpu.type for gpu in self._uncut)
        types = tuple(dict.fromkeys([*present, *self.running.growth]))
        if not types:
            self.faults.append("no GPU is present")
            return []
        anew: Plan | None = None
        plans: list[Candidate] = []
        self.needed_gpus = None
        with self._faults_noted():
            anew = self.planned_anew(self._elastic(types))
            self.needed_gpus, limits = gpus_used(anew), self.running.limits
            if any(count > limits.get(kind, count) for kind, count in self.needed_gpus.items()):
                anew = self.needed_gpus = None
        is_enough = self.needed_gpus is not None and all(
            count <= present[kind] for kind, count in self.needed_gpus.items()
        )
        may_cut = any(gpu.mig == "managed" for gpu in self._uncut)
        with self._faults_noted():
            counts = self.needed_gpus if self.needed_gpus is not None and is_enough else present
            for plan in map(self._cut_anew, self._devices_to_cut(counts) if may_cut else ()):
                plans.append(Candidate("cut anew" if made_anew(self.running.plan, plan) else "planned anew", plan))
        with self._faults_noted():
            if anew is None or not is_enough or may_cut:
                anew = self.planned_anew(self._task.cluster.as_cut) if present else None
            if anew is not None:
                plans.append(Candidate("planned anew", self._matched(anew, self.gpus)))
        with self._faults_noted():
            if self.running.plan.gpulets:
                running = self.completed(self._with_larger_batches(for_workload(self.running.plan, self.workload)))
                plans.append(Candidate("kept", running))
                for how, plan in self.incremental(running):
                    plans.append(Candidate(how, self.completed(plan)))
                plans.extend(self._swapped(next((plan for how, plan in plans if how == "trimmed"), running)))
        return plans

    def _with_models_that_came(self) -> Iterator[Candidate]:
        """Yield the running plan with models that none of its gpu-lets holds: placed where it takes least, and as the
        policy places them beside it. Nothing that carries less than all of these, or less of another model."""
        running = self.completed(self._with_larger_batches(for_workload(self.running.plan, self.workload)))
        missing, came = self.missing(running), self.models_to_add
        if missing.keys().isdisjoint(came):
            return
        enough = (1.0 - SLIGHT) * self.running.attainment
        promised = self._outlooks.promised(running, self.running.traffic)[0]
        least = {n: min(enough, part) for n, part in promised.items()} | dict.fromkeys(missing.keys() & came, enough)
        most = {name: SLIGHT + (0.0 if name in came else part) for name, part in missing.items()}
        arranged = self._arranged(running, least, self.running.traffic)
        for how, plan in (("arranged", arranged), ("extended", self._extended(running, missing))):
            done = None if plan is None else self.completed(plan)
            if done is None or self.unmet_wishes(done) > self._unmet_before:
                continue
            if all(part <= most.get(name, SLIGHT) for name, part in self.missing(done).items()):
                yield Candidate(how, done)

    def _arranged(
        self, running: Plan, parts: Mapping[str, float], traffic: Traffic | None = None, at_most: int | None = None
    ) -> Plan:
        """Return the running plan with as many more replicas, `at_most` so many, as it takes to promise these parts of
        the traffic, by default of the declared rates, where models ask to lie."""
        plan = running.model_copy(update={"gpus": tuple(PlannedGpu.of(gpu) for gpu in self.gpus)})
        return self._with_larger_batches(self.completed(plan, parts, traffic, at_most))

    def incremental(self, running: Plan) -> Iterator[Candidate]:
        """Yield the plans that leave the gpu-lets of a running plan of the workload where they are, not completed."""
        missing = self.missing(running)
        how, plan = ("extended", self._extended(running, missing)) if missing else ("trimmed", self.trimmed(running))
        if plan is not None:
            yield Candidate(how, plan)
        if not missing:
            yield from self._on_fewer_nodes(plan or running)
        elif self.running.terms is not None:
            if len(set(_weights(self.workload).values())) > 1:
                yield Candidate("in place of others", self._in_place_of_others(running, missing))
            left = missing if plan is None else self.missing(self.completed(plan))
            if left and not self.asks_for_places:
                parts = dict.fromkeys(self.running.traffic.mean_rps, self.running.attainment)
                # One more for each that lacks something: more take long to find, and longer to load.
                arranged = self._arranged(plan or running, parts, self.running.traffic, len(left))
                yield Candidate("arranged", arranged)
        if self.asks_for_places:
            parts = {spec.name: 1.0 for spec in self.workload.models}
            yield Candidate("arranged", self._arranged(running, parts))

    @contextmanager
    def _faults_noted(self) -> Iterator[None]:
        try:
            yield
        except InvalidInputError as error:
            self.faults.append(str(error))

    # --- what plans promise -------------------------------------------------------------------------------------------

    def missing(self, plan: Plan) -> dict[str, float]:
        """Return the models of which a plan promises too little, with the missing part of their requests."""
        return {name: 1.0 - part for name, part in self._promised_parts(plan).items() if 1.0 - part > SLIGHT}

    def unmet_wishes(self, plan: Plan) -> int:
        """Return how many models do not lie as they ask, as far as the present GPUs allow it."""
        if not self.asks_for_places:
            return 0
        plan = for_workload(plan, bearable(self.workload, self.gpus))
        return len(unmet(self.with_promises(self.made_for_traffic(plan))))

    def relieved(self, plan: Plan) -> int:
        """Return how many models more than in the running plan lie as they ask."""
        return self._unmet_before - self.unmet_wishes(plan) if self.asks_for_places else 0

    @cached_property
    def _unmet_before(self) -> int:
        return self.unmet_wishes(self.running.plan)

    def made_for_traffic(self, plan: Plan) -> Plan:
        """Return the plan made for the traffic with its bursts, which the scheduler grants under overload."""
        rates_rps = self.running.traffic.upper_rps
        models = [spec.model_copy(update={"rate_rps": rates_rps.get(spec.name, spec.rate_rps)}) for spec in plan.models]
        return plan.model_copy(update={"models": tuple(models)})

    def with_promises(self, plan: Plan) -> Plan:
        """Return the plan with what it promises at its rates, after losses too, and the cost of its GPUs."""
        expected = expected_of(plan).model_copy(update=usage_of(plan, self._task.cluster))
        return with_losses(plan.model_copy(update={"expected": expected}))

    def _promised_parts(self, plan: Plan) -> dict[str, float]:
        return self._outlooks.attained_parts(plan, self.running.traffic, self.running.attainment)

    # --- everything is planned anew -----------------------------------------------------------------------------------

    def planned_anew(self, cluster: Cluster) -> Plan:
        """Return the policy's plan for everything.

        The first attempt plans for every model's whole burst. The second plans for less where models share gpu-lets in
        the first, unless that plan would not carry the traffic. On an elastic cluster it is then made to carry it.
        """
        traffic, upper_rps = self.running.traffic, self.running.traffic.upper_rps

        def planned(rates_rps: Mapping[str, float], to_carry: Traffic) -> Plan:
            models = tuple(spec.model_copy(update={"rate_rps": rates_rps[spec.name]}) for spec in self.workload.models)
            workload = self.workload.model_copy(update={"models": models})
            plan = self._policys(workload, cluster, to_carry)
            larger = enlarge_batches(plan, self.workload, self._task.profiles, (*self.gpus, *gpus_of(plan)))
            if larger == plan:
                return plan
            done = complete_successor(larger, larger, self._as_measured(workload, cluster), parts={}, at_most=0)
            return self._as_profiled(done, workload).model_copy(update={"notes": plan.notes})

        plan = smaller = planned(upper_rps, _NOTHING)
        pooled_rps = _pooled_rps(plan, traffic)
        if pooled_rps != upper_rps:
            smaller = planned(pooled_rps, _NOTHING)
        missing = self.missing(smaller).keys()
        if not missing:
            return smaller
        most = self.missing(plan).keys()
        if not cluster.elastic or self._task.policy.abilities.tries_plans:
            return smaller if missing <= most else plan
        smaller = planned(pooled_rps, traffic)
        return smaller if self.missing(smaller).keys() <= most else planned(upper_rps, traffic)

    def _devices_to_cut(self, counts: Mapping[str, int]) -> list[frozenset[str]]:
        """Return sets of so many GPUs to cut, by type: those with most gpu-lets, of which some can stay, and those with
        fewest, where fewer must end first."""
        running = self.running.plan
        held = Counter(gpu.device for gpu in running.gpus for _ in running.on_gpu(gpu.id))
        types = {gpu.device: gpu.type for gpu in self._uncut if gpu.mig == "managed"}
        sets = []
        for sign in (-1, 1):
            chosen: dict[str, list[str]] = defaultdict(list)
            for device in sorted(types, key=lambda device: sign * held[device]):
                if len(chosen[types[device]]) < counts.get(types[device], 0):
                    chosen[types[device]].append(device)
            sets.append(frozenset(device for devices in chosen.values() for device in devices))
        return list(dict.fromkeys(sets))

    def _cut_anew(self, devices: Collection[str]) -> Plan:
        """Return the policy's plan with its own layouts on some of the GPUs that it may cut, and on those that it may
        not. Instances in both plans keep their gpu-lets where they can."""
        able = (gpu for gpu in self.gpus if gpu.mig != "managed" or gpu.device in devices)
        plan = self.planned_anew(Cluster.of(able))
        planned = {gpu.device for gpu in plan.gpus}
        return self._matched(plan, (*gpus_of(plan), *(gpu for gpu in self.gpus if gpu.device not in planned)))

    def _matched(self, plan: Plan, gpus: Sequence[Gpu]) -> Plan:
        """Return the plan on these GPUs, where as many running gpu-lets as possible stay."""
        running = self.running
        return match_to_running(plan, running.plan, gpus, keep_idle=not running.growth, reserved=running.reserved_ids)

    def _elastic(self, types: Iterable[str]) -> Cluster:
        """Return a cluster with as many GPUs of these types as a plan takes."""
        known = {gpu.type: gpu for gpu in (*self.gpus, *self._uncut)}
        groups = []
        for kind in types:
            gpu = known.get(kind)
            memory = price = spot = None
            if gpu is not None:
                memory, price, spot = gpu.memory_mib, gpu.price_per_hour, gpu.spot
            price, spot = self.running.prices.get(kind, price), self.running.spot.get(kind, spot)
            is_cut = kind in self.running.cut or (gpu is not None and gpu.mig == "managed" and gpu.instance is None)
            mig: MigUse | None = "managed" if is_cut else None
            groups.append(GpuGroup(type=kind, memory_mib=memory, price_per_hour=price, spot=spot, mig=mig))
        return Cluster(nodes=(Node(name="n", gpus=tuple(groups)),), elastic=True)

    # --- what runs stays ----------------------------------------------------------------------------------------------

    def _extended(self, running: Plan, missing: Mapping[str, float]) -> Plan | None:
        """Return the running plan, and beside it the policy's plan for the missing parts; None when nothing more fits.
        Each new gpu-let goes where least room is left, on unused GPUs last. When no GPU of the types that the policy
        chooses has room, it chooses among the types of unused GPUs."""
        types, used = dict.fromkeys(gpu.type for gpu in self.gpus), {*running.used_gpus}
        unused = dict.fromkeys(gpu.type for gpu in self.gpus if gpu.id not in used)
        new = self._beside(running, self._bought(missing, types))
        if not new and unused and unused != types:
            new = self._beside(running, self._bought(missing, unused))
        return self._with_more(running, new) if new else None

    def _with_more(self, running: Plan, new: Iterable[Gpulet]) -> Plan:
        plan = with_gpulets(running, [*running.gpulets, *new])
        used = {*plan.used_gpus}
        gpus = tuple(PlannedGpu.of(gpu) for gpu in self.gpus if not self.running.growth or gpu.id in used)
        return self._with_larger_batches(plan.model_copy(update={"gpus": gpus}))

    def _beside(self, running: Plan, more: Plan) -> list[Gpulet]:
        """Return gpu-lets of another plan on the present GPUs, as far as they fit beside those of the running plan."""
        specs = {spec.name: spec for spec in self.workload.models}
        bought = {gpu.id: gpu for gpu in gpus_of(more)}
        held = {gpu.id: [*running.on_gpu(gpu.id)] for gpu in self.gpus}
        ids = {gpulet.id for gpulet in running.gpulets} | self.running.reserved_ids
        new: list[Gpulet] = []
        alone = (gpulet for gpulet in more.gpulets if not gpulet.also_on)  # several GPUs of a node are planned anew
        for whole in sorted(alone, key=lambda g: (-g.effective_share_pct, g.id)):
            gpulet = in_proportion(whole, bought[whole.gpu], self._task.profiles)
            hosted = [specs[replica.name] for replica in gpulet.models]
            able = [
                ((sum(g.effective_share_pct for g in held[gpu.id]), sum(prefers(spec, gpu) for spec in hosted)), gpu)
                for gpu in self.gpus
                if gpu.type == bought[gpulet.gpu].type
                and fits([*held[gpu.id], gpulet], gpu)
                and all(may_lie(spec, gpu) for spec in hosted)
            ]
            if able:
                _, gpu = max(able, key=itemgetter(0))
                placed = gpulet.model_copy(update={"id": fresh_id(gpu.id, ids), "gpu": gpu.id})
                held[gpu.id].append(placed)
                new.append(placed)
        return new

    def _in_place_of_others(self, running: Plan, missing: Mapping[str, float]) -> Plan:
        """Return the running plan with what is missing, the most valuable first, in the place of gpu-lets of models of
        less weight that are worth less together. Worth is the requests per second of a gpu-let, each by its weight."""
        more, weights = self._bought(missing, dict.fromkeys(gpu.type for gpu in self.gpus)), _weights(self.workload)
        gains, loses = self._weighted_rps(more, missing), self._weighted_rps(running, self._promised_parts(running))
        plan, types = running, {gpu.id: gpu.type for gpu in more.gpus}
        for gpulet in sorted(more.gpulets, key=lambda g: (-gains[g.id], g.id)):
            most = max(weights[replica.name] for replica in gpulet.models)  # no chance of rates turns it round
            stays = {g.id for g in plan.gpulets if g.also_on or any(weights[r.name] >= most for r in g.models)}
            able = (gpu for gpu in self.gpus if gpu.type == types[gpulet.gpu])
            ways = [[], *(_in_the_way(plan.on_gpu(gpu.id), gpulet, gpu, stays, loses) for gpu in able)]
            for gone in sorted(ways, key=lambda gone: sum(loses[name] for name in gone)):
                left = with_gpulets(plan, [g for g in plan.gpulets if g.id not in gone])
                new = self._beside(left, with_gpulets(more, [gpulet]))
                if new and sum(loses[name] for name in gone) < gains[gpulet.id]:
                    plan = self._with_more(left, new)
                    loses |= {placed.id: gains[gpulet.id] for placed in new}
                    break
        return plan

    def _weighted_rps(self, plan: Plan, parts: Mapping[str, float]) -> dict[str, float]:
        """Return the weighted requests per second that each gpu-let has of these parts of the models' requests."""
        hosts = Counter(replica.name for gpulet in plan.gpulets for replica in gpulet.models)
        rates_rps, weights = self.running.traffic.mean_rps, _weights(self.workload)
        each = {name: weights[name] * parts.get(name, 0.0) * rates_rps.get(name, 0.0) / hosts[name] for name in hosts}
        return {gpulet.id: sum(each[replica.name] for replica in gpulet.models) for gpulet in plan.gpulets}

    def _bought(self, missing: Mapping[str, float], types: Iterable[str]) -> Plan:
        """Return the policy's plan for missing parts of models, on as many GPUs of these types as it takes. What the
        policy leaves out gets replicas until it is carried, as in a plan anew."""
        traffic, upper_rps = self.running.traffic, self.running.traffic.upper_rps
        short = tuple(
            spec.model_copy(update={"rate_rps": missing[spec.name] * upper_rps[spec.name], **ANYWHERE})
            for spec in self.workload.models
            if spec.name in missing
        )
        update = {"models": short, "applications": (), "merge": "off"}
        workload, cluster = self.workload.model_copy(update=update), self._elastic(types)
        plan = self._policys(workload, cluster, _NOTHING)
        if not plan.unserved:
            return plan
        mean_rps = {spec.name: missing[spec.name] * traffic.mean_rps[spec.name] for spec in short}
        return self._policys(workload, cluster, Traffic(mean_rps, traffic.dispersion, traffic.sigmas))

    def needed_where_runs(self, plan: Plan) -> Mapping[str, int] | None:
        """Return how many GPUs of each type would carry everything where a plan then runs: as many as the policy's plan
        takes, where more have to come for it or nothing is missing. Else those in use, and for what is missing more of
        the types of which there are more; without such types, as many as are missing of all."""
        present, missing = Counter(gpu.type for gpu in self._uncut), self.missing(plan)
        needed, limits = self.needed_gpus, self.running.limits
        if needed is not None and (not missing or any(count > present[kind] for kind, count in needed.items())):
            return needed
        plan = for_workload(plan, self.workload)
        used, types = gpus_used(plan), tuple(dict.fromkeys([*present, *self.running.growth]))
        if not missing:
            return used
        more = [kind for kind in types if kind not in limits or limits[kind] > used[kind]] or types
        try:
            return used + gpus_used(self._bought(missing, more))
        except InvalidInputError as error:
            self.faults.append(str(error))
            return needed

    def trimmed(self, running: Plan) -> Plan | None:
        """Return the running plan without what it does not need, None when it needs everything: whole GPUs go first,
        then gpu-lets, the largest share first."""
        needed = {gpulet.id for part in _independent_parts(running) for gpulet in self._needed(part)}
        if len(needed) == len(running.gpulets):
            return None
        return with_gpulets(running, [gpulet for gpulet in running.gpulets if gpulet.id in needed])

    def _on_fewer_nodes(self, running: Plan) -> Iterator[Candidate]:
        """Yield the running plan without each node that could be given back, the emptiest first: what lies there moves
        to other nodes, and the rest stays."""
        used = gpus_used(running)
        held = Counter(node_of(gpu) for gpulet in running.gpulets for gpu in gpulet.gpus)
        whole = {node_of(gpu.id) for gpu in self.gpus if gpu.whole_type in self.running.by_node}
        for node in sorted(whole & held.keys(), key=lambda node: (held[node], node))[:_MOST_EMPTIED]:
            left = tuple(gpu for gpu in self.gpus if node_of(gpu.id) != node)
            if used <= Counter(gpu.whole_type for gpu in left):
                yield Candidate(f"emptying {node}", self._matched(running, left))

    def _swapped(self, running: Plan) -> Iterator[Candidate]:
        """Yield the running plan, trimmed where it can be, without the emptiest of its GPUs of each type that is not
        the cheapest, the dearest first. What lay there lies on cheaper GPUs, present or to come, and all else stays."""
        growth, present = set(self.running.growth) - self.running.by_node, (gpu.type for gpu in self.gpus)
        prices = self._elastic(dict.fromkeys([*self.running.growth, *present])).prices if growth else {}
        held = {gpu: sum(g.effective_share_pct for g in on) for gpu, on in running.by_gpu().items() if on}
        whole = [gpu for gpu in self.gpus if gpu.id in held and gpu.instance is None and growth]
        emptiest = {gpu.type: gpu for gpu in sorted(whole, key=lambda gpu: (-held[gpu.id], gpu.id))}
        for gpu in sorted(emptiest.values(), key=lambda gpu: -prices[gpu.type]):
            cheaper = {kind: price for kind, price in prices.items() if kind in growth and price < prices[gpu.type]}
            swapped = self._without_gpu(running, gpu, cheaper, prices[gpu.type])
            if swapped is not None:
                yield Candidate("swapped", swapped)

    def _without_gpu(self, running: Plan, gpu: Gpu, prices: Mapping[str, float], below: float) -> Plan | None:
        """Return the running plan without a GPU, and beside it the policy's plan for what is then missing, on GPUs of
        these types; None where they cost as much, or a model would lack more than before."""
        lacks, limits = self.missing(running), self.running.limits
        plan = with_gpulets(running, [gpulet for gpulet in running.gpulets if gpu.id not in gpulet.gpus])
        source = Candidates(self._task.on(Cluster.of(other for other in self.gpus if other != gpu)))
        used, price, lacking = gpus_used(plan), 0.0, math.inf
        while price < below:
            missing = self.missing(plan)
            if all(part <= lacks.get(name, 0.0) + SLIGHT for name, part in missing.items()):
                return source.completed(plan)
            kinds = [kind for kind in prices if gpus_used(plan)[kind] < limits.get(kind, math.inf)]
            if not kinds or sum(missing.values()) >= lacking:
                return None
            more, lacking = self._bought(missing, kinds), sum(missing.values())
            source = source._with_gpus(gpus_used(more))
            self.to_come |= source.to_come
            plan = source._with_more(plan, source._beside(plan, more))
            price = sum(prices[kind] * count for kind, count in (gpus_used(plan) - used).items())
        return None

    def _with_gpus(self, counts: Mapping[str, int]) -> Candidates:
        """Return candidates on so many more GPUs of each type, as far as there are any."""
        present, limits, one = Counter(gpu.type for gpu in self.gpus), self.running.limits, self._elastic(counts)
        new = [
            one.one_of_each[kind].model_copy(update={"id": f"{kind} to come/{place}", "uuid": None})
            for kind, count in counts.items()
            for place in range(present[kind], int(min(present[kind] + count, limits.get(kind, math.inf))))
        ]
        more = Candidates(self._task.on(Cluster.of((*self.gpus, *new))))
        more.to_come = self.to_come | {gpu.id: gpu for gpu in new}
        return more

    def _needed(self, plan: Plan) -> Sequence[Gpulet]:
        """Return the gpu-lets that a plan needs."""
        groups = [gpulets for gpulets in plan.by_gpu().values() if gpulets]
        groups.sort(key=lambda gpulets: len({replica.name for gpulet in gpulets for replica in gpulet.models}))
        singles = sorted(plan.gpulets, key=lambda gpulet: -gpulet.effective_share_pct)
        parts, unmet_wishes = self._promised_parts(plan), self.unmet_wishes(plan)
        for group in [*groups, *([gpulet] for gpulet in singles)]:
            gone = {gpulet.id for gpulet in group}
            left = with_gpulets(plan, [gpulet for gpulet in plan.gpulets if gpulet.id not in gone])
            if (
                len(left.gpulets) < len(plan.gpulets)
                and all(part > parts[name] - SLIGHT for name, part in self._promised_parts(left).items())
                and self.unmet_wishes(left) <= unmet_wishes
            ):
                plan = left
        return plan.gpulets

    def _with_larger_batches(self, plan: Plan) -> Plan:
        return enlarge_batches(plan, self.workload, self._task.profiles, self.gpus)

    # --- the policy ---------------------------------------------------------------------------------------------------

    def _policys(self, workload: Workload, cluster: Cluster, traffic: Traffic) -> Plan:
        """Return the policy's plan for a workload, which on an elastic cluster carries the traffic."""
        attainment = (1.0 - SLIGHT) * self.running.attainment
        task = replace(self._as_measured(workload, cluster), traffic=traffic, attainment=attainment)
        return self._as_profiled(plan_anew(task), workload)

    def completed(
        self,
        plan: Plan,
        parts: Mapping[str, float] | None = None,
        traffic: Traffic | None = None,
        at_most: int | None = None,
    ) -> Plan:
        """Return a plan near what runs with what follows from it; with as many more replicas, `at_most` so many, as it
        takes to promise these parts of the traffic. What runs goes on with the same GPUs, MPS and streaming."""
        running, task = self.running.plan, self._as_measured(self.workload, self._task.cluster.as_cut)
        workload = task.workload.model_copy(update={"mps": running.mps, "streaming": running.streaming})
        bare = for_workload(plan, workload).model_copy(update={"believed": None})
        task = replace(task, workload=workload, traffic=traffic)
        at_most = 0 if parts is None else at_most
        parts = {spec.name: parts[spec.name] for spec in workload.models if spec.name in parts} if parts else {}
        done = complete_successor(bare, running, task, parts=parts, at_most=at_most)
        return self._as_profiled(done, self.workload).model_copy(update={"gpus": plan.gpus})

    def _as_measured(self, workload: Workload, cluster: Cluster) -> PlanTask:
        """Return the task with what batches really take, of models that may lie on the cluster."""
        slowed, profiles = workload, self._task.profiles
        if self._slowdowns:
            slowed, profiles = _slowed(workload, profiles, cluster, self._slowdowns)
        if not cluster.elastic:
            slowed = bearable(slowed, cluster.gpus)
        return PlanTask(self._task.policy, slowed, cluster, profiles)

    def _as_profiled(self, plan: Plan, workload: Workload) -> Plan:
        """Return a plan of `_as_measured` with the latencies of the profiles, for the whole workload. Slowdowns apply
        to old and new plans alike; with them in its latencies a plan would count them twice."""
        if not self._slowdowns:
            return with_the_rest(plan, workload)
        gpulets = []
        for gpulet in plan.gpulets:
            models = []
            for replica in gpulet.models:
                factor = 1.0 / self._slowdowns.get(replica.name, 1.0)
                latency = replica.latency.scaled(factor) if replica.latency is not None else None
                whole_ms = replica.latency_ms * factor if replica.latency_ms is not None else None
                models.append(replica.model_copy(update={"latency": latency, "latency_ms": whole_ms}))
            gpulets.append(gpulet.model_copy(update={"models": tuple(models)}))
        return with_the_rest(plan.model_copy(update={"gpulets": tuple(gpulets)}), workload)


def gpus_used(plan: Plan) -> Counter[str]:
    """Return how many GPUs of each type hold something."""
    type_of = {gpu.device: gpu.whole_type if gpu.mig == "managed" else gpu.type for gpu in plan.gpus}
    return Counter(type_of[device] for device in plan.devices(plan.used_gpus))


def _weights(workload: Workload) -> dict[str, float]:
    return {spec.name: spec.weight for spec in workload.models}


def _in_the_way(
    held: Iterable[Gpulet], gpulet: Gpulet, gpu: Gpu, stays: Collection[str], worth: Mapping[str, float]
) -> list[str]:
    """Return the least valuable of a GPU's gpu-lets, so many that a new one fits beside the others."""
    left, gone = sorted(held, key=lambda g: (g.id in stays, worth[g.id]), reverse=True), list[str]()
    while left and left[-1].id not in stays and not fits([*left, gpulet], gpu):
        gone.append(left.pop().id)
    return gone


def _pooled_rps(plan: Plan, traffic: Traffic) -> dict[str, float]:
    """Return the rate each model needs on its gpu-lets. Independent bursts of models that share them partly cancel: of
    each burst remains sqrt(sum (c u)^2) / sum (c u), with u the bursts and c the cost of a request."""
    burst, rates = traffic.burst_rps, traffic.upper_rps
    cost = {r.name: (r.latency_ms or 0.0) / r.batch_size for gpulet in plan.gpulets for r in gpulet.models}
    for together in connected_components([r.name for r in gpulet.models] for gpulet in plan.gpulets):
        weighted = [cost[name] * burst.get(name, 0.0) for name in sorted(together)]
        left = math.hypot(*weighted) / sum(weighted) if sum(weighted) > 0.0 else 1.0
        rates |= {name: traffic.mean_rps[name] + left * burst[name] for name in together & burst.keys()}
    return rates


def _independent_parts(plan: Plan) -> Iterator[Plan]:
    """Yield the parts of a plan that share neither models nor GPUs; they can be judged one by one."""
    together = connected_components(map(members_of, plan.gpulets))
    part_of = {member: index for index, each in enumerate(together) for member in each}
    gpulets: dict[int, list[Gpulet]] = defaultdict(list)
    for gpulet in plan.gpulets:
        gpulets[part_of[members_of(gpulet)[0]]].append(gpulet)
    for index, own in gpulets.items():
        models = tuple(spec for spec in plan.models if spec.name in together[index])
        yield plan.model_copy(update={"gpulets": tuple(own), "models": models})


def _slowed(
    workload: Workload, profiles: Profiles, cluster: Cluster, slowdowns: Mapping[str, float]
) -> tuple[Workload, Profiles]:
    """Return the workload with profile rows of its own for models slower or faster than profiled, and these rows."""
    specs = []
    rows: dict[str, dict[str, ModelProfile]] = {kind: {} for kind in cluster.gpu_types}
    for spec in workload.models:
        factor = slowdowns.get(spec.name)
        if factor is None:
            specs.append(spec)
            continue
        if spec.latency is not None:
            specs.append(spec.model_copy(update={"latency": spec.latency.scaled(factor)}))
            continue
        row = f"{spec.name} x {factor:g}"
        for kind in cluster.gpu_types:
            measured = profiles.for_type(kind).get(spec.profile_row)
            if measured is not None:
                rows[kind][row] = measured.scaled(factor)
        specs.append(spec.model_copy(update={"profile": row}))
    slowed = [
        Profile(name="measured while serving", gpu_type=kind, source="this cluster", models=models)
        for kind, models in rows.items()
        if models
    ]
    return workload.model_copy(update={"models": tuple(specs)}), Profiles([*slowed, *profiles])
