"""The history of a deployment. It is kept in the cluster's key-value store, which every node reaches.

The store ends with the cluster, as the deployment does. When Ray keeps its state in an external Redis, the store
survives the loss of the head.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Protocol

from tenuto.deployments.process.limits import ANSWER_S, within
from tenuto.deployments.serve.applications import Deployed
from tenuto.deployments.serve.deployment import Deployment
from tenuto.documents import parse_document
from tenuto.errors import EnvironmentFaultError, refused

KEPT_VERSIONS = 100  # limit: versions that are kept, and that `tenuto history` shows


class Store(Protocol):
    """Named values that outlive a process."""

    def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if there is none."""

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key."""

    def add(self, key: str, value: bytes) -> bool:
        """Set the value of a key if it has none; return whether it was set."""

    def keys(self, prefix: str) -> list[str]:
        """Return the keys with this prefix, in order."""

    def delete(self, key: str) -> None:
        """Delete a key."""


class ClusterStore:
    """The key-value store of the Ray cluster that this process is connected to."""

    _NAMESPACE = "tenuto"

    def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if there is none."""
        from ray.experimental.internal_kv import _internal_kv_get

        found: bytes | None = within(ANSWER_S, _internal_kv_get, key, namespace=self._NAMESPACE)
        return found

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        from ray.experimental.internal_kv import _internal_kv_put

        within(ANSWER_S, _internal_kv_put, key, value, overwrite=True, namespace=self._NAMESPACE)

    def add(self, key: str, value: bytes) -> bool:
        """Set the value of a key if it has none; return whether it was set."""
        from ray.experimental.internal_kv import _internal_kv_put

        # Ray returns whether there was one already.
        return not within(ANSWER_S, _internal_kv_put, key, value, overwrite=False, namespace=self._NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys with this prefix, in order."""
        from ray.experimental.internal_kv import _internal_kv_list

        return sorted(key.decode() for key in within(ANSWER_S, _internal_kv_list, prefix, namespace=self._NAMESPACE))

    def delete(self, key: str) -> None:
        """Delete a key."""
        from ray.experimental.internal_kv import _internal_kv_del

        within(ANSWER_S, _internal_kv_del, key, namespace=self._NAMESPACE)


@dataclass(frozen=True)
class Version:
    """One deployment that was reached. `at_s` is seconds since 1970. `by` is the command that made it, or the
    controller."""

    number: int
    at_s: float
    by: str
    why: str
    deployment: Deployment


class History:
    """The versions of a deployment, oldest first. The last one should run."""

    _PREFIX = "version/"

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, deployment: Deployment, by: str, why: str) -> Version:
        """Append a version. When there are more than `KEPT_VERSIONS`, the oldest are deleted."""
        numbers = self._numbers()
        number = numbers[-1] + 1 if numbers else 1
        while True:
            version = Version(number, time.time(), by, why, deployment)
            data = {
                "at_s": version.at_s,
                "by": by,
                "why": why,
                "deployment": deployment.model_dump(mode="json", exclude_defaults=True),
            }
            if self._store.add(self._key(number), json.dumps(data).encode()):
                break
            number += 1  # another process was faster
        for old in numbers[: max(0, len(numbers) + 1 - KEPT_VERSIONS)]:
            self._store.delete(self._key(old))
        return version

    def all(self) -> list[Version]:
        """Return every version that is kept."""
        return [version for number in self._numbers() if (version := self._read(number)) is not None]

    def latest(self) -> Version | None:
        """Return the last version; None if nothing was ever deployed."""
        numbers = self._numbers()
        return self._read(numbers[-1]) if numbers else None

    def latest_number(self) -> int:
        """Return the number of the last version; 0 if nothing was ever deployed."""
        return max(self._numbers(), default=0)

    def before(self) -> Version:
        """Return the last version with another plan than the newest; `EnvironmentFaultError` if there is none."""
        versions = self.all()
        earlier = [version for version in versions if version.deployment.plan != versions[-1].deployment.plan]
        if not earlier:
            nothing = "nothing is deployed on this cluster. Use `tenuto deploy PLAN`."
            raise EnvironmentFaultError("no other plan ran before. See `tenuto history`." if versions else nothing)
        return earlier[-1]

    def running(self, deployed: Deployed) -> Deployment:
        """Return the deployment that runs. When `serve deploy` brought it up, it first becomes a version, so that a
        rollback to it is possible."""
        latest, deployment = self.latest(), deployed.deployment
        if latest is not None:
            known = latest.deployment
            deployment = deployment.model_copy(update={"executor": known.executor})
            if not deployed.by_serve:
                return known.with_plan(deployment.plan)
            if known.config().entry == deployment.config().entry:
                return known
        if deployed.by_serve:
            deployment = deployed.deployment
            self.add(deployment, "serve deploy", "found running")
        return deployment

    def get(self, number: int) -> Version:
        """Return a version; raises `InvalidInputError` if it is not kept."""
        version = self._read(number)
        if version is None:
            numbers = self._numbers()
            rule = f"is not kept; {f'kept are {numbers[0]} to {numbers[-1]}' if numbers else 'nothing was deployed'}"
            raise refused("version", number, rule, "See `tenuto history`.")
        return version

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
