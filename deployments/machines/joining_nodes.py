"""The GPUs of nodes that join the Ray cluster while a deployment runs, as Ray's autoscaler brings them. No call waits:
a task on each node asks its driver.

Only types that the controller may grow by are taken in. A node is known by Ray's own label of its id. Its processes
start at its address, unless several nodes of one machine have that: what is bound to an id cannot even wait while Ray
drains the node, and Serve would start it anew several times a second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from tenuto import __version__
from tenuto.deployments.machines.node_gpus import cluster_of
from tenuto.deployments.machines.node_layouts import poll_task
from tenuto.deployments.process.ray_nodes import alive_nodes, on_node
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.mps.inventory import GpuDevice
from tenuto.placement.cluster import SPOT, Cluster, Gpu, GpuGroup, Node
from tenuto.profiles.gpu_types import accelerators_of
from tenuto.profiles.mig_instances import instance_type_of

NODE_LABEL = "ray.io/node-id"
TYPE_LABEL = "ray.io/accelerator-type"
_MARKET_LABEL = "ray.io/market-type"
_ANSWERS_S = 120.0  # limit: a node's first worker imports Ray; the node is used even if it answers later
_BRIEF_S = 600.0  # pace: a node that leaves sooner after it joined may do so again
_HELD_BACK_S, _LONGEST_HELD_BACK_S = 60.0, 3600.0  # pace: until such a node is used again; doubled each time

_BOUNDS = "`gpus` of control.yaml"

Answer = tuple[GpuDevice, ...] | str


def has_type(node_labels: Mapping[str, str], kind: str, labels: Mapping[str, str]) -> bool:
    """Whether a node's labels say that its GPUs are of a type: these labels, or else Ray's label of the type."""
    if labels:
        return all(node_labels.get(key) == value for key, value in labels.items())
    return node_labels.get(TYPE_LABEL) in accelerators_of(kind)


def count_labelled(nodes: Iterable[Mapping[str, Any]], kind: str, labels: Mapping[str, str]) -> int:
    """Return how many GPUs Ray counts on nodes whose labels say that they are of a type."""
    return sum(round(node["Resources"].get("GPU", 0.0)) for node in nodes if has_type(node["Labels"], kind, labels))


class JoiningNodes:
    """The nodes that were not there when the deployment's GPUs were declared, and what is known of each.

    `unused` says by node why its GPUs are not used.
    """

    def __init__(
        self,
        types: Mapping[str, Mapping[str, str]],
        declared: Collection[str],
        *,
        cut: Collection[str] = (),
        emulated: bool,
        needs_mps: bool,
        nodes: Callable[[], list[dict[str, Any]]] = alive_nodes,
        start: Callable[[str, Callable[[], Answer]], Any] = on_node,
        poll: Callable[[Any], tuple[bool, Any]] = poll_task,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take in nodes from now on.

        Args:
            types: the GPU types to take in, each with the labels of its nodes; none: Ray's label of the type.
            declared: ids of the nodes whose GPUs an operator declared, or left out.
            cut: the types of which plans may cut GPUs into MIG instances.
            emulated: GPUs are Ray's count of them, of the type in their node's labels; no driver is asked.
            needs_mps: a node without CUDA MPS is of no use.
            nodes: returns the living nodes, as Ray describes them.
            start: begins a function on a node.
            poll: says whether that has ended, and with what; a text is a fault.
            clock: seconds.
        """
        self._types, self._declared, self._cut = types, frozenset(declared), frozenset(cut)
        self._emulated, self._needs_mps = emulated, needs_mps
        self._nodes, self._start, self._poll, self._clock = nodes, start, poll, clock
        self._tasks: dict[str, Any] = {}
        self._answers: dict[str, Answer] = {}
        self._gpus: dict[str, tuple[Gpu, ...]] = {}
        self._since_s: dict[str, float] = {}
        self._at_address: Counter[str] = Counter()  # living nodes
        self._brief: dict[str, tuple[int, float]] = {}  # by GPU: how often its node left soon, and when last
        self.unused: dict[str, str] = {}

    def find_gpus(self, present: Iterable[Gpu]) -> tuple[Gpu, ...]:
        """Return the GPUs of living nodes that joined. `present`: the known GPUs on living nodes, which are not told
        twice when a node joins under another name."""
        if not self._types:
            return ()
        now_s = self._clock()
        alive = self._nodes()
        self._at_address = Counter(str(node["NodeManagerAddress"]) for node in alive)
        nodes = {str(node["NodeID"]): node for node in alive if node["Resources"].get("GPU")}
        for gone in self._since_s.keys() - nodes.keys():
            self._forget(gone, now_s)
        declared = list(present)
        places = {gpu.label or gpu.address for gpu in declared} - {f"{NODE_LABEL}={name}" for name in nodes}
        uuids = {uuid: gpu for gpu in declared for uuid in _uuids(gpu)}
        joined: list[Gpu] = []
        self.unused = {}
        for node_id, node in nodes.items():
            names = {str(node["NodeManagerAddress"]), *(f"{key}={value}" for key, value in node["Labels"].items())}
            if node_id in self._declared or not names.isdisjoint(places):
                continue
            gpus = self._gpus_of(node_id, node, now_s)
            twice = [
                f"{uuid} is {uuids[uuid].id} already"
                for gpu in gpus
                for uuid in _uuids(gpu)
                if uuid in uuids and uuids[uuid].label != gpu.label
            ]
            name = f"{_name_of(node_id)} ({node['NodeManagerAddress']})"
            why = twice[0] if twice else self._why_held_back(gpus, now_s) or self._why_unused(node_id, gpus)
            if why:
                self.unused[name] = why
                continue
            uuids |= {uuid: gpu for gpu in gpus for uuid in _uuids(gpu)}
            joined += gpus
        return tuple(joined)

    def _gpus_of(self, node_id: str, node: Mapping[str, Any], now_s: float) -> tuple[Gpu, ...]:
        """Return the GPUs of a node; none before its task has ended, or when it did not say what it has."""
        if node_id not in self._since_s:
            self._since_s[node_id] = now_s
            self._tasks[node_id] = self._start(node_id, describe_self(self._emulated, self._needs_mps))
        if node_id in self._tasks:
            is_over, answer = self._poll(self._tasks[node_id])
            if is_over:
                del self._tasks[node_id]
                self._answers[node_id] = answer
                try:
                    self._gpus[node_id] = self._read(node_id, node, answer)
                except (EnvironmentFaultError, InvalidInputError) as error:
                    self._answers[node_id] = str(error)
        return self._gpus.get(node_id, ())

    def _read(self, node_id: str, node: Mapping[str, Any], answer: Answer) -> tuple[Gpu, ...]:
        """Return the GPUs of a node from what its driver, or Ray, says."""
        if isinstance(answer, str):
            return ()
        rack = SPOT if node["Labels"].get(_MARKET_LABEL) == SPOT else None  # its nodes may be lost together
        place = Node(name=_name_of(node_id), gpus=(), label=f"{NODE_LABEL}={node_id}", rack=rack)
        if self._emulated:
            kinds = [kind for kind, labels in self._types.items() if has_type(node["Labels"], kind, labels)]
            if not kinds:
                raise EnvironmentFaultError(f"its labels are of no type in {_BOUNDS}: {dict(node['Labels'])}")
            groups: Sequence[GpuGroup] = [GpuGroup(type=kinds[0], count=int(node["Resources"]["GPU"]))]
        else:
            able = [device for device in answer if self._may_cut(device)]
            rest = [device for device in answer if device not in able]
            made = [*cluster_of({None: able}, mig="managed").nodes, *cluster_of({None: rest}).nodes]
            groups = [group for each in made for group in each.gpus if group.type in self._types]
            if not groups:
                what = ", ".join(device.name for device in answer) or "driver, which shows no GPU,"
                raise EnvironmentFaultError(f"its {what} is no type in {_BOUNDS}")
        managed = {"mig": "managed"}  # a whole GPU too, whose MIG mode is off until a plan cuts it
        groups = [group.model_copy(update=managed) if group.type in self._cut else group for group in groups]
        gpus = Cluster(nodes=(place.model_copy(update={"gpus": tuple(groups)}),)).gpus
        address = str(node["NodeManagerAddress"])
        return tuple(
            gpu.model_copy(update={"address": address if self._at_address[address] == 1 else None}) for gpu in gpus
        )

    def _may_cut(self, device: GpuDevice) -> bool:
        mig = instance_type_of(device.type)
        return (device.type if mig is None else mig.base) in self._cut

    def _why_unused(self, node_id: str, gpus: tuple[Gpu, ...]) -> str:
        answer = self._answers.get(node_id)
        if isinstance(answer, str):
            return answer
        is_silent = not gpus and self._clock() - self._since_s[node_id] > _ANSWERS_S
        return "it does not tell its GPUs" if is_silent else ""

    # --- nodes that come and go ---------------------------------------------------------------------------------------

    def _forget(self, node_id: str, now_s: float) -> None:
        """Forget a node that is gone, and note its GPUs when it was there only briefly."""
        since_s = self._since_s.pop(node_id)
        self._tasks.pop(node_id, None)
        self._answers.pop(node_id, None)
        uuids = {uuid for gpu in self._gpus.pop(node_id, ()) for uuid in _uuids(gpu)}
        if now_s - since_s < _BRIEF_S:
            self._brief |= {uuid: (self._brief.get(uuid, (0, 0.0))[0] + 1, now_s) for uuid in uuids}

    def _why_held_back(self, gpus: Iterable[Gpu], now_s: float) -> str:
        """Return why GPUs are not used yet that came and went before; empty when they are used."""
        for uuid in (uuid for gpu in gpus for uuid in _uuids(gpu) if uuid in self._brief):
            times, left_s = self._brief[uuid]
            wait_s = min(_LONGEST_HELD_BACK_S, _HELD_BACK_S * 2.0 ** (times - 1))
            if now_s < left_s + wait_s:
                return f"it left {times} times soon after it had joined; used {wait_s:g} s after that if it stays"
        return ""


def _name_of(node_id: str) -> str:
    return f"ray-{node_id[-12:]}"


def _uuids(gpu: Gpu) -> list[str]:
    """Return the UUIDs of a GPU or instance, and of the GPU that it is a part of."""
    whole = None if gpu.instance is None else gpu.instance.gpu_uuid
    return [uuid for uuid in (gpu.uuid, whole) if uuid is not None]


def describe_self(emulated: bool, needs_mps: bool) -> Callable[[], Answer]:
    """Return what a node runs to describe itself: its GPUs, or why they are of no use. The node may have no Tenuto, or
    another version, so nothing of this module is named in it."""
    expected = __version__

    def describe() -> Any:
        import shutil

        try:
            from tenuto import __version__ as version
        except ImportError as error:
            return f"it has no Tenuto: {error}"
        if version != expected:
            return f"it has Tenuto {version}, the controller {expected}"
        if emulated:
            return ()
        from tenuto.errors import EnvironmentFaultError as Fault
        from tenuto.mps.control import BINARY
        from tenuto.mps.inventory import read_inventory

        if needs_mps and shutil.which(BINARY) is None:
            return f"it has no {BINARY}, which the plan needs"
        try:
            return read_inventory()
        except Fault as error:
            return str(error)

    return describe
