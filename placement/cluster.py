"""The cluster that a plan is made for: its nodes, their GPUs, and the MIG instances into which GPUs are cut. A GPU
type has one price; a spot GPU counts for more than that, because its loss costs something."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, model_validator

from tenuto.documents import SCHEMA, Fault, SchemaVersion, StrictModel, dump_yaml, parse_document, repeated
from tenuto.errors import one_of, refused
from tenuto.outcome import ATTAINED
from tenuto.profiles.gpu_types import GPU_TYPES, is_fast_type, memory_mib_of
from tenuto.profiles.mig_instances import (
    ALL_GPCS,
    InstanceType,
    instance_profiles,
    instance_type_of,
    mig_types,
    type_of_instance,
)

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # format: the name of a node or a rack
START_S = 12.5  # default: until a start was measured: the middle of gpulet's 10 to 15 s
SPOT = "spot"  # format: the rack of spot GPUs whose node says none, and Ray's label of their nodes
MOST_ELASTIC_GPUS = 10_000  # limit: a rate that takes more is probably a typing error, and policies would take minutes


Price = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Of a GPU, per hour."""


class SpotTerms(StrictModel):
    """How a spot GPU is lost: after `life_hours` in the mean, with notice of `notice_s` seconds. Another serves in its
    place after `replace_s`; None: after as long as a start takes."""

    life_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    notice_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    replace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def taking(self, start_s: float) -> SpotTerms:
        """Return the terms where a start is known to take so long."""
        return self if self.replace_s is not None else self.model_copy(update={"replace_s": start_s})

    @property
    def factor(self) -> float:
        """How many times its price a GPU costs with what its losses cost.

        A loss ends a life, so losses cost their part of a life (renewal reward theorem). Within the notice both GPUs
        are paid. After it requests are lost: each uses up what 1 / (1 - `ATTAINED`) requests in time allow, and counts
        as so many.
        """
        replace_s = START_S if self.replace_s is None else self.replace_s
        moves_s = min(replace_s, self.notice_s)
        return 1.0 + (moves_s + (replace_s - moves_s) / (1.0 - ATTAINED)) / (3600.0 * self.life_hours)


def node_of(gpu_id: str) -> str:
    """Return the node of a GPU: the part of the GPU's id before the last `/`."""
    return gpu_id.rpartition("/")[0]


MigUse = Literal["fixed", "managed"]
"""`fixed`: the MIG layout of a GPU stays as it is. `managed`: plans may cut the GPU into other instances."""


class InstancePlace(StrictModel):
    """Where a MIG instance lies: on the GPU `gpu`, where it takes `slices` memory slices from slice `start` on.

    `gpu_uuid` is the UUID of the GPU. It is None when the GPU is logical, or when the UUID is not known.
    """

    gpu: str
    start: Annotated[int, Field(ge=0)]
    slices: Annotated[int, Field(ge=1)]
    gpu_uuid: str | None = None

    def overlaps(self, other: InstancePlace) -> bool:
        """Return whether both instances are on the same GPU and have a memory slice in common."""
        apart = self.start + self.slices <= other.start or other.start + other.slices <= self.start
        return self.gpu == other.gpu and not apart


class Placed(StrictModel):
    """A GPU or a MIG instance, of a cluster or of a plan. Programs see an instance as a GPU: it has a type (such as
    a100-3g.20gb), memory, compute and a UUID of its own, and no neighbours from other instances.

    `uuid` is None for a logical GPU, which is not bound to hardware, and for an instance that does not exist yet.
    `address` is the IP of the node in the Ray cluster, and `label` a label that only this node has. Cluster files give
    at most one of the two. A node that joined has both: its label says whether it is there, and processes start at its
    address. `rack` is where the node stands. `instance` is the place of a MIG instance; it is None for a whole
    GPU, or when the place is not known. `mig` is None for a GPU that must not be cut.
    """

    id: str
    type: str
    uuid: str | None = None
    address: str | None = None
    label: str | None = None
    rack: str | None = None
    mig: MigUse | None = None
    instance: InstancePlace | None = None

    @property
    def device(self) -> str:
        """The id of the physical GPU: this GPU, or the one that this instance is a part of."""
        return self.id if self.instance is None else self.instance.gpu

    @property
    def node_key(self) -> str:
        """What its node is known by in the Ray cluster: label or address; empty when it is on any node."""
        return self.label or self.address or ""

    @property
    def is_real(self) -> bool:
        """Whether it is bound to hardware."""
        return self.uuid is not None or (self.instance is not None and self.instance.gpu_uuid is not None)

    @property
    def cut_as(self) -> InstanceType | None:
        """What its type says of the instance; None for a whole GPU, or when the place is not known."""
        return None if self.instance is None else instance_type_of(self.type)

    @property
    def whole_type(self) -> str:
        """The type of the physical GPU."""
        return self.type if (mig := self.cut_as) is None else mig.base

    @property
    def part(self) -> float:
        """The part of the physical GPU's compute: 1 for a whole one."""
        return 1.0 if (mig := self.cut_as) is None else mig.gpcs / ALL_GPCS


