"""Serve applications, built by the process that deploys them.

When Serve gets an application as a config, it builds the application in another process, which imports Ray, Serve and
the application, and then ends. That takes as long as starting a replica and happens before it, for every application
(4.0 of 8.9 s for a gpu-let on two busy cores). `serve.run` builds in the calling process; the functions here do that
for a whole config. They set the same versions as Serve, so that deploying in both ways in turn restarts nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from tenuto.deployments.process.limits import within
from tenuto.deployments.serve.config import CONTROL_APPLICATION, ServeConfig, is_ours
from tenuto.deployments.serve.states import application_states, delete_applications, serve_client

# limit: Serve's controller takes a config in well under a second, but a fresh one must first read its state
_APPLIES_S = 60.0


def deploy_applications(config: ServeConfig) -> None:
    """Run the applications of a Serve config, and remove all other applications of ours. Serve must run. Returns before
    the applications run."""
    running = application_states()
    names = {application.name for application in config.applications}
    _deploy(config, names)
    gone = [name for name, state in running.items() if is_ours(name) and name not in names and not state.is_leaving]
    if gone:
        delete_applications(gone, waits=False)


def start_controller(config: ServeConfig) -> None:
    """Run the controller of a Serve config, beside what runs. Serve must run. Returns before the controller runs."""
    _deploy(config, {CONTROL_APPLICATION})


def _deploy(config: ServeConfig, names: Collection[str]) -> None:
    import ray
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(config.to_data())
    schema.applications = [application for application in schema.applications if application.name in names]
    _update_all_at_once(schema)
    client = serve_client()
    try:
        # There is no public call for this: `serve.run_many` waits until Serve's proxies answer.
        deploy = client._controller.deploy_applications
        built = {app.name: _built(app, schema.logging_config) for app in schema.applications}
        arguments = dict.fromkeys(built, _application_arguments())
    except (AttributeError, ImportError, TypeError):  # a Ray with another kind of Serve, which must build by itself
        within(_APPLIES_S, client.deploy_apps, schema)
        return
    ray.get(deploy.remote(built, arguments), timeout=_APPLIES_S)


def _update_all_at_once(schema: Any) -> None:
    """Let all replicas of a deployment take a new `user_config` at the same time.

    By default Serve updates a fifth of the replicas (at least one) at a time, and waits while one is pending. When a
    node is lost, the replica that finds no place to start would keep all others from the new plan. Nothing restarts: a
    running replica takes a `user_config` in place.
    """
    for application in schema.applications:
        for deployment in application.deployments:
            if "rolling_update_percentage" in type(deployment).model_fields:  # older Rays do not have it
                deployment.rolling_update_percentage = 1.0


def import_applications(config: ServeConfig) -> None:
    """Import the modules that `deploy_applications` needs for a config, so that the first change need not."""
    for application in config.applications:
        importlib.import_module(application.module)


def _built(schema: Any, logging_config: Any) -> list[bytes]:
    """Return the messages to Serve for an application: one for each of its deployments, with the config's options."""
    from ray._common.utils import import_attr
    from ray.serve._private.build_app import build_app
    from ray.serve._private.deploy_utils import get_app_code_version, get_deploy_args
    from ray.serve.generated.serve_pb2 import DeploymentArgs

    application = build_app(import_attr(schema.import_path)(schema.args), name=schema.name)
    chosen = schema.logging_config or logging_config
    logs = {} if chosen is None else {"logging_config": chosen.model_dump()}
    options = {entry.name: entry.model_dump(exclude_unset=True) for entry in schema.deployments}
    version = get_app_code_version(schema)
    requests = []
    for deployment in application.deployments:
        own_options = options.get(deployment.name, {})
        at_once = own_options.pop("rolling_update_percentage", None)
        made = deployment.options(**{**logs, **own_options})
        if at_once is not None:  # `options` does not take it (Ray 2.60)
            made._deployment_config.rolling_update_percentage = at_once
        is_ingress = deployment.name == application.ingress_deployment_name
        arguments = get_deploy_args(
            made.name,
            made._replica_config,
            ingress=is_ingress,
            deployment_config=made._deployment_config,
            version=version,
            route_prefix=schema.route_prefix if is_ingress else None,
        )
        sent = DeploymentArgs(
            deployment_name=arguments["deployment_name"],
            deployment_config=arguments["deployment_config_proto_bytes"],
            replica_config=arguments["replica_config_proto_bytes"],
            deployer_job_id=arguments["deployer_job_id"],
            ingress=is_ingress,
        )
        if arguments["route_prefix"]:
            sent.route_prefix = arguments["route_prefix"]
        requests.append(sent.SerializeToString())
    return requests


def _application_arguments() -> bytes:
    from ray.serve.generated.serve_pb2 import ApplicationArgs

    return bytes(ApplicationArgs(external_scaler_enabled=False).SerializeToString())
