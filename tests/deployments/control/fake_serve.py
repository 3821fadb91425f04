"""Serve and the gateways of a cluster as far as the controller sees them, on a clock that a test turns."""

from __future__ import annotations

from typing import Any

from tenuto.deployments.serve.config import ServeConfig, application_name
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.states import ApplicationState
from tenuto.deployments.wire.status import DispatchingStatus, GpuletStatus, ModelStatus
from tenuto.errors import EnvironmentFaultError

__all__ = ["FakeServe"]


class FakeServe:
    """Starts what a config says after `start_s`; `broken` applications never come up. Processes take `end_s` to end.
    Unanswered requests are noted."""

    def __init__(
        self, deployment: Deployment | None, start_s: float = 5.0, load_s: float = 3.0, end_s: float = 0.0
    ) -> None:
        self.now_s = 0.0
        self.start_s, self.load_s, self.end_s = start_s, load_s, end_s
        self._held: dict[str, dict[str, int]] = {}  # largest batches by gpu-let application
        self._loading: dict[str, tuple[float, dict[str, int]]] = {}  # until when, and what then
        self.broken: dict[str, str] = {}
        self.dead_nodes: set[str] = set()
        self.leaving: dict[str, float] = {}
        self.is_silent = False
        self.counts: dict[str, dict[str, int]] = {}
        self.unserved: list[tuple[float, str]] = []
        self.ended: list[tuple[float, str]] = []
        self.configs: list[ServeConfig] = []
        self.since: dict[str, float] = {}
        self._plan: dict[str, Any] = {}
        if deployment is not None:
            self.apply(deployment.config())
            self.since = dict.fromkeys(self.since, -1000.0)

    # --- the clock --------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass, with a request to every model."""
        self.now_s += seconds
        for spec in self._plan.get("models", ()):
            name = spec["name"]
            counts = self.counts.setdefault(
                name, dict.fromkeys(("submitted", "samples", "ok", "late", "expired", "rejected", "failed"), 0)
            )
            served = any(
                self._is_up(gpulet["id"])
                and all(self._holds(gpulet["id"]).get(m["name"], 0) >= m["batch_size"] for m in gpulet["models"])
                and name in [model["name"] for model in gpulet["models"]]
                for gpulet in self._plan["gpulets"]
            )
            counts["submitted"] += 1
            counts["samples"] += 1
            counts["ok" if served else "expired"] += 1
            if not served:
                self.unserved.append((self.now_s, name))

    # --- Serve ------------------------------------------------------------------------------------------------------

    def apply(self, config: ServeConfig) -> None:
        self.configs.append(config)
        names = {application.name for application in config.applications}
        self.ended += [(self.now_s, name) for name in self.since if name not in names]
        for application in config.gpulets:
            name = application.name
            wanted = {program.name: program.batch_size for program in application.user_config.programs}
            present = self._held.get(name)
            if present is None or all(present.get(model, 0) >= size for model, size in wanted.items()):
                self._held[name] = wanted
                self._loading.pop(name, None)
            elif name not in self._loading or self._loading[name][1] != wanted:
                self._loading[name] = self.now_s + self.load_s, wanted
        self.since = {name: self.since.get(name, self.now_s) for name in names}
        self._plan = config.entry.user_config.plan.to_data()

    def states(self) -> dict[str, ApplicationState]:
        return {
            name: ApplicationState("DEPLOY_FAILED", f"Traceback\n{self.broken[name]}")
            if name in self.broken
            else ApplicationState("RUNNING")
            for name in (*self.since, *self._ending())
        }

    def _ending(self) -> list[str]:
        return [name for at_s, name in self.ended if name not in self.since and self.now_s < at_s + self.end_s]

    def node_names(self) -> frozenset[str]:
        return frozenset({"10.0.0.1", "10.0.0.2"} - self.dead_nodes)

    def leaving_nodes(self) -> dict[str, float]:
        return self.leaving

    # --- the gateways -----------------------------------------------------------------------------------------------

    def status(self) -> DispatchingStatus:
        if self.is_silent:
            raise EnvironmentFaultError("no gateway answers")
        return DispatchingStatus(
            plan=self._plan,
            models={name: ModelStatus(counted_at_s=self.now_s, **counts) for name, counts in self.counts.items()},
            gpulets=[
                GpuletStatus(id=gpulet["id"], up=self._is_up(gpulet["id"]), models=dict(self._holds(gpulet["id"])))
                for gpulet in self._plan["gpulets"]
            ],
        )

    def _holds(self, gpulet: str) -> dict[str, int]:
        name = application_name(gpulet)
        if name in self._loading and self._loading[name][0] <= self.now_s:
            self._held[name] = self._loading.pop(name)[1]
        return self._held.get(name, {})

    def _is_up(self, gpulet: str) -> bool:
        name = application_name(gpulet)
        return name in self.since and name not in self.broken and self.now_s - self.since[name] >= self.start_s
