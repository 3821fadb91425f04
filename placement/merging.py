"""Group the models of a finished plan that shall run as one merged program (USHER §3.4), as the workload asks.

Policies know nothing of merging: they place models by themselves, and this adds groups where all members came to lie
on one gpu-let. What was not merged, and why, stands in the plan's notes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from tenuto.errors import InvalidInputError
from tenuto.placement.plan import Plan
from tenuto.placement.program import Gpulet, MergedGroup, Program, Replica, program_name
from tenuto.placement.rules import why_apart, why_unmergeable
from tenuto.placement.workload import Workload
from tenuto.profiles import LatencyTable, Profiles
from tenuto.profiles.networks.catalogue import lookup

__all__ = ["apply_merging"]


def apply_merging(plan: Plan, workload: Workload, profiles: Profiles) -> Plan:
    """Return the plan with the groups the workload asks for, and notes on each group that was left out and why.

    Explicit groups are merged wherever they may be; `auto` merges models whose merged program was measured
    (`tenuto merge … -o`) and carries more requests per second there than full batches of its members in turn. A group
    is left out when its members are not together on every gpu-let that holds one, or when not even one request would
    be in time.
    """
    if workload.merge == "off" or not plan.gpulets:
        return plan
    maker = _Maker(plan, workload, profiles)
    groups = maker.measured_groups() if workload.merge == "auto" else [tuple(sorted(g)) for g in workload.merge]
    for models in groups:
        maker.merge(models, must_pay=workload.merge == "auto")
    if workload.merge == "auto":
        maker.note_unmeasured()
    return maker.result()


class _Maker:
    """Adds groups one after the other. Invariant: a model is in at most one of them."""

    def __init__(self, plan: Plan, workload: Workload, profiles: Profiles) -> None:
        self.plan = plan
        self.workload = workload
        self.profiles = profiles
        self.types = {gpu.id: gpu.type for gpu in plan.gpus}
        self.gpulets = list(plan.gpulets)
        self.notes: list[str] = []
        self.taken = {name for gpulet in plan.gpulets for group in gpulet.merge for name in group.models}

    def result(self) -> Plan:
        notes = (*self.plan.notes, *self.notes)
        return self.plan.model_copy(update={"gpulets": tuple(self.gpulets), "notes": notes})

    def merge(self, models: tuple[str, ...], *, must_pay: bool) -> None:
        """Merge models on all their gpu-lets, or note why not."""
        name = program_name(models)
        if self.taken & set(models):
            taken = ", ".join(sorted(self.taken & set(models)))
            self.notes.append(f"{name} is not merged: {taken} is in another group")
            return
        reason = why_unmergeable(map(self.workload.__getitem__, models)) or why_apart(self.gpulets, models)
        made: dict[int, Program] = {}
        if reason is None:
            alike: list[tuple[object, Program]] = []  # thousands of gpu-lets are often of a few kinds
            for index, gpulet in enumerate(self.gpulets):
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
        if reason is None and must_pay:
            reason = self._no_gain(made)
        if reason is not None:
            self.notes.append(f"{name} is not merged: {reason}")
            return
        for index, program in made.items():
            gpulet = self.gpulets[index]
            self.gpulets[index] = gpulet.model_copy(update={"merge": (*gpulet.merge, _as_group(program))})
        self.taken |= set(models)
        self.notes.append(self._described(made))

    def _program(self, gpulet: Gpulet, models: tuple[str, ...]) -> Program:
        """Return the program with what was measured of it at this share, else with the sum of its members."""
        members = [replica for replica in gpulet.models if replica.name in models]
        budget_ms = min(self.workload[name].slo_ms for name in models) / max(member.slowdown for member in members)
        known = self.profiles.for_type(self.types[gpulet.gpu])
        row = known.get(program_name(models)) or known.get(self._by_rows(models))
        if row is not None and row.points:
            with suppress(InvalidInputError):  # not measured at this share
                latency = row.latency(gpulet.effective_share_pct)
                made = _within(Program.merged(MergedGroup(models=models, latency=latency), members), budget_ms)
                return replace(made, memory_mib=row.memory_mib(made.batch_size, gpulet.effective_share_pct))
        return _within(Program.merged(MergedGroup(models=models), members), budget_ms)

    def _by_rows(self, models: Sequence[str]) -> str:
        """Return the group's name by its members' profile rows: stages and renamed models use those of others."""
        return program_name([self.workload[name].profile_row for name in models])

    def _too_slow(self, made: dict[int, Program], models: Sequence[str]) -> str | None:
        slo_ms = min(self.workload[name].slo_ms for name in models)
        for program in made.values():
            if program.latency is not None and program.latency.at(1) * program.slowdown > slo_ms:
                takes_ms = program.latency.at(1) * program.slowdown
                return f"one request takes {takes_ms:.4g} ms, above the SLO of {slo_ms:g} ms"
        return None

    def _no_gain(self, made: dict[int, Program]) -> str | None:
        for index, program in made.items():
            together_rps, apart_rps = _both_ways(program)
            if program.basis != "measured":
                share = self.gpulets[index].effective_share_pct
                return f"its merged program was not measured at a share of {share:g} %"
            if together_rps <= apart_rps:
                return f"it carries {together_rps:.4g} rps at most, its members in turn {apart_rps:.4g} rps"
        return None

    def _described(self, made: dict[int, Program]) -> str:
        program = next(iter(made.values()))
        where = ", ".join(self.gpulets[place].id for place in made)
        together_rps, apart_rps = _both_ways(program)
        takes_ms = 0.0 if program.latency is None else program.latency.at(program.batch_size)
        if program.basis == "measured":
            cost = (
                f"a joint batch of {program.batch_size} takes {takes_ms:.4g} ms; it carries {together_rps:.4g} rps at "
                f"most, its members in turn {apart_rps:.4g} rps"
            )
        else:
            cost = (
                f"a joint batch of {program.batch_size} is taken to cost what its members cost in turn, {takes_ms:.4g} "
                f"ms; `tenuto merge` measures it with -o"
            )
        return f"{program.name} is merged on {where}: {cost}. Expectations are those of the models by themselves"

    # --- what `auto` looks for ----------------------------------------------------------------------------------

    def measured_groups(self) -> list[tuple[str, ...]]:
        """Return the groups with a profile row on the type of a gpu-let that holds them, the largest first."""
        found: set[tuple[str, ...]] = set()
        for gpulet in self.gpulets:
            names = {replica.name: replica.name for replica in self._replicas(gpulet)}
            held = {self.workload[name].profile_row: name for name in names} | names
            for row in self.profiles.for_type(self.types[gpulet.gpu]):
                parts = row.split("+")
                models = {held[part] for part in parts if part in held}
                if len(parts) > 1 and len(models) == len(parts):
                    found.add(tuple(sorted(models)))
        return sorted(found, key=lambda models: (-len(models), models))

    def _replicas(self, gpulet: Gpulet) -> list[Replica]:
        """Return the replicas of models of the workload; others are a fault that `check_plan` reports."""
        names = {spec.name for spec in self.workload.models}
        return [replica for replica in gpulet.models if replica.name in names]

    def note_unmeasured(self) -> None:
        """Note models of one network on one gpu-let whose merged program was never measured."""
        noted: set[str] = set()
        for gpulet in self.gpulets:
            alike: dict[str, list[str]] = {}
            for replica in self._replicas(gpulet):
                spec = self.workload[replica.name]
                if replica.name not in self.taken and why_unmergeable([spec]) is None:
                    key = json.dumps([_network(spec.source or spec.name), spec.options], sort_keys=True, default=str)
                    alike.setdefault(key, []).append(replica.name)
            known = self.profiles.for_type(self.types[gpulet.gpu])
            for models in alike.values():
                name = program_name(models)
                if len(models) > 1 and not {name, self._by_rows(models)} & known.keys() and name not in noted:
                    noted.add(name)
                    asked = " ".join(f"{m}={self.workload[m].source or m}" for m in sorted(models))
                    self.notes.append(
                        f"{name} could be one program, but was not measured: `tenuto merge {asked} -o FILE`, "
                        "and give FILE with --profiles"
                    )


def _within(program: Program, budget_ms: float) -> Program:
    """Return a program with no larger joint batches than a budget allows, at least one request."""
    latency, most = program.latency, program.batch_size
    if latency is None:
        return program
    fitting = max(1, min(most, latency.largest_batch(budget_ms)))
    if isinstance(latency, LatencyTable):
        points = {size: ms for size, ms in latency.points.items() if size < fitting} | {fitting: latency.at(fitting)}
        latency = LatencyTable(points={size: round(ms, 6) for size, ms in points.items()})
    return replace(program, batch_size=fitting, latency=latency)


def _as_group(program: Program) -> MergedGroup:
    memory = program.memory_mib if program.basis == "measured" else None
    return MergedGroup(models=program.models, batch_size=program.batch_size, latency=program.latency,
                       memory_mib=memory, basis=program.basis)  # fmt: skip


def _both_ways(program: Program) -> tuple[float, float]:
    """Return the requests per second of the best joint batch without a pause, and of the members' full batches in
    turn."""
    alone = [(member.batch_size, member.latency) for member in program.members if member.latency is not None]
    taken_ms = sum(latency.at(size) for size, latency in alone)
    apart_rps = 1000.0 * sum(size for size, _ in alone) / taken_ms if alone else 0.0
    latency = program.latency
    if latency is None:
        return 0.0, apart_rps
    return max(1000.0 * size / latency.at(size) for size in range(1, program.batch_size + 1)), apart_rps


def _network(source: str) -> str:
    """Return a network's one name."""
    try:
        return lookup(source).source
    except InvalidInputError:
        return source
