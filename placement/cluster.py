"""The cluster a plan is made for: nodes, their GPUs, and the MIG instances into which these are cut."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Literal, Protocol

from pydantic import Field, PrivateAttr, model_validator

from tenuto.documents import SCHEMA, Fault, SchemaVersion, StrictModel, dump_yaml, parse_document
from tenuto.errors import one_of, refused
from tenuto.profiles.gpu_types import GPU_TYPES, is_fast_type, memory_mib_of
from tenuto.profiles.mig_instances import ALL_GPCS, instance_profiles, instance_type_of, mig_types, type_of_instance

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # format: of a node or a rack


def node_of(gpu_id: str) -> str:
    """Return the node of a GPU, which stands before the last `/` of its id."""
    return gpu_id.rpartition("/")[0]


MigUse = Literal["fixed", "managed"]
"""What may be done to the MIG layout of a GPU: nothing, or plans may cut it into other instances."""


class InstancePlace(StrictModel):
    """Where a MIG instance lies: on which GPU, and how many of its memory slices it takes from which on. `gpu_uuid` is
    that of the GPU; None: a logical one, or not known."""

    gpu: str
    start: Annotated[int, Field(ge=0)]
    slices: Annotated[int, Field(ge=1)]
    gpu_uuid: str | None = None

    def overlaps(self, other: InstancePlace) -> bool:
        """Return whether both are of one GPU and take a memory slice of it that is the same."""
        apart = self.start + self.slices <= other.start or other.start + other.slices <= self.start
        return self.gpu == other.gpu and not apart


class Gpu(StrictModel):
    """One GPU of the cluster, or one MIG instance, which is a GPU to everything that lies in it: it has a type (such as
    a100-3g.20gb), memory, compute and a UUID of its own, and no neighbours but those inside.

    `uuid` is None for a logical GPU that is not bound to hardware; `address` is the IP of its node in the Ray cluster,
    `label` a label that only this node has, where one of them is known; `rack` where its node stands. `instance` says
    where a MIG instance lies; None: a whole GPU, or an instance of which that is not known. `mig`: what may be done to
    the layout of the GPU; None: it is not to be cut.
    """

    id: str
    type: str
    uuid: str | None = None
    address: str | None = None
    label: str | None = None
    rack: str | None = None
    mig: MigUse | None = None
    instance: InstancePlace | None = None
    memory_mib: float
    price_per_hour: float | None = None  # of an instance its GPCs' part of the GPU's

    @property
    def device(self) -> str:
        """The id of the physical GPU: its own, or that of the GPU it is an instance of."""
        return self.id if self.instance is None else self.instance.gpu

    def cut(self, profile: str, start: int) -> Gpu:
        """Return an instance of this GPU; KeyError where its type has no such profile."""
        size = instance_profiles(self.type)[profile]
        kind = type_of_instance(self.type, profile)
        price = None if self.price_per_hour is None else self.price_per_hour * size.gpcs / ALL_GPCS
        place = InstancePlace(gpu=self.id, start=start, slices=size.slices, gpu_uuid=self.uuid)
        memory_mib = memory_mib_of(kind) or 0.0
        update = {"id": instance_id(self.id, start), "type": kind, "uuid": None, "instance": place}
        return self.model_copy(update=update | {"memory_mib": memory_mib, "price_per_hour": price})


class Placed(Protocol):
    """What lies somewhere: a GPU, or an instance of one, of a cluster or of a plan."""

    @property
    def id(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def instance(self) -> InstancePlace | None: ...


def excludes(one: Placed, other: Placed) -> bool:
    """Return whether a GPU's layout cannot have both: they are of one physical GPU, are not the same, and one of them
    is all of it, or both take a memory slice that is the same."""
    if one.device != other.device or (one.id, one.type) == (other.id, other.type):
        return False
    return one.instance is None or other.instance is None or one.instance.overlaps(other.instance)


def instance_id(gpu_id: str, start: int) -> str:
    """Return the id of the MIG instance of a GPU that begins at a memory slice: `n0/3.4`."""
    return f"{gpu_id}.{start}"


class GroupInstance(StrictModel):
    """A MIG instance of every GPU of a group: its profile, such as 3g.40gb, the memory slice where it begins, and of a
    single GPU its UUID."""

    profile: str
    start: Annotated[int, Field(ge=0)]
    uuid: str | None = None


class GpuGroup(StrictModel):
    """`count` GPUs of one type on a node. Memory and price default to what is known of the type. With `mig` they are
    cut into `instances`, all alike: as they are to stay (`fixed`), or as they are now (`managed`)."""

    type: str
    count: Annotated[int, Field(ge=1, le=100_000)] = 1
    uuids: tuple[str, ...] | None = None
    memory_mib: Annotated[float, Field(gt=0)] | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    mig: MigUse | None = None
    instances: tuple[GroupInstance, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> GpuGroup:
        if self.memory_mib is None and memory_mib_of(self.type) is None:
            raise Fault(
                f"unknown GPU type '{self.type}'",
                f"{one_of(self.type, GPU_TYPES)} A MIG device is written a100-3g.20gb; for another type give its "
                "memory_mib in the cluster file.",
            )
        if self.uuids is not None and len(self.uuids) != self.count:
            raise Fault(f"{len(self.uuids)} uuids for {self.count} GPUs", "Give one UUID per GPU.")
        return self

    @model_validator(mode="after")
    def _check_layout(self) -> GpuGroup:
        if self.mig is None and not self.instances:
            return self
        profiles = instance_profiles(self.type)
        if self.mig is None:
            raise Fault("`instances` without `mig`", "Give mig: fixed, or mig: managed if plans may cut these GPUs.")
        if not profiles:
            known = f"Types with MIG: {', '.join(mig_types())}."
            raise Fault(f"GPU type '{self.type}' has no MIG", f"Leave `mig` and `instances` away. {known}")
        if self.mig == "fixed" and not self.instances:
            raise Fault("mig: fixed without `instances`", "Give the instances, or leave `mig` away.")
        if self.count > 1 and any(instance.uuid is not None for instance in self.instances):
            raise Fault(f"UUIDs of instances of {self.count} GPUs", "Write one group per GPU.")
        for instance in self.instances:
            if instance.profile not in profiles:
                rule = f"no MIG profile '{instance.profile}' on GPU type '{self.type}'"
                raise Fault(rule, one_of(instance.profile, profiles))
            # What the driver made is right, whatever the table says.
            starts = profiles[instance.profile].starts
            if instance.start not in starts and not (self.uuids or instance.uuid):
                allowed = ", ".join(map(str, starts))
                rule = f"a {instance.profile} cannot begin at memory slice {instance.start} of GPU type '{self.type}'"
                raise Fault(rule, f"It begins at {allowed}.")
        overlap = first_overlap([(i.profile, i.start, profiles[i.profile].slices) for i in self.instances])
        if overlap is not None:
            raise Fault(f"{overlap} take the same memory slices", "Begin one of them elsewhere, or leave it away.")
        return self


def first_overlap(placed: Sequence[tuple[str, int, int]]) -> str | None:
    """Return in words the first two of instances of one GPU that take the same memory slice; None where none do.

    Args:
        placed: name, first memory slice and number of slices of each.
    """
    for place, (name, start, slices) in enumerate(placed):
        for other, begins, takes in placed[:place]:
            if start < begins + takes and begins < start + slices:
                return f"{other} at {begins} and {name} at {start}"
    return None


class Node(StrictModel):
    """One machine. `address` is the node's IP in the Ray cluster, or `label` a label `key=value` that only this node
    has there, where gpu-lets must be kept on this node; a label outlives a pod that comes back with another IP.
    Nodes of one `rack`, or of one zone or power line, may be lost together."""

    name: Annotated[str, Field(pattern=NAME)]
    gpus: tuple[GpuGroup, ...]
    address: str | None = None
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*=[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    rack: Annotated[str, Field(pattern=NAME)] | None = None

    @model_validator(mode="after")
    def _found_one_way(self) -> Node:
        if self.address is not None and self.label is not None:
            raise Fault(f"node {self.name} has an address and a label", "Give one of them.")
        return self


class Cluster(StrictModel):
    """Nodes with GPUs; `elastic` lets a policy use as many GPUs of these types as it needs, and cost counts.

    `left_out` names GPUs, as `node/index`, that plans do not use.
    """

    schema_version: SchemaVersion = SCHEMA
    nodes: tuple[Node, ...] = ()
    elastic: bool = False
    left_out: tuple[str, ...] | None = None
    _given: tuple[Gpu, ...] = PrivateAttr(())

    @classmethod
    def of(cls, gpus: Iterable[Gpu]) -> Cluster:
        """Return the fixed cluster of these very GPUs, as what is left of another one."""
        found = cls()
        found._given = tuple(gpus)
        return found

    @model_validator(mode="after")
    def _unique_nodes(self) -> Cluster:
        names = [node.name for node in self.nodes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise Fault(f"node names used twice: {', '.join(twice)}", "Rename them.")
        unknown = {*(self.left_out or ())} - {
            name for gpu in _gpus_of(self.nodes, None) for name in (gpu.id, gpu.device)
        }
        if unknown:
            raise Fault(f"no GPUs to be left out: {', '.join(sorted(unknown))}", "Write NODE/INDEX, such as n0/3.")
        return self

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU, in file order, with ids `node/index`; in place of one that is cut its MIG instances, with ids
        `node/index.start`."""
        if self._given:
            return tuple(gpu for gpu in self._given if {gpu.id, gpu.device}.isdisjoint(self.left_out or ()))
        return _gpus_of(self.nodes, self.left_out)

    @property
    def uncut(self) -> Cluster:
        """This cluster for policies that choose MIG layouts: every GPU that plans may cut (`mig: managed`) is whole."""
        if not any(gpu.mig == "managed" and gpu.instance is not None for gpu in self.gpus):
            return self
        given = {gpu.device: whole_of(gpu) if gpu.mig == "managed" else gpu for gpu in self.gpus}
        found = self.model_copy()
        found._given = tuple(given.values())
        return found

    def cut_as(self, places: Iterable[tuple[str, str, InstancePlace | None]]) -> Cluster:
        """Return this cluster as a plan cuts it: with the plan's places (id, type, and where it is an instance) for
        those of GPUs that plans may cut, GPUs that were bought among them."""
        wanted = list(places)
        there = {(gpu.id, gpu.type): gpu for gpu in self.gpus}
        if all(place is None or (name, kind) in there for name, kind, place in wanted):
            return self
        whole = {gpu.id: gpu for gpu in self.uncut.gpus if gpu.mig == "managed"}
        by_type = {gpu.type: gpu for gpu in reversed(whole.values())}
        made: dict[str, list[Gpu]] = {}
        for name, kind, place in wanted:
            if place is not None and (name, kind) not in there and (mig := instance_type_of(kind)) is not None:
                gpu = whole.get(place.gpu) or by_type.get(mig.base)
                if gpu is not None and mig.profile in instance_profiles(mig.base):
                    device = gpu.model_copy(update={"id": place.gpu, "uuid": place.gpu_uuid})
                    made.setdefault(place.gpu, []).append(device.cut(mig.profile, place.start))
        given: dict[str, list[Gpu]] = {}
        stays = {place[:2] for place in wanted}
        for gpu in self.gpus:
            kept = given.setdefault(gpu.device, [])
            if gpu.device not in made or (gpu.id, gpu.type) in stays:
                kept.append(gpu)
        for name, gpus in made.items():
            given.setdefault(name, []).extend(gpus)
        found = self.model_copy()
        found._given = tuple(gpu for there in given.values() for gpu in there)
        return found

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The GPU types present, in file order."""
        return tuple(dict.fromkeys(gpu.type for gpu in self.gpus))

    @property
    def streams(self) -> bool:
        """Whether gpu-lets stream where a workload does not say: all GPUs are real ones (bound by UUID) of compute
        capability 8.0 or later. Logical GPUs do not: what they emulate knows no copies."""
        gpus = self.gpus
        return bool(gpus) and all(gpu.uuid is not None and is_fast_type(gpu.type) for gpu in gpus)

    @property
    def one_of_each(self) -> dict[str, Gpu]:
        """The first GPU of every type, for its memory and price, by type in file order."""
        found: dict[str, Gpu] = {}
        for gpu in self.gpus:
            found.setdefault(gpu.type, gpu)
        return found

    @property
    def counts(self) -> dict[str, int]:
        """How many GPUs there are of every type, in file order."""
        return dict(Counter(gpu.type for gpu in self.gpus))

    @property
    def prices(self) -> dict[str, float]:
        """What an hour of a GPU of every type costs, in file order; one unit each where any price is unknown."""
        prices = {kind: gpu.price_per_hour for kind, gpu in self.one_of_each.items()}
        known = {kind: price for kind, price in prices.items() if price is not None}
        return known if len(known) == len(prices) else dict.fromkeys(prices, 1.0)

    def dump(self) -> str:
        """Render as YAML; `Cluster.load` of the text gives an equal cluster."""
        return dump_yaml(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    @classmethod
    def parse(cls, text: str, *, elastic: bool = False) -> Cluster:
        """Build a one-node cluster from the short form `v100:4`, or `v100:2,t4:2` for several types; `a100:4:mig` are
        GPUs that plans may cut into MIG instances.

        Raises:
            InvalidInputError: not of that form, or an unknown type.
        """
        groups: list[dict[str, object]] = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*([A-Za-z0-9_.+-]+)(?::(\d+))?(:mig)?\s*", part)
            if match is None or match.group(2) == "0":
                raise refused(
                    "--gpus",
                    text,
                    "must be TYPE:COUNT[,TYPE:COUNT…] with counts of at least 1",
                    "Write for example --gpus v100:4, or a100-80gb:4:mig for GPUs that plans may cut.",
                )
            group = {"type": match.group(1), "count": int(match.group(2) or 1)}
            groups.append(group | ({"mig": "managed"} if match.group(3) else {}))
        data = {"nodes": [{"name": "n0", "gpus": groups}], "elastic": elastic}
        return parse_document(cls, data, origin="--gpus")


@lru_cache(maxsize=16)
def _gpus_of(nodes: tuple[Node, ...], left_out: tuple[str, ...] | None) -> tuple[Gpu, ...]:
    found = []
    for node in nodes:
        index = 0
        for group in node.gpus:
            kind = GPU_TYPES.get(group.type)
            memory = group.memory_mib if group.memory_mib is not None else memory_mib_of(group.type) or 0.0
            price = group.price_per_hour if group.price_per_hour is not None else kind.price_per_hour if kind else None
            for position in range(group.count):
                uuid = group.uuids[position] if group.uuids else None
                gpu = Gpu(
                    id=f"{node.name}/{index}",
                    type=group.type,
                    memory_mib=memory,
                    price_per_hour=price,
                    uuid=uuid,
                    address=node.address,
                    label=node.label,
                    rack=node.rack,
                    mig=group.mig,
                )
                for each in group.instances:
                    found.append(gpu.cut(each.profile, each.start).model_copy(update={"uuid": each.uuid}))
                if not group.instances:
                    found.append(gpu)
                index += 1
    return tuple(gpu for gpu in found if {gpu.id, gpu.device}.isdisjoint(left_out)) if left_out else tuple(found)


def whole_of(gpu: Gpu) -> Gpu:
    """Return the GPU of a MIG instance; of any other GPU itself."""
    mig = instance_type_of(gpu.type)
    if gpu.instance is None or mig is None:
        return gpu
    kind = GPU_TYPES[mig.base]
    price = None if gpu.price_per_hour is None else round(gpu.price_per_hour * ALL_GPCS / mig.gpcs, 9)
    update = {"id": gpu.instance.gpu, "type": mig.base, "uuid": gpu.instance.gpu_uuid, "instance": None}
    return gpu.model_copy(update=update | {"memory_mib": float(kind.memory_mib), "price_per_hour": price})
