"""The Serve applications of a cluster: what runs, what is to run, what has to be there before anything is applied."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto import __version__
from tenuto.deployments.process.limits import ANSWER_S, within
from tenuto.deployments.serve.building import deploy_applications
from tenuto.deployments.serve.config import (
    CONTROL_APPLICATION,
    ENTRY_APPLICATION,
    GPULET_PREFIX,
    HEAD_RESOURCE,
    ServeConfig,
    is_ours,
)
from tenuto.deployments.serve.deployment import MOST_CLIENTS, Deployment
from tenuto.deployments.serve.states import (
    ApplicationState,
    application_states,
    delete_applications,
    serve_client,
    serve_processes,
)
from tenuto.errors import EnvironmentFaultError

_MOST_CHECKED_NODES = 32  # limit: nodes whose version of Tenuto is asked for; it rarely differs on the others only
_REFUSED_S = 0.2  # limit: a machine that is there refuses at once
_CHECK_S = 90.0  # limit: a node's first worker imports Ray; on a busy machine that takes long


@dataclass(frozen=True)
class Deployed:
    """What is to run; its executor is not known where Tenuto deployed it. `by_serve`: `serve deploy` brought it."""

    deployment: Deployment
    by_serve: bool


class Applications:
    """Serve on the cluster that this process is connected to; Serve has to run there."""

    def apply(self, config: ServeConfig) -> None:
        """Let the applications of a Serve config run, and of ours no others."""
        deploy_applications(config)

    def states(self) -> dict[str, ApplicationState]:
        """Return every application by name."""
        return application_states()

    def deployed(self) -> Deployed | None:
        """Return what of ours is to run, as Serve has it; None where there is none.

        Raises:
            InvalidInputError: it was not made by Tenuto, or by another version.
        """
        client = serve_client()
        details = within(ANSWER_S, client.get_serve_details) if client else {"applications": {}}
        entry = details["applications"].get(ENTRY_APPLICATION)
        if entry is None or entry["status"] == "DELETING":
            return None
        applications = [
            {
                "name": name,
                "args": (each["deployed_app_config"] or {}).get("args", {}),
                "deployments": [deployment["deployment_config"] for deployment in each["deployments"].values()],
            }
            for name, each in details["applications"].items()
            if is_ours(name) and each["deployments"]
        ]
        # Where Serve's proxies listen is not said by what is deployed: they are older.
        found = Deployment.from_data({"applications": applications}, origin="what runs on Serve")
        return Deployed(found, entry["source"] == "declarative")

    def delete(self, names: Collection[str]) -> None:
        """Drain and remove applications: the entry first, so that no request comes to a gpu-let that is about to go.

        Raises:
            EnvironmentFaultError: Serve does not remove one.
        """
        first = [name for name in (CONTROL_APPLICATION, ENTRY_APPLICATION) if name in names]
        for group in (*([name] for name in first), sorted(set(names) - set(first))):
            if group:
                delete_applications(group)

    def node_names(self) -> frozenset[str]:
        """Return what the nodes that are alive are found by: their addresses, and their labels as `key=value`.

        Ray asks a node for 15 s before it takes it for lost; one where nobody listens for Ray any more is lost now.
        """
        return frozenset(
            name
            for node in _alive_nodes()
            if not nobody_listens(str(node["NodeManagerAddress"]), int(node["NodeManagerPort"]))
            for name in _names_of(node)
        )

    def others_at(self, names: Collection[str]) -> list[str]:
        """Return what of ours beside gpu-lets, and of Ray's, is on nodes found by some names, in words; a kind once."""
        nodes = {str(node["NodeID"]): node for node in _alive_nodes() if not set(names).isdisjoint(_names_of(node))}
        is_head = any(HEAD_RESOURCE in node["Resources"] for node in nodes.values())
        kinds = {
            each.deployment
            for each in serve_processes()
            if each.node_id in nodes and is_ours(each.application) and not each.application.startswith(GPULET_PREFIX)
        }
        return [*(["Ray's head"] if is_head else []), *sorted(kinds)]

    def count_nodes(self) -> int:
        """Return how many nodes are alive."""
        return len(_alive_nodes())

    def count_cores(self) -> int:
        """Return how many cores Ray counts on all nodes that are alive."""
        return int(sum(node["Resources"].get("CPU", 0.0) for node in _alive_nodes()))


