"""What a gpu-let runs: replicas of models, and the programs they form.

A program is one or more models that run as one; a lone model is a program of one. In a plan file replicas stand under
`models`, and those that run as one merged program (USHER, section 3.4) are named under `merge`; everything that
schedules, sends or shows batches asks `Gpulet.programs` and never which of the two it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from tenuto.documents import Fault, StrictModel
from tenuto.profiles import Latency, LatencyTable
from tenuto.profiles.latency import LatencyField
from tenuto.profiles.share_latency import ShareRule

Basis = Literal["measured", "sum"]
"""Where the latency of a merged program comes from: it was measured, or its members' are added up."""


class Replica(StrictModel):
    """One model resident on a gpu-let.

    `batch_size` is the largest batch that will be run. `latency` is l(b) on this gpu-let alone; `slowdown` what its
    neighbours on the GPU are expected to cost on top (1.0: nothing). `rate_rps` is the part of the model's load
    planned here.
    """

    name: str
    batch_size: Annotated[int, Field(ge=1)]
    rate_rps: float | None = None
    latency_ms: float | None = None  # expected for one full batch, neighbours included
    slowdown: Annotated[float, Field(ge=1)] = 1.0
    memory_mib: float | None = None
    weights_mib: float | None = None  # the part of memory_mib that every batch needs; None: not known apart
    latency: LatencyField | None = None
    latency_rule: ShareRule = "measured"  # where the latency on the share comes from
    # Of one request, part of its batch's latency; filled in where streaming hides them.
    copy_in_ms: Annotated[float, Field(ge=0)] | None = None
    copy_out_ms: Annotated[float, Field(ge=0)] | None = None


MOST_MERGED = 4  # limit: models of a group; a program is built for every combination of them


