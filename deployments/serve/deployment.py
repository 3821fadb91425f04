"""What is deployed, as one document: a plan and all else that its Serve config is made of; and the history of such
documents, kept where the cluster keeps its own state.

The cluster's key-value store ends with the cluster, as the deployment does, and survives the head where Ray is made to
(an external Redis). Every node reaches it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import Field

from tenuto.deployments.process.limits import ANSWER_S, within
from tenuto.deployments.serve.config import HEAD_NODE, NODE_SLOT, serve_config
from tenuto.deployments.serve.sub_clusters import fits_plan, parted
from tenuto.documents import StrictModel, parse_document
from tenuto.errors import EnvironmentFaultError, refused
from tenuto.placement import Gpulet, Plan

CONTROL_APPLICATION = "tenuto-control"
KEPT_VERSIONS = 100  # limit: plans that `tenuto history` shows


class Deployment(StrictModel):
    """A plan and how it is served. `control` is the controller's settings as data; None: no controller.

    `nodes`: over which gateways and dispatchers are spread, found when the deployment begins. So are `gateways` where
    they are 0; see `fitting_gateways`.
    """

    plan: dict[str, Any]
    executor: Literal["auto", "torch", "emulated"] = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    proxy_port: int | None = None
    operator_port: int | None = None
    access: dict[str, Any] = Field(default_factory=dict)
    log_json: bool = False
    encrypt: bool = False
    scheduler: str = "deferred"
    scheduler_options: dict[str, Any] = Field(default_factory=dict)
    gateway_options: dict[str, Any] = Field(default_factory=dict)
    gateways: int = 0
    dispatchers: int = 2
    nodes: int = 1
    partition: dict[str, int] | None = None
    control: dict[str, Any] | None = None

    def read_plan(self) -> Plan:
        """Return the plan; raises `InvalidInputError` for one that breaks a rule."""
        return Plan.from_data(self.plan)

    def with_plan(self, plan: Plan) -> Deployment:
        """Return the same deployment of another plan, parted anew where its partition does not fit that."""
        partition = self.partition
        if partition is not None and plan.models and not fits_plan(plan, partition):
            partition = parted(plan, partition)
        return self.model_copy(update={"plan": plan.to_data(), "partition": partition})

    def config(
        self, plan: Plan | None = None, *, also: Mapping[str, int] | None = None, standby: Sequence[Gpulet] = ()
    ) -> dict[str, Any]:
        """Return the Serve config, of another plan than its own where one is given, with dispatchers that hold what
        they have in another partition `also` and are connected to gpu-lets on `standby`, which run beside it.

        Raises:
            InvalidInputError: a partition that does not fit the plan.
        """
        config = serve_config(
            plan or self.read_plan(),
            executor=self.executor,
            host=self.host,
            port=self.port,
            proxy_port=self.proxy_port,
            operator_port=self.operator_port,
            access=self.access,
            log_json=self.log_json,
            encrypt=self.encrypt,
            scheduler=self.scheduler,
            scheduler_options=self.scheduler_options,
            gateway_options=self.gateway_options,
            gateways=max(1, self.gateways),
            dispatchers=self.dispatchers,
            nodes=self.nodes,
            partition=self.partition,
            also=also,
            standby=standby,
        )
        if self.control is not None:
            config["applications"].append(_control_application(self.control))
        return config


# Two gateways, the dispatcher that schedules, and Ray with all that waits: each keeps a core busy under full load.
_CORES_OF_TWO = 4  # derived: of two gateways


def fitting_gateways(cores: int, gpulets: int) -> int:
    """Return how many gateways a deployment has where nobody says: two where each of their processes, and each gpu-let,
    has a core to itself, as one that dies then costs only what it had in hand; else one, with the dispatcher in its
    process, as on fewer cores two gateways serve less than one."""
    return 2 if cores >= _CORES_OF_TWO + gpulets else 1


def _control_application(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": CONTROL_APPLICATION,
        "route_prefix": None,
        "import_path": "tenuto.deployments.control.service:build",
        "args": {},
        "deployments": [
            {
                "name": "control",
                "num_replicas": 1,
                "max_ongoing_requests": 100,
                "health_check_period_s": 2.0,
                "graceful_shutdown_timeout_s": 5.0,
                # Beside Serve's own controller: the loss of another node then finds it there, and it acts at once.
                "ray_actor_options": {"num_cpus": 0, "resources": {f"node:{HEAD_NODE}": NODE_SLOT}},
                "user_config": {"settings": dict(settings)},
            }
        ],
    }


def is_ours(application: str) -> bool:
    """Whether a Serve application of this name is one of ours."""
    return application in ("tenuto", CONTROL_APPLICATION) or application.startswith(("gpulet-", "dispatcher-"))


class Store(Protocol):
    """Named values that outlive a process."""

    def get(self, key: str) -> bytes | None:
        """Return a value; None where there is none."""

    def put(self, key: str, value: bytes) -> None:
        """Keep a value in place of the one before."""

    def add(self, key: str, value: bytes) -> bool:
        """Keep a value, unless there is one; return whether it was kept."""

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin so, in order."""

    def delete(self, key: str) -> None:
        """Forget a value."""


