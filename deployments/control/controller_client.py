"""The client of the controller, which runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from tenuto.deployments.control.controller_process import ControllerReplica
from tenuto.deployments.control.interface import AdvisedPlan
from tenuto.deployments.control.version_edits import Edited
from tenuto.deployments.process.limits import ANSWER_S, within
from tenuto.deployments.serve.config import CONTROL_APPLICATION
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.wire.status import ControllerState, LogLine
from tenuto.errors import EnvironmentFaultError, TenutoError
from tenuto.placement import Workload

P = ParamSpec("P")
T = TypeVar("T")
_METHOD_S = 40.0  # limit: the controller itself gives a method 30 s


class ControllerClient:
    """Calls the methods of the `ControllerReplica` on the cluster that this process is connected to.

    Every method raises what that method raises, and `EnvironmentFaultError` when the controller does not answer.
    """

    def pause(self, *, paused: bool) -> ControllerState:
        """Change nothing from now on, or change again; return the state."""
        return self._call(ControllerReplica.pause, paused)

    def state(self) -> ControllerState:
        """Return mode, change under way, measured and planned rates."""
        return self._call(ControllerReplica.state)

    def log(self, limit: int) -> list[LogLine]:
        """Return the newest entries of the log, oldest first."""
        return self._call(ControllerReplica.log, limit)

    def advice(self) -> AdvisedPlan:
        """Return the advised plan."""
        return self._call(ControllerReplica.advice)

    def deploy(self, deployment: Deployment, by: str, why: str) -> int:
        """Want another deployment; return its number. `by` and `why` are for the history."""
        return self._call(ControllerReplica.deploy, deployment.model_dump(mode="json"), by, why)

    def workload(self) -> Workload:
        """Return the declared workload."""
        return self._call(ControllerReplica.workload)

    def set_model(self, entry: Mapping[str, Any], *, add: bool) -> Edited:
        """Add a model to the workload, or replace its entry."""
        return self._call(ControllerReplica.set_model, entry, add=add)

    def remove_model(self, name: str) -> Edited:
        """Take a model out of the workload."""
        return self._call(ControllerReplica.remove_model, name)

    def set_version(self, model: str, version: str, terms: Mapping[str, Any], entry: Mapping[str, Any]) -> Edited:
        """Add a version of a model, or change its share of the requests."""
        return self._call(ControllerReplica.set_version, model, version, terms, entry)

    def promote(self, model: str, version: str) -> Edited:
        """Let a version take the rest of the requests."""
        return self._call(ControllerReplica.promote, model, version)

    def take_back(self, model: str, version: str) -> Edited:
        """Send a version no more requests and end it."""
        return self._call(ControllerReplica.take_back, model, version)

    def _call(
        self,
        method: Callable[Concatenate[ControllerReplica, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        from ray import serve
        from ray.exceptions import RayTaskError
        from ray.serve.exceptions import RayServeException

        try:
            handle = within(ANSWER_S, serve.get_app_handle, CONTROL_APPLICATION)
            call: Any = handle.options(method_name=method.__name__).remote(*args, **kwargs)
            answer: T = call.result(timeout_s=_METHOD_S)
        except RayTaskError as error:
            if isinstance(error.cause, TenutoError):
                raise error.cause from error
            raise EnvironmentFaultError(f"the controller failed: {error.cause}") from error
        except RayServeException as error:
            raise EnvironmentFaultError("the controller is starting. Try again in a few seconds.") from error
        except TimeoutError as error:
            raise EnvironmentFaultError("the controller does not answer. See `tenuto control log`.") from error
        return answer
