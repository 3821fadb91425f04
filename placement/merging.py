"""Group the models of a finished plan that shall run as one merged program (USHER §3.4), as the workload asks.

Policies know nothing of merging: they place models by themselves, and this adds groups where all members came to lie
on one gpu-let. What was not merged, and why, stands in the plan's notes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tenuto.errors import InvalidInputError
from tenuto.placement.merge_rules import has_source, why_apart
from tenuto.placement.merged_group import MergedGroup, group_name
from tenuto.placement.option_rules import why_unmergeable
from tenuto.placement.plan import Gpulet, Plan, Replica
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
        name = group_name(models)
        if self.taken & set(models):
            taken = ", ".join(sorted(self.taken & set(models)))
            self.notes.append(f"{name} is not merged: {taken} is in another group")
            return
        reason = self._no_source(models) or why_unmergeable(map(self.workload.__getitem__, models))
        reason = reason or why_apart(self.gpulets, models)
        made: dict[int, MergedGroup] = {}
        if reason is None:
            alike: list[tuple[object, MergedGroup]] = []  # thousands of gpu-lets are often of a few kinds
            for index, gpulet in enumerate(self.gpulets):
                members = [r for r in gpulet.models if r.name in models]
                if members:
                    costs = [(r.name, r.batch_size, r.latency, r.slowdown) for r in members]
                    kind = (self.types[gpulet.gpu], gpulet.effective_share_pct, costs)
                    group = next((known for other, known in alike if other == kind), None)
                    if group is None:
                        group = self._group(gpulet, models)
                        alike.append((kind, group))
                    made[index] = group
            reason = self._too_slow(made, models)
        if reason is None and must_pay:
            reason = self._no_gain(made)
        if reason is not None:
            self.notes.append(f"{name} is not merged: {reason}")
            return
        for index, group in made.items():
            gpulet = self.gpulets[index]
            self.gpulets[index] = gpulet.model_copy(update={"merge": (*gpulet.merge, group)})
        self.taken |= set(models)
        self.notes.append(self._described(name, made))

    def _group(self, gpulet: Gpulet, models: tuple[str, ...]) -> MergedGroup:
        """Return a group with what was measured of it at this share, else with the sum of its members."""
        budget_ms = min(self.workload[name].slo_ms for name in models) / self._slowdown(gpulet, models)
        plain = gpulet.model_copy(update={"merge": (MergedGroup(models=models),)})
        known = self.profiles.for_type(self.types[gpulet.gpu])
        row = known.get(group_name(models)) or known.get(self._by_rows(models))
        if row is not None and row.points:
            try:
                latency = row.latency(gpulet.effective_share_pct)
            except InvalidInputError:
                return plain.merged_groups()[0].within(budget_ms)
            size = sum(replica.batch_size for replica in gpulet.models if replica.name in models)
            if isinstance(latency, LatencyTable):
                size = min(size, latency.largest)
                points = {b: ms for b, ms in latency.points.items() if b < size} | {size: latency.at(size)}
                latency = LatencyTable(points={b: round(ms, 6) for b, ms in points.items()})
            made = MergedGroup(models=models, batch_size=size, latency=latency, basis="measured").within(budget_ms)
            memory = row.memory_mib(made.batch_size or 1, gpulet.effective_share_pct)
            return made.model_copy(update={"memory_mib": memory})
        return plain.merged_groups()[0].within(budget_ms)

    def _by_rows(self, models: Sequence[str]) -> str:
        """Return the group's name by its members' profile rows: stages and renamed models use those of others."""
        return group_name([self.workload[name].profile_row for name in models])

    @staticmethod
    def _slowdown(gpulet: Gpulet, models: Sequence[str]) -> float:
        return max(replica.slowdown for replica in gpulet.models if replica.name in models)

    def _no_source(self, models: Sequence[str]) -> str | None:
        without = [name for name in models if not has_source(self.workload[name])]
        return f"{', '.join(without)} has no network to merge; give its `source`" if without else None

    def _too_slow(self, made: dict[int, MergedGroup], models: Sequence[str]) -> str | None:
        slo_ms = min(self.workload[name].slo_ms for name in models)
        for index, group in made.items():
            slowdown = self._slowdown(self.gpulets[index], models)
            if group.latency is not None and group.latency.at(1) * slowdown > slo_ms:
                return f"one request takes {group.latency.at(1) * slowdown:.4g} ms, above the SLO of {slo_ms:g} ms"
        return None

    def _no_gain(self, made: dict[int, MergedGroup]) -> str | None:
        for index, group in made.items():
            together_rps, apart_rps = self._both_ways(index, group)
            if group.basis != "measured":
                share = self.gpulets[index].effective_share_pct
                return f"its merged program was not measured at a share of {share:g} %"
            if together_rps <= apart_rps:
                return f"it carries {together_rps:.4g} rps at most, its members in turn {apart_rps:.4g} rps"
        return None

    def _both_ways(self, index: int, group: MergedGroup) -> tuple[float, float]:
        """Return the requests per second of the best joint batch without a pause, and of full batches in turn."""
        members = [r for r in self.gpulets[index].models if r.name in group.models]
        taken_ms = sum(r.latency.at(r.batch_size) for r in members if r.latency is not None)
        apart_rps = 1000.0 * sum(r.batch_size for r in members if r.latency is not None) / taken_ms if taken_ms else 0.0
        if group.latency is None:
            return 0.0, apart_rps
        sizes = range(1, (group.batch_size or 1) + 1)
        return max(1000.0 * size / group.latency.at(size) for size in sizes), apart_rps

    def _described(self, name: str, made: dict[int, MergedGroup]) -> str:
        index, group = next(iter(made.items()))
        where = ", ".join(self.gpulets[place].id for place in made)
        together_rps, apart_rps = self._both_ways(index, group)
        takes_ms = 0.0 if group.latency is None else group.latency.at(group.batch_size or 1)
        if group.basis == "measured":
            cost = (
                f"a joint batch of {group.batch_size} takes {takes_ms:.4g} ms; it carries {together_rps:.4g} rps at "
                f"most, its members in turn {apart_rps:.4g} rps"
            )
        else:
            cost = (
                f"a joint batch of {group.batch_size} is taken to cost what its members cost in turn, {takes_ms:.4g} "
                f"ms; `tenuto merge` measures it with -o"
            )
        return f"{name} is merged on {where}: {cost}. Expectations are those of the models by themselves"

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
                if replica.name not in self.taken and has_source(spec) and why_unmergeable([spec]) is None:
                    key = json.dumps([_network(spec.source or spec.name), spec.options], sort_keys=True, default=str)
                    alike.setdefault(key, []).append(replica.name)
            known = self.profiles.for_type(self.types[gpulet.gpu])
            for models in alike.values():
                name = group_name(models)
                if len(models) > 1 and not {name, self._by_rows(models)} & known.keys() and name not in noted:
                    noted.add(name)
                    asked = " ".join(f"{m}={self.workload[m].source or m}" for m in sorted(models))
                    self.notes.append(
                        f"{name} could be one program, but was not measured: `tenuto merge {asked} -o FILE`, "
                        "and give FILE with --profiles"
                    )


def _network(source: str) -> str:
    """Return a network's one name."""
    try:
        return lookup(source).source
    except InvalidInputError:
        return source