class ClusterStore:
    """The key-value store of the Ray cluster that this process is connected to."""

    _NAMESPACE = "tenuto"

    def get(self, key: str) -> bytes | None:
        """Return a value; None where there is none."""
        from ray.experimental.internal_kv import _internal_kv_get

        found: bytes | None = within(ANSWER_S, _internal_kv_get, key, namespace=self._NAMESPACE)
        return found

    def put(self, key: str, value: bytes) -> None:
        """Keep a value in place of the one before."""
        from ray.experimental.internal_kv import _internal_kv_put

        within(ANSWER_S, _internal_kv_put, key, value, overwrite=True, namespace=self._NAMESPACE)

    def add(self, key: str, value: bytes) -> bool:
        """Keep a value, unless there is one; return whether it was kept."""
        from ray.experimental.internal_kv import _internal_kv_put

        # Ray returns whether there was one already.
        return not within(ANSWER_S, _internal_kv_put, key, value, overwrite=False, namespace=self._NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin so, in order."""
        from ray.experimental.internal_kv import _internal_kv_list

        return sorted(key.decode() for key in within(ANSWER_S, _internal_kv_list, prefix, namespace=self._NAMESPACE))

    def delete(self, key: str) -> None:
        """Forget a value."""
        from ray.experimental.internal_kv import _internal_kv_del

        within(ANSWER_S, _internal_kv_del, key, namespace=self._NAMESPACE)


@dataclass(frozen=True)
class Version:
    """One deployment that was reached. `at_s` is seconds since 1970, `by` who made it: a command or the controller."""

    number: int
    at_s: float
    by: str
    why: str
    deployment: Deployment


class History:
    """The versions of a deployment, oldest first; the last is what should run."""

    _PREFIX = "version/"

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, deployment: Deployment, by: str, why: str) -> Version:
        """Append a version; the oldest above `KEPT_VERSIONS` go."""
        numbers = self._numbers()
        number = numbers[-1] + 1 if numbers else 1
        while True:
            version = Version(number, time.time(), by, why, deployment)
            data = {
                "at_s": version.at_s,
                "by": by,
                "why": why,
                "deployment": deployment.model_dump(exclude_defaults=True),
            }
            if self._store.add(self._key(number), json.dumps(data).encode()):
                break
            number += 1  # somebody else was faster
        for old in numbers[: max(0, len(numbers) + 1 - KEPT_VERSIONS)]:
            self._store.delete(self._key(old))
        return version

    def all(self) -> list[Version]:
        """Return every version that is kept."""
        return [version for number in self._numbers() if (version := self._read(number)) is not None]

    def latest(self) -> Version | None:
        """Return the last version; None where nothing was ever deployed."""
        numbers = self._numbers()
        return self._read(numbers[-1]) if numbers else None

    def before(self) -> Version:
        """Return the last version with another plan than the newest; `EnvironmentFaultError` if there is none."""
        versions = self.all()
        found = [version for version in versions if version.deployment.plan != versions[-1].deployment.plan]
        if not found:
            nothing = "nothing is deployed on this cluster. Use `tenuto deploy PLAN`."
            raise EnvironmentFaultError("no other plan ran before. See `tenuto history`." if versions else nothing)
        return found[-1]

    def get(self, number: int) -> Version:
        """Return a version; raises `InvalidInputError` where it is not kept."""
        found = self._read(number)
        if found is None:
            kept = self._numbers()
            rule = f"is not kept; {f'kept are {kept[0]} to {kept[-1]}' if kept else 'nothing was deployed'}"
            raise refused("version", number, rule, "See `tenuto history`.")
        return found

    def clear(self) -> None:
        """Forget everything, once nothing is deployed any more."""
        for number in self._numbers():
            self._store.delete(self._key(number))

    def _numbers(self) -> list[int]:
        return [int(key.removeprefix(self._PREFIX)) for key in self._store.keys(self._PREFIX)]

    def _key(self, number: int) -> str:
        return f"{self._PREFIX}{number:08d}"

    def _read(self, number: int) -> Version | None:
        raw = self._store.get(self._key(number))
        if raw is None:
            return None
        data = json.loads(raw)
        deployment = parse_document(Deployment, data["deployment"], origin=f"version {number}")
        return Version(number, data["at_s"], data["by"], data["why"], deployment)
