"""The fleet file: cells, which are Ray clusters with a Tenuto of their own, their GPUs, and what runs there.

`tenuto fleet observe` writes it from what the cells say; one written by hand is as good for planning. Paths of plans
are relative to the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from tenuto.documents import SCHEMA, ProblemsBelow, SchemaVersion, StrictModel, dump_yaml
from tenuto.errors import Problem
from tenuto.placement.cluster import NAME, SPOT, Cluster, Gpu, GpuGroup, GroupInstance, Node, node_of, whole_of
from tenuto.placement.plan import Plan
from tenuto.profiles.gpu_types import memory_mib_of

_MOST_CELLS = 1000  # limit: of a fleet; 100,000 GPUs in cells of a hundred
_URL = r"^https?://[^\s/?#@]+$"  # format: scheme, host and port


class Cell(StrictModel):
    """One Ray cluster with its own Tenuto.

    `url` is where clients ask it, and `operator_url` where its status is, when that is elsewhere. `plan` is the file of
    the plan that runs. `rates_rps` are those that the plan was made for, by model; without a plan, those that its
    models have there. `observed_at` is when it answered last, with which `version` of Tenuto. `unready` says why it may
    not be changed now; it is empty when it may.
    """

    name: Annotated[str, Field(pattern=NAME, max_length=63)]
    url: Annotated[str, Field(pattern=_URL)] | None = None
    operator_url: Annotated[str, Field(pattern=_URL)] | None = None
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)]
    plan: str | None = None
    rates_rps: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    observed_at: datetime | None = None
    version: str | None = None
    unready: str = ""

    @cached_property
    def cluster(self) -> Cluster:
        """Its GPUs."""
        return Cluster(nodes=self.nodes)


class FleetFile(StrictModel):
    """Cells that one workload is spread over. They have nothing in common."""

    schema_version: SchemaVersion = SCHEMA
    cells: Annotated[tuple[Cell, ...], Field(min_length=1, max_length=_MOST_CELLS)]

    @model_validator(mode="after")
    def _apart(self) -> FleetFile:
        problems = [*self._overlaps()]
        if problems:
            raise ProblemsBelow(problems)
        return self

    def _overlaps(self) -> Iterator[Problem]:
        owner: dict[tuple[str, str], str] = {}
        for index, cell in enumerate(self.cells):
            own = {("name", cell.name)} | {("url", url) for url in (cell.url, cell.operator_url) if url is not None}
            for node in cell.nodes:
                own |= {("rack", node.rack)} if node.rack not in (None, SPOT) else set()
                own |= {("address", node.address)} if node.address is not None else set()
                own |= {("GPU", uuid) for group in node.gpus for uuid in group.uuids or ()}
            for what, value in sorted(own):
                other = owner.setdefault((what, value), cell.name)
                if other != cell.name or (what == "name" and cell is not self[value]):
                    rule = f"{what} {value} is in cell {other} too: cells overlap"
                    cure = "Give a rack of each cell a name of its own." if what == "rack" else "Leave it in one cell."
                    yield Problem(f"cells.{index}", cell.name, rule, cure)

    def __getitem__(self, name: str) -> Cell:
        """Return the cell of that name; KeyError if there is none."""
        return next(cell for cell in self.cells if cell.name == name)

    def dump(self) -> str:
        """Return the fleet as YAML."""
        return dump_yaml(self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True))


def running_plan(cell: Cell, folder: Path) -> Plan | None:
    """Return the plan that runs in a cell of a fleet file in this folder, on the GPUs that the cell has; None when none
    is known. Raises `InvalidInputError` as `Plan.load` does."""
    return None if cell.plan is None else Plan.load(folder / cell.plan)


def nodes_of(gpus: Iterable[Gpu]) -> tuple[Node, ...]:
    """Return nodes as a cluster file has them.

    Raises:
        ValueError: their GPUs are not numbered one by one, so that no file could name them.
    """
    by_node: dict[str, dict[str, list[Gpu]]] = defaultdict(lambda: defaultdict(list))
    for gpu in gpus:
        by_node[node_of(gpu.device)][gpu.device].append(gpu)
    nodes = []
    for name, devices in by_node.items():
        numbers = sorted(int(device.rpartition("/")[2]) for device in devices)
        if numbers != [*range(len(numbers))]:
            raise ValueError(f"the GPUs of {name} are numbered {', '.join(map(str, numbers))}")
        groups: list[GpuGroup] = []
        for number in numbers:
            parts = devices[f"{name}/{number}"]
            group = _group_of(parts)
            if groups and _alike(groups[-1], group):
                both = (*(groups[-1].uuids or ()), *(group.uuids or ()))
                group = group.model_copy(update={"count": groups.pop().count + 1, "uuids": both or None})
            groups.append(group)
        first = next(iter(devices.values()))[0]
        racks = {gpu.rack for parts in devices.values() for gpu in parts}  # two where some GPUs are spot
        where = {"address": first.address, "label": first.label, "rack": first.rack if len(racks) == 1 else None}
        nodes.append(Node(name=name, gpus=tuple(groups), **where))
    return tuple(nodes)


def _group_of(parts: list[Gpu]) -> GpuGroup:
    """Return a physical GPU with its instances as a group of one."""
    gpu = whole_of(parts[0])
    cuts = [(part.cut_as, part.instance, part.uuid) for part in parts]
    return GpuGroup(
        type=gpu.type,
        uuids=None if gpu.uuid is None else (gpu.uuid,),
        memory_mib=None if gpu.memory_mib == memory_mib_of(gpu.type) else gpu.memory_mib,
        price_per_hour=gpu.price_per_hour,
        spot=gpu.spot,
        mig=gpu.mig,
        instances=tuple(
            GroupInstance(profile=cut.profile, start=place.start, uuid=uuid)
            for cut, place, uuid in cuts
            if cut is not None and place is not None
        ),
    )


def _alike(group: GpuGroup, other: GpuGroup) -> bool:
    one = {"count": 1, "uuids": None}
    has_uuids = group.uuids is not None
    return (
        not other.instances
        and has_uuids == (other.uuids is not None)
        and group.model_copy(update=one) == other.model_copy(update=one)
    )