class MergedGroup(StrictModel):
    """Models of one gpu-let that run as one program on the joint batch of all; in a file also written as a plain list.

    `batch_size` is the largest joint batch, the members' rows together; `latency` is l(b) of the merged program by
    joint batch and its worst split over the members. What is not given follows from the members (`Program.merged`).
    `memory_mib` is what the merged program needs, equal weights counted once; None: not known, so that the members'
    sum is counted.
    """

    models: Annotated[tuple[str, ...], Field(min_length=2, max_length=MOST_MERGED)]
    batch_size: Annotated[int, Field(ge=1)] | None = None
    latency: LatencyField | None = None
    memory_mib: Annotated[float, Field(ge=0)] | None = None
    basis: Basis | None = None

    @field_validator("models", mode="after")
    @classmethod
    def _sorted(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        """Sort them, so that one group has one name; a name twice is an error."""
        if len(set(models)) < len(models):
            raise Fault("names a model twice", "name every member once")
        return tuple(sorted(models))

    @property
    def name(self) -> str:
        """The name of its program and of its profile row."""
        return program_name(self.models)


@dataclass(frozen=True)
class Program:
    """One or more models that run as one on a gpu-let; a lone model is a program of one.

    `batch_size` is the largest batch, the rows of all members together; `latency` is l(b) by such a batch alone on the
    gpu-let (None: unknown), `slowdown` what the neighbours cost on top. `memory_mib` counts equal weights once where
    that was measured. `basis` None: a single model.
    """

    name: str
    members: tuple[Replica, ...]
    batch_size: int
    latency: Latency | None = None
    slowdown: float = 1.0
    memory_mib: float | None = None
    basis: Basis | None = None

    @classmethod
    def single(cls, replica: Replica) -> Program:
        """Return the program of a model that runs by itself."""
        return cls(replica.name, (replica,), replica.batch_size, replica.latency, replica.slowdown, replica.memory_mib)

    @classmethod
    def merged(cls, group: MergedGroup, members: Sequence[Replica]) -> Program:
        """Return the program of a group; what the group does not say comes from its members.

        The largest batch is then the sum of theirs, the latency the most they take one after the other for any split,
        the slowdown the largest of theirs.
        """
        largest = group.batch_size or sum(member.batch_size for member in members)
        latency: Latency | None = group.latency
        basis: Basis | None = group.basis or ("sum" if latency is None else "measured")
        if latency is None:
            known = [(member.batch_size, member.latency) for member in members if member.latency is not None]
            if len(known) == len(members):
                latency = LatencyTable(points=_corners(worst_split_ms(known, largest)))
        elif isinstance(latency, LatencyTable):
            largest = min(largest, latency.largest)
        memory = group.memory_mib if group.memory_mib is not None else _sum(m.memory_mib for m in members)
        slowdown = max(member.slowdown for member in members)
        return cls(group.name, tuple(members), largest, latency, slowdown, memory, basis)

    @property
    def is_merged(self) -> bool:
        """Whether it runs several models at once."""
        return len(self.members) > 1

    @property
    def models(self) -> tuple[str, ...]:
        """The names of its members."""
        return tuple(member.name for member in self.members)

    @property
    def weights_mib(self) -> float | None:
        """The part of its memory that every batch needs; None where it is not known apart."""
        return None if self.is_merged else self.members[0].weights_mib

    @property
    def latency_ms(self) -> float | None:
        """What a batch of the largest size takes, neighbours included; None where unknown."""
        if self.latency is None:
            return None if self.is_merged else self.members[0].latency_ms
        return self.latency.at(self.batch_size) * self.slowdown

    @property
    def rate_rps(self) -> float | None:
        """The load planned here, of all members together; None where one has none."""
        return _sum(member.rate_rps for member in self.members)


class Gpulet(StrictModel):
    """A share of one GPU served by one process.

    `share_pct` None: unrestricted. `duty_cycle_ms`: the models take turns in rounds of this length (temporal sharing);
    None: whichever batch is due runs.
    """

    id: str
    gpu: str
    share_pct: Annotated[float, Field(gt=0, le=100)] | None = None
    memory_mib: Annotated[float, Field(gt=0)] | None = None  # cap of the process; None: no cap
    duty_cycle_ms: Annotated[float, Field(gt=0)] | None = None
    models: tuple[Replica, ...]
    merge: tuple[MergedGroup, ...] = ()  # models that run as one program

    @field_validator("merge", mode="before")
    @classmethod
    def _plain_groups(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [{"models": group} if isinstance(group, list | tuple) else group for group in value]

    @property
    def programs(self) -> tuple[Program, ...]:
        """Its programs in the order of its models; a merged one stands where the first of its members does."""
        replicas = {replica.name: replica for replica in self.models}
        group_of = {name: group for group in self.merge for name in group.models}
        found: dict[str, Program] = {}
        for replica in self.models:
            group = group_of.get(replica.name)
            if group is None:
                found[replica.name] = Program.single(replica)
            elif group.name not in found:
                found[group.name] = Program.merged(group, [replicas[name] for name in group.models])
        return tuple(found.values())

    @property
    def held_mib(self) -> float | None:
        """What its programs need in MiB, without the context of its process, see `held_mib`; None where the memory of a
        program is not known."""
        known = [(p.memory_mib, p.weights_mib) for p in self.programs if p.memory_mib is not None]
        return held_mib(known) if len(known) == len(self.programs) else None

    @property
    def effective_share_pct(self) -> float:
        """The share as a number: 100 where unrestricted."""
        return 100.0 if self.share_pct is None else self.share_pct


def held_mib(needs: Iterable[tuple[float, float | None]]) -> float:
    """Return what programs that take turns in one process need in MiB: their weights, and the working memory of the
    largest.

    Args:
        needs: of each program its memory and its weights, which the memory includes. Weights that are not known apart
            (None) count with all of their program's memory.
    """
    static, working = 0.0, 0.0
    for memory, weights in needs:
        known = memory if weights is None else min(weights, memory)
        static, working = static + known, max(working, memory - known)
    return static + working


def slowest_ms(gpulets: Iterable[Gpulet]) -> dict[str, float | None]:
    """Return, by model, the latency of the replica whose batch takes longest; None where none is known."""
    found: dict[str, float | None] = {}
    for replica in (replica for gpulet in gpulets for replica in gpulet.models):
        known = [ms for ms in (found.get(replica.name), replica.latency_ms) if ms is not None]
        found[replica.name] = max(known, default=None)
    return found


def program_name(models: Iterable[str]) -> str:
    """Return `a+b`; no model is called so, as `+` is not allowed in their names."""
    return "+".join(sorted(models))


def worst_split_ms(members: Sequence[tuple[int, Latency]], largest: int) -> list[float]:
    """Return, by joint batch size from 0 to `largest`, the most that members take one after the other for any split.

    More rows of a member than it was planned for count as several batches: an upper bound wherever a batch costs less
    than its parts.

    Args:
        members: planned batch size and l(b) of each.
        largest: joint batch.
    """
    worst = np.zeros(largest + 1)
    for planned, latency in members:
        alone = [0.0]
        for rows in range(1, largest + 1):
            whole, rest = divmod(rows, planned)
            alone.append(whole * latency.at(planned) + (latency.at(rest) if rest else 0.0))
        own = np.array(alone)
        worst = np.array([(worst[rows::-1] + own[: rows + 1]).max() for rows in range(largest + 1)])
    return [float(ms) for ms in np.maximum.accumulate(worst)]


def _corners(steps: Sequence[float]) -> dict[int, float]:
    """Return the points of a table of which the others are the lines between."""
    last = len(steps) - 1
    return {
        size: round(steps[size], 9)
        for size in range(1, last + 1)
        if size in (1, last) or abs(steps[size + 1] - 2 * steps[size] + steps[size - 1]) > 1e-9
    }


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)
