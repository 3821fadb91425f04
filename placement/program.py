"""What a gpu-let runs: replicas of models, and the programs that they form.

A program is one or more models that run as one; a model that runs alone is a program too. In a plan file, replicas
stand under `models`, and `merge` names those that run as one merged program (USHER, section 3.4). Code that schedules,
sends or shows batches uses `Gpulet.programs`, and so treats both kinds alike.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from tenuto.documents import Fault, StrictModel
from tenuto.profiles import Latency, LatencyTable, StepCost
from tenuto.profiles.generation import BLOCK_TOKENS
from tenuto.profiles.latency import LatencyField
from tenuto.profiles.share_latency import ShareRule

Basis = Literal["measured", "sum"]
"""Where the latency of a merged program comes from: it was measured, or it is the sum of its members' latencies."""


class SizedLatency(StrictModel):
    """l(b) of batches that are padded to these sizes, up to the largest batch that will run. `interpolated`: not these
    sizes were measured, but sizes around them."""

    sizes: dict[str, Annotated[int, Field(ge=1)]]
    interpolated: bool = False
    latency: LatencyField


class Replica(StrictModel):
    """One model resident on a gpu-let.

    `batch_size` is the largest batch that will run. `latency` is l(b) on this gpu-let without neighbours. `slowdown` is
    the factor by which neighbours on the GPU are expected to lengthen it (1.0: not at all). `rate_rps` is the part of
    the model's rate that is planned for this replica.
    """

    name: str
    batch_size: Annotated[int, Field(ge=1)]
    rate_rps: Annotated[float, Field(ge=0)] | None = None
    latency_ms: Annotated[float, Field(ge=0)] | None = None  # expected latency of one full batch beside the neighbours
    slowdown: Annotated[float, Field(ge=1)] = 1.0
    memory_mib: Annotated[float, Field(ge=0)] | None = None
    weights_mib: Annotated[float, Field(ge=0)] | None = None  # the part that every batch needs; None: not known
    latency: LatencyField | None = None
    latency_rule: ShareRule = "measured"  # where the latency on the share comes from
    # Of a model whose requests vary in size: l(b) by what batches are padded to. `latency` is the mean over what comes.
    by_size: tuple[SizedLatency, ...] = ()
    pads: bool = True  # whether requests of one size may be padded to a larger one
    # Of a model that generates, in place of `latency`: what its steps cost, and the tokens that it has memory for.
    steps: StepCost | None = None
    kv_tokens: Annotated[int, Field(ge=1)] | None = None
    block_tokens: Annotated[int, Field(ge=1)] = BLOCK_TOKENS
    longest_context: Annotated[int, Field(ge=1)] | None = None
    decided_ahead: bool = False  # the engine decides on a step while the one before it runs
    tried: Annotated[float, Field(gt=0)] = 1.0  # what trials found that it carries, over the closed form of planning
    # Copy times of one request, which are a part of its batch's latency. They are given if streaming hides them.
    copy_in_ms: Annotated[float, Field(ge=0)] | None = None
    copy_out_ms: Annotated[float, Field(ge=0)] | None = None

    @classmethod
    def believed(cls, name: str, batch_size: int, rate_rps: float, latency_ms: float) -> Replica:
        """Return a replica with the rate and the latency that a policy believes in."""
        return cls(name=name, batch_size=batch_size, rate_rps=round(rate_rps, 6), latency_ms=round(latency_ms, 6))

    @property
    def largest_batch(self) -> int:
        """The largest batch that will run of any size of requests."""
        tables = (each.latency for each in self.by_size)
        return max([self.batch_size, *(table.largest for table in tables if isinstance(table, LatencyTable))])

    @property
    def planned_rps(self) -> float:
        """The rate that is planned; 1 where the plan tells none, as all count alike then."""
        return 1.0 if self.rate_rps is None else self.rate_rps


MOST_MERGED = 4  # limit: models of a group, as a program is built for every combination of them


