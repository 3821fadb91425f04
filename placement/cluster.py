"""The cluster a plan is made for: nodes and their GPUs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated

from pydantic import Field, PrivateAttr, model_validator

from tenuto.documents import SCHEMA, Fault, SchemaVersion, StrictModel, dump_yaml, parse_document
from tenuto.errors import one_of, refused
from tenuto.profiles.gpu_types import GPU_TYPES, is_fast_type, memory_mib_of

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # format: of a node or a rack


def node_of(gpu_id: str) -> str:
    """Return the node of a GPU, which stands before the last `/` of its id."""
    return gpu_id.rpartition("/")[0]


class Gpu(StrictModel):
    """One GPU of the cluster. `uuid` is None for a logical GPU that is not bound to hardware; `address` is the IP of
    its node in the Ray cluster, `label` a label that only this node has, where one of them is known; `rack` where its
    node stands."""

    id: str
    type: str
    uuid: str | None = None
    address: str | None = None
    label: str | None = None
    rack: str | None = None
    memory_mib: float
    price_per_hour: float | None = None


class GpuGroup(StrictModel):
    """`count` GPUs of one type on a node. Memory and price default to what is known of the type."""

    type: str
    count: Annotated[int, Field(ge=1, le=100_000)] = 1
    uuids: tuple[str, ...] | None = None
    memory_mib: Annotated[float, Field(gt=0)] | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None

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
        unknown = {*(self.left_out or ())} - {gpu.id for gpu in _gpus_of(self.nodes, None)}
        if unknown:
            raise Fault(f"no GPUs to be left out: {', '.join(sorted(unknown))}", "Write NODE/INDEX, such as n0/3.")
        return self

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU, in file order, with ids `node/index`."""
        if self._given:
            return tuple(gpu for gpu in self._given if gpu.id not in (self.left_out or ()))
        return _gpus_of(self.nodes, self.left_out)

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
        """Build a one-node cluster from the short form `v100:4`, or `v100:2,t4:2` for several types.

        Raises:
            InvalidInputError: not of that form, or an unknown type.
        """
        groups = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*([A-Za-z0-9_.+-]+)(?::(\d+))?\s*", part)
            if match is None or match.group(2) == "0":
                raise refused(
                    "--gpus",
                    text,
                    "must be TYPE:COUNT[,TYPE:COUNT…] with counts of at least 1",
                    "Write for example --gpus v100:4.",
                )
            groups.append({"type": match.group(1), "count": int(match.group(2) or 1)})
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
                found.append(
                    Gpu(
                        id=f"{node.name}/{index}",
                        type=group.type,
                        memory_mib=memory,
                        price_per_hour=price,
                        uuid=uuid,
                        address=node.address,
                        label=node.label,
                        rack=node.rack,
                    )
                )
                index += 1
    return tuple(gpu for gpu in found if gpu.id not in left_out) if left_out else tuple(found)
