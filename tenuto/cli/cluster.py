"""`tenuto cluster`: list the real GPUs, and write them as a cluster file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tenuto.cli.common import json_option, output_option, printed_as_json, write_file
from tenuto.cli.tables import print_table
from tenuto.errors import EnvironmentFaultError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tenuto.mps.inventory import GpuDevice
    from tenuto.placement.cluster import MigUse


@click.command(name="cluster", short_help="List the GPUs of this machine or Ray cluster; write a cluster file.")
@click.option("--address", metavar="ADDRESS", help="Ray cluster whose nodes to ask, or `auto`; default: this machine.")
@click.option(
    "--mig",
    type=click.Choice(["fixed", "managed"]),
    default="fixed",
    show_default=True,
    help="Whether plans may cut the GPUs in MIG mode into other instances.",
)
@output_option("Write the cluster file here.")
@json_option
def command(address: str | None, mig: MigUse, output: str | None) -> int:
    """List GPUs by UUID with type, memory, SMs, driver and modes.

    The exit code is 3 when there is no driver or no GPU.

    Example: tenuto cluster -o cluster.yaml
    """
    from tenuto.deployments.machines.node_gpus import cluster_of
    from tenuto.mps.inventory import read_inventory

    nodes: dict[str | None, tuple[GpuDevice, ...]]
    if address is None:
        nodes = {None: read_inventory()}
        if not nodes[None]:
            raise EnvironmentFaultError("the NVIDIA driver answers, but this machine has no GPU. Check nvidia-smi -L.")
    else:
        nodes = _ray_nodes(address)
    cluster = cluster_of(nodes, mig=mig)
    if output is not None:
        write_file(output, cluster.dump(), what=f"{len(cluster.gpus)} GPUs on {len(cluster.nodes)} nodes")
    rows = [
        {"node": node.name, "address": requested, **device.to_data()}
        for node, (requested, devices) in zip(cluster.nodes, nodes.items(), strict=True)
        for device in devices
    ]
    data = {"cluster": cluster.model_dump(mode="json", by_alias=True, exclude_none=True), "gpus": rows}
    if not printed_as_json(data) and output is None:
        _print([node.name for node in cluster.nodes], nodes)
    return 0


def _ray_nodes(address: str) -> dict[str | None, tuple[GpuDevice, ...]]:
    from tenuto.deployments.machines.node_gpus import read_ray_inventory
    from tenuto.deployments.process.limits import ANSWER_S, within
    from tenuto.deployments.process.ray_address import end_ray, join_ray

    try:
        within(60.0, join_ray, address)
    except ConnectionError as error:
        raise EnvironmentFaultError(
            f"no Ray cluster answers at {address}: {error}. Check --address and `ray status`."
        ) from error
    try:
        inventories = read_ray_inventory()
        return {address: inventories[address] for address in inventories}
    finally:
        end_ray(ANSWER_S)


def _print(names: list[str], nodes: Mapping[str | None, tuple[GpuDevice, ...]]) -> None:
    print_table(
        ("node", "uuid", "type", "MiB", "free MiB", "CC", "SMs", "driver", "MIG", "compute mode"),
        (
            (
                name,
                d.uuid,
                d.type,
                str(d.memory_mib),
                str(d.free_memory_mib),
                ".".join(map(str, d.compute_capability)),
                str(d.sm_count),
                d.driver,
                _mig(d),
                d.compute_mode,
            )
            for name, devices in zip(names, nodes.values(), strict=True)
            for d in devices
        ),
        left=("uuid", "type", "driver", "MIG", "compute mode"),
        whole=("uuid", "type"),
    )


def _mig(device: GpuDevice) -> str:
    if device.parent_uuid is not None:
        return "device" if device.start is None else f"at {device.start}"
    mode = "on, empty" if device.is_mig else "off" if device.has_mig else "none"
    return f"{mode}, reset pending" if device.resets else mode
