"""The Serve applications of a cluster: which run, which should run, and what a config needs before it is applied."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto import __version__
from tenuto.deployments.process.limits import ANSWER_S
from tenuto.deployments.process.ray_nodes import alive_nodes, draining_nodes, on_node
from tenuto.deployments.serve.building import deploy_applications, start_controller
from tenuto.deployments.serve.config import (
    CONTROL_APPLICATION,
    ENTRY_APPLICATION,
    GPULET_PREFIX,
    HEAD_RESOURCE,
    ServeConfig,
    is_ours,
)
from tenuto.deployments.serve.deployment import MOST_CLIENTS, Deployment
from tenuto.deployments.serve.discovery import retire_controller
from tenuto.deployments.serve.states import (
    ApplicationState,
    application_details,
    application_states,
    delete_applications,
    serve_processes,
)
from tenuto.errors import EnvironmentFaultError

_MOST_CHECKED_NODES = 32  # limit: nodes whose version of Tenuto is checked; it rarely differs only on the others
_REFUSED_S = 0.2  # limit: wait for a machine to refuse a connection, which a living machine does at once
_RETIRES_S = 30.0  # limit: the controller itself gives the look that is under way 20 s
_CHECK_S = 90.0  # limit: a node's first worker imports Ray; on a busy machine that takes long


@dataclass(frozen=True)
class Deployed:
    """The deployment that should run. `by_serve`: `serve deploy` brought it up. If Tenuto did, its executor is not
    known."""

    deployment: Deployment
    by_serve: bool


class Applications:
    """The applications of the cluster that this process is connected to; Serve must run there."""

    def apply(self, config: ServeConfig) -> None:
        """Run the applications of a Serve config, and remove all other applications of ours."""
        deploy_applications(config)

    def start_controller(self, config: ServeConfig) -> None:
        """Run the controller of a Serve config, beside what runs."""
        start_controller(config)

    def states(self) -> dict[str, ApplicationState]:
        """Return every application by name."""
        return application_states()

    def deployed(self) -> Deployed | None:
        """Return the deployment of ours that should run, as Serve has it; None if there is none.

        Raises:
            InvalidInputError: it was not made by Tenuto, or by another version.
        """
        details = application_details()
        entry = details.get(ENTRY_APPLICATION)
        if entry is None or not entry["deployments"] or entry["status"] == "DELETING":
            return None
        applications = []
        for name, each in details.items():
            declared = each["deployed_app_config"] or {}
            running = [deployment["deployment_config"] for deployment in each["deployments"].values()]
            # `serve deploy` may still be building what it was given.
            deployments = running or declared.get("deployments", [])
            if is_ours(name) and deployments:
                applications.append({"name": name, "args": declared.get("args", {}), "deployments": deployments})
        # Serve's applications do not say where Serve's proxies listen.
        deployment = Deployment.from_data({"applications": applications}, origin="what runs on Serve")
        return Deployed(deployment, entry["source"] == "declarative")

    def delete(self, names: Collection[str]) -> None:
        """Drain and remove applications: the controller and the entry first, so that nothing comes back and no request
        comes to a gpu-let that is about to end.

        Raises:
            EnvironmentFaultError: Serve does not remove an application.
        """
        if CONTROL_APPLICATION in names:
            retire_controller(_RETIRES_S)
        first = [name for name in (CONTROL_APPLICATION, ENTRY_APPLICATION) if name in names]
        for group in (first, sorted(set(names) - set(first))):
            if group:
                delete_applications(group)

    def delete_ours(self) -> None:
        """Drain and remove every application of ours, also those that a controller has brought meanwhile: one that is
        still starting cannot be told to retire.

        Raises:
            EnvironmentFaultError: Serve does not remove an application.
        """
        while names := {name for name in self.states() if is_ours(name)}:
            self.delete(names)

    def node_names(self) -> frozenset[str]:
        """Return the names of living nodes: their addresses, and their labels as `key=value`.

        Ray waits 15 s before it counts a node as lost. Here a node is lost as soon as nobody listens on its Ray port.
        """
        return frozenset(
            name
            for node in alive_nodes()
            if not nobody_listens(str(node["NodeManagerAddress"]), int(node["NodeManagerPort"]))
            for name in _names_of(node)
        )

    def leaving_nodes(self) -> dict[str, float]:
        """Return the names of living nodes that Ray drains, as `node_names` has them, with `draining_nodes`' times."""
        ends_s = draining_nodes()
        if not ends_s:
            return {}
        return {name: ends_s[n["NodeID"]] for n in alive_nodes() if n["NodeID"] in ends_s for name in _names_of(n)}

    def others_at(self, names: Collection[str]) -> list[str]:
        """Return, in words and once each, which of our processes beside gpu-lets, and of Ray's, run on the named
        nodes."""
        nodes = {str(node["NodeID"]): node for node in alive_nodes() if not set(names).isdisjoint(_names_of(node))}
        is_head = any(HEAD_RESOURCE in node["Resources"] for node in nodes.values())
        kinds = {
            each.deployment
            for each in serve_processes()
            if each.node_id in nodes and is_ours(each.application) and not each.application.startswith(GPULET_PREFIX)
        }
        return [*(["Ray's head"] if is_head else []), *sorted(kinds)]

    def gateways_elsewhere(self) -> list[str]:
        """Return the addresses of the nodes that have gateways; empty if the node of this process has one."""
        import ray

        nodes = {each.node_id for each in serve_processes() if each.application == ENTRY_APPLICATION}
        if ray.get_runtime_context().get_node_id() in nodes:
            return []
        return sorted(str(node["NodeManagerAddress"]) for node in alive_nodes() if node["NodeID"] in nodes)

    def node_ids(self) -> list[str]:
        """Return Ray's ids of the living nodes."""
        return [str(node["NodeID"]) for node in alive_nodes()]

    def count_nodes(self) -> int:
        """Return how many nodes are alive."""
        return len(alive_nodes())

    def count_cores(self) -> int:
        """Return how many cores Ray counts on all living nodes."""
        return int(sum(node["Resources"].get("CPU", 0.0) for node in alive_nodes()))


