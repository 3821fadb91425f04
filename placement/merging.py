"""Group the models of a finished plan that shall run as one merged program (USHER §3.4), as the workload asks.

Policies know nothing of merging. They place models one by one, and this module adds a group when all its members lie
on one GPU. When members have gpu-lets of their own there, these are joined into one context with the sum of their
shares (USHER, section 4). The plan's notes say which groups were not merged, and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from tenuto.errors import InvalidInputError
from tenuto.placement.costs import latency_up_to, memory_of
from tenuto.placement.merged_groups import why_apart, why_unmergeable
from tenuto.placement.plan import Plan
from tenuto.placement.program import MOST_MERGED, Gpulet, MergedGroup, Program, Replica, program_name
from tenuto.placement.workload import Workload
from tenuto.profiles import Profiles
from tenuto.profiles.networks.catalogue import lookup
from tenuto.profiles.share_latency import ShareRule, latency_on_share

_KNOWN: tuple[ShareRule, ...] = ("measured", "continued", "utilisation")  # a sum of shares is rarely measured itself


def apply_merging(
    plan: Plan, workload: Workload, profiles: Profiles, completed: Callable[[Plan], Plan] = lambda plan: plan
) -> Plan:
    """Return the plan with the groups the workload asks for, and notes on each group that was left out and why.

    - Groups that the workload names are merged wherever they can be.
    - `all` merges models of one network that lie on the same GPUs, in groups of up to four. As in USHER, it does not
      ask whether that pays.
    - `auto` merges models whose merged program was measured (`tenuto merge … -o`) and carries more requests per second
      than its members by themselves. Members in one gpu-let run full batches in turn; members in several gpu-lets run
      them side by side on their shares.

    A group is left out when some GPU holds only a part of it, or when not even one request would be in time.

    Args:
        plan: completed.
        workload: what is asked for.
        profiles: what models and merged programs cost.
        completed: gives a plan with gpu-lets joined the latencies on their shares.
    """
    if workload.merge == "off" or not plan.gpulets:
        return plan
    maker = _Maker(plan, workload, profiles, completed)
    if workload.merge == "auto":
        groups = maker.measured_groups()
    elif workload.merge == "all":
        groups = maker.groups_of_one_network()
    else:
        groups = [tuple(sorted(group)) for group in workload.merge]
    for models in groups:
        maker.merge(models, must_pay=workload.merge == "auto")
    if workload.merge == "auto":
        maker.note_unmeasured()
    return maker.result()


class _Maker:
    """Adds groups one after the other. Invariant: a model is in at most one of them."""

    def __init__(self, plan: Plan, workload: Workload, profiles: Profiles, completed: Callable[[Plan], Plan]) -> None:
        self.plan = plan
        self.workload = workload
        self.profiles = profiles
        self.completed = completed
        self.types = {gpu.id: gpu.type for gpu in plan.gpus}
        self.gpulets = list(plan.gpulets)
        self.notes: list[str] = []
        self.taken = {name for gpulet in plan.gpulets for group in gpulet.merge for name in group.models}

    def result(self) -> Plan:
        notes = (*self.plan.notes, *self.notes)
        return self.plan.model_copy(update={"gpulets": tuple(self.gpulets), "notes": notes})

    def merge(self, models: tuple[str, ...], *, must_pay: bool) -> None:
        """Merge models on all their GPUs, or note why not."""
        name = program_name(models)
        if self.taken & set(models):
            taken = ", ".join(sorted(self.taken & set(models)))
            self.notes.append(f"{name} is not merged: {taken} is in another group")
            return
        reason = why_unmergeable(map(self.workload.__getitem__, models))
        gpulets = self.gpulets
        if reason is None:
            reason = why_apart(gpulets, models)
            joined = self._joined(models) if reason is not None else None
            if joined is not None:
                gpulets, reason = joined, None
        made: dict[int, Program] = {}
        if reason is None:
            alike: list[tuple[object, Program]] = []  # thousands of gpu-lets are often of a few kinds
            for index, gpulet in enumerate(gpulets):
                members = [r for r in gpulet.models if r.name in models]
                if members:
                    costs = [(r.name, r.batch_size, r.latency, r.slowdown) for r in members]
                    kind = (self.types[gpulet.gpu], gpulet.effective_share_pct, costs)
                    program = next((known for other, known in alike if other == kind), None)
                    if program is None:
                        program = self._program(gpulet, models)
                        alike.append((kind, program))
                    made[index] = program
            reason = self._too_slow(made, models)
        side_by_side = gpulets is not self.gpulets
        if reason is None and must_pay:
            reason = self._no_gain(made, gpulets, side_by_side)
        if reason is not None:
            self.notes.append(f"{name} is not merged: {reason}")
            return
        self.notes.append(self._described(made, gpulets, side_by_side))
        self.gpulets = gpulets
        for index, program in made.items():
            gpulet = gpulets[index]
            gpulets[index] = gpulet.model_copy(update={"merge": (*gpulet.merge, _as_group(program))})
        self.taken |= set(models)

    def _joined(self, models: tuple[str, ...]) -> list[Gpulet] | None:
        """Return all gpu-lets, with those of the members joined on every GPU that holds all members. None: some GPU
        holds only a part of them, or a member twice."""
        gpulets = []
        for mine in self.plan.model_copy(update={"gpulets": tuple(self.gpulets)}).by_gpu().values():
            lets = [gpulet for gpulet in mine if any(replica.name in models for replica in gpulet.models)]
            held = [replica.name for gpulet in lets for replica in gpulet.models]
            if lets and (not set(models) <= set(held) or len(held) > len(set(held))):
                return None
            gpulets += [_one_of(lets) if g is lets[0] else g for g in mine if g not in lets[1:]] if lets else mine
        return list(self.completed(self.plan.model_copy(update={"gpulets": tuple(gpulets)})).gpulets)

    def _apart_rps(self, models: Sequence[str], merged: Gpulet, *, side_by_side: bool) -> float:
        """Return the requests per second that the members carry by themselves with full batches: in turn in the one
        gpu-let that holds them, or side by side in several gpu-lets of its GPU."""
        before = [g for g in self.gpulets if merged.gpu in g.gpus] if side_by_side else [merged]
        total_rps = 0.0
        for gpulet in before:
            timed = [
                (r.batch_size, r.latency.at(r.batch_size) * r.slowdown)
                for r in gpulet.models
                if r.name in models and r.latency is not None
            ]
            if timed:
                total_rps += 1000.0 * sum(size for size, _ in timed) / sum(ms for _, ms in timed)
        return total_rps

    def _program(self, gpulet: Gpulet, models: tuple[str, ...]) -> Program:
        """Return the merged program with its measured latency on this share, or one modelled from its profile. When it
        was not measured, its latency is the sum of its members'."""
        members = [replica for replica in gpulet.models if replica.name in models]
        budget_ms = min(self.workload[name].slo_ms for name in models) / max(member.slowdown for member in members)
        known = self.profiles.for_type(self.types[gpulet.gpu])
        row = known.get(program_name(models)) or known.get(self._by_rows(models))
        if row is not None and row.points:
            with suppress(InvalidInputError):  # not even modelled at this share
                latency, _ = latency_on_share(row, gpulet.effective_share_pct, _KNOWN)
                made = _within(Program.merged(MergedGroup(models=models, latency=latency), members), budget_ms)
                return replace(made, memory_mib=memory_of(row, made.batch_size))
        return _within(Program.merged(MergedGroup(models=models), members), budget_ms)

    def _by_rows(self, models: Sequence[str]) -> str:
        """Return the group's name by its members' profile rows, as stages and renamed models use rows of others."""
        return program_name([self.workload[name].profile_row for name in models])

    def _too_slow(self, made: dict[int, Program], models: Sequence[str]) -> str | None:
        slo_ms = min(self.workload[name].slo_ms for name in models)
        for program in made.values():
            if program.latency is not None and program.latency.at(1) * program.slowdown > slo_ms:
                takes_ms = program.latency.at(1) * program.slowdown
                return f"one request takes {takes_ms:.4g} ms, above the SLO of {slo_ms:g} ms"
        return None

    def _no_gain(self, made: dict[int, Program], gpulets: Sequence[Gpulet], side_by_side: bool) -> str | None:
        judged: set[object] = set()
        for index, program in made.items():
            key = (id(program), self.types[gpulets[index].gpu])
            if key in judged:
                continue
            judged.add(key)
            if program.basis != "measured":
                share = gpulets[index].effective_share_pct
                return f"its merged program was not measured at a share of {share:g} %"
            together_rps = _together_rps(program)
            apart_rps = self._apart_rps(program.models, gpulets[index], side_by_side=side_by_side)
            if together_rps <= apart_rps:
                how = "side by side" if side_by_side else "in turn"
                return f"it carries {together_rps:.4g} rps at most, its members {how} {apart_rps:.4g} rps"
        return None

    def _described(self, made: dict[int, Program], gpulets: Sequence[Gpulet], side_by_side: bool) -> str:
        first, program = next(iter(made.items()))
        where = ", ".join(gpulets[place].id for place in made)
        if side_by_side:
            share_pct = gpulets[first].effective_share_pct
            where += f", in one context with the sum of their gpu-lets' shares, {share_pct:.4g} %"
        takes_ms = 0.0 if program.latency is None else program.latency.at(program.batch_size)
        if program.basis == "measured":
            how = "side by side" if side_by_side else "in turn"
            apart_rps = self._apart_rps(program.models, gpulets[first], side_by_side=side_by_side)
            cost = (
                f"a joint batch of {program.batch_size} takes {takes_ms:.4g} ms; it carries "
                f"{_together_rps(program):.4g} rps at most, its members {how} {apart_rps:.4g} rps"
            )
        else:
            cost = (
                f"a joint batch of {program.batch_size} is taken to cost what its members cost in turn, {takes_ms:.4g} "
                f"ms; `tenuto merge` measures it with -o"
            )
        return f"{program.name} is merged on {where}: {cost}"

    # --- what `all` and `auto` look for ------------------------------------------------------------------------

    def groups_of_one_network(self) -> list[tuple[str, ...]]:
        """Return the models of one network that lie on the same GPUs, up to four; note those that share some only.

        Which weights they have in common is known only when they are loaded. Models that have none in common are then
        served by themselves.
        """
        hosts: dict[str, list[str]] = {}
        for gpu, gpulets in self.plan.by_gpu().items():
            for replica in (replica for gpulet in gpulets for replica in self._replicas(gpulet)):
                hosts.setdefault(replica.name, []).append(gpu)
        networks: dict[str, dict[tuple[str, ...], list[str]]] = {}
        for name, gpus in hosts.items():
            spec = self.workload[name]
            if name not in self.taken and why_unmergeable([spec]) is None:
                networks.setdefault(_network(spec.network), {}).setdefault(tuple(gpus), []).append(name)
        for alike in networks.values():
            shared = [names for gpus, names in alike.items() if any(set(gpus) & set(o) for o in alike if o != gpus)]
            if shared:
                which = " and ".join(", ".join(names) for names in shared)
                self.notes.append(f"{which} are not merged with each other: they share some GPUs only, and one queue")
        return [
            tuple(sorted(names[first : first + MOST_MERGED]))
            for alike in networks.values()
            for names in alike.values()
            for first in range(0, len(names) - 1, MOST_MERGED)
        ]

    def measured_groups(self) -> list[tuple[str, ...]]:
        """Return the groups with a profile row on the type of a GPU that holds them, the largest first."""
        groups: set[tuple[str, ...]] = set()
        for kind, replicas in self._on_each_gpu():
            names = {replica.name: replica.name for replica in replicas}
            held = {self.workload[name].profile_row: name for name in names} | names
            for row in self.profiles.for_type(kind):
                parts = row.split("+")
                models = {held[part] for part in parts if part in held}
                if len(parts) > 1 and len(models) == len(parts):
                    groups.add(tuple(sorted(models)))
        return sorted(groups, key=lambda models: (-len(models), models))

    def _on_each_gpu(self) -> list[tuple[str, list[Replica]]]:
        """Return type and replicas of every GPU; those of GPUs that hold the same models once."""
        replicas_of: dict[tuple[str, tuple[str, ...]], list[Replica]] = {}
        for gpu, gpulets in self.plan.by_gpu().items():
            replicas = [replica for gpulet in gpulets for replica in self._replicas(gpulet)]
            replicas_of.setdefault((self.types[gpu], tuple(replica.name for replica in replicas)), replicas)
        return [(kind, replicas) for (kind, _), replicas in replicas_of.items()]

    def _replicas(self, gpulet: Gpulet) -> list[Replica]:
        """Return the replicas of models of the workload; others are a fault that `check_plan` reports."""
        names = {spec.name for spec in self.workload.models}
        return [replica for replica in gpulet.models if replica.name in names]

    def note_unmeasured(self) -> None:
        """Note models of one network on one GPU whose merged program was never measured."""
        noted: set[str] = set()
        for kind, replicas in self._on_each_gpu():
            alike: dict[str, list[str]] = {}
            for replica in replicas:
                spec = self.workload[replica.name]
                if replica.name not in self.taken and why_unmergeable([spec]) is None:
                    key = json.dumps([_network(spec.network), spec.options], sort_keys=True, default=str)
                    alike.setdefault(key, []).append(replica.name)
            known = self.profiles.for_type(kind)
            for models in alike.values():
                models = list(dict.fromkeys(models))
                name = program_name(models)
                if len(models) > 1 and not {name, self._by_rows(models)} & known.keys() and name not in noted:
                    noted.add(name)
                    members = " ".join(f"{m}={self.workload[m].network}" for m in sorted(models))
                    self.notes.append(
                        f"{name} could be one program, but was not measured: `tenuto merge {members} -o FILE`, "
                        "and give FILE with --profiles"
                    )


