"""Finding gpu-lets and dispatchers over Ray. Their applications say where they listen, once they are ready."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tenuto.deployments.process.limits import within
from tenuto.deployments.serve.config import (
    CONTROL_APPLICATION,
    ENTRY_APPLICATION,
    OFFLINE_APPLICATION,
    application_name,
    dispatcher_name,
)
from tenuto.deployments.serve.states import application_states, gpulets_of
from tenuto.deployments.wire.peer import Endpoint, Finder
from tenuto.deployments.wire.status import Beside, DispatchingStatus
from tenuto.errors import EnvironmentFaultError

_READY_S = 30.0  # limit: for the answer of a process that may still be starting
_ANSWER_S = 5.0  # limit: for the answer of a process that runs


def find_gpulet(gpulet_id: str) -> Finder:
    """Return the function that asks a gpu-let's application for its endpoint; waits while its replica starts."""
    return _find(application_name(gpulet_id))


def find_dispatcher(sub_cluster: str) -> Finder:
    """Return the function that asks a dispatcher's application for its endpoint; waits while its replica starts."""
    return _find(dispatcher_name(sub_cluster))


def find_gateway() -> Finder:
    """Return the function that asks the only gateway, which schedules by itself, where its dispatcher listens."""
    return _find(ENTRY_APPLICATION)


def find_store() -> Finder:
    """Return the function that asks the store of batches where it listens; waits while its process starts."""
    return _find(OFFLINE_APPLICATION)


def own_application() -> str:
    """Return the name of the Serve application that this process is a replica of."""
    from ray import serve

    return str(serve.get_replica_context().app_name)


def gateway_status() -> DispatchingStatus:
    """Return the dispatchers' report, from any gateway. This blocks, so do not call it on an event loop.

    Raises:
        EnvironmentFaultError: no gateway answers.
    """
    from ray import serve

    try:
        handle = within(_ANSWER_S, serve.get_app_handle, ENTRY_APPLICATION)
        status: DispatchingStatus = handle.status.remote().result(timeout_s=_ANSWER_S)
    except Exception as error:  # Ray and Serve raise many kinds; a dispatcher that restarts causes a timeout
        raise EnvironmentFaultError(f"no gateway answers: {type(error).__name__}: {error}") from error
    return status


def retire_controller(limit_s: float) -> None:
    """Let the controller look no more, before applications are removed: it would bring them back. When it does not
    answer within `limit_s`, it is left as it is."""
    from ray import serve

    with suppress(Exception):  # Ray and Serve raise many kinds; it may not run
        within(limit_s, serve.get_app_handle, CONTROL_APPLICATION).retire.remote().result(timeout_s=limit_s)


async def beside_gateways() -> Beside:
    """Return the controller's status (`ControllerReplica.shown`). If no controller runs, return which gpu-lets run."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    offline = None
    with suppress(RayServeException, TimeoutError):
        store = await asyncio.to_thread(within, _ANSWER_S, serve.get_app_handle, OFFLINE_APPLICATION)
        async with asyncio.timeout(_ANSWER_S):
            offline = await store.status.remote()
    try:
        handle = await asyncio.to_thread(within, _ANSWER_S, serve.get_app_handle, CONTROL_APPLICATION)
    except RayServeException:
        return Beside(gpulets=gpulets_of(await asyncio.to_thread(application_states)), offline=offline)
    async with asyncio.timeout(_READY_S):
        return Beside(await handle.shown.remote(), offline=offline)


def _find(application: str) -> Finder:
    async def find() -> Endpoint:
        import ray
        from ray import serve

        handle = await asyncio.to_thread(within, _READY_S, serve.get_app_handle, application)
        async with asyncio.timeout(_READY_S):
            endpoint: Endpoint = await handle.endpoint.remote(ray.get_runtime_context().get_node_id())
        return endpoint

    return find