def nobody_listens(host: str, port: int) -> bool:
    """Whether a machine says that nobody listens on a port; False where it says nothing in time."""
    try:
        socket.create_connection((host, port), _REFUSED_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _alive_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in within(ANSWER_S, ray.nodes) if node["Alive"]]


def _names_of(node: Mapping[str, Any]) -> list[str]:
    return [str(node["NodeManagerAddress"]), *(f"{key}={value}" for key, value in node.get("Labels", {}).items())]


def refuse_foreign(states: Mapping[str, ApplicationState]) -> None:
    """Raise `EnvironmentFaultError` where applications run that are not ours: applying a config removes them."""
    foreign = sorted(name for name in states if not is_ours(name))
    if foreign:
        raise EnvironmentFaultError(
            f"other Serve applications run on this cluster: {', '.join(foreign)}. Deploying removes them; pass "
            "--replace if they may go, or use another cluster with --address."
        )


def check_nodes(config: ServeConfig) -> None:
    """Raise `EnvironmentFaultError` unless the cluster has the nodes and GPUs of a Serve config; Ray would wait for
    them without end."""
    problem = missing_from([(_names_of(n), float(n["Resources"].get("GPU", 0.0))) for n in _alive_nodes()], config)
    if problem is not None:
        raise EnvironmentFaultError(problem)


def missing_from(nodes: Sequence[tuple[Sequence[str], float]], config: ServeConfig) -> str | None:
    """Return what nodes, each with what it is found by (its address first) and the GPUs that Ray counts there, lack
    for a Serve config; None: nothing."""
    gpus = {name: sum(count for names, count in nodes if name in names) for found, _ in nodes for name in found}
    held: dict[str, dict[str, int]] = {}  # processes by what their node is found by ("": any) and their GPU
    for application in config.gpulets:
        gpu = None if application.spec is None else application.spec.gpu
        on_node = held.setdefault(application.actor.node or "", {})
        if gpu is not None and gpu.type != "cpu":
            on_node[gpu.id] = on_node.get(gpu.id, 0) + 1
    missing = sorted(held.keys() - gpus.keys() - {""})
    if missing:
        known = sorted({name for names, _ in nodes for name in names if name == names[0] or "=" in missing[0]})
        return (
            f"the plan has gpu-lets on node {', '.join(missing)}, the cluster has {', '.join(known)}. Start "
            "Ray there (`ray start --address`, `--labels` for a label), or correct `address` or `label` in the cluster "
            "file and plan again."
        )
    crowded = {gpu: count for on_node in held.values() for gpu, count in on_node.items() if count > MOST_CLIENTS}
    if crowded and config.entry.user_config.plan.mps != "off":
        shown = ", ".join(f"{gpu} ({count})" for gpu, count in crowded.items())
        return f"more gpu-lets than CUDA MPS has clients on a GPU, {MOST_CLIENTS}: {shown}. Plan with fewer per GPU."
    short = sorted(node for node, on_node in held.items() if node and len(on_node) > gpus[node])
    everywhere, wanted = sum(count for _, count in nodes), sum(map(len, held.values()))
    if short or wanted > everywhere:
        where = f"node {', '.join(short)} has" if short else "the cluster has"
        have = ", ".join(f"{gpus[node]:g}" for node in short) if short else f"{everywhere:g}"
        needs = ", ".join(str(len(held[node])) for node in short) if short else str(wanted)
        return (
            f"the plan has gpu-lets on {needs} GPUs, and {where} {have} of them by Ray's count. Start Ray there with "
            "`--num-gpus`, as many as the plan uses, or plan on those that are there."
        )
    return None


def check_cluster() -> None:
    """Raise `EnvironmentFaultError` unless every node of the cluster has this version of Tenuto; it is looked at on at
    most 32 of them."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def version() -> str:
        try:
            from tenuto import __version__ as found
        except ImportError as error:
            return f"none ({error})"
        return found

    ask = ray.remote(num_cpus=0, max_retries=0)(version)
    nodes = _alive_nodes()[:_MOST_CHECKED_NODES]
    asked = {
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(): node
        for node in nodes
    }
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_CHECK_S)
    wrong = []
    for answer, node in asked.items():
        found = ray.get(answer, timeout=ANSWER_S) if answer in ready else "unknown: the node does not answer"
        if found != __version__:
            wrong.append(f"{node['NodeManagerAddress']} has {found}")
    if wrong:
        raise EnvironmentFaultError(
            f"this is Tenuto {__version__}; {'; '.join(wrong)}. Install the same version on every node, in the Python "
            "that `ray start` uses there."
        )