def nobody_listens(host: str, port: int) -> bool:
    """Whether a machine refuses connections to a port; False if it does not answer in time."""
    try:
        socket.create_connection((host, port), _REFUSED_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _names_of(node: Mapping[str, Any]) -> list[str]:
    return [str(node["NodeManagerAddress"]), *(f"{key}={value}" for key, value in node.get("Labels", {}).items())]


def refuse_foreign(states: Mapping[str, ApplicationState]) -> None:
    """Raise `EnvironmentFaultError` if foreign applications run, because applying a config would remove them."""
    foreign = sorted(name for name in states if not is_ours(name))
    if foreign:
        raise EnvironmentFaultError(
            f"other Serve applications run on this cluster: {', '.join(foreign)}. Deploying removes them; pass "
            "--replace if they may go, or use another cluster with --address."
        )


def check_nodes(config: ServeConfig) -> None:
    """Raise `EnvironmentFaultError` unless the cluster has the nodes and GPUs of a Serve config; Ray would wait for
    them without end."""
    problem = missing_from([(_names_of(n), float(n["Resources"].get("GPU", 0.0))) for n in alive_nodes()], config)
    if problem is not None:
        raise EnvironmentFaultError(problem)


def missing_from(nodes: Sequence[tuple[Sequence[str], float]], config: ServeConfig) -> str | None:
    """Return what the nodes lack for a Serve config; None: nothing. `nodes` has the names of each node (its address
    first) and how many GPUs Ray counts there."""
    gpus = {
        name: sum(count for names, count in nodes if name in names) for node_names, _ in nodes for name in node_names
    }
    # Number of processes by the name of their node ("": any), their GPU, and the GPU or MIG instance that they are on.
    held: dict[str, dict[str, dict[str, int]]] = {}
    for application in config.gpulets:
        gpu = None if application.spec is None else application.spec.gpu
        on_node = held.setdefault(application.actor.node or "", {})
        if gpu is not None and gpu.type != "cpu":
            on_node.setdefault(gpu.device, {}).setdefault(gpu.id, 0)
            on_node[gpu.device][gpu.id] += 1
    missing = sorted(held.keys() - gpus.keys() - {""})
    if missing:
        known = sorted({name for names, _ in nodes for name in names if name == names[0] or "=" in missing[0]})
        return (
            f"the plan has gpu-lets on node {', '.join(missing)}, the cluster has {', '.join(known)}. Start "
            "Ray there (`ray start --address`, `--labels` for a label), or correct `address` or `label` in the cluster "
            "file and plan again."
        )
    on_gpus = {gpu: count for on_node in held.values() for on in on_node.values() for gpu, count in on.items()}
    crowded = {gpu: count for gpu, count in on_gpus.items() if count > MOST_CLIENTS}
    if crowded and config.entry.user_config.plan.mps != "off":
        shown = ", ".join(f"{gpu} ({count})" for gpu, count in crowded.items())
        return f"more gpu-lets than CUDA MPS has clients on a GPU, {MOST_CLIENTS}: {shown}. Plan with fewer per GPU."
    short = sorted(node for node, on_node in held.items() if node and len(on_node) > gpus[node])
    everywhere, needed = sum(count for _, count in nodes), sum(map(len, held.values()))
    if short or needed > everywhere:
        where = f"node {', '.join(short)} has" if short else "the cluster has"
        have = ", ".join(f"{gpus[node]:g}" for node in short) if short else f"{everywhere:g}"
        needs = ", ".join(str(len(held[node])) for node in short) if short else str(needed)
        return (
            f"the plan has gpu-lets on {needs} GPUs, and {where} {have} of them by Ray's count. Start Ray there with "
            "`--num-gpus`, as many as the plan uses, or plan on those that are there."
        )
    return None


def check_cluster() -> None:
    """Raise `EnvironmentFaultError` unless every node of the cluster has this version of Tenuto. At most 32 nodes are
    checked."""
    import ray

    def version() -> str:
        try:
            from tenuto import __version__ as found
        except ImportError as error:
            return f"none ({error})"
        return found

    versions = {on_node(node["NodeID"], version): node for node in alive_nodes()[:_MOST_CHECKED_NODES]}
    ready, _ = ray.wait(list(versions), num_returns=len(versions), timeout=_CHECK_S)
    wrong = []
    for answer, node in versions.items():
        found = ray.get(answer, timeout=ANSWER_S) if answer in ready else "unknown: the node does not answer"
        if found != __version__:
            wrong.append(f"{node['NodeManagerAddress']} has {found}")
    if wrong:
        raise EnvironmentFaultError(
            f"this is Tenuto {__version__}; {'; '.join(wrong)}. Install the same version on every node, in the Python "
            "that `ray start` uses there."
        )
