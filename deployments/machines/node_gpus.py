"""The GPUs of every Ray node, and the cluster file that lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from tenuto.deployments.process.ray_nodes import alive_nodes, on_node
from tenuto.errors import EnvironmentFaultError
from tenuto.mps.inventory import GpuDevice, read_inventory
from tenuto.placement import Cluster
from tenuto.placement.cluster import GpuGroup, GroupInstance, MigUse, Node
from tenuto.profiles.mig_instances import instance_profiles, instance_type_of


# Limit: a node's first worker imports Ray.
def read_ray_inventory(
    timeout_s: float = 120.0, read: Callable[[], tuple[GpuDevice, ...]] = read_inventory
) -> dict[str, tuple[GpuDevice, ...]]:
    """Return the GPUs of the connected Ray cluster, by the address of their node. Nodes without GPUs are left out.

    Args:
        timeout_s: limit for each node's answer.
        read: finds a node's GPUs, in a task on that node.

    Raises:
        EnvironmentFaultError: a node with GPUs did not answer, or no node has a GPU.
    """
    import ray

    nodes = {node["NodeManagerAddress"]: node for node in alive_nodes()}
    answers = {address: on_node(node["NodeID"], _inventory_or_reason, read) for address, node in sorted(nodes.items())}
    inventory: dict[str, tuple[GpuDevice, ...]] = {}
    reasons = []
    for address, answer in answers.items():
        try:
            devices = ray.get(answer, timeout=timeout_s)
        except Exception as error:  # Ray has several kinds of errors for a lost node or a timeout
            raise EnvironmentFaultError(f"node {address} did not tell its GPUs: {error}. See `ray status`.") from error
        if isinstance(devices, str):
            if nodes[address]["Resources"].get("GPU"):
                raise EnvironmentFaultError(f"node {address} has GPUs for Ray, but {devices}")
            reasons.append(f"{address}: {devices}")
        elif devices:
            inventory[address] = devices
    if not inventory:
        raise EnvironmentFaultError("no node of the Ray cluster has a GPU. " + " ".join(reasons))
    return inventory


def _inventory_or_reason(read: Callable[[], tuple[GpuDevice, ...]]) -> tuple[GpuDevice, ...] | str:
    try:
        return read()
    except EnvironmentFaultError as error:
        return str(error)


def cluster_of(nodes: Mapping[str | None, Sequence[GpuDevice]], *, mig: MigUse = "fixed") -> Cluster:
    """Return the cluster file's content: nodes `n0`, `n1`, … by address; equal neighbours make one group.

    A node without an address is this machine alone. A GPU that is cut is told with its MIG instances
    and where they begin; where the driver does not tell that, MIG devices are GPUs of their own types. `mig`: what may
    be done to the layouts.

    Raises:
        EnvironmentFaultError: a GPU in MIG mode without a MIG device, which runs nothing, and may not be cut.
    """
    made = []
    for index, (address, devices) in enumerate(nodes.items()):
        sliced = [device.uuid for device in devices if device.is_mig]
        if sliced and mig == "fixed":
            raise EnvironmentFaultError(
                f"{', '.join(sliced)}: in MIG mode without a MIG device. Make some (nvidia-smi mig -cgi 9,9 -C), let "
                f"plans make them (--mig managed), or turn it off: nvidia-smi -i {sliced[0]} -mig 0"
            )
        groups: list[GpuGroup] = []
        for _, together in groupby(devices, key=lambda device: device.parent_uuid or device.is_mig):
            parts = list(together)
            groups += _cut_group(parts, mig) or _plain_groups(parts, mig)
        made.append(Node(name=f"n{index}", gpus=tuple(groups), address=address))
    return Cluster(nodes=tuple(made))


def _cut_group(parts: Sequence[GpuDevice], mig: MigUse) -> list[GpuGroup]:
    """Return the GPU of some MIG devices with its instances; none where it is not told how it is cut."""
    types = [instance_type_of(part.type) for part in parts]
    base, parent = types[0].base if types[0] is not None else "", parts[0].parent_uuid
    known, instances = instance_profiles(base), []
    for part, kind in zip(parts, types, strict=True):
        if kind is None or part.start is None or kind.profile not in known:
            return []
        instances.append(GroupInstance(profile=kind.profile, start=part.start, uuid=part.uuid))
    if parent is None:
        return []
    placed = tuple(sorted(instances, key=lambda instance: instance.start))
    return [GpuGroup(type=base, uuids=(parent,), mig=mig, instances=placed)]


def _plain_groups(devices: Sequence[GpuDevice], mig: MigUse) -> list[GpuGroup]:
    groups = []
    for (kind, memory_mib, is_mig), equal in groupby(devices, key=lambda d: (d.type, d.memory_mib, d.is_mig)):
        uuids = tuple(device.uuid for device in equal)
        managed = mig if is_mig else None
        groups.append(GpuGroup(type=kind, count=len(uuids), uuids=uuids, memory_mib=memory_mib, mig=managed))
    return groups
