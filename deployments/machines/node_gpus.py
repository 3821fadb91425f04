"""The GPUs of every Ray node, and the cluster file they make."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from tenuto.deployments.process.limits import ANSWER_S, within
from tenuto.errors import EnvironmentFaultError
from tenuto.mps.inventory import GpuDevice, read_inventory
from tenuto.placement import Cluster
from tenuto.placement.cluster import GpuGroup, Node


def read_ray_inventory(
    timeout_s: float = 120.0, read: Callable[[], tuple[GpuDevice, ...]] = read_inventory
) -> dict[str, tuple[GpuDevice, ...]]:
    """Return the GPUs of every living node of the connected Ray cluster that has any, by the node's address.

    Args:
        timeout_s: for each node's answer.
        read: finds a node's GPUs, in a task on it.

    Raises:
        EnvironmentFaultError: a node with GPUs did not answer, or none has a GPU.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {node["NodeManagerAddress"]: node for node in within(ANSWER_S, ray.nodes) if node["Alive"]}
    asked = {
        address: ray.remote(_inventory_or_reason)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote(read)
        for address, node in sorted(nodes.items())
    }
    found: dict[str, tuple[GpuDevice, ...]] = {}
    reasons = []
    for address, answer in asked.items():
        try:
            devices = ray.get(answer, timeout=timeout_s)
        except Exception as error:  # Ray wraps a lost node and a timeout in kinds of its own
            raise EnvironmentFaultError(f"node {address} did not tell its GPUs: {error}. See `ray status`.") from error
        if isinstance(devices, str):
            if nodes[address]["Resources"].get("GPU"):
                raise EnvironmentFaultError(f"node {address} has GPUs for Ray, but {devices}")
            reasons.append(f"{address}: {devices}")
        elif devices:
            found[address] = devices
    if not found:
        raise EnvironmentFaultError("no node of the Ray cluster has a GPU. " + " ".join(reasons))
    return found


def _inventory_or_reason(read: Callable[[], tuple[GpuDevice, ...]]) -> tuple[GpuDevice, ...] | str:
    try:
        return read()
    except EnvironmentFaultError as error:
        return str(error)


def cluster_of(nodes: Mapping[str | None, Sequence[GpuDevice]], *, name: str = "n0") -> Cluster:
    """Return the cluster file's content: nodes `n0`, `n1`, … by address; equal neighbours make one group.

    A node without an address is this machine alone, called `name`. MIG devices are GPUs of their own types.

    Raises:
        EnvironmentFaultError: a GPU in MIG mode without a MIG device, which runs nothing.
    """
    made = []
    for index, (address, devices) in enumerate(nodes.items()):
        sliced = [device.uuid for device in devices if device.is_mig]
        if sliced:
            raise EnvironmentFaultError(
                f"{', '.join(sliced)}: in MIG mode without a MIG device. Make some (nvidia-smi mig -cgi 9,9 -C), or "
                f"turn it off: nvidia-smi -i {sliced[0]} -mig 0"
            )
        groups = []
        for (kind, memory_mib), equal in groupby(devices, key=lambda device: (device.type, device.memory_mib)):
            uuids = tuple(device.uuid for device in equal)
            groups.append(GpuGroup(type=kind, count=len(uuids), uuids=uuids, memory_mib=memory_mib))
        label = re.sub(r"[^A-Za-z0-9._-]", "-", name) if address is None else f"n{index}"
        made.append(Node(name=label, gpus=tuple(groups), address=address))
    return Cluster(nodes=tuple(made))