class Gpu(Placed):
    """A GPU or MIG instance of the cluster."""

    memory_mib: float
    price_per_hour: float | None = None  # an instance has its part of the GPU's price
    spot: SpotTerms | None = None
    whole_mib: float | None = None  # of an instance: the memory of the GPU that it was cut from

    @property
    def weighed_price(self) -> float | None:
        """The price per hour, with what losses of a spot GPU cost."""
        if self.price_per_hour is None or self.spot is None:
            return self.price_per_hour
        return self.price_per_hour * self.spot.factor

    def cut(self, profile: str, start: int) -> Gpu:
        """Return an instance of this GPU; raises KeyError if the GPU type has no such profile."""
        size = instance_profiles(self.type)[profile]
        kind = type_of_instance(self.type, profile)
        price = None if self.price_per_hour is None else self.price_per_hour * size.gpcs / ALL_GPCS
        place = InstancePlace(gpu=self.id, start=start, slices=size.slices, gpu_uuid=self.uuid)
        memory_mib = memory_mib_of(kind) or 0.0
        update = {"id": instance_id(self.id, start), "type": kind, "uuid": None, "instance": place}
        return self.model_copy(
            update=update | {"memory_mib": memory_mib, "price_per_hour": price, "whole_mib": self.memory_mib}
        )


def excludes(one: Placed, other: Placed) -> bool:
    """Return whether a physical GPU cannot have both at once.

    That is so when they differ and belong to the same physical GPU, and one of them is the whole GPU or both have a
    memory slice in common.
    """
    if one.device != other.device or (one.id, one.type) == (other.id, other.type):
        return False
    return one.instance is None or other.instance is None or one.instance.overlaps(other.instance)


def instance_id(gpu_id: str, start: int) -> str:
    """Return the id of the MIG instance of a GPU that begins at a memory slice: `n0/3.4`."""
    return f"{gpu_id}.{start}"


class GroupInstance(StrictModel):
    """A MIG instance that each GPU of a group has: its profile, such as 3g.40gb, and the memory slice where it begins.
    It has a `uuid` only if the group is a single GPU.
    """

    profile: str
    start: Annotated[int, Field(ge=0)]
    uuid: str | None = None


class GpuGroup(StrictModel):
    """`count` GPUs of one type on a node. Memory and price default to those of the type.

    With `mig`, each of the GPUs is cut into `instances`: for good (`fixed`), or until a plan changes it (`managed`).
    """

    type: str
    count: Annotated[int, Field(ge=1, le=100_000)] = 1
    uuids: tuple[str, ...] | None = None
    memory_mib: Annotated[float, Field(gt=0)] | None = None
    price_per_hour: Price | None = None
    spot: SpotTerms | None = None
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
        check_spot_price(self.spot, self.price_per_hour)
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
            # An instance with a UUID was made by the driver, and is right whatever the table says.
            starts = profiles[instance.profile].starts
            if instance.start not in starts and not (self.uuids or instance.uuid):
                allowed = ", ".join(map(str, starts))
                rule = f"a {instance.profile} cannot begin at memory slice {instance.start} of GPU type '{self.type}'"
                raise Fault(rule, f"It begins at {allowed}.")
        overlap = first_overlap([(i.profile, i.start, profiles[i.profile].slices) for i in self.instances])
        if overlap is not None:
            raise Fault(f"{overlap} take the same memory slices", "Begin one of them elsewhere, or leave it away.")
        return self


def check_spot_price(spot: SpotTerms | None, price_per_hour: float | None) -> None:
    """Raise `Fault` when spot GPUs have no price: that of the GPU table is not theirs."""
    if spot is not None and price_per_hour is None:
        raise Fault("`spot` without `price_per_hour`", "Give what an hour of such a GPU costs now.")