def _within(program: Program, budget_ms: float) -> Program:
    """Return a program with no larger joint batches than a budget allows, at least one request."""
    latency, most = program.latency, program.batch_size
    if latency is None:
        return program
    fitting = max(1, min(most, latency.largest_batch(budget_ms)))
    return replace(program, batch_size=fitting, latency=latency_up_to(latency, fitting))


def _as_group(program: Program) -> MergedGroup:
    memory = program.memory_mib if program.basis == "measured" else None
    return MergedGroup(
        models=program.models,
        batch_size=program.batch_size,
        latency=program.latency,
        memory_mib=memory,
        basis=program.basis,
    )


def _one_of(gpulets: Sequence[Gpulet]) -> Gpulet:
    """Return gpu-lets of one GPU as one process: all their models, the sum of their shares, no rounds."""
    shares = [gpulet.share_pct for gpulet in gpulets]
    total_pct = None if None in shares else min(100.0, round(sum(s for s in shares if s is not None), 6))
    return gpulets[0].model_copy(
        update={
            "share_pct": total_pct,
            "memory_mib": None,
            "duty_cycle_ms": None,
            "models": tuple(replica for gpulet in gpulets for replica in gpulet.models),
            "merge": tuple(group for gpulet in gpulets for group in gpulet.merge),
        }
    )


def _together_rps(program: Program) -> float:
    """Return the requests per second of the best joint batch without a pause, beside the neighbours."""
    latency = program.latency
    if latency is None:
        return 0.0
    return max(1000.0 * size / latency.at(size) for size in range(1, program.batch_size + 1)) / program.slowdown


def _network(source: str) -> str:
    """Return a network's one name."""
    try:
        return lookup(source).source
    except InvalidInputError:
        return source
