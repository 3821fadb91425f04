"""The Serve config as types: one application per gpu-let and one for the entry, so that a change touches only what it
must. `tenuto.deployments.serve.deployment` makes these objects; only this module turns them into plain data.

Settings that only a restart can change (GPU, share, memory cap, executor) are in `args` and `ray_actor_options`.
Settings that can change in place (models, batch sizes, the dispatcher's plan) are in `user_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Generic, TypeVar

from tenuto.deployments.serve.user_config import (
    ControlConfig,
    DispatcherConfig,
    GatewayConfig,
    GpuletConfig,
    GpuletSpec,
    Listen,
    UserConfig,
)
from tenuto.errors import Problem, raise_if_any

ENTRY_APPLICATION = "tenuto"
CONTROL_APPLICATION = "tenuto-control"
OFFLINE_APPLICATION = "tenuto-offline"  # the store of batches, where there is one
GPULET_PREFIX = "gpulet-"
DISPATCHER_PREFIX = "dispatcher-"
HEAD_NODE = "__internal_head__"  # Ray's name of the head in its resources, besides the head's address
HEAD_RESOURCE = f"node:{HEAD_NODE}"

_NODE = "node:"  # Ray's name of a node's own resource is this and the node's address
_NODE_SLOT = 0.001  # unit: of that resource, of which each node has 1: so 1,000 gpu-lets fit a node
# Serve replaces a process that did not answer three times in a row, which takes 15 s. A process that only lacks
# processor time answers one time in three. Peers on the same machine kill a stopped process much earlier.
_HEALTH_TIMEOUT_S = 5.0  # limit: for one answer

C = TypeVar("C", bound=UserConfig)


def application_name(gpulet_id: str) -> str:
    """Return the name of a gpu-let's Serve application."""
    return GPULET_PREFIX + gpulet_id.replace("/", "-")


def dispatcher_name(sub_cluster: str) -> str:
    """Return the name of the Serve application of a sub-cluster's dispatcher."""
    return DISPATCHER_PREFIX + sub_cluster


def is_ours(application: str) -> bool:
    """Whether a Serve application of this name is one of ours."""
    return application in (ENTRY_APPLICATION, CONTROL_APPLICATION, OFFLINE_APPLICATION) or application.startswith(
        (GPULET_PREFIX, DISPATCHER_PREFIX)
    )


@dataclass(frozen=True)
class ActorOptions:
    """Where Ray starts a process, and the variables in its environment.

    `node`: the address of the node, or a label as `key=value`; None: any node. `num_gpus`: taken of Ray's count of
    GPUs.
    """

    node: str | None = None
    num_gpus: float = 0.0
    environment: tuple[tuple[str, str], ...] = ()

    def to_data(self) -> dict[str, Any]:
        """Return the options in the form that Ray reads."""
        data: dict[str, Any] = {"num_cpus": 0}
        if self.node is not None and "=" in self.node:
            data["label_selector"] = dict([self.node.split("=", 1)])
        elif self.node is not None:
            data["resources"] = {_NODE + self.node: _NODE_SLOT}  # Ray gives every node one unit of its own resource
        if self.num_gpus:
            data["num_gpus"] = self.num_gpus
        if self.environment:
            data["runtime_env"] = {"env_vars": dict(self.environment)}
        return data


@dataclass(frozen=True)
class ServeApplication(Generic[C]):
    """An application of ours: one Serve deployment of one or more processes.

    `module`: the module whose `build` makes the application. `spec`: only gpu-lets have one. `most_per_node`: how many
    of its processes may be on one node; None: any number.
    """

    name: str
    deployment: str
    module: str
    user_config: C
    spec: GpuletSpec | None = None
    actor: ActorOptions = ActorOptions()
    processes: int = 1
    most_per_node: int | None = None
    most_ongoing: int = 100
    health_period_s: float = 2.0

    def same_processes(self, other: ServeApplication[C]) -> bool:
        """Whether Serve keeps the processes of `other` for this application. Their number and `user_config` may
        differ."""
        return replace(self, user_config=other.user_config, processes=1) == replace(other, processes=1)

    def to_data(self) -> dict[str, Any]:
        """Return the application in the form that Serve reads."""
        spread = {} if self.most_per_node is None else {"max_replicas_per_node": self.most_per_node}
        return {
            "name": self.name,
            "route_prefix": None,
            "import_path": f"{self.module}:build",
            "args": {} if self.spec is None else {"spec": self.spec.model_dump(mode="json")},
            "deployments": [
                {
                    "name": self.deployment,
                    "num_replicas": self.processes,
                    **spread,
                    "max_ongoing_requests": self.most_ongoing,
                    "health_check_period_s": self.health_period_s,
                    "health_check_timeout_s": _HEALTH_TIMEOUT_S,
                    "graceful_shutdown_wait_loop_s": 0.2,  # pace: of Serve's looks whether a process has ended
                    "graceful_shutdown_timeout_s": self.user_config.ends_s,
                    "ray_actor_options": self.actor.to_data(),
                    "user_config": self.user_config.to_data(),
                }
            ],
        }


@dataclass(frozen=True)
class ServeConfig:
    """All applications of a deployment. `proxy_port`: the port of Serve's proxies, which lead to none of them.
    `offline`: the store of batches, if there is to be one."""

    entry: ServeApplication[GatewayConfig]
    dispatchers: tuple[ServeApplication[DispatcherConfig], ...]
    gpulets: tuple[ServeApplication[GpuletConfig], ...]
    control: ServeApplication[ControlConfig]
    proxy_port: int
    log_json: bool
    offline: ServeApplication[GatewayConfig] | None = None

    @property
    def applications(self) -> tuple[ServeApplication[Any], ...]:
        """All applications, the entry first."""
        offline = () if self.offline is None else (self.offline,)
        return (self.entry, *self.dispatchers, *self.gpulets, *offline, self.control)

    @property
    def sockets(self) -> tuple[tuple[Listen, str], ...]:
        """Where its processes listen, each with the option that says so."""
        gateway = self.entry.user_config
        named = (
            (gateway.listen, "--port"),
            (Listen(port=self.proxy_port), "--proxy-port"),
            (gateway.operators, "--operator-port"),
            (gateway.grpc, "--grpc-port"),
        )
        return tuple((listen, option) for listen, option in named if listen is not None)

    def check_ports(self) -> None:
        """Raise `InvalidInputError` if two sockets have the same port, unless each is on an address of its own."""
        problems: list[Problem] = []
        for (one, first), (other, second) in combinations(self.sockets, 2):
            is_apart = one.is_loopback != other.is_loopback and not {one.host, other.host} & {"0.0.0.0", "::"}
            if one.port == other.port and not is_apart:
                cure = f"Give {first} and {second} different ports."
                problems.append(Problem(second, other.port, f"is the port of {first} too", cure))
        raise_if_any(problems)

    def to_data(self) -> dict[str, Any]:
        """Return plain data, ready for `serve deploy`."""
        return {
            "proxy_location": "HeadOnly",
            # Serve's proxies speak no TLS, and nobody needs them from other machines.
            "http_options": {"host": "127.0.0.1", "port": self.proxy_port, "request_timeout_s": None},
            "logging_config": {"enable_access_log": False, **({"encoding": "JSON"} if self.log_json else {})},
            "applications": [application.to_data() for application in self.applications],
        }
