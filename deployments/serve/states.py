"""The states of applications and processes, as Serve tells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.deployments.process.limits import ANSWER_S, within
from tenuto.deployments.serve.config import GPULET_PREFIX
from tenuto.errors import EnvironmentFaultError

_DELETES_S = 70.0  # limit: Serve's own limit is 60 s


@dataclass(frozen=True)
class ApplicationState:
    """The state of one application. `message` says why it is broken, or what it waits for."""

    status: str
    message: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether Serve gave its start up."""
        return self.status == "DEPLOY_FAILED"

    @property
    def is_broken(self) -> bool:
        """Whether its start failed, or a process of it that ran is gone or does not answer; Serve replaces that."""
        return self.has_failed or self.status == "UNHEALTHY"

    @property
    def essence(self) -> str:
        """The last lines of the message, which name the cause."""
        lines = [line for line in self.message.strip().splitlines() if line.strip()]
        return "\n".join(lines[-6:]) or "Serve gave no reason; see session_latest/logs/serve in Ray's session folder."

    @property
    def is_leaving(self) -> bool:
        """Whether the application is being removed."""
        return self.status == "DELETING"

    @property
    def is_running(self) -> bool:
        """Whether all replicas of the application have started."""
        return self.status == "RUNNING"


@dataclass(frozen=True)
class ServeProcess:
    """A process that Serve has started. `log`: path of its log in the folder of Ray's logs on its node; empty: none
    yet."""

    application: str
    deployment: str
    node_id: str
    log: str


def serve_processes() -> list[ServeProcess]:
    """Return the processes of all applications, without those that still wait for a node."""
    return [
        ServeProcess(name, deployment, replica["node_id"], replica.get("log_file_path") or "")
        for name, application in application_details().items()
        for deployment, each in application["deployments"].items()
        for replica in each["replicas"]
        if replica.get("node_id")
    ]


def application_details() -> dict[str, Any]:
    """Return what Serve knows of every application, by name; nothing if no Serve runs."""
    client = serve_client()
    details: dict[str, Any] = within(ANSWER_S, client.get_serve_details)["applications"] if client else {}
    return details


def serve_client() -> Any:
    """Return this process's client of the running Serve; None if no Serve runs."""
    from ray.serve.context import _get_global_client

    return within(ANSWER_S, _get_global_client, raise_if_no_controller_running=False)


def application_states() -> dict[str, ApplicationState]:
    """Return the state of every application by name; empty if Serve does not run.

    `serve.status()` would return the same, but it pickles Serve's router once per deployment (30 ms each), in the
    calling process and again in Serve's controller. Several calls a second would slow down gpu-lets that start.
    """
    states = {}
    client = serve_client()
    for each in within(ANSWER_S, client.list_serve_statuses) if client else ():
        messages = (each.app_status.message, *(deployment.message for deployment in each.deployment_statuses))
        text = "\n".join(message for message in messages if message)
        states[each.name] = ApplicationState(str(each.app_status.status.value), text)
    return states


def gpulets_of(states: Mapping[str, ApplicationState]) -> frozenset[str]:
    """Return the applications of gpu-lets, without those that are being removed."""
    return frozenset(n for n, state in states.items() if n.startswith(GPULET_PREFIX) and not state.is_leaving)


def delete_applications(names: Sequence[str], *, waits: bool = True) -> None:
    """Drain and remove applications; return when they are gone, or at once.

    Raises:
        EnvironmentFaultError: Serve does not remove an application.
    """
    try:
        within(_DELETES_S, serve_client().delete_apps, list(names), blocking=waits)
    except TimeoutError as error:
        raise EnvironmentFaultError(f"{error} See `ray status`, and try again.") from error