def first_overlap(placed: Sequence[tuple[str, int, int]]) -> str | None:
    """Return in words the first two instances of a GPU that have a memory slice in common; None if there are none.

    Args:
        placed: name, first memory slice and number of slices of each instance.
    """
    for place, (name, start, slices) in enumerate(placed):
        for other, begins, takes in placed[:place]:
            if start < begins + takes and begins < start + slices:
                return f"{other} at {begins} and {name} at {start}"
    return None


class Node(StrictModel):
    """One machine.

    When gpu-lets must stay on this node, give its `address`, the IP in the Ray cluster, or a `label`, a `key=value`
    that only this node has there. A label still holds when a pod comes back with another IP. Nodes of one `rack` (or of
    one zone or power line) may be lost together.
    """

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
    """Nodes with GPUs.

    If `elastic`, a policy may use as many GPUs of these types as it needs, and aims at a low cost. `left_out` names
    GPUs that plans do not use, as `node/index`.
    """

    schema_version: SchemaVersion = SCHEMA
    nodes: tuple[Node, ...] = ()
    elastic: bool = False
    left_out: tuple[str, ...] | None = None
    _given: tuple[Gpu, ...] = PrivateAttr(())

    @classmethod
    def of(cls, gpus: Iterable[Gpu]) -> Cluster:
        """Return the fixed cluster of these GPUs, for example of those that are left of another cluster."""
        cluster = cls()
        cluster._given = tuple(gpus)
        return cluster

    @model_validator(mode="after")
    def _unique_nodes(self) -> Cluster:
        twice = repeated([node.name for node in self.nodes])
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
        """Every GPU, in file order. A whole GPU has the id `node/index`; a GPU that is cut is replaced by its MIG
        instances, with ids `node/index.start`."""
        if self._given:
            return tuple(gpu for gpu in self._given if {gpu.id, gpu.device}.isdisjoint(self.left_out or ()))
        return _gpus_of(self.nodes, self.left_out)

    @property
    def uncut(self) -> Cluster:
        """This cluster with every GPU whole that plans may cut (`mig: managed`), for policies that choose layouts."""
        if not any(gpu.mig == "managed" and gpu.instance is not None for gpu in self.gpus):
            return self
        wholes = (whole_of(gpu) if gpu.mig == "managed" else gpu for gpu in self.gpus)
        given = {gpu.id: gpu for gpu in wholes}
        cluster = self.model_copy()
        cluster._given = tuple(given.values())
        return cluster

    @property
    def as_cut(self) -> Cluster:
        """This cluster with the MIG layouts that it has: plans may cut none of its GPUs."""
        if not any(gpu.mig == "managed" for gpu in self.gpus):
            return self
        cluster = self.model_copy()
        fixed = {True: "fixed", False: None}
        cluster._given = tuple(gpu.model_copy(update={"mig": fixed[gpu.instance is not None]}) for gpu in self.gpus)
        return cluster

    def cut_as(self, places: Iterable[Placed]) -> Cluster:
        """Return this cluster with the layouts of a plan, on those GPUs that plans may cut and on GPUs that were
        bought. `places` are the plan's GPUs and instances."""
        planned, present = list(places), {(gpu.id, gpu.type) for gpu in self.gpus}
        if all(each.instance is None or (each.id, each.type) in present for each in planned):
            return self
        whole = {gpu.id: gpu for gpu in self.uncut.gpus if gpu.mig == "managed"}
        by_type = {gpu.type: gpu for gpu in reversed(whole.values())}
        made: dict[str, list[Gpu]] = {}
        for each in planned:
            place, mig = each.instance, each.cut_as
            if place is not None and mig is not None and (each.id, each.type) not in present:
                gpu = whole.get(place.gpu) or by_type.get(mig.base)
                if gpu is not None and mig.profile in instance_profiles(mig.base):
                    device = gpu.model_copy(update={"id": place.gpu, "uuid": place.gpu_uuid})
                    made.setdefault(place.gpu, []).append(device.cut(mig.profile, place.start))
        given: dict[str, list[Gpu]] = {}
        stays = {(each.id, each.type) for each in planned}
        for gpu in self.gpus:
            on_device = given.setdefault(gpu.device, [])
            if gpu.device not in made or (gpu.id, gpu.type) in stays:
                on_device.append(gpu)
        for name, gpus in made.items():
            given.setdefault(name, []).extend(gpus)
        cluster = self.model_copy()
        cluster._given = tuple(gpu for gpus in given.values() for gpu in gpus)
        return cluster

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The GPU types of the cluster, in file order."""
        return tuple(dict.fromkeys(gpu.type for gpu in self.gpus))

    @property
    def streams(self) -> bool:
        """Whether gpu-lets stream when the workload does not say.

        They do when all GPUs are real ones (with UUIDs) of compute capability 8.0 or later. Logical GPUs do not stream,
        as an emulated batch copies nothing.
        """
        gpus = self.gpus
        return bool(gpus) and all(gpu.uuid is not None and is_fast_type(gpu.type) for gpu in gpus)

    @property
    def one_of_each(self) -> dict[str, Gpu]:
        """A GPU of each type, by type in file order: see `smallest_of_each`."""
        return smallest_of_each(self.gpus)

    @property
    def counts(self) -> dict[str, int]:
        """The number of GPUs of each type, in file order."""
        return dict(Counter(gpu.type for gpu in self.gpus))

    @property
    def prices(self) -> dict[str, float]:
        """What an hour of each GPU type counts, in file order: `weighed_price`. When any price is unknown, all are
        1."""
        prices = {kind: gpu.weighed_price for kind, gpu in self.one_of_each.items()}
        known = {kind: price for kind, price in prices.items() if price is not None}
        return known if len(known) == len(prices) else dict.fromkeys(prices, 1.0)

    def dump(self) -> str:
        """Return the cluster as YAML. `Cluster.load` of the text gives an equal cluster."""
        return dump_yaml(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    @classmethod
    def parse(cls, text: str, *, elastic: bool = False, memory_mib: Mapping[str, float] | None = None) -> Cluster:
        """Return the one-node cluster of a short form: `v100:4`, or `v100:2,t4:2` for several types. `a100:4:mig` means
        GPUs that plans may cut into MIG instances. `memory_mib` is of types that are not known by name.

        Raises:
            InvalidInputError: the text does not have this form, or names an unknown type.
        """
        groups: list[dict[str, object]] = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*([A-Za-z0-9_.+-]+)(?::([0-9]{1,18}))?(:mig)?\s*", part)
            if match is None or match.group(2) == "0":
                raise refused(
                    "--gpus",
                    text,
                    "must be TYPE:COUNT[,TYPE:COUNT…] with counts of at least 1",
                    "Write for example --gpus v100:4, or a100-80gb:4:mig for GPUs that plans may cut.",
                )
            group: dict[str, object] = {"type": match.group(1), "count": int(match.group(2) or 1)}
            if memory_mib is not None and match.group(1) in memory_mib and memory_mib_of(match.group(1)) is None:
                group["memory_mib"] = memory_mib[match.group(1)]
            groups.append(group | ({"mig": "managed"} if match.group(3) else {}))
        data = {"nodes": [{"name": "n0", "gpus": groups}], "elastic": elastic}
        return parse_document(cls, data, origin="--gpus")


@lru_cache(maxsize=1000)  # limit: clusters; as many as a fleet has cells
def _gpus_of(nodes: tuple[Node, ...], left_out: tuple[str, ...] | None) -> tuple[Gpu, ...]:
    gpus = []
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
                    spot=group.spot,
                    uuid=uuid,
                    address=node.address,
                    label=node.label,
                    rack=node.rack or (SPOT if group.spot is not None else None),
                    mig=group.mig,
                )
                for each in group.instances:
                    gpus.append(gpu.cut(each.profile, each.start).model_copy(update={"uuid": each.uuid}))
                if not group.instances:
                    gpus.append(gpu)
                index += 1
    return tuple(gpu for gpu in gpus if {gpu.id, gpu.device}.isdisjoint(left_out)) if left_out else tuple(gpus)


def smallest_of_each(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    """Return a GPU of each type, by type in order: the first of those with the least memory, as plans are to fit on any
    GPU of their types."""
    smallest: dict[str, Gpu] = {}
    for gpu in gpus:
        known = smallest.get(gpu.type)
        if known is None or gpu.memory_mib < known.memory_mib:
            smallest[gpu.type] = gpu
    return smallest


def whole_of(gpu: Gpu) -> Gpu:
    """Return the GPU that a MIG instance is a part of, or the GPU itself if it is whole."""
    if gpu.instance is None or gpu.cut_as is None:
        return gpu
    price = None if gpu.price_per_hour is None else round(gpu.price_per_hour / gpu.part, 9)
    update = {"id": gpu.device, "type": gpu.whole_type, "uuid": gpu.instance.gpu_uuid, "instance": None}
    memory_mib = gpu.whole_mib or memory_mib_of(gpu.whole_type)
    return gpu.model_copy(update=update | {"memory_mib": memory_mib, "price_per_hour": price, "whole_mib": None})
