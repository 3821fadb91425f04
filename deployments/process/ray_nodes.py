"""The nodes of the Ray cluster that this process is connected to, and tasks on one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenuto.deployments.process.limits import ANSWER_S, within


def alive_nodes() -> list[dict[str, Any]]:
    """Return the living nodes, as Ray describes them."""
    import ray

    return [node for node in within(ANSWER_S, ray.nodes) if node["Alive"]]


def draining_nodes() -> dict[str, float]:
    """Return the ids of the nodes that Ray drains, each with the time when it ends, in seconds since the epoch; 0 when
    Ray does not know it."""
    from ray._private.state import state

    return {str(node): ends_ms / 1000.0 for node, ends_ms in within(ANSWER_S, state.get_draining_nodes).items()}


def staying_nodes() -> list[dict[str, Any]]:
    """Return the living nodes that Ray does not drain, as Ray describes them."""
    leaving = draining_nodes()
    return [node for node in alive_nodes() if node["NodeID"] not in leaving]


def on_node(node_id: str, run: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a task on a node, once, beside what keeps its cores busy; return Ray's reference to its
    answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(run).remote(*arguments)