class MergedGroup(StrictModel):
    """Models of one gpu-let that run as one program on a joint batch. In a file, a group may also be a plain list.

    `batch_size` is the largest joint batch, which has the rows of all members. `latency` is l(b) of the merged program
    for a joint batch of b, split over the members in the worst way. Values that are not given follow from the members
    (`Program.merged`). `memory_mib` is the memory of the merged program, with equal weights counted once; when it is
    None, the sum of the members counts.
    """

    models: Annotated[tuple[str, ...], Field(min_length=2, max_length=MOST_MERGED)]
    batch_size: Annotated[int, Field(ge=1)] | None = None
    latency: LatencyField | None = None
    memory_mib: Annotated[float, Field(ge=0)] | None = None
    basis: Basis | None = None

    @field_validator("models", mode="after")
    @classmethod
    def _sorted(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        """Sort the members, so that a group has only one name. It is an error to name a model twice."""
        if len(set(models)) < len(models):
            raise Fault("names a model twice", "name every member once")
        return tuple(sorted(models))

    @property
    def name(self) -> str:
        """The name of the group's program and of its profile row."""
        return program_name(self.models)


@dataclass(frozen=True)
class Program:
    """One or more models that run as one on a gpu-let. A model that runs alone is a program too.

    `batch_size` is the largest batch, with the rows of all members. `latency` is l(b) for such batches without
    neighbours (None: unknown); `slowdown` is the factor by which neighbours lengthen it. `memory_mib` counts equal
    weights once if that was measured. `basis` is None for a single model.
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
        """Return the program of a group. Values that the group does not give follow from its members.

        The largest batch is then the sum of the members' largest batches. The latency is the longest that the members
        take one after the other, over all splits of the batch. The slowdown is the largest of the members.
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
    def is_joint(self) -> bool:
        """Whether the program has several members."""
        return len(self.members) > 1

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The names of the members."""
        return tuple(member.name for member in self.members)

    @property
    def weights_mib(self) -> float | None:
        """The part of the memory that every batch needs; None if it is not known."""
        return None if self.is_joint else self.members[0].weights_mib

    @property
    def latency_ms(self) -> float | None:
        """The latency of a batch of the largest size beside the neighbours; None if it is not known."""
        if self.latency is None:
            return None if self.is_joint else self.members[0].latency_ms
        return self.latency.at(self.batch_size) * self.slowdown

    @property
    def rate_rps(self) -> float | None:
        """The planned rate of all members together; None if a member has none."""
        return _sum(member.rate_rps for member in self.members)


class Gpulet(StrictModel):
    """A share of one GPU, which one process serves; of a model that generates also the same share of several GPUs of
    one node, over which its weights, keys and values are divided (tensor parallelism).

    `also_on` names the GPUs beside `gpu`. Shares and memory are then those on each of them. When `share_pct` is None,
    the share is not restricted. When `duty_cycle_ms` is given, the models take turns in rounds of this length (temporal
    sharing); otherwise the scheduler decides which batch runs next.
    """

    id: str
    gpu: str
    also_on: tuple[str, ...] = ()
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
    def gpus(self) -> tuple[str, ...]:
        """All GPUs that it lies on."""
        return (self.gpu, *self.also_on)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs in the order of the models. A merged program stands in the place of its first member."""
        return self.contents.programs

    @property
    def contents(self) -> _Contents:
        """What it holds; one object for gpu-lets that share the tuples of their models and groups."""
        return _contents_of(_Identity(self.models), _Identity(self.merge))

    @property
    def served(self) -> tuple[object, ...]:
        """All of its models that decides what they serve."""
        return *self.contents.served, self.joint_models

    @property
    def joint_models(self) -> tuple[tuple[str, ...], ...]:
        """The models of each program that has several members."""
        return tuple(group.models for group in self.merge)

    def only(self, names: Container[str]) -> Gpulet | None:
        """Return the gpu-let with those of its models that are among some names, merged where all of a group are; None
        when none is."""
        models = tuple(replica for replica in self.models if replica.name in names)
        merge = tuple(group for group in self.merge if all(name in names for name in group.models))
        return self.model_copy(update={"models": models, "merge": merge}) if models else None

    @property
    def held_mib(self) -> float | None:
        """The memory in MiB that the programs need, without the process's context (see `held_mib`).

        It is None if the memory of a program is not known.
        """
        return self.contents.held_mib

    @property
    def needs_mib(self) -> float:
        """The memory in MiB that it may take: its limit, or else what its programs need, of which one of unknown memory
        counts nothing."""
        return self.contents.known_mib if self.memory_mib is None else self.memory_mib

    @property
    def effective_share_pct(self) -> float:
        """The share as a number: 100 if it is not restricted."""
        return 100.0 if self.share_pct is None else self.share_pct


@dataclass(frozen=True, eq=False)
class _Contents:
    """The models of a gpu-let with what follows from them, each computed once: hundreds of gpu-lets of a plan hold the
    same, and plans beside each other most of them."""

    models: tuple[Replica, ...]
    merge: tuple[MergedGroup, ...]

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """See `Gpulet.programs`."""
        replicas = {replica.name: replica for replica in self.models}
        group_of = {name: group for group in self.merge for name in group.models}
        programs: dict[str, Program] = {}
        for replica in self.models:
            group = group_of.get(replica.name)
            if group is None:
                programs[replica.name] = Program.single(replica)
            elif group.name not in programs:
                programs[group.name] = Program.merged(group, [replicas[name] for name in group.models])
        return tuple(programs.values())

    @cached_property
    def held_mib(self) -> float | None:
        """See `Gpulet.held_mib`."""
        return None if any(program.memory_mib is None for program in self.programs) else self.known_mib

    @cached_property
    def known_mib(self) -> float:
        """See `Gpulet.needs_mib`."""
        return held_mib((p.memory_mib, p.weights_mib) for p in self.programs if p.memory_mib is not None)

    @cached_property
    def served(self) -> tuple[object, ...]:
        """See `Gpulet.served`."""
        return tuple((r.name, r.batch_size, r.slowdown, r.latency_ms, r.kv_tokens) for r in self.models)


class _Identity:
    """A value that equals only itself. It is held, so that its place in memory is nobody else's meanwhile."""

    __slots__ = ("value",)

    def __init__(self, value: tuple[Any, ...]) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


@lru_cache(maxsize=1024)  # limit: tuples of models; the plans of a cell have a few
def _contents_of(models: _Identity, merge: _Identity) -> _Contents:
    return _Contents(models.value, merge.value)


def held_mib(needs: Iterable[tuple[float, float | None]]) -> float:
    """Return the memory in MiB of programs that take turns in one process: all weights, and the largest working memory.

    Args:
        needs: for each program its memory, and the part of it that the weights take. When the part is not known (None),
            the whole memory counts as weights.
    """
    static, working = 0.0, 0.0
    for memory, weights in needs:
        known = memory if weights is None else min(weights, memory)
        static, working = static + known, max(working, memory - known)
    return static + working


def total_mib(gpulets: Iterable[Gpulet]) -> float:
    """Return the memory in MiB that gpu-lets of one GPU may take together."""
    return sum([gpulet.needs_mib for gpulet in gpulets])


def fits_memory(gpulets: Collection[Gpulet], memory_mib: float) -> bool:
    """Return whether a GPU has memory for gpu-lets together. Caps in files are rounded to a thousandth each."""
    return total_mib(gpulets) <= memory_mib + 1e-3 * len(gpulets)


def slowest_ms(gpulets: Iterable[Gpulet]) -> dict[str, float | None]:
    """Return, for each model, the latency of the replica whose batch takes longest; None if none is known."""
    slowest: dict[str, float | None] = {}
    different = {id(gpulet.models): gpulet.models for gpulet in gpulets}.values()
    for replica in (replica for models in different for replica in models):
        known = [ms for ms in (slowest.get(replica.name), replica.latency_ms) if ms is not None]
        slowest[replica.name] = max(known, default=None)
    return slowest


def program_name(models: Iterable[str]) -> str:
    """Return a name such as `a+b`. No model has such a name, as `+` is not allowed there."""
    return "+".join(sorted(models))


def worst_split_ms(members: Sequence[tuple[int, Latency]], largest: int) -> list[float]:
    """Return, for joint batches of 0 to `largest`, the longest that the members take one after the other, over all
    splits of the batch.

    When a member gets more rows than its planned batch, they count as several batches. As a batch usually costs less
    than its parts, this is an upper bound.

    Args:
        members: planned batch size and l(b) of each member.
        largest: the largest joint batch.
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
    """Return the points of a table that define it: all other points lie on lines between these."""
    last = len(steps) - 1
    return {
        size: round(steps[size], 9)
        for size in range(1, last + 1)
        if size in (1, last) or abs(steps[size + 1] - 2 * steps[size] + steps[size - 1]) > 1e-9
    }


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)
