"""What Serve says of its applications."""

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
    """One application as Serve has it. `message` says why it is broken, or what it waits for."""

    status: str
    message: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether Serve gave it up."""
        return self.status in ("DEPLOY_FAILED", "UNHEALTHY")

    @property
    def essence(self) -> str:
        """The last lines of its message, where the cause is."""
        lines = [line for line in self.message.strip().splitlines() if line.strip()]
        return "\n".join(lines[-6:]) or "Serve gave no reason; see session_latest/logs/serve in Ray's session folder."

    @property
    def is_leaving(self) -> bool:
        """Whether it is being removed."""
        return self.status == "DELETING"

    @property
    def is_running(self) -> bool:
        """Whether all of its replicas are started."""
        return self.status == "RUNNING"


@dataclass(frozen=True)
class ServeProcess:
    """A process that Serve has started. `log`: its path in the folder of Ray's logs on its node; empty: none yet."""

    application: str
    deployment: str
    node_id: str
    log: str


def serve_processes() -> list[ServeProcess]:
    """Return those of all applications; one that still waits for a node is none."""
    client = serve_client()
    details = within(ANSWER_S, client.get_serve_details) if client else {"applications": {}}
    return [
        ServeProcess(name, deployment, replica["node_id"], replica.get("log_file_path") or "")
        for name, application in details["applications"].items()
        for deployment, each in application["deployments"].items()
        for replica in each["replicas"]
        if replica.get("node_id")
    ]


def serve_client() -> Any:
    """Return this process's client of the Serve that runs; None where none does."""
    from ray.serve.context import _get_global_client

    return within(ANSWER_S, _get_global_client, raise_if_no_controller_running=False)


def application_states() -> dict[str, ApplicationState]:
    """Return every application by name; none where Serve does not run.

    `serve.status()` says the same after having pickled Serve's router once per deployment, 30 ms each, in the process
    that asks and again in Serve's controller: who asks several times a second while gpu-lets start slows them down.
    """
    found = {}
    client = serve_client()
    for one in within(ANSWER_S, client.list_serve_statuses) if client else ():
        messages = (one.app_status.message, *(deployment.message for deployment in one.deployment_statuses))
        text = "\n".join(message for message in messages if message)
        found[one.name] = ApplicationState(str(one.app_status.status.value), text)
    return found


def gpulets_of(states: Mapping[str, ApplicationState]) -> frozenset[str]:
    """Return the applications of gpu-lets that are to stay."""
    return frozenset(n for n, state in states.items() if n.startswith(GPULET_PREFIX) and not state.is_leaving)


def delete_applications(names: Sequence[str], *, waits: bool = True) -> None:
    """Drain and remove applications; return when they are gone, or at once.

    Raises:
        EnvironmentFaultError: Serve does not remove one.
    """
    try:
        within(_DELETES_S, serve_client().delete_apps, list(names), blocking=waits)
    except TimeoutError as error:
        raise EnvironmentFaultError(f"{error} See `ray status`, and try again.") from error
